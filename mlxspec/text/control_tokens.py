"""Control tokens are the template's: their text in what a client wrote is encoded as text.

Rule: a client's string gets a `MARK` inside each special token's text before the template sees it,
and no client can set one; where a rendered text has marks, it is cut at the special tokens that
have none.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

MARK = "\ufdd0"  # Unicode promises that it never stands for a character
OPEN = r"|\Z"


@dataclass(frozen=True, slots=True)
class Special:
    """A tokenizer's special tokens. `begins` finds the first character of each in a text, also of
    one that the text's end cuts off, for the template may go on with another text. `answers` is
    that for what the model said, where its own marks of reasoning and calls are not hidden from the
    template. `cut` finds whole ones, without a mark, with the white space that they take in.
    `ahead`: a text's beginning is spelled otherwise than what follows a special token. `loose`: all
    ids, where the tokenizer looks for some in a text that it has normalised, in which there may be
    more of them than in the text."""

    begins: re.Pattern[str] | None
    answers: re.Pattern[str] | None
    cut: re.Pattern[str] | None
    ahead: bool
    loose: frozenset[int] = frozenset()


@lru_cache(16)
def special_of(tokenizer: TokenizerWrapper) -> Special:
    tokens = [t for t in tokenizer.added_tokens_decoder.values() if t.special and t.content.strip()]
    words = [token.content for token in tokens]
    if not words:
        return Special(None, None, None, False)
    own = {
        tokenizer.think_start,
        tokenizer.think_end,
        tokenizer.tool_call_start,
        tokenizer.tool_call_end,
    }
    ways: dict[tuple[bool, bool], list[str]] = {}
    for token in tokens:
        ways.setdefault((token.lstrip, token.rstrip), []).append(token.content)
    cut = "|".join(
        rf"(?<!\s)\s*{_tree(some)}(?!{MARK})" * left
        + rf"{_tree(some)}(?!{MARK})" * (not left)
        + r"\s*" * right
        for (left, right), some in ways.items()
    )
    alone = tokenizer.encode("a", add_special_tokens=False)
    ahead = tokenizer.encode(words[0] + "a", add_special_tokens=False)[1:] != alone
    answers = _begins(word for word in words if word not in own)
    loose = {
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content.strip()
    }
    some = frozenset(loose if any(t.normalized for t in tokens) else ())
    return Special(_begins(words), answers, re.compile(cut), ahead, some)


def _begins(words: Iterable[str]) -> re.Pattern[str] | None:
    tails = _by_first(words)
    # One that begins with a letter is sought whole: "user" at an end is a word, "<|" is hardly.
    some = [
        f"{re.escape(a)}(?={_tree(rest, '' if a.isalnum() else OPEN)})" for a, rest in tails.items()
    ]
    return re.compile("|".join(some)) if some else None


def _by_first(words: Iterable[str]) -> dict[str, list[str]]:
    tails: dict[str, list[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    return tails


def _tree(words: Sequence[str], end: str = "") -> str:
    """A pattern for the longest of `words`: some models have a thousand, which must not be tried in
    turn."""
    some = "|".join(re.escape(first) + _tree(rest, end) for first, rest in _by_first(words).items())
    return f"(?:{some})?" if "" in words and some else f"(?:{some}{end})" if some else ""


def marked(value: Any, begins: re.Pattern[str] | None) -> Any:
    """What a client sent, at any depth, with the marks; it itself stays as it is."""
    if isinstance(value, str):
        value = value.replace(MARK, "\ufffd")
        return begins.sub(rf"\g<0>{MARK}", value) if begins else value
    if isinstance(value, Mapping):
        return {marked(key, begins): marked(own, begins) for key, own in value.items()}
    return [marked(own, begins) for own in value] if isinstance(value, list | tuple) else value


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a rendered text, its marks left out."""
    special, ids, done, at = special_of(tokenizer), list[int](), 0, 0
    bare = [] if MARK in text else list(tokenizer.encode(text, add_special_tokens=False))
    if bare and not special.loose:
        return bare
    cuts = [match.span() for match in special.cut.finditer(text)] if special.cut else []
    if MARK not in text and sum(i in special.loose for i in bare) <= len(cuts):
        return bare
    for start, stop in [*cuts, (len(text), len(text))]:
        if start > at and (special.loose or text.find(MARK, at, start) >= 0):
            ids += tokenizer.encode(text[done:at], add_special_tokens=False) if at > done else []
            ids += _plain(tokenizer, text[at:start].replace(MARK, ""), special.ahead and at > 0)
            done = start
        at = stop
    return (
        ids + list(tokenizer.encode(text[done:], add_special_tokens=False))
        if done < len(text)
        else ids
    )


def _plain(tokenizer: TokenizerWrapper, text: str, ahead: bool) -> list[int]:
    """Token ids of a text without control tokens; `ahead`: of one that is not a beginning."""

    def split(some: str) -> list[int]:
        return list(tokenizer.encode(some, add_special_tokens=False, split_special_tokens=True))

    before = split("\n") if ahead else []
    after = split("\n" + text) if ahead else []
    return after[len(before) :] if ahead and after[: len(before)] == before else split(text)
