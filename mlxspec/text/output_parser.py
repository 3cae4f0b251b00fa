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
STRAY_END = "end tag outside of a call"
CALL_STATES = (CALL, UNTAGGED)

FUNCTION, FUNCTION_END = "<function=", "</function>"
XML_PARSER = "qwen3_coder"
XML_HEAD = re.compile(r"\s*(?:</tool_call>\s*)?(?:<tool_call>\s*)?<function=([^\s<>]+)>")
XML_VALUE = re.compile(
    r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))",
    re.DOTALL,
)
XML_TAIL = re.compile(r"\s*(?:</function>|\Z)")
# Llama 3 writes calls as JSON without tags.
BARE_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]+"\s*,\s*"(arguments|parameters)"\s*:\s*\{')
BARE_CHARS = 160  # by which such a call must be recognised
SEPARATORS = re.compile(r"(?:[\s,;]|</?tool_call>)*")  # between calls in JSON
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_TRIES = 8  # end tags inside one call that are part of its arguments


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
    so all calls have their tags."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        tools: Tools,
        thinking: bool,
        new_id: Callable[[], str],
        constrained: bool = False,
    ) -> None:
        self._tokenizer, self._tools, self._new_id = tokenizer, tools, new_id
        edges = transitions(tokenizer, bool(tools))
        markers = [marker for some in edges.values() for marker, _ in some]
        self._longest = max(map(len, markers), default=0)
        self._machine = Machine(edges)
        first = tokenizer.response_initial_state or (REASONING if thinking else NORMAL)
        self._state = self._machine.make_state(first)
        self._call: list[str] = []  # a call that has not ended, with its tags
        self._tries = 0  # end tags in that call
        self._accept_bare = bool(tools) and not constrained
        self._bare: list[str] = []  # content that may be a call without tags
        self._began = False  # content or calls have begun
        self._kind: Kind = "reasoning" if first == REASONING else "content"
        self._at_start = first == REASONING  # white space that opens a part is the template's
        self._blanks = ""  # white space that ends a part, if it ends here
        self._after_call = False
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
        if state in CALL_STATES and not self._end_call():
            self._call_as_text()
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
        elif state == NORMAL:
            self._add_content(text)

    def _add_content(self, text: str) -> None:
        starts = self._accept_bare and not self._began and text.lstrip().startswith("{")
        if text.strip():
            self._began = True
        if not self._bare and not starts:
            self._say("content", text)
            return
        self._bare.append(text)
        if len(self._bare) == BARE_CHARS and not BARE_CALL.match("".join(self._bare).lstrip()):
            self._end_bare()

    def _transition(self, before: str, after: str) -> None:
        """A marker was met. Where it is only text, the state goes back."""
        tokenizer = self._tokenizer
        if before in CALL_STATES:
            self._call.append(FUNCTION_END if before == UNTAGGED else tokenizer.tool_call_end)
            if not self._end_call():
                self._call_goes_on(before)
        elif before == NORMAL and after == REASONING and self._began:
            self._enter(NORMAL)
            self._add(NORMAL, tokenizer.think_start)
        elif after == STRAY_END:
            self._enter(NORMAL)
            if not self._after_call:
                self._add(NORMAL, tokenizer.tool_call_end)
        elif after in CALL_STATES:
            self._end_bare()
            self._call = [FUNCTION if after == UNTAGGED else tokenizer.tool_call_start]
            self._tries = 0

    def _enter(self, state: str) -> None:
        self._state = self._machine.make_state(state)

    def _call_goes_on(self, state: str) -> None:
        """An end tag after which the call cannot be read is part of its arguments."""
        self._tries += 1
        if self._tries <= MAX_TRIES:
            self._enter(state)
        else:
            self._call_as_text()
            self._enter(NORMAL)

    def _end_call(self) -> bool:
        """Whether the call, or what follows the last start tag in it, can be read."""
        text, start = "".join(self._call), self._call[0]
        for at in sorted({0, text.rfind(start)}):
            if calls := self._read(text[at:]):
                if at:
                    self._say("content", text[:at])
                self._add_calls(calls)
                return True
        return False

    def _call_as_text(self) -> None:
        log.info("a tool call cannot be read and is shown as text: %s", self._error)
        self._say("content", "".join(self._call))

    def _add_calls(self, calls: list[Call]) -> None:
        self.calls += calls
        self._made += [Part("call", call=call) for call in calls]
        self._kind, self._at_start, self._blanks = "content", True, ""
        self._after_call = self._began = True

    def _end_bare(self) -> None:
        text, self._bare = "".join(self._bare), []
        known = {tool["function"]["name"] for tool in self._tools}
        calls = self._read(text) if BARE_CALL.match(text.lstrip()) else []
        if calls and all(call.name in known for call in calls):
            self._add_calls(calls)
        elif text:
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
        if self._made and self._made[-1].kind == kind:
            shown = self._made.pop().text + shown
        self._made.append(Part(kind, shown))

    def _read(self, text: str) -> list[Call]:
        """The calls in a text with its tags; none where it cannot be read. A grammar has calls in
        JSON where it has no rules for the model's own format."""
        tokenizer, parser = self._tokenizer, self._tokenizer.tool_parser
        if parser.__module__.endswith(XML_PARSER):
            parser = parse_xml
        body = text.removeprefix(tokenizer.tool_call_start)
        if tokenizer.tool_call_end:
            body = body.removesuffix(tokenizer.tool_call_end)
        for parse in (parse_json, parser):
            try:
                return [self._made_call(each) for each in listed(parse(body, self._tools))]
            except Exception as error:  # a parser raises whatever its author chose
                self._error = f"{type(error).__name__}: {error}"
        return []

    def _made_call(self, found: Any) -> Call:
        """Raises ValueError where it has no name, or its arguments are no JSON object."""
        name = found["name"]
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call needs a name, and an object as arguments")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
        return Call(self._new_id(), clean(name), clean(text))


