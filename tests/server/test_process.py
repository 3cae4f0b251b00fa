"""The process: bind, greet, drain at a signal, end with the engine."""

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config, ConfigError
from mlxspec.server import process
from mlxspec.server.process import bind, greeting
from mlxspec.service.status import get_status
from tests.support import tiny
from tests.support.live import live
from tests.support.process_caller import Caller, serve, stop_me
from tests.support.scripted import MESSAGES, Server, server
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def make(tokenizer: Any, model_dir: Path) -> Callable[..., Server]:
    def made(drain_s: float = 30.0, **kw: Any) -> Server:
        return server(tokenizer, model_dir, Config(port=0, drain_s=drain_s), **kw)

    return made


def post(url: str, **body: Any) -> Any:
    data = json.dumps({"messages": MESSAGES, **body}).encode()
    with urllib.request.urlopen(f"{url}/v1/chat/completions", data, timeout=10) as answer:
        return json.load(answer)


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_0(make: Callable[..., Server], number: int) -> None:
    s = make(drain_s=7)

    def call(url: str) -> None:
        assert post(url)["choices"][0]["message"]["content"] == "hello world"
        stop_me(number)

    caller = Caller(call)
    assert serve(s.app, caller) == 0
    caller.check()
    assert s.engine.drained == [7] and s.engine.stopped == 1


def test_running_answers_end_first(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the signal nothing more is admitted; what runs is answered."""
    s = make(holds=True)
    draining, late, answered = asyncio.Event(), threading.Event(), list[Any]()

    async def drain(timeout: float) -> None:
        s.engine.ending = True
        draining.set()
        await asyncio.to_thread(late.wait, 10)
        s.engine.push("hello", finish="stop")
        await asyncio.sleep(0)

    monkeypatch.setattr(s.engine, "drain", drain)

    def call(url: str) -> None:
        first = threading.Thread(target=lambda: answered.append(post(url)), daemon=True)
        first.start()
        while not s.engine.submitted:
            assert not late.wait(0.005)
        stop_me()
        while not draining.is_set():
            assert not late.wait(0.005)
        for late_one in (
            lambda: post(url),
            lambda: urllib.request.urlopen(f"{url}/health", timeout=10),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                late_one()
            assert caught.value.code == 503 and b"the server is stopping" in caught.value.read()
            caught.value.close()
        late.set()
        first.join(10)

    caller = Caller(call)
    assert serve(s.app, caller) == 0
    caller.check()
    assert [a["choices"][0]["message"]["content"] for a in answered] == ["hello"]


def test_a_second_signal_ends_it_at_once(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s = make(holds=True, drain_s=3600)

    async def drain(timeout: float) -> None:
        stop_me()
        await asyncio.Event().wait()

    monkeypatch.setattr(s.engine, "drain", drain)

    def call(url: str) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={"messages": MESSAGES, "stream": True}
        ) as r:
            assert r.status_code == 200
            stop_me()
            with pytest.raises(httpx.HTTPError):
                r.read()

    caller = Caller(call)
    assert serve(s.app, caller) == 0
    caller.check()
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("while_draining", [False, True])
def test_a_dead_engine_ends_it_with_1(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, while_draining: bool
) -> None:
    s = make(drain_s=3600)

    async def drain(timeout: float) -> None:
        s.engine.lives = False
        await asyncio.Event().wait()

    monkeypatch.setattr(s.engine, "drain", drain)

    def call(url: str) -> None:
        if while_draining:
            stop_me()
        else:
            s.engine.lives = False

    caller = Caller(call)
    assert serve(s.app, caller) == 1
    caller.check()


@pytest.mark.parametrize(("loads", "status"), [("other", 0), ("", 1)])
def test_a_thread_that_does_not_end_is_left_behind(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, loads: str, status: int
) -> None:
    """Without complaint where it loads: that may take minutes, and nothing is wrong with it."""
    s = make(loads=loads)
    monkeypatch.setattr(process, "STOP_S", 0.01)
    monkeypatch.setattr(s.engine, "stop", threading.Event().wait)
    caller = Caller(lambda url: stop_me())
    assert serve(s.app, caller) == status
    caller.check()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port = {port}: Address already in use; give another --port"
        ):
            bind(Config(port=port))
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as used:  # and was left, with connections that linger
        port = used.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), used.accept()[0] as accepted:
            accepted.close()
    with bind(Config(port=port)) as first:
        first.listen()
        with pytest.raises(ConfigError, match="in use; give"):
            bind(Config(port=port))
    with pytest.raises(ConfigError, match=r"host = 'no\.such\.host\.invalid'"):
        bind(Config(host="no.such.host.invalid"))


@pytest.mark.parametrize("key", ["", "sesame"])
def test_a_port_that_mlxspec_has(make: Callable[..., Server], key: str) -> None:
    app = server(make().engine.tokenizer, Path(), Config(api_key=key)).app
    with live(app) as url:
        port = int(url.rpartition(":")[2])
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            with pytest.raises(ConfigError, match="mlxspec already runs there; see mlxspec status"):
                bind(Config(host=host, port=port))


class Foreign(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


def test_a_port_that_another_server_has() -> None:
    with HTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        threading.Thread(target=foreign.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match="in use; give another --port"):
            bind(Config(port=foreign.server_port))


@pytest.mark.parametrize("host", ["", " ", "<broadcast>", "a" * 300, "a\0"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host = .* is not allowed|; give another --host"):
        bind(Config(host=host, port=0))


@pytest.mark.parametrize(
    ("host", "key", "level"),
    [
        ("127.0.0.1", "", None),
        ("localhost", "", None),
        ("0.0.0.0", "", "WARNING"),
        ("0", "", "WARNING"),
        ("0.0.0.0", "sesame", "INFO"),
    ],
)
def test_who_reaches_the_server_is_told(
    tokenizer: Any,
    model_dir: Path,
    host: str,
    key: str,
    level: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one line, with the address for other machines; without a key as a warning."""
    config = Config(host=host, port=0, api_key=key)
    caller = Caller(lambda url: stop_me())
    made = server(tokenizer, model_dir, config)
    with pytest.MonkeyPatch.context() as patch, bind(config) as listener, caplog.at_level("INFO"):
        port = listener.getsockname()[1]
        patch.setattr(process, "announce", caller)
        assert process.serve(made.app, listener) == 0
    caller.check()
    told = [r for r in caplog.records if "API key" in r.getMessage()]
    assert [r.levelname for r in told] == ([level] if level else [])
    for record in told:
        text = record.getMessage()
        assert f":{port}" in text and "0.0.0.0" not in text and "127.0.0.1:" not in text
        assert "sesame" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (Config(), "http://127.0.0.1:81/v1"),
        (Config(host="0.0.0.0"), "http://127.0.0.1:81/v1"),
        (Config(host="::"), "http://[::1]:81/v1"),
        (Config(host="::1"), "http://[::1]:81/v1"),
        (Config(host="mac.local"), "http://mac.local:81/v1"),
    ],
)
def test_the_greeting_has_a_curl_line(config: Config, url: str) -> None:
    text = greeting(config, ["tiny"], 81)
    assert (
        text.startswith(f"tiny is served at {url}\n") and f"curl {url}/chat/completions -H" in text
    )
    assert "Authorization" not in text and text.endswith(
        f"or open {url.removesuffix('v1')} in a browser\n"
    )


