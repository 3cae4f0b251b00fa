"""The loop guard: ends an answer that repeats itself exactly, by masks, as a grammar would.

A loop is a period of up to MAX_PERIOD tokens that is seen for `tokens_of_loop` of it. Answers are
looked at after every WINDOW tokens, so what is ended, and where, depends on the tokens alone:
neither a drafter nor the batch nor the cache can change an answer. What the client shows or asks
for is not a loop: a table that the answer copies, or as many repetitions as the last message names.
The model's own turns do not count, or each loop would allow a longer one in the next turn.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from mlxspec.text.structured.grammar import CLOSERS, QUOTE, GrammarMatcher, Vocabulary
from mlxspec.text.structured.thinking import ThinkingBudget
from mlxspec.text.structured.wishes import MAX_ASKED

MAX_PERIOD = 400  # tokens
LEAST, REPEATS = 200, 4  # tokens and periods of a loop
SURE, MORE_REPEATS = 1000, 12  # one of these too: Python's own sources repeat 87 tokens for 852
MAX_LOOPS = 4  # of an answer under a grammar
WINDOW = 100  # tokens; more than may be in flight or drafted at once
MAX_LISTED = 32  # different tokens of what a message asks for several times
MAX_SHOWN = 1 << 20  # characters at the end of what the client sent that are compared
MAX_LINES = 1 << 16  # of these, without what a tool puts before them
MAX_RUNS = 1000  # stretches of it
# What a tool shows before the text of a line: marks of a quote or change, a file's name, a number.
PREFIX = re.compile(
    r"^[^\w\n]*(?:\S+:|\S+-(?=\d+-))?(?:[ \t]*(?:Line |L)?\d+(?:[→:.)\]█-]| *[│|]|[ \t]))?",
    re.MULTILINE,
)
BLANK_LINES = re.compile(r"\n\s+")  # many take long
UNICODE = re.compile(r"\\u([\da-fA-F]{4})")
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": ""}
ESCAPES |= {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&amp;": "&"}
Forms = list[np.ndarray]


def tokens_of_loop(period: int) -> int:
    """The least tokens of a loop with this period: 200 up to a period of 16 tokens, then 12
    periods, 1,000 tokens, and from a period of 250 on four periods."""
    return max(LEAST, REPEATS * period, min(SURE, MORE_REPEATS * period))


def find_period(tokens: Sequence[int], missing: int = 0) -> int:
    """The shortest period of a loop at the end of `tokens`, or of one that lacks `missing` tokens;
    0: none."""
    ids = np.array(tokens[-tokens_of_loop(MAX_PERIOD) :])
    last = ids[-MAX_PERIOD - 1 : -1][::-1]  # by distance from the last token
    for period in (1 + np.flatnonzero(last == ids[-1:])).tolist():
        if _run(ids, period) >= tokens_of_loop(period) - missing:
            return period
    return 0


def _run(ids: np.ndarray, period: int) -> int:
    """How many tokens at the end repeat with this period."""
    different = np.flatnonzero(ids[period:] != ids[:-period])
    return len(ids) - (int(different[-1]) + 1 if len(different) else 0)


@cache
def _kinds() -> np.ndarray:
    """2 for each letter or digit in UTF-16, 1 for another sign, 0 for white space."""
    kinds = [2 * sign.isalnum() or len(sign.strip()) for sign in map(chr, range(1 << 16))]
    kinds[0xD800:0xE000] = [2] * 0x800  # halves of an emoji
    return np.array(kinds, np.uint8)


def _forms(text: str, kind: int) -> Forms:
    """A text as it is compared, as it is and without what tools put before its lines: what is of
    this kind or a higher one, in UTF-16, with JSON's escapes and HTML's read."""
    for escape, plain in ESCAPES.items():
        text = text.replace(escape, plain)
    text = UNICODE.sub(lambda found: chr(int(found[1], 16)), BLANK_LINES.sub("\n", text))
    forms = []
    for some in (text, PREFIX.sub("", text, MAX_LINES)):
        codes = np.frombuffer(some.encode("utf-16-le", "surrogatepass"), np.uint16)
        forms.append(codes[_kinds()[codes] >= kind])
    return forms


def _longest_run(shown: np.ndarray, cycle: np.ndarray) -> int:
    """The longest stretch of `shown` that repeats `cycle` at least twice, wherever it begins in
    it."""
    period = len(cycle)
    if not period or cycle.tobytes() not in shown.tobytes():
        return 0
    different = np.flatnonzero(shown[period:] != shown[:-period])
    edges = np.concatenate([[-1], different, [len(shown) - period]])
    lengths = np.diff(edges) - 1
    runs = np.flatnonzero(lengths >= period)
    twice = np.tile(cycle, 2).tobytes()  # which contains every turn of it
    for at in runs[np.argsort(-lengths[runs])][:MAX_RUNS].tolist():
        start = edges[at] + 1
        found = twice.find(shown[start : start + period].tobytes())
        if found >= 0 and found % shown.itemsize == 0:
            return int(lengths[at]) + period
    return 0


def _is_quoted(loop: str) -> bool:
    """Whether a loop's text has whole strings."""
    return QUOTE in loop.replace("\\" + QUOTE, "")


