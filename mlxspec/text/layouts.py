"""Layouts of calls: the text between names, keys and values, learned from what writes calls.

Probes that differ in one thing (one call or two, a number for a string) are written and compared:
text that stays the same is the format's, text that changes is a name, a key or a value.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import unescape
from itertools import takewhile
from json import JSONDecoder
from typing import Any, Literal

from mlxspec.types import Json

NamedCall = tuple[str, Json]  # a name and arguments
Write = Callable[[Sequence[NamedCall]], str]  # the text of calls

NAME, OTHER, CALL_ID = "zqname", "zqother", "zqcall00"
KEY_A, KEY_B, VALUE_A, VALUE_B = "zqkeya", "zqkeyb", "zqvala", "zqvalb"
SAME_KEY = "zqkey"  # in the text after a value, where its key stands again
ARGUMENTS: Json = {KEY_A: VALUE_A, KEY_B: VALUE_B}
HARD = "zq\"'\\<&\nzq"  # a string that some formats wrap or escape
PROBES: tuple[tuple[Any, str], ...] = (  # values, and how their texts may begin
    (HARD, re.escape(HARD)),
    (7007, "7007"),
    (True, "[Tt]rue"),
    ([VALUE_A], r"\["),
    ({KEY_B: VALUE_A}, r"\{"),
)

TAG = r"(?:<[^<>\s\"']*>|\[/?[A-Z_]{2,}\])"
TAGS = rf"{TAG}(?:\w+{TAG})?"
PIECE = re.compile(rf"{TAG}|\w+|\s+|.", re.DOTALL)
MARKER = re.compile(rf"{TAGS}|<[^\s<>\"']+(?: \w+=)?|[^\s\[\]{{}}(),:\"'<]+:?")


@dataclass(frozen=True, slots=True)
class Value:
    """The text before and after a value: of strings if `string` is True, of other types if it is
    False, of both if it is None."""

    string: bool | None
    opens: str
    closes: str


@dataclass(frozen=True)
class CallLayout:
    """How a model writes calls, as the text around what varies: `section_opens`, calls with
    `between` two of them, and `section_closes`; each call is `call_opens`, its name, `after_name`,
    its arguments and `call_closes`.

    `style`: the arguments are a JSON object; or parameters in `tags`, each `key`, its name and a
    value; or `words`, as in a call in Python, whose values end at a comma; or the `whole` call is
    an object with another order. `values` are the forms of a value, with `separator` between two
    parameters; `SAME_KEY` in them stands for the key. `empty` follows the name of a call without
    parameters. `raw`: strings are written without escapes; `html`: with those of HTML. `true` is
    the word for true.
    """

    section_opens: str
    call_opens: str
    after_name: str
    call_closes: str
    between: str = ""
    section_closes: str = ""
    style: Literal["json", "tags", "words", "whole"] = "json"
    key: str = ""
    values: tuple[Value, ...] = ()
    separator: str = ""
    empty: str = ""
    raw: bool = False
    html: bool = False
    true: str = "true"

    @cached_property
    def start_marker(self) -> str:
        """The marker that opens calls; "" if there is none."""
        match = MARKER.match((self.section_opens + self.call_opens).lstrip())
        return match[0] if match else ""

    @cached_property
    def end_marker(self) -> str:
        """The marker that closes what `start_marker` opens; "" if there is none."""
        per_call = not self.section_opens.strip()
        tags = re.findall(TAGS, self.call_closes if per_call else self.section_closes)
        return str(tags[-1 if per_call else 0]) if tags else ""

    @cached_property
    def name_opens(self) -> str:
        """The text between the start marker and a name."""
        text = self.call_opens.strip()
        return text.removeprefix(self.start_marker).lstrip() if self.start_marker else text

    def render(self, name: str, arguments: str) -> str:
        """The text of a call with these arguments in JSON; not for a layout with parameters."""
        call = f"{self.call_opens}{name}{self.after_name}{arguments}{self.call_closes}"
        return (self.section_opens + call + self.section_closes).strip()


def loose(text: str) -> str:
    """The pattern of a format's text with any white space, quotes, digits, ids and names."""
    patterns = []
    for piece in PIECE.findall(text):
        if piece.isspace():
            patterns.append(r"(?:\\n|\s)*+")
        elif piece == '"':
            patterns.append(r"\s*\"?\s*")
        elif piece.startswith(CALL_ID):
            patterns.append(r"[\w.:-]*+")
        elif piece in (NAME, OTHER):
            patterns.append(r"[^\s<>\"]++")
        else:
            patterns.append(re.sub(r"\d+", r"\\d+", re.escape(piece)))
    return "".join(patterns)


