"""Grammars for answers: which tokens may come next, by llguidance, on the host.

Rule: what cannot be enforced is refused by name before anything runs; what a model does say then
conforms. A grammar begins where the reasoning ends, and an answer that reasons must end its
reasoning before it ends.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Refused, Tools
from mlxspec.text.structured.json_schema import LIMITS, brief, checked_lark, json_rule
from mlxspec.text.structured.tools import CALLS, json_calls
from mlxspec.types import Matcher, shown

KNOWN = 32  # compiled grammars that are kept
MOST_BYTES = 1 << 19  # of a grammar
GAP = 2  # tokens of white space that may stand between reasoning and answer
MOST_DIGITS = (
    32  # in a row, where no letter may come: a number is longer only if the model is lost in it
)
MOST_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # a mask takes a hundredth of that
MOST_SLOW = 16
BLANKS = ("\n", "\n\n", " ")

Make = Callable[[], Matcher]
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer. `vocab` is the width of the logits. One thread only;
    what it hands out may be called on another. All that is wrong raises Refused, of the field
    `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _inner: LLTokenizer | None = None
    _bounds: "Bounds | None" = None
    _known: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)

    def json(self, schema: Any, where: str) -> str:
        """The rule of JSON that the schema, an object, takes."""
        return json_rule(schema, where)

    def lark(self, text: str, where: str) -> str:
        """A client's whole grammar, in Lark's language."""
        return checked_lark(text, where)

    def calls(self, tools: Tools, name: str | None, single: bool, where: str) -> str:
        """The rule of calls of these tools, or of the one with this name, with the rules that it
        needs."""
        chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
        if not chosen:
            what = f"{shown(name)} is none of the tools" if name else "there are no tools"
            raise Refused(where, f"{where}: {what}; send it in tools")
        kind = getattr(self.tokenizer.tool_parser, "__module__", "no tools").rpartition(".")[2]
        if kind not in CALLS and self.tokenizer.response_transitions:
            raise Refused(
                where,
                f"{where}: calls in this model's format, {kind}, cannot be enforced; send tool_choice 'auto'"
                " and no format, or 'none'",
            )
        return CALLS.get(kind, json_calls)(self.tokenizer, chosen, single, where)

    def rules(self, parts: Iterable[str]) -> str:
        """A whole grammar: one of several rules, each with the rules that it needs behind its first
        line."""
        heads, rest = zip(*(part.partition("\n")[::2] for part in parts), strict=True)
        lines = [f"way{i}: {head}" for i, head in enumerate(heads)]
        starts = " | ".join(f"way{i}" for i in range(len(heads)))
        return "\n".join([f"start: {starts}", *lines, *filter(None, rest)])

    def compiled(self, lark: str, thinking: bool | None, where: str) -> Make:
        """What makes a matcher for each answer. `thinking`: the prompt has opened the reasoning;
        None: the answer may open it."""
        made = self._known.pop(lark, None)
        if made:
            # its copies share its lexer, and the error of one is that of all
            made.compute_bitmask()
        if made is None or made.is_error():
            made = self._compile(lark, where)
        self._known[lark] = made
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        kept, bounds = made, self._around()
        tail = () if thinking and bounds.closer else None
        opener = bounds.opener if thinking is None else None
        anew = partial(self._compile, lark, where)
        return lambda: Ruled(kept.deep_copy(), anew, bounds, tail, opener)

    def _compile(self, lark: str, where: str) -> LLMatcher:
        if len(lark) > MOST_BYTES:
            raise Refused(
                where, f"{where} is larger than {MOST_BYTES >> 10} KB; send a smaller one"
            )
        try:
            made = LLMatcher(
                self._tokens(where), LLMatcher.grammar_from_lark(lark), log_level=0, limits=LIMITS
            )
        except UnicodeEncodeError as error:
            raise Refused(
                where, f"{where} has half a surrogate pair; send whole characters"
            ) from error
        # finds what can never be met, and is most of what a first mask costs
        made.compute_bitmask()
        if said := [made.get_error()] if made.is_error() else made.get_grammar_warnings():
            raise Refused(where, f"{where} cannot be honoured: {brief(said[0])}; leave that out")
        return made

    def _tokens(self, where: str) -> LLTokenizer:
        ends = sorted(
            t for t in self.tokenizer.eos_token_ids if t < min(self.vocab, len(self.tokenizer))
        )
        if self._inner is None:
            try:
                if not ends:
                    raise ValueError("no token ends an answer")
                self._inner = from_tokenizer(self.tokenizer._tokenizer, eos_token=ends)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of Rust's code is no Exception
                why = brief(str(error))
                raise Refused(
                    where,
                    f"{where}: this model's tokenizer takes no grammars ({why}); leave it out",
                ) from error
        return self._inner

    def _around(self) -> "Bounds":
        if self._bounds is not None:
            return self._bounds
        t, inner = self.tokenizer, self._inner
        assert inner is not None
        size, ends = -(-self.vocab // 8), frozenset(inner.eos_tokens)
        begin: tuple[int, ...] = tuple(t.think_start_tokens or ())
        blanks = [inner.greedy_tokenize(blank) for blank in BLANKS]
        pieces = t.get_vocab().items()  # a digit is itself in every alphabet of tokens
        digits = {i: len(p) for p, i in pieces if p.isascii() and p.isdigit() and i < self.vocab}
        self._bounds = Bounds(
            size=size,
            ends=ends,
            blanks=frozenset(ids[0] for ids in blanks if len(ids) == 1),
            closer=tuple(t.think_end_tokens or ()),
            opener=begin[0] if len(begin) == 1 and t.think_end_tokens else None,
            end=_bits(ends).to_bytes(size, "little"),
            thought=((1 << min(inner.vocab_size, self.vocab)) - 1 & ~_bits(ends)).to_bytes(
                size, "little"
            ),
            digits=digits,
            numeral=_bits(digits),
            letter=inner.greedy_tokenize("a")[0],
        )
        return self._bounds


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is around every grammar. `opener` and `closer` are the reasoning's; `thought` is the
    mask in it: an answer cannot end there, or it would not keep to its grammar. `digits` has the
    length of each token that is made of digits alone, `numeral` their bits; `letter` is a token
    that any text may go on with."""

    size: int  # of a mask, in bytes
    ends: frozenset[int]
    blanks: frozenset[int]
    closer: tuple[int, ...]
    opener: int | None
    end: bytes
    thought: bytes
    digits: Mapping[int, int]
    numeral: int
    letter: int


