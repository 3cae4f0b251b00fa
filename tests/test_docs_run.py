"""Every command of the guides is run as it is written there, by a shell, beside a running server.

Hub ids name a small model and heads in a hub cache on the disk, agents are scripts that print their
variables, and port 8080 is that of the server. What cannot run here is in ELSEWHERE.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.heads import kinds
from tests.support.processes import Server

ROOT = Path(__file__).resolve().parents[1]
FAST = ("README.md",)
SLOW = tuple(
    f"docs/{name}.md"
    for name in "start clients configuration heads models operating ranks service slow speculation".split()
)
ELSEWHERE = {  # the first words of a command -> why it is not run
    "make serve": "runs what `mlxspec serve` runs, which is",
    "make test": "this",
    "uv tool install": "the package index",
    "npm install": "the package index; tests/clients installs the agents",
    "cd DIR": "torch; tests/heads writes the same file",
    "python -c": "torch; tests/heads writes the same file",
    ".venv/bin/python -m": "tests",
    "mlx.distributed_config": "several Macs",
    "mlx.launch": "several Macs",
    "mlxspec service logs": "a service; tests/service has one",
    "mlxspec search": "the hub; tests/commands has one",
    "mlxspec run": "a port of its own; tests/commands has one",
    "docker run": "Docker",
}
MAC = ("mlxspec service", "mlxspec menubar")  # elsewhere they say what is missing
AGENTS = "claude codex opencode aider qwen goose copilot llm".split()
HEADS = {
    "mlx-community/Qwen3.8-27B-MTP-4bit": "mtp/sidecar",
    "incoai/Qwen3.8-27B-DFlash2": "dflash2",
    "Qwen/Qwen3.5-27B": "mtp/sidecar",
}
READY = {"mlxspec serve": "served at http://", "mlxspec train": "time: about"}  # then it is stopped
END_S = 120
BENCH_S = 600


def commands(page: str) -> list[str]:
    """The lines of the page's blocks for a shell."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    text = "".join(blocks).replace("\\\n", "")
    return [line for line in text.splitlines() if line.split("#")[0].strip()]


LINES = [
    pytest.param(line, marks=() if page in FAST else pytest.mark.slow, id=f"{page}: {line[:60]}")
    for page in (*FAST, *SLOW)
    for line in dict.fromkeys(commands(page))
]


@dataclass(frozen=True)
class Home:
    """A user's machine: `variables` of a shell in the folder `work`, where a server runs at
    `port`."""

    work: Path
    variables: dict[str, str]
    port: str

    def run(self, line: str, ready: str = "") -> tuple[int, str]:
        """The status of a command as the page has it, but for the port and placeholders, and what
        it said. Once it says `ready` it gets Ctrl-C."""
        line = re.sub(r":8080\b", f":{self.port}", line).replace("--port 11434", "--port 0")
        line = re.sub(r"\bMODEL\b", "mlx-community/Qwen3-4B-4bit", line)
        port = "0" if line.startswith("mlxspec serve") else self.port
        said = self.work / "said"
        with said.open("w") as out:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {line}" if ready else line],
                cwd=self.work,
                env=self.variables | {"MLXSPEC_PORT": port},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if ready:
                end = time.monotonic() + END_S
                while ready not in said.read_text():
                    assert process.poll() is None and time.monotonic() < end, said.read_text()
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            process.communicate(b"y\n", BENCH_S if " bench " in line else END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said.read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    work = tmp_path_factory.mktemp("home")
    cache = work / "cache"
    built_in = cache / "models" / "smollm2-135m-instruct"
    for place in (work / "my-model", *(Path(f"{built_in}-{mode}") for mode in ("fp32", "4bit"))):
        shutil.copytree(kinds.TARGET, place)
    guides = "".join((ROOT / page).read_text("utf-8") for page in (*FAST, *SLOW))
    for name in {*re.findall(r"mlx-community/[\w.-]+", guides), *HEADS}:
        shown = work / "hub" / f"models--{name.replace('/', '--')}"
        files = kinds.DATA / HEADS[name] if name in HEADS else kinds.TARGET
        shutil.copytree(files, shown / "snapshots" / ("0" * 40))
        (shown / "refs").mkdir()
        (shown / "refs/main").write_text("0" * 40)
    programs = work / "bin"
    programs.mkdir()
    for name in AGENTS:
        (programs / name).write_text('#!/bin/sh\nenv | grep -v MLXSPEC_PORT\necho "$@"\n')
    for name, words in (("mlxspec", "-m mlxspec "), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (work / "code").mkdir()
    (work / "code/a.py").write_text("def f(x):\n    return x\n" * 9)
    (work / "my_program.py").write_text("import os\nprint(os.environ['OLLAMA_HOST'])\n")
    bare = {name: text for name, text in os.environ.items() if not name.startswith("MLXSPEC_")}
    variables = bare | {
        "HOME": str(work),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "MLXSPEC_CACHE_DIR": str(cache),
        "HF_HUB_CACHE": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    # An answer of this model ends only with the context.
    with Server(["--context", "256"], **variables) as server:
        yield Home(work, variables, server.url.rpartition(":")[2])


@pytest.mark.parametrize("line", LINES)
def test_a_command_does_what_the_page_says(line: str, home: Home) -> None:
    if reason := next((why for what, why in ELSEWHERE.items() if line.startswith(what)), ""):
        pytest.skip(f"needs {reason}")
    if line.startswith("curl") and not shutil.which("curl"):
        pytest.skip("needs curl")
    if line.startswith(MAC) and sys.platform == "darwin":
        pytest.skip("changes the user's services")
    ready = next((text for what, text in READY.items() if line.startswith(what)), "")
    status, said = home.run(line, ready)
    if line.startswith(MAC):
        assert status in (2, 4) and re.search("needs macOS|on a Mac|not installed", said), said
        return
    if status == 2 and re.match("mlxspec launch (--model \\S+ )?[a-z]", line):
        assert "own prompt takes about" in said and " of the context's 256 tokens" in said
        return
    assert status == (130 if line.startswith("mlxspec train") else 0), said
    if line.startswith("mlxspec launch"):
        assert home.port in said, "the agent was not told where the server is"


@pytest.mark.slow
def test_the_example_in_python_gets_an_answer(home: Home) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/start.md").read_text("utf-8"), re.M | re.S
    )
    code = code.replace(":8080", f":{home.port}")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=home.variables,
        capture_output=True,
        text=True,
        timeout=END_S,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_nothing_is_left_out_that_no_page_has() -> None:
    every = [line for page in (*FAST, *SLOW) for line in commands(page)]
    unused = [what for what in ELSEWHERE if not any(line.startswith(what) for line in every)]
    assert unused == []


TOOL = re.compile(r"python -m ((?:bench|tests)\.[\w.]+)([^`\n#|;)]*)")
TOOLS = sorted(
    {
        found
        for page in (*ROOT.glob("docs/*.md"), ROOT / "bench/README.md")
        for found in TOOL.findall(page.read_text("utf-8"))
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "words"), TOOLS, ids=lambda found: found.strip())
def test_a_measuring_tool_takes_its_flags(module: str, words: str) -> None:
    """What takes minutes to hours is not run."""
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_S)
    said = done.stdout + done.stderr
    assert "usage: " in said and "Traceback" not in said, said
    assert [flag for flag in re.findall(r"--[\w-]+", words) if flag not in said] == []
