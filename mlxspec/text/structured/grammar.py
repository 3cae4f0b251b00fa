"""Grammars for answers: the mask of the next token, computed by llguidance on the host.

What cannot be enforced is refused by name before anything runs. A grammar begins where the
reasoning ends, and an answer that reasons must end its reasoning before it ends.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.messages import Tools, rejected
from mlxspec.text.formats import FUNCTION_CALL, NEXT_MESSAGE, format_of, has_headers, is_harmony
from mlxspec.text.structured.json_schema import first_line, json_rule
from mlxspec.text.structured.trial import Trial, compiled, warm_error
from mlxspec.types import Json

MAX_COMPILED = 32  # grammars in the cache
LEAST_SIZE = 1 << 23  # bytes that one counts at least
MAX_CACHED = MAX_COMPILED * LEAST_SIZE  # what these took to compile
MAX_COMPILING = 4  # grammars at once
MAX_BYTES = 1 << 19  # of a grammar
MAX_BLANKS = 4  # characters of white space between reasoning and answer
MAX_DIGITS = 32  # in a row where no letter may come: a number that is longer would never end
MAX_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # on a CPU; a mask takes a hundredth of that
MAX_SLOW = 8  # slow masks of one answer
RESTART_S = 0.05  # a grammar that takes longer to compile is never compiled while an answer runs
# Keywords by which an object may have more properties than it lists.
OPEN = frozenset("allOf anyOf oneOf $ref patternProperties const enum".split())

Make = Callable[[], Any]  # of matchers
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer, each on a thread that holds up only other grammars, and
    after a trial. Used by one thread; the matchers that it makes may run on another. `vocab` is the
    width of the logits. Raises RejectedRequest for the field `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _vocabulary: "Vocabulary | None" = None
    _compiled: OrderedDict[tuple[str, bool | None], "CompiledGrammar"] = field(
        default_factory=OrderedDict
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_COMPILING, "grammar")
    )
    _lock: Lock = field(default_factory=Lock)  # of the cache
    _building: Lock = field(default_factory=Lock)  # of the vocabulary
    _behind: str = "BLANKS?"  # the rule for what follows the reasoning

    def __post_init__(self) -> None:  # on this thread: encoding changes the tokenizer meanwhile
        if has_headers(self.tokenizer):
            ids = self.tokenizer.encode(NEXT_MESSAGE, add_special_tokens=False)
            self._behind = _tokens(ids)

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
        if not has_headers(self.tokenizer):
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

    def compile(self, lark: str, thinking: bool | None, where: str) -> Future[Make]:
        """What makes a matcher for each answer, once it is compiled. `thinking`: the prompt has
        opened the reasoning; None: the answer may open it."""
        if len(lark) > MAX_BYTES:
            raise rejected(where, f"is larger than {MAX_BYTES >> 10} KB; send a smaller one")
        known = self._known(lark, thinking)
        if not known:
            return self._threads.submit(self._compile, lark, thinking, where)
        done: Future[Make] = Future()
        done.set_result(known)
        return done

    def _known(self, lark: str, thinking: bool | None) -> Make | None:
        """What makes matchers by a grammar in the cache, unless that has failed: copies share a
        lexer, and so an error."""
        with self._lock:  # no other thread may copy a matcher that computes
            known = self._compiled.get((lark, thinking))
            if known is None or warm_error(known.matcher):
                return None
            self._compiled.move_to_end((lark, thinking))
            # The one in the cache may compute here while the engine makes more.
            return replace(known, matcher=known.matcher.deep_copy()).make

    def _compile(self, lark: str, thinking: bool | None, where: str) -> Make:
        if known := self._known(lark, thinking):  # another request has asked for it
            return known
        with self._building:
            self._vocabulary = self._vocabulary or self._read_vocabulary(where)
        made = self._vocabulary.compiled(lark, thinking, where)
        with self._lock:
            self._compiled[lark, thinking] = made
            while sum(each.size for each in self._compiled.values()) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return self._known(lark, thinking) or made.make

    def _read_vocabulary(self, where: str) -> "Vocabulary":
        try:
            return Vocabulary(self.tokenizer, self.vocab, self._behind)
        except BaseException as error:  # a panic of Rust code is no Exception
            why = f"cannot be honoured by this model's tokenizer: {first_line(str(error))}"
            raise rejected(where, f"{why}; leave it out") from error


class Vocabulary:
    """A tokenizer as matchers see it. Sets of tokens are ints, with bit t for token t. Raises
    whatever llguidance does where it cannot read the tokenizer.

    `digits` has the length of each token of digits alone. `letter` is a token that may come
    wherever any text may.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab: int, behind: str) -> None:
        ends = [token for token in tokenizer.eos_token_ids if token < min(vocab, len(tokenizer))]
        if not ends:
            raise ValueError("no token ends an answer")
        self._tokenizer, self._eos, self._behind = tokenizer, sorted(ends), behind
        read = copy(tokenizer._tokenizer.backend_tokenizer)
        read.no_padding()
        read.no_truncation()
        text = read.to_str()  # with the added tokens, unlike tokenizer.json
        self.inner = LLTokenizer(text, eos_token=self._eos)
        self._trial = Trial(text, self._eos)
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
        form = format_of(self._tokenizer)
        closer = form.think_end_tokens
        if thinking is False or not closer:
            return "start: @answer"
        ends = ",".join(map(str, [*self._eos, closer[-1]]))
        think = f"<[^{ends}]>* <[{closer[-1]}]> {self._behind}"
        if thinking is None:
            opener = _tokens(form.think_start_tokens)
            think = f"({opener}{think})?"
        return f"start: {think} @answer\nBLANKS: /[ \\n]{{1,{MAX_BLANKS}}}/"

    def compiled(self, lark: str, thinking: bool | None, where: str) -> "CompiledGrammar":
        """A grammar of this field, tried out first. Raises RejectedRequest."""
        seconds, size = 0.0, LEAST_SIZE
        for before in dict.fromkeys((False, thinking)):  # alone first: its first mask may fail
            whole = self._whole(lark, before)
            taken, used, problem = self._trial.run(whole)
            if problem:
                raise rejected(where, f"cannot be honoured: {first_line(problem)}; leave it out")
            seconds, size = seconds + taken, max(size, used)
        again = partial(compiled, self.inner, whole)
        return CompiledGrammar(again(), again, self, seconds < RESTART_S, size)

    def _whole(self, lark: str, thinking: bool | None) -> str:
        """A grammar with the reasoning before it, as llguidance takes it."""
        parts = [
            {"lark_grammar": self.reasoning(thinking)},
            {"name": "answer", "lark_grammar": lark},
        ]
        return json.dumps({"grammars": parts})


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, from whose `matcher` those of answers are copied. `again` compiles it once more,
    while answers run only where that is `quick`: it holds up all of them."""

    matcher: LLMatcher
    again: Callable[[], LLMatcher]
    vocabulary: Vocabulary
    quick: bool
    size: int  # bytes

    def make(self) -> "GrammarMatcher":
        """The matcher of one answer."""
        return GrammarMatcher(self, self.matcher.deep_copy())


@dataclass(slots=True)
class GrammarMatcher:
    """The matcher of one answer. Where its grammar is not quick, a draft, after which it may have
    to be compiled again, is never tried."""

    _grammar: CompiledGrammar
    _inner: LLMatcher
    _consumed: list[int] = field(default_factory=list)
    _restarts: int = 0
    _slow: int = 0
    _drafts: bool = field(init=False)  # until one fails or is slow: plain decoding may never

    def __post_init__(self) -> None:
        self._drafts = self._grammar.quick

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """The masks of the next token and of those after each drafted token that is allowed:
        `len(masks) - 1` are. Bit i % 8 of byte i // 8 allows token i."""
        known, began = self._grammar.vocabulary, time.thread_time()
        rows = [self._retried(lambda: self._mask(self._inner, self._consumed))]
        if time.thread_time() - began > SLOW_S:
            self._slow += 1
        if self._slow >= MAX_SLOW:  # it would hold up the other answers
            raise RuntimeError("masks take long: too many ways to read the text; send fewer")
        # Not rolled back: llguidance's rollback loses what special tokens have changed.
        draft = draft if self._drafts else ()
        ahead, read = self._inner, self._consumed
        if draft:
            ahead, read = ahead.deep_copy(), read.copy()
        try:
            for token in draft:
                if not rows[-1] & ~known.ends & 1 << token:
                    break
                _consume(ahead, token)
                read.append(token)
                rows.append(self._mask(ahead, read))
                if time.thread_time() - began > SLOW_S:
                    self._drafts = False
                    break
        except RuntimeError:
            self._drafts = False
        return [row.to_bytes(known.size, "little") for row in rows]

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        for token in tokens:
            if not self._grammar.vocabulary.ends >> token & 1:
                self._retried(partial(self._advance, token))
                self._consumed.append(token)

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
        if not self._grammar.quick:
            raise RuntimeError("it is too large to begin again; send a smaller one")
        self._restarts += 1
        self._inner = self._grammar.again()
        for token in self._consumed:
            _consume(self._inner, token)
        return act()

    def _advance(self, token: int) -> None:
        _consume(self._inner, token)

    def _mask(self, matcher: LLMatcher, read: Sequence[int]) -> int:
        known = self._grammar.vocabulary
        raw = matcher.compute_bitmask()
        if matcher.is_error():
            raise _failure(matcher)
        mask = int.from_bytes(raw, "little") & known.every
        if mask >> known.letter & 1:
            return mask
        digits = 0
        for token in reversed(read):
            if token not in known.digits or digits >= MAX_DIGITS:
                break
            digits += known.digits[token]
        ended = mask & ~known.numeral
        return ended if digits >= MAX_DIGITS and ended else mask


def _consume(matcher: LLMatcher, token: int) -> None:
    if not matcher.consume_token(token):
        raise _failure(matcher)


def _failure(matcher: LLMatcher) -> RuntimeError:
    return RuntimeError(first_line(matcher.get_error()))


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
