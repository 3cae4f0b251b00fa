"""Priorities in the scheduler: who starts, who gives way, and that nobody starves."""

import random
from typing import Any

import pytest

from mlxspec.engine.scheduler import MAX_DEFERRED
from mlxspec.sequences import MAX_OVERTAKES
from mlxspec.types import BACKGROUND, MAX_PRIORITY, Request
from tests.engine.test_scheduler import Mock, answer
from tests.support import tiny

LATER = BACKGROUND


def names(seqs: Any) -> list[str]:
    return [s.request.id for s in seqs]


def right(m: Mock, *requests: Request) -> None:
    for r in requests:
        for index in range(r.n):
            assert m.tokens(r.id, index) == answer(list(r.prompt), r.max_tokens, index)


def test_the_lowest_priority_starts_first_then_the_oldest() -> None:
    m = Mock(64, max_sequences=1)
    first = Request("first", (9, 9), 3, priority=-MAX_PRIORITY)
    given = [("a", 0), ("later", LATER), ("b", 0), ("now", -7), ("c", 0), ("last", MAX_PRIORITY)]
    rest = [Request(name, (i, 1), 2, priority=p) for i, (name, p) in enumerate(given)]
    m.s.add(first)
    m.step()
    for r in rest:
        m.s.add(r)
    assert names(m.s.waiting) == ["now", "a", "b", "c", "later", "last"]
    m.finish()
    ended = [o.request for o in m.out if o.finish]
    assert ended == ["first", "now", "a", "b", "c", "later", "last"] and not m.s.preemptions
    right(m, first, *rest)


def test_without_a_slot_the_least_important_gives_way_and_of_these_the_youngest() -> None:
    m = Mock(64, max_sequences=3)
    running = [Request(f"r{i}", (i, 2), 12, priority=p) for i, p in enumerate((LATER, LATER, 0))]
    for r in running:
        m.s.add(r)
    m.step()
    m.step()
    m.settle()
    now, more = Request("now", (7, 7), 3), Request("more", (8, 8), 3, priority=1)
    m.s.add(now)
    m.step()
    assert names(m.s.running) == ["r2", "now", "r0"] and names(m.s.waiting) == ["r1"]
    m.settle()
    m.s.add(more)
    m.step()
    assert names(m.s.running) == ["r2", "now", "more"] and names(m.s.waiting) == ["r0", "r1"]
    m.s.add(equal := Request("equal", (6, 6), 3, priority=1))  # it interrupts nobody
    m.step()
    assert m.s.preemptions == 2
    m.finish()
    right(m, *running, now, more, equal)


def test_with_low_memory_it_takes_the_place_of_one() -> None:
    """More may run from before than are started then; they are not all preempted for it."""
    m = Mock(64, max_sequences=3)
    running = [Request(f"r{i}", (i, 2), 12, priority=LATER) for i in range(3)]
    for r in running:
        m.s.add(r)
    m.step()
    m.step()
    m.settle()
    m.s.low_memory = True
    m.s.add(now := Request("now", (7, 7), 3))
    m.step()
    assert names(m.s.running) == ["now", "r0", "r1"] and names(m.s.waiting) == ["r2"]
    m.settle()
    m.s.add(more := Request("more", (8, 8), 3))
    m.step()
    assert names(m.s.running) == ["now", "more", "r0"], "also beside one of its own priority"
    m.settle()
    m.s.add(equal := Request("equal", (6, 6), 3, priority=LATER))
    m.step()
    assert names(m.s.waiting) == ["r1", "r2", "equal"], "nothing else is started"
    m.finish()
    right(m, *running, now, more, equal)


def test_without_blocks_the_background_gives_way_but_only_where_that_is_enough() -> None:
    m = Mock(12, context=44)
    low = Request("low", (1,) * 16, 8, priority=LATER)
    high = Request("high", (2,) * 11, 8)
    for r in (low, high):
        m.s.add(r)
        m.step()
    m.settle()
    large = Request("large", (3,) * 32, 2)  # 9 blocks; the background has 5 of 11, 3 are free
    m.s.add(large)
    m.step()
    assert names(m.s.running) == ["high", "low"], "without low's blocks it could not start either"
    small = Request("small", (4,) * 20, 2, priority=-1)
    m.s.add(small)
    m.step()
    assert names(m.s.running) == ["small", "high"] and m.s.preemptions == 1
    m.finish()
    right(m, low, high, large, small)


def test_when_running_ones_run_out_of_blocks_the_least_important_gives_way() -> None:
    m = Mock(8, context=28)
    tiny.admit_blindly(m.s)
    asked = [
        Request(n, (i,) * 5, 16, priority=LATER * (n == "old"))
        for i, n in enumerate(["old", "new"])
    ]
    for r in asked:
        m.s.add(r)
    m.finish()
    assert m.s.preemptions > 0
    assert next(o for o in m.out if o.finish).request == "new"
    right(m, *asked)


