"""How a model writes calls and reasoning, learned from what its chat template renders."""

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
    CallLayout,
    NamedCall,
    common_length,
    learn_layout,
)
from mlxspec.text.template import apply_template, compile_template, template_reads
from mlxspec.types import Json

# Call formats that a model's template may not show, as templates: by mlx-lm's name for the format
# that it infers from a template, and by a token of the vocabulary.
KNOWN = {path.stem: path for path in (Path(__file__).parent / "calls").glob("*.jinja")}
ALIASES = {"laguna": "glm47"}
BY_TOKEN = {
    "<|/tool_call|>": "phi_4",
    "<|tool_call|>": "granite_3",
    "<|tool_call_start|>": "pythonic",
    "<|python_tag|>": "python_tag",
    "[TOOL_CALLS]": "mistral",  # Codestral, and conversions whose templates have no tools
}
# Markers of reasoning that templates do not write and mlx-lm does not know: Magistral's
# (https://huggingface.co/mistralai/Magistral-Small-2509).
THINKING = (("[THINK]", "[/THINK]"),)

# OpenAI's Harmony, gpt-oss' format: an answer is messages, each in a channel or to a function
# (https://cookbook.openai.com/articles/openai-harmony).
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT_MESSAGE, MESSAGE_END = "<|start|>assistant", "<|end|>"
FUNCTION_CALL = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"

CONTENT, THOUGHT = "zqsaid", "zqthought"
PROBE_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for parameters in [{"type": "object", "properties": {key: {} for key in ARGUMENTS}}]
    for name in (NAME, OTHER)
]


@dataclass(frozen=True, slots=True, eq=False)  # one per tokenizer; a key of caches
class ChatFormat:
    """What the model of one tokenizer writes. `layouts` of its calls: the template's first, then
    others that it may write. `learned`: the first is from the template. `history_format`: the known
    format for calls of the history, if the template leaves them out. `text_markers`: the markers
    around a text. The markers of its reasoning are "" if it has none."""

    layouts: tuple[CallLayout, ...]
    learned: bool
    history_format: str
    text_markers: tuple[str, ...]
    think_start: str
    think_end: str
    think_start_tokens: tuple[int, ...]
    think_end_tokens: tuple[int, ...]

    def reasoning_length(self, ids: Sequence[int]) -> int:
        """Tokens of an answer through the end of its reasoning; all of them if it does not end."""
        n = len(self.think_end_tokens)
        ends = (i for i in range(n, len(ids) + 1) if tuple(ids[i - n : i]) == self.think_end_tokens)
        return next(ends, len(ids))


