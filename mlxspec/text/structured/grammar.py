"""Grammars for answers: the mask of the next token, computed by llguidance on the host.

What cannot be enforced is refused by name before anything runs. A grammar begins where the
reasoning ends, and an answer that reasons must end its reasoning before it ends.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, rejected
from mlxspec.text.output_parser import FUNCTION_CALL, NEXT_MESSAGE, is_harmony
from mlxspec.text.structured.json_schema import LIMITS, first_line, json_rule
from mlxspec.types import Json

MAX_COMPILED = 32  # grammars in the cache
MAX_BYTES = 1 << 19  # of a grammar
MAX_BLANKS = 4  # characters of white space between reasoning and answer
MAX_DIGITS = 32  # in a row where no letter may come: a number that is longer would never end
MAX_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # a mask takes a hundredth of that
MAX_SLOW = 16  # slow masks of one answer
RESTART_S = 0.05  # a grammar that takes longer to compile is never compiled while an answer runs
# Keywords by which an object may have more properties than it lists.
OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())

Make = Callable[[], Any]  # of matchers
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer. Used by one thread; the matchers it returns may run on
    another. `vocab` is the width of the logits. Raises RejectedRequest for the field `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _vocabulary: "Vocabulary | None" = None
    # With the seconds of CPU that it takes to compile.
    _compiled: OrderedDict[tuple[str, bool | None], tuple[LLMatcher, float]] = field(
        default_factory=OrderedDict
    )

    def calls(self, tools: Tools, name: str | None, single: bool, where: str) -> str:
        """The Lark rule of calls of these tools, or only of the one called `name`: JSON objects
        with name and arguments between the model's markers; the rules that it refers to follow on
        further lines. Without an end marker all calls follow one begin marker.

        Whatever the rule takes, the output parser reads as that call, with arguments that conform,
        also for a model that would write its calls in another format. Only numbers too large for a
        float are not read."""
        tokenizer, head = self.tokenizer, ""
        bodies = []
        for tool in tools:
            function = tool["function"]
            if not name or function["name"] == name:
                own = json.dumps(function["name"], ensure_ascii=False)
                begin = json.dumps(f'{{"name": {own}, "arguments": ')
                arguments = json_rule(_arguments(function), where)
                head = self.header_rule(FUNCTION_CALL % function["name"], where)
                bodies.append(head + arguments if head else f'{begin} {arguments} "}}"')
        if not bodies:
            wanted = name or "a call"
            raise rejected(where, f"asks for {wanted}, which is not in tools; send it there")
        if head:  # an answer has one call
            return "\n".join(["body", f"body: {' | '.join(bodies)}"])
        call, calls, end = "call", "body", ""
        if tokenizer.tool_call_end:
            end = f'"\\n" {marker(tokenizer, tokenizer.tool_call_end)}'
            if not single:
                call = 'call ("\\n" call)*'
        elif not single:
            calls = 'body ("\\n" body)*'
        begin = marker(tokenizer, tokenizer.tool_call_start)
        body = " | ".join(bodies)
        return "\n".join([call, f'call: {begin} "\\n" {calls} {end}', f"body: {body}"])

    def header_rule(self, text: str, where: str) -> str:
        """The rule for a message's header `text` in Harmony; "" for a model whose answers have no
        headers. Raises RejectedRequest where their form is another."""
        if not self.tokenizer.response_transitions:
            return ""
        if not is_harmony(self.tokenizer):
            raise rejected(where, "cannot be honoured in this model's format; leave it out")
        return _tokens(self.tokenizer.encode(text, add_special_tokens=False))

    def rules(self, parts: Iterable[str]) -> str:
        """A whole Lark grammar: the alternative of several rules, each followed by the rules that
        it refers to."""
        lines = [f"way{i}: {part}" for i, part in enumerate(parts)]
        ways = " | ".join(f"way{i}" for i in range(len(lines)))
        return "\n".join([f"start: {ways}", *lines])

    def compiled(self, lark: str, thinking: bool | None, where: str) -> Make:
        """A function that makes a matcher for one answer. `thinking`: the prompt has opened the
        reasoning; None: the answer may open it."""
        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary(self.tokenizer, self.vocab)
            except BaseException as error:  # a panic of Rust code is no Exception
                why = f"cannot be honoured by this model's tokenizer: {first_line(str(error))}"
                raise rejected(where, f"{why}; leave it out") from error
        vocabulary, key = self._vocabulary, (lark, thinking)
        compile_again = partial(vocabulary.compile, lark, thinking, where)
        matcher, seconds = self._compiled.pop(key, (None, 0.0))
        if matcher is None or _warm_error(matcher):  # copies share a lexer, and so an error
            began = time.thread_time()
            matcher = compile_again()
            seconds = time.thread_time() - began
        self._compiled[key] = matcher, seconds
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        own = matcher.deep_copy()  # the cached one may be in use here when the engine makes more
        quick = seconds < RESTART_S
        return lambda: GrammarMatcher(own.deep_copy(), compile_again, vocabulary, quick)


class Vocabulary:
    """A tokenizer as matchers see it. Sets of tokens are ints, with bit t for token t. Raises
    whatever llguidance does where it cannot read the tokenizer.

    `digits` has the length of each token of digits alone. `letter` is a token that may come
    wherever any text may.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab: int) -> None:
        ends = [token for token in tokenizer.eos_token_ids if token < min(vocab, len(tokenizer))]
        if not ends:
            raise ValueError("no token ends an answer")
        self._tokenizer, self._eos = tokenizer, sorted(ends)
        self.inner = from_tokenizer(tokenizer._tokenizer, eos_token=self._eos)
        self.size = -(-vocab // 8)  # of a mask, in bytes
        self.every = (1 << min(self.inner.vocab_size, vocab)) - 1
        self.ends = _bits(ends)
        self.digits = {}
        for piece, token in tokenizer.get_vocab().items():
            if piece.isascii() and piece.isdigit() and token < vocab:
                self.digits[token] = len(piece)  # a digit is itself in every alphabet of tokens
        self.numeral = _bits(self.digits)
        self.letter = self.inner.greedy_tokenize("a")[0]

    def reasoning(self, thinking: bool | None) -> str:
        """The Lark grammar of an answer by the grammar `answer`, and of the reasoning before it.
        The last token of the reasoning's end marker ends the reasoning."""
        closer = self._tokenizer.think_end_tokens
        if thinking is False or not closer:
            return "start: @answer"
        ends = ",".join(map(str, [*self._eos, closer[-1]]))
        behind = "BLANKS?"
        if self._tokenizer.response_transitions:
            behind = _tokens(self._tokenizer.encode(NEXT_MESSAGE, add_special_tokens=False))
        think = f"<[^{ends}]>* <[{closer[-1]}]> {behind}"
        if thinking is None:
            opener = _tokens(self._tokenizer.think_start_tokens)
            think = f"({opener}{think})?"
        return f"start: {think} @answer\nBLANKS: /[ \\n]{{1,{MAX_BLANKS}}}/"

    def compile(self, lark: str, thinking: bool | None, where: str) -> LLMatcher:
        """The matcher of a grammar of this field. Raises RejectedRequest."""
        if len(lark) > MAX_BYTES:
            raise rejected(where, f"is larger than {MAX_BYTES >> 10} KB; send a smaller one")
        for before in dict.fromkeys((False, thinking)):  # alone first: its first mask may fail
            parts = [
                {"lark_grammar": self.reasoning(before)},
                {"name": "answer", "lark_grammar": lark},
            ]
            grammar = json.dumps({"grammars": parts})
            matcher = LLMatcher(self.inner, grammar, log_level=0, limits=LIMITS)
            problem = _warm_error(matcher) or "".join(matcher.get_grammar_warnings()[:1])
            if problem:
                raise rejected(where, f"cannot be honoured: {first_line(problem)}; leave it out")
        return matcher


@dataclass(slots=True)
class GrammarMatcher:
    """The matcher of one answer. `_compile_again` compiles its grammar once more, which is done
    only where it is `_quick`: it holds up all answers. Else a draft, which may make it necessary,
    is never tried."""

    _inner: LLMatcher
    _compile_again: Callable[[], LLMatcher]
    _vocabulary: Vocabulary
    _quick: bool = True
    _consumed: list[int] = field(default_factory=list)
    _restarts: int = 0
    _slow: int = 0
    _drafts: bool = field(init=False)  # until one fails or is slow: plain decoding may never

    def __post_init__(self) -> None:
        self._drafts = self._quick

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """The masks of the next token and of those after each drafted token that is allowed:
        `len(masks) - 1` are. Bit i % 8 of byte i // 8 allows token i."""
        known, began, start = self._vocabulary, time.perf_counter(), len(self._consumed)
        rows = [self._retried(self._mask)]
        if time.perf_counter() - began > SLOW_S:
            self._slow += 1
        if self._slow >= MAX_SLOW:  # it would hold up the other answers
            raise RuntimeError("masks take long: too many ways to read the text; send fewer")
        try:
            for token in draft if self._drafts else ():
                if not rows[-1] & ~known.ends & 1 << token:
                    break
                self._consume(token)
                rows.append(self._mask())
                if time.perf_counter() - began > SLOW_S:
                    self._drafts = False
                    break
            self._inner.rollback(len(self._consumed) - start)
            del self._consumed[start:]
        except RuntimeError:
            self._drafts = False
            del self._consumed[start:]
            self._restart()
        return [row.to_bytes(known.size, "little") for row in rows]

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        for token in tokens:
            if not self._vocabulary.ends >> token & 1:
                self._retried(partial(self._consume, token))

    def restricts(self, ahead: int) -> bool:
        """Whether the next token, or one of the `ahead` tokens after it, may not be any: masks
        tell."""
        return True

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the only text that can follow; another spelling may be allowed."""
        if not self._drafts:
            return []
        try:
            found = self._inner.compute_ff_tokens()[:most]
            return found and found[: len(self.masks(found)) - 1]
        except Exception:  # only a guess; the next mask says what is wrong
            return []

    def _retried(self, act: Callable[[], T]) -> T:
        """The result of `act`, after an error with a grammar that is compiled again: copies share a
        lexer, and another answer or a draft may have exceeded its limits."""
        try:
            return act()
        except RuntimeError as error:
            if "items" in str(error) or self._restarts >= MAX_RESTARTS:
                raise  # too many items: of this answer itself, and the same every time
        self._restart()
        return act()

    def _restart(self) -> None:
        if not self._quick:
            raise RuntimeError("it is too large to begin again; send a smaller one")
        self._restarts += 1
        self._inner = self._compile_again()
        if not self._inner.consume_tokens(self._consumed):
            raise self._failure()

    def _failure(self) -> RuntimeError:
        return RuntimeError(first_line(self._inner.get_error()))

    def _consume(self, token: int) -> None:
        if not self._inner.consume_token(token):
            raise self._failure()
        self._consumed.append(token)

    def _mask(self) -> int:
        known = self._vocabulary
        raw = self._inner.compute_bitmask()
        if self._inner.is_error():
            raise self._failure()
        mask = int.from_bytes(raw, "little") & known.every
        if mask >> known.letter & 1:
            return mask
        digits = 0
        for token in reversed(self._consumed):
            if token not in known.digits or digits >= MAX_DIGITS:
                break
            digits += known.digits[token]
        ended = mask & ~known.numeral
        return ended if digits >= MAX_DIGITS and ended else mask


def _warm_error(matcher: LLMatcher) -> str:
    """The error of a matcher, "" if there is none. The first mask warms the lexer, and finds what
    can never be met."""
    matcher.compute_bitmask()
    return str(matcher.get_error())


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))


# ---- the rule of tool calls


def marker(tokenizer: TokenizerWrapper, text: str) -> str:
    """A marker as the token that it is in this vocabulary, else as text."""
    token = tokenizer.convert_tokens_to_ids(text)
    known = token is not None and tokenizer.convert_ids_to_tokens(token) == text
    return f"<[{token}]>" if known else json.dumps(text)


def _tokens(ids: Iterable[int]) -> str:
    """Token ids in a rule."""
    return "".join(f"<[{token}]> " for token in ids)


def _arguments(function: Mapping[str, Any]) -> Json:
    """The schema of the arguments: an object, and closed where it lists its properties."""
    schema = {**(function.get("parameters") or {}), "type": "object"}
    listed, required = schema.get("properties"), schema.get("required", [])
    if isinstance(listed, dict) and isinstance(required, list) and not OPEN & schema.keys():
        if set(map(str, required)) <= listed.keys():
            schema.setdefault("additionalProperties", False)
    return schema
