"""The terminal chat, as its own process, against a small real server on a socket."""

import errno
import fcntl
import io
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
from rich.console import Console

from mlxspec.commands import terminal_output
from mlxspec.commands.chat import Chat
from mlxspec.server.body import parse
from mlxspec.server.openai.schema import Chat as Fields
from mlxspec.types import UserError
from tests.support.parameter_rows import only
from tests.support.screen import shown

CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")  # that control a terminal

Answer = Callable[["Peer", dict[str, Any]], None]


class Peer(BaseHTTPRequestHandler):
    """Answers each POST by the server's `answer`; keeps what it was sent."""

    server: "Server"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        model = {"id": "tiny", "context_window": self.server.context}
        self.reply(200, {"object": "list", "data": [model]})

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

    def event_stream(self, *deltas: Any, finish: str = "stop", usage: Any = None) -> None:
        self.send_response(200)
        self.end_headers()
        for delta in deltas:
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        self.event({"choices": [], "usage": usage})
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
        self.asked: list[str] = []
        self.context = 0
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
    only(
        [
            (refuse, "", "the server answered 401: wrong API key; give --api-key"),
            (break_off, "half\n", "the answer was cut off; see the server's log"),
            (fail_midway, "half\n", "out of memory"),
        ],
        1,
    ),
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


def test_a_model_cannot_reorder_or_hide_text() -> None:
    """But joiners stay, in emoji and in Persian, and so do marks that are visible."""
    hidden = "a\u202eb\u2066c\u2069d\u200be\ufefff\u2060g\u200eh"
    shown = "\U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u062e \u06dd"
    with serving(lambda peer, body: peer.stream(hidden, shown)) as server:
        assert chat(server.url, "x\n").stdout == f"abcdefgh{shown}\n"


FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"  # of England


@pytest.mark.parametrize("pieces", [[FLAG], list(FLAG), [FLAG[:3], FLAG[3:]]])
def test_flags_stay_whole(pieces: list[str]) -> None:
    """But no tags that hide a text, alone or behind a flag."""
    hidden = FLAG[1:3] * 20
    with serving(lambda peer, body: peer.stream("a" + hidden, *pieces, "b", hidden)) as server:
        assert chat(server.url, "x\n").stdout == f"a{FLAG}b\n"
    answer = terminal_output.LiveAnswer()
    with answer:
        for piece in ("a" + hidden, *pieces, "b", hidden):
            answer.write("content", piece)
        assert answer.rest == f"a{FLAG}b"


