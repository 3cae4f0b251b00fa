"""The loop's own promises: overlap, late stops, one pool in place, no leak."""

import random

import mlx.core as mx
import pytest

from mlxspec.types import Sampling, Unfit
from tests import tiny
from tests.liar import Liar


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
    liar = Liar({(prompt, 0): plain(prompt, 20)}, lies=0.0, most=5)
    events: list[tuple[str, int]] = []
    e = tiny.engine(qwen3, drafter=liar, trace=lambda event, n: events.append((event, n)))
    e.add(tiny.request("a", prompt, 20))
    out = tiny.run(e)
    assert tiny.tokens(out, "a") == plain(prompt, 20)
    assert out[-1].rounds < 20 and e.counters["accepted"] == liar.kept > 0
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


def test_each_row_reaches_the_pool_in_place(qwen3) -> None:
    """No step may copy a pool: memory beyond the first step stays far below one layer's keys."""
    e = tiny.engine(qwen3, block=32, blocks=2000)
    e.add(tiny.request("warm", range(40), 8))
    tiny.run(e)
    layer = e.runner.caches[0].pools()[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for i in range(4):
        e.add(tiny.request(f"r{i}", [i, *range(40)], 24, temperature=0.7))
    tiny.run(e)
    assert mx.get_peak_memory() - before < layer / 2


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


@pytest.mark.parametrize("prompt, bias", [([1, 320], ()), ([-1], ()), ([1], ((999, 1.0),))])
def test_ids_outside_the_vocabulary_are_refused(qwen3, prompt, bias) -> None:
    e = tiny.engine(qwen3, vocab=tiny.VOCAB)
    with pytest.raises(Unfit, match="vocabulary of 320"):
        e.add(tiny.request("r", prompt, 4, logit_bias=bias))
    assert not e.busy
