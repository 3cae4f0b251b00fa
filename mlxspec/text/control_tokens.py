"""Encoding in which only the template writes control tokens; a client's text stays text.

Each control token in a client's string gets a `MARK` after its first character before the template
sees it, and no client can set one. A rendered text with marks is encoded in pieces, cut at the
control tokens that have none.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import format_of, has_headers

NOTHING = "(?!)"  # the pattern that is never found
END = r"|\Z"  # a further branch of a pattern: the end of the text
MARK = "\ufdd0"  # Unicode promises that it never stands for a character


class ControlTokens:
    """Patterns for a tokenizer's control tokens.

    `begins` finds the first character of each in a text, also of one that the end of the text cuts
    off, because the template may continue with another text. `answers` is the same for what the
    model said, where the template has to see the markers of reasoning and calls. `cut` finds whole
    ones without a mark, with the white space that they strip. `ahead`: the beginning of a text is
    encoded otherwise than text after a control token. `loose`: the tokenizer looks for some in
    normalised text, in which there may be more of them than in the text.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        t = tokenizer
        form = format_of(t)
        own = {form.think_start}.union(*((each.start, each.end) for each in form.layouts))
        if not has_headers(t):  # else it ends more than the reasoning
            own.add(form.think_end)
        words = []
        self.loose = False
        kinds: dict[tuple[str, str], list[str]] = {}
        for token in t.added_tokens_decoder.values():
            if token.special and token.content.strip():
                words.append(token.content)
                self.loose = self.loose or token.normalized
                before = r"(?<!\s)\s*" if token.lstrip else ""
                after = r"\s*" if token.rstrip else ""
                kinds.setdefault((before, after), []).append(token.content)
        self.begins = _beginnings(words)
        said = [word for word in words if word not in own]
        self.answers = _beginnings(said)
        cuts = []
        for (before, after), some in kinds.items():
            cuts.append(rf"{before}{any_of(some)}(?!{MARK}){after}")
        every = "|".join(cuts) or NOTHING
        self.cut = re.compile(f"({every})")
        alone = t.encode("a", add_special_tokens=False)
        first = "".join(words[:1])
        self.ahead = t.encode(first + "a", add_special_tokens=False)[1:] != alone


control_tokens_of = lru_cache(16)(ControlTokens)


def _beginnings(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"(?={any_of(words, END)}).", re.DOTALL)


def any_of(words: Iterable[str], end: str = "") -> str:
    """A pattern for the longest of `words`, or for the beginning of one before `end`. It is a trie:
    some models have a thousand, too many to try in turn."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    whole = rests.pop("", None)
    if not rests:
        return "" if whole else NOTHING
    branches = []
    for first, rest in rests.items():
        branches.append(re.escape(first) + any_of(rest, end))
    choice = "|".join(branches)
    pattern = f"(?:{choice}{end})"
    if whole:
        pattern += "?"
    return pattern


def plain_text(begins: Iterable[str]) -> re.Pattern[str]:
    """The pattern of text without these characters and without white space at its end."""
    some = re.escape(MARK + "".join(begins))
    return re.compile(rf"[^{some}]*[^{some}\s]")


def marked(value: Any, begins: re.Pattern[str]) -> Any:
    """A copy, with marks, of what a client sent, at any depth."""
    if isinstance(value, str):
        bare = value.replace(MARK, "\ufffd")
        return begins.sub(rf"\g<0>{MARK}", bare)
    if isinstance(value, Mapping):
        made = {}
        for key, own in value.items():
            made[marked(key, begins)] = marked(own, begins)
        return made
    if isinstance(value, list | tuple):
        return [marked(own, begins) for own in value]
    return value


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a rendered text, its marks left out."""
    control = control_tokens_of(tokenizer)
    if MARK not in text and not control.loose:
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids: list[int] = []
    for i, piece in enumerate(control.cut.split(text)):
        if i % 2:
            ids += tokenizer.encode(piece, add_special_tokens=False)
        elif piece:
            follows = control.ahead and i > 0
            ids += _plain(tokenizer, piece.replace(MARK, ""), follows)
    return ids


def _plain(tokenizer: TokenizerWrapper, text: str, follows: bool) -> list[int]:
    """Token ids of a text in which there are no control tokens; `follows`: it comes after one."""
    split = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    if follows:
        before = split("\n")
        both = split("\n" + text)
        if both[: len(before)] == before:
            return list(both[len(before) :])
    return list(split(text))