def _in_text(vocabulary: Vocabulary, allowed: int) -> bool:
    """Whether any text is allowed, as in a string."""
    return bool(allowed >> vocabulary.letter & 1)


def _ends(vocabulary: Vocabulary, allowed: int, loop: str) -> int:
    """The set of these tokens that end the answer; else of those that end the list or object or, if
    the text `loop` lies inside it, the string."""
    closers = CLOSERS - {QUOTE}
    if _in_text(vocabulary, allowed):
        closers = frozenset() if _is_quoted(loop) else frozenset(QUOTE)
    ends = allowed & sum(vocabulary.closers.get(each, 0) for each in closers)
    return allowed & vocabulary.ends or ends


def _open_at_end(loop: str) -> int:
    """How many lists and objects are open where a loop's text begins again, of those that it opens
    and closes."""
    depth = lowest = 0
    for sign in loop:
        depth += (sign in "[{") - (sign in "]}")
        lowest = min(lowest, depth)
    return depth - lowest


def _levels_after(text: str, levels: int, in_text: bool, whole_strings: bool) -> int:
    """Of so many strings, lists and objects that have to end, how many are left after a token's
    text. `whole_strings`: strings are not among them."""
    for before, sign in pairwise(" " + text):
        if sign == QUOTE and before != "\\":
            if not whole_strings:
                return 0
            in_text = not in_text
        elif not in_text:
            levels += (sign in "[{") - (sign in "]}")
        if levels <= 0:
            return 0
    return levels