class Ruled:
    """The matcher of one answer; `anew` compiles its grammar again. `tail` holds the latest tokens
    of the reasoning, None outside of it."""

    __slots__ = (
        "_anew", "_bounds", "_digits", "_ended", "_fragile", "_gap", "_inner", "_opener", "_restarts",
        "_said", "_slow", "_tail",
    )  # fmt: skip

    def __init__(
        self,
        inner: LLMatcher,
        anew: Callable[[], LLMatcher],
        bounds: Bounds,
        tail: tuple[int, ...] | None,
        opener: int | None,
    ) -> None:
        self._inner, self._anew, self._bounds = inner, anew, bounds
        self._tail, self._opener = tail, opener
        self._gap, self._digits, self._ended = 0, 0, False
        self._fragile, self._restarts = False, 0  # a draft has failed: no more of them
        self._slow = 0  # masks that took long
        self._said: list[int] = []  # to the grammar

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        began = time.perf_counter()
        rows = [self._surely(self._mask)]
        self._in_time(time.perf_counter() - began)
        if self._fragile or not draft:
            return rows
        before = self._tail, self._opener, self._gap, self._digits, self._ended
        own, self._inner = self._inner, self._inner.deep_copy()
        try:
            for token in draft:
                if token in self._bounds.ends or not _has(rows[-1], token):
                    break
                self._step(token)
                rows.append(self._mask())
                if time.perf_counter() - began > SLOW_S:
                    self._fragile = True
                    break
        except RuntimeError:  # met only because of the draft: plain decoding may never come here
            self._fragile = True
        self._inner = own
        self._tail, self._opener, self._gap, self._digits, self._ended = before
        return rows

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            began = time.perf_counter()
            if not _has(self._surely(self._mask), token):
                raise ValueError(f"the token {token} is not what the grammar takes")
            self._in_time(time.perf_counter() - began)
            if self._surely(partial(self._step, token)):
                self._said.append(token)

    def forced(self, most: int) -> list[int]:
        if self._tail is not None or self._gap or self._ended or self._opener is not None:
            return []
        try:
            found = self._inner.compute_ff_tokens()[:most]
            return found[: len(self.masks(found)) - 1]
        except Exception:  # it is no more than a guess; the next mask says what is wrong
            return []

    def _in_time(self, seconds: float) -> None:
        """Raises RuntimeError for a grammar whose masks hold up everybody's answers."""
        self._slow += seconds > SLOW_S
        if self._slow >= MOST_SLOW:
            raise RuntimeError(
                f"a mask takes {seconds:.1f} s: too many ways to read the text; send fewer"
            )

    def _surely(self, act: Callable[[], T]) -> T:
        """A lexer that another answer has worn out is not this one's failure: it gets its own."""
        try:
            return act()
        except RuntimeError as error:
            if "items" in str(error) or self._restarts >= MOST_RESTARTS:
                raise  # its own, and the same every time
            self._restarts += 1
            self._restart()
            return act()

    def _restart(self) -> None:
        self._inner = self._anew()
        if self._said and not self._inner.consume_tokens(self._said):
            raise RuntimeError(brief(self._inner.get_error()))

    def _step(self, token: int) -> bool:
        """Behind a token that may come. Whether the grammar has seen it."""
        if self._tail is not None:
            tail = (*self._tail, token)[-len(self._bounds.closer) :]
            self._tail, self._gap = (None, GAP) if tail == self._bounds.closer else (tail, 0)
            return False
        opener, self._opener = self._opener, None
        if token == opener:
            self._tail = ()
            return False
        if token in self._bounds.ends:
            self._ended = True
            return False
        if self._gap and token in self._bounds.blanks and not _has(self._grammar_mask(), token):
            self._gap -= 1
            return False
        self._gap = 0
        if not self._inner.consume_token(token):
            raise RuntimeError(brief(self._inner.get_error()))
        more = self._bounds.digits.get(token, 0)
        self._digits = self._digits + more if more else 0
        return True

    def _mask(self) -> bytes:
        if self._tail is not None:
            return self._bounds.thought
        if self._ended:
            return self._bounds.end
        more = self._bounds.blanks if self._gap else ()
        if self._opener is not None:
            more = (*more, self._opener)
        mask = self._grammar_mask()
        return (
            (int.from_bytes(mask, "little") | _bits(more)).to_bytes(len(mask), "little")
            if more
            else mask
        )

    def _grammar_mask(self) -> bytes:
        mask, size = self._inner.compute_bitmask(), self._bounds.size
        if self._inner.is_error():
            raise RuntimeError(brief(self._inner.get_error()))
        mask = mask[:size].ljust(size, b"\0")
        if self._digits >= MOST_DIGITS and not _has(mask, self._bounds.letter):
            ended = int.from_bytes(mask, "little") & ~self._bounds.numeral
            mask = ended.to_bytes(size, "little") if ended else mask
        return mask


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))


def _has(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)
