"""What the chat shows on a terminal: Markdown while it streams, reasoning in grey, a line that says
what the server does.

Rule: a finished block is printed once and scrolls away; only the last one is drawn again, of which
at most a screen is shown. Nothing that a model writes controls the terminal.
"""

import re
from threading import Event, Lock, Thread

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.syntax import Syntax
from rich.text import Text

from mlxspec.commands.plain_output import strip_control

REDRAWS = 8  # a second
MOST = 3000  # characters that are drawn again; a longer block is printed in parts
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
ITEM = re.compile(r"[-*+] |\d+[.)] ")


class AnswerCode(CodeBlock):
    """A block of code in the terminal's own background, so that its parts have no seam."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip("\n"),
            self.lexer_name,
            theme="ansi_dark",
            word_wrap=True,
            background_color="default",
        )


class AnswerMarkdown(Markdown):
    """Markdown as models write it: lines stay lines, HTML is text, links show where they lead."""

    elements = Markdown.elements | {"fence": AnswerCode, "code_block": AnswerCode}

    def __init__(self, text: str) -> None:
        super().__init__(text, hyperlinks=False)
        for token in self.parsed:
            if token.type == "html_block":
                token.type = "fence"
            for part in token.children or ():
                if part.type == "html_inline":
                    part.type = "text"
                elif part.type == "softbreak":
                    part.type = "hardbreak"


class LiveAnswer:
    """One answer on a terminal, while its block is entered. Ctrl-C leaves what was shown.

    Rich's own thread would draw between the two halves of a print, which first reads how many
    lines it erases and then writes, and leave lines twice; so whatever draws holds `drawing`.
    """

    def __init__(self) -> None:
        self.drawing = Lock()
        self.ended = Event()
        self.console = Console(highlight=False)
        self.state = Spinner("dots", Text("waiting", "dim"))
        self.kind = self.rest = self.before = ""
        self.cut = False
        self.live = Live(
            self,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> None:
        self.live.start()
        Thread(target=self._redraw, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        with self.drawing:
            rest, self.rest = self.rest, ""
            self._print(rest)
            self.live.stop()

    def _redraw(self) -> None:
        while not self.ended.wait(1 / REDRAWS):
            with self.drawing:
                if not self.ended.is_set():
                    self.live.refresh()

    def write(self, kind: str, text: str) -> None:
        """Show more of the answer or of its reasoning, or what the server does before."""
        with self.drawing:
            if kind == "progress":
                self.state.update(text=Text(text, "dim"))
            else:
                self._write(kind, text)

    def _write(self, kind: str, text: str) -> None:
        if kind != self.kind:
            rest, self.rest = self.rest, ""
            self._print(rest)
            self.kind, self.before = kind, ""
            self.console.print()
        self.rest += strip_control(text, self.rest)
        split = split_lines if kind == "reasoning" else split_blocks
        before, (done, self.rest) = len(self.rest), split(self.rest)
        self._print(done)
        if done:  # a part of a block goes on without an empty line
            self.cut = before > MOST

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last lines of what is not finished."""
        if not self.kind:
            yield self.state
            return
        if self.rest.strip():
            lines = console.render_lines(self._drawn(self.rest), options, pad=False)
            for line in lines[1 - console.height :]:
                yield from line
                yield Segment.line()

    def _drawn(self, text: str) -> RenderableType:
        return Text(text.strip("\n"), "dim") if self.kind == "reasoning" else AnswerMarkdown(text)

    def _print(self, text: str) -> None:
        if text.strip():
            listed = ITEM.match(self.before) and ITEM.match(text)
            if self.before and self.kind == "content" and not (listed or self.cut):
                self.console.print()
            self.console.print(self._drawn(text))
            self.before = text


def split_lines(text: str) -> tuple[str, str]:
    """The whole lines, and the rest; of a very long line, its words."""
    cut = text.rfind("\n") + 1
    if not cut and len(text) > MOST:
        cut = text.rfind(" ") + 1
    return text[:cut], text[cut:]


def split_blocks(text: str) -> tuple[str, str]:
    """What Markdown's later lines no longer change, and the rest. A block of more than MOST
    characters is cut between two lines; a code block is closed there and opened again."""
    at = end = 0
    fence = opening = ""
    blank = False
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if not fence and not line[0].isspace() and (blank or found):
            end = at
        if not line.endswith("\n"):
            break
        at += len(line)
        blank = not line.strip()
        if fence and found and found[2].startswith(fence) and not found[3].strip():
            fence = ""
            end = end if found[1] else at
        elif found and not fence:
            fence, opening = found[2], line
    if end or len(text) <= MOST:
        return text[:end], text[end:]
    if fence and at > len(opening):
        return f"{text[:at]}{fence}\n", opening + text[at:]
    return split_lines(text)