def test_one_whose_draft_is_in_flight_gives_way_a_step_later() -> None:
    m = Mock(64, max_sequences=1, liar=random.Random(3), blind=True)
    low = Request("low", (1, 2), 40, priority=LATER)
    m.s.add(Request("none", (5,), 1))  # so that the next one may go on from a draft in flight
    m.finish()
    m.s.add(low)
    while not any(s.inflight_drafts for s in m.s.running):
        m.step()
    m.s.add(now := Request("now", (3, 4), 3))
    m.step()
    assert names(m.s.running) == ["low"] and not m.s.preemptions
    m.step()
    assert names(m.s.running) == ["now"] and m.s.preemptions == 1
    m.finish()
    right(m, low, now)


def test_important_prompts_are_computed_first() -> None:
    m = Mock(200, budget=6)
    m.s.add(Request("low", (1,) * 5, 1, priority=LATER))
    m.s.add(Request("long", (2,) * 20, 1))
    m.s.add(Request("short", (3,) * 4, 1, priority=1))
    plan = m.s.plan({})
    assert [(e.seq.request.id, e.count) for e in plan] == [("long", 6)]


def test_a_prompt_in_the_background_is_computed_too() -> None:
    """Within MAX_DEFERRED plans and one for each other prompt, however many come."""
    m = Mock(2000, budget=4, context=200, max_sequences=4)
    m.s.add(Request("low", (9,) * 30, 1, priority=LATER))
    m.step()
    [low] = m.s.running
    since = most = at = 0
    for i in range(400):
        if len(m.s.running) + len(m.s.waiting) < 4:
            m.s.add(Request(f"r{i}", (i, *[1] * 40), 1))
        m.step()
        since = 0 if low.computed > at else since + 1
        most, at = max(most, since), low.computed
        if low.finish:
            break
    assert low.finish and most <= MAX_DEFERRED + 4


def test_a_starved_queue_does_not_overtake_everybody() -> None:
    """Of forty in the background that have waited too long one goes, and then a person again."""
    m = Mock(64, max_sequences=1)
    m.s.add(Request("a", (1, 1), 2))
    m.step()
    for i in range(40):
        m.s.add(Request(f"low{i}", (3, i % 5, i), 4, priority=LATER))
    added = 0
    while not any(name.startswith("low") for name in names(m.s.running)):
        if sum(name.startswith("r") for name in names(m.s.waiting)) < 2:
            m.s.add(Request(f"r{added}", (added % 5, 2, added), 2))
            added += 1
        m.step()
    m.s.add(Request("person", (9, 9), 2))
    lows = set()
    while "person" not in names(m.s.running):
        m.step()
        lows |= {name for name in names(m.s.running) if name.startswith("low")}
    assert added >= MAX_OVERTAKES and len(lows) <= 1
    for name in {*names(m.s.waiting)}:
        m.s.abort(name)
    m.finish()


def test_nobody_is_passed_by_more_than_so_many() -> None:
    """More important requests come than end, while one in the background waits."""
    m = Mock(64, max_sequences=1)
    m.s.add(Request("a", (1, 1), 2))
    m.step()
    m.s.add(low := Request("low", (3, 1), 30, n=2, priority=LATER))
    added, started = 0, set()
    while "low" not in names(m.s.running):
        for _ in range(2 if len(m.s.waiting) < 40 else 1):
            m.s.add(Request(f"r{added}", (added % 5, 2, added), 2))
            added += 1
        m.step()
        started |= {*names(m.s.running)} - {"a", "low"}
        assert added < 1000
    assert len(started) == MAX_OVERTAKES
    while "low" in names(m.s.running):  # nor is it interrupted from now on
        m.s.add(Request(f"r{added}", (added % 5, 2, added), 2))
        added += 1
        m.step()
    assert not m.s.preemptions and len(m.tokens("low")) == 30, "its other choice is next"
    for r in names(m.s.waiting):
        if r != "low":
            m.s.abort(r)
    m.finish()
    right(m, low)


@pytest.mark.parametrize("priority", [0, LATER])
def test_choices_stay_together(priority: int) -> None:
    """Nobody who is not more important comes between the choices of a request, also where all of
    them are interrupted."""
    m = Mock(64, max_sequences=2)
    many = Request("many", tuple(range(9)), 9, n=4, priority=LATER)
    m.s.add(many)
    for _ in range(5):
        m.step()
    assert names(m.s.running) == ["many", "many"]
    m.settle()
    asked = [Request(f"r{i}", (i, i), 3, priority=priority) for i in range(3)]
    for r in asked:
        m.s.add(r)
    m.finish()
    assert (m.s.preemptions > 0) == (priority < LATER)
    ended = [o.request for o in m.out if o.finish]
    at = [i for i, name in enumerate(ended) if name == "many"]
    assert at == ([3, 4, 5, 6] if m.s.preemptions else [0, 1, 2, 3])
    right(m, many, *asked)
