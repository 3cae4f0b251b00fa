"""A picture of the status page while a server works: docs/page.png of the README.

Rule: the page and its figures are real. Clients ask the built-in model to edit code and to chat, as
`mlxspec bench` does, and Chromium takes the picture.
"""

import argparse
import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mlxspec.commands.bench import tasks_of

LIMIT = 150_000  # bytes
COLORS = 256
WIDTH, HEIGHT = 1280, 960
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def ask(url: str, content: str, tokens: int) -> None:
    """One answer, to its end."""
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"messages": messages, "max_tokens": tokens, "temperature": 0}).encode()
    sent = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=600) as answer:
        answer.read()


def work(url: str, prompts: Sequence[str], tokens: int, until: float) -> None:
    """Ask one after the other, again and again."""
    n = 0
    while time.monotonic() < until:
        ask(url, prompts[n % len(prompts)], tokens)
        n += 1


def take(url: str, seconds: float, file: Path) -> None:
    """Raises SystemExit where there is no Chromium, or the picture is too large."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        raise SystemExit("no Chromium: name one in CHROMIUM")
    until = time.monotonic() + seconds
    for workload in ("edits", "code", "chat"):
        prompts = [task.text for task in tasks_of(workload)]
        args = (url, prompts, 160, until + 5)
        threading.Thread(target=work, args=args, daemon=True).start()
        time.sleep(2)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(url)
        page.locator("#details summary").click()
        page.locator("#say").fill("What is the capital of France?")
        page.locator("#say").press("Enter")
        page.wait_for_timeout(1000 * max(0.0, until - time.monotonic()))
        page.screenshot(path=file)
        browser.close()
    seen = Image.open(file).convert("RGB")  # an octree keeps colours that are rare
    seen.quantize(COLORS, Image.Quantize.FASTOCTREE).save(file, optimize=True)
    if file.stat().st_size > LIMIT:
        raise SystemExit(f"{file} has {file.stat().st_size} bytes, more than {LIMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.picture", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="a server that is running")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/page.png"))
    args = parser.parse_args()
    take(args.url, args.seconds, args.file)


if __name__ == "__main__":
    main()
