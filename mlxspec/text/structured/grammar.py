"""Grammars for answers: the mask of the next token, computed by llguidance on the host.

What cannot be enforced is rejected by name before anything runs. A grammar begins after the
reasoning, and an answer must end its reasoning before it ends.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import FUNCTION_CALL, NEXT_MESSAGE, format_of, has_headers, is_harmony
from mlxspec.text.messages import RejectedRequest, Tools, rejected
from mlxspec.text.structured.call_rules import Calls, regex_of, with_schema
from mlxspec.text.structured.json_schema import first_line
from mlxspec.text.structured.trial import Trial, new_matcher, warm_error

MAX_COMPILED = 32  # grammars in the cache
LEAST_SIZE = 1 << 23  # bytes, the least that one counts as
MAX_CACHED = MAX_COMPILED * LEAST_SIZE  # bytes that compiling them took
MAX_COMPILING = 4  # grammars at once
MAX_BYTES = 1 << 19  # of a grammar
MAX_BLANKS = 4  # characters of white space between reasoning and answer
MAX_DIGITS = 32  # in a row where no letter is allowed: a longer number would never end
MAX_RESTARTS = 2  # of one answer
SLOW_S = 0.05  # CPU time of a mask; a usual one takes a hundredth
MAX_SLOW = 8  # slow masks of one answer
RESTART_S = 0.05  # a grammar that takes longer to compile is never compiled while an answer runs
QUOTE = '"'
CLOSERS = frozenset(QUOTE + "]}")  # what ends a JSON string, a list, an object
T = TypeVar("T")


@dataclass(slots=True)
class Grammars:
    """Compiles grammars for one tokenizer, after a trial, on threads that delay only other
    grammars. Used by one thread; the matchers may run on another. `vocab` is the width of the
    logits. Raises RejectedRequest for the field `where`."""

    tokenizer: TokenizerWrapper
    vocab: int
    _vocabulary: "Vocabulary | None" = None
    _compiled: OrderedDict[tuple[str, bool | None], "CompiledGrammar"] = field(
        default_factory=OrderedDict,
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_COMPILING, "grammar"),
    )
    _lock: Lock = field(default_factory=Lock)  # of the cache
    _building: Lock = field(default_factory=Lock)  # of the vocabulary
    _separator: str = "BLANKS?"  # the rule for the text between reasoning and answer

    def __post_init__(self) -> None:  # on this thread: encoding changes the tokenizer
        if has_headers(self.tokenizer):
            ids = self.tokenizer.encode(NEXT_MESSAGE, add_special_tokens=False)
            self._separator = _tokens(ids)

    def calls(
        self,
        tools: Tools,
        name: str | None,
        single: bool,
        where: str,
    ) -> Calls:
        """The calls of these tools, or only of the tool `name`."""
        functions = [with_schema(tool["function"]) for tool in tools]
        functions = [f for f in functions if not name or f["name"] == name]
        if not functions:
            wanted = name or "a call"
            raise rejected(where, f"asks for {wanted}, which is not in tools; send it there")
        heads = [self.header_rule(FUNCTION_CALL % f["name"], where) for f in functions]
        return Calls(self.tokenizer, functions, single, [head for head in heads if head])

    def header_rule(self, text: str, where: str) -> str:
        """The rule for a message's header `text` in Harmony; "" for a model whose answers have no
        headers. Raises RejectedRequest for headers in another form."""
        if not has_headers(self.tokenizer):
            return ""
        if not is_harmony(self.tokenizer):
            raise rejected(where, "cannot be honoured in this model's format; leave it out")
        return _tokens(self.tokenizer.encode(text, add_special_tokens=False))

    def rules(self, parts: Iterable[str]) -> str:
        """A whole Lark grammar: a choice of several rules, each followed by the rules that it
        refers to."""
        lines = [f"choice{i}: {part}" for i, part in enumerate(parts)]
        choices = " | ".join(f"choice{i}" for i in range(len(lines)))
        return "\n".join([f"start: {choices}", *lines])

    def compile(
        self,
        lark: str,
        thinking: bool | None,
        where: str,
        calls: Calls | None = None,
    ) -> Future["CompiledGrammar"]:
        """A future for what makes a matcher for each answer. If `lark` is not accepted, what is at
        fault in the `calls` in it may be anything, except in strict ones. `thinking`: the prompt
        has opened the reasoning; None: the answer may open it."""
        # The rules of calls do not have all that these leave out.
        key = lark + json.dumps([f.get("parameters") for f in calls.functions]) if calls else lark
        grammar = self._cached(key, thinking)
        if not grammar:
            return self._threads.submit(self._compile, key, lark, thinking, where, calls)
        done: Future[CompiledGrammar] = Future()
        done.set_result(grammar)
        return done

    def _cached(self, key: str, thinking: bool | None) -> "CompiledGrammar | None":
        """A cached grammar, unless that has failed: copies share a lexer, and so an error."""
        with self._lock:  # no other thread may copy a matcher that computes
            grammar = self._compiled.get((key, thinking))
            if grammar is None or warm_error(grammar.matcher):
                return None
            self._compiled.move_to_end((key, thinking))
            # The cached one may compute here while the engine copies this one.
            return replace(grammar, matcher=grammar.matcher.deep_copy())

    def _compile(
        self, key: str, lark: str, thinking: bool | None, where: str, calls: Calls | None
    ) -> "CompiledGrammar":
        if made := self._cached(key, thinking):  # another request compiled it
            return made
        with self._building:
            self._vocabulary = self._vocabulary or self._read_vocabulary(where)
        grammar = _compiled(self._vocabulary, lark, thinking, where, calls)
        with self._lock:
            self._compiled[key, thinking] = grammar
            while sum(other.size for other in self._compiled.values()) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return self._cached(key, thinking) or grammar

    def _read_vocabulary(self, where: str) -> "Vocabulary":
        try:
            return Vocabulary(self.tokenizer, self.vocab, self._separator)
        except BaseException as error:  # a panic of Rust code is no Exception
            why = f"cannot be honoured by this model's tokenizer: {first_line(str(error))}"
            raise rejected(where, f"{why}; leave it out") from error


def _compiled(
    vocabulary: "Vocabulary", lark: str, thinking: bool | None, where: str, calls: Calls | None
) -> "CompiledGrammar":
    """Grammars.compile, by itself."""
    if not calls:
        return vocabulary.compile(lark, thinking, where)
    rule, errors = calls.rule(), []
    for some in calls.looser(vocabulary.trial):
        try:
            text = lark.replace(rule, some.rule())
            grammar = vocabulary.compile(text, thinking, where)
            return replace(grammar, left_out=some.left_out(vocabulary.trial))
        except RejectedRequest as error:
            errors.append(error)
    raise errors[-1]


class Vocabulary:
    """A tokenizer as matchers see it. Sets of tokens are ints, with bit t for token t. Raises
    whatever llguidance does if it cannot read the tokenizer.

    `digits` has the length of each token that is only digits. `letter` is a token that is allowed
    wherever any text is. `closers` has the set of the token that is each of CLOSERS, `longer` is
    the set of other tokens that contain one.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab: int, separator: str) -> None:
        ends = [token for token in tokenizer.eos_token_ids if token < min(vocab, len(tokenizer))]
        if not ends:
            raise ValueError("no token ends an answer")
        self._tokenizer, self._eos, self._separator = tokenizer, sorted(ends), separator
        backend = copy(tokenizer._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()  # with the added tokens, unlike tokenizer.json
        self.inner = LLTokenizer(text, eos_token=self._eos)
        self.trial = Trial(text, self._eos)
        self.size = -(-vocab // 8)  # of a mask, in bytes
        self.all_tokens = (1 << min(self.inner.vocab_size, vocab)) - 1
        self.ends = _bits(ends)
        self.digits = {}
        self.closers: dict[str, int] = {}
        longer = []
        # Digits and closers are themselves in every alphabet of tokens.
        for piece, token in tokenizer.get_vocab().items():
            if token >= vocab:
                continue
            if piece.isascii() and piece.isdigit():
                self.digits[token] = len(piece)
            elif piece in CLOSERS:
                self.closers[piece] = 1 << token
            elif not CLOSERS.isdisjoint(piece):
                longer.append(token)
        self.numeral = _bits(self.digits)
        self.longer = _bits(longer)
        self.letter = self.inner.greedy_tokenize("a")[0]

    def reasoning(self, thinking: bool | None) -> str:
        """The Lark grammar of an answer in the grammar `answer`, after its reasoning.
        The last token of the reasoning's end marker ends the reasoning."""
        form = format_of(self._tokenizer)
        if thinking is False or not form.think_start:
            return "start: @answer"
        last = form.think_end_tokens[-1]
        think, blanks = "thought", f"BLANKS: /[ \\n]{{1,{MAX_BLANKS}}}/"
        if last in self._tokenizer.added_tokens_decoder:
            ends = ",".join(map(str, [*self._eos, last]))
            blanks += f"\nthought: <[^{ends}]>* <[{last}]>"
        else:  # any text may have that token
            blanks += f"\nthought[lazy]: /(.|\\n)*{regex_of(form.think_end)}/"
        if thinking is None:
            think = f"({_tokens(form.think_start_tokens)} thought {self._separator})?"
        else:
            think = f"thought {self._separator}"
        return f"start: {think} @answer\n{blanks}"

    def compile(self, lark: str, thinking: bool | None, where: str) -> "CompiledGrammar":
        """Compile a grammar, after a trial. Raises RejectedRequest for the field `where`."""
        if len(lark) > MAX_BYTES:
            raise rejected(where, f"is larger than {MAX_BYTES >> 10} KB; send a smaller one")
        seconds, size = 0.0, LEAST_SIZE
        for before in dict.fromkeys((False, thinking)):  # alone first: its first mask may fail
            whole = self._whole(lark, before)
            cpu, memory, problem = self.trial.run(whole)
            if problem:
                raise rejected(where, f"cannot be honoured: {first_line(problem)}; leave it out")
            seconds, size = seconds + cpu, max(size, memory)
        recompile = partial(new_matcher, self.inner, whole)
        return CompiledGrammar(recompile(), recompile, self, seconds < RESTART_S, size)

    def _whole(self, lark: str, thinking: bool | None) -> str:
        """A grammar with the reasoning before it, in llguidance's format."""
        parts = [
            {"lark_grammar": self.reasoning(thinking)},
            {"name": "answer", "lark_grammar": lark},
        ]
        return json.dumps({"grammars": parts})


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar; the matchers of answers are copies of `matcher`. `recompile` compiles it again,
    while answers run only if that is `quick`: it delays all of them. `left_out`: paths of the
    keywords that it does not enforce."""

    matcher: LLMatcher
    recompile: Callable[[], LLMatcher]
    vocabulary: Vocabulary
    quick: bool
    size: int  # bytes
    left_out: tuple[str, ...] = ()

    def __call__(self) -> "GrammarMatcher":
        """The matcher of one answer."""
        return GrammarMatcher(self, self.matcher.deep_copy())


@dataclass(slots=True)
class GrammarMatcher:
    """The matcher of one answer. Drafts are never tried if its grammar is not quick, because they
    may make it necessary to compile it again."""

    _grammar: CompiledGrammar
    _inner: LLMatcher
    _consumed: list[int] = field(default_factory=list)
    _restarts: int = 0
    _slow: int = 0
    _drafts: bool = field(init=False)  # until one fails or is slow; plain decoding may be fine

    def __post_init__(self) -> None:
        self._drafts = self._grammar.quick

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """The masks of the next token and of those after each drafted token that is allowed:
        `len(masks) - 1` are. Bit i % 8 of byte i // 8 allows token i."""
        vocabulary, start = self._grammar.vocabulary, time.thread_time()
        rows = [self._retry(lambda: self._mask(self._inner, self._consumed))]
        if time.thread_time() - start > SLOW_S:
            self._slow += 1
        if self._slow >= MAX_SLOW:  # it would hold up the other answers
            raise RuntimeError("masks take long: too many ways to read the text; send fewer")
        # Not rolled back: llguidance's rollback loses what special tokens have changed.
        draft = draft if self._drafts else ()
        ahead, tokens = self._inner, self._consumed
        if draft:
            ahead, tokens = ahead.deep_copy(), tokens.copy()
        try:
            for token in draft:
                if not rows[-1] & ~vocabulary.ends & 1 << token:
                    break
                _consume(ahead, token)
                tokens.append(token)
                rows.append(self._mask(ahead, tokens))
                if time.thread_time() - start > SLOW_S:
                    self._drafts = False
                    break
        except RuntimeError:
            self._drafts = False
        return [row.to_bytes(vocabulary.size, "little") for row in rows]

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        for token in tokens:
            if not self._grammar.vocabulary.ends >> token & 1:
                self._retry(partial(self._advance, token))
                self._consumed.append(token)

    def restricts(self, ahead: int) -> bool:
        """Whether the next token, or one of the `ahead` tokens after it, is restricted by
        `masks`."""
        return True

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the only text that can follow; it may have other spellings."""
        if not self._drafts:
            return []
        try:
            tokens = self._inner.compute_ff_tokens()[:most]
            return tokens and tokens[: len(self.masks(tokens)) - 1]
        except Exception:  # only a guess; the next mask raises the error
            return []

    @property
    def vocabulary(self) -> Vocabulary:
        return self._grammar.vocabulary

    def _retry(self, act: Callable[[], T]) -> T:
        """The result of `act`. After an error, compiles the grammar again: copies share a lexer,
        and another answer or a draft may have exceeded its limits."""
        try:
            return act()
        except RuntimeError as error:
            if "items" in str(error) or self._restarts >= MAX_RESTARTS:
                raise  # too many items: of this answer itself, and the same every time
        if not self._grammar.quick:
            raise RuntimeError("it is too large to begin again; send a smaller one")
        self._restarts += 1
        self._inner = self._grammar.recompile()
        for token in self._consumed:
            _consume(self._inner, token)
        return act()

    def _advance(self, token: int) -> None:
        _consume(self._inner, token)

    def _mask(self, matcher: LLMatcher, tokens: Sequence[int]) -> int:
        vocabulary = self._grammar.vocabulary
        raw = matcher.compute_bitmask()
        if matcher.is_error():
            raise _failure(matcher)
        mask = int.from_bytes(raw, "little") & vocabulary.all_tokens
        if mask >> vocabulary.letter & 1:
            return mask
        digits = 0
        for token in reversed(tokens):
            if token not in vocabulary.digits or digits >= MAX_DIGITS:
                break
            digits += vocabulary.digits[token]
        numberless = mask & ~vocabulary.numeral
        return numberless if digits >= MAX_DIGITS and numberless else mask


def _consume(matcher: LLMatcher, token: int) -> None:
    if not matcher.consume_token(token):
        raise _failure(matcher)


def _failure(matcher: LLMatcher) -> RuntimeError:
    return RuntimeError(first_line(matcher.get_error()))


def _bits(tokens: Iterable[int]) -> int:
    return sum(1 << token for token in set(tokens))


def _tokens(ids: Iterable[int]) -> str:
    """Token ids as a rule."""
    return "".join(f"<[{token}]> " for token in ids)
