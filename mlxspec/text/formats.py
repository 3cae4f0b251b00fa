"""How a model writes calls and reasoning, learned from renderings of its own chat template.

Probes that differ in one thing (one call or two, a number for a string) are rendered and compared:
what stays is the format's text, what changes is a name, a key or a value.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from json import JSONDecoder
from pathlib import Path
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.template import apply_template, compiled, template_reads
from mlxspec.types import Json

NamedCall = tuple[str, Json]  # a name and arguments
Write = Callable[[Sequence[NamedCall]], str]  # the text of calls

# Formats that no template may show, as templates: by mlx-lm's name for what it infers from a
# template's words, and by a token of the vocabulary.
KNOWN = {path.stem: path for path in (Path(__file__).parent / "calls").glob("*.jinja")}
ALIASES = {"laguna": "glm47"}
BY_TOKEN = {
    "<|/tool_call|>": "phi_4",
    "<|tool_call|>": "granite_3",
    "<|tool_call_start|>": "pythonic",
    "<|python_tag|>": "python_tag",
}
# Reasoning of models whose templates do not write it, where mlx-lm does not know it: Magistral's
# (https://huggingface.co/mistralai/Magistral-Small-2509).
THINKING = (("[THINK]", "[/THINK]"),)

# OpenAI's Harmony, gpt-oss' format: an answer is messages, each in a channel or to a function
# (https://cookbook.openai.com/articles/openai-harmony).
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT_MESSAGE, MESSAGE_END = "<|start|>assistant", "<|end|>"
FUNCTION_CALL = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"

NAME, OTHER, CALL_ID = "zqname", "zqother", "zqcall00"
KEY_A, KEY_B, VALUE_A, VALUE_B = "zqkeya", "zqkeyb", "zqvala", "zqvalb"
SAID, THOUGHT = "zqsaid", "zqthought"
ARGUMENTS: Json = {KEY_A: VALUE_A, KEY_B: VALUE_B}
HARD = "zq\"'\\<&\nzq"  # a string that some formats wrap or escape
PROBES: tuple[tuple[Any, str], ...] = (  # values, and how their texts may begin
    (HARD, re.escape(HARD)),
    (7007, "7007"),
    (True, "[Tt]rue"),
    ([VALUE_A], r"\["),
    ({KEY_B: VALUE_A}, r"\{"),
)

PROBE_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for parameters in [{"type": "object", "properties": {key: {} for key in ARGUMENTS}}]
    for name in (NAME, OTHER)
]

TAG = r"(?:<[^<>\s\"']*>|\[/?[A-Z_]{2,}\])"
TAGS = rf"{TAG}(?:\w+{TAG})?"
PIECE = re.compile(rf"{TAG}|\w+|\s+|.", re.DOTALL)
MARKER = re.compile(rf"{TAGS}|<[^\s<>\"']+(?: \w+=)?|[^\s\[\]{{}}(),:\"'<]+:?")


@dataclass(frozen=True, slots=True)
class Value:
    """The text before and behind a value. `string`: strings are written so; False: all others;
    None: both."""

    string: bool | None
    opens: str
    closes: str


@dataclass(frozen=True)
class Layout:
    """How a model writes calls, as the text around what varies: a section `opens`; each call is
    `before`, its name, `after`, its arguments and `closes`, with `between` two; the section `ends`.

    Arguments are a JSON object; or parameters in `tags`, each `key`, its name and a value; or
    `words`, as in a call of Python's, whose values end at a comma; or the call is a `whole` object,
    in which the name comes last. `values` are the ways in which
    one is written, with `separator` between two. Behind the name of a call without parameters
    stands `empty`. `raw`: strings are written without escapes. `true` is the word for it.
    """

    opens: str
    before: str
    after: str
    closes: str
    between: str = ""
    ends: str = ""
    style: Literal["json", "tags", "words", "whole"] = "json"
    key: str = ""
    values: tuple[Value, ...] = ()
    separator: str = ""
    empty: str = ""
    raw: bool = False
    true: str = "true"

    @cached_property
    def start(self) -> str:
        """The marker that opens calls; "" where none does."""
        found = MARKER.match((self.opens + self.before).lstrip())
        return found[0] if found else ""

    @cached_property
    def end(self) -> str:
        """The marker that closes what `start` opens; "" where none does."""
        each = not self.opens.strip()
        tags = re.findall(TAGS, self.closes if each else self.ends)
        return str(tags[-1 if each else 0]) if tags else ""

    @cached_property
    def name_opens(self) -> str:
        """What stands before a name, behind the start marker."""
        text = self.before.strip()
        return text.removeprefix(self.start).lstrip() if self.start else text

    def written(self, name: str, arguments: str) -> str:
        """A call whose arguments are this JSON; not of a layout with parameters."""
        call = f"{self.before}{name}{self.after}{arguments}{self.closes}"
        return (self.opens + call + self.ends).strip()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What the model of one tokenizer writes. `layouts`: of its calls, its template's first, then
    others that it may write. `own`: the first is learned from the template. `spelled`: the known
    format of calls of the history, which the template leaves out. The markers of its reasoning are
    "" where it has none."""

    layouts: tuple[Layout, ...]
    own: bool
    spelled: str
    think_start: str
    think_end: str
    think_start_tokens: tuple[int, ...]
    think_end_tokens: tuple[int, ...]

    def reasoning_length(self, ids: Sequence[int]) -> int:
        """How many tokens of an answer are up to the end of its reasoning; all if none ends it."""
        n = len(self.think_end_tokens)
        ends = (i for i in range(n, len(ids) + 1) if tuple(ids[i - n : i]) == self.think_end_tokens)
        return next(ends, len(ids))


