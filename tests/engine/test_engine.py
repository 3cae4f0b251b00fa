"""The loop's own promises: overlap, late stops, one pool in place, no leak."""

import random
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxspec.engine.budget import PrefillBudget
from mlxspec.model.batch import Forward
from mlxspec.model.runner import Layout
from mlxspec.types import NULL_BLOCK, Logprob, Sampling
from tests.support import tiny
from tests.support.noisy_oracle import NoisyOracle


@pytest.fixture(scope="module")
def qwen3():
    return tiny.model("qwen3")


def test_a_step_is_submitted_before_the_one_before_it_is_read(qwen3) -> None:
    events: list[tuple[str, int]] = []
    e = tiny.engine(qwen3, trace=lambda event, n: events.append((event, n)))
    e.add(tiny.request("a", [1, 2, 3], 10))
    tiny.run(e)
    order = {event: i for i, event in enumerate(events)}
    steps = max(n for _, n in events)
    assert steps == 10, "one step per token: nothing waits for a read"
    for n in range(1, steps):
        assert order["submit", n + 1] < order["read", n] < order["read", n + 1]


def test_a_drafter_that_needs_tokens_is_served_without_overlap(qwen3) -> None:
    plain = tiny.Plain(tiny.model("qwen3"))
    prompt = (1, 2, 3)
    liar = NoisyOracle({(prompt, 0): plain(prompt, 20)}, lies=0.0, most=5)
    events: list[tuple[str, int]] = []
    e = tiny.engine(qwen3, proposer=liar, trace=lambda event, n: events.append((event, n)))
    e.add(tiny.request("a", prompt, 20))
    out = tiny.run(e)
    assert tiny.tokens(out, "a") == plain(prompt, 20)
    assert out[-1].rounds < 20 and sum(e.spec_metrics.accepted.values()) == liar.kept > 0
    order = {event: i for i, event in enumerate(events)}
    assert all(order["read", n] < order["submit", n + 1] for n in range(1, e.counters["steps"]))


def test_a_stop_found_late_costs_one_row(qwen3) -> None:
    want = tiny.Plain(tiny.model("qwen3"))((4, 5), 12, 0.9, 3)
    stop = next(t for t in want[2:] if t not in want[:2])
    end = want.index(stop) + 1
    e = tiny.engine(qwen3)
    e.add(tiny.request("a", (4, 5), 12, temperature=0.9, seed=3, stop_tokens=frozenset({stop})))
    out = tiny.run(e)
    assert tiny.tokens(out, "a") == want[:end] and out[-1].finish == "stop"
    assert e.counters["steps"] == end + 1
    assert out[-1].rounds == end
    now = e.stats()
    assert (now.rounds, now.generated_tokens, now.drafts) == (end, end, ()), (
        "what was dropped counts"
    )


def steady(monkeypatch: pytest.MonkeyPatch) -> PrefillBudget:
    """A budget of 16 rows beside decodes and of 40 alone, which learns nothing."""
    monkeypatch.setattr(PrefillBudget, "learn", lambda *_: None)
    return PrefillBudget(largest=2048, coefficients=np.array([0.00516, 0.0129, 1e-12]))


