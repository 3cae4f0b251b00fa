"""How a model writes calls and reasoning, learned from renderings of its own chat template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import Template
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlxspec.text.layouts import (
    ARGUMENTS,
    CALL_ID,
    NAME,
    OTHER,
    PIECE,
    TAG,
    Layout,
    NamedCall,
    alike,
    learned,
)
from mlxspec.text.template import apply_template, compiled, template_reads
from mlxspec.types import Json

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

SAID, THOUGHT = "zqsaid", "zqthought"
PROBE_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for parameters in [{"type": "object", "properties": {key: {} for key in ARGUMENTS}}]
    for name in (NAME, OTHER)
]


@dataclass(frozen=True, slots=True, eq=False)  # one for a tokenizer; a key of caches
class ChatFormat:
    """What the model of one tokenizer writes. `layouts`: of its calls, its template's first, then
    others that it may write. `own`: the first is learned from the template. `spelled`: the known
    format of calls of the history, which the template leaves out. `around`: the markers that stand
    around a text. Those of its reasoning are "" where it has none."""

    layouts: tuple[Layout, ...]
    own: bool
    spelled: str
    around: tuple[str, ...]
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
    inferred = tokenizer.tool_parser.__module__.split(".")[-1] if tokenizer.tool_parser else ""
    names = [name for token, name in BY_TOKEN.items() if has_tokens(tokenizer, token)]
    names += [ALIASES.get(inferred, inferred), "json_tools", "tools_tag"]
    names = [name for name in names if name in KNOWN]
    layouts = ([own] if own else []) + [layout_of(name) for name in names]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (start, end)]
    spelled = names[0] if dropped else ""
    return ChatFormat(
        tuple(dict.fromkeys(layouts)),
        bool(own),
        spelled,
        _around_text(tokenizer, (start, end)),
        start,
        end,
        *ids,
    )


@lru_cache(16)
def is_harmony(tokenizer: TokenizerWrapper) -> bool:
    """Whether the model writes OpenAI's Harmony."""
    return has_tokens(tokenizer, "<|channel|>", "<|message|>")


def has_tokens(tokenizer: TokenizerWrapper, *tokens: str) -> bool:
    """Whether all of these are in the vocabulary, of which `get_vocab` makes a copy each time."""
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    return None not in ids and tokenizer.convert_ids_to_tokens(ids) == list(tokens)


@lru_cache(16)
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
    return _template(name).render(calls=named)


@lru_cache
def _template(name: str) -> Template:
    return compiled(KNOWN[name].read_text("utf-8"))


def _rendered(
    tokenizer: TokenizerWrapper,
    tools: Sequence[Json] = PROBE_TOOLS,
    **answer: object,
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
    tokenizer: TokenizerWrapper,
    calls: Sequence[NamedCall],
    tools: Sequence[Json] = PROBE_TOOLS,
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
        start = tokenizer.tool_call_start or json_tools.tool_call_start
        at = max(0, text.find(start))
        # mlx-lm says where calls begin, but for Hermes' marker, which may be in another's section.
        inside = start == json_tools.tool_call_start and re.search(TAG, text[:at])
        return text if inside else text[at:]

    try:
        return learned(write), NAME not in write([(NAME, ARGUMENTS)])
    except Exception:  # a template raises whatever its author chose
        return None, False


def _beyond(text: str, plain: str) -> str:
    """What stands in a text and not in another, in whole pieces."""
    pieces, others = PIECE.findall(text), PIECE.findall(plain)
    n = alike(pieces, others)
    end = len(pieces) - alike(pieces[n:][::-1], others[n:][::-1])
    if re.fullmatch(rf".*{TAG}(?!zq)\w+", "".join(pieces[n:end]), re.DOTALL):
        end += 1  # the word of a marker that is a word between two tags
    return "".join(pieces[n:end])


def _around_text(tokenizer: TokenizerWrapper, thinking: tuple[str, str]) -> tuple[str, ...]:
    """The markers that the template writes around the text of an answer, as Command R's does: what
    the prompt of an answer does not end with. None where answers have headers."""
    if has_headers(tokenizer) or not tokenizer.has_chat_template:
        return ()
    user = [{"role": "user", "content": SAID}]
    try:
        said = _rendered(tokenizer, content=SAID)
        prompt = apply_template(
            tokenizer,
            user,
            tools=PROBE_TOOLS,
            add_generation_prompt=True,
        )
    except Exception:  # a template raises whatever its author chose
        return ()
    prompt = prompt.rpartition(SAID)[2]
    before, _, after = said.partition(SAID)
    opens = re.search(rf"{TAG}\Z", before.rstrip())
    closes = re.match(rf"\s*({TAG})", after)
    if not opens or not closes or opens[0] in (*thinking, *re.findall(TAG, prompt)):
        return ()
    return opens[0], closes[1]


def _thinking(tokenizer: TokenizerWrapper) -> tuple[str, str]:
    """The markers of the reasoning: known ones that the template names, else mlx-lm's, else the
    template's."""
    if is_harmony(tokenizer):
        return ANALYSIS, MESSAGE_END
    pairs = [pair for pair in THINKING if has_tokens(tokenizer, *pair)]
    for pair in pairs:
        if all(template_reads(tokenizer, each) for each in pair):
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
    return next(iter(pairs), ("", ""))