def test_the_curl_line_works(make: Callable[..., Server]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    s, answers = make(), list[Any]()

    def call(url: str) -> None:
        line = next(line for line in caller.said.splitlines() if "curl" in line)
        done = subprocess.run(shlex.split(line), capture_output=True, timeout=20, check=True)
        answers.append(json.loads(done.stdout))
        stop_me()

    caller = Caller(call)
    serve(s.app, caller)
    caller.check()
    assert answers[0]["choices"][0]["message"]["content"] == "hello world"


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_serves_a_model(tmp_path: Path, several: bool) -> None:
    """The whole chain, in a process of its own: load, warm up, greet, answer, end at SIGTERM."""
    model = tiny.model("llama")
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **tiny.CONFIGS["llama"]})
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    models = [str(tmp_path), *[f"two={tmp_path}"] * several]
    command = [
        sys.executable,
        "-m",
        "mlxspec",
        "serve",
        *models,
        "--port",
        "0",
        "--kv-blocks",
        "32",
    ]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")} | {
        "HOME": str(tmp_path)
    }
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=bare,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stderr is not None
    with process, process.stdout, process.stderr:
        try:
            greeted = process.stdout.readline()
            assert greeted, process.stderr.read()
            url = greeted.split()[4].removesuffix("/v1")
            answer = post(url, max_tokens=5, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 5 and answer["model"] == tmp_path.name
            if several:
                assert post(url, max_tokens=5, model="two")["model"] == "two"
                assert read(f"{url}/health")["loaded"] == [tmp_path.name, "two"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            logged = process.stderr.read()
            assert f"{answer['id']}: " in logged
            [flags] = re.findall(r"settings: (.*)", logged)
            assert (f" two={tmp_path} " if several else "--kv-blocks 32") in flags
            assert "--prefill-budget" not in flags
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_loading_ends_it_with_0(number: int, tmp_path: Path) -> None:
    code = (
        "import logging, threading, mlxspec.server.process as run; from mlxspec.config import Config\n"
        "logging.basicConfig(level='INFO')\n"
        "def load(config, *_):\n"
        "    threading.Thread(target=threading.Event().wait).start()  # never ends by itself\n"
        "    print('loading', flush=True); threading.Event().wait()\n"
        "run._load = load; run.serve_model(Config(port=0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    with process, process.stdout, process.stderr:
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(20) == 0
            assert "stopped while loading" in process.stderr.read()
        finally:
            process.kill()


TRYING = """
import sys, threading, types, mlxspec.server.process as run
from pathlib import Path
from mlxspec.config import Config
from mlxspec.kernels.verify import KERNELS

trying = threading.Event()

def load(*_):
    if sys.argv[2] == "on demand" and threading.current_thread() is threading.main_thread():
        threading.Thread(target=load, daemon=True).start()
        trying.wait()  # else the process may end while the word is written
        return app
    marker = Path(sys.argv[1], "a.trying")
    KERNELS.deadline, KERNELS.forget = 1e18, marker.unlink
    marker.touch()
    print("trying", flush=True)
    trying.set()
    threading.Event().wait(60)

async def ended(*args):
    return 0

engine = types.SimpleNamespace(stop=threading.Event().wait, loading=lambda: "b")
state = types.SimpleNamespace(worker=engine)
app = types.SimpleNamespace(state=types.SimpleNamespace(server=state))
run._load, run._serve = load, ended
run.serve_model(Config(port=0))
"""


@pytest.mark.parametrize(
    ("when", "number"), [("start", signal.SIGTERM), ("start", signal.SIGHUP), ("on demand", 0)]
)
def test_a_kernel_that_is_being_tried_at_the_end_has_not_crashed(
    when: str, number: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", TRYING, str(tmp_path), when]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "trying\n"
            if number:
                assert len(list(tmp_path.glob("*.trying"))) == 1
                process.send_signal(number)
                process.send_signal(number)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert list(tmp_path.glob("*.trying")) == []


def test_an_exit_that_nobody_asked_for_is_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Config, *_: Any) -> Any:
        sys.exit(3)

    monkeypatch.setattr(process, "_load", load)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        process.serve_model(Config(port=0))
    assert caught.value.code == 3


def test_the_key_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names a variable, which is to be set first unless it holds the key already."""
    for variable in ("", "another", "sesame"):
        monkeypatch.setenv("MLXSPEC_API_KEY", variable)
        text = greeting(Config(api_key="sesame"), ["tiny"], 81)
        assert "sesame" not in text and '-H "Authorization: Bearer $MLXSPEC_API_KEY"' in text
        assert ("export MLXSPEC_API_KEY=" in text) == (variable != "sesame")


@pytest.mark.parametrize(
    ("model", "name"), [("some/<model>", "some/<model>"), ("<mine>=some/model", "<mine>")]
)
def test_a_server_that_loads_says_so(model: str, name: str) -> None:
    """To clients of any API, to a browser, to `mlxspec status` and to a second server."""
    code = (
        "import threading, mlxspec.server.process as run; from mlxspec.config import Config\n"
        "def load(*_):\n"
        "    print('loading', flush=True); threading.Event().wait()\n"
        "run._load = load; run.serve_model(Config(model={!r}, port={}))"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", code.format(model, port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as loads:
        try:
            assert loads.stdout is not None and loads.stdout.readline() == "loading\n"
            url = f"http://127.0.0.1:{port}"
            with socket.create_connection(("127.0.0.1", port)):  # one that says nothing
                now = get_status(url)
            assert now.state == "loading" and f": {name} is being loaded" in now.why
            answer = httpx.post(f"{url}/v1/messages", json={"messages": "x" * 100_000})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json()["error"]["code"] == "loading"
            page = httpx.get(url, headers={"accept": "text/html"})
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "http-equiv=refresh" in page.text and f"<p>{escape(name)} is" in page.text
            with pytest.raises(ConfigError, match="mlxspec already runs there; see mlxspec status"):
                bind(Config(port=port))
        finally:
            loads.kill()


def test_nothing_heavy_is_imported_before_blas() -> None:
    """The module's own imports bring neither mlx nor mlx_lm: BLAS must be loaded before them."""
    tree = ast.parse(Path(process.__file__).read_text("utf-8"))
    names = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    ours = {name for name in names if name and name.startswith("mlxspec")}
    assert ours == {"mlxspec", "mlxspec.config", "mlxspec.server.unavailable", "mlxspec.types"}
    code = "import sys, mlxspec.server.process; sys.exit(bool({'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
