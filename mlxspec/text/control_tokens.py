"""Encoding in which only the template writes control tokens; a client's text stays text.

Each control token in a client's string gets a `MARK` behind its first character before the template
sees it, and no client can set one. A rendered text with marks is encoded in pieces, cut at the
control tokens that have none.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

NOTHING = "(?!)"  # the pattern that is never found
MARK = "\ufdd0"  # Unicode promises that it never stands for a character


class ControlTokens:
    """A tokenizer's control tokens.

    `begins` finds the first character of each in a text, also of one that the end of the text cuts
    off, because the template may go on with another text. `answers` is the same for what the model
    said, where the template has to see the markers of reasoning and calls. `cut` finds whole ones
    without a mark, with the white space that they take in. `ahead`: the beginning of a text is
    encoded otherwise than text behind a control token. `loose`: their ids, where the tokenizer
    looks for some in normalised text, in which there may be more of them than in the text.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        t = tokenizer
        tokens = {
            i: x for i, x in t.added_tokens_decoder.items() if x.special and x.content.strip()
        }
        words = [token.content for token in tokens.values()]
        own = {t.think_start, t.think_end, t.tool_call_start, t.tool_call_end}
        self.begins = _beginnings(words)
        self.answers = _beginnings([word for word in words if word not in own])
        cuts = []
        for left, right in product((False, True), repeat=2):
            some = [x.content for x in tokens.values() if (x.lstrip, x.rstrip) == (left, right)]
            if some:
                before, after = r"(?<!\s)\s*" if left else "", r"\s*" if right else ""
                cuts.append(rf"{before}{_any_of(some)}(?!{MARK}){after}")
        self.cut = re.compile("|".join(cuts) or NOTHING)
        alone = t.encode("a", add_special_tokens=False)
        first = words[0] if words else ""
        self.ahead = t.encode(first + "a", add_special_tokens=False)[1:] != alone
        self.loose: set[int] = set()
        if any(token.normalized for token in tokens.values()):
            self.loose = set(tokens)


control_tokens_of = lru_cache(16)(ControlTokens)


def _beginnings(words: Iterable[str]) -> re.Pattern[str]:
    patterns = []
    for first, rest in _by_first(words).items():
        # One that begins with a letter is sought whole: "user" at an end is a word, "<|" hardly is.
        end = "" if first.isalnum() else r"|\Z"
        patterns.append(f"{re.escape(first)}(?={_any_of(rest, end)})")
    return re.compile("|".join(patterns) or NOTHING)


def _by_first(words: Iterable[str]) -> dict[str, list[str]]:
    """The rest of each word, by its first character."""
    rests: dict[str, list[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    return rests


def _any_of(words: Iterable[str], end: str = "") -> str:
    """A pattern for the longest of `words`, as a trie: some models have a thousand, too many to try
    in turn."""
    words = list(words)
    branches = [re.escape(first) + _any_of(rest, end) for first, rest in _by_first(words).items()]
    if not branches:
        return ""
    if "" in words:
        return f"(?:{'|'.join(branches)})?"
    return f"(?:{'|'.join(branches)}{end})"


def marked(value: Any, begins: re.Pattern[str]) -> Any:
    """A copy, with marks, of what a client sent, at any depth."""
    if isinstance(value, str):
        return begins.sub(rf"\g<0>{MARK}", value.replace(MARK, "\ufffd"))
    if isinstance(value, Mapping):
        return {marked(key, begins): marked(own, begins) for key, own in value.items()}
    return [marked(own, begins) for own in value] if isinstance(value, list | tuple) else value


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a rendered text, its marks left out."""
    control = control_tokens_of(tokenizer)
    cuts = [match.span() for match in control.cut.finditer(text)]
    if MARK not in text:
        whole = list(tokenizer.encode(text, add_special_tokens=False))
        if sum(token in control.loose for token in whole) <= len(cuts):
            return whole
    ids: list[int] = []
    done = at = 0  # encoded so far; behind the last control token
    for start, stop in [*cuts, (len(text), len(text))]:
        if start > at and (control.loose or text.find(MARK, at, start) >= 0):
            ids += tokenizer.encode(text[done:at], add_special_tokens=False)
            ids += _plain(tokenizer, text[at:start].replace(MARK, ""), control.ahead and at > 0)
            done = start
        at = stop
    return ids + list(tokenizer.encode(text[done:], add_special_tokens=False))


def _plain(tokenizer: TokenizerWrapper, text: str, behind: bool) -> list[int]:
    """Token ids of a text in which there are no control tokens; `behind`: it follows one."""
    split = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    if behind:
        before, both = split("\n"), split("\n" + text)
        if both[: len(before)] == before:
            return list(both[len(before) :])
    return list(split(text))
