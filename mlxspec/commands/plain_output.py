"""What the chat writes where stdout is no terminal: the answers alone; everything else goes to
stderr."""

import sys
import unicodedata
from shutil import get_terminal_size
from textwrap import TextWrapper


class PlainAnswer:
    """One answer as it comes, while its block is entered: answers to stdout, reasoning to
    stderr."""

    def __init__(self) -> None:
        self.kind = ""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self.kind == "content":
            print(flush=True)

    def write(self, kind: str, text: str) -> None:
        """Write more of the answer, or of its reasoning; progress is for terminals."""
        if kind == "progress":
            return
        before, self.kind = self.kind, kind  # Ctrl-C may come at any moment
        if kind == "reasoning":
            note(dim(text), end="")
            return
        if before == "reasoning":
            note("\n")
        print(strip_control(text), end="", flush=True)


def strip_control(text: str) -> str:
    """The text without control characters: a model must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def dim(text: str) -> str:
    """The text without control characters, in grey on a terminal."""
    return f"\x1b[2m{strip_control(text)}\x1b[0m" if sys.stderr.isatty() else strip_control(text)


def note(text: str, end: str = "\n") -> None:
    """Write to stderr; on a terminal lines are broken between words."""
    if end and sys.stderr.isatty():
        wrap = TextWrapper(
            get_terminal_size().columns,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(map(wrap.fill, text.split("\n")))
    print(text, file=sys.stderr, flush=True, end=end)
