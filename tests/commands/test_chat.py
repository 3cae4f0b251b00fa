"""The terminal chat, as its own process, against a small real server on a socket."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")  # that control a terminal

Answer = Callable[["Peer", dict[str, Any]], None]


class Peer(BaseHTTPRequestHandler):
    """Answers each POST by the server's `answer`; keeps what it was sent."""

    server: "Server"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self.server.answer(self, body)

    def reply(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, *pieces: str, end: bool = True) -> None:
        self.send_response(200)
        self.end_headers()
        for piece in pieces:
            self.event(
                {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
            )
        if end:
            self.wfile.write(b": keep-alive\n\n")
            self.event({"choices": [], "usage": {"completion_tokens": len(pieces)}})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Peer)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def echo(peer: Peer, body: dict[str, Any]) -> None:
    peer.stream("You said ", body["messages"][-1]["content"], ".")


def command(url: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "mlxspec", "chat", "--url", url, *words]


def chat(url: str, typed: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *words), input=typed, capture_output=True, text=True, timeout=60
    )


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_reasoning_is_shown_beside_the_answer() -> None:
    def thinks(peer: Peer, body: dict[str, Any]) -> None:
        peer.send_response(200)
        peer.end_headers()
        for delta in (
            {"reasoning_content": "Let me"},
            {"reasoning_content": " see."},
            {"content": "Yes"},
        ):
            peer.event({"choices": [{"index": 0, "delta": delta}]})
        peer.wfile.write(b"data: [DONE]\n\n")

    with serving(thinks) as server:
        done = chat(server.url, "one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "Yes\nYes\n")
    assert done.stderr.split() == ["Let", "me", "see."] * 2
    assert contents(server.bodies[1]) == ["one", "Yes", "two"]


def test_piped_turns() -> None:
    with serving(echo) as server:
        done = chat(
            server.url, "one\n\ntwo\n", "--system", "S", "--temperature", "0", "--api-key", "k"
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "You said one.\nYou said two.\n", "")
    first, second = server.bodies
    assert (first["model"], first["stream"], first["temperature"]) == ("tiny", True, 0)
    assert contents(first) == ["S", "one"]
    assert contents(second) == ["S", "one", "You said one.", "two"]
    assert server.keys == ["Bearer k", "Bearer k"]


def test_reset_and_exit() -> None:
    with serving(echo) as server:
        done = chat(server.url, "one\n/reset\ntwo\n/exit\nthree\n")
    assert done.stdout == "You said one.\nYou said two.\n"
    assert [contents(body) for body in server.bodies] == [["one"], ["two"]]
    assert "temperature" not in server.bodies[0] and server.keys[0] is None


def test_interrupt_stops_the_answer_and_not_the_chat() -> None:
    gone = threading.Event()

    def slow(peer: Peer, body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] == "again":
            return peer.stream("done")
        peer.stream("so far\n", end=False)
        assert peer.connection.recv(1) == b""  # returns when the client has left
        gone.set()

    with (
        serving(slow) as server,
        subprocess.Popen(
            command(server.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "so far\n"
        process.send_signal(signal.SIGINT)
        assert gone.wait(30)
        out, err = process.communicate("again\n", timeout=30)
    assert (process.returncode, out) == (0, "\ndone\n")
    assert "stopped" in err and "Traceback" not in err
    assert contents(server.bodies[1]) == ["go", "so far\n", "again"]


def test_no_server() -> None:
    with serving(echo) as server:
        url = server.url
    done = chat(url, "hello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: no server at {url}; start one with: mlxspec serve\n"


def refuse(peer: Peer, body: dict[str, Any]) -> None:
    peer.reply(401, {"error": {"message": "wrong API key", "type": "invalid_request_error"}})


def break_off(peer: Peer, body: dict[str, Any]) -> None:
    peer.stream("half", end=False)


def fail_midway(peer: Peer, body: dict[str, Any]) -> None:
    peer.stream("half", end=False)
    peer.event({"error": {"message": "out of memory"}})


@pytest.mark.parametrize(
    ("answer", "out", "message"),
    [
        (refuse, "", "the server answered 401: wrong API key; give --api-key"),
        (break_off, "half\n", "the answer was cut off; see the server's log"),
        (fail_midway, "half\n", "out of memory"),
    ],
)
def test_failures_end_a_piped_chat(answer: Answer, out: str, message: str) -> None:
    with serving(answer) as server:
        done = chat(server.url, "hello\nagain\n")
    assert (done.returncode, done.stdout, done.stderr) == (2, out, f"error: {message}\n")
    assert len(server.bodies) == 1


def test_something_else_at_that_address() -> None:
    with serving(echo) as server:
        server.RequestHandlerClass = type(
            "Other", (Peer,), {"do_GET": lambda peer: peer.reply(200, {})}
        )
        done = chat(server.url, "hello\n")
    assert done.returncode == 2 and f"the program at {server.url} is not mlxspec" in done.stderr


def test_a_model_cannot_steer_the_terminal() -> None:
    with serving(lambda peer, body: peer.stream("a\x1b[2Jb\r\x07c\td")) as server:
        assert chat(server.url, "x\n").stdout == "a[2Jbc\td\n"


class Terminal:
    """A chat at a terminal of 80 columns, which remembers what it showed."""

    def __init__(self, home: Path, *words: str, term: str = "xterm-256color") -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "HOME": str(home), "TERM": term, "MLXSPEC_CACHE_DIR": str(home)}
        env |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxspec", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            cwd=home,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = self.seen = ""

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What was shown up to this text, without codes; what follows is for the next call."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready = select.select([self.ours], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"{text!r} is not in {self.seen!r}"
            try:
                data = os.read(self.ours, 1 << 16).decode(errors="replace")
            except OSError:
                data = ""
            assert data, f"ended without {text!r}: {self.seen!r}"
            self.raw += data
            self.seen += CODES.sub("", data).replace("\r", "")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self) -> int:
        """Ctrl-D at the prompt; the exit status."""
        self.type("\x04")
        try:
            while os.read(self.ours, 1 << 16):
                pass
        except OSError:
            pass
        return self.process.wait(60)


@contextmanager
def terminal(home: Path, *words: str, term: str = "xterm-256color") -> Iterator[Terminal]:
    made = Terminal(home, *words, term=term)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.ours)


def test_at_a_terminal_a_failure_is_not_the_end(tmp_path: Path) -> None:
    def second_works(peer: Peer, body: dict[str, Any]) -> None:
        return echo(peer, body) if len(server.bodies) == 2 else refuse(peer, body)

    with serving(second_works) as server, terminal(tmp_path, "chat", "--url", server.url) as t:
        assert "/help lists the commands" in t.wait_for("> ")
        t.type("one\n")
        told = t.wait_for("> ")
        assert "error: the server answered 401: wrong API key; give --api-key" in told
        t.type("two\n")
        assert "You said two." in t.wait_for("> ")
        assert t.end() == 0
    assert contents(server.bodies[1]) == ["two"]
