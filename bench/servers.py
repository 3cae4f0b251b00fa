"""The servers under measurement: how each is started, in its own process, with the same BLAS loaded
first.

Rule: one table; a server is a line of it. Each has the flags that it needs to serve several clients
at all (vllm-mlx answers one otherwise) and no others, except where its name says so.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.folders import chatting
from mlxspec import blas

START_TIMEOUT = 180  # seconds
NAME = "default_model"  # what mlx_lm.server calls the one that it was started with
# The arguments: the BLAS, or nothing; module:function; what that function finds in sys.argv.
LAUNCH = """
import ctypes, importlib, sys
library, entry, *sys.argv[1:] = sys.argv[1:]
if library: ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
module, function = entry.split(":")
sys.argv[0] = function
getattr(importlib.import_module(module), function)()
"""
SUFFIX = json.dumps({"method": "suffix", "num_speculative_tokens": 8})
HEADS = ("mtp", "assistant", "eagle3", "dflash", "dflash2", "dspark")  # kinds of bench/tiny.py
OWN_HEAD = ("head chat", "head code", "head T=0.7")  # workloads of the built-in model's head
DEPTH = 3  # tokens that every server drafts with a head in every step, where heads are compared


@dataclass(frozen=True, slots=True)
class Server:
    """`arguments` have {model} and {port} in them. `plain` and `drafted` are what turns its
    drafting off and on, where the probes want it so, with {draft} for a small model; None: it
    cannot draft. `headed`: the same for a head of the kinds `heads`. `copies`: it drafts what the
    prompt has. `only`: the workloads that it is measured in, else all. `package`: what pip
    installs, empty for this checkout.

    `fills`: its /v1/completions knows a suffix. `chats`: it has no /v1/completions, so its model
    gets a folder that `folders.chatting` makes."""

    name: str
    venv: str
    package: str
    entry: str
    arguments: tuple[str, ...]
    setting: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    drafted: tuple[str, ...] | None = None
    headed: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    copies: bool = False
    only: tuple[str, ...] = ()
    fills: bool = False
    chats: bool = False
    env: tuple[tuple[str, str], ...] = ()
    size: str = "0.4 GB"

    def command(
        self, python: str, model: Path, setting: Sequence[str], draft: Path | None = None
    ) -> list[str]:
        """{port} is left to who starts it."""
        library = (
            "" if self.entry.startswith("mlxspec.") else str(blas.load() or "")
        )  # mlxspec finds it itself
        arguments = [
            part.replace("{model}", str(model)).replace("{draft}", str(draft))
            for part in (*self.arguments, *setting)
        ]
        return [python, "-c", LAUNCH, library, self.entry, *arguments]


OURS = (
    *("serve", "{model}", "--port", "{port}", "--name", NAME, "--log-level", "warning"),
    *("--loop-guard", "off"),  # a peer's answer goes on to its limit
)
VLLM = (
    "serve",
    "{model}",
    "--port",
    "{port}",
    "--served-model-name",
    NAME,
    "--continuous-batching",
)
RAPID = ("serve", "{model}", "--port", "{port}", "--served-model-name", NAME)
OFF = ("--speculate", "off")
MLX_VLM = Server(
    "mlx-vlm",
    "mlx-vlm",
    "mlx-vlm==0.7.10",
    "mlx_vlm.server:main",
    ("--model", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "WARNING"),
    headed=("--draft-model", "{draft}", "--draft-block-size", str(DEPTH + 1)),  # with the last one
    heads=("mtp", "assistant"),  # its llama and qwen3 hand out no hidden states to draft from
    chats=True,
    size="1 GB",
)
SERVERS = {
    s.name: s
    for s in (
        Server(
            "mlxspec",
            "mlxspec",
            "",
            "mlxspec.cli:main",
            OURS,
            plain=OFF,
            drafted=("--draft", "{draft}"),
            headed=("--draft", "{draft}", "--draft-depth", str(DEPTH)),
            heads=HEADS,
            copies=True,
            fills=True,
        ),
        Server("mlxspec-plain", "mlxspec", "", "mlxspec.cli:main", OURS, setting=OFF, plain=OFF),
        Server(
            "mlxspec-no-head",
            "mlxspec",
            "",
            "mlxspec.cli:main",
            OURS,
            setting=("--draft", "off"),
            copies=True,
            only=OWN_HEAD,
        ),
        Server(
            "mlx_lm.server",
            "mlx-lm",
            "mlx-lm==0.32.2",
            "mlx_lm.server:main",
            ("--model", "{model}", "--port", "{port}", "--log-level", "WARNING"),
            drafted=("--draft-model", "{draft}", "--num-draft-tokens", "4"),
        ),
        Server("vllm-mlx", "vllm-mlx", "vllm-mlx==0.6.0", "vllm_mlx.cli:main", VLLM, size="6 GB"),
        Server(
            "vllm-mlx-paged",
            "vllm-mlx",
            "vllm-mlx==0.6.0",
            "vllm_mlx.cli:main",
            (*VLLM, "--use-paged-cache"),
            size="6 GB",
        ),
        Server(
            "rapid-mlx", "rapid-mlx", "rapid-mlx==0.16.10", "rapid_mlx.cli:main", RAPID, size="6 GB"
        ),
        Server(
            "rapid-mlx-suffix",
            "rapid-mlx",
            "rapid-mlx==0.16.10",
            "rapid_mlx.cli:main",
            RAPID,
            setting=("--speculative-config", SUFFIX),
            drafted=("--speculative-config", SUFFIX),
            copies=True,
            only=("edit", "chat", "humaneval", *OWN_HEAD),
            size="6 GB",
        ),
        MLX_VLM,
        replace(MLX_VLM, name="mlx-vlm-apc", env=(("APC_ENABLED", "1"),)),  # with its prefix cache
    )
}
DEFAULT = (
    "mlxspec",
    "mlxspec-no-head",
    "mlx_lm.server",
    "vllm-mlx",
    "rapid-mlx",
    "rapid-mlx-suffix",
    "mlx-vlm",
)


def drafting(server: Server, head: Path | None) -> Server:
    """mlxspec with the model's own head, which it cannot find by itself here: all servers get the
    directory of the model, and with its name and the user's cache mlxspec would know more."""
    if server.name != "mlxspec" or not head:
        return server
    return replace(server, setting=("--draft", os.fspath(head)))


