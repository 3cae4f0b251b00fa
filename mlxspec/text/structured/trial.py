"""Compiles a client's grammar in a separate process first, so that one that takes too much time or
memory, or overflows the stack, ends only that process.

A `Trial` keeps one small process per tokenizer (this module, run by itself), which imports neither
MLX nor transformers. It forks for each grammar, so its vocabulary is read once.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlxspec.files import MODULE

MAX_CPU_S = 3  # of one grammar
MAX_S = 10  # by the clock: others may run at the same time
MAX_MEMORY = 1 << 29  # bytes, in addition to what the process has at first
WATCH_S = 0.02  # between two checks of these
STACK = 4 << 20  # bytes; the server's threads have twice as much (server/process.py)
IDLE_S = 120.0  # without a grammar, until the process exits and frees its vocabulary
NICE = 5  # answers have priority
COMMAND = (*MODULE, "mlxspec.text.structured.trial")
# llguidance's own bounds: about 20 ms of work on regular expressions at first, 30 ms a mask.
LIMITS = LLParserLimits(
    verbose_errors=False,
    max_items_in_row=20_000,
    max_lexer_states=60_000,
    step_max_items=10_000,
)


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The matcher of a grammar; it may be in an error state."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def warm_error(matcher: LLMatcher) -> str:
    """The error of a matcher, "" if there is none. The first mask warms the lexer, and detects a
    grammar that nothing satisfies."""
    matcher.compute_bitmask()
    return str(matcher.get_error())


def too_much() -> str:
    """The error of what exceeds the limits."""
    limits = f"{MAX_CPU_S} s or {MAX_MEMORY >> 20} MiB"
    return f"compiling it takes more than {limits}, or too deep a stack"


class Trial:
    """Tries grammars for one tokenizer, `vocabulary` in the JSON of Hugging Face's tokenizers with
    the end tokens `eos`. Thread-safe."""

    def __init__(self, vocabulary: str, eos: list[int]) -> None:
        self._tokenizer = json.dumps([vocabulary, eos]).encode()
        self._lock = threading.Lock()
        self._control: socket.socket | None = None  # to the process
        self._end: Callable[[], object] = lambda: None

    def run(self, grammar: str) -> tuple[float, int, str]:
        """The CPU seconds and the bytes that a grammar takes to compile, and why it cannot be used,
        "" if it can. Raises RuntimeError if the process cannot be started."""
        [[seconds, size, why], *_] = [*self._ask([grammar], False), [MAX_CPU_S, 0, too_much()]]
        return seconds, size, why

    def check(self, grammars: list[str]) -> list[tuple[bool, list[str]]]:
        """Of each grammar whether it cannot be compiled, and the error or llguidance's warnings. If
        they exceed the limits together, nothing is known of those after. Raises RuntimeError as
        `run`."""
        return [*self._ask(grammars, True), (True, [too_much()])][: len(grammars)]

    def _ask(self, grammars: list[str], check: bool) -> list[Any]:
        ours, theirs = socket.socketpair()
        ours.settimeout(2 * MAX_S)
        answer = b""
        with ours:
            with theirs, self._lock:
                self._hand_over(theirs)
            with suppress(OSError):  # the fork has ended
                ours.sendall(json.dumps([grammars, check]).encode())
                ours.shutdown(socket.SHUT_WR)
                answer = _read(ours)
        return list(json.loads(answer or "[]"))

    def _hand_over(self, theirs: socket.socket) -> None:
        """Send one end of a pair to the process, after starting it if there is none or it has
        exited idle. macOS may lose a descriptor that is closed before it arrives."""
        for _ in range(2):
            with suppress(OSError):
                if self._control:
                    socket.send_fds(self._control, [b"g"], [theirs.fileno()])
                    if self._control.recv(1):
                        return
            self._start()
        raise RuntimeError("the process that compiles grammars ends at once; see the log")

    def _start(self) -> None:
        self._end()
        control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._control, self._end = control, weakref.finalize(self, _end, control, process)
        control.settimeout(2 * MAX_S)  # it has its vocabulary to read
        control.sendall(len(self._tokenizer).to_bytes(8, "little") + self._tokenizer)


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    process.kill()
    process.wait()


# ---- in the process ----------------------------------------------------------------------------


def main() -> None:
    """Read a tokenizer from standard input, a socket, then fork for each socket received."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the server's terminal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks need no waiting for
    with socket.socket(fileno=0) as control:
        size = int.from_bytes(control.recv(8, socket.MSG_WAITALL), "little")
        vocabulary, eos = json.loads(control.recv(size, socket.MSG_WAITALL))
        tokenizer = LLTokenizer(vocabulary, eos_token=eos)
        del vocabulary
        control.settimeout(IDLE_S)
        with suppress(OSError):
            while fds := socket.recv_fds(control, 1, 1)[1]:
                control.send(b"g")
                if not os.fork():
                    _try(tokenizer, socket.socket(fileno=fds[0]))
                os.close(fds[0])


def _try(tokenizer: LLTokenizer, client: socket.socket) -> None:
    """Compile the grammars that a socket sends, answer, and exit; beyond the limits the answer has
    only those before, or there is none."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    signal.alarm(MAX_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # keeps panics out of the server's log
    (grammars, check), memory = json.loads(_read(client)), _peak()
    results: list[Any] = []

    def work() -> None:
        for one in grammars:
            if check:
                told = LLMatcher.validate_grammar_with_warnings(one, tokenizer, limits=LIMITS)
                results.append(told)
            else:
                why = warm_error(new_matcher(tokenizer, one))
                # Of this fork alone.
                results.append([time.process_time(), _peak() - memory, why])

    threading.stack_size(STACK)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while (
        worker.is_alive()
        and _peak() - memory < MAX_MEMORY
        and time.process_time() < MAX_CPU_S - 5 * WATCH_S
    ):
        worker.join(WATCH_S)
    client.sendall(json.dumps(results).encode())
    os._exit(0)


def _peak() -> int:
    """The peak memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


if __name__ == "__main__":
    main()
