"""What the chat writes where stdout is not a terminal: the answers; everything else goes to
stderr."""

import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import TextWrapper
from threading import Timer

# The flags of regions, as of England, and one that has not come to its end.
FLAG = re.compile("(\U0001f3f4[\U000e0020-\U000e007f]{0,7})")
OPEN_FLAG = re.compile(f"{FLAG.pattern}?$")
KEPT = "\n\t\u200c\u200d"  # the last two join letters, or do not
LATE_S = 2.0  # without an answer until the user is told


class PlainAnswer:
    """One answer as it comes, while its block is entered: answers to stdout, reasoning to
    stderr."""

    def __init__(self) -> None:
        self.kind = self.last = ""

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
        plain = strip_control(text, self.last)
        self.last = (self.last + plain)[-7:]
        print(plain, end="", flush=True)


def strip_control(text: str, before: str = "") -> str:
    """The text, which follows `before`, without control and format characters, by which a model
    could control the terminal, or hide or reorder what it shows. Joiners and the few tags of a flag
    stay, which emoji and scripts need, and Arabic's marks of numbers, which are visible."""
    found = OPEN_FLAG.search(before[-7:])
    begin = found[0] if found else ""
    parts = enumerate(FLAG.split(begin + text))
    plain = "".join(part if i % 2 else "".join(filter(_is_plain, part)) for i, part in parts)
    return plain[len(begin) :]


def _is_plain(char: str) -> bool:
    hidden = unicodedata.category(char) in ("Cc", "Cf")
    return not hidden or char in KEPT or unicodedata.bidirectional(char) == "AN"


@contextmanager
def waiting(url: str) -> Iterator[None]:
    """While the block takes long, say what it waits for."""
    late = Timer(LATE_S, note, [f"waiting for {url} to answer"])
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()  # a process with threads should not fork


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
