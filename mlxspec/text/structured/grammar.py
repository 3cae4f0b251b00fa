"""Grammars for answers: which tokens may come next, computed by llguidance on the host.

What cannot be enforced is refused by name before anything runs. A grammar begins where the
reasoning ends, and an answer that reasons must end its reasoning before it ends.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Refused, Tools
from mlxspec.text.structured.json_schema import LIMITS, checked_lark, first_line, json_rule
from mlxspec.text.structured.tools import CALLS, json_calls
from mlxspec.types import Matcher, shown

MAX_COMPILED = 32  # grammars that are kept
MAX_BYTES = 1 << 19  # of a grammar
MAX_BLANKS = 2  # tokens of white space between reasoning and answer
MAX_DIGITS = 32  # in a row where no letter may come: a number that is longer would never end
MAX_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # a mask takes a hundredth of that
MAX_SLOW = 16  # slow masks of one answer
BLANKS = ("\n", "\n\n", " ")

Make = Callable[[], Matcher]
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer. Used by one thread; the matchers it returns may run on
    another. `vocab` is the width of the logits. Raises Refused, naming the field `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _vocabulary: "Vocabulary | None" = None
    _compiled: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)

    def json(self, schema: Any, where: str) -> str:
        """The rule of JSON that conforms to the schema, an object."""
        return json_rule(schema, where)

    def lark(self, text: str, where: str) -> str:
        """A client's whole grammar in Lark's language."""
        return checked_lark(text, where)

    def calls(self, tools: Tools, name: str | None, single: bool, where: str) -> str:
        """The rule of calls of these tools, or only of the one called `name`; the rules that it
        needs follow on further lines."""
        functions = [tool["function"] for tool in tools]
        if name:
            functions = [function for function in functions if function["name"] == name]
        if not functions:
            what = f"{shown(name)} is none of the tools" if name else "there are no tools"
            raise Refused(where, f"{where}: {what}; send it in tools")
        kind = getattr(self.tokenizer.tool_parser, "__module__", "no tools").rpartition(".")[2]
        if kind not in CALLS and self.tokenizer.response_transitions:
            raise Refused(
                where,
                f"{where}: calls in this model's format, {kind}, cannot be enforced; send"
                " tool_choice 'auto' and no format, or 'none'",
            )
        return CALLS.get(kind, json_calls)(self.tokenizer, functions, single, where)

    def rules(self, parts: Iterable[str]) -> str:
        """A whole grammar: one of several rules, each with the rules that it needs behind its first
        line."""
        starts, lines = [], []
        for i, part in enumerate(parts):
            starts.append(f"way{i}")
            lines.append(f"way{i}: {part}")
        return "\n".join([f"start: {' | '.join(starts)}", *lines])

    def compiled(self, lark: str, thinking: bool | None, where: str) -> Make:
        """A function that makes a matcher for one answer. `thinking`: the prompt has opened the
        reasoning; None: the answer may open it."""
        matcher = self._compiled.pop(lark, None)
        if matcher:
            matcher.compute_bitmask()  # copies share a lexer, and so an error
        if matcher is None or matcher.is_error():
            matcher = self._compile(lark, where)
        self._compiled[lark] = matcher
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        vocabulary = self._tokens(where)
        reasoning = bool(thinking and vocabulary.closer)
        opener = vocabulary.opener if thinking is None else None
        again = partial(self._compile, lark, where)
        return lambda: GrammarMatcher(matcher.deep_copy(), again, vocabulary, reasoning, opener)

    def _compile(self, lark: str, where: str) -> LLMatcher:
        if len(lark) > MAX_BYTES:
            raise Refused(where, f"{where} is larger than {MAX_BYTES >> 10} KB; send a smaller one")
        tokens = self._tokens(where).inner
        try:
            grammar = LLMatcher.grammar_from_lark(lark)
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        except UnicodeEncodeError as error:
            raise Refused(
                where, f"{where} has half a surrogate pair; send whole characters"
            ) from error
        matcher.compute_bitmask()  # finds what can never be met, and warms the lexer
        errors = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if errors:
            why = first_line(errors[0])
            raise Refused(where, f"{where} cannot be honoured: {why}; leave it out")
        return matcher

    def _tokens(self, where: str) -> "Vocabulary":
        if self._vocabulary is None:
            try:
                self._vocabulary = vocabulary_of(self.tokenizer, self.vocab)
            except BaseException as error:  # a panic of Rust code is no Exception
                why = first_line(str(error))
                raise Refused(
                    where,
                    f"{where}: this model's tokenizer takes no grammars ({why}); leave it out",
                ) from error
        return self._vocabulary


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What matchers know of a tokenizer. Sets of tokens are ints, with bit t for token t.

    `thought` is the mask inside the reasoning: all but `ends`, because an answer that ended there
    would not conform. `opener` and `closer` are the reasoning's markers. `digits` has the length of
    each token of digits alone. `letter` is a token that may come wherever any text may.
    """

    inner: LLTokenizer
    size: int  # of a mask, in bytes
    every: int
    ends: int
    thought: int
    blanks: int
    closer: tuple[int, ...]
    opener: int | None
    digits: Mapping[int, int]
    numeral: int  # the tokens in `digits`
    letter: int


