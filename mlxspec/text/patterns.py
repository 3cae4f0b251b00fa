"""Patterns of words and of the text between them, for what parses answers and encodes prompts."""

import re
from collections.abc import Iterable

NOTHING = "(?!)"  # the pattern that matches nothing
END = r"|\Z"  # a branch of a pattern: or the end of the text


def any_of(words: Iterable[str], end: str = "") -> str:
    """A pattern for the longest of `words`, or for the beginning of one before `end`. It is a trie:
    some models have a thousand words, too many to try one by one."""
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
    excluded = re.escape("\0" + "".join(begins))  # a set may not be empty
    return re.compile(rf"[^{excluded}]*[^{excluded}\s]")
