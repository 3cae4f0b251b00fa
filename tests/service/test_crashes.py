"""Crash counting and safe mode, and the real program on a socket that it was handed."""

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.server import unavailable
from mlxspec.service import crashes
from mlxspec.service.crashes import SAFE_CRASHES, WINDOW_S
from tests.service.activator import Activator
from tests.support import tiny
from tests.support.parameter_rows import only
from tests.tiny_tokenizer import save_tokenizer

STATE = "Library/Application Support/mlxspec/crashes.txt"


def crash_at(folder: Path, times: list[float]) -> list[int]:
    """How many crashes each process finds that starts at one of `times` and crashes."""
    file, found = folder / "crashes.txt", []
    for at in times:
        crashed = crashes.read(file, at)
        crashes.write(file, [*crashed, at])
        found.append(len(crashed))
    return found


def test_three_crashes_bring_safe_mode(tmp_path: Path) -> None:
    assert crash_at(tmp_path, [1000.0 + 10 * n for n in range(6)]) == [0, 1, 2, 3, 3, 3]
    assert crash_at(tmp_path, [1060 + WINDOW_S]) == [0]


def test_crashes_far_apart_are_forgotten(tmp_path: Path) -> None:
    assert max(crash_at(tmp_path, [1000 + n * WINDOW_S * 0.6 for n in range(50)])) < SAFE_CRASHES


@pytest.mark.parametrize("now", [100.0, 1e9])
def test_a_clock_that_was_set_forgets(tmp_path: Path, now: float) -> None:
    assert crash_at(tmp_path, [5000, 5010, 5020, 5030, now])[3:] == [3, 0]


def test_the_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "deep/crashes.txt"
    crashes.write(file, [1000.0, 1010.0])
    assert crashes.read(file, 1020) == [1000, 1010] and os.listdir(file.parent) == ["crashes.txt"]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("text", [b"", b"x", b"[1.0]", b"nan inf", b"\0", b"\xff"])
