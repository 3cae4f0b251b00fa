"""Grammars and thinking budgets in a batch, with every drafter: each token is the best, or the drawn
one, of those allowed."""

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.engine.engine import Engine
from mlxspec.kernels.reference import gumbel
from mlxspec.model.sampler import seed32
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import MAX_DEPTH, Request
from tests.support import tiny
from tests.support.drafters import KINDS, attach, copies, costs, like
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal, fewer
from tests.support.token_grammar import END, MOST, Maze, allowed, budget
from tests.test_lossless import BLOCK, drafted, prompts

N = 21
DRAFTERS = ["plain", "liar", *KINDS]


def after(said: list[int]) -> set[int]:
    """What may follow these tokens of an answer under the budget."""
    over = len(said) - MOST
    if over < 0 or END[-1] in said:
        return {*range(tiny.VOCAB)}
    return {END[over]}


RULES: dict[Any, Callable[[list[int]], set[int]]] = {Maze: allowed, budget: after}


@functools.cache
def model(kind: str):
    return tiny.model(kind)


@functools.cache
def truth(
    kind: str, prompt: tuple[int, ...], temperature: float, seed: int, index: int, grammar: Any
) -> list[int]:
    """Plain decoding by mlx-lm, over the tokens that the grammar allows."""
    if grammar is None:
        return tiny.Plain(model(kind))(prompt, N, temperature, seed, index)
    cache, x, out = make_prompt_cache(model(kind)), mx.array([list(prompt)]), []
    for position in range(len(prompt), len(prompt) + N):
        logits = model(kind)(x, cache=cache)[:, -1].astype(mx.float32)
        if temperature:
            key = mx.array([seed32(seed, index)], mx.uint32)
            noise = gumbel(key, mx.array([position], mx.uint32), logits.shape[-1])
            logits = logits / temperature + noise
        ways = sorted(RULES[grammar](out))
        out.append(ways[int(mx.argmax(logits[0, mx.array(ways)]).item())])
        x = mx.array([[out[-1]]])
    return out


def want(kind: str, r: Request, index: int = 0) -> list[int]:
    s = r.sampling
    return truth(kind, r.prompt, s.temperature, s.seed, index, r.grammar)


def requests(temperature: float, choices: int = 1, grammar: Any = Maze) -> dict[str, Request]:
    """Every other one under the grammar."""
    return {
        name: replace(
            tiny.request(name, p, N, temperature=temperature, seed=i, choices=choices),
            grammar=grammar if i % 2 == 0 else None,
        )
        for i, (name, p) in enumerate(prompts().items())
    }


def equip(e: Engine, name: str, kind: str, all_of: dict[str, Request]) -> None:
    told = {(r.prompt, i): want(kind, r, i) for r in all_of.values() for i in range(r.n)}
    if name == "liar":
        e.proposer = NoisyOracle(told)
    elif name != "plain":
        chain = attach(e, name, like(None, kind, 0.02) if name in ("model", "chain") else None)
        for answer in told.values():
            copies(chain).corpus.add(
                (), [(t + (i % 7 == 5)) % tiny.VOCAB for i, t in enumerate(answer)]
            )


@pytest.mark.parametrize(
    "name, rows, temperature", diagonal(DRAFTERS, [64, 1], [0.8, 0.0], every=2)
)
def test_batch(name: str, rows: int, temperature: float) -> None:
    all_of = requests(temperature)
    e = tiny.engine(model("qwen3"), block=BLOCK, budget=rows)
    equip(e, name, "qwen3", all_of)
    for r in all_of.values():
        e.add(r)
    outputs = tiny.run(e)
    assert {n: tiny.tokens(outputs, n) for n in all_of} == {
        n: want("qwen3", r) for n, r in all_of.items()
    }
    if name in ("liar", "suffix", "chain"):
        assert drafted(e, name)
    if name not in ("plain", "liar"):
        tried, kept = e.spec_metrics.drafted["grammar", 1], e.spec_metrics.accepted["grammar", 1]
        assert tried == kept > 0, "what is forced is drafted, and kept"


@pytest.mark.parametrize(
    "name, rows, temperature", fewer(diagonal(DRAFTERS, [64, 1], [0.0, 0.8], every=2), 3, 1)
)
def test_a_thinking_budget(name: str, rows: int, temperature: float) -> None:
    """Twice: the second time every prompt is cached, and what was said can be copied."""
    all_of = requests(temperature, grammar=budget)
    e = tiny.engine(model("qwen3"), block=BLOCK, budget=rows)
    equip(e, name, "qwen3", all_of)
    for _ in range(2):
        for r in all_of.values():
            e.add(r)
        outputs = tiny.run(e)
        assert {n: tiny.tokens(outputs, n) for n in all_of} == {
            n: want("qwen3", r) for n, r in all_of.items()
        }
    assert outputs[-1].cached > 0
    if name in ("liar", "suffix", "chain"):
        assert drafted(e, name)


