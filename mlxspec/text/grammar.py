"""Grammars for answers: which tokens may come next, by llguidance, on the host.

Rule: what cannot be enforced is refused by name before anything runs. A grammar begins where the reasoning
ends; an answer that reasons must end its reasoning before it ends.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Refused, Tools, types_of
from mlxspec.text.reader import token_bytes
from mlxspec.types import Matcher

log = logging.getLogger("mlxspec")

KNOWN = 32  # compiled grammars that are kept
MOST_BYTES = 1 << 18  # of a grammar
MOST_DIGITS = 32  # in a row, where no letter may come: a number is longer only if the model is lost in it
# One way to write white space: a weak model can go on with it for ever, and what is forced is drafted.
JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Those of llguidance let one answer keep all others waiting for seconds.
LIMITS = LLParserLimits(step_max_items=8_000, verbose_errors=False)
MOST_MULTIPLE = 1000  # multipleOf compiles into as many states

Make = Callable[[], Matcher]


class State(Enum):
    FIRST = auto()  # the answer may begin to reason, or at once with what the grammar wants
    THINKING = auto()
    GAP = auto()  # the reasoning has ended: two lines' ends may follow
    RULED = auto()


@dataclass(frozen=True, slots=True)
class Around:
    """What is around a grammar's text: `begin` opens the reasoning (-1: nothing does), `end` closes it, one
    of `gap` may follow; `stops` end the answer. Token ids. `digits` has the length of
    each token that is made of digits alone, `letter` is a token that any string may go on with."""

    begin: int
    end: tuple[int, ...]
    gap: frozenset[int]
    stops: frozenset[int]
    digits: Mapping[int, int]
    letter: int


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer. `vocab` is the width of the logits. One thread only."""

    tokenizer: TokenizerWrapper
    vocab: int
    _inner: LLTokenizer | None = None
    _digits: dict[int, int] = field(default_factory=dict)
    _known: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)

    def json(self, schema: Any, where: str) -> str:
        """The grammar of JSON by a schema, in llguidance's form. Raises Refused; `where` is its field."""
        if not isinstance(schema, dict | bool):
            raise Refused(where, f"{where} is not a JSON schema; send an object")
        _check(schema, where)
        return f"%json {_dumped(_ruled(schema), where)}"

    def calls(self, tools: Tools, name: str | None, single: bool, where: str) -> str:
        """The grammar of calls of these tools, or of the one with this name. Raises Refused."""
        for tool in tools:
            _check(tool["function"].get("parameters") or {}, where)
        chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
        if not chosen:
            what = f"the tool {name!r} is not among tools" if name else "there are no tools"
            raise Refused(where, f"{where}: {what}; send it in tools")
        kind = self.tokenizer.tool_parser.__module__.rpartition(".")[2]
        if kind not in CALLS:
            raise Refused(
                where,
                f"{where}: calls in this model's format, {kind}, cannot be enforced; send tool_choice 'auto'"
                " and no format, or 'none'",
            )
        begin, end = (self._marker(m) for m in (self.tokenizer.tool_call_start, self.tokenizer.tool_call_end))
        rules = CALLS[kind](chosen, where)
        more = "" if single else ' ("\\n" call)*'
        return f'call{more}\ncall: {begin} "\\n" body "\\n" {end}\n{rules}'

    def rules(self, parts: Iterable[str]) -> str:
        """A whole grammar: one of several beginnings, each with rules of its own behind its first line."""
        ways = [f"way{i}: {part}" for i, part in enumerate(parts)]
        return "\n".join([f"start: {' | '.join(f'way{i}' for i in range(len(ways)))}", *ways])

    def compiled(self, lark: str, thinking: bool | None, where: str) -> Make:
        """What makes a matcher for each answer. `thinking`: the prompt has opened the reasoning; None: the
        answer may. Raises Refused where the grammar is wrong."""
        if (made := self._known.get(lark)) is None:
            made = self._compile(lark, where)
            self._known[lark] = made
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(lark)
        t, state = self.tokenizer, State.RULED
        begin: tuple[int, ...] = tuple(t.think_start_tokens or ())
        if t.has_thinking and thinking is not False:
            state = State.THINKING if thinking else State.FIRST if len(begin) == 1 else State.RULED
        lines = (t.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        around = Around(
            begin[0] if state is State.FIRST else -1,
            tuple(t.think_end_tokens or ()),
            frozenset(ids[0] for ids in lines if len(ids) == 1),
            frozenset(t.eos_token_ids),
            self._digits,
            t.encode("a", add_special_tokens=False)[-1],
        )
        return lambda: Ruled(made.deep_copy(), self.vocab, around, state)

    def _compile(self, lark: str, where: str) -> LLMatcher:
        if len(lark.encode()) > MOST_BYTES:
            raise Refused(where, f"{where} is larger than {MOST_BYTES >> 10} KB; send a smaller one")
        if self._inner is None:
            self._inner = self._tokenizer()
            texts = ((i, token_bytes(self.tokenizer, i)) for i in range(len(self.tokenizer)))
            self._digits |= {i: len(text) for i, text in texts if text.isdigit()}
        made = LLMatcher(self._inner, LLMatcher.grammar_from_lark(lark), log_level=0, limits=LIMITS)
        if not made.is_error():
            first = made.deep_copy()
            first.compute_bitmask()
            made = first if first.is_error() else made
        said = [made.get_error()] if made.is_error() else made.get_grammar_warnings()
        if said:
            raise Refused(where, f"{where} cannot be honoured: {_why(str(said[0]))}; leave that out")
        return made

    def _tokenizer(self) -> LLTokenizer:
        inner: Any = self.tokenizer._tokenizer
        try:
            return from_tokenizer(inner, n_vocab=self.vocab, eos_token=sorted(self.tokenizer.eos_token_ids))
        except ValueError as error:
            raise Refused(
                "response_format", f"this model's tokenizer takes no grammars ({error}); ask without one"
            ) from error

    def _marker(self, text: str) -> str:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)