@dataclass(slots=True)
class LoopGuard:
    """The matcher of one answer; the protocol is GrammarMatcher's. A loop in the reasoning forces
    its end, and the answer goes on; another one forces the token `end`. Under a grammar it forces,
    as soon as that is allowed, what ends the string, list or object that the loop lies in; what an
    object has to have follows, and then the answer ends. The last of MAX_LOOPS ends all at once.
    What the grammar itself demands is not a loop.

    `shown`: returns the text that the client sent, asked for at the first loop; `forms`: how that
    is compared, shared by the guards of a request. `repeats`: how often the prompt asks for
    something, of at most `most` tokens. `decode` returns the text of tokens. `inner`: the matcher
    of a thinking budget or of the grammar, if there is one; `grammar`: the grammar's. `loops`
    counts those that were ended.
    """

    end: int
    shown: Callable[[], str]
    decode: Callable[[list[int]], str]
    repeats: int = 0
    inner: Any = None
    grammar: GrammarMatcher | None = None
    loops: int = 0
    most: int = MAX_ASKED
    forms: dict[int, Forms] = field(default_factory=dict)  # by kind
    _ids: list[int] = field(default_factory=list)  # of the answer
    _since: int = 0  # where the text begins that may hold the next loop
    _near: bool = False  # whether a loop may be complete after this window
    _loop: str = ""  # the text of the loop that is being ended
    _levels: int = 0  # strings, lists and objects that have to end for that
    _ending: bool = False  # whether only what the grammar demands is written from now on
    _told: bool = False  # whether `loops` counts it
    _copied: tuple[int, int, float] = (0, 0, 0.0)  # a loop's begin, period, and most periods

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """GrammarMatcher.masks; an empty mask allows every token. A draft is truncated where a loop
        may be complete."""
        if self._closes:
            draft = ()
        elif self._near:
            draft = draft[: self._left - 1]
        rows = self.inner.masks(draft) if self.inner else [b"" for _ in range(1 + len(draft))]
        if self.grammar and self._closes:
            return [self._closing(self.grammar.vocabulary, rows[0])]
        return [(1 << self.end).to_bytes(self.end // 8 + 1, "little")] if self._loop else rows

    @property
    def _closes(self) -> bool:
        """Whether the answer is being ended."""
        return self._ending or bool(self._loop)

    def _closing(self, vocabulary: Vocabulary, mask: bytes) -> bytes:
        """Of the tokens that a grammar's mask allows, those that end what has to end, or do not
        skip its end."""
        allowed = int.from_bytes(mask, "little")
        if self._loop:
            ends = _ends(vocabulary, allowed, self._loop)
            chosen = ends or allowed & ~vocabulary.longer
        else:  # what an object has to have is written freely
            ends = vocabulary.ends | vocabulary.closers.get("}", 0)
            chosen = 0 if _in_text(vocabulary, allowed) else allowed & ends
        return (chosen or allowed).to_bytes(len(mask), "little")

    def take(self, tokens: Sequence[int]) -> None:
        """Advance over sampled tokens."""
        while tokens:
            count = self._left
            if self._loop and self.grammar:
                self._follow(tokens[0])
                count = 1
            some, tokens = tokens[:count], tokens[count:]
            self._ids += some
            if self.inner:
                self.inner.take(some)
            if len(self._ids) % WINDOW == 0 and not self._loop:
                self._look()

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must follow."""
        return self.inner.forced(most) if self.inner and not self._closes else []

    def restricts(self, ahead: int) -> bool:
        """GrammarMatcher.restricts; without a grammar only near a loop."""
        if self._closes or (self._near and ahead >= self._left):
            return True
        return bool(self.inner and self.inner.restricts(ahead))

    @property
    def _left(self) -> int:
        """Tokens until the answer is looked at."""
        return WINDOW - len(self._ids) % WINDOW

    def _look(self) -> None:
        """Begin to end a loop that is complete, or find out whether one may be so next time."""
        begin = max(self._since, len(self._ids) - tokens_of_loop(MAX_PERIOD))
        recent = self._ids[begin:]
        period = find_period(recent) if self._near else 0
        self._near = bool(find_period(recent, missing=WINDOW))
        if not period or self._is_wanted(self._ids[self._since :], period):
            return
        self._near, self._since = False, len(self._ids)
        if isinstance(self.inner, ThinkingBudget) and self.inner.thinking:
            self.loops += 1
            self.inner.remaining = 0
            return
        self._loop = self.decode(recent[-period:]) or " "
        self._levels = 1 + _open_at_end(self._loop) * _is_quoted(self._loop)
        self._told = not self.grammar
        self.loops += self._told

    def _follow(self, token: int) -> None:
        """Before a token under a grammar: whether what the loop lies in ends with it, and whether
        it could have gone on."""
        assert self.grammar
        vocabulary = self.grammar.vocabulary
        allowed = int.from_bytes(self.inner.masks(())[0], "little")
        ends = _ends(vocabulary, allowed, self._loop)
        if ends and allowed & ~vocabulary.longer & ~ends and not self._told:
            self._told = True
            self.loops += 1
        self._levels = _levels_after(
            self.decode([token]),
            self._levels,
            in_text=_in_text(vocabulary, allowed),
            whole_strings=_is_quoted(self._loop),
        )
        if self._levels == 0 and self.loops < MAX_LOOPS:
            self._loop, self._since = "", 1 + len(self._ids)
            self._ending = True

    def _is_wanted(self, recent: Sequence[int], period: int) -> bool:
        """Whether the client repeats it as long, or asks for as many repetitions."""
        run = _run(np.array(recent), period)
        kinds = len({*recent[-period:]})
        if kinds <= MAX_LISTED and run <= min(self.most, self.repeats * period):
            return True
        begin = len(self._ids) - run
        if self._copied[:2] != (begin, period):
            self._copied = begin, period, self._periods_shown(recent, period)
        return run < tokens_of_loop(period) + self._copied[2] * period

    def _periods_shown(self, recent: Sequence[int], period: int) -> float:
        """How often the client's text repeats the last period in a row."""
        # The period as text, from the middle of what repeats: decoding may change the first token.
        three, two = (self.decode([*recent[-n * period :]]) for n in (3, 2))
        for kind in (2, 1):
            cycles = []
            for form, shorter in zip(_forms(three, kind), _forms(two, kind), strict=True):
                length = len(form) - len(shorter)
                cycles.append(form[length : 2 * length])
            if any(map(len, cycles)):
                break
        if kind not in self.forms:
            self.forms[kind] = _forms(self.shown()[-MAX_SHOWN:], kind)
        return max(
            _longest_run(text, cycle) / max(1, len(cycle))
            for text in self.forms[kind]
            for cycle in cycles
        )
