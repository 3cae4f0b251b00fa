"""Splits the text of an answer into reasoning, content and tool calls.

Works on a stream: the parts say the same however the text is cut into pieces. What looks like a
call but cannot be read is content, and the log says why; a call whose arguments have begun stays
one. Markers are mlx-lm's, and the white space around them goes with them.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import log
from mlxspec.text.call_arguments import (
    BETWEEN,
    MAX_HEAD,
    NOT_JSON,
    Arguments,
    begun,
    skipped,
)
from mlxspec.text.control_tokens import END, any_of, plain_text
from mlxspec.text.formats import FINAL, MESSAGE_END, NEXT_MESSAGE, ChatFormat, format_of, is_harmony
from mlxspec.text.layouts import MARKER, TAGS
from mlxspec.text.messages import Tools, Types, parameter_types
from mlxspec.text.tool_calls import read_calls
from mlxspec.types import line_of

Kind = Literal["reasoning", "content", "call"]
Edges = dict[str, dict[str, str]]  # state -> marker -> the next state

# The states of an answer. `NORMAL`, `REASONING` and `CALL` are mlx-lm's names.
NORMAL = "normal"  # the beginning of the content, which may be a call in JSON without tags
CONTENT = "content"
REASONING = "reasoning"
CALL = "tool"
BARE_CALL = "call without the markers of its section"
REASONING_CALL = "call inside the reasoning"

HARMONY: Mapping[str, Sequence[tuple[str, str]]] = {
    "header": [
        ("<|channel|>analysis", "header of reasoning"),
        ("to=", CALL),
        ("<|message|>", NORMAL),
    ],
    "header of reasoning": [("to=", CALL), ("<|message|>", REASONING)],
    # A text may speak of the end alone, and the model leaves it out.
    **{
        state: [(MESSAGE_END + NEXT_MESSAGE, "header"), (NEXT_MESSAGE, "header"), (FINAL, NORMAL)]
        for state in (REASONING, NORMAL, CALL)
    },
}

TAG_BEGINS = r"[<\[]"
CONTENT_STATES = (NORMAL, CONTENT)
CALL_STATES = (CALL, BARE_CALL, REASONING_CALL)
REASONING_STATES = (REASONING, REASONING_CALL)

START = re.compile(rf"\A(?:{BETWEEN})*+")  # before a call without tags
LIST = re.compile(r"\s*\[\s*[\w.:-]*+(?:\(|\Z)")  # where the content may be calls in brackets
BARE_CALL_OF_NOTHING = (  # in JSON, which is read when it has ended
    r'\s*(?:```json\s*)?\{\s*"name"\s*:\s*"[^"]+"\s*,\s*"(?:arguments|parameters)"\s*:\s*null'
)
# The name of a call whose arguments have not begun, in any format.
CUT_CALL = r"(?:\W*(?:open|call|tool|to|functions?|invoke|name)\b)*+\W*([\w.-]+)"


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is a JSON object as text, and grows with the parts of the call. It
    is no whole object where the answer breaks off, and no JSON where the model wrote none."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """Some more text of one kind. For a call the text is the next piece of its arguments, maybe
    empty; `opens` marks the first part of a call, which has no text, and `ends` the last. The parts
    of a call follow each other, and their texts together are `call.arguments`. A call without a
    last part is cut off: by the limit of tokens, a stop string, or the model itself."""

    kind: Kind
    text: str = ""
    call: Call | None = None
    opens: bool = False
    ends: bool = False


@dataclass
class OutputParser:
    """The parser of one answer. Without `tools`, what looks like a call is content. `thinking`: the
    prompt has opened the reasoning. `constrained`: the answer follows a grammar, so calls have
    their tags and none interrupts the reasoning. `continued`: it goes on with the prompt's text."""

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
        self._ends = {layout.end for layout in form.layouts if layout.end}
        # Calls like those of Python in brackets, without markers.
        self._bare = any(not each.start and each.style == "words" for each in form.layouts)
        tagged = re.match(TAG_BEGINS, form.layouts[0].start)
        self._untagged = calls and not (self.constrained and tagged)
        # Of the text, where it may be a marker or begin one. The prompt may have ended in one.
        self._tail = form.think_start if self.thinking else ""
        self._types = tools if isinstance(tools, dict) else parameter_types(tools)
        self._held = ""  # text of a call that has not ended, or of what may be one
        self._reader: Arguments | None = None  # of the last call, while its arguments come
        self._sent = False  # a call since the last marker
        self.calls: list[Call] = []
        self._made: list[Part] = []  # until they are taken
        self._last: Kind | None = None  # of all parts
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
            return self._take()
        while found := self._patterns[self._state].search(text):
            state = self._state
            self._add(text[: found.start()])
            if self._state != state:  # which has other markers
                text = text[found.start() :]
                continue
            self._tail, text = found[0], text[found.end() :]
            if not text:  # it may go on
                break
            self._on_marker(self._tail)
        return self._take()

    @property
    def space(self) -> str:
        """White space behind the content, which goes with a marker if one follows."""
        shown = self._state == CONTENT and self._last == "content"
        return self._tail[: -len(self._tail.lstrip()) or None] if shown else ""

    def finish(self, cut: bool = False) -> list[Part]:
        """The parts that were held back; call it once, after the last text. `cut`: the model would
        have gone on."""
        made = self.feed("")
        if self._tail.strip() in self._edges[self._state]:
            self._on_marker(self._tail)
        elif self._reader or self._tail.strip() or not (self.calls or self._last == "reasoning"):
            self._add(self._tail)
        if self._reader and not cut:
            self._take_from(self._reader, self._reader.finish())
        if self._state in CALL_STATES and not self._reader:
            named = re.match(skipped(self._form).pattern + CUT_CALL, self._held) if cut else None
            if named and named[1] in self._types:
                self._open_call(named[1])
            else:
                self._end_call()
        self._end_untagged()
        headed = self._state in (CONTENT, REASONING, *CALL_STATES)
        if not headed and not self._held.lstrip().startswith("<|"):
            text = self._held  # an answer without a header
            self._enter(CONTENT)
            self._say(text)
        return made + self._take()

    def _take(self) -> list[Part]:
        made, self._made = self._made, []
        return made

    def _enter(self, state: str, marker: str = "") -> None:
        self._state, self._held = state, marker if state in CALL_STATES else ""
        self._reader, self._sent = None, False
        if state == NORMAL and (not self._untagged or self._last == "content"):
            self._state = CONTENT

    def _add(self, text: str) -> None:
        """Text of the present state, without markers."""
        if self._state in (CONTENT, REASONING):
            self._say(text)
            return
        self._stream(text)
        if self._state == NORMAL and not self._reader:
            begins = self._begins() in ("", "{", "`") or self._is_named()
            if not self._is_list() and (not begins or len(self._held) > MAX_HEAD):
                self._end_untagged()

    def _say(self, text: str) -> None:
        if text:
            self._emit(Part("reasoning" if self._state in REASONING_STATES else "content", text))

    def _emit(self, part: Part) -> None:
        self._made.append(part)
        self._last = part.kind

    def _on_marker(self, found: str) -> None:
        """`found` has white space around the marker."""
        marker = found.strip()
        before, after = self._state, self._edges[self._state][marker]
        content = before in CONTENT_STATES
        said = self._last == "content" or bool(self.calls)
        if before in CALL_STATES or self._reader:
            if self._reader or after in (CONTENT, REASONING):
                self._stream(found)
            if self._reader:  # a part of the arguments
                return
            if self._sent:
                self._held = self._held.removesuffix(found)
            self._end_call()
            self._enter(after, found)
        elif content and after == NORMAL:  # a marker that leads nowhere
            if marker in self._ends:
                shown = self._last != "call"
            else:  # an end-of-reasoning marker without a start
                shown = marker == self._form.think_end and (said or bool(self._held.strip()))
            if shown:
                self._add(found)
        elif content and after == REASONING and (said or self._held.strip()):
            self._add(found)  # nothing in the answer itself opens the reasoning any more
        else:
            self._end_untagged()
            self._enter(after, found)

    def _stream(self, text: str) -> None:
        """Add text of calls, and the arguments that it makes certain."""
        self._held += text
        while self._held:
            if not self._reader:
                if self._state == NORMAL and self._begins() not in ("{", "`"):
                    if not self._is_named():
                        return
                found = begun(self._held, self._form, self._types)
                if not found:
                    return
                name, self._reader, at = found
                self._held, self._sent = self._held[at:], True
                self._open_call(name)
            text, self._held = self._held, ""
            self._take_from(self._reader, self._reader.feed(text))

    def _take_from(self, reader: Arguments, arguments: str) -> None:
        """Add what a reader has found."""
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
        """Add the calls of the held text. What cannot be read is text, with its markers."""
        if self._sent:
            self._held = skipped(self._form).sub("", self._held, 1)
        text = call_edges(self._form).sub("", self._held)
        if not self._held:
            return
        try:
            calls = read_calls(text, self._form, self._types)
        except NOT_JSON as error:
            log.info("a tool call cannot be read and is shown as text: %s", line_of(error))
            self._say(self._held)
            return
        for name, arguments in calls:
            self._open_call(name)
            self._add_to_call(arguments, ends=True)

    def _begins(self) -> str:
        """The character with which the held text may begin a call."""
        return START.sub("", self._held[:MAX_HEAD])[:1]

    def _is_named(self) -> bool:
        """Whether the held text may be a call that begins with a tool's name, as in formats that
        have no markers or whose prompts end with them."""
        layout = self._form.layouts[0]
        held = self._held[:MAX_HEAD].lstrip()
        if layout.style != "json" or layout.name_opens or re.match(TAG_BEGINS, layout.start):
            return False
        if layout.start.startswith(held) and self.calls:
            return True
        held = held.removeprefix(layout.start)
        return any(tool.startswith(held) or held.startswith(tool) for tool in self._types)

    def _is_list(self) -> bool:
        """Whether the held text may be calls in brackets, like those of Python."""
        return self._bare and bool(LIST.match(self._held[:MAX_HEAD]))

    def _end_untagged(self) -> None:
        """The end of what may be calls in JSON without tags: what is left is content."""
        if self._state == NORMAL:
            empty = self._untagged and not self._sent
            if self._is_list() or (empty and re.match(BARE_CALL_OF_NOTHING, self._held)):
                self._end_call()
                self._held = ""
            text = START.sub("", self._held) if self._sent else self._held
            self._enter(CONTENT)
            self._say(text)