@lru_cache(16)
def format_of(tokenizer: TokenizerWrapper) -> ChatFormat:
    """The format of a tokenizer's model."""
    own, dropped = None, False
    start, end = _thinking(tokenizer)
    if template_reads(tokenizer, "tool") and not is_harmony(tokenizer):
        own, dropped = _own_layout(tokenizer, rf"\s*{re.escape(start)}\s*{re.escape(end)}\s*")
    vocab = tokenizer.get_vocab()
    inferred = tokenizer.tool_parser.__module__.split(".")[-1] if tokenizer.tool_parser else ""
    names = [name for token, name in BY_TOKEN.items() if token in vocab]
    names = [
        name for name in (*names, ALIASES.get(inferred, inferred), "json_tools") if name in KNOWN
    ]
    layouts = ([own] if own else []) + [layout_of(name) for name in names]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (start, end)]
    spelled = names[0] if dropped else ""
    return ChatFormat(tuple(dict.fromkeys(layouts)), bool(own), spelled, start, end, *ids)


def is_harmony(tokenizer: TokenizerWrapper) -> bool:
    """Whether the model writes OpenAI's Harmony."""
    return bool({"<|channel|>", "<|message|>"} <= tokenizer.get_vocab().keys())


def has_headers(tokenizer: TokenizerWrapper) -> bool:
    """Whether answers are messages with headers, as in Harmony."""
    return bool(tokenizer.response_transitions) or is_harmony(tokenizer)


@lru_cache
def layout_of(name: str) -> Layout:
    """The layout of a known format."""
    layout = learned(lambda calls: written(name, calls))
    assert layout, name
    return layout


