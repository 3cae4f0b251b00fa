"""Splits the text of an answer into reasoning, content and tool calls.

Works on a stream: the parts are the same however the text is cut into pieces. Nothing is dropped:
what looks like a call but cannot be read is content, and the log says why. Markers are mlx-lm's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import log
from mlxspec.text.detokenizer import held_back
from mlxspec.text.messages import Tools
from mlxspec.text.tool_calls import (
    FUNCTION,
    FUNCTION_END,
    UNTAGGED_JSON,
    NamedArguments,
    is_xml,
    read_calls,
    read_untagged,
)

Kind = Literal["reasoning", "content", "call"]
Edges = dict[str, dict[str, str]]  # state -> marker -> the next state

# The states of an answer. `NORMAL`, `REASONING` and `CALL` are mlx-lm's names.
NORMAL = "normal"  # the beginning of the content, which may be a call in JSON without tags
CONTENT = "content"
JSON_CALL = "call in JSON without tags"
REASONING = "reasoning"
CALL = "tool"
XML_CALL = "call in XML without tags"
REASONING_CALL = "call inside the reasoning"

CONTENT_STATES = (NORMAL, CONTENT, JSON_CALL)
CALL_STATES = (CALL, XML_CALL, REASONING_CALL)
REASONING_STATES = (REASONING, REASONING_CALL)

UNTAGGED_CHARS = 64  # by which a call without tags must be recognised
MAX_TRIES = 8  # ends of one call that turn out to be none


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """Some more text of one kind, or a whole call."""

    kind: Kind
    text: str = ""
    call: Call | None = None


class PartBuffer:
    """Parts until they are taken, without the white space at the ends of reasoning and around
    calls."""

    def __init__(self, kind: Kind) -> None:
        self._made: list[Part] = []
        self._kind = kind
        # White space after the last text, not shown yet. None: the part has no text yet.
        self._space = "" if kind == "content" else None
        self.has_content = False
        self.after_call = False

    def add_text(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._kind, self._space = kind, None
        if self._space is None:
            text = text.lstrip()
            if not text:
                return
        text = (self._space or "") + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        self.after_call = False
        if kind == "content":
            self.has_content = True
        if self._made and self._made[-1].kind == kind:
            shown = self._made.pop().text + shown
        self._made.append(Part(kind, shown))

    def add_call(self, call: Call) -> None:
        self._made.append(Part("call", call=call))
        self._kind, self._space, self.after_call = "content", None, True

    def add_last_space(self) -> None:
        """An answer without calls keeps the white space at its end."""
        if self._kind == "content" and self._space:
            self._made.append(Part("content", self._space))

    def take(self) -> list[Part]:
        made, self._made = self._made, []
        return made


@dataclass
class OutputParser:
    """The parser of one answer. Without `tools`, what looks like a call is content. `thinking`: the
    prompt has opened the reasoning. `new_id` makes the id of a call. `constrained`: the answer
    follows a grammar, so calls have their tags and none interrupts the reasoning."""

    tokenizer: TokenizerWrapper
    tools: Tools
    thinking: bool
    new_id: Callable[[], str]
    constrained: bool = False

    def __post_init__(self) -> None:
        tokenizer, calls = self.tokenizer, bool(self.tools)
        self._edges = transitions(tokenizer, calls, self.constrained)
        self._patterns = {}
        for state, edges in self._edges.items():
            self._patterns[state] = re.compile("|".join(map(re.escape, edges)) or "(?!)")
        self._untagged = calls and not self.constrained
        self._tail = ""  # of the text: it may begin a marker
        self._held: list[str] = []  # text of a call that has not ended, or of what may be one
        self._tries = 0  # ends of that call that were none
        self._error = ""
        self.calls: list[Call] = []
        first = tokenizer.response_initial_state or (REASONING if self.thinking else NORMAL)
        self._parts = PartBuffer("reasoning" if first == REASONING else "content")
        self._enter(first)

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this text."""
        if not any(self._edges.values()):
            return [Part("content", text)] if text else []
        text, at = self._tail + text, 0
        while found := self._patterns[self._state].search(text, at):
            self._add(text[at : found.start()])
            self._on_marker(found[0])
            at = found.end()
        text = text[at:]
        ready = len(text) - held_back(text, self._edges[self._state])
        self._add(text[:ready])
        self._tail = text[ready:]
        return self._parts.take()

    def finish(self) -> list[Part]:
        """The parts that were held back; call it once, after the last text."""
        self._add(self._tail)
        if self._state in CALL_STATES and not self._end_call():
            self._call_as_text("")
        self._end_untagged()
        if not self.calls:
            self._parts.add_last_space()
        return self._parts.take()

    def _enter(self, state: str) -> None:
        self._state, self._held, self._tries = state, [], 0
        if state == NORMAL and (not self._untagged or self._parts.has_content):
            self._state = CONTENT

    def _add(self, text: str) -> None:
        """Text of the present state, without markers."""
        if self._state in (CONTENT, REASONING):
            self._say(text)
            return
        self._held.append(text)
        if self._state != NORMAL or text.isspace():
            return
        text = self._text()
        start = text.lstrip()[: UNTAGGED_CHARS + 1]
        if UNTAGGED_JSON.match(start):
            self._state = JSON_CALL
        elif start and (start[0] not in "{`" or len(start) > UNTAGGED_CHARS):
            self._enter(CONTENT)
            self._say(text)

    def _say(self, text: str) -> None:
        kind: Kind = "reasoning" if self._state in REASONING_STATES else "content"
        self._parts.add_text(kind, text)

    def _on_marker(self, marker: str) -> None:
        before, after = self._state, self._edges[self._state][marker]
        if before in CALL_STATES:
            self._leave_call(marker, after)
        elif before in CONTENT_STATES and after == NORMAL:  # a marker that leads nowhere
            if marker == self.tokenizer.tool_call_end and not self._parts.after_call:
                self._add(marker)
        elif before in CONTENT_STATES and after == REASONING and self._begun():
            self._add(marker)
        else:
            self._end_untagged()
            self._enter(after)

    def _begun(self) -> bool:
        """Whether the answer itself has begun: nothing in it opens the reasoning any more."""
        return self._parts.has_content or bool(self.calls or self._text().strip())

    def _text(self) -> str:
        return "".join(self._held)

    def _leave_call(self, marker: str, after: str) -> None:
        """The end of a call, if the call can be read. Else its end is part of it, or it was
        none."""
        if not self._end_call():
            if self._state != REASONING_CALL and self._tries < MAX_TRIES:
                self._tries += 1
                self._held.append(marker)
                return
            self._call_as_text("" if marker == self.tokenizer.think_end else marker)
        self._enter(after)

    def _end_call(self) -> bool:
        """Whether the text of the call, or what follows the last opening in it, can be read. If so,
        it is."""
        opener, text = self._opener(), self._text()
        calls = self._read(text)
        head, opened, last = text.rpartition(opener)
        if not calls and opened and (calls := self._read(last)):
            if forgotten := self._read(head):  # a call whose end was left out
                calls = forgotten + calls
            else:
                self._say(opener + head)
        self._add_calls(calls)
        return bool(calls)

    def _read(self, text: str) -> list[NamedArguments]:
        if self._state == XML_CALL:
            text = FUNCTION + text + FUNCTION_END
        try:
            return read_calls(text, self.tokenizer, self.tools)
        except Exception as error:  # a parser raises whatever its author chose
            self._error = f"{type(error).__name__}: {error}"
            return []

    def _call_as_text(self, end: str) -> None:
        log.info("a tool call cannot be read and is shown as text: %s", self._error)
        self._say(self._opener() + self._text() + end)

    def _opener(self) -> str:
        return FUNCTION if self._state == XML_CALL else str(self.tokenizer.tool_call_start)

    def _end_untagged(self) -> None:
        """The end of what may be a call in JSON without tags."""
        if self._state in (NORMAL, JSON_CALL):
            text = self._text()
            calls = read_untagged(text, self.tools)
            self._add_calls(calls)
            if text and not calls:
                self._say(text)

    def _add_calls(self, calls: list[NamedArguments]) -> None:
        for name, arguments in calls:
            call = Call(self.new_id(), name, arguments)
            self.calls.append(call)
            self._parts.add_call(call)


