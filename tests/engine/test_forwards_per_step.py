"""All that decodes in a step is one forward, in every layout, whatever its context and its draft;
and the next step is submitted before that one is read."""

import random
from typing import Any

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.model.batch import bucket
from mlxspec.sequences import Entry
from mlxspec.types import Request
from tests.support import tiny
from tests.support.drafters import KnownAnswers, attach
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import only

LENGTHS = (9, 17, 40, 75, 130, 260)  # of prompts: contexts in five buckets
N = 48
LAYOUTS = [
    ("qwen3", "rows"),
    ("qwen3", "gather"),
    ("deepseek_v3", "gather"),
    ("gemma3_text", "gather"),
    ("qwen3", "rect"),
    ("qwen3_5", "rect"),
    ("nemotron_h", "rect"),
    ("lfm2", "rect"),
]


def requests() -> list[Request]:
    rng = random.Random(1)
    prompts = [[rng.randrange(tiny.VOCAB) for _ in range(n)] for n in LENGTHS]
    return [
        tiny.request(f"r{i}", prompt, N, temperature=0.8, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def answers(kind: str) -> dict[tuple[tuple[int, ...], int], list[int]]:
    plain = tiny.Plain(tiny.model(kind))
    found = {}
    for r in requests():
        found[r.prompt, 0] = plain(r.prompt, N, 0.8, r.sampling.seed)
    return found


def counted(e: Engine) -> tuple[list[list[Entry]], list[int]]:
    """The plan of each step from now on, and how often it called the model."""
    model, forward = e.runner.model, e.runner.forward
    plans: list[list[Entry]] = []
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[-1] += 1
        return model(*args, **kwargs)

    def step(plan: list[Entry], previous: Any) -> Any:
        plans.append(list(plan))
        calls.append(0)
        return forward(plan, previous)

    e.runner.model, e.runner.forward = call, step  # type: ignore[assignment, method-assign]
    return plans, calls


@pytest.mark.parametrize("kind, layout", only(LAYOUTS, 6))
def test_one_forward_for_all_that_decodes(kind: str, layout: Any) -> None:
    told = answers(kind)
    e = tiny.engine(
        tiny.model(kind), layout=layout, proposer=NoisyOracle(told), blocks=128, budget=600
    )
    plans, calls = counted(e)
    for r in requests():
        e.add(r)
    outputs = tiny.run(e)
    for r in requests():
        assert tiny.tokens(outputs, r.id) == told[r.prompt, 0], r.id
    ragged = 0
    for plan, n in zip(plans, calls, strict=True):
        chunks = [e for e in plan if e.count > 1]
        if not chunks:
            assert n == 1, [(e.start, e.rows) for e in plan]
            ragged += len(plan) > 2 and len({e.rows for e in plan}) > 1
        elif layout != "rows":
            assert n <= 1 + len(chunks)
    assert ragged > 3, "no step had drafts of different lengths"


@pytest.mark.parametrize("kind, layout", only(LAYOUTS[1:], 0))
def test_steps_with_drafts_are_submitted_before_the_last_is_read(kind: str, layout: Any) -> None:
    told = answers(kind)
    e = tiny.engine(tiny.model(kind), layout=layout, blocks=128, budget=600)
    attach(e, "model", KnownAnswers(lambda r, i: told[r.prompt, i], 8))
    events: list[tuple[str, int]] = []
    e.trace = lambda event, step: events.append((event, step))
    for r in requests():
        e.add(r)
    outputs = tiny.run(e)
    for r in requests():
        assert tiny.tokens(outputs, r.id) == told[r.prompt, 0], r.id
    drafted, kept = e.spec_metrics.drafted.total(), e.spec_metrics.accepted.total()
    assert 0 < kept < drafted
    submitted = [step for event, step in events if event == "submit"]
    ahead = [
        n for n in submitted[:-1] if events.index(("submit", n + 1)) < events.index(("read", n))
    ]
    prompts = 2  # steps in which nothing is sampled are read at once
    assert len(ahead) >= len(submitted) - prompts - 2


def test_what_a_draft_in_flight_accepts_is_the_state_of_the_next_step() -> None:
    """A stop inside an accepted draft: the state that is kept is that before the stop."""
    told = answers("qwen3_5")
    r = requests()[3]
    answer = told[r.prompt, 0]
    stop = next(t for i, t in enumerate(answer) if i > 5 and t not in answer[:i])
    end = answer.index(stop)
    e = tiny.engine(tiny.model("qwen3_5"), layout="rect", blocks=128)
    attach(e, "model", KnownAnswers(lambda r, i: answer, 8))
    e.add(tiny.request("r3", r.prompt, N, temperature=0.8, seed=3, stop_tokens=frozenset({stop})))
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "r3") == answer[: end + 1]
    turn = tiny.request("turn", [*r.prompt, *answer[: end + 1], 5, 6], 8)
    e.proposer = NoisyOracle({(turn.prompt, 0): tiny.Plain(tiny.model("qwen3_5"))(turn.prompt, 8)})
    e.add(turn)
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "turn") == tiny.Plain(tiny.model("qwen3_5"))(turn.prompt, 8)
    assert outputs[-1].cached == len(r.prompt) + end


def test_one_long_context_does_not_pad_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the gather layout, where K/V are copied: then similar contexts share a forward."""
    told = answers("deepseek_v3")
    monkeypatch.setattr("mlxspec.model.runner.MAX_PADDED_SLOTS", 400)
    e = tiny.engine(tiny.model("deepseek_v3"), layout="gather", blocks=128, budget=600)
    e.proposer = NoisyOracle(told)
    plans, calls = counted(e)
    for r in requests():
        e.add(r)
    outputs = tiny.run(e)
    assert all(tiny.tokens(outputs, r.id) == told[r.prompt, 0] for r in requests())
    split = 0
    for plan, n in zip(plans, calls, strict=True):
        if all(e.count == 1 for e in plan):
            padded = len(plan) * max(e.end for e in plan)
            contexts = {bucket(e, 8)[1] for e in plan}
            assert n == (len(contexts) if padded > 400 else 1)
            split += n > 1
    assert split > 3
