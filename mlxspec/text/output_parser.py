"""Splits the text of an answer into reasoning, content and tool calls.

Works on a stream: the parts are the same however the text is split. What looks like a call but
cannot be parsed is content, and the log says why; a call whose arguments have begun stays one.
Markers are mlx-lm's, and the white space around them is dropped with them.
"""

import re
import secrets
from dataclasses import InitVar, dataclass
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import log
from mlxspec.text.call_arguments import (
    BETWEEN,
    MAX_HEAD,
    WHOLE_CALL,
    Arguments,
    begin_call,
    skipped,
)
from mlxspec.text.formats import format_of, is_harmony
from mlxspec.text.literals import NOT_JSON
from mlxspec.text.markers import (
    CALL_STATES,
    CONTENT,
    CONTENT_STATES,
    NORMAL,
    REASONING,
    REASONING_STATES,
    TAG_BEGINS,
    call_edges,
    marker_patterns,
    plain_patterns,
    transitions,
)
from mlxspec.text.messages import Tools, Types, parameter_types
from mlxspec.text.tool_calls import read_calls, string_quote
from mlxspec.types import line_of

Kind = Literal["reasoning", "content", "call"]

START = re.compile(rf"\A(?:{BETWEEN})*+")  # before a call without tags
LIST = re.compile(r"\s*\[\s*[\w.:-]*+(?:\(|\Z)")  # where the content may be calls in brackets
# The name of a call whose arguments have not begun, in any format.
CUT_CALL = r"(?:\W*(?:open|call|tool|to|functions?|invoke|name)\b)*+\W*([\w.-]+)"


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is a JSON object as text, and grows with the parts of the call. It
    is incomplete if the answer breaks off, and not JSON if the model wrote none."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """The next text of one kind. For a call it is the next piece of its arguments, maybe empty;
    `opens` marks the first part of a call, which has no text, and `ends` the last. The parts of a
    call are contiguous, and their texts together are `call.arguments`. A call without a last part
    was cut off: by the token limit, a stop string, or the model itself."""

    kind: Kind
    text: str = ""
    call: Call | None = None
    opens: bool = False
    ends: bool = False


@dataclass
class OutputParser:
    """The parser of one answer. Without `tools`, what looks like a call is content. `thinking`: the
    prompt has opened the reasoning. `constrained`: the answer follows a grammar, so calls have
    their tags and none interrupts the reasoning. `continued`: it continues the prompt's text."""

    tokenizer: TokenizerWrapper
    tools: InitVar[Tools | Types]  # or their `parameter_types`
    thinking: bool
    constrained: bool = False
    continued: bool = False

    def __post_init__(self, tools: Tools | Types) -> None:
        tokenizer, calls = self.tokenizer, bool(tools)
        self._form = form = format_of(tokenizer)
        self._edges = transitions(tokenizer, calls, self.constrained)
        self._patterns = marker_patterns(tokenizer, calls, self.constrained)
        self._plain = plain_patterns(tokenizer, calls, self.constrained)
        self._ends = {layout.end_marker for layout in form.layouts if layout.end_marker}
        # Calls like those of Python in brackets, without markers.
        self._bare = any(
            not layout.start_marker and layout.style == "words" for layout in form.layouts
        )
        tagged = re.match(TAG_BEGINS, form.layouts[0].start_marker)
        self._untagged = calls and not (self.constrained and tagged)
        # The end of the text that may be a marker or begin one; the prompt may end in one.
        self._tail = form.think_start if self.thinking else ""
        self._types = tools if isinstance(tools, dict) else parameter_types(tools)
        self._held = ""  # text of an open call, or of what may be one
        self._reader: Arguments | None = None  # of the last call, while its arguments come
        self._called = False  # since the last marker
        self.calls: list[Call] = []
        self._parts: list[Part] = []  # until they are returned
        self._last: Kind | None = None  # of the last part
        first = "header" if is_harmony(tokenizer) else tokenizer.response_initial_state or NORMAL
        self._enter(NORMAL if self.continued else first)

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this text."""
        if text.isspace():
            self._tail += text
            return []
        text = self._tail + text
        if self._plain[self._state].fullmatch(text):
            self._tail = ""
            self._add(text)
            return self._drain()
        while match := self._patterns[self._state].search(text):
            state = self._state
            self._add(text[: match.start()])
            if self._state != state:  # it has other markers
                text = text[match.start() :]
                continue
            self._tail, text = match[0], text[match.end() :]
            if not text:  # it may go on
                break
            self._on_marker(self._tail)
        return self._drain()

    @property
    def space(self) -> str:
        """White space after the content; dropped with a marker if one follows."""
        shown = self._state == CONTENT and self._last == "content"
        return self._tail[: -len(self._tail.lstrip()) or None] if shown else ""

    def finish(self, cut: bool = False) -> list[Part]:
        """The parts that were held back; call it once, after the last text. `cut`: the model did
        not end."""
        parts = self.feed("")
        if self._tail.strip() in self._edges[self._state]:
            self._on_marker(self._tail)
        elif self._reader or self._tail.strip() or not (self.calls or self._last == "reasoning"):
            self._add(self._tail)
        if self._reader and not cut:
            self._add_arguments(self._reader, self._reader.finish())
        if self._state in CALL_STATES and not self._reader:
            match = re.match(skipped(self._form).pattern + CUT_CALL, self._held) if cut else None
            if match and match[1] in self._types:
                self._open_call(match[1])
            else:
                self._end_call()
        self._end_untagged()
        headed = self._state in (CONTENT, REASONING, *CALL_STATES)
        if not headed and not self._held.lstrip().startswith("<|"):
            text = self._held  # an answer without a header
            self._enter(CONTENT)
            self._emit_text(text)
        return parts + self._drain()

    def _drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _enter(self, state: str, marker: str = "") -> None:
        self._state, self._held = state, marker if state in CALL_STATES else ""
        self._reader, self._called = None, False
        if state == NORMAL and (not self._untagged or self._last == "content"):
            self._state = CONTENT

    def _add(self, text: str) -> None:
        """Add text of the current state, without markers."""
        if self._state in (CONTENT, REASONING):
            self._emit_text(text)
            return
        self._stream(text)
        if self._state == NORMAL and not self._reader:
            begins = self._begins() in ("", "{", "`") or self._is_named()
            whole = self._is_list() or WHOLE_CALL.match(self._held)
            if not whole and (not begins or len(self._held) > MAX_HEAD):
                self._end_untagged()

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit(Part("reasoning" if self._state in REASONING_STATES else "content", text))

    def _emit(self, part: Part) -> None:
        self._parts.append(part)
        self._last = part.kind

    def _on_marker(self, text: str) -> None:
        """`text` is the marker with the white space around it."""
        marker = text.strip()
        before, after = self._state, self._edges[self._state][marker]
        content = before in CONTENT_STATES
        answered = self._last == "content" or bool(self.calls)
        if before in CALL_STATES or self._reader:
            if self._reader or after in (CONTENT, REASONING):
                self._stream(text)
            if self._reader:  # a part of the arguments
                return
            if not self._called and self._in_string():
                self._held += "" if after in (CONTENT, REASONING) else text
                return
            short = len(self._held) <= MAX_HEAD
            if after in CALL_STATES and short and skipped(self._form).fullmatch(self._held):
                self._enter(after, self._held + text)  # a marker before a marker
                return
            if self._called:
                self._held = self._held.removesuffix(text)
            self._end_call()
            self._enter(after, text)
        elif content and after == NORMAL:  # a marker that leads nowhere
            if marker in self._ends:
                shown = self._last != "call"
            else:  # an end-of-reasoning marker without a start
                shown = marker == self._form.think_end and (answered or bool(self._held.strip()))
            if shown:
                self._add(text)
        elif content and after == REASONING and (answered or self._held.strip()):
            self._add(text)  # once it has begun, an answer opens no reasoning
        else:
            self._end_untagged()
            self._enter(after, text)

    def _stream(self, text: str) -> None:
        """Add text of calls, and emit the arguments that are certain."""
        self._held += text
        while self._held:
            if not self._reader:
                if self._state == NORMAL and self._begins() not in ("{", "`"):
                    if not self._is_named():
                        return
                start = begin_call(self._held, self._form, self._types)
                if not start:
                    return
                name, self._reader, at = start
                self._held, self._called = self._held[at:], True
                self._open_call(name)
            text, self._held = self._held, ""
            self._add_arguments(self._reader, self._reader.feed(text))

    def _add_arguments(self, reader: Arguments, arguments: str) -> None:
        """Add arguments that `reader` returned."""
        if arguments or reader.ended:
            self._add_to_call(arguments, ends=reader.ended)
        if reader.ended:
            self._reader, self._held = None, reader.rest

    def _open_call(self, name: str) -> None:
        self.calls.append(Call(f"call_{secrets.token_hex(12)}", name, ""))
        self._add_to_call("", opens=True)

    def _add_to_call(self, arguments: str, opens: bool = False, ends: bool = False) -> None:
        call = self.calls[-1]
        call.arguments += arguments
        self._emit(Part("call", arguments, call, opens, ends))

    def _end_call(self) -> None:
        """Add the calls in the held text. If it cannot be parsed it is text, with its markers."""
        if self._called:
            self._held = skipped(self._form).sub("", self._held, 1)
        text = call_edges(self._form).sub("", self._held)
        if not self._held:
            return
        try:
            calls = read_calls(text, self._form, self._types)
        except NOT_JSON as error:
            log.info("a tool call cannot be parsed and is shown as text: %s", line_of(error))
            self._emit_text(self._held)
            return
        for name, arguments in calls:
            self._open_call(name)
            self._add_to_call(arguments, ends=True)

    def _in_string(self) -> bool:
        """Whether the held text, of calls that are read as a whole, ends inside a string."""
        held = self._held.lstrip()
        opened = (
            each
            for each in self._form.layouts
            if each.start_marker and held.startswith(each.start_marker)
        )
        layout = next(opened, self._form.layouts[0])
        quote = string_quote(layout) if layout.style == "words" else '"'
        if layout.style not in ("words", "whole") or quote == "'":
            return False
        quotes = re.sub(r"\\.", "", self._held, flags=re.DOTALL).count(quote)
        try:
            return quotes % 2 == 1 and not read_calls(self._held, self._form, self._types)
        except NOT_JSON:
            return True

    def _begins(self) -> str:
        """The character with which the held text may begin a call."""
        return START.sub("", self._held[:MAX_HEAD])[:1]

    def _is_named(self) -> bool:
        """Whether the held text may be a call that begins with a tool's name, as in formats that
        have no markers or whose prompts end with them."""
        layout = self._form.layouts[0]
        held = self._held[:MAX_HEAD].lstrip()
        if layout.style != "json" or layout.name_opens or re.match(TAG_BEGINS, layout.start_marker):
            return False
        if layout.start_marker.startswith(held) and self.calls:
            return True
        held = held.removeprefix(layout.start_marker)
        return any(tool.startswith(held) or held.startswith(tool) for tool in self._types)

    def _is_list(self) -> bool:
        """Whether the held text may be calls in brackets, like those of Python."""
        return self._bare and bool(LIST.match(self._held[:MAX_HEAD]))

    def _end_untagged(self) -> None:
        """End what may be calls in JSON without tags; the rest is content."""
        if self._state == NORMAL:
            empty = self._untagged and not self._called
            if self._is_list() or (empty and WHOLE_CALL.match(self._held)):
                self._end_call()
                self._held = ""
            text = START.sub("", self._held) if self._called else self._held
            self._enter(CONTENT)
            self._emit_text(text)