def test_who_comes_during_a_long_prompt_is_in_the_next_step(
    qwen3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of prompts alone is read before the next is planned, and one that lets somebody begin
    to answer takes no more of the long prompt than fits beside answers."""
    events: list[tuple[str, int]] = []
    e = tiny.engine(qwen3, trace=lambda event, n: events.append((event, n)))
    e.scheduler.prefill_budget = steady(monkeypatch)
    e.add(tiny.request("long", range(150), 2))
    e.step()
    e.step()
    assert events == [("submit", 1), ("read", 1), ("submit", 2), ("read", 2)]
    e.add(tiny.request("short", range(200, 206), 2))
    e.step()
    step = e.in_flight
    assert step and {x.seq.request.id: x.count for x in step.plan} == {"short": 6, "long": 10}
    tiny.run(e)


def test_what_runs_is_told_before_its_first_token(qwen3) -> None:
    e = tiny.engine(qwen3, max_sequences=1, budget=8)
    for name in "ab":
        e.add(tiny.request(name, range(1, 41), 3))
    e.step()
    assert (e.stats().running_requests, e.stats().waiting) == ((("a", 0, 8),), 1)
    told: list[tuple[str, int, int]] = []
    tiny.run(e, each=lambda i: told.extend(e.stats().running_requests))
    read = [n for name, _, n in told if name == "a"]
    assert read[:5] == [8, 16, 24, 32, 40] and set(read[5:]) == {40}
    assert {(cached > 0, n) for name, cached, n in told if name == "b"} == {(True, 40)}
    assert e.stats().running_requests == ()


def test_the_end_of_an_answer_does_not_wait_for_a_long_step(
    qwen3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token is in flight while the next step is submitted, which may take a second on its
    own."""
    submitted: list[dict[str, int]] = []

    def trace(event: str, _: int) -> None:
        if event == "submit":
            submitted.append({x.seq.request.id: x.count for x in e.in_flight.plan})

    e = tiny.engine(qwen3, trace=trace)
    e.scheduler.prefill_budget = steady(monkeypatch)
    e.add(tiny.request("short", range(4), 3))
    e.add(tiny.request("long", range(100, 250), 2))
    while not any(o.finish for o in e.step()):
        pass
    assert "short" in submitted[-2] and submitted[-1] == {"long": 16}
    e.step()
    assert submitted[-1] == {"long": 40}


def growth(work) -> int:
    """Bytes that `work` takes at its peak beyond what MLX holds now."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    work()
    return mx.get_peak_memory() - before


class Through(nn.Module):
    """In the place of a norm or a rotation."""

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return x


class Late(nn.Module):
    """A norm that takes long."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.wide = inner, mx.zeros((4000, 4000))

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.zeros((4000,)) + x[0, 0, 0]
        for _ in range(4):  # hardly any memory, which would count as growth
            y = self.wide @ y
        return self.inner(x) + y[0]


def lagging(kind: str) -> Any:
    """A model at whose end the device still is when the next forward's first K and V are submitted:
    few operations lie before those, and MLX submits some 50 ahead of what runs."""
    model = tiny.model(kind, num_hidden_layers=8)
    first, last = model.layers[0], model.layers[-1]
    first.input_layernorm = Through()
    for name in ("rope", "q_norm", "k_norm"):
        if hasattr(first.self_attn, name):
            setattr(first.self_attn, name, Through())
    last.input_layernorm, model.model.norm = Late(last.input_layernorm), Late(model.model.norm)
    return model


@pytest.mark.parametrize(
    "kind, layout, lone",
    [
        ("qwen3", "rows", False),
        pytest.param("gemma2", "gather", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "rows", False, marks=pytest.mark.slow),
        pytest.param("llama", "gather", False, marks=pytest.mark.slow),
        pytest.param("qwen3:4", "rows", False, marks=pytest.mark.slow),
        pytest.param("llama:8", "gather", False, marks=pytest.mark.slow),
    ],
)
def test_each_row_reaches_the_pool_in_place(kind: str, layout: Layout, lone: bool) -> None:
    """No step may copy a pool, with ragged batches, whole and partial hits: memory beyond the first
    step stays far below one layer's keys."""
    bits = tiny.kv_bits(kind)
    e = tiny.engine(
        lagging(kind),
        layout=layout,
        lone=lone,
        block=32,
        blocks=4000,
        kv_bits=bits,
        whole=True,
    )
    e.add(tiny.request("warm", range(70), 8))
    tiny.run(e)
    layer = max(pool.nbytes for pages in e.runner.pages() for pool in pages.pools())

    def some() -> None:
        for i in range(4):
            e.add(tiny.request(f"r{i}", [*range(40 + 10 * i), 300 + i], 6, temperature=0.7))
        tiny.run(e)
        e.scheduler.prefill_budget.fixed = 48
        e.add(
            tiny.request("steps without samples", [(7 * i + 3) % tiny.VOCAB for i in range(220)], 2)
        )
        tiny.run(e)

    assert growth(some) < layer / 2
    # What a window of its own has passed goes first.
    assert e.counters["cached_tokens"] >= (70 if kind == "gpt_oss" else 40 + 50 + 60 + 70)


@pytest.mark.parametrize(
    "kind, layout",
    [("qwen3", "rows"), ("llama", "gather"), ("qwen3_next", "rect"), ("deepseek_v32", "gather")],
)
def test_no_step_leaves_a_graph_behind(kind: str, layout: Layout) -> None:
    """Neither one without samples nor what the samples do not need: it would grow, and hold its
    inputs."""
    e = tiny.engine(tiny.model(kind), layout=layout, budget=16)
    e.add(tiny.request("a", [7 * i % 64 for i in range(50)], 3))

    def look(_: int) -> None:
        assert tiny.settled(e)

    tiny.run(e, look)
    look(0)
    assert e.counters["steps"] >= 6


def test_a_whole_hit_leaves_the_shared_blocks_alone(qwen3) -> None:
    """The one row that a whole hit computes writes to a copy of the last block: in another batch the
    same row may get other last bits, and others are reading."""
    e = tiny.engine(qwen3, block=8)
    e.add(tiny.request("r", range(24), 1))
    tiny.run(e)
    known = set(e.scheduler.pool.keys)
    e.add(tiny.request("r", range(24), 3))
    written = []
    for _ in range(3):
        e.step()
        written += range(8 * 64)[e.runner.view.slots[None]]
    assert e.counters["cached_tokens"] == 23 and len(known) == 3
    assert not {slot // 8 for slot in written} & {NULL_BLOCK, *known}
    tiny.run(e)


@pytest.mark.parametrize("kind", ["llama", "llama:8", "llama:4"])
def test_one_requests_overflow_reaches_nobody_else(kind: str) -> None:
    """In half precision a value may be infinite; the slots it leaves behind are others' padding."""
    m = tiny.model(kind)
    m.set_dtype(mx.float16)
    embedding, v = m.model.embed_tokens.weight, m.layers[0].self_attn.v_proj.weight
    embedding[:, 0] = 0  # token 13 alone has this feature, which overflows the first layer's values
    embedding[13] = mx.eye(64, dtype=mx.float16)[0]
    v[:, 0] = 65000

    bad, good = [1, 2, 13, *range(4, 13)], [1, 2, 3, *range(4, 13)]
    assert tiny.answers_after(bad, m, kind) == tiny.answers_after(good, m, kind)


def test_penalties_and_logprobs_count_accepted_drafts(qwen3) -> None:
    for s in (
        Sampling(0.8, frequency_penalty=1.5, presence_penalty=0.5, seed=3, logprobs=2),
        Sampling(0.0, repetition_penalty=1.7, seed=4, logprobs=1),
    ):
        r = _with(tiny.request("r", [5, 6, 7], 24), s)
        e = tiny.engine(qwen3)
        e.add(r)
        alone = tiny.run(e)
        want = tiny.tokens(alone, "r")
        liar = NoisyOracle({(r.prompt, 0): want}, lies=0.2)
        e = tiny.engine(qwen3, proposer=liar)
        e.add(r)
        drafted = tiny.run(e)
        assert tiny.tokens(drafted, "r") == want and liar.kept > 0
        pairs = zip(_logprobs(alone), _logprobs(drafted), strict=True)
        assert all(a.token == b.token and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def _logprobs(outputs) -> list[Logprob]:
    return [lp for o in outputs for lp in o.logprobs]


def test_steps_teach_the_pace(qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step with prompt rows took counts; what decodes took does not."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    read = Forward.read

    def slow(step: Forward):
        now[0] += 20.0
        return read(step)

    monkeypatch.setattr(Forward, "read", slow)
    e = tiny.engine(qwen3, budget=0)
    budget = e.scheduler.prefill_budget
    e.add(tiny.request("a", [1], 30))
    tiny.run(e)
    assert budget == PrefillBudget()
    e.add(tiny.request("b", range(200), 3))
    tiny.run(e)
    assert budget.largest


def test_the_drafter_is_told_of_an_abort_at_once(qwen3) -> None:
    liar = NoisyOracle({((1, 2), 0): [0] * 30})
    e = tiny.engine(qwen3, proposer=liar)
    e.add(tiny.request("a", [1, 2], 30))
    e.step()
    e.step()
    assert liar.live
    e._read_and_commit(e.in_flight)
    e.abort("a")
    assert not liar.live


def test_requests_of_all_kinds_share_a_batch(qwen3) -> None:
    """Neighbours' sampling parameters do not leak: each request alone gives the same tokens."""
    kinds = [
        Sampling(temperature=0),
        Sampling(temperature=2.0, seed=1),
        Sampling(temperature=0.8, top_k=3, seed=2),
        Sampling(temperature=1.0, top_p=0.3, seed=3),
        Sampling(temperature=0, presence_penalty=2.0, frequency_penalty=1.0),
        Sampling(temperature=0.7, repetition_penalty=1.5, min_p=0.1, seed=4),
        Sampling(temperature=0.5, logit_bias=((9, 8.0),), seed=5, logprobs=2),
    ]
    requests = [tiny.request(f"r{i}", [i, 2, 3], 12) for i in range(len(kinds))]
    requests = [_with(r, s) for r, s in zip(requests, kinds, strict=True)]
    alone = {}
    for r in requests:
        e = tiny.engine(qwen3)
        e.add(r)
        alone[r.id] = tiny.tokens(tiny.run(e), r.id)
    e = tiny.engine(qwen3)
    for r in requests:
        e.add(r)
    out = tiny.run(e)
    assert {r.id: tiny.tokens(out, r.id) for r in requests} == alone
    lps = [lp for o in out if o.request == "r6" for lp in o.logprobs]
    assert [lp.token for lp in lps] == alone["r6"] and all(len(lp.top) == 2 for lp in lps)
    assert not any(o.logprobs for o in out if o.request != "r6")


def _with(request, sampling):
    return tiny.Request(request.id, request.prompt, request.max_tokens, sampling)


def test_random_cancels_leak_nothing(qwen3) -> None:
    rng = random.Random(2)
    e = tiny.engine(qwen3, blocks=40)
    for i in range(150):
        e.add(tiny.request(f"r{i}", [rng.randrange(3) for _ in range(rng.randint(1, 30))], 20))
        for _ in range(rng.randint(0, 2)):
            e.step()
        before = e.scheduler.pool.used
        held = sum(len(s.table) for s in e.scheduler.running if s.request.id == f"r{i - 1}")
        e.abort(f"r{i - 1}")
        assert e.scheduler.pool.used <= before and (not held or e.scheduler.pool.used < before + 1)
        e.check()
    tiny.run(e)
    assert e.scheduler.pool.used == 0 and not e._live


def test_what_is_left_of_a_long_prompt() -> None:
    e = tiny.engine(tiny.model("llama"), budget=10)
    e.add(tiny.request("long", range(25), 2))
    assert e.stats().prompt_left == 25
    seen = []
    while e.busy:
        e.step()
        seen.append(e.stats().prompt_left)
    assert seen[:3] == [15, 5, 0] and not any(seen[3:])
