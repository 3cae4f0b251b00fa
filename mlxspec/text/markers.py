"""The states of an answer, and the markers that lead from one to another.

Rule: they are those of the model's own format, and of what models write in its place.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import FINAL, MESSAGE_END, NEXT_MESSAGE, ChatFormat, format_of, is_harmony
from mlxspec.text.layouts import MARKER, TAGS
from mlxspec.text.patterns import END, any_of, plain_text

Edges = dict[str, dict[str, str]]  # state -> marker -> the next state

# The states of an answer. `NORMAL`, `REASONING` and `CALL` are mlx-lm's names.
NORMAL = "normal"  # the beginning of the content, which may be a call in JSON without tags
CONTENT = "content"
REASONING = "reasoning"
CALL = "tool"
BARE_CALL = "call without the markers of its section"
REASONING_CALL = "call inside the reasoning"

HARMONY: Mapping[str, Sequence[tuple[str, str]]] = {
    "header": [
        ("<|channel|>analysis", "header of reasoning"),
        ("to=", CALL),
        ("<|message|>", NORMAL),
    ],
    "header of reasoning": [("to=", CALL), ("<|message|>", REASONING)],
    # The model may leave out the end, and a text may mention it: alone it is text.
    **{
        state: [(MESSAGE_END + NEXT_MESSAGE, "header"), (NEXT_MESSAGE, "header"), (FINAL, NORMAL)]
        for state in (REASONING, NORMAL, CALL)
    },
}

TAG_BEGINS = r"[<\[]"
CONTENT_STATES = (NORMAL, CONTENT)
CALL_STATES = (CALL, BARE_CALL, REASONING_CALL)
REASONING_STATES = (REASONING, REASONING_CALL)


@lru_cache
def call_edges(form: ChatFormat) -> re.Pattern[str]:
    """The markers at the two ends of a text of calls."""
    starts = any_of(layout.start_marker for layout in form.layouts if layout.start_marker)
    ends = any_of(layout.end_marker for layout in form.layouts if layout.end_marker)
    return re.compile(rf"\A\s*(?:{starts})|(?:{ends})\s*\Z")


@lru_cache(64)
def marker_patterns(
    tokenizer: TokenizerWrapper,
    calls: bool,
    constrained: bool,
) -> dict[str, re.Pattern[str]]:
    """For each state the pattern of its markers, or of the beginning of one at a text's end, with
    white space around."""
    edges = transitions(tokenizer, calls, constrained)
    return {
        state: re.compile(rf"(?<!\s)\s*+(?:{any_of(markers, END)}{END})\s*+")
        for state, markers in edges.items()
    }


@lru_cache(64)
def plain_patterns(
    tokenizer: TokenizerWrapper,
    calls: bool,
    constrained: bool,
) -> dict[str, re.Pattern[str]]:
    """For each state the pattern of text in which no marker begins, nor white space before one."""
    edges = transitions(tokenizer, calls, constrained)
    return {state: plain_text(marker[0] for marker in markers) for state, markers in edges.items()}


@lru_cache(64)
def transitions(tokenizer: TokenizerWrapper, calls: bool, constrained: bool) -> Edges:
    """The markers that lead from each state to another: the format's, and if answers have headers
    mlx-lm's or Harmony's. With `calls` also those of calls, and those that models write instead."""
    form = format_of(tokenizer)
    headers = HARMONY if is_harmony(tokenizer) else tokenizer.response_transitions
    edges: Edges = {state: {} for state in (CONTENT, REASONING, *CALL_STATES)}
    content, reasoning = edges[CONTENT], edges[REASONING]
    words = {}  # these open calls only where the content begins
    if form.think_start:
        content |= {form.think_end: NORMAL, form.think_start: REASONING}
        reasoning[form.think_end] = NORMAL
    headed = any(state == CALL for markers in headers.values() for _, state in markers)
    for layout in form.layouts if calls else ():
        start, end = layout.start_marker, layout.end_marker
        if end:
            edges[CALL][end], edges[REASONING_CALL][end] = CONTENT, REASONING
            content[end] = NORMAL  # of a call without its start
        if start and not re.match(TAG_BEGINS, start):
            words[start] = CALL
        elif start and not headed:
            content[start] = edges[CALL][start] = CALL  # again: an end was left out
            if form.think_start and not constrained:
                reasoning[start] = edges[REASONING_CALL][start] = REASONING_CALL
                edges[REASONING_CALL][form.think_end] = NORMAL
        inner, closes = MARKER.match(layout.name_opens), re.search(TAGS, layout.call_closes)
        if inner and closes and re.match(TAG_BEGINS, inner[0]) and not headed:
            if not any(marker.startswith(inner[0]) for marker in (*content, start)):
                content[inner[0]] = BARE_CALL
            edges[BARE_CALL][closes[0]] = CONTENT
    for marker in (*(tokenizer.structural_markers or ()), *form.text_markers):
        content[marker] = NORMAL
    edges[NORMAL] = content | words
    for state, markers in headers.items():
        edges.setdefault(state, {}).update(markers)
        if state == NORMAL:
            content.update(markers)
    return edges
