"""A trained head under everything that the engine has: its drafts are those of the tokens before
them, wherever these came from. The tokens themselves: tests/test_lossless.py."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Output
from tests.support import disk_cache, tiny
from tests.support.drafters import attach_head, costs
from tests.support.engine_with_head import (
    ATTENTION_ALONE,
    BLOCK,
    LAYOUTS,
    OWN,
    SOME,
    K,
    ask,
    counted,
    head_of,
    loud,
    some,
    start,
)
from tests.support.expected_drafts import FEW, check, few, recorded
from tests.support.parameter_rows import chosen, fewer, in_turn
from tests.support.token_grammar import Maze


@pytest.mark.parametrize(
    "kind, layout, temperature",
    chosen((LAYOUTS, [0.0, 0.8]), lambda places: places == (3, 1)),
)
def test_drafts_of_eight_are_those_of_each_alone(
    kind: str, layout: Any, temperature: float
) -> None:
    """Prompts in several chunks, late arrivals among them."""
    e, drafted = start(kind, layout)
    asked = [few(f"r{i}", some(3 + 7 * i, i), temperature=temperature, seed=i) for i in range(8)]
    late = {2: asked[3], 5: asked[6], 9: asked[7]}
    for r in asked:
        if r not in late.values():
            e.add(r)
    tiny.run(e, lambda i: e.add(late[i]) if i in late else None, last=9)
    assert check(kind, drafted) > 50
    tried, kept = e.spec_metrics.drafted.total(), e.spec_metrics.accepted.total()
    assert tried / 20 < kept < tried / 2, "some are right, some wrong"


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
def test_a_turn_that_continues_an_answer(kind: str, layout: Any) -> None:
    """What is cached ends at each place around the border of a block; then the answer of another,
    that has a token more there, is asked for again."""
    e, drafted = start(kind, layout)
    for cached_tokens in (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 4):
        length = cached_tokens - 5
        prompt = some(length, length)
        answer = tiny.tokens(ask(e, few("first", prompt, 6)), "first")
        told = [*prompt, *answer]
        outputs = ask(e, few("turn", [*told, 1, 2], 8), few("other", [*told[:-3], 5, 6], 8))
        cached = {o.request: o.cached for o in outputs}
        assert cached["turn"] == len(told) - 1 - e.scheduler.kv.recompute_last
        again = ask(e, few("turn", [*told, 1, 2, 3], 5), few("other", [*told[:-3], 5, 6, 7], 5))
        assert {o.request: o.cached for o in again}["turn"] > cached["turn"]
    assert check(kind, drafted) > 35


@pytest.mark.parametrize("kind, layout", SOME)
def test_the_same_prompt_again(kind: str, layout: Any) -> None:
    e, drafted = start(kind, layout)
    for length in (4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2, 4 * BLOCK + 5):
        prompt = some(length, length)
        ask(e, few("first", prompt, 4))
        again = ask(e, few("again", prompt, 4))
        assert again[-1].cached >= (length - 2) // BLOCK * BLOCK
    assert check(kind, drafted) >= 10


@pytest.mark.parametrize(
    "kind, layout, length", in_turn(LAYOUTS, [2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 5], every=12)
)
def test_choices(kind: str, layout: Any, length: int) -> None:
    e, drafted = start(kind, layout)
    r = few("r", some(length), 12, temperature=0.8, choices=4)
    outputs = ask(e, r)
    told = tiny.tokens(outputs, "r", 3)
    ask(e, few("turn", [*r.prompt, *told, 1, 2], 12))
    assert check(kind, drafted) > 12
    assert {d.index for d in drafted} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
def test_preempted_sequences_come_back(kind: str, layout: Any) -> None:
    """They push each other out, with drafts in flight too; then each is asked to go on."""
    e, drafted = start(kind, layout, blocks=12)
    tiny.admit_blindly(e.scheduler)
    asked = [few(f"r{i}", some(9 + 5 * i, i), 24) for i in range(4)]
    outputs = ask(e, *asked)
    assert e.scheduler.preemptions > 1
    for r in asked:
        ask(e, few("turn", [*r.prompt, *tiny.tokens(outputs, r.id), 1, 2], 6))
    assert check(kind, drafted) > 40


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
def test_sequences_that_end_while_their_next_step_is_in_flight(kind: str, layout: Any) -> None:
    """At a stop, at their last token, by an abort; others take their blocks, or continue them."""
    for steps in (3, 4, 7):
        e, drafted = start(kind, layout, depth=K if steps % 2 else 0, blocks=16)
        prompts = [some(9 + 3 * i, i) for i in range(3)]
        e.add(few("stops", prompts[0], 30, stop_tokens=frozenset({FEW[0]})))
        e.add(few("aborted", prompts[1], 30))
        e.add(few("ends", prompts[2], 7))
        waiting = [few(f"w{i}", [*prompts[i], *FEW, *some(9, 9)], 9) for i in range(3)]
        for i in range(20):
            if i == steps:
                e.abort("aborted")
                for r in waiting:
                    e.add(r)
            e.step()
        tiny.run(e)
        assert head_of(e)
        assert check(kind, drafted) > 10


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
@pytest.mark.parametrize("parked", [False, True])
def test_answers_that_run_can_be_continued(kind: str, layout: Any, parked: bool) -> None:
    """By another request, which takes the blocks that are full, before the first one is cut off."""
    e, drafted = start(kind, layout, parked=parked)
    said: list[int] = []
    prompt = some(BLOCK)
    e.add(few("long", prompt, 60))
    while len(said) < 3 * BLOCK + 3:
        said += tiny.tokens(e.step(), "long")
    e.add(few("fork", [*prompt, *said, 1, 2, 3], 12))
    outputs = e.step()
    e.abort("long")
    loud(e)
    outputs += tiny.run(e)
    assert any(o.cached >= 3 * BLOCK for o in outputs if o.request == "fork")
    assert check(kind, drafted) > 2 and "fork" in {d.request.id for d in drafted}


TOLD = {("qwen3", 11), ("llama", 14)}  # some that found faults once


@pytest.mark.parametrize(
    "kind, layout, seed",
    [
        pytest.param(kind, layout, i, marks=[] if (kind, i) in TOLD else [pytest.mark.slow])
        for kind, layout in LAYOUTS
        for i in range(24)
    ],
)
def test_whatever_happens(kind: str, layout: Any, seed: int) -> None:
    """Requests that continue what others said, stops, choices, aborts, a pool that is too small,
    and a head that drafts now and then."""
    rng = random.Random(seed)
    e, drafted = start(
        kind, layout, parked=True, blocks=rng.choice((12, 16, 24)), budget=rng.choice((3, 16))
    )
    tiny.admit_blindly(e.scheduler)
    told = [some(5 * BLOCK, seed)]
    for i in range(60):
        e.proposer.fixed_depth = rng.choice((0, 0, 1, K))  # type: ignore[attr-defined]
        live = [*e.scheduler.running, *e.scheduler.waiting]
        if rng.random() < 0.3 and len(live) < 6:
            prompt = [*rng.choice(told)[: rng.randint(1, 44)], *some(rng.randint(1, 4), i)]
            stops = frozenset(FEW[: rng.randint(0, 1)])
            r = few(f"r{i}", prompt, rng.randint(2, 24), seed=i, stop_tokens=stops)
            e.add(replace(r, n=rng.choice((1, 1, 2))))
        elif live and rng.random() < 0.1:
            e.abort(rng.choice(live).request.id)
        e.step()
        told += [list(seq.tokens) for seq in e.scheduler.running if seq.generated]
    loud(e)
    ask(e, few("last", [*told[0], *some(3)], 12))
    assert check(kind, drafted) > 3 and "last" in {d.request.id for d in drafted}


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
def test_from_disk(kind: str, layout: Any, tmp_path: Path) -> None:
    """Another process goes on with an answer, for which nothing was drafted as yet; the longest
    prompt ends with a chunk of one token."""
    answer: list[int] = []
    for quietly in (True, False):
        prompts = [some(n, n) for n in (5 * BLOCK + 3, 6 * BLOCK, 6 * BLOCK + 1)]
        e, drafted = start(kind, layout, parked=quietly, budget=6 * BLOCK - 1)
        disk = disk_cache.attach(e, tmp_path)
        for prompt in prompts:
            e.add(few("first", prompt, 25))
            outputs = disk_cache.finish(e, disk)
            e.add(few("turn", [*prompt, *tiny.tokens(outputs, "first"), 5, 6], 8))
            outputs += disk_cache.finish(e, disk)
            answer += tiny.tokens(outputs, "first")
            assert quietly or outputs[0].cached >= 4 * BLOCK
        assert disk.close(5) and head_of(e)
        assert bool(drafted) != quietly
    half = len(answer) // 2
    assert answer[:half] == answer[half:] and disk.stats["disk_runs_found"] > 0
    assert check(kind, drafted) > 30


# ---- with all that a request may ask for


@pytest.mark.parametrize("kind, layout", fewer(SOME, 2, 1))
def test_requests_of_every_kind_share_a_batch(kind: str, layout: Any) -> None:
    """Grammars, penalties, log-probabilities, stops and choices, with a head and without: the same
    outputs."""
    prompts = [some(7 + 4 * i, i) for i in range(6)]
    asked = [
        replace(tiny.request("grammar", prompts[0], 18, temperature=0.8), grammar=Maze),
        few("penalties", prompts[1], 18, repetition_penalty=1.3, presence_penalty=0.5),
        few("logprobs", prompts[2], 18, temperature=0.8, logprobs=3),
        few("stops", prompts[3], 30, temperature=0.8, seed=4, stop_tokens=frozenset({FEW[1]})),
        few("choices", prompts[4], 18, temperature=0.8, choices=2),
        few("filtered", prompts[5], 18, temperature=0.8, top_k=5, min_p=0.05),
    ]
    found = []
    for with_head in (True, False):
        e = tiny.engine(tiny.model(kind), layout=layout, block=BLOCK, blocks=128, budget=16)
        own = OWN.get(kind, "mtp")
        drafted = recorded(e, attach_head(e, depth=3, kind=own)) if with_head else []
        outputs = ask(e, *asked)
        tokens = {(r.id, i): tiny.tokens(outputs, r.id, i) for r in asked for i in range(r.n)}
        ends = sorted((o.request, o.index, o.finish) for o in outputs if o.finish)
        found.append((tokens, ends, logprobs(outputs)))
        assert bool(drafted) == with_head
        if with_head:
            assert e.spec_metrics.accepted.total() > 0
            assert {d.request.id for d in drafted} >= {
                "penalties",
                "logprobs",
                "choices",
                "filtered",
            }
    (tokens, ends, told), (plain, plain_ends, plainly) = found
    assert tokens == plain and ends == plain_ends and ("stops", 0, "stop") in ends
    assert [token for token, _ in told] == [token for token, _ in plainly]
    assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(told, plainly, strict=True))


def logprobs(outputs: list[Output]) -> list[tuple[int, float]]:
    return [(each.token, each.logprob) for o in outputs for each in o.logprobs]


@pytest.mark.parametrize("kind, layout", ATTENTION_ALONE)
def test_beside_copies(kind: str, layout: Any) -> None:
    """Drafts that others made are in flight, and prompts end in steps of one row."""
    e, drafted = start(kind, layout, budget=5)
    head = head_of(e)
    prompts = [some(6 + 5 * i, i) for i in range(4)]
    asked = [few(f"r{i}", prompt, 30) for i, prompt in enumerate(prompts)]
    outputs = ask(e, *asked)
    e.reset()
    e.proposer = Proposer(costs(), [NgramDrafter(), head])
    drafted.clear()
    for i, r in enumerate(asked):
        answer = tiny.tokens(outputs, r.id)
        hint = [t if n % 5 else 5 for n, t in enumerate(answer)]
        e.add(replace(r, prediction=tuple(hint[: 10 + 5 * i])))
    again = tiny.run(e)
    assert all(tiny.tokens(again, r.id) == tiny.tokens(outputs, r.id) for r in asked)
    sources = {source for source, _ in e.spec_metrics.drafted}
    assert head.name in sources and len(sources) > 1
    assert check(kind, drafted) > 2


@pytest.mark.parametrize("kind, layout", fewer(SOME, 2))
def test_a_head_that_fails_is_left_behind(kind: str, layout: Any) -> None:
    """Half way, in a pass of a batch: all go on, and what begins later, too."""
    asked = [few(f"r{i}", some(5 + i, i), 20, temperature=0.8, seed=i) for i in range(4)]
    e, drafted = start(kind, layout)
    rows = counted(e)
    head = head_of(e).head
    module = head.module

    def fails(*args: Any) -> mx.array:
        assert len(rows) < 20, "broken"
        return module(*args)

    head.module = fails
    for r in asked[:3]:
        e.add(r)
    outputs = tiny.run(e)
    e.add(asked[3])
    outputs += tiny.run(e)
    found = {r.id: tiny.tokens(outputs, r.id) for r in asked}
    assert drafted and not e.proposer.drafters  # type: ignore[attr-defined]
    plain = tiny.engine(tiny.model(kind), layout=layout, block=BLOCK)
    outputs = ask(plain, *asked)
    assert found == {r.id: tiny.tokens(outputs, r.id) for r in asked}