def common_length(pieces: Sequence[str], others: Sequence[str]) -> int:
    """Length of the common prefix of two sequences of pieces, ignoring which digits they have."""
    pairs = zip(pieces, others, strict=False)
    same = (re.sub(r"\d+", "0", a) == re.sub(r"\d+", "0", b) for a, b in pairs)
    return sum(takewhile(bool, same))


def learn_layout(write: Write) -> CallLayout | None:
    """The layout of the calls that `write` writes; None if they have no names and arguments, or
    have them in their markup too."""
    one = write([(NAME, ARGUMENTS)])
    at = one.rfind(NAME, 0, max(one.find(KEY_A), 0))
    if at < 0:
        return _whole(one)
    before, rest = one[:at], one[at + len(NAME) :]
    if span := _json_in(rest, ARGUMENTS):
        first, end = span
        return _with_section(write, CallLayout("", before, rest[:first], rest[end:]))
    pattern = "(.*?)".join(["", KEY_A, VALUE_A, KEY_B, VALUE_B])
    rest, last = [_with_same_key(text) for text in rest.rpartition(VALUE_B)[::2]]
    parts = re.fullmatch(f"{pattern}(.*)", f"{rest}{VALUE_B}{last}", re.DOTALL)
    if not parts or "\\" in parts[2]:  # JSON in a string
        return _whole(one)
    layout = _with_parameters(write, before, *map(PIECE.findall, parts.groups()))
    texts = [
        layout.section_opens,
        layout.after_name,
        layout.call_closes,
        layout.section_closes,
        layout.key,
        layout.separator,
    ]
    texts += [text for value in layout.values for text in (value.opens, value.closes)]
    mixed = any(word in text for text in texts for word in (NAME, *ARGUMENTS, *ARGUMENTS.values()))
    named = layout.style == "tags" or layout.after_name.strip() in ("(", "{")
    if mixed:
        return None
    return layout if named else _whole(one)


def _with_same_key(text: str) -> str:
    """A text with `SAME_KEY` for the key of each value that stands after the value."""
    before, value, after = text.partition(VALUE_A)
    if not value:
        return text.replace(KEY_B, SAME_KEY)
    return before + value + after.replace(KEY_A, SAME_KEY)


def _whole(one: str) -> CallLayout | None:
    """The layout of a call that is one object, from the text around it."""
    match = re.fullmatch(r"([^{]*)\{.*\}([^}]*)", one, re.DOTALL)
    if not match or NAME not in one or KEY_A not in one:
        return None
    return CallLayout("", match[1], "", match[2], style="whole")


def _json_in(text: str, arguments: Json) -> tuple[int, int] | None:
    """Start and end of these arguments in a text, as JSON."""
    for brace in re.finditer(r"\{", text):
        try:
            value, end = JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if value == arguments:
            return brace.start(), end
    return None