# In C's locale the latter.
@pytest.mark.parametrize("errors", only(["strict", "surrogateescape"], 1))
def test_a_pipe_that_is_not_utf_8(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{errors}")
    with serving(echo) as server:
        done = subprocess.run(
            command(server.url), input=b"tw\xf6\nthree\n", capture_output=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert [contents(body)[-1] for body in server.bodies] == ["tw\ufffd", "three"]


@pytest.mark.parametrize(
    ("encoding", "out"), only([("utf-8", "aé水?b\n" * 2), ("ascii", "a???b\n" * 2)], 1)
)
def test_what_stdout_cannot_encode_is_replaced(
    encoding: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal's encoding, or half an emoji, is no fault of the server."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    file = tmp_path / "talk.md"
    with serving(lambda peer, body: peer.stream("aé水\ud83d", "b")) as server:
        done = chat(server.url, f"one\ntwo\n/save {file}\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, out, f"saved to {file}\n")
    assert "aé水?b" in file.read_text("utf-8")


def test_a_closed_pipe_is_not_told_as_the_servers() -> None:
    with serving(echo) as server:
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run(
            command(server.url),
            input="one\ntwo\n",
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "") and len(server.bodies) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError()])
def test_an_error_of_showing_is_told_as_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [error]

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if errors:
                raise errors.pop()
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Full())
    with serving(echo) as server, pytest.raises(type(error)) as caught:
        Chat((server.url, "")).ask("one")
    assert caught.value is error


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
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is for it
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


def screen(t: Terminal) -> str:
    """What the terminal shows in the end."""
    return shown(t.raw)


FENCED = "Here:\n\n```python\ndef f():\n\n    return 1\n```\n\n" + "A **bold** word. " * 9
LISTED = "# Title\n\n1. one\n\n2. two <b>x</b>\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nred\nblue\n"


@pytest.mark.parametrize("size", only([1, 5, 1000], 1))
def test_markdown_is_drawn_while_it_streams(size: int, tmp_path: Path) -> None:
    """Each block once, however it is cut into pieces; words and what looks like HTML stay whole."""

    def answer(peer: Peer, body: dict[str, Any]) -> None:
        text = FENCED if body["messages"][-1]["content"] == "code" else LISTED
        peer.stream(*(text[at : at + size] for at in range(0, len(text), size)))

    with serving(answer) as server, terminal(tmp_path, "chat", "--url", server.url) as t:
        for line in ("code", "list"):
            t.wait_for("> ")
            t.type(f"{line}\n")
        t.wait_for("blue")
        t.wait_for("> ")
    lines = screen(t).splitlines()
    code = lines.index("def f():")
    assert lines[code - 2 : code + 4] == ["Here:", "", "def f():", "", "    return 1", ""]
    bold = [line for line in lines if "bold" in line]
    assert len(bold) == 2 and " ".join(bold).split() == "A bold word.".split() * 9
    assert [sum(wanted in line for line in lines) for wanted in ("Title", "1 one", "red")] == [
        1
    ] * 3
    assert any("2 two <b>x</b>" in line for line in lines) and "blue" in lines
    assert not any("|" in line or "```" in line or "**" in line for line in lines)
    assert contents(server.bodies[-1])[1] == FENCED, "the conversation keeps what the model wrote"


def test_what_is_drawn_again_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the redraws fall between the prints, each line is shown once."""
    monkeypatch.setattr(terminal_output, "REDRAWS", 50_000)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            out = io.StringIO()
            drawn = terminal_output.LiveAnswer()
            drawn.live.console = drawn.console = Console(
                file=out, force_terminal=True, width=80, height=24, no_color=True
            )
            with drawn:
                for number in range(30):
                    drawn.write("content", f"word{number} {'more here and there ' * 7}\n\n")
            lines = shown(out.getvalue().replace("\n", "\r\n")).splitlines()
            first = [line.split()[0] for line in lines if line.startswith("word")]
            assert first == [f"word{number}" for number in range(30)]
    finally:
        sys.setswitchinterval(interval)


def test_a_long_answer_costs_no_more_than_its_length() -> None:
    """A block of any length is drawn in parts, and its lines come once and in order."""
    line = "x = 'some code that is neither short nor long'\n"
    for text in (
        f"```python\n{line * 2000}```\n",
        "word " * 20_000,
        "- item\n" + "  more\n" * 9000,
    ):
        parts, rest = [], ""
        for at in range(0, len(text), 64):
            rest += text[at : at + 64]
            assert len(rest) <= terminal_output.MOST + 200
            done, rest = terminal_output.split_blocks(rest)
            parts += [done] if done else []
        told = "".join([*parts, rest]).replace("```python\n", "").replace("```\n", "")
        assert told == text.replace("```python\n", "").replace("```\n", "")


def test_a_model_cannot_steer_the_drawn_terminal(tmp_path: Path) -> None:
    evil = "a\x1b[2J\x1b]0;evil\x07 \x9b2J [bold]b[/bold] [go](http://evil.example/)\n"

    def answer(peer: Peer, body: dict[str, Any]) -> None:
        peer.event_stream({"reasoning_content": evil}, {"content": evil})

    with serving(answer) as server, terminal(tmp_path, "chat", "--url", server.url) as t:
        t.wait_for("> ")
        t.type("x\n")
        t.wait_for("go (http://evil.example/)")
        t.wait_for("> ")
    assert "\x1b[2J" not in t.raw and "\x1b]" not in t.raw and "\x9b" not in t.raw
    assert "[bold]b[/bold]" in screen(t)


@pytest.mark.parametrize("term", only(["xterm-256color", "dumb"], 0))
def test_what_is_pasted_is_one_message(term: str, tmp_path: Path) -> None:
    """Whether the terminal marks it or not; so is what stands between quotes."""
    with serving(echo) as server, terminal(tmp_path, "chat", "--url", server.url, term=term) as t:
        t.wait_for("> ")
        text = "one\n\n  two\nthree"
        t.type(f"\x1b[200~{text}\x1b[201~\n" if term != "dumb" else f"{text}\n")
        t.wait_for("You said one")
        t.wait_for("> ")
        t.type('"""four\n')
        t.wait_for("... ")
        t.type("/exit\n")
        t.wait_for("... ")
        t.type('five"""\n')
        t.wait_for("You said four")
        t.wait_for("> ")
        assert t.end() == 0
    assert [contents(body)[-1] for body in server.bodies] == [text, "four\n/exit\nfive"]


def test_quotes_in_a_pipe() -> None:
    with serving(echo) as server:
        done = chat(server.url, 'one\n"""two\nthree\n"""\n"""four\n')
    assert done.returncode == 0
    assert [contents(body)[-1] for body in server.bodies] == ["one", "two\nthree", "four"]


def test_what_was_typed_is_remembered(tmp_path: Path) -> None:
    """Between runs, by this user alone, up to a limit."""
    file = tmp_path / "chat-history"
    with serving(echo) as server:
        with terminal(tmp_path, "chat", "--url", server.url) as t:
            t.wait_for("> ")
            t.type("\x1b[200~one\ntwo\x1b[201~\n")
            t.wait_for("You said one")
            t.wait_for("> ")
            assert t.end() == 0
        assert file.stat().st_mode & 0o777 == 0o600
        lines = [json.dumps(f"old {n}") for n in range(2001)]
        file.write_text("\n".join([*lines, file.read_text()]))
        with terminal(tmp_path, "chat", "--url", server.url) as t:
            t.wait_for("> ")
            t.type("\x1b[A\n")
            t.wait_for("You said one")
            t.wait_for("> ")
            t.type("\x1b[A\x1b[A\n")
            t.wait_for("You said old 2000")
    assert contents(server.bodies[1])[-1] == "one\ntwo"
    assert len(file.read_text().splitlines()) < 1010 and file.stat().st_mode & 0o777 == 0o600


def test_an_answer_that_the_loop_guard_ended_says_so() -> None:
    def loop(peer: Peer, body: dict[str, Any]) -> None:
        looped = {"loops_ended": int(body.get("loop_guard", True))}
        used = {"completion_tokens": 4, "completion_tokens_details": looped}
        peer.event_stream({"content": "ha ha"}, finish="stop", usage=used)

    with serving(loop) as server:
        for words, told in (((), True), (("--set", "loop_guard=false"), False)):
            done = chat(server.url, "one\n", *words)
            assert done.stdout == "ha ha\n" and ("it repeated itself" in done.stderr) == told


def test_a_cut_answer_says_so(tmp_path: Path) -> None:
    def cut(peer: Peer, body: dict[str, Any]) -> None:
        if len(body["messages"]) > 2:
            why = {"message": "too long", "code": "context_length_exceeded"}
            return peer.reply(400, {"error": why})
        used = {"completion_tokens": 4, "prompt_tokens": 96}
        peer.event_stream({"content": "half a w"}, finish="length", usage=used)

    with serving(cut) as server:
        full, limited = "the context is full; /reset starts", "cut off after max_tokens = 4"
        for words, told in (((), full), (("--set", "max_tokens=4"), limited)):
            done = chat(server.url, "one\n", *words)
            assert (done.returncode, done.stdout) == (0, "half a w\n") and told in done.stderr
        server.context = 100
        with terminal(tmp_path, "chat", "--url", server.url) as t:
            t.wait_for("> ")
            t.type("one\n")
            told = t.wait_for("> ")
            assert full in told and "context: 100 of 100 tokens (100%)" in told
            t.type("two\n")
            assert "too long; /reset starts a new conversation" in t.wait_for("> ")


def test_life_while_a_prompt_is_read(tmp_path: Path) -> None:
    def slow(peer: Peer, body: dict[str, Any]) -> None:
        assert body["return_progress"] and body["stream_options"]["include_usage"]
        peer.send_response(200)
        peer.end_headers()
        read = {"total": 18_000, "cache": 0, "processed": 4_500, "time_ms": 1}
        peer.event({"choices": [], "prompt_progress": read})
        time.sleep(0.5)
        peer.event({"choices": [{"index": 0, "delta": {"content": "done"}}]})
        peer.wfile.write(b"data: [DONE]\n\n")

    with serving(slow) as server, terminal(tmp_path, "chat", "--url", server.url) as t:
        t.wait_for("> ")
        t.type("x\n")
        t.wait_for("reading the prompt: 25% of 18,000 tokens")
        t.wait_for("done")
        t.wait_for("> ")
    assert "reading" not in screen(t) and "done" in screen(t)


def test_commands(tmp_path: Path) -> None:
    with serving(echo) as server, terminal(tmp_path, "chat", "--url", server.url) as t:

        def say(line: str) -> str:
            t.type(f"{line}\n")
            t.wait_for("\n")
            return " ".join(t.wait_for("> ").split())

        t.wait_for("> ")
        for word in ("/model", "/system", "/set", "/image", "/save", "/reset", "/exit"):
            assert word in say("/help")
        assert say("/set temperature 0.2") == "temperature = 0.2"
        assert say("/set stop END") == 'temperature = 0.2, stop = "END"'
        assert "no field 'temprature'; give one of temperature, top_p" in say("/set temprature 1")
        assert say("/system Be brief.") == "system message: Be brief."
        say("one")
        assert say("/set temperature") == 'stop = "END"'
        assert say('/system ""') == "system message: none"
        say("two")
        assert say("/model") == "* tiny (served)" and say("/model tiny") == "now tiny"
        assert "there is no command /modle; /help lists them all" in say("/modle x")
        say("/etc/hosts is what?")
        say(" /help me")
        assert "tiny reads text only" in say("/image x.png")
        assert say("/save talk.md") == "saved to talk.md"
        assert "talk.md: File exists; give another name" in say("/save talk.md")
        assert say("/save talk.json") == "saved to talk.json"
        assert say("/reset") == "a new conversation"
        say("three")
        assert t.end() == 0
    first, second, third, blank, fourth = server.bodies
    assert (first["temperature"], first["stop"]) == (0.2, "END") and "temperature" not in second
    assert contents(first) == ["Be brief.", "one"] and contents(second)[0] == "one"
    assert contents(third)[-1] == "/etc/hosts is what?" and contents(fourth) == ["three"]
    assert contents(blank)[-1] == " /help me"
    assert "## user\n\none\n\n## assistant\n\nYou said one.\n" in (tmp_path / "talk.md").read_text()
    assert json.loads((tmp_path / "talk.json").read_text())[0] == {"role": "user", "content": "one"}


def test_a_server_that_loads_is_waited_for() -> None:
    asked: list[str] = []

    def loading(peer: Peer) -> None:
        asked.append(peer.path)
        if len(asked) < 3:
            return peer.reply(503, {"error": {"message": "it loads", "code": "loading"}})
        peer.reply(200, {"data": [{"id": "tiny"}]})

    with serving(echo) as server:
        server.RequestHandlerClass = type("Loading", (Peer,), {"do_GET": loading})
        done = chat(server.url, "one\n")
    assert (done.returncode, done.stdout) == (0, "You said one.\n") and len(asked) == 3
    assert done.stderr.count("it loads") == 1


def test_another_model() -> None:
    with serving(echo) as server:
        chat(server.url, "one\n", "--model", "org/a b", "--set", "top_p=0.5")
    assert server.asked == ["/v1/models/org/a%20b"] and server.bodies[0]["top_p"] == 0.5
    done = chat(server.url, "one\n", "--set", "topp=1")
    assert done.returncode == 2 and "there is no field 'topp'; give one of temp" in done.stderr


SET = {  # what may be typed, and what is sent
    "temperature": {"0": 0, "0.2": 0.2, "2": 2},
    "top_p": {"1": 1, "0.95": 0.95},
    "top_k": {"-1": -1, "40": 40},
    "min_p": {"0.1": 0.1},
    "max_tokens": {"1": 1, "4000": 4000},
    "seed": {"0": 0, "7": 7},
    "stop": {"END": "END", '"a b"': "a b", '["a", "b"]': ["a", "b"], "5": "5", "null": "null"},
    "presence_penalty": {"-2": -2, "1.5": 1.5},
    "frequency_penalty": {"-2": -2},
    "repetition_penalty": {"1.1": 1.1},
    "reasoning_effort": {"low": "low", '"low"': "low", "none": "none"},
    "reasoning": {'{"effort": "low"}': {"effort": "low"}},
    "chat_template_kwargs": {'{"a": true}': {"a": True}},
    "response_format": {'{"type": "json_object"}': {"type": "json_object"}},
    "loop_guard": {"false": False, "true": True},
    "priority": {"-1000": -1000, "5": 5},
}
WORDS = ("hot", "[]", "{}", "true", "null", "nan", "1e999", '"1"', "1,5", "0x10", "9" * 5000)
WRONG = {
    **dict.fromkeys(("top_k", "max_tokens", "seed", "priority"), (*WORDS, "0.5", "1e30")),
    "temperature": (*WORDS, "2.1", "-0.1"),
    "top_p": (*WORDS, "1.1", "-1"),
    "min_p": (*WORDS, "1.1"),
    "presence_penalty": (*WORDS, "3"),
    "frequency_penalty": (*WORDS, "-2.5"),
    "repetition_penalty": (*WORDS, "0", "11"),
    "loop_guard": ("maybe", "1", "[]", "null"),
    **dict.fromkeys(
        ("reasoning", "chat_template_kwargs", "response_format"),
        ("json", "5", "[]", "true", "null", "{", "[" * 100_000),
    ),
}


@pytest.mark.parametrize("name", SET)
def test_what_a_field_may_be_is_known_before_it_is_sent(name: str) -> None:
    """A value that the server would refuse changes nothing, and the message says what may be."""
    talk = Chat(("http://localhost", ""))
    for typed, sent in SET[name].items():
        talk.set(name, typed)
        assert talk.fields == {name: sent} and type(talk.fields[name]) in (type(sent), float)
    for typed in WRONG.get(name, ()):
        with pytest.raises(UserError) as caught:
            talk.set(name, typed)
        assert talk.fields == {name: sent}
        assert name in str(caught.value) and "give " in str(caught.value)
        assert len(str(caught.value)) < 400
    talk.set(name, "")
    assert talk.fields == {}


def test_what_may_be_set_the_server_takes() -> None:
    for name, values in SET.items():
        for sent in values.values():
            said = [{"role": "user", "content": "a"}]
            parse(Fields, json.dumps({"messages": said, name: sent}).encode())


def test_set_says_what_is_needed(tmp_path: Path) -> None:
    with serving(echo) as server:
        with terminal(tmp_path, "chat", "--url", server.url) as t:
            t.wait_for("> ")
            t.type("/set temperature hot\n")
            t.wait_for("\n")
            told = " ".join(t.wait_for("> ").split())
            assert "temperature = 'hot' is not allowed; give 0 to 2" in told
            t.type("/set\n")
            t.wait_for("\n")
            assert "all fields are the model's own" in t.wait_for("> ")
            assert t.end() == 0
        for words in (("--set", "temperature=hot"), ("--temperature", "5")):
            done = chat(server.url, "one\n", *words)
            assert done.returncode == 2 and "0 to 2" in done.stderr
        assert not server.bodies


def test_interrupt_at_a_drawn_terminal(tmp_path: Path) -> None:
    """What was shown stays, once, and keys that are pressed meanwhile are not drawn into it."""

    def slow(peer: Peer, body: dict[str, Any]) -> None:
        if len(body["messages"]) > 1:
            return echo(peer, body)
        peer.stream("so **far**\n", end=False)
        peer.connection.recv(1)

    with serving(slow) as server, terminal(tmp_path, "chat", "--url", server.url) as t:
        t.wait_for("> ")
        t.type("one\n")
        t.wait_for("so far")
        t.type("tw")
        time.sleep(0.5)
        t.type("\x03")
        assert "tw" not in t.wait_for("stopped")
        t.wait_for("> ")
        t.type("two\n")
        t.wait_for("You said")
        t.wait_for("> ")
    assert contents(server.bodies[1])[:2] == ["one", "so **far**\n"]
    assert screen(t).count("so far") == 1