def test_a_damaged_file_is_ignored(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").write_bytes(text)
    assert crashes.read(tmp_path / "x", 1e9) == []


def test_an_unwritable_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    crashes.write(tmp_path / "x/crashes.txt", [1000.0])
    assert crashes.read(tmp_path / "x/crashes.txt", 1001.0) == []


def test_is_running(bare_settings: None) -> None:
    """Until the process has ended, in whatever way."""
    code = (
        "from mlxspec.files import lock; from mlxspec.service import crashes\n"
        "with lock(crashes.files()[1]): print(1, flush=True); input()"
    )
    assert not crashes.is_running()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdout.readline()
        assert crashes.is_running() and crashes.is_running()
        child.kill()
    assert not crashes.is_running()


def test_the_log_is_rotated(tmp_path: Path) -> None:
    """In a process of its own, which loses no line."""
    file = tmp_path / "a.log"
    code = (
        "import sys, threading, time; from pathlib import Path; from mlxspec.service import crashes\n"
        "crashes.LOG_BYTES, crashes.ROTATE_S = 20, 0.001\n"
        f"threading.Thread(target=crashes.rotate, args=(Path({str(file)!r}),), daemon=True).start()\n"
        "for n in range(30):\n"
        "    print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)\n"
        "    time.sleep(0.02)"
    )
    with file.open("ab") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=out, check=True, timeout=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    kept = ((tmp_path / "a.log.1").read_text() + file.read_text()).split()
    assert kept == [str(n) for n in range(30 - len(kept), 30)] and len(kept) > 7


# ---- the real program


def post(url: str, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    data = {"messages": messages, "max_tokens": 12, "seed": 3, "ignore_eos": True, **body}
    path = f"{url}/v1/chat/completions"
    with urllib.request.urlopen(path, json.dumps(data).encode(), timeout=100) as answer:
        return json.load(answer)


def reply(url: str) -> str:
    return str(post(url)["choices"][0]["message"]["content"])


def health(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.load(answer)


def wait_for(found: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def save(path: Path, **over: int) -> None:
    mx.random.seed(1)
    model: nn.Module = tiny.model("llama")
    config = {**tiny.CONFIGS["llama"], **over}
    if over:
        from mlx_lm.models import llama

        model = llama.Model(llama.ModelArgs(model_type="llama", **config))
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))


def service(home: Path, *words: str) -> Activator:
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")}
    command = ["serve", "--kv-blocks", "32", *words]
    return Activator(command, bare | {"HOME": str(home)}, home / "log")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_request_starts_it_and_crashes_bring_safe_mode(model: Path) -> None:
    """With the same answer in safe mode."""
    file = model / STATE
    now = time.time()
    crashes.write(file, [now - 20, now - 10])
    with service(model, str(model)) as running:
        assert running.process is None
        found = health(running.url)
        assert found["loaded"] == [] and "note" not in found  # it answers before a model is loaded
        first = reply(running.url)
        assert health(running.url)["loaded"] == [model.name]
        assert len(crashes.read(file, time.time())) == 3
        running.signal()
        wait_for(lambda: running.statuses)
        assert reply(running.url) == first
        assert health(running.url)["note"].startswith("safe mode")
        running.signal(signal.SIGTERM)
        wait_for(lambda: len(running.statuses) == 2)
    assert running.statuses == [-signal.SIGKILL, 0]
    assert len(crashes.read(file, time.time())) == 3  # its own end was clean
    log = (model / "log").read_text()
    assert "--speculate off" in log and "--kernels off" in log


def refusal(url: str) -> Any:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, pad="x" * 100_000)  # more than is read at once
    with caught.value as answer:
        assert answer.code == 503
        return json.load(answer)


@pytest.mark.parametrize("settings", only(["prot = 9000", ""], 0))
def test_a_server_that_cannot_start_says_why(model: Path, settings: str) -> None:
    """It is no crash, and no loop of restarts."""
    file = model / ".config/mlxspec/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(settings)
    with service(model, str(model) if settings else "no-such-model") as running:
        for _ in range(2):
            assert refusal(running.url)["error"]["message"].startswith("mlxspec cannot start: ")
        assert running.statuses == []
        running.signal(signal.SIGTERM)
        wait_for(lambda: running.statuses)
    assert crashes.read(model / STATE, time.time()) == []


def test_a_file_that_may_not_be_read_is_told(
    bare_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """macOS keeps some folders from what launchd starts."""

    def serve_model(config: Any, handed: socket.socket, **_: Any) -> int:
        handed.close()
        raise PermissionError(errno.EPERM, "Operation not permitted", "/Volumes/disk/model")

    told: list[str] = []
    monkeypatch.setattr("mlxspec.server.process.serve_model", serve_model)
    monkeypatch.setattr(crashes, "refuse", lambda listener, reason: told.append(reason))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert crashes.serve({}, listener, tmp_path / "log") == 0
    assert "Operation not permitted: '/Volumes/disk/model'" in told[0]
    assert crashes.read(crashes.files()[0], time.time()) == []


def test_a_refusal_bears_idle_clients_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "REFUSE_S", 1.0)
    monkeypatch.setattr(unavailable, "CLIENT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        idle = [socket.create_connection(address) for _ in range(3)]
        thread = threading.Thread(target=crashes.refuse, args=(listener, "a reason"), daemon=True)
        thread.start()
        found = refusal(f"http://127.0.0.1:{address[1]}")
        assert found["error"]["message"] == "mlxspec cannot start: a reason"
        thread.join(10)
        assert not thread.is_alive()
        for one in idle:
            one.close()


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_an_idle_service_gives_its_memory_back(tmp_path: Path) -> None:
    """The next request gets the same answer, with keep-alives while the model is loaded, and finds
    its prompt on the disk."""
    save(tmp_path, hidden_size=1024, intermediate_size=32768, num_attention_heads=16)
    weights = (tmp_path / "model.safetensors").stat().st_size
    flags = ("--idle-ttl", "2", "--keepalive-s", "0.1")
    with service(tmp_path, str(tmp_path), *flags) as running:
        assert health(running.url)["loaded"] == []
        asleep = rss(running.pid)
        prompt = [{"role": "user", "content": "hello world " * 40}]
        first = post(running.url, messages=prompt)["choices"][0]["message"]["content"]
        awake = rss(running.pid)
        for _ in range(3):
            wait_for(lambda: health(running.url)["loaded"] == [])
            again = rss(running.pid)
            assert awake - asleep > 0.9 * weights and awake - again > 0.6 * weights
            body = {"messages": prompt, "max_tokens": 12, "seed": 3, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            path = f"{running.url}/v1/chat/completions"
            with urllib.request.urlopen(path, json.dumps(body).encode(), timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            pieces = [part["choices"][0]["delta"] for part in parts if part["choices"]]
            assert "".join(piece.get("content") or "" for piece in pieces) == first
            assert lines.count(": keep-alive") > 2, lines
            assert parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert crashes.read(tmp_path / STATE, time.time()) == []
