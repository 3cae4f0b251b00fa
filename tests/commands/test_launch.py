"""`mlxspec launch`, as its own process: a small server tells it the model, and the agents are
scripts that write down what they were given."""

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlxspec.commands.launch import AGENTS
from tests.support.parameter_rows import only

MODEL = "org/It's a model"
KEY = "it's a $KEY"
SERVED = {"id": MODEL, "context_window": 65_536}
OTHER = {"id": "other/model", "context_window": 32_768}
AGENT = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
sys.exit(7)
"""


class Peer(BaseHTTPRequestHandler):
    """Says what is served to a client that sends the key."""

    server: "Server"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        status, answer = 401, {"error": {"message": "wrong API key"}}
        if self.headers["Authorization"] in (f"Bearer {KEY}", None):
            status, answer = 404, {"error": {"message": "send 'other/model' or 'default'"}}
            if self.path in self.server.models:
                status, answer = 200, self.server.models[self.path]
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    models: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.models = {"/v1/models/default": SERVED, "/v1/models/other/model": OTHER}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Peer) as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def env(server: Server, tmp_path: Path) -> dict[str, str]:
    """A home, a path with all agents, and settings for the server."""
    (tmp_path / "bin").mkdir()
    for name in AGENTS:
        file = tmp_path / "bin" / name
        file.write_text(AGENT)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "home").mkdir()
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": str(tmp_path / "bin"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "MLXSPEC_PORT": str(server.server_port),
        "MLXSPEC_API_KEY": KEY,
        "HTTP_PROXY": "http://127.0.0.1:9",  # what is on this machine is asked without
        "ANTHROPIC_API_KEY": "of another server",
        "CLAUDE_CODE_USE_BEDROCK": "1",
    }


def launch(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxspec", "launch", *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, cwd=env["HOME"]
    )


def given(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments and variables of the agent, which has ended in its own way."""
    assert done.returncode == 7, done.stderr
    found = json.loads(done.stdout)
    return found["argv"], found["env"]


@pytest.mark.parametrize("name", only(AGENTS, 0, 2, 3, 7))
def test_an_agent_is_pointed_at_the_server(name: str, server: Server, env: dict[str, str]) -> None:
    words = ["-p", "say 'hi' $HOME", "--url", "x", "--print", "--", "-- "]
    address = f"http://localhost:{server.server_port}"
    del env["MLXSPEC_API_KEY"]
    options = ("--url", address, "--api-key", KEY)
    argv, seen = given(launch(env, *options, name, "--", *words))
    assert argv[-len(words) :] == words
    if name == "codex":
        assert given(launch(env, *options, name, *words)) == (argv, seen)
    told = "\n".join([*argv, *seen.values()])
    assert address in told and KEY in told
    assert (MODEL if name != "llm" else "gpt-4o-mini") in told.replace('\\"', '"')
    assert list(Path(env["HOME"]).iterdir()) == []


@pytest.mark.parametrize("name", only(["claude", "codex"], 0))
def test_the_printed_lines_do_the_same(name: str, env: dict[str, str]) -> None:
    argv, seen = given(launch(env, name, "-p", "it's"))
    shown = launch(env, "--print", name, "-p", "it's")
    lines = shown.stdout.splitlines()
    begin = lines.index(f"{name} \\")
    assert shown.returncode == 0 and all(line.startswith("export ") for line in lines[:begin])
    assert lines[-1].endswith(""" -p 'it'"'"'s'""")
    assert max(map(len, lines)) < 100  # also of what is one argument
    done = subprocess.run(["/bin/sh", "-c", shown.stdout], env=env, capture_output=True, text=True)
    own = {"PWD", "OLDPWD", "SHLVL", "_"}
    again = given(done)
    assert again[0] == argv
    assert {k: v for k, v in again[1].items() if k not in own} == {
        k: v for k, v in seen.items() if k not in own
    }