@lru_cache
def call_edges(form: ChatFormat) -> re.Pattern[str]:
    """The markers at the two ends of a text of calls."""
    starts = any_of(layout.start for layout in form.layouts if layout.start)
    ends = any_of(layout.end for layout in form.layouts if layout.end)
    return re.compile(rf"\A\s*(?:{starts})|(?:{ends})\s*\Z")


@lru_cache(64)
def marker_patterns(
    tokenizer: TokenizerWrapper,
    calls: bool,
    constrained: bool,
) -> dict[str, re.Pattern[str]]:
    """For each state the pattern of its markers, or of the beginning of one at a text's end, with
    white space around."""
    edges = transitions(tokenizer, calls, constrained)
    return {
        state: re.compile(rf"(?<!\s)\s*+(?:{any_of(some, END)}{END})\s*+")
        for state, some in edges.items()
    }


@lru_cache(64)
def plain_patterns(
    tokenizer: TokenizerWrapper,
    calls: bool,
    constrained: bool,
) -> dict[str, re.Pattern[str]]:
    """For each state the pattern of text in which no marker begins, nor white space before one."""
    edges = transitions(tokenizer, calls, constrained)
    return {state: plain_text(marker[0] for marker in some) for state, some in edges.items()}


@lru_cache(64)
def transitions(tokenizer: TokenizerWrapper, calls: bool, constrained: bool) -> Edges:
    """The markers that lead from each state to another: of the format, and where the answer has
    headers those of mlx-lm or Harmony. With `calls` also those of calls, and of what models write
    in their place."""
    form = format_of(tokenizer)
    own = HARMONY if is_harmony(tokenizer) else tokenizer.response_transitions
    edges: Edges = {state: {} for state in (CONTENT, REASONING, *CALL_STATES)}
    content, reasoning = edges[CONTENT], edges[REASONING]
    words = {}  # which open calls only where the content begins
    if form.think_start:
        content |= {form.think_end: NORMAL, form.think_start: REASONING}
        reasoning[form.think_end] = NORMAL
    headed = any(state == CALL for some in own.values() for _, state in some)
    for layout in form.layouts if calls else ():
        start, end = layout.start, layout.end
        if end:
            edges[CALL][end], edges[REASONING_CALL][end] = CONTENT, REASONING
            content[end] = NORMAL  # of a call that came without its start
        if start and not re.match(TAG_BEGINS, start):
            words[start] = CALL
        elif start and not headed:
            content[start] = edges[CALL][start] = CALL  # again: an end was left out
            if form.think_start and not constrained:
                reasoning[start] = edges[REASONING_CALL][start] = REASONING_CALL
                edges[REASONING_CALL][form.think_end] = NORMAL
        inner, closes = MARKER.match(layout.name_opens), re.search(TAGS, layout.closes)
        if inner and closes and re.match(TAG_BEGINS, inner[0]) and not headed:
            if not any(marker.startswith(inner[0]) for marker in (*content, start)):
                content[inner[0]] = BARE_CALL
            edges[BARE_CALL][closes[0]] = CONTENT
    for marker in (*(tokenizer.structural_markers or ()), *form.around):
        content[marker] = NORMAL
    edges[NORMAL] = content | words
    for state, some in own.items():
        edges.setdefault(state, {}).update(some)
        if state == NORMAL:
            content.update(some)
    return edges