@lru_cache(16)
def format_of(tokenizer: TokenizerWrapper) -> ChatFormat:
    """The format of a tokenizer's model."""
    layout, dropped = None, False
    start, end = _thinking(tokenizer)
    if template_reads(tokenizer, "tool") and not is_harmony(tokenizer):
        empty = rf"\s*{re.escape(start)}\s*{re.escape(end)}\s*"
        layout, dropped = _template_layout(tokenizer, empty)
    inferred = tokenizer.tool_parser.__module__.split(".")[-1] if tokenizer.tool_parser else ""
    names = [name for token, name in BY_TOKEN.items() if has_tokens(tokenizer, token)]
    names += [ALIASES.get(inferred, inferred), "json_tools", "tools_tag"]
    names = [name for name in names if name in KNOWN]
    layouts = ([layout] if layout else []) + [layout_of(name) for name in names]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (start, end)]
    history_format = names[0] if dropped else ""
    return ChatFormat(
        tuple(dict.fromkeys(layouts)),
        bool(layout),
        history_format,
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
def layout_of(name: str) -> CallLayout:
    """The layout of a known format."""
    layout = learn_layout(lambda calls: render_calls(name, calls))
    assert layout, name
    return layout


def render_calls(name: str, calls: Sequence[NamedCall]) -> str:
    """The text of calls in a known format."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _known_template(name).render(calls=named)


@lru_cache
def _known_template(name: str) -> Template:
    return compile_template(KNOWN[name].read_text("utf-8"))


def _render_answer(
    tokenizer: TokenizerWrapper,
    tools: Sequence[Json] = PROBE_TOOLS,
    **answer: object,
) -> str:
    """The text of a conversation with this answer of the assistant."""
    turn = {"role": "assistant", "content": "", **answer}
    turns: list[Json] = [{"role": "user", "content": "q"}, turn]
    return apply_template(tokenizer, turns, tools=tools, add_generation_prompt=False)


def _render_prompt(tokenizer: TokenizerWrapper) -> str:
    """A conversation that the assistant is to answer."""
    turns = [{"role": "user", "content": CONTENT}]
    return apply_template(tokenizer, turns, tools=PROBE_TOOLS, add_generation_prompt=True)


def _as_turn(calls: Sequence[NamedCall]) -> list[Json]:
    """Calls as in a turn of the assistant."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [
        {"id": f"{CALL_ID}{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]


def template_calls(
    tokenizer: TokenizerWrapper,
    calls: Sequence[NamedCall],
    tools: Sequence[Json] = PROBE_TOOLS,
) -> str:
    """The text of calls as the template writes them: what a turn of calls has and a turn of text
    has not. Raises whatever the template's author chose."""
    plain = _render_answer(tokenizer, tools, content=CONTENT)
    return _difference(_render_answer(tokenizer, tools, tool_calls=_as_turn(calls)), plain)


def _template_layout(
    tokenizer: TokenizerWrapper, empty_thought: str
) -> tuple[CallLayout | None, bool]:
    """The layout of calls that the template writes into the history, None if it writes none or one
    that is not understood; and whether it leaves calls out. `empty_thought`: the pattern of
    reasoning without text."""

    def write(calls: Sequence[NamedCall]) -> str:
        text = re.sub(rf"\A{empty_thought}", "", template_calls(tokenizer, calls))
        start = tokenizer.tool_call_start or ""
        at = max(0, text.find(start))
        # mlx-lm knows where calls begin, but Hermes' marker may be inside another format's section.
        inside = start == json_tools.tool_call_start and re.search(TAG, text[:at])
        return text if inside else text[at:]

    try:
        return learn_layout(write), NAME not in write([(NAME, ARGUMENTS)])
    except Exception:  # a template raises whatever its author chose
        return None, False


def _difference(text: str, plain: str) -> str:
    """The part of `text` that is not in `plain`, in whole pieces."""
    pieces, others = PIECE.findall(text), PIECE.findall(plain)
    n = common_length(pieces, others)
    end = len(pieces) - common_length(pieces[n:][::-1], others[n:][::-1])
    if re.fullmatch(rf".*{TAG}(?!zq)\w+", "".join(pieces[n:end]), re.DOTALL):
        end += 1  # the word of a marker that is a word between two tags
    return "".join(pieces[n:end])


def _around_text(tokenizer: TokenizerWrapper, thinking: tuple[str, str]) -> tuple[str, ...]:
    """The markers that the template writes around the text of an answer, as Command R's does, and
    not at the end of a prompt. Empty if answers have headers."""
    if has_headers(tokenizer) or not tokenizer.has_chat_template:
        return ()
    try:
        answer = _render_answer(tokenizer, content=CONTENT)
        prompt = _render_prompt(tokenizer)
    except Exception:  # a template raises whatever its author chose
        return ()
    prompt = prompt.rpartition(CONTENT)[2]
    before, _, after = answer.partition(CONTENT)
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
        if all(template_reads(tokenizer, marker) for marker in pair):
            return pair
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    answers: list[Json] = [{"content": CONTENT}, {"tool_calls": _as_turn([(NAME, ARGUMENTS)])}]
    for answer in [] if tokenizer.response_transitions else answers:
        try:
            text = _render_answer(tokenizer, reasoning_content=THOUGHT, **answer)
            silent = _render_answer(tokenizer, content=CONTENT).partition(CONTENT)[0].rstrip()
        except Exception:  # a template raises whatever its author chose
            continue
        before, _, after = text.partition(THOUGHT)
        start = re.search(rf"{TAG}\Z", before.rstrip())
        end = re.match(rf"\s*({TAG})", after)
        always = start and silent.endswith(start[0])  # also before text without reasoning
        if start and end and not always and (CONTENT in after or NAME in after):
            return start[0], end[1]
    if pairs or not tokenizer.has_chat_template:
        return next(iter(pairs), ("", ""))
    try:  # what the prompt opens, of templates that write no reasoning
        prompt = _render_prompt(tokenizer)
    except Exception:  # a template raises whatever its author chose
        return "", ""
    match = re.search(r"<(think\w*|thought)>\s*\Z", prompt)
    return (f"<{match[1]}>", f"</{match[1]}>") if match else ("", "")
