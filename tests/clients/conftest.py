"""A real server round a scripted model, and a place where a client can do no harm: a home, a
project and variables of its own, and no way out but to this machine.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from tests.clients.script import Player, save_model
from tests.support.live import live

ROOT = Path(__file__).resolve().parents[2]
KEY = "the key"  # with a space: it must be quoted when it is passed on
LIMIT_S = 100
NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there
BROKEN = 'print("helo")\n'
MENDED = 'print("hello")\n'


@dataclass(repr=False)
class Exchange:
    method: str
    path: str
    status: int = 0
    body: bytes = b""
    answer: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def __str__(self) -> str:
        return (
            f"{self.method} {self.path} {self.status} {self.answer[:200].decode(errors='replace')}"
        )


@dataclass(repr=False)
class Recorder:
    """The application, and all that was said to it."""

    app: ASGIApp
    exchanges: list[Exchange] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen = Exchange(scope["method"], scope["path"])
        self.exchanges.append(seen)

        async def heard() -> Message:
            message = await receive()
            seen.body += message.get("body", b"")
            return message

        async def said(message: Message) -> None:
            seen.status = message.get("status", seen.status)
            seen.answer += message.get("body", b"")
            await send(message)

        await self.app(scope, heard, said)


@dataclass(repr=False)
class World:
    """`project` is a git repository with a broken hello.py."""

    url: str
    project: Path
    home: Path
    player: Player
    exchanges: list[Exchange]

    @property
    def file(self) -> Path:
        return self.project / "hello.py"

    def launch(self, path: list[Path], *words: str, **env: str) -> str:
        """What `mlxspec launch` of these words prints, commands being looked for in `path`."""
        command = [
            sys.executable,
            "-m",
            "mlxspec",
            "launch",
            "--url",
            self.url,
            "--api-key",
            KEY,
            *words,
        ]
        return self.run(path, *command, **env)

    def run(
        self, path: list[Path], *command: str, status: tuple[int, ...] = (0,), **env: str
    ) -> str:
        """What the command prints; it must end with a `status`. All that it has started ends
        here."""
        bare = {
            "PATH": os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1,localhost",
            **{name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")},
            "NODE_USE_ENV_PROXY": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=self.project,
            env={**bare, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"not done within {LIMIT_S} s: {self.heard()}\n{out[-3000:]}")
        finally:
            end(process.pid)
        assert process.returncode in status, (
            f"status {process.returncode}: {self.heard()}\n{out[-3000:]}"
        )
        return out

    def heard(self) -> str:
        return "\n".join(str(exchange) for exchange in self.exchanges[-40:])

    def asked(self, path: str) -> list[Any]:
        """The bodies that were posted to `path`, after all exchanges were found to have gone
        well."""
        assert [e for e in self.exchanges if not 200 <= e.status < 300] == [], self.heard()
        return [e.json for e in self.exchanges if e.method == "POST" and e.path == path]


def end(group: int) -> None:
    """What a client has left running."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def world(model_dir: Path, tmp_path: Path) -> Iterator[World]:
    project, home = tmp_path / "project", tmp_path / "home"
    for folder in (project, home / "tmp"):
        folder.mkdir(parents=True)
    (project / "hello.py").write_text(BROKEN)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    (home / ".gitconfig").write_text("[user]\n\tname = a\n\temail = a@b.c\n")
    tokenizer = load_tokenizer(model_dir)
    player = Player(tokenizer)
    recorder = Recorder(create_app(player, tokenizer, model_dir, Config(api_key=KEY)))
    with live(recorder) as url:
        yield World(url, project, home, player, recorder.exchanges)