def test_the_end_of_the_reasoning_is_drafted() -> None:
    e = tiny.engine(model("qwen3"), block=BLOCK)
    attach(e, "lookup")
    e.add(replace(tiny.request("r", range(5), N), grammar=budget))
    answer = tiny.tokens(tiny.run(e), "r")
    assert answer[MOST : MOST + len(END)] == [*END]
    tried, kept = e.spec_metrics.drafted, e.spec_metrics.accepted
    assert [kept["grammar", i] for i in (1, 2)] == [tried["grammar", i] for i in (1, 2)] == [1, 1]


def test_steps_overlap_until_the_end_of_the_reasoning_is_near() -> None:
    most, seen = 2 * MAX_DEPTH, list[tuple[str, int]]()
    e = tiny.engine(model("llama"), trace=lambda event, step: seen.append((event, step)))
    r = tiny.request("r", range(5), 2 * most)
    e.add(replace(r, grammar=lambda: budget(most)))
    assert END[-1] not in tiny.tokens(tiny.run(e), "r")[:most]
    alone = {step for (a, step), b in pairwise(seen) if a == "submit" and b == ("read", step)}
    assert alone == {*range(most - MAX_DEPTH + 1, most + len(END) + 1)}


@pytest.mark.parametrize(
    "kind, layout, lone, grammar",
    diagonal([("llama", "gather", False), ("mamba2", "solo", True)], [Maze, budget]),
)
def test_other_layouts(kind: str, layout: str, lone: bool, grammar: Any) -> None:
    all_of = requests(0.8, grammar=grammar)
    e = tiny.engine(model(kind), layout=layout, lone=lone, block=BLOCK)
    for r in all_of.values():
        e.add(r)
    outputs = tiny.run(e)
    assert {n: tiny.tokens(outputs, n) for n in all_of} == {
        n: want(kind, r) for n, r in all_of.items()
    }


@pytest.mark.parametrize("name, grammar", fewer(diagonal(["plain", "chain"], [Maze, budget]), 2, 1))
def test_preemption_and_choices(name: str, grammar: Any) -> None:
    all_of = requests(0.8, choices=2, grammar=grammar)
    e = tiny.engine(model("llama"), block=BLOCK, blocks=16)
    equip(e, name, "llama", all_of)
    tiny.admit_blindly(e.scheduler)
    for r in all_of.values():
        e.add(r)
    outputs = tiny.run(e)
    assert e.scheduler.preemptions > 0
    for n, r in all_of.items():
        assert [tiny.tokens(outputs, n, i) for i in range(2)] == [
            want("llama", r, i) for i in range(2)
        ]


@pytest.mark.parametrize("name, breaks", diagonal(["plain", "lookup", "chain"], [0, 1, 4, 9]))
def test_a_grammar_that_fails_ends_its_own_choice(name: str, breaks: int) -> None:
    all_of = requests(0.0)
    bad = replace(all_of["long"], grammar=lambda: Maze(breaks))
    e = tiny.engine(model("llama"), block=BLOCK, budget=16)
    equip(e, name, "llama", all_of)
    for r in {**all_of, "long": bad}.values():
        e.add(r)
    outputs = tiny.run(e)
    last = [o for o in outputs if o.request == "long"][-1]
    assert last.finish == "error" and "no way out" in last.error
    got = tiny.tokens(outputs, "long")
    assert len(got) >= breaks and got == want("llama", all_of["long"])[: len(got)]
    for n, r in all_of.items():
        assert n == "long" or tiny.tokens(outputs, n) == want("llama", r)
    assert not e.busy and e.scheduler.pool.used == 0


def test_without_a_grammar_steps_still_overlap() -> None:
    """And with one, a step waits for the tokens of the step before."""
    for grammar in (None, Maze):
        seen: list[tuple[str, int]] = []
        e = tiny.engine(
            model("llama"), trace=lambda event, step, seen=seen: seen.append((event, step))
        )
        e.add(replace(tiny.request("r", range(5), N), grammar=grammar))
        tiny.run(e)
        overlaps = sum(a[0] == b[0] == "submit" for a, b in pairwise(seen))
        assert (overlaps > 0) == (grammar is None)


def test_a_prompt_that_is_read_beside_lets_steps_overlap() -> None:
    """Nothing is drafted for it yet, however often it repeats itself."""
    seen: list[tuple[str, int]] = []
    e = tiny.engine(model("llama"), budget=8, trace=lambda event, step: seen.append((event, step)))
    e.proposer = Proposer(costs(), [NgramDrafter()])
    e.add(tiny.request("decodes", range(5), 200, temperature=1.0, seed=1))
    e.add(tiny.request("read", [1, 2, 3, 4] * 40, 40))
    for _ in range(20):
        e.step()
    reads = [step for event, step in seen if event == "read"]
    overlap = [seen.index(("submit", n + 1)) < seen.index(("read", n)) for n in reads]
    assert sum(overlap) > 15
