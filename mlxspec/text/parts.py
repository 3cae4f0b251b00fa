"""From an answer's text to what it is made of: reasoning, content, tool calls.

Rule: one reader for a stream and for a whole answer, and the same parts however the text was cut. Nothing is
dropped: what looks like a call and cannot be read as one is content, and the log says why. The markers, their
states and the calls' syntax are mlx-lm's (its TextStateMachine and tool parsers).
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine as Machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools

log = logging.getLogger("mlxspec")

MACHINE: Any = Machine  # mlx-lm has no types
Kind = Literal["reasoning", "content", "call"]

CALLS = ("tool", "naked")
FUNCTION, FUNCTION_END = "<function=", "</function>"  # a call may come without the tags around it
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
BARE = re.compile(r'(```(?:json)?\s*)?\{\s*"name"\s*:')  # and so may a call in JSON
BARE_CHARS = 64  # that a bare call needs to be known by


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


class Parts:
    """Reads one answer. `tools` are those it may call; without any, what looks like a call is content.
    `thinking`: the prompt's end has opened the reasoning. `new_id` names the calls."""

    __slots__ = (
        "_bare", "_call", "_fresh", "_held", "_kind", "_machine", "_made", "_new_id", "_plain", "_state",
        "_tokenizer", "_tools", "_why", "calls",
    )  # fmt: skip

    def __init__(
        self, tokenizer: TokenizerWrapper, tools: Tools, thinking: bool, new_id: Callable[[], str]
    ) -> None:
        self._tokenizer, self._tools, self._new_id = tokenizer, tools, new_id
        edges = transitions(tokenizer, bool(tools))
        self._plain = not any(edges.values())
        self._machine = MACHINE(edges)
        first = tokenizer.response_initial_state or ("reasoning" if thinking else "normal")
        self._state = self._machine.make_state(first)
        self._kind: Kind = "reasoning" if first == "reasoning" else "content"
        self._fresh = first == "reasoning"  # white space that opens a part is the template's
        self._held = ""  # white space that ends a part, if it ends here
        self._call = ""  # of a call that has not ended
        self._bare: str | None = "" if tools else None  # an answer's beginning that may be a bare call
        self._made: list[Part] = []
        self._why = ""
        self.calls: list[Call] = []

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if self._plain:
            return [Part("content", text)] if text else []
        for char in text:  # so that a call that has not ended after all can take its state back
            self._state, segments = MACHINE.split(self._state, char)
            self._add(*segments[0])
            for (before, _), (state, more) in pairwise(segments):
                self._cross(before, state)
                self._add(state, more)
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back; call it once, when no more text comes."""
        if self._plain:
            return []
        self._state, rest, state = MACHINE.flush(self._state)
        self._add(state, rest)
        if state in CALLS and not self._end_call(state):
            log.info("a tool call cannot be read, it is shown as text: %s", self._why)
            self._say("content", self._opener(state) + self._call)
        self._settle_bare()
        if self._kind == "content" and self._held and not self.calls:
            self._made.append(Part("content", self._held))
        return self._take()

    def _add(self, state: str, text: str) -> None:
        if state in CALLS:
            self._call += text
        elif state == "reasoning":
            self._say("reasoning", text)
        elif state == "normal" and self._bare is None:
            self._say("content", text)
        elif state == "normal":
            self._bare = (self._bare or "") + text
            said = self._bare.lstrip()
            if said and not BARE.match(said) and (said[0] not in "{`" or len(said) > BARE_CHARS):
                self._say_bare()

    def _cross(self, before: str, state: str) -> None:
        """A marker was met. Where what is before it is no call yet, the marker belongs to it."""
        if before == "normal" and state != "normal":
            self._settle_bare()
        elif before == "reasoning" and self._tools:
            self._bare = ""
        if before in CALLS and not self._end_call(before):
            self._call += FUNCTION_END if before == "naked" else self._tokenizer.tool_call_end
            self._state = self._machine.make_state(before)
        elif state in CALLS:
            self._call = ""

    def _end_call(self, state: str) -> bool:
        """Whether the text of the call, or what follows the last opening in it, can be read; then it is."""
        opener = self._opener(state)
        head, opened, last = self._call.rpartition(opener)
        calls = self._read(self._call, state)
        if not calls and opened and (calls := self._read(last, state)):
            if lost := self._read(head, state):  # its end was forgotten
                calls = lost + calls
            else:
                self._say("content", opener + head)
        if calls:
            self._call = ""
            self._emit(calls)
        return bool(calls)

    def _emit(self, calls: list[Call]) -> None:
        self.calls += calls
        self._made += [Part("call", call=call) for call in calls]
        self._kind, self._fresh, self._held = "content", True, ""

    def _settle_bare(self) -> None:
        if self._bare is None:
            return
        if BARE.match(text := self._bare.strip()):
            text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text)
            known = {tool["function"]["name"] for tool in self._tools}
            calls = list(self._in_json(text))
            if calls and all(call.name in known for call in calls):
                self._bare = None
                return self._emit(calls)
        self._say_bare()

    def _say_bare(self) -> None:
        text, self._bare = self._bare or "", None
        self._say("content", text)

    def _say(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._kind, self._fresh, self._held = kind, True, ""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown and self._made and self._made[-1].kind == kind:
            self._made[-1] = Part(kind, self._made[-1].text + shown)
        elif shown:
            self._made.append(Part(kind, shown))

    def _take(self) -> list[Part]:
        made, self._made = self._made, []
        return made

    def _opener(self, state: str) -> str:
        return FUNCTION if state == "naked" else str(self._tokenizer.tool_call_start)

    def _read(self, text: str, state: str) -> list[Call]:
        """The calls in the text of one; none where it cannot be read."""
        spellings = [FUNCTION + text + FUNCTION_END] if state == "naked" else [text]
        if state == "tool" and FUNCTION in text:
            spellings.append(text + FUNCTION_END)
        for spelling in spellings:
            try:
                if spelling.rfind(PARAMETER) > spelling.rfind(PARAMETER_END):
                    raise ValueError("a parameter has no end")  # the parser would leave it out
                found = self._tokenizer.tool_parser(spelling, self._tools)
                calls = [self._made_call(each) for each in (found if isinstance(found, list) else [found])]
                if calls:
                    return calls
            except Exception as error:  # a parser raises whatever its author chose
                self._why = f"{type(error).__name__}: {error}"
        return list(self._in_json(text.strip()))

    def _in_json(self, text: str) -> Iterator[Call]:
        """Calls written as JSON objects one after the other; none where anything else is between them."""
        decoder, made, at = json.JSONDecoder(), [], 0
        try:
            while at < len(text):
                found, at = decoder.raw_decode(text, at)
                made.append(self._made_call(found))
                at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;"))
        except (ValueError, TypeError) as error:
            self._why = self._why or str(error)
            return
        yield from made

    def _made_call(self, found: Any) -> Call:
        """Raises ValueError where it has no name or its arguments are no object."""
        name = found.get("name") if isinstance(found, dict) else None
        arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call needs a name, and an object as arguments")
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            (name + text).encode()
        except UnicodeEncodeError:  # half a surrogate pair can be written, but not sent
            text = json.dumps(arguments)
            name.encode()
        return Call(self._new_id(), name, text)


def transitions(tokenizer: TokenizerWrapper, calls: bool) -> dict[str, list[tuple[str, str]]]:
    """The markers that lead from one state of an answer to another: mlx-lm's for this tokenizer, those of
    calls only if there may be `calls`, and then also what models emit in their place."""
    edges: dict[str, list[tuple[str, str]]] = {"normal": [], "reasoning": [], "tool": [], "naked": []}
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges["normal"].append((tokenizer.think_start, "reasoning"))
        edges["reasoning"].append((tokenizer.think_end, "normal"))
    if calls and tokenizer.has_tool_calling:
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if not any(to == "tool" for some in own.values() for _, to in some):
            edges["normal"].append((start, "tool"))
        edges["reasoning"] += [(start, "tool")] if tokenizer.has_thinking else []
        if end:
            edges["tool"].append((end, "normal"))
            edges["normal"].append((end, "normal"))  # of a call that came without its beginning
        if tokenizer.tool_parser.__module__.endswith("qwen3_coder"):
            edges["normal"].append((FUNCTION, "naked"))
            edges["naked"].append((FUNCTION_END, "normal"))
    edges["normal"] += [(marker, "normal") for marker in tokenizer.structural_markers or ()]
    for state, some in own.items():
        edges.setdefault(state, []).extend(some)
    return edges
