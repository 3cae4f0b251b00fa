"""Runs the parts one after the other, each in a process of its own, and writes the report.

Rule: what a part has printed is kept, whether it ends, fails, hangs or crashes; the whole ends in
time.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bench.first_mac.commands import CLOCK, ELSEWHERE, ROOT, Elsewhere, Failed, Late, tail_of
from bench.first_mac.loaded import time_steps
from bench.first_mac.parts import PARTS

MINUTES = 15.0
OK, FAILED, NOT_HERE, NO_TIME = 0, 1, 3, 4  # how the process of a part ends
STATES = {OK: "ok", NOT_HERE: ELSEWHERE, NO_TIME: "cut: no time left"}
LEAST_S = 5.0  # with which a part is begun
LEAVE_S = 10.0  # in which a part tells that it has no more time, or takes back what it did


def words_of(name: str, model: str, seconds: float) -> list[str]:
    """The command of a part."""
    script = str(ROOT / "scripts/first-mac")
    return [sys.executable, script, "--part", name, "--seconds", f"{seconds:.1f}", model]


def run_part(name: str, model: str, seconds: float) -> tuple[str, str]:
    """How a part ended, and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words_of(name, model, seconds),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,  # to end what it has started too
        )
        try:
            code = process.wait(seconds + LEAVE_S)
        except subprocess.TimeoutExpired:
            code = NO_TIME
        finally:
            end(process)
        text = [contents(out)]
        if code not in (*STATES, FAILED):
            text += [f"ended with {code}:", tail_of(contents(errors))]
        return STATES.get(code, "FAILED"), "\n".join(filter(None, text))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part, and what it left."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of dead ones
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)


def contents(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace").strip()


def be_part(name: str, model: str, seconds: float) -> int:
    """What the process of a part does."""
    CLOCK.until = time.monotonic() + seconds
    try:
        for line in PARTS[name](model):
            print(line, flush=True)
    except Elsewhere as error:
        print(error)
        return NOT_HERE
    except Late as error:
        print(error)
        return NO_TIME
    except Failed as error:
        print(error)
        return FAILED
    except Exception as error:  # a part's fault is what the report is for
        print(str(error) or repr(error))
        return FAILED
    return OK


def without_names(text: str) -> str:
    """The text without the user's home, account and the computer's name: it will be sent to
    others."""
    secrets = {str(Path.home()): "~", Path.home().name: "USER", socket.gethostname(): "HOST"}
    secrets[socket.gethostname().partition(".")[0]] = "HOST"
    for secret, word in secrets.items():
        if len(secret) > 2 and secret != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", word, text)
    return text


@contextmanager
def written(place: Path) -> Iterator[Callable[[str], None]]:
    """Takes lines for the screen and the file."""
    with place.open("w", encoding="utf-8") as file:

        def say(line: str) -> None:
            line = without_names(line)
            print(line, flush=True)
            print(line, file=file, flush=True)

        yield say


def write_report(place: Path, names: list[str], model: str, seconds: float) -> int:
    """Returns how many parts failed. A part may take half of the time that is left, the last one
    all of it."""
    until = time.monotonic() + seconds
    failed = 0
    with written(place) as say:
        for name in names:
            print(f"{name} ...", file=sys.stderr)
            began = time.monotonic()
            left = until - began - 2 * LEAVE_S
            share = left if name == names[-1] else left / 2
            if share < LEAST_S:
                say(f"== {name}: not run: no time left\n")
                continue
            state, text = run_part(name, model, share)
            failed += state == "FAILED"
            say(f"== {name}: {state} ({time.monotonic() - began:.0f} s)\n{text}\n")
    return failed


def main(about: str) -> int:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", nargs="?", default="", help="default: the built-in model")
    parser.add_argument("--out", type=Path, default=Path("first-mac.txt"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all; %(default)g")
    parser.add_argument("--time-steps", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(NO_TIME))  # what was started is ended
    if args.time_steps:
        print(time_steps(args.model))
        return 0
    if args.part:
        return be_part(args.part, args.model, args.seconds)
    failed = write_report(args.out, args.parts, args.model, 60 * args.minutes)
    print(f"written to {args.out}", file=sys.stderr)
    return 1 if failed else 0
