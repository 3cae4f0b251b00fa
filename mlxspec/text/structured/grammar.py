"""Grammars for answers: which tokens may come next, computed by llguidance on the host.

What cannot be enforced is refused by name before anything runs. A grammar begins where the
reasoning ends, and an answer that reasons must end its reasoning before it ends.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, refused
from mlxspec.text.structured.json_schema import LIMITS, first_line
from mlxspec.text.structured.tools import call_rules

MAX_COMPILED = 32  # grammars that are kept
MAX_BYTES = 1 << 19  # of a grammar
MAX_BLANKS = 2  # tokens of white space between reasoning and answer
MAX_DIGITS = 32  # in a row where no letter may come: a number that is longer would never end
MAX_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # a mask takes a hundredth of that
MAX_SLOW = 16  # slow masks of one answer
BLANKS = ("\n", "\n\n", " ")

Make = Callable[[], "GrammarMatcher"]
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer. Used by one thread; the matchers it returns may run on
    another. `vocab` is the width of the logits. Raises Refused, naming the field `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _vocabulary: "Vocabulary | None" = None
    _compiled: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)

    def calls(self, tools: Tools, name: str | None, single: bool, where: str) -> str:
        """The rule of calls of these tools, or only of the one called `name`; the rules that it
        needs follow on further lines."""
        functions = []
        for tool in tools:
            if not name or tool["function"]["name"] == name:
                functions.append(tool["function"])
        if not functions:
            raise refused(where, f"names no tool {name or ''}; send it in tools")
        return call_rules(self.tokenizer, functions, single, where)

    def rules(self, parts: Iterable[str]) -> str:
        """A whole grammar: one of several rules, each with the rules that it needs behind its first
        line."""
        lines = []
        for i, part in enumerate(parts):
            lines.append(f"way{i}: {part}")
        ways = " | ".join(f"way{i}" for i in range(len(lines)))
        return "\n".join([f"start: {ways}", *lines])

    def compiled(self, lark: str, thinking: bool | None, where: str) -> Make:
        """A function that makes a matcher for one answer. `thinking`: the prompt has opened the
        reasoning; None: the answer may open it."""
        vocabulary = self._tokens(where)
        again = partial(self._compile, lark, where)
        matcher = self._compiled.pop(lark, None)
        if matcher is None or _warm_error(matcher):  # copies share a lexer, and so an error
            matcher = again()
        self._compiled[lark] = matcher
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return lambda: GrammarMatcher(matcher.deep_copy(), again, vocabulary, thinking)

    def _compile(self, lark: str, where: str) -> LLMatcher:
        if len(lark) > MAX_BYTES:
            raise refused(where, f"is larger than {MAX_BYTES >> 10} KB; send a smaller one")
        tokens = self._tokens(where).inner
        try:
            grammar = LLMatcher.grammar_from_lark(lark)
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        except UnicodeEncodeError as error:
            raise refused(where, "has half a surrogate pair; send whole characters") from error
        error_or_warnings = _warm_error(matcher) or "".join(matcher.get_grammar_warnings()[:1])
        if error_or_warnings:
            why = first_line(error_or_warnings)
            raise refused(where, f"cannot be honoured: {why}; leave it out")
        return matcher

    def _tokens(self, where: str) -> "Vocabulary":
        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary(self.tokenizer, self.vocab)
            except BaseException as error:  # a panic of Rust code is no Exception
                why = f"cannot be honoured by this model's tokenizer: {first_line(str(error))}"
                raise refused(where, f"{why}; leave it out") from error
        return self._vocabulary


class Vocabulary:
    """What matchers know of a tokenizer. Sets of tokens are ints, with bit t for token t. Raises
    whatever llguidance does where it cannot read the tokenizer.

    `opener` and `closer` are the reasoning's markers. `digits` has the length of each token of
    digits alone. `letter` is a token that may come wherever any text may.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab: int) -> None:
        ends = [token for token in tokenizer.eos_token_ids if token < min(vocab, len(tokenizer))]
        if not ends:
            raise ValueError("no token ends an answer")
        self.inner = from_tokenizer(tokenizer._tokenizer, eos_token=sorted(ends))
        self.size = -(-vocab // 8)  # of a mask, in bytes
        self.every = (1 << min(self.inner.vocab_size, vocab)) - 1
        self.ends = _bits(ends)
        self.blanks = 0
        for blank in BLANKS:
            tokens = self.inner.greedy_tokenize(blank)
            if len(tokens) == 1:
                self.blanks |= 1 << tokens[0]
        self.digits = {}
        for piece, token in tokenizer.get_vocab().items():
            if piece.isascii() and piece.isdigit() and token < vocab:
                self.digits[token] = len(piece)  # a digit is itself in every alphabet of tokens
        self.numeral = _bits(self.digits)
        self.letter = self.inner.greedy_tokenize("a")[0]
        opener: tuple[int, ...] = tokenizer.think_start_tokens or ()
        self.closer = tuple(tokenizer.think_end_tokens or ())
        self.opener = opener[0] if len(opener) == 1 else None


class GrammarMatcher:
    """The matcher of one answer. `again` compiles its grammar once more; `thinking`: the reasoning
    is open; None: the answer may open it."""

    def __init__(
        self,
        inner: LLMatcher,
        again: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        thinking: bool | None,
    ) -> None:
        self._inner, self._again, self._vocabulary = inner, again, vocabulary
        # The last tokens of the reasoning; None: the grammar has begun.
        self._tail: tuple[int, ...] | None = () if thinking and vocabulary.closer else None
        self._opener = vocabulary.opener if thinking is None else None
        self._gap = 0  # blanks that may still come between reasoning and answer
        self._digits = 0  # in a row
        self._ended = False
        self._consumed: list[int] = []  # by the grammar
        self._restarts = 0
        self._slow = 0
        self._drafts = True  # until one fails: plain decoding may never meet that error

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """The masks of the next token and of those behind each drafted token that is allowed:
        `len(masks) - 1` are. Bit i % 8 of byte i // 8 allows token i; an empty mask allows all."""
        began = time.perf_counter()
        rows = [self._retried(self._mask)]
        if time.perf_counter() - began > SLOW_S:
            self._slow += 1
        if self._slow >= MAX_SLOW:  # it would hold up everybody's answers
            raise RuntimeError("masks take long: too many ways to read the text; send fewer")
        if draft and self._drafts:
            probe = copy(self)
            probe._inner, probe._consumed = self._inner.deep_copy(), []
            try:
                for token in draft:
                    if not rows[-1] & ~self._vocabulary.ends & 1 << token:
                        break
                    probe._advance(token)
                    rows.append(probe._mask())
                    if time.perf_counter() - began > SLOW_S:
                        self._drafts = False
                        break
            except RuntimeError:
                self._drafts = False
        return [row.to_bytes(self._vocabulary.size, "little") for row in rows]

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        for token in tokens:
            self._retried(partial(self._advance, token))

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the only text that can follow; it may be spelled otherwise."""
        if self._tail is not None or self._gap or self._ended or self._opener is not None:
            return []
        try:
            found = self._inner.compute_ff_tokens()[:most]
            return found[: len(self.masks(found)) - 1]
        except Exception:  # only a guess; the next mask says what is wrong
            return []

    def _retried(self, act: Callable[[], T]) -> T:
        """Compiles the grammar again after an error: copies share a lexer, and another answer or a
        draft may have worn it out."""
        try:
            return act()
        except RuntimeError as error:
            if "items" in str(error) or self._restarts >= MAX_RESTARTS:
                raise  # too many items: of this answer itself, and the same every time
        self._restarts += 1
        self._inner = self._again()
        if self._consumed and not self._inner.consume_tokens(self._consumed):
            raise self._failure()
        return act()

    def _failure(self) -> RuntimeError:
        return RuntimeError(first_line(self._inner.get_error()))

    def _advance(self, token: int) -> None:
        """Go on behind a token that may come."""
        known = self._vocabulary
        opener, self._opener = self._opener, None
        if self._tail is not None:
            self._tail = (*self._tail, token)[-len(known.closer) :]
            if self._tail == known.closer:
                self._tail, self._gap = None, MAX_BLANKS
        elif token == opener:
            self._tail = ()
        elif known.ends >> token & 1:
            self._ended = True
        elif self._gap and known.blanks >> token & 1 and not self._grammar_mask() >> token & 1:
            self._gap -= 1
        elif not self._inner.consume_token(token):
            raise self._failure()
        else:
            self._gap = 0
            self._consumed.append(token)
            self._digits = self._digits + known.digits[token] if token in known.digits else 0

    def _mask(self) -> int:
        known = self._vocabulary
        if self._tail is not None:
            return known.every & ~known.ends  # an answer that ended here would not conform
        if self._ended:
            return known.ends
        mask = self._grammar_mask()
        if self._gap:
            mask |= known.blanks
        if self._opener is not None:
            mask |= 1 << self._opener
        return mask

    def _grammar_mask(self) -> int:
        known = self._vocabulary
        raw = self._inner.compute_bitmask()
        if self._inner.is_error():
            raise self._failure()
        mask = int.from_bytes(raw, "little") & known.every
        if self._digits >= MAX_DIGITS and not mask >> known.letter & 1:
            if ended := mask & ~known.numeral:
                return ended
        return mask


def _warm_error(matcher: LLMatcher) -> str:
    """The error of a matcher, "" if there is none. The first mask warms the lexer, and finds what
    can never be met."""
    matcher.compute_bitmask()
    return str(matcher.get_error())


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))
