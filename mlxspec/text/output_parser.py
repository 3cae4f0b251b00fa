"""From an answer's text to what it is made of: reasoning, content, tool calls.

Rule: one reader for a stream and for a whole answer, and the same parts however the text was cut.
Nothing is dropped: what looks like a call and cannot be read as one is content, and the log says
why. The markers, their states and the calls' syntax are mlx-lm's (its TextStateMachine and tool
parsers).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine as Machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, clean, types_of

log = logging.getLogger("mlxspec")

MACHINE: Any = Machine  # mlx-lm has no types
Kind = Literal["reasoning", "content", "call"]

CALLS = (
    "tool",
    "naked",
    "musing",
)  # states in which a call is read; musing: in the midst of reasoning
FUNCTION, FUNCTION_END = "<function=", "</function>"  # a call may come without the tags around it
CODER = "qwen3_coder"  # the format in which calls are XML
HEAD = re.compile(r"\s*(?:</tool_call>\s*)?(?:<tool_call>\s*)?<function=([^\s<>]+)>")
VALUE = re.compile(
    r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))",
    re.DOTALL,
)
TAIL = re.compile(r"\s*(?:</function>|\Z)")
BARE = re.compile(r'(```(?:json)?\s*)?\{\s*"name"\s*:')  # and so may a call in JSON
KEYS = {"name", "arguments", "parameters", "id", "type"}  # a bare call has no others
BETWEEN = re.compile(r"[\s,;]*")  # calls in JSON
MOST_TRIES = 8  # ends of one call that turn out to be none
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
    """Reads one answer. `tools` are those it may call; without any, what looks like a call is
    content. `thinking`: the prompt's end has opened the reasoning. `new_id` names the calls.
    `ruled`: a grammar rules the answer, so that a call has its tags, and none is made while the
    model reasons."""

    __slots__ = (
        "_after_call", "_bare", "_blank", "_call", "_fresh", "_held", "_is_bare", "_kind", "_longest",
        "_machine", "_made", "_may_bare", "_new_id", "_plain", "_ruled", "_spoke", "_state", "_tokenizer",
        "_tools", "_tries", "_why", "calls",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        tools: Tools,
        thinking: bool,
        new_id: Callable[[], str],
        ruled: bool = False,
    ) -> None:
        self._tokenizer, self._tools, self._new_id = tokenizer, tools, new_id
        edges = transitions(tokenizer, bool(tools), ruled)
        self._plain = not any(edges.values())
        self._machine = MACHINE(edges)
        self._longest = max(
            (len(marker) for some in edges.values() for marker, _ in some), default=1
        )
        first = tokenizer.response_initial_state or ("reasoning" if thinking else "normal")
        self._state = self._machine.make_state(first)
        self._kind: Kind = "reasoning" if first == "reasoning" else "content"
        self._fresh = first == "reasoning"  # white space that opens a part is the template's
        self._held = ""  # white space that ends a part, if it ends here
        self._spoke = self._after_call = (
            False  # content was shown; a call was the last that was made
        )
        self._call: list[str] = []  # of a call that has not ended
        self._tries = 0  # ends of it that were none
        self._may_bare, self._ruled = bool(tools) and not ruled, ruled
        # An answer's beginning that may be a bare call, and whether it begins as one does.
        self._bare: list[str] | None = [] if self._may_bare else None
        self._is_bare = False
        self._blank: list[str] = []
        self._made: list[Part] = []
        self._why = ""
        self.calls: list[Call] = []

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if self._plain:
            return [Part("content", text)] if text else []
        for char in text:  # so that a marker that is none after all can take its state back
            self._state, segments = MACHINE.split(self._state, char)
            self._add(*segments[0])
            for (before, _), (state, _) in pairwise(segments):
                self._cross(before, state)
            state, node, states, held = self._state
            if len(held) > 2 * self._longest:  # no marker is that long: "<<<<..." is text
                self._state = state, node, states, held[-self._longest :]
                self._add(state, held[: -self._longest])
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back; call it once, when no more text comes."""
        if self._plain:
            return []
        self._state, rest, state = MACHINE.flush(self._state)
        self._add(state, rest)
        if state in CALLS and not self._end_call(state):
            self._give_up(state, "")
        self._settle_bare()
        if self._kind == "content" and self._held and not self.calls:
            self._made.append(Part("content", self._held))
        return self._take()

    def _add(self, state: str, text: str) -> None:
        if state in CALLS:
            self._call.append(text)
        elif state == "reasoning":
            self._say("reasoning", text)
        elif state == "normal" and self._bare is None:
            self._say("content", text)
        elif state == "normal" and self._bare is not None:
            if text.isspace() and not self._bare:
                self._blank.append(text)  # it opens the answer, whatever this will be
                return
            self._bare.append(text)
            if not self._is_bare:
                said = "".join(self._bare).lstrip()
                self._is_bare = bool(BARE.match(said))
                if said and not self._is_bare and (said[0] not in "{`" or len(said) > BARE_CHARS):
                    self._say_bare()

    def _cross(self, before: str, state: str) -> None:
        """A marker was met, and led from one state to another; where it is only text, it leads
        nowhere."""
        t = self._tokenizer
        if before in CALLS:
            self._cross_call(before, state)
        elif before == "normal" and state == "reasoning" and self._begun():
            self._go("normal", "normal", str(t.think_start))
        elif state == "stray":
            self._go("normal", "normal", "" if self._after_call else str(t.tool_call_end))
        elif before == "normal" and state != "normal":
            self._settle_bare()
        elif before == "reasoning" and state == "normal":
            self._restart_bare()
        if state in CALLS and before not in CALLS:
            self._call, self._tries = [], 0

    def _cross_call(self, before: str, state: str) -> None:
        """The end of a call, if it can be read now. Else its end is part of it, or it was none."""
        end = FUNCTION_END if before == "naked" else str(self._tokenizer.tool_call_end)
        made = self._end_call(before)
        if before == "musing":
            if not made:
                self._give_up(before, end if state == "normal" else "")
            self._go("reasoning" if state == "normal" else "normal", "normal", "")
            if state != "normal":
                self._restart_bare()
        elif made:
            self._go("normal", "normal", "")
        elif self._tries < MOST_TRIES:
            self._tries += 1
            self._go(before, before, end)
        else:
            self._give_up(before, end)

    def _restart_bare(self) -> None:
        if self._may_bare and not self._spoke:
            self._bare, self._is_bare, self._blank = [], False, []

    def _go(self, state: str, where: str, text: str) -> None:
        """On in `state`; `text` belongs to `where`."""
        self._state = self._machine.make_state(state)
        if text:
            self._add(where, text)

    def _begun(self) -> bool:
        """Whether the answer itself has begun: nothing in it opens the reasoning any more."""
        return self._spoke or bool(self.calls) or bool("".join(self._bare or ()).strip())

    def _end_call(self, state: str) -> bool:
        """Whether the text of the call, or what follows the last opening in it, can be read; then
        it is."""
        opener, text = self._opener(state), "".join(self._call)
        head, opened, last = text.rpartition(opener)
        calls = self._read(text, state)
        if not calls and opened and (calls := self._read(last, state)):
            if lost := self._read(head, state):  # its end was forgotten
                calls = lost + calls
            else:
                self._say("reasoning" if state == "musing" else "content", opener + head)
        if calls:
            self._call = []
            self._emit(calls)
        return bool(calls)

    def _give_up(self, state: str, end: str) -> None:
        """It was no call."""
        log.info("a tool call cannot be read, it is shown as text: %s", self._why)
        text = self._opener(state) + "".join(self._call) + end
        self._call = []
        self._say("reasoning" if state == "musing" else "content", text)

    def _emit(self, calls: list[Call]) -> None:
        self.calls += calls
        self._made += [Part("call", call=call) for call in calls]
        self._kind, self._fresh, self._held, self._after_call = "content", True, "", True

    def _settle_bare(self) -> None:
        if self._bare is None:
            return None
        if BARE.match(text := "".join(self._bare).strip()):
            text = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
            known = {tool["function"]["name"] for tool in self._tools}
            calls = self._in_json(text, bare=True)
            if calls and all(call.name in known for call in calls):
                self._bare = None
                return self._emit(calls)
        return self._say_bare()

    def _say_bare(self) -> None:
        text, self._bare = "".join([*self._blank, *(self._bare or ())]), None
        self._blank = []
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
        if not shown:
            return
        self._after_call, self._spoke = False, self._spoke or kind == "content"
        if self._made and self._made[-1].kind == kind:
            self._made[-1] = Part(kind, self._made[-1].text + shown)
        else:
            self._made.append(Part(kind, shown))

    def _take(self) -> list[Part]:
        made, self._made = self._made, []
        return made

    def _opener(self, state: str) -> str:
        return FUNCTION if state == "naked" else str(self._tokenizer.tool_call_start)

    def _read(self, text: str, state: str) -> list[Call]:
        """The calls in the text of one; none where it cannot be read."""
        text = FUNCTION + text + FUNCTION_END if state == "naked" else text
        if self._ruled and (calls := self._in_json(text.strip())):
            return (
                calls  # a grammar has calls in JSON where it does not know the model's own format
            )
        try:
            if FUNCTION in text and self._tokenizer.tool_parser.__module__.endswith(CODER):
                some = in_xml(text, self._tools)
            else:
                found = self._tokenizer.tool_parser(text, self._tools)
                some = found if isinstance(found, list) else [found]
            if calls := [self._made_call(each) for each in some]:
                return calls
        except Exception as error:  # a parser raises whatever its author chose
            self._why = f"{type(error).__name__}: {error}"
        return self._in_json(text.strip())

    def _in_json(self, text: str, bare: bool = False) -> list[Call]:
        """Calls written as JSON objects one after the other; none where anything else is between
        them."""
        decoder, made, at = json.JSONDecoder(), [], 0
        try:
            while at < len(text):
                found, at = decoder.raw_decode(text, at)
                if bare and not ({"name"} < set(found) <= KEYS):
                    raise ValueError("an object with other names is no call")
                made.append(self._made_call(found))
                between = BETWEEN.match(text, at)
                at = between.end() if between else at
        except (ValueError, TypeError, RecursionError) as error:
            self._why = self._why or str(error)
            return []
        return made

    def _made_call(self, found: Any) -> Call:
        """Raises ValueError where it has no name, or its arguments are no object of JSON."""
        name = found.get("name") if isinstance(found, dict) else None
        arguments = (
            found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
        )
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call needs a name, and an object as arguments")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair can be written in JSON, but neither sent nor encoded.
        return Call(self._new_id(), clean(name), clean(text))