def test_claude(server: Server, env: dict[str, str]) -> None:
    (flag, settings), seen = given(launch(env, "claude"))
    assert flag == "--settings"
    again = json.loads(settings)["env"]
    assert again == {key: value for key, value in seen.items() if key in again} and len(again) > 12
    assert "ANTHROPIC_BASE_URL" in again and "ANTHROPIC_AUTH_TOKEN" not in again
    assert seen["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{server.server_port}"
    assert seen["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert seen["ANTHROPIC_API_KEY"] == seen["CLAUDE_CODE_USE_BEDROCK"] == ""
    models = {key: value for key, value in seen.items() if key.endswith("_MODEL")}
    assert len(models) == 6 and set(models.values()) == {MODEL}
    assert seen["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert seen["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert seen["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_codex(env: dict[str, str]) -> None:
    argv, seen = given(launch(env, "codex", "exec", "hi"))
    assert argv[-2:] == ["exec", "hi"] and set(argv[:-2:2]) == {"-c"}
    settings = dict(word.split("=", 1) for word in argv[1:-2:2])
    assert json.loads(settings["model"]) == MODEL and settings["model_context_window"] == "65536"
    assert seen[json.loads(settings["model_providers.mlxspec.env_key"])] == KEY


def test_opencode(env: dict[str, str]) -> None:
    config = json.loads(given(launch(env, "opencode"))[1]["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["mlxspec"]
    assert config["model"] == f"mlxspec/{MODEL}" and provider["options"]["apiKey"] == KEY
    assert provider["models"][MODEL]["limit"] == {"context": 65_536, "output": 16_384}


@pytest.mark.parametrize("sees", [False, True])
def test_qwen_is_told_whether_the_model_sees(
    sees: bool, server: Server, env: dict[str, str]
) -> None:
    """By a file of our own, whose settings the user's go before."""
    modalities = ["text", "image"] if sees else ["text"]
    server.models["/v1/models/default"] = SERVED | {"input_modalities": modalities}
    env["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] = "mine.json"
    file = given(launch(env, "qwen"))[1]["QWEN_CODE_SYSTEM_DEFAULTS_PATH"]
    if sees:
        settings = json.loads(Path(file).read_text())
        assert settings["model"]["generationConfig"]["modalities"] == {"image": True}
    else:
        assert file == "mine.json"
    assert list(Path(env["HOME"]).iterdir()) == []


def test_a_server_without_a_key(env: dict[str, str]) -> None:
    del env["MLXSPEC_API_KEY"]
    assert given(launch(env, "qwen"))[1]["OPENAI_API_KEY"] == "none"


def test_another_server_is_not_told_the_settings_key(server: Server, env: dict[str, str]) -> None:
    url = f"http://localhost:{server.server_port}/"
    assert given(launch(env, "--url", url, "qwen"))[1]["OPENAI_API_KEY"] == "none"
    seen = given(launch(env, "--url", url, "--api-key", KEY, "qwen"))[1]
    assert seen["OPENAI_API_KEY"] == KEY and seen["OPENAI_BASE_URL"] == f"{url}v1"


def test_another_of_the_served_models(env: dict[str, str]) -> None:
    argv, _ = given(launch(env, "--model", "other/model", "qwen", "--model", "x"))
    assert argv == ["--auth-type", "openai", "--model", "other/model", "--model", "x"]
    why = refusal(launch(env, "--model", "no model", "qwen"))
    assert "answered 404: send 'other/model' or 'default'" in why


@pytest.mark.parametrize(
    ("context", "told"), only([(20_301, True), (40_599, True), (40_600, False)], 1)
)
def test_a_context_that_the_prompt_nearly_fills(
    server: Server, env: dict[str, str], context: int, told: bool
) -> None:
    server.models["/v1/models/default"] = SERVED | {"context_window": context}
    done = launch(env, "claude")
    given(done)
    why = f"warning: claude's own prompt takes about 20,300 of the context's {context:,} tokens, "
    assert done.stderr.startswith(why) == bool(done.stderr) == told
    assert given(launch(env, "llm")) and not launch(env, "llm").stderr


def test_a_context_that_the_prompt_overfills(server: Server, env: dict[str, str]) -> None:
    """Each request would be refused. What is printed may be for another server."""
    server.models["/v1/models/default"] = SERVED | {"context_window": 20_300}
    why = refusal(launch(env, "claude"))
    assert "20,300 of the context's 20,300 tokens; serve a model with a longer context" in why
    shown = launch(env, "--print", "claude")
    assert shown.returncode == 0 and "claude" in shown.stdout and "20,300" in shown.stderr


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.slow
def test_what_cannot_be_started(server: Server, env: dict[str, str]) -> None:
    assert "AGENT = 'cloud' is not known; give one of claude, codex, " in refusal(
        launch(env, "cloud")
    )
    assert "answered 401: wrong API key; give --api-key" in refusal(
        launch(env | {"MLXSPEC_API_KEY": "x"}, "qwen")
    )
    assert "--url = 'localhost' is not a URL" in refusal(launch(env, "--url", "localhost", "qwen"))
    for wrong in ([], {"id": "m"}):
        server.models["/v1/models/default"] = wrong
        assert "is not mlxspec" in refusal(launch(env, "qwen"))
    none = env | {"MLXSPEC_PORT": "9"}
    assert "no server at http://127.0.0.1:9; start one with: mlxspec serve\n" in refusal(
        launch(none, "qwen")
    )


def test_an_agent_that_is_not_installed(env: dict[str, str]) -> None:
    os.remove(Path(env["PATH"]) / "opencode")
    why = refusal(launch(env, "opencode"))
    assert (
        why
        == f"error: opencode is not installed; install it with: {AGENTS['opencode']['install']}\n"
    )
    shown = launch(env, "--print", "opencode", "run", "hi")
    assert shown.returncode == 0 and shlex.split(shown.stdout)[-3:] == ["opencode", "run", "hi"]