def written(name: str, calls: Sequence[NamedCall]) -> str:
    """Calls in a known format."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return compiled(KNOWN[name].read_text("utf-8")).render(calls=named)


def _rendered(
    tokenizer: TokenizerWrapper, tools: Sequence[Json] = PROBE_TOOLS, **answer: object
) -> str:
    """A conversation in which the assistant answers so."""
    turn = {"role": "assistant", "content": "", **answer}
    turns: list[Json] = [{"role": "user", "content": "q"}, turn]
    return apply_template(tokenizer, turns, tools=tools, add_generation_prompt=False)


def _as_turn(calls: Sequence[NamedCall]) -> list[Json]:
    """Calls as a turn of the assistant has them."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [
        {"id": f"{CALL_ID}{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]


def written_by(
    tokenizer: TokenizerWrapper, calls: Sequence[NamedCall], tools: Sequence[Json] = PROBE_TOOLS
) -> str:
    """Calls as the template writes them: what stands in a turn of them and not in one of text.
    Raises whatever the template's author chose."""
    plain = _rendered(tokenizer, tools, content=SAID)
    return _beyond(_rendered(tokenizer, tools, tool_calls=_as_turn(calls)), plain)


def _own_layout(tokenizer: TokenizerWrapper, thoughtless: str) -> tuple[Layout | None, bool]:
    """The layout of the calls that the template writes into the history, None if it writes none or
    one that is not understood; and whether it leaves them out. `thoughtless`: the pattern of
    reasoning without a text."""

    def write(calls: Sequence[NamedCall]) -> str:
        text = re.sub(rf"\A{thoughtless}", "", written_by(tokenizer, calls))
        start = tokenizer.tool_call_start or ""
        return text[max(0, text.find(start)) :]

    try:
        return learned(write), NAME not in write([(NAME, ARGUMENTS)])
    except Exception:  # a template raises whatever its author chose
        return None, False


def _beyond(text: str, plain: str) -> str:
    """What stands in a text and not in another, in whole pieces."""
    pieces, others = PIECE.findall(text), PIECE.findall(plain)
    n = _alike(pieces, others)
    end = len(pieces) - _alike(pieces[n:][::-1], others[n:][::-1])
    if re.fullmatch(rf".*{TAG}(?!zq)\w+", "".join(pieces[n:end]), re.DOTALL):
        end += 1  # the word of a marker that is a word between two tags
    return "".join(pieces[n:end])


def _alike(some: Sequence[str], others: Sequence[str]) -> int:
    """How many pieces two sequences begin with, but for digits."""
    pairs = zip(some, others, strict=False)
    same = (re.sub(r"\d+", "0", a) == re.sub(r"\d+", "0", b) for a, b in pairs)
    return sum(takewhile(bool, same))


def learned(write: Write) -> Layout | None:
    """The layout of what writes calls; None where it writes no names and arguments."""
    one = write([(NAME, ARGUMENTS)])
    at = one.rfind(NAME, 0, max(one.find(KEY_A), 0))
    if at < 0:
        whole = re.fullmatch(rf"([^{{]*)\{{.*{KEY_A}.*{NAME}.*\}}([^}}]*)", one, re.DOTALL)
        return Layout("", whole[1], "", whole[2], style="whole") if whole else None
    before, rest = one[:at], one[at + len(NAME) :]
    if found := _json_in(rest, ARGUMENTS):
        first, end = found
        return _with_section(write, Layout("", before, rest[:first], rest[end:]))
    turns = "(.*?)".join(["", KEY_A, VALUE_A, KEY_B, VALUE_B])
    parts = re.fullmatch(f"{turns}(.*)", rest, re.DOTALL)
    return _with_parameters(write, before, *map(PIECE.findall, parts.groups())) if parts else None


def _json_in(text: str, arguments: Json) -> tuple[int, int] | None:
    """Where these arguments stand in a text, as JSON."""
    for brace in re.finditer(r"\{", text):
        try:
            value, end = JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if value == arguments:
            return brace.start(), end
    return None


def _with_section(write: Write, layout: Layout) -> Layout:
    """The layout of several calls by that of one, in which the section belongs to the call. It
    stays so where two are refused."""
    first: Json = {KEY_A: VALUE_A}
    try:
        text = write([(NAME, first), (OTHER, {KEY_B: VALUE_B})])
        _, end = _json_in(text, first) or (0, text.index(VALUE_A) + len(VALUE_A))
        other = text.rindex(OTHER, end, text.index(KEY_B))
    except Exception:  # a template raises whatever its author chose
        return layout
    closes, before = PIECE.findall(layout.closes), PIECE.findall(layout.before)
    between = PIECE.findall(text[end:other])
    n = _alike(closes, between)
    while n and closes[n - 1].isspace():
        n -= 1
    m = len(before) - _alike(before[::-1], between[n:][::-1])
    made = replace(
        layout,
        opens="".join(before[:m]),
        before="".join(before[m:]),
        closes="".join(closes[:n]),
        between="".join(between[n : len(between) - len(before) + m]),
        ends="".join(closes[n:]),
    )
    # Behind the last marker may be the end of the turn.
    end = made.ends.find(made.end) + len(made.end) if made.end else len(made.ends)
    return replace(made, ends=made.ends[:end] if made.opens.strip() else "")


def _with_parameters(
    write: Write,
    before: str,
    first: list[str],  # the pieces between name and key, and so on
    opens: list[str],
    next_: list[str],
    _opens: list[str],
    last: list[str],
) -> Layout:
    """The layout of calls whose arguments are parameters."""
    n = _alike(next_, last)
    while n and next_[n - 1].isspace():
        n -= 1
    m = _alike(first[::-1], next_[n:][::-1])
    while m and first[-m].isspace():
        m -= 1
    value_closes, ending = "".join(next_[:n]), "".join(last[n:])
    layout = Layout(
        "",
        before,
        "".join(first[: len(first) - m]),
        "".join(last),
        key="".join(first[len(first) - m :]),
        separator="".join(next_[n : len(next_) - m]),
    )
    layout = _with_section(write, layout)
    ways: dict[tuple[str, str], set[bool]] = {("".join(opens), value_closes): {True}}
    true, raw, closing = "true", False, ""
    for value, pattern in PROBES:
        text = write([(NAME, {KEY_A: value})])
        rest = text.partition(KEY_A)[2]
        found = re.search(pattern, rest)
        if not found:  # written with escapes
            continue
        if value is True:
            true = found[0]
        if value in (HARD, 7007):
            closing = rest[found.end() :].removesuffix(ending)
            raw = raw or value == HARD
        ways.setdefault((rest[: found.start()], closing), set()).add(value == HARD)
    none = write([(NAME, {})])
    empty = none[none.rfind(NAME) + len(NAME) :].removesuffix(layout.ends)
    if tags := re.findall(TAG, layout.closes):  # behind the last one may be the end of the turn
        empty = empty[: empty.find(tags[-1]) + len(tags[-1])]
    values = [
        Value(kinds.pop() if len(kinds) == 1 else None, *way)
        for way, kinds in sorted(ways.items(), key=lambda item: -len(item[0][0]))
    ]
    ended = closing.strip() or re.match(TAG, layout.key)
    style: Literal["tags", "words"] = "tags" if ended else "words"
    return replace(
        layout,
        closes=layout.closes.removeprefix(value_closes),
        style=style,
        values=tuple(values),
        empty=empty,
        raw=raw,
        true=true,
    )


def _thinking(tokenizer: TokenizerWrapper) -> tuple[str, str]:
    """The markers of the reasoning: known ones that the template names, else mlx-lm's, else the
    template's."""
    if is_harmony(tokenizer):
        return ANALYSIS, MESSAGE_END
    vocab = tokenizer.get_vocab()
    for pair in THINKING:
        if vocab.keys() >= set(pair) and all(template_reads(tokenizer, each) for each in pair):
            return pair
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    answers: list[Json] = [{"content": SAID}, {"tool_calls": _as_turn([(NAME, ARGUMENTS)])}]
    for answer in [] if tokenizer.response_transitions else answers:
        try:
            text = _rendered(tokenizer, reasoning_content=THOUGHT, **answer)
            silent = _rendered(tokenizer, content=SAID).partition(SAID)[0].rstrip()
        except Exception:  # a template raises whatever its author chose
            continue
        before, _, after = text.partition(THOUGHT)
        start = re.search(rf"{TAG}\Z", before.rstrip())
        end = re.match(rf"\s*({TAG})", after)
        known = start and silent.endswith(start[0])  # it stands before any text
        if start and end and not known and (SAID in after or NAME in after):
            return start[0], end[1]
    return next((pair for pair in THINKING if vocab.keys() >= set(pair)), ("", ""))
