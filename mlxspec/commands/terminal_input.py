'''What a user types in the chat: one message a line, or several lines that are pasted at once or
stand between """ and """. What was typed is remembered between runs.

Rule: only the user may read the history; it is bounded, and failing to write it is not an error.
'''

import json
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mlxspec.commands.plain_output import note
from mlxspec.files import write_atomic

HISTORY = "chat-history"  # the file in the cache directory
REMEMBERED, MOST = 1000, 2000  # messages, after the file was cut and before
LONGEST = 4000  # bytes of the line of one that is remembered
PASTE_S = 0.05  # between the lines of a paste, where the terminal does not mark it
QUOTES = '"""'


def read_messages(file: Path, words: Iterable[str], hint: str) -> Iterator[str]:
    """The messages that a user types, with editing and the history in `file`, where Python has
    readline. `words` are completed; Ctrl-C prints the `hint`, Ctrl-D ends."""
    history, marked = _History(file), False
    with suppress(ImportError):
        marked = _edit(import_module("readline"), history, words)
    while True:
        try:
            text = _message(marked)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note(f"\n{hint}")
            continue
        if text.strip():
            history.add(text)
            yield unquote(text)


def split_messages(lines: Iterable[str]) -> Iterator[str]:
    """The messages in the lines of a file."""
    kept: list[str] = []
    for line in lines:
        kept.append(line.rstrip("\n"))
        if not _is_open(kept):
            yield unquote("\n".join(kept))
            kept = []
    if kept:
        yield unquote("\n".join(kept))


def unquote(text: str) -> str:
    """A message without blanks around it, or the text between the quotes as it is. One blank stays
    before a /, so that this is not read as a command."""
    begin, text = text[:2], text.strip()
    if not text.startswith(QUOTES):
        return f" {text}" if begin == " /" else text
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _is_open(lines: Sequence[str]) -> bool:
    """Whether quotes were opened and not closed yet."""
    text = "\n".join(lines).strip()
    return text.startswith(QUOTES) and (len(text) < 6 or not text.endswith(QUOTES))


def _message(marked: bool) -> str:
    """The lines of one message. `marked`: a paste comes as one line."""
    lines = [_line("> ")]
    while _is_open(lines) or (not marked and _waits()):
        lines.append(_line("... "))
    return "\n".join(lines)


def _waits() -> bool:
    """Whether more was typed or pasted already."""
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    note(prompt, end="")  # stdout is for answers
    return input()


def _edit(readline: Any, history: "_History", words: Iterable[str]) -> bool:
    """Set up line editing. Returns whether it marks what is pasted."""
    readline.set_auto_history(False)
    history.readline = readline
    history.read()
    known = list(words)

    def complete(begun: str, number: int) -> str | None:
        return dict(enumerate(word for word in known if word.startswith(begun))).get(number)

    readline.set_completer(complete)
    readline.set_completer_delims(" \n")
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
        return False
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")
    return os.environ.get("TERM", "dumb") != "dumb"


class _History:
    """The last messages, each a JSON text in a line of `file`; `last` is the newest."""

    readline: Any = None

    def __init__(self, file: Path) -> None:
        self.file = file
        self.last = ""

    def read(self) -> None:
        """Hand readline the last messages, without lines that are broken."""
        for line in self._lines()[-REMEMBERED:]:
            with suppress(ValueError, RecursionError):
                self._recall(str(json.loads(line)))

    def add(self, text: str) -> None:
        """Remember a message, unless it is the last one again."""
        if text == self.last:
            return
        self._recall(text)
        line = json.dumps(text, ensure_ascii=False) + "\n"
        data = line.encode(errors="surrogatepass")
        if len(data) <= LONGEST:
            with suppress(OSError):
                self._append(data)

    def _recall(self, text: str) -> None:
        self.last = text
        if self.readline:
            with suppress(ValueError):  # it takes no lone surrogate
                self.readline.add_history(text)

    def _lines(self) -> list[bytes]:
        with suppress(OSError):
            return self.file.read_bytes().splitlines(keepends=True)
        return []

    def _append(self, line: bytes) -> None:
        """Write a line; cuts the file first where it would pass its limit."""
        lines = self._lines()
        if len(lines) >= MOST or sum(map(len, lines)) > (MOST - 1) * LONGEST:
            lines = [one for one in lines[-REMEMBERED:] if len(one) <= LONGEST]
            write_atomic(self.file, b"".join(lines), mode=0o600)
        self.file.parent.mkdir(0o700, parents=True, exist_ok=True)
        self.file.touch(0o600)
        with self.file.open("ab") as file:
            if lines and not lines[-1].endswith(b"\n"):  # it was cut
                file.write(b"\n")
            file.write(line)


@contextmanager
def no_echo() -> Iterator[None]:
    """While the terminal is drawn to, keys are kept for the next message and not shown."""
    try:
        termios: Any = import_module("termios")
        before = termios.tcgetattr(sys.stdin)
    except Exception:  # no terminal
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
