"""The real program, started by an activator: by the first request, after a kill, in safe mode,
held."""

import json
import os
import signal
import socket
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

from mlxspec.service import daemon, ledger
from mlxspec.service.ledger import Ledger
from tests import tiny
from tests.service.activator import Activator
from tests.tiny_tokenizer import save_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
STATE = ".local/state/mlxspec/service.json"


def post(url: str, **body: Any) -> Any:
    data = json.dumps(
        {"messages": MESSAGES, "max_tokens": 12, "seed": 3, "ignore_eos": True, **body}
    ).encode()
    with urllib.request.urlopen(f"{url}/v1/chat/completions", data, timeout=100) as answer:
        return json.load(answer)


def said(url: str) -> str:
    return str(post(url)["choices"][0]["message"]["content"])


def read(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.load(answer)


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def save(path: Path, **over: int) -> None:
    mx.random.seed(1)
    model = tiny.model("llama")
    config = {**tiny.CONFIGS["llama"], **over}
    if over:
        from mlx_lm.models import llama

        model: nn.Module = llama.Model(llama.ModelArgs(model_type="llama", **config))
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))


def activator(home: Path, model: Path, *flags: str) -> Activator:
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")} | {
        "HOME": str(home)
    }
    command = [sys.executable, "-m", "mlxspec", "serve", str(model), "--kv-blocks", "32", *flags]
    return Activator(command, bare, home / "log")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def test_a_request_starts_it_and_a_kill_does_not_end_it(model: Path) -> None:
    """The third crash in a short time brings safe mode, and the same answer."""
    file = model / STATE
    ledger.write(file, Ledger(crashes=[time.time() - 20, time.time() - 10]))
    with activator(model, model) as service:
        assert service.process is None
        found = read(service.url)
        assert found["loaded"] == [] and "note" not in found  # it serves before any model is there
        first = said(service.url)
        assert read(service.url)["loaded"] == [model.name]
        assert ledger.read(file).open
        service.signal()
        wait_for(lambda: service.statuses)
        assert said(service.url) == first
        assert len(ledger.read(file).crashes) == 3
        assert read(service.url)["note"].startswith(
            "safe mode, without speculation: 3 crashes in 10 minutes"
        )
        service.signal(signal.SIGTERM)
        wait_for(lambda: len(service.statuses) == 2)
    assert service.statuses == [-signal.SIGKILL, 0]
    assert not ledger.read(file).open
    log = (model / "log").read_text()
    assert log.count("--speculate off") == 1 and "`mlxspec service restart` ends it" in log
    assert f"is served at {service.url}/v1" in log and f"curl {service.url}/v1/chat" in log


def refused(url: str) -> tuple[int, Any, str | None]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, pad="x" * 100_000)  # more than is read with the head
    with caught.value as answer:
        return answer.code, json.load(answer), answer.headers["Retry-After"]


def test_a_mistake_is_answered_and_no_loop(model: Path) -> None:
    """What cannot start stays, without a model, and says why; it does not crash again and again."""
    with activator(model, model, "--pin", "nobody") as service:
        code, found, after = refused(service.url)
        assert (code, after) == (503, "60")
        assert "pin = 'nobody' is none of the models" in found["error"]["message"]
        assert (
            found["reason"].endswith("then `mlxspec service restart`")
            and found["status"] == "unhealthy"
        )
        assert refused(service.url)[0] == 503 and service.statuses == []
    assert service.statuses == [0] and ledger.read(model / STATE).crashes == []


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (
            (),
            "port = 8080\nprot = 9000",
            "config.toml:2: there is no setting 'prot'; did you mean port?",
        ),
        (("--no-such-flag",), "", "its command line is not understood"),
        ((), "broken import", "import of uvicorn halted"),
    ],
)
def test_a_bad_setting_is_answered_and_no_loop(
    tmp_path: Path, bare_settings: None, words: tuple[str, ...], text: str, said: str
) -> None:
    """Nor is a client left to wait: the socket is taken before anything is read."""
    file = tmp_path / ".config/mlxspec/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("" if text == "broken import" else text)
    code = "import sys, mlxspec.cli as cli; sys.argv = ['mlxspec', 'serve', *sys.argv[1:]]; "
    code += "sys.modules['uvicorn'] = None; " * (text == "broken import") + "cli.main()"
    env = {**os.environ, "HOME": str(tmp_path)}
    with Activator([sys.executable, "-c", code, *words], env, tmp_path / "log") as service:
        for _ in range(2):
            assert said in refused(service.url)[1]["reason"]
        assert service.statuses == [] and said in ledger.read(tmp_path / STATE).held
    assert service.statuses == [0] and ledger.read(tmp_path / STATE).crashes == []


def held(home: Path, reason: str) -> Activator:
    """In a process of its own, which tells what it has loaded."""
    code = (
        "import sys, mlxspec.cli as cli\n"
        "from mlxspec.service import ledger\n"
        f"ledger.PANICS = ({str(home / 'reports')!r},)\n"
        "sys.argv = ['mlxspec', 'serve']\n"
        "try: cli.main()\n"
        "finally: print('heavy:', {'mlx', 'mlx_lm'} & set(sys.modules))"
    )
    return Activator([sys.executable, "-c", code], {**os.environ, "HOME": str(home)}, home / "log")