def transitions(tokenizer: TokenizerWrapper, calls: bool, constrained: bool) -> Edges:
    """The markers that lead from each state to another: mlx-lm's for this tokenizer, and with
    `calls` those of calls and of what models write in their place."""
    content: dict[str, str] = {}
    edges: Edges = dict.fromkeys(CONTENT_STATES, content)
    edges |= {state: {} for state in (REASONING, *CALL_STATES)}
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        content[tokenizer.think_start] = REASONING
        edges[REASONING][tokenizer.think_end] = NORMAL
    if calls:
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if not any(state == CALL for some in own.values() for _, state in some):
            content[start] = CALL
        if tokenizer.has_thinking and not constrained:
            edges[REASONING][start] = REASONING_CALL
            edges[REASONING_CALL][tokenizer.think_end] = NORMAL
        if end:
            edges[CALL][end] = CONTENT
            edges[REASONING_CALL][end] = REASONING
            content[end] = NORMAL  # of a call that came without its tags
        if is_xml(tokenizer):
            content[FUNCTION] = XML_CALL
            edges[XML_CALL][FUNCTION_END] = CONTENT
    for marker in tokenizer.structural_markers or ():
        content[marker] = NORMAL
    for state, some in own.items():
        edges.setdefault(state, {}).update(some)
    return edges