def in_xml(text: str, tools: Tools) -> list[dict[str, Any]]:
    """Qwen3-Coder's calls, one or several, with the types that their schemas have. mlx-lm's own
    parser leaves out what it does not expect, and rounds large numbers. Raises ValueError where
    anything else is there."""
    made, at = [], 0
    while head := HEAD.match(text, at):
        at, arguments = head.end(), {}
        while value := VALUE.match(text, at):
            arguments[value[1]], at = value[2], value.end()
        if not (end := TAIL.match(text, at)):
            raise ValueError("a parameter or a call has no end")
        at = end.end()
        made.append({"name": head[1], "arguments": _typed(head[1], arguments, tools)})
    if text[at:].strip():
        raise ValueError("there is more than calls")
    return made


def _typed(name: str, arguments: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    schemas = [t["function"].get("parameters") for t in tools if t["function"]["name"] == name]
    known = (schemas[0] or {}).get("properties") if schemas else None
    made: dict[str, Any] = {}
    for key, text in arguments.items():
        schema = known.get(key) if isinstance(known, dict) else None
        types, made[key] = types_of(schema), text
        if types == {"string"} or (not types and not text.strip().startswith(("{", "["))):
            continue
        try:
            value = json.loads(
                text.strip().lower() if text.strip() in ("True", "False", "None") else text
            )
        except ValueError:
            continue  # it is what the model wrote
        if "string" not in types or (value is None and "null" in types):
            whole = isinstance(value, float) and types == {"integer"} and value.is_integer()
            made[key] = int(value) if whole else value
    return made


def transitions(
    tokenizer: TokenizerWrapper, calls: bool, ruled: bool = False
) -> dict[str, list[tuple[str, str]]]:
    """The markers that lead from one state of an answer to another: mlx-lm's for this tokenizer,
    those of calls only if there may be `calls`, and then also what models emit in their place.
    Where a grammar has `ruled` the answer, no call interrupts the reasoning."""
    edges: dict[str, list[tuple[str, str]]] = {
        state: [] for state in ("normal", "reasoning", "tool", "naked", "musing", "stray", "mused")
    }
    own = tokenizer.response_transitions
    if tokenizer.has_thinking:
        edges["normal"].append((tokenizer.think_start, "reasoning"))
        edges["reasoning"].append((tokenizer.think_end, "normal"))
    if calls and tokenizer.has_tool_calling:
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if not any(to == "tool" for some in own.values() for _, to in some):
            edges["normal"].append((start, "tool"))
        if tokenizer.has_thinking and not ruled:
            edges["reasoning"].append((start, "musing"))
            edges["musing"].append((tokenizer.think_end, "mused"))
        if end:
            edges["tool"].append((end, "normal"))
            edges["musing"].append((end, "normal"))
            edges["normal"].append((end, "stray"))  # of a call that came without its tags
        if tokenizer.tool_parser.__module__.endswith(CODER):
            edges["normal"].append((FUNCTION, "naked"))
            edges["naked"].append((FUNCTION_END, "normal"))
    edges["normal"] += [(marker, "normal") for marker in tokenizer.structural_markers or ()]
    for state, some in own.items():
        edges.setdefault(state, []).extend(some)
    return edges