def parse_json(text: str, tools: Tools) -> list[Any]:
    """Calls written as JSON one after the other. Raises ValueError where there is anything else."""
    decoder, found = json.JSONDecoder(), []
    at = len(text) - len(SEPARATORS.sub("", text, count=1))
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found += listed(value)
        between = SEPARATORS.match(text, at)
        if between:
            at = between.end()
    if not found:
        raise ValueError("there is no call")
    return found


def parse_xml(text: str, tools: Tools) -> list[dict[str, Any]]:
    """Qwen3-Coder's calls, with values of the types in their schemas. mlx-lm's own parser leaves
    out what it does not expect and rounds large numbers. Raises ValueError where there is anything
    but calls."""
    calls, at = [], 0
    while head := XML_HEAD.match(text, at):
        at, arguments = head.end(), {}
        types = _parameter_types(head[1], tools)
        while value := XML_VALUE.match(text, at):
            arguments[value[1]] = typed_value(value[2], types.get(value[1], set()))
            at = value.end()
        if not (end := XML_TAIL.match(text, at)):
            raise ValueError("a parameter or a call has no end")
        at = end.end()
        calls.append({"name": head[1], "arguments": arguments})
    if text[at:].strip() or not calls:
        raise ValueError("there is something else than calls")
    return calls


def _parameter_types(function: str, tools: Tools) -> dict[str, set[str]]:
    for tool in tools:
        if tool["function"]["name"] == function:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            if isinstance(properties, dict):
                return {name: types_of(schema) for name, schema in properties.items()}
    return {}


def typed_value(text: str, types: set[str]) -> Any:
    """The value of bare text; the text itself where it has none of the types."""
    if types == {"string"} or (not types and not text.lstrip().startswith(("{", "["))):
        return text
    try:
        value = json.loads(PYTHON_WORDS.get(text, text))
    except ValueError:
        return text
    if "string" in types and not (value is None and "null" in types):
        return text
    return value


def transitions(tokenizer: TokenizerWrapper, calls: bool) -> dict[str, list[tuple[str, str]]]:
    """The markers that lead from one state to another: mlx-lm's for this tokenizer. With `calls`
    also those of calls, and of what models write in their place."""
    states = (NORMAL, REASONING, *CALL_STATES, STRAY_END)
    edges: dict[str, list[tuple[str, str]]] = {state: [] for state in states}
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges[NORMAL].append((tokenizer.think_start, REASONING))
        edges[REASONING].append((tokenizer.think_end, NORMAL))
    if calls and tokenizer.has_tool_calling:
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if not any(state == CALL for some in own.values() for _, state in some):
            edges[NORMAL].append((start, CALL))
        if end:
            edges[CALL].append((end, NORMAL))
            edges[NORMAL].append((end, STRAY_END))  # of a call that came without its start tag
        if tokenizer.tool_parser.__module__.endswith(XML_PARSER):
            edges[NORMAL].append((FUNCTION, UNTAGGED))
            edges[UNTAGGED].append((FUNCTION_END, NORMAL))
    edges[NORMAL] += [(marker, NORMAL) for marker in tokenizer.structural_markers or ()]
    for state, some in own.items():
        edges.setdefault(state, []).extend(some)
    return edges