class Ended(Exception):
    """A server that does not start, died, or does not answer any more."""


@dataclass(slots=True)
class Running:
    """A server that answers at `url`; requests name `model`. `began` is time.perf_counter() when its
    process was started."""

    line: Server
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    model: str = NAME

    @property
    def name(self) -> str:
        return self.line.name

    def check(self) -> None:
        """Raises Ended where the process has ended."""
        if (status := self.process.poll()) is not None:
            raise Ended(f"{self.name} ended with status {status}: {last(self.log)}")

    def end(self) -> None:
        """With SIGTERM, or after 30 s with SIGKILL."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


def environment(home: Path) -> dict[str, str]:
    """The same for all: no network, no telemetry, files only below `home`, as many BLAS threads as
    cores, and nobody's own settings."""
    home.mkdir(parents=True, exist_ok=True)
    own = ("MLXSPEC_", "PYTHON", "XDG_", "HF_", "VLLM_", "RAPID_", "MLX_VLM_", "APC_")
    own += ("MLX_MAX_OPS",)  # which we set for ourselves, in mlxspec/blas.py
    return {
        "OPENBLAS_NUM_THREADS": str(os.cpu_count()),
        **{name: value for name, value in os.environ.items() if not name.startswith(own)},
        "HOME": str(home),
        "MLXSPEC_CACHE_DIR": str(home / "mlxspec"),
        "HF_HUB_OFFLINE": "1",
        "RAPID_MLX_TELEMETRY": "0",
        "RAPID_MLX_DISABLE_MODEL_DOWNLOADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def start(
    server: Server,
    python: str,
    model: Path,
    env: dict[str, str],
    log: Path,
    setting: Sequence[str] | None = None,
    draft: Path | None = None,
) -> Running:
    """A server that answers /health, with `setting` instead of its own where one is given. Raises
    Ended where it does not within START_TIMEOUT."""
    if server.chats:
        model = chatting(model, log.with_suffix(".model"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = server.command(python, model, server.setting if setting is None else setting, draft)
    command = [part.replace("{port}", str(port)) for part in command]
    began = time.perf_counter()
    with log.open("wb") as out:  # somewhere without a mlxspec/ that python would find first
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env | dict(server.env), cwd=log.parent
        )
    running = Running(server, f"http://127.0.0.1:{port}", process, log, began)
    if server.chats:
        running.model = str(model)  # it serves a model by its path
    try:
        while not _answers(running.url):
            running.check()
            if time.perf_counter() - began > START_TIMEOUT:
                raise Ended(f"{server.name} did not answer within {START_TIMEOUT} s: {last(log)}")
            time.sleep(0.05)
    except BaseException:
        running.end()
        raise
    return running


@contextmanager
def started(name: str, model: Path) -> Iterator[str]:
    """The base URL of a server of SERVERS that this interpreter can start, ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        env = environment(Path(scratch) / "home") | {"PYTHONPATH": str(Path(__file__).parents[1])}
        running = start(SERVERS[name], sys.executable, model, env, Path(scratch) / "log")
        try:
            yield running.url
        finally:
            running.end()


def last(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "its log is empty"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False
