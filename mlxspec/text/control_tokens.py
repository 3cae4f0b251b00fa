"""Encodes rendered text so that only the template can write control tokens: a client's are text.

Before the template sees it, each control token in a client's string gets a `MARK` after its first
character; no client can set one. The rendered text is split at the control tokens without a mark
and encoded in pieces.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import format_of, has_headers
from mlxspec.text.patterns import END, NOTHING, any_of

MARK = "\ufdd0"  # a noncharacter of Unicode


class ControlTokens:
    """Patterns for a tokenizer's control tokens.

    `begins` finds the first character of each in a text, also of one that the end of the text cuts
    off, because the template may continue with another text. `answers` is the same for the model's
    text, in which the template has to see the markers of reasoning and calls. `unmarked` finds
    whole ones without a mark, with the white space that they strip. `start_differs`: the beginning
    of a text is encoded differently from text after a control token. `normalized`: the tokenizer
    finds some in normalised text, which may contain more of them than the text does.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        t = tokenizer
        form = format_of(t)
        markers = {form.think_start}
        for layout in form.layouts:
            markers |= {layout.start_marker, layout.end_marker}
        if not has_headers(t):  # there it ends more than the reasoning
            markers.add(form.think_end)
        words = []
        self.normalized = False
        kinds: dict[tuple[str, str], list[str]] = {}
        for token in t.added_tokens_decoder.values():
            if token.special and token.content.strip():
                words.append(token.content)
                self.normalized = self.normalized or token.normalized
                before = r"(?<!\s)\s*" if token.lstrip else ""
                after = r"\s*" if token.rstrip else ""
                kinds.setdefault((before, after), []).append(token.content)
        self.begins = _beginnings(words)
        plain = [word for word in words if word not in markers]
        self.answers = _beginnings(plain)
        cuts = []
        for (before, after), contents in kinds.items():
            cuts.append(rf"{before}{any_of(contents)}(?!{MARK}){after}")
        every = "|".join(cuts) or NOTHING
        self.unmarked = re.compile(f"({every})")
        alone = t.encode("a", add_special_tokens=False)
        first = "".join(words[:1])
        self.start_differs = t.encode(first + "a", add_special_tokens=False)[1:] != alone


control_tokens_of = lru_cache(16)(ControlTokens)


def _beginnings(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"(?={any_of(words, END)}).", re.DOTALL)


def marked(value: Any, begins: re.Pattern[str]) -> Any:
    """A copy of a client's value with marks in its strings, at any depth."""
    if isinstance(value, str):
        bare = value.replace(MARK, "\ufffd")
        return begins.sub(rf"\g<0>{MARK}", bare)
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            copy[marked(key, begins)] = marked(item, begins)
        return copy
    if isinstance(value, list | tuple):
        return [marked(item, begins) for item in value]
    return value


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a rendered text, without its marks."""
    control = control_tokens_of(tokenizer)
    if MARK not in text and not control.normalized:
        return list(tokenizer.encode(text, add_special_tokens=False))
    ids: list[int] = []
    for i, piece in enumerate(control.unmarked.split(text)):
        if i % 2:
            ids += tokenizer.encode(piece, add_special_tokens=False)
        elif piece:
            follows = control.start_differs and i > 0
            ids += _plain(tokenizer, piece.replace(MARK, ""), follows)
    return ids


def _plain(tokenizer: TokenizerWrapper, text: str, follows: bool) -> list[int]:
    """Token ids of a text without control tokens; `follows`: it comes after one."""
    split = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    if follows:
        before = split("\n")
        both = split("\n" + text)
        if both[: len(before)] == before:
            return list(both[len(before) :])
    return list(split(text))
