"""What a head costs: the passes of a round, of prompts and of answers for which it is parked; and
what it keeps."""

from typing import Any

import mlx.core as mx
import pytest

from mlxspec.model.batch import Step
from mlxspec.speculate import NoSpeculation, heads
from mlxspec.speculate.chain import MAX_LAG
from tests import tiny
from tests.chains import check, few
from tests.engine.test_heads import BLOCK, SOME, ask, counted, head_of, loud, some, start


@pytest.mark.parametrize("kind, layout", SOME)
@pytest.mark.parametrize("block", [BLOCK, 4 * MAX_LAG])
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


@pytest.mark.parametrize("kind, layout", SOME)
def test_a_round_is_one_pass_for_each_drafted_token(
    kind: str, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sequences; and none waits for the device: the step in flight is read after the
    next one is submitted."""
    e, _ = start(kind, layout, depth=3, whole=True)
    rows, events, passes = counted(e), [], []
    e.trace = lambda *event: events.append(event)
    inner = e.proposer.draft

    def draft(plan: Any, previous: Any) -> None:
        before = len(rows)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", lambda *_: pytest.fail("drafting waited for the device"))
            inner(plan, previous)
        depths = [entry.depth for entry in plan]
        passes.append((depths, rows[before:]))

    e.proposer.draft = draft  # type: ignore[method-assign]
    ask(e, *(few(f"r{i}", some(5 + i, i), 20 + 3 * i) for i in range(3)))
    assert any(len(set(depths)) > 1 for depths, _ in passes), "no ragged round"
    for depths, made in passes:
        deepest = max(depths, default=0)
        if layout == "gather":  # only neighbours that are alike share a pass
            assert len(made) >= deepest
            continue
        assert len(made) == deepest
        assert made[1:] == [sum(d > i for d in depths) for i in range(1, deepest)]
    submitted = [step for event, step in events if event == "submit"]
    late = [
        n for n in submitted[:-1] if events.index(("submit", n + 1)) > events.index(("read", n))
    ]
    assert len(late) <= 2, "only steps that sample nothing are read at once"


@pytest.mark.parametrize("kind, layout", SOME)
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
    for mine, other in zip(*(each.runner.states.forms for each in (e, plain)), strict=False):
        assert mine == other
    more = len(e.runner.states.forms) - len(plain.runner.states.forms)
    assert more == bool(plain.runner.states.layers)


@pytest.mark.parametrize("kind, layout", SOME)
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
    assert e.runner.states.forms == plain.runner.states.forms
