"""Thinking budgets: how many tokens of reasoning may come, and what may follow them."""

import json
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import encode, load_tokenizer
from mlxspec.text.formats import format_of
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.text.structured.thinking import ThinkingBudget
from tests.support.examples import examples
from tests.support.parameter_rows import in_turn
from tests.text.test_grammar import VOCAB, ids
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

WORDS = {1: "<", 2: "think", 3: ">", 4: "\n", 5: "yes", 6: "</", 7: "think>"}
# A model whose markers take several tokens.
LONG: Any = SimpleNamespace(
    think_start="<think>", think_end_tokens=(6, 7), decode=lambda ids: WORDS[ids[0]]
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("agent")
    return load_tokenizer(save_tokenizer(path, template=AGENT, extra=THINK + CALLS))


def allowed(budget: ThinkingBudget) -> list[int]:
    """The tokens that may come next, of WORDS; all of them where there is no mask."""
    [mask] = budget.masks([])
    return ids(mask) if mask else [*WORDS]


def said(budget: ThinkingBudget, tokens: list[int]) -> list[int]:
    """What comes where `tokens` are wanted: in their places what is forced."""
    made = []
    for token in tokens:
        ways = allowed(budget)
        made.append(token if token in ways else ways[0])
        budget.take(made[-1:])
    return made


@pytest.mark.parametrize(
    ("most", "thinking", "wanted", "comes"),
    [
        (0, True, [5, 5, 5, 5], [6, 7, 5, 5]),
        (2, True, [5, 5, 5, 5, 5], [5, 5, 6, 7, 5]),
        (2, True, [6, 7, 5, 5, 5], [6, 7, 5, 5, 5]),  # it ends in time
        (2, True, [5, 5, 6, 7, 5], [5, 5, 6, 7, 5]),
        (1, None, [1, 2, 3, 5, 5, 5, 5], [1, 2, 3, 5, 6, 7, 5]),
        (0, None, [4, 4, 1, 2, 3, 5, 5, 5], [4, 4, 1, 2, 3, 6, 7, 5]),  # behind white space
        (0, None, [5, 1, 2, 3, 5, 5], [5, 1, 2, 3, 5, 5]),  # the answer has begun
        (0, None, [1, 2, 5, 1, 2, 3, 5], [1, 2, 5, 1, 2, 3, 5]),  # this is no marker
        (0, False, [1, 2, 3, 5, 5, 5], [1, 2, 3, 5, 5, 5]),
    ],
)
def test_what_is_forced(
    most: int, thinking: bool | None, wanted: list[int], comes: list[int]
) -> None:
    assert said(ThinkingBudget(LONG, LONG.decode, most, thinking), wanted) == comes


tokens = st.lists(st.sampled_from([*WORDS, 5, 5, 5, 5, 5]), max_size=12)


@settings(max_examples=examples(300))
@given(tokens, tokens, st.integers(0, 9), st.sampled_from([True, False, None]))
def test_masks_of_a_draft_are_those_of_its_tokens(
    before: list[int], draft: list[int], most: int, thinking: bool | None
) -> None:
    """One after the other, up to the first that may not come, and asking changes nothing. What may
    not be restricted is not."""
    one, other = (ThinkingBudget(LONG, LONG.decode, most, thinking) for _ in range(2))
    before = said(one, before)
    said(other, before)
    forced = one.forced(9)
    masks, again = one.masks(draft), one.masks(draft)
    assert masks == again and len(masks) <= len(draft) + 1
    if not one.restricts(len(draft)):
        assert masks == [b"" for _ in range(len(draft) + 1)]
    for i, mask in enumerate(masks):
        assert [mask] == other.masks([])
        if i < len(forced):
            assert ids(mask) == [forced[i]]
        if i == len(masks) - 1 or draft[i] not in allowed(other):
            break
        other.take([draft[i]])


@pytest.mark.parametrize(
    "seed, most, thinking", in_turn([0, 1, 2, 3], [0, 3], [True, None], every=3)
)
def test_a_grammar_applies_after_the_reasoning(
    agent: Any, thinking: bool | None, most: int, seed: int
) -> None:
    """Drawn evenly from what may come, the reasoning opened and never ended by the model."""
    grammars, rng = Grammars(agent, VOCAB), Random(seed)
    schema = {"enum": ["hello", {"a": [1, 2]}]}
    make = grammars.compile(grammars.rules([json_rule(schema, "f")]), thinking, "f").result()
    budget = ThinkingBudget(format_of(agent), agent.decode, most, thinking, make())
    opener, [end] = encode(agent, "<think>", special=False), agent.think_end_tokens
    made = [] if thinking else [*opener]
    budget.take(made)
    for _ in range(60):
        [mask] = budget.masks([])
        ways = ids(mask)
        forced = budget.forced(5)
        assert forced == [] or set(forced[:1]) <= set(ways)
        if ends := agent.eos_token_ids & set(ways):
            made.append(ends.pop())
            break
        made.append(rng.choice([way for way in ways if way != end] or ways))
        budget.take(made[-1:])
    at = made.index(end)
    assert at == most + (0 if thinking else len(opener))
    assert json.loads(agent.decode(made[at + 1 : -1])) in schema["enum"]


def test_a_natural_answer_is_not_touched(agent: Any) -> None:
    text = "<think>\nso\n</think>\n\nYes, <think> opens it."
    budget = ThinkingBudget(
        format_of(agent), agent.decode, len(encode(agent, "\nso\n", special=False)), None
    )
    for token in encode(agent, text, special=False):
        [mask] = budget.masks([])
        assert not mask or token in ids(mask)
        budget.take([token])
    assert not budget.restricts(1 << 20)
