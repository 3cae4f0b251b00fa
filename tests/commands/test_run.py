"""`mlxspec run`: a real server with a small model, started for a chat at a terminal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from mlxspec import cli
from tests.commands.test_chat import echo, serving, terminal
from tests.support import tiny
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> int:
    """A free port that the settings name."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = int(probe.getsockname()[1])
    monkeypatch.setenv("MLXSPEC_PORT", str(number))
    return number


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_tokenizer(tmp_path / "small")
    config = {"model_type": "llama", **tiny.CONFIGS["llama"]}
    (path / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(tiny.model("llama").parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path


def is_free(port: int) -> bool:
    """Whether nobody listens, soon."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.1)
    return False


def test_a_server_is_started_for_a_chat(model: Path, port: int, tmp_path: Path) -> None:
    """It shows how it loads, outlives Ctrl-C, and ends with the chat."""
    with terminal(tmp_path, "run", str(model), "--set", "max_tokens=5") as t:
        started = t.wait_for(f"small at http://127.0.0.1:{port}.", 120)
        assert f"no server runs; starting one: mlxspec serve {model}" in " ".join(started.split())
        assert "ready in" in started and "curl" not in started
        t.wait_for("> ")
        time.sleep(0.5)  # readline shows its prompt before it waits
        t.type("\x03")
        t.wait_for("/help lists the commands")
        t.wait_for("> ")
        t.type("hello\n")
        assert "of 512 tokens" in t.wait_for("> ")
        t.type("/exit\n")
        t.wait_for("stopping the server")
        assert t.process.wait(30) == 0
    assert is_free(port)


def test_a_chat_that_is_killed_leaves_no_server(model: Path, port: int, tmp_path: Path) -> None:
    with terminal(tmp_path, "run", str(model)) as t:
        t.wait_for("> ", 120)
        t.process.send_signal(signal.SIGKILL)
    assert is_free(port)


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(port: int, tmp_path: Path) -> None:
    with terminal(tmp_path, "run", "no-such-model") as t:
        said = t.wait_for("error: the server has ended; what it said is above", 60)
    assert "no model 'no-such-model'" in said


def test_a_running_server_is_used(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mlxspec", "run", "tiny", "Say one", "--system", "S"]
    with serving(echo) as server:
        done = subprocess.run(
            [*words, "--url", server.url], capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "You said Say one.\n", "")
    assert server.asked == ["/v1/models/tiny"]
    done = subprocess.run([*words, "--url", server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no server at" in done.stderr


def test_the_model_is_not_there(tmp_path: Path) -> None:
    with serving(echo) as server:
        missing = {"error": {"message": "no 'tinny' here", "code": "model_not_found"}}
        handler = server.RequestHandlerClass
        server.RequestHandlerClass = type(
            "Missing", (handler,), {"do_GET": lambda peer: peer.reply(404, missing)}
        )
        words = [sys.executable, "-m", "mlxspec", "run", "tinny", "--url", server.url]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=os.environ,
        )
    assert done.returncode == 2 and "no 'tinny' here" in done.stderr


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("refusal", ["", "owner/b is being downloaded"])
def test_a_model_of_this_disk_is_served_too(
    refusal: str, late: bool, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ollama: no restart, and a refusal in Ollama's form is told, also behind the lines about
    what is fetched for the model, which may take long."""
    owned = tmp_path / "home" / "MLXModels" / "owner" / "tiny"
    owned.parent.mkdir(parents=True)
    model.rename(owned)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pulled: list[str] = []

    def get(peer: Any) -> None:
        missing = {"error": {"message": "no such model", "code": "model_not_found"}}
        peer.reply(200 if pulled else 404, {"id": "owner/tiny"} if pulled else missing)

    def post(peer: Any) -> None:
        if peer.path != "/api/pull":
            return handler.do_POST(peer)  # type: ignore[attr-defined, no-any-return]
        size = int(peer.headers["content-length"])
        asked = json.loads(peer.rfile.read(size))
        assert asked.get("stream", True)
        pulled.append(asked["model"])
        if refusal and not late:
            return peer.reply(409, {"error": refusal})  # type: ignore[no-any-return]
        last = {"error": refusal} if refusal else {"status": "success"}
        lines = [json.dumps(line) + "\n" for line in ({"status": "pulling manifest"}, last)]
        peer.send_response(200)
        peer.end_headers()
        peer.wfile.write("".join(lines).encode())

    with serving(echo) as server:
        handler = server.RequestHandlerClass
        server.RequestHandlerClass = type("Ours", (handler,), {"do_GET": get, "do_POST": post})
        words = [sys.executable, "-m", "mlxspec", "run", "owner/tiny", "Hi", "--url", server.url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert pulled == ["owner/tiny"]
    if refusal:
        assert done.returncode == 2 and refusal in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "You said Hi.\n")


def test_a_model_of_this_disk_is_not_fetched_by_another_machine(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose disk has not it: the server would download it, which nobody asked for."""
    owned = tmp_path / "home" / "MLXModels" / "owner" / "tiny"
    owned.parent.mkdir(parents=True)
    model.rename(owned)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    find = socket.getaddrinfo

    def resolve(host: str, *rest: Any) -> Any:
        return find("127.0.0.1" if host == "studio.local" else host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    missing = {"error": {"message": "no such model", "code": "model_not_found"}}
    with serving(echo) as server:
        handler = server.RequestHandlerClass
        server.RequestHandlerClass = type(
            "Other", (handler,), {"do_GET": lambda peer: peer.reply(404, missing)}
        )
        url = f"http://studio.local:{server.server_address[1]}"
        done = CliRunner().invoke(cli.app, ["run", "owner/tiny", "Hi", "--url", url])
    assert done.exit_code and "no such model" in str(done.exception)
    assert server.bodies == []