class Ruled:
    """The matcher of one answer."""

    __slots__ = ("_around", "_inner", "_size", "_state", "_tail")

    def __init__(self, inner: LLMatcher, vocab: int, around: Around, state: State) -> None:
        self._inner, self._size, self._around, self._state = inner, -(-vocab // 8), around, state
        # The latest tokens of the reasoning, those of the gap, or how many digits in a row came last.
        self._tail: tuple[int, ...] = ()

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        state, tail, eaten = self._state, self._tail, 0
        found = [self._mask(state, tail)]
        try:
            for token in draft:
                if token in self._around.stops or not found[-1][token // 8] >> token % 8 & 1:
                    break
                was, (state, tail) = state, self._step(state, tail, token)
                eaten += state is State.RULED and not self._skips(was, token)
                found.append(self._mask(state, tail))
        finally:
            if eaten and not self._inner.rollback(eaten):
                raise ValueError(f"a grammar cannot go back: {self._inner.get_error()}")
        return found

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._around.stops:
                break
            self._state, self._tail = self._step(self._state, self._tail, token)

    def forced(self, most: int) -> list[int]:
        if self._state is not State.RULED or self._inner.is_stopped():
            return []
        return [token for token in self._inner.compute_ff_tokens()[:most] if token not in self._around.stops]

    def _skips(self, state: State, token: int) -> bool:
        """Whether the token is not the grammar's."""
        around = self._around
        return (
            state is State.THINKING
            or (state is State.FIRST and token == around.begin)
            or (state is State.GAP and token in around.gap)
        )

    def _step(self, state: State, tail: tuple[int, ...], token: int) -> tuple[State, tuple[int, ...]]:
        if state is State.THINKING:
            tail = (*tail, token)[-len(self._around.end) :]
            return (State.GAP, ()) if tail == self._around.end else (state, tail)
        if self._skips(state, token):
            if state is State.FIRST:
                return State.THINKING, ()
            return (State.RULED, ()) if tail else (State.GAP, (token,))
        if not self._inner.consume_token(token):
            raise ValueError(_why(self._inner.get_error()) or f"the token {token} does not fit")
        digits = self._around.digits.get(token, 0)
        return State.RULED, (digits + sum(tail) * (state is State.RULED),) if digits else ()

    def _mask(self, state: State, tail: tuple[int, ...]) -> bytes:
        around = self._around
        if state is State.THINKING:
            return _without(b"\xff" * self._size, around.stops)
        stopped = self._inner.is_stopped()
        if self._inner.is_error():
            raise ValueError(_why(self._inner.get_error()))
        if stopped:
            return _with(bytes(self._size), around.stops)
        mask = self._inner.compute_bitmask()[: self._size].ljust(self._size, b"\0")
        if self._inner.is_error():
            raise ValueError(_why(self._inner.get_error()))
        if state is State.FIRST:
            mask = _with(mask, [around.begin])
        elif state is State.GAP:
            mask = _with(mask, around.gap)
        elif tail and tail[0] >= MOST_DIGITS and not mask[around.letter // 8] >> around.letter % 8 & 1:
            ended = _without(mask, around.digits)
            mask = ended if any(ended) else mask
        if not any(mask):
            raise ValueError("no token fits")
        return mask


def _check(schema: Any, where: str) -> None:
    """Raises Refused for what would compile for minutes."""
    left = [schema]
    while left:
        at = left.pop()
        left += at.values() if isinstance(at, dict) else at if isinstance(at, list) else ()
        multiple = at.get("multipleOf") if isinstance(at, dict) else None
        if isinstance(multiple, int | float) and not 0 < multiple <= MOST_MULTIPLE:
            raise Refused(
                where, f"{where}: multipleOf = {multiple} cannot be honoured; {MOST_MULTIPLE} is the most"
            )


def _why(error: str) -> str:
    """What is wrong, without the place in a grammar that the client has not written."""
    said, _, shown = error.partition("failed to compile JSON schema:")
    return " ".join(re.split(r"\n\s*\d+ \|", shown or said)[0].split())[:300]


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    made = bytearray(mask)
    for token in tokens:
        made[token // 8] |= 1 << token % 8
    return bytes(made)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    made = bytearray(mask)
    for token in tokens:
        made[token // 8] &= ~(1 << token % 8)
    return bytes(made)


# ---- the grammars of calls, by mlx-lm's names of their formats ----------------------------------


def _in_json(functions: Sequence[Mapping[str, Any]], where: str) -> str:
    """Hermes' and Qwen's: an object with name and arguments."""
    lines = []
    for i, function in enumerate(functions):
        parameters = _dumped(_ruled(_object(function)), where)
        name = json.dumps(json.dumps(function["name"], ensure_ascii=False), ensure_ascii=False)
        lines.append(f'call{i}: "{{\\"name\\": " {name} ", \\"arguments\\": " %json {parameters} "}}"')
    return "\n".join([f"body: {' | '.join(f'call{i}' for i in range(len(lines)))}", *lines])


def _in_xml(functions: Sequence[Mapping[str, Any]], where: str) -> str:
    """Qwen3-Coder's: each parameter between tags. Where a string may come it is free text, or one of an
    enum's; this format has no quotes, so nothing else is known of it."""
    lines = [f"body: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        schema = _object(function)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise Refused(
                where, f"{where}: the parameters of {function['name']} are no JSON schema of an object"
            )
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        names = []
        for j, (name, own) in enumerate(properties.items()):
            names.append(f"value{i}_{j}" + ("" if name in required else "?"))
            open_, close = json.dumps(f"<parameter={name}>\n"), "\n</parameter>\n"
            own = own if isinstance(own, dict) else {}
            types, options = types_of(own), own.get("enum", [own["const"]] if "const" in own else None)
            if (types and "string" not in types) or "$ref" in own:
                text = f"%json {_dumped(_ruled({**own, **shared}), where)} {json.dumps(close)}"
            elif isinstance(options, list) and options and types == {"string"}:
                text = f"({' | '.join(json.dumps(o) for o in options)}) {json.dumps(close)}"
            else:
                text = f"text{i}_{j}"
                lines.append(f"text{i}_{j}[suffix={json.dumps(close)}]: /(.|\\n)*/")
            lines.append(f"value{i}_{j}: {open_} {text}")
        head = json.dumps(f"<function={function['name']}>\n")
        lines.append(f'call{i}: {head} {" ".join(names)} "</function>"')
    return "\n".join(lines)


CALLS: dict[str, Callable[[Sequence[Mapping[str, Any]], str], str]] = {
    "json_tools": _in_json,
    "qwen3_coder": _in_xml,
}


def _object(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says."""
    return {**(function.get("parameters") or {}), "type": "object"}


def _ruled(schema: dict[str, Any] | bool) -> dict[str, Any]:
    own = {} if schema is True else {"not": {}} if schema is False else schema
    return {**own, "x-guidance": JSON}


def _dumped(schema: Any, where: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise Refused(where, f"{where} is not a JSON schema: {error}; send an object") from error