def vocabulary_of(tokenizer: TokenizerWrapper, vocab: int) -> Vocabulary:
    """Raises whatever llguidance does where it cannot read the tokenizer."""
    ids = range(min(vocab, len(tokenizer)))
    ends = sorted(token for token in tokenizer.eos_token_ids if token in ids)
    if not ends:
        raise ValueError("no token ends an answer")
    inner = from_tokenizer(tokenizer._tokenizer, eos_token=ends)
    blanks = [inner.greedy_tokenize(blank) for blank in BLANKS]
    digits = {}
    for piece, token in tokenizer.get_vocab().items():
        if piece.isascii() and piece.isdigit() and token < vocab:
            digits[token] = len(piece)  # a digit is itself in every alphabet of tokens
    every = (1 << min(inner.vocab_size, vocab)) - 1
    start = tuple(tokenizer.think_start_tokens or ())
    opener = None
    if len(start) == 1 and tokenizer.think_end_tokens:
        opener = start[0]
    return Vocabulary(
        inner=inner,
        size=-(-vocab // 8),
        every=every,
        ends=_bits(ends),
        thought=every & ~_bits(ends),
        blanks=_bits(tokens[0] for tokens in blanks if len(tokens) == 1),
        closer=tuple(tokenizer.think_end_tokens or ()),
        opener=opener,
        digits=digits,
        numeral=_bits(digits),
        letter=inner.greedy_tokenize("a")[0],
    )


class GrammarMatcher:
    """The matcher of one answer. `again` compiles its grammar once more; `opener` is the token that
    may open the reasoning at the beginning."""

    def __init__(
        self,
        inner: LLMatcher,
        again: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        reasoning: bool,
        opener: int | None,
    ) -> None:
        self._inner, self._again, self._vocabulary = inner, again, vocabulary
        self._tail: tuple[int, ...] | None = () if reasoning else None  # of the reasoning
        self._opener = opener
        self._gap = 0  # blanks that may still come between reasoning and answer
        self._digits = 0  # in a row
        self._ended = False
        self._consumed: list[int] = []  # by the grammar
        self._restarts = 0
        self._slow = 0
        self._drafts = True  # until one fails: plain decoding may never meet that error

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        began = time.perf_counter()
        rows = [self._retried(self._mask)]
        seconds = time.perf_counter() - began
        if seconds > SLOW_S:
            self._slow += 1
        if self._slow >= MAX_SLOW:  # it would hold up everybody's answers
            raise RuntimeError(
                f"a mask takes {seconds:.1f} s: too many ways to read the text; send fewer"
            )
        if draft and self._drafts:
            probe = copy(self)
            probe._inner = self._inner.deep_copy()
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
        for token in tokens:
            if self._retried(partial(self._advance, token)):
                self._consumed.append(token)

    def forced(self, most: int) -> list[int]:
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

    def _advance(self, token: int) -> bool:
        """Go on behind a token that may come. Whether the grammar consumed it."""
        known = self._vocabulary
        if self._tail is not None:
            self._tail = (*self._tail, token)[-len(known.closer) :]
            if self._tail == known.closer:
                self._tail, self._gap = None, MAX_BLANKS
            return False
        opener, self._opener = self._opener, None
        if token == opener:
            self._tail = ()
            return False
        if known.ends >> token & 1:
            self._ended = True
            return False
        if self._gap and known.blanks >> token & 1 and not self._grammar_mask() >> token & 1:
            self._gap -= 1
            return False
        self._gap = 0
        if not self._inner.consume_token(token):
            raise self._failure()
        if token in known.digits:
            self._digits += known.digits[token]
        else:
            self._digits = 0
        return True

    def _mask(self) -> int:
        known = self._vocabulary
        if self._tail is not None:
            return known.thought
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


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))