def _with_section(write: Write, layout: CallLayout) -> CallLayout:
    """The layout of several calls, from that of one, in which the section belongs to the call. It
    stays as it is if two calls are refused."""
    first: Json = {KEY_A: VALUE_A}
    try:
        text = write([(NAME, first), (OTHER, {KEY_B: VALUE_B})])
        _, end = _json_in(text, first) or (
            0,
            text.index(VALUE_A) + len(VALUE_A),
        )
        other = text.rindex(OTHER, end, text.index(KEY_B))
    except Exception:  # a template raises whatever its author chose
        return layout
    closes, before = (
        PIECE.findall(layout.call_closes),
        PIECE.findall(layout.call_opens),
    )
    between = PIECE.findall(text[end:other].replace(KEY_A, SAME_KEY))
    n = common_length(closes, between)
    while n and closes[n - 1].isspace():
        n -= 1
    m = len(before) - common_length(before[::-1], between[n:][::-1])
    split = replace(
        layout,
        section_opens="".join(before[:m]),
        call_opens="".join(before[m:]),
        call_closes="".join(closes[:n]),
        between="".join(between[n : len(between) - len(before) + m]),
        section_closes="".join(closes[n:]),
    )
    # The end of the turn may follow the last marker.
    text, marker = split.section_closes, split.end_marker
    end = text.find(marker) + len(marker) if marker else len(text)
    return replace(split, section_closes=text[:end] if split.section_opens.strip() else "")


def _with_parameters(
    write: Write,
    before: str,
    first: list[str],  # the pieces between name and key, and so on
    opens: list[str],
    next_: list[str],
    _: list[str],
    last: list[str],
) -> CallLayout:
    """The layout of calls whose arguments are parameters."""
    n = common_length(next_, last)
    while n and next_[n - 1].isspace():
        n -= 1
    m = common_length(first[::-1], next_[n:][::-1])
    while m and first[-m].isspace():
        m -= 1
    closes = "".join(next_[:n])
    layout = CallLayout(
        "",
        before,
        "".join(first[: len(first) - m]),
        "".join(last),
        key="".join(first[len(first) - m :]),
        values=(Value(True, "".join(opens), closes),),
        separator="".join(next_[n : len(next_) - m]),
    )
    layout = _with_section(write, layout)
    none = write([(NAME, {})])
    empty = none[none.rfind(NAME) + len(NAME) :].removesuffix(layout.section_closes)
    if tags := re.findall(TAG, layout.call_closes):  # the end of the turn may follow the last one
        empty = empty[: empty.find(tags[-1]) + len(tags[-1])]
    layout = replace(layout, call_closes=layout.call_closes.removeprefix(closes), empty=empty)
    return _with_values(write, layout, "".join(last[n:]))


def _with_values(write: Write, layout: CallLayout, ending: str) -> CallLayout:
    """The layout with all forms of values, from one with that of a plain string. `ending`: the
    text after the last value of a turn."""
    [plain] = layout.values
    forms: dict[tuple[str, str], set[bool]] = {(plain.opens, plain.closes): {True}}
    true = "true"
    closes = ""
    raw = html = False
    for value, pattern in PROBES:
        rest = write([(NAME, {KEY_A: value})]).partition(KEY_A)[2].replace(KEY_A, SAME_KEY)
        match = re.search(pattern, rest)
        if not match:  # written with escapes
            html = html or (value == HARD and HARD in unescape(rest))
            continue
        if value is True:
            true = match[0]
        if value in (HARD, 7007):
            closes = rest[match.end() :].removesuffix(ending)
            raw = raw or value == HARD
        forms.setdefault((rest[: match.start()], closes), set()).add(value == HARD)
    values = [
        Value(kinds.pop() if len(kinds) == 1 else None, *form)
        for form, kinds in sorted(forms.items(), key=lambda item: -len(item[0][0]))
    ]
    closed = closes.strip() or re.match(TAG, layout.key)
    style: Literal["tags", "words"] = "tags" if closed else "words"
    return replace(
        layout,
        style=style,
        values=tuple(values),
        raw=raw,
        html=html,
        true=true,
    )
