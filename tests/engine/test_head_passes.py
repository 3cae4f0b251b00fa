"""What a head costs: the passes of a round, of prompts and of answers for which it is parked; and
what it keeps."""

from collections.abc import Callable
from itertools import chain, groupby, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.model.batch import Step
from mlxspec.sequences import Plan
from mlxspec.speculate import NoSpeculation, heads
from mlxspec.speculate.chain import deepest_first
from mlxspec.speculate.heads.drafter import MAX_LAG
from tests.support import device_waits, tiny
from tests.support.drafters import OTHER_HEADS, OWN_HEADS, attach_head
from tests.support.engine_with_head import BLOCK, SOME, ask, counted, head_of, loud, some, start
from tests.support.expected_drafts import check, few
from tests.support.parameter_rows import fewer, only

WITH_KV = SOME[:4]  # those whose head has K/V of its own


@pytest.mark.parametrize("kind, layout", fewer(WITH_KV, 2, 1))
@pytest.mark.parametrize("block", only([BLOCK, 4 * MAX_LAG], 1))
def test_a_parked_head_reads_few_and_large_passes(kind: str, layout: Any, block: int) -> None:
    """Of what decodes a block, or MAX_LAG rows; when it drafts again, it has missed nothing."""
    e, drafted = start(kind, layout, parked=True, block=block, blocks=4096 // block)
    rows = counted(e)
    e.add(few("r", some(21), 140))
    while e.counters["generated_tokens"] < 100:
        e.step()
    assert e.spec_metrics.drafted.total() == 0 and not drafted
    prompt = [n for n in rows if n != min(block, MAX_LAG)]
    assert sum(prompt) <= 21 + block and len(prompt) <= 4
    assert 100 - MAX_LAG < sum(rows) - 20 <= 100
    loud(e)
    tiny.run(e)
    assert check(kind, drafted) > 5


def passes_of(plan: Plan, layout: str, own_kv: bool) -> list[list[int]]:
    """The rows of each pass of a round, where all before the last step had been read: those of the
    drafts in flight if the head has K/V of its own, then for each further token. Dense K/V are
    gathered for neighbours with as many rows and blocks, up to the next power of two."""
    drafting = deepest_first([e for e in plan if e.depth])
    found = []
    for n in range(drafting[0].depth if drafting else 0):
        rows = []
        for e in drafting:
            if e.depth > n:
                count = e.count + e.inflight_drafts if own_kv and not n else 1
                blocks = (e.start + n + count - 1) // BLOCK
                rows.append((layout == "gather" and (count, blocks.bit_length()), count))
        batches = groupby(rows, lambda row: row[0])
        found.append([sum(count for _, count in batch) for _, batch in batches])
    return found


@pytest.mark.parametrize("kind, layout", SOME)
@pytest.mark.parametrize("depth", only([3, 0], 0))
def test_a_round_is_one_pass_for_each_drafted_token(
    kind: str, layout: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sequences; and none waits for the device: the step in flight is read after the
    next one is submitted. Depth 0: drafts as long as pay."""
    e, _ = start(kind, layout, depth=depth, whole=True)
    rows, events, rounds = counted(e), [], []
    e.trace = lambda *event: events.append(event)
    inner, own_kv = e.proposer.draft, head_of(e).head.kv_layers > 0

    def draft(plan: Plan, previous: Any) -> None:
        before = len(rows)
        with monkeypatch.context() as patch:
            device_waits.forbid(patch)
            inner(plan, previous)
        depths = {entry.seq: entry.depth for entry in plan if entry.depth}
        rounds.append((depths, passes_of(plan, layout, own_kv), rows[before:]))

    e.proposer.draft = draft  # type: ignore[method-assign]
    ask(e, *(few(f"r{i}", some(5 + i, i), 20 + 3 * i) for i in range(3)))
    assert any(len(set(depths.values())) > 1 for depths, *_ in rounds), "no ragged round"
    exact = 0
    for (last, *_), (depths, wanted, made) in pairwise(rounds):
        later = [*chain.from_iterable(wanted[1:])]
        first = made[: len(made) - len(later)]
        assert made == first + later
        if depths and depths.keys() <= last.keys():
            assert first == wanted[0]
            exact += len(depths) > 1
        else:  # what no draft was made for has more to read
            assert len(first) <= (len(depths) if layout == "gather" else 1)
    assert exact > 5
    submitted = [step for event, step in events if event == "submit"]
    late = [
        n for n in submitted[:-1] if events.index(("submit", n + 1)) > events.index(("read", n))
    ]
    assert len(late) <= 2, "only steps that sample nothing are read at once"


@pytest.mark.parametrize("head", ["mtp", *OTHER_HEADS, *OWN_HEADS])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_draft_waits_for_the_device(
    head: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of several sequences, whose last tokens and drafts are in flight."""
    kind = "gemma4_text" if head in OWN_HEADS else "qwen3"
    e = tiny.engine(tiny.model(kind), block=BLOCK, blocks=128, budget=16, whole=True)
    attach_head(e, depth=3, kind=head)
    inner, flying = e.proposer.draft, []

    def draft(plan: Plan, previous: Any) -> None:
        with monkeypatch.context() as patch:
            device_waits.forbid(patch)
            inner(plan, previous)
        flying.append(sum(each.inflight_drafts > 0 for each in plan if each.depth))

    e.proposer.draft = draft  # type: ignore[method-assign]
    ask(e, *(few(f"r{i}", some(5 + i, i), 12, temperature=temperature) for i in range(3)))
    assert max(flying) == 3


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0]),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: range(x[0]),
        lambda x: str(x),
        lambda x: mx.eval(x),
        lambda x: np.array(x),
        lambda x: np.asarray([x, x]),
    ],
)
def test_each_way_to_wait_is_seen(
    read: Callable[[mx.array], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = mx.array([1, 2])
    with monkeypatch.context() as patch:
        device_waits.forbid(patch)
        with pytest.raises(pytest.fail.Exception, match="waits for the device"):
            read(x)
    read(x)


@pytest.mark.parametrize("kind, layout", WITH_KV)
def test_what_a_head_keeps(kind: str, layout: Any) -> None:
    """K/V of one layer for each slot, and a hidden state with each recurrent state."""
    e, _ = start(kind, layout)
    ask(e, few("r", some(20)))
    head = head_of(e).head
    told = heads.cache_bytes(head)
    pools = [pages for pages in e.runner.pages_of(0) if pages not in e.runner.pages()]
    slots = e.runner.view.allocated[None] * BLOCK
    assert sum(p.nbytes for pages in pools for p in pages.pools()) == told.token * slots > 0
    hidden = head.embed(mx.array([0])).nbytes
    assert told.state == hidden
    plain = tiny.engine(tiny.model(kind), layout=layout, block=BLOCK)
    plain.add(few("r", some(20)))
    tiny.run(plain)
    assert plain.runner.pages_of(0) == plain.runner.pages() and plain.runner.view.taps == ()
    for mine, other in zip(*(each.runner.states.dtypes for each in (e, plain)), strict=False):
        assert mine == other
    more = len(e.runner.states.dtypes) - len(plain.runner.states.dtypes)
    assert more == bool(plain.runner.states.layers)


@pytest.mark.parametrize("kind, layout", WITH_KV)
def test_a_head_that_is_detached_leaves_nothing(kind: str, layout: Any) -> None:
    e, _ = start(kind, layout)
    r = few("r", some(20))
    ask(e, r)
    e.reset()
    head_of(e).detach()
    e.proposer = NoSpeculation()
    taps: list[Any] = []
    submit = e.runner.submit

    def submitted(step: Step, sampled: Any) -> Step:
        taps.extend(step.taps)
        return submit(step, sampled)

    e.runner.submit = submitted  # type: ignore[method-assign]
    plain = tiny.engine(tiny.model(kind), layout=layout, block=BLOCK)
    assert tiny.tokens(ask(e, r), "r") == tiny.tokens(ask(plain, r), "r")
    assert not taps and e.runner.pages_of(0) == e.runner.pages()
    assert e.runner.states.dtypes == plain.runner.states.dtypes