def test_after_a_panic_it_stays_down(tmp_path: Path, bare_settings: None) -> None:
    """Across restarts, whoever connects, without loading anything."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/a.panic").write_text("")
    ledger.write(tmp_path / STATE, Ledger(open=True))
    with held(tmp_path, "a.panic") as service:
        for lives in (1, 2):
            for _ in range(3):
                assert "panicked while it ran (a.panic)" in refused(service.url)[1]["reason"]
            assert len(service.statuses) == lives - 1  # one process answered them all
            service.signal(signal.SIGTERM)
            wait_for(lambda: len(service.statuses) == lives)  # noqa: B023
    assert service.statuses[:2] == [0, 0]
    assert (
        set((tmp_path / "log").read_text().split("heavy: ")[1:])
        and "'mlx" not in (tmp_path / "log").read_text()
    )
    assert ledger.read(tmp_path / STATE).panic


def test_a_report_that_comes_late_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS writes it after the restart, when the service may be there before it."""
    file, sent = tmp_path / "service.json", list[tuple[int, int]]()
    ledger.write(file, Ledger(open=True, reports=["old.panic"]))
    reports = [[], ["old.panic"], ["new.panic", "old.panic"]]
    monkeypatch.setattr(ledger, "panics", lambda: reports.pop(0))
    monkeypatch.setattr(daemon.time, "sleep", lambda s: None)
    monkeypatch.setattr(daemon.os, "kill", lambda *to: sent.append(to))
    daemon._look(file, ["old.panic"])
    assert sent == [(os.getpid(), signal.SIGTERM)] and reports == []
    found = ledger.read(file)
    found.open = False  # how it ends by that signal
    assert "new.panic" in ledger.begin(found, 100.0, []).held


def test_held_it_bears_with_clients_that_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, idle = listener.getsockname()[1], list[socket.socket]()

        def call() -> None:
            try:
                idle.extend(
                    socket.create_connection(("127.0.0.1", port)) for _ in range(daemon.CROWD + 1)
                )
                assert refused(f"http://127.0.0.1:{port}")[0] == 503
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        assert daemon.hold([listener], "a reason", None) == 0
        caller.join(10)
        for one in idle:
            one.close()


def test_held_for_a_while_it_ends_well(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert daemon.hold([listener], "a reason", 0.05) == 0
    assert "staying down: a reason" in caplog.text


def test_the_log_is_rotated(tmp_path: Path) -> None:
    """By the one that writes it, in a process of its own: both descriptors move, and nothing is
    lost."""
    file = tmp_path / "a.log"
    code = (
        "import sys; from pathlib import Path; from mlxspec.service.daemon import rotate\n"
        "for n in range(30):\n"
        "    print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)\n"
        f"    rotate(Path({str(file)!r}), 20)"
    )
    with file.open("ab") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=out, check=True, timeout=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    kept = ((tmp_path / "a.log.1").read_text() + file.read_text()).split()
    assert kept == [str(n) for n in range(30 - len(kept), 30)] and len(kept) > 7
    assert file.stat().st_size <= 24
    with (tmp_path / "other").open("ab") as out:  # a terminal, a journal: not ours to rotate
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=out, check=True, timeout=60)
    assert (tmp_path / "other").read_text().split() == [str(n) for n in range(30)]


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="measures memory as Linux shows it"
)
def test_it_sleeps_and_wakes(tmp_path: Path) -> None:
    """Idle, the memory is back; the next request has the same answer, with keep-alives until it
    comes, and finds its prompt on the disk."""
    save(tmp_path, hidden_size=1024, intermediate_size=32768, num_attention_heads=16)
    weights = (tmp_path / "model.safetensors").stat().st_size
    with activator(tmp_path, tmp_path, "--idle-ttl", "2", "--keepalive-s", "0.1") as service:
        assert read(service.url)["loaded"] == []
        asleep = rss(service.pid)
        prompt = [{"role": "user", "content": "hello world " * 40}]
        first = post(service.url, messages=prompt)["choices"][0]["message"]["content"]
        awake = rss(service.pid)
        for _ in range(3):
            wait_for(lambda: read(service.url)["loaded"] == [])
            again = rss(service.pid)
            print(*(f"{size >> 20} MiB" for size in (weights, asleep, awake, again)))
            assert awake - asleep > 0.9 * weights and awake - again > 0.6 * weights
            body = {
                "messages": prompt,
                "max_tokens": 12,
                "seed": 3,
                "ignore_eos": True,
                "stream": True,
            }
            body |= {"stream_options": {"include_usage": True}}
            request = urllib.request.Request(
                f"{service.url}/v1/chat/completions", json.dumps(body).encode()
            )
            began = time.monotonic()
            with urllib.request.urlopen(request, timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            parts = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
            assert (
                "".join(
                    p["choices"][0]["delta"].get("content") or "" for p in parts if p["choices"]
                )
                == first
            )
            assert lines.count(": keep-alive") > 2, lines
            cached = parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            print(
                f"{time.monotonic() - began:.2f} s, {cached} of {parts[-1]['usage']['prompt_tokens']} cached"
            )
            assert cached > 0
    assert ledger.read(tmp_path / STATE).crashes == []
