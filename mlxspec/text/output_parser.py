"""Splits the text of an answer into reasoning, content and tool calls.

Works on a stream: the parts are the same however the text is cut into pieces. Nothing is dropped:
what looks like a call but cannot be read is content, and the log says why. Markers and the syntax
of calls are mlx-lm's (TextStateMachine, tool_parsers).
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, clean, listed, types_of

log = logging.getLogger("mlxspec")

Machine: Any = TextStateMachine  # mlx-lm has no types
Kind = Literal["reasoning", "content", "call"]

# The states of an answer. The first three are mlx-lm's.
NORMAL, REASONING, CALL = "normal", "reasoning", "tool"
UNTAGGED = "untagged call"  # in XML, without the tags around it
THOUGHT_CALL = "call in reasoning"
THOUGHT_END = "end of reasoning in a call"
STRAY_END = "end of a call outside of one"
CALL_STATES = (CALL, UNTAGGED, THOUGHT_CALL)

FUNCTION, FUNCTION_END = "<function=", "</function>"
XML_PARSER = "qwen3_coder"
XML_HEAD = re.compile(r"\s*(?:</tool_call>\s*)?(?:<tool_call>\s*)?<function=([^\s<>]+)>")
XML_VALUE = re.compile(
    r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))",
    re.DOTALL,
)
XML_TAIL = re.compile(r"\s*(?:</function>|\Z)")
BARE_CALL = re.compile(r'(?:```(?:json)?\s*)?\{\s*"name"\s*:')  # JSON without tags
FENCED = re.compile(r"(?:```(?:json)?)?(.*?)(?:```)?", re.DOTALL)
BARE_KEYS = {"name", "arguments", "parameters", "id", "type"}
BARE_CHARS = 64  # by which a bare call must be recognised
SEPARATORS = re.compile(r"[\s,;]*")  # between calls in JSON
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


class OutputParser:
    """Parses one answer. Without `tools`, what looks like a call is content. `thinking`: the prompt
    has opened the reasoning. `new_id` names the calls. `constrained`: a grammar rules the answer,
    so calls have their tags and none interrupts the reasoning."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        tools: Tools,
        thinking: bool,
        new_id: Callable[[], str],
        constrained: bool = False,
    ) -> None:
        self._tokenizer, self._tools, self._new_id = tokenizer, tools, new_id
        self._constrained = constrained
        edges = transitions(tokenizer, bool(tools), constrained)
        markers = [marker for some in edges.values() for marker, _ in some]
        self._longest = max(map(len, markers), default=0)
        self._machine = Machine(edges)
        first = tokenizer.response_initial_state or (REASONING if thinking else NORMAL)
        self._state = self._machine.make_state(first)
        self._call: list[str] = []  # text of a call that has not ended
        self._tries = 0  # ends of that call that were none
        self._may_be_bare = bool(tools) and not constrained
        # The beginning of the answer, while it may be a bare call; None: it cannot be one.
        self._bare: list[str] | None = [] if self._may_be_bare else None
        self._is_bare = False  # it begins as one does
        self._kind: Kind = "reasoning" if first == REASONING else "content"
        self._at_start = first == REASONING  # white space that opens a part is the template's
        self._blanks = ""  # white space that ends a part, if it ends here
        self._has_content = self._after_call = False
        self._made: list[Part] = []
        self._error = ""
        self.calls: list[Call] = []

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if not self._longest:
            return [Part("content", text)] if text else []
        for char in text:  # one by one, so a marker that is only text can take its state back
            self._state, segments = Machine.split(self._state, char)
            self._add(*segments[0])
            for (before, _), (after, _) in pairwise(segments):
                self._transition(before, after)
            state, node, states, buffer = self._state
            if len(buffer) > 2 * self._longest:  # no marker is that long: "<<<<..." is text
                self._state = state, node, states, buffer[-self._longest :]
                self._add(state, buffer[: -self._longest])
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back; call it once, when no more text comes."""
        if not self._longest:
            return []
        self._state, rest, state = Machine.flush(self._state)
        self._add(state, rest)
        if state in CALL_STATES and not self._end_call(state):
            self._call_as_text(state, "")
        self._end_bare()
        if self._kind == "content" and self._blanks and not self.calls:
            self._made.append(Part("content", self._blanks))
        return self._take()

    def _take(self) -> list[Part]:
        made, self._made = self._made, []
        return made

    def _add(self, state: str, text: str) -> None:
        """Text of a state, without markers."""
        if state in CALL_STATES:
            self._call.append(text)
        elif state == REASONING:
            self._say("reasoning", text)
        elif state == NORMAL and self._bare is None:
            self._say("content", text)
        elif state == NORMAL and self._bare is not None:
            self._bare.append(text)
            if text.isspace() or self._is_bare:
                return
            start = "".join(self._bare).lstrip()
            self._is_bare = bool(BARE_CALL.match(start))
            if start and not self._is_bare and (start[0] not in "{`" or len(start) > BARE_CHARS):
                self._bare_as_text()

    def _transition(self, before: str, after: str) -> None:
        """A marker was met. Where it is only text, the state goes back."""
        tokenizer = self._tokenizer
        if before == THOUGHT_CALL:
            self._leave_thought_call(after)
        elif before in CALL_STATES:
            self._leave_call(before)
        elif before == NORMAL and after == REASONING and self._has_begun():
            self._enter(NORMAL, str(tokenizer.think_start))
        elif after == STRAY_END:
            self._enter(NORMAL, "" if self._after_call else str(tokenizer.tool_call_end))
        elif before == NORMAL and after != NORMAL:
            self._end_bare()
        elif before == REASONING and after == NORMAL:
            self._restart_bare()
        if after in CALL_STATES and before not in CALL_STATES:
            self._call, self._tries = [], 0

    def _leave_call(self, state: str) -> None:
        """The end of a call, if the call can be read. Else its end is part of it, or it was
        none."""
        end = FUNCTION_END if state == UNTAGGED else str(self._tokenizer.tool_call_end)
        if self._end_call(state):
            self._enter(NORMAL)
        elif self._tries < MAX_TRIES:
            self._tries += 1
            self._enter(state, end)
        else:
            self._call_as_text(state, end)

    def _leave_thought_call(self, after: str) -> None:
        end, state = str(self._tokenizer.tool_call_end), REASONING
        if after == THOUGHT_END:
            end, state = "", NORMAL
        if not self._end_call(THOUGHT_CALL):
            self._call_as_text(THOUGHT_CALL, end)
        self._enter(state)
        if state == NORMAL:
            self._restart_bare()

    def _enter(self, state: str, text: str = "") -> None:
        self._state = self._machine.make_state(state)
        if text:
            self._add(state, text)

    def _has_begun(self) -> bool:
        """Whether the answer itself has begun: nothing in it opens the reasoning any more."""
        bare = "".join(self._bare or ())
        return self._has_content or bool(self.calls) or bool(bare.strip())

    def _end_call(self, state: str) -> bool:
        """Whether the text of the call, or what follows the last opening in it, can be read. If so,
        it is."""
        opener, text = self._opener(state), "".join(self._call)
        calls = self._read(text, state)
        head, opened, last = text.rpartition(opener)
        if not calls and opened and (calls := self._read(last, state)):
            if forgotten := self._read(head, state):  # a call whose end was left out
                calls = forgotten + calls
            else:
                self._say("reasoning" if state == THOUGHT_CALL else "content", opener + head)
        if calls:
            self._call = []
            self._add_calls(calls)
        return bool(calls)

    def _call_as_text(self, state: str, end: str) -> None:
        log.info("a tool call cannot be read and is shown as text: %s", self._error)
        text = self._opener(state) + "".join(self._call) + end
        self._call = []
        self._say("reasoning" if state == THOUGHT_CALL else "content", text)

    def _opener(self, state: str) -> str:
        return FUNCTION if state == UNTAGGED else str(self._tokenizer.tool_call_start)

    def _add_calls(self, calls: list[Call]) -> None:
        self.calls += calls
        self._made += [Part("call", call=call) for call in calls]
        self._kind, self._at_start, self._blanks, self._after_call = "content", True, "", True

    def _restart_bare(self) -> None:
        """A bare call may also follow the reasoning."""
        if self._may_be_bare and not self._has_content:
            self._bare, self._is_bare = [], False

    def _end_bare(self) -> None:
        text = "".join(self._bare or ()).strip()
        if BARE_CALL.match(text) and (fenced := FENCED.fullmatch(text)):
            known = {tool["function"]["name"] for tool in self._tools}
            calls = self._in_json(fenced[1].strip(), bare=True)
            if calls and all(call.name in known for call in calls):
                self._bare = None
                self._add_calls(calls)
        self._bare_as_text()

    def _bare_as_text(self) -> None:
        text, self._bare = "".join(self._bare or ()), None
        if text:
            self._say("content", text)

    def _say(self, kind: Kind, text: str) -> None:
        """Text of a part, without white space at its ends."""
        if kind != self._kind:
            self._kind, self._at_start, self._blanks = kind, True, ""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if not shown:
            return
        self._after_call = False
        if kind == "content":
            self._has_content = True
        if self._made and self._made[-1].kind == kind:
            shown = self._made.pop().text + shown
        self._made.append(Part(kind, shown))

    def _read(self, text: str, state: str) -> list[Call]:
        """The calls in the text between two markers; none where it cannot be read."""
        parser = self._tokenizer.tool_parser
        if state == UNTAGGED:
            text = FUNCTION + text + FUNCTION_END
        # A grammar has calls in JSON where it has no rules for the model's own format.
        if self._constrained and (calls := self._in_json(text.strip())):
            return calls
        try:
            if FUNCTION in text and parser.__module__.endswith(XML_PARSER):
                found = parse_xml(text, self._tools)
            else:
                found = parser(text, self._tools)
            if calls := [self._made_call(each) for each in listed(found)]:
                return calls
        except Exception as error:  # a parser raises whatever its author chose
            self._error = f"{type(error).__name__}: {error}"
        return self._in_json(text.strip())

    def _in_json(self, text: str, bare: bool = False) -> list[Call]:
        """Calls written as JSON objects one after the other; none where anything else is between
        them."""
        decoder, calls, at = json.JSONDecoder(), [], 0
        try:
            while at < len(text):
                found, at = decoder.raw_decode(text, at)
                if bare and not ({"name"} < set(found) <= BARE_KEYS):
                    return []
                calls.append(self._made_call(found))
                if between := SEPARATORS.match(text, at):
                    at = between.end()
        except (ValueError, TypeError, RecursionError) as error:
            self._error = self._error or str(error)
            return []
        return calls

    def _made_call(self, found: Any) -> Call:
        """Raises ValueError where it has no name, or its arguments are no JSON object."""
        if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
            raise ValueError("a call needs a name")
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not name or not isinstance(arguments, dict):
            raise ValueError("a call needs a name, and an object as arguments")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
        return Call(self._new_id(), clean(name), clean(text))


def parse_xml(text: str, tools: Tools) -> list[dict[str, Any]]:
    """Qwen3-Coder's calls, with values of the types in their schemas. mlx-lm's own parser leaves
    out what it does not expect and rounds large numbers. Raises ValueError where there is anything
    but calls."""
    calls, at = [], 0
    while head := XML_HEAD.match(text, at):
        at, arguments = head.end(), {}
        types = _parameter_types(head[1], tools)
        while value := XML_VALUE.match(text, at):
            arguments[value[1]] = _typed(value[2], types.get(value[1], set()))
            at = value.end()
        if not (end := XML_TAIL.match(text, at)):
            raise ValueError("a parameter or a call has no end")
        at = end.end()
        calls.append({"name": head[1], "arguments": arguments})
    if text[at:].strip():
        raise ValueError("there is more than calls")
    return calls


def _parameter_types(function: str, tools: Tools) -> dict[str, set[str]]:
    for tool in tools:
        if tool["function"]["name"] == function:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            if isinstance(properties, dict):
                return {name: types_of(schema) for name, schema in properties.items()}
    return {}


def _typed(text: str, types: set[str]) -> Any:
    """The value of bare text; the text itself where it has none of the types."""
    value, stripped = text, text.strip()
    if types == {"string"} or (not types and not stripped.startswith(("{", "["))):
        return text
    try:
        value = json.loads(stripped.lower() if stripped in ("True", "False", "None") else text)
    except ValueError:
        return text
    if "string" in types and not (value is None and "null" in types):
        return text
    if isinstance(value, float) and types == {"integer"} and value.is_integer():
        return int(value)
    return value


def transitions(
    tokenizer: TokenizerWrapper, calls: bool, constrained: bool = False
) -> dict[str, list[tuple[str, str]]]:
    """The markers that lead from one state to another: mlx-lm's for this tokenizer. With `calls`
    also those of calls, and of what models write in their place."""
    edges: dict[str, list[tuple[str, str]]] = {
        state: [] for state in (NORMAL, REASONING, *CALL_STATES, STRAY_END, THOUGHT_END)
    }
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges[NORMAL].append((tokenizer.think_start, REASONING))
        edges[REASONING].append((tokenizer.think_end, NORMAL))
    if calls and tokenizer.has_tool_calling:
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if not any(state == CALL for some in own.values() for _, state in some):
            edges[NORMAL].append((start, CALL))
        if tokenizer.has_thinking and not constrained:
            edges[REASONING].append((start, THOUGHT_CALL))
            edges[THOUGHT_CALL].append((tokenizer.think_end, THOUGHT_END))
        if end:
            edges[CALL].append((end, NORMAL))
            edges[THOUGHT_CALL].append((end, NORMAL))
            edges[NORMAL].append((end, STRAY_END))  # of a call that came without its tags
        if tokenizer.tool_parser.__module__.endswith(XML_PARSER):
            edges[NORMAL].append((FUNCTION, UNTAGGED))
            edges[UNTAGGED].append((FUNCTION_END, NORMAL))
    edges[NORMAL] += [(marker, NORMAL) for marker in tokenizer.structural_markers or ()]
    for state, some in own.items():
        edges.setdefault(state, []).extend(some)
    return edges
