"""The scheduler without a model: a stand-in engine samples from a hash of the history, so that what
must come out is known whatever the order, the preemptions and the drafts."""

import random
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.prefix import KVCacheManager, StateCache, Window
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.scheduler import MAX_DEFERRED, Scheduler, cut_at_stop
from mlxspec.sequences import Draft, Entry, Seq
from mlxspec.types import ImageSpan, Output, Request, UserError
from tests.support import tiny
from tests.support.examples import examples

VOCAB = 7
SIZE = 4


def nth(history: list[int], salt: int) -> int:
    return blake2b(repr((history, salt)).encode(), digest_size=1).digest()[0] % VOCAB


def answer(prompt: list[int], n: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(nth(tokens, index))
    return tokens[len(prompt) :]


def accept(draft: list[int], sampled: list[int]) -> list[int]:
    """The samples up to the first that differs from what was drafted, and that one."""
    kept = 0
    while kept < len(draft) and draft[kept] == sampled[kept]:
        kept += 1
    return sampled[: kept + 1]


class Mock:
    """An engine with one step in flight. Slots remember which prefix they were written for; a row
    that would read a slot of another prefix fails the test. `blind`: a sequence goes on while its
    draft is in flight, as behind a model that drafts lazily. `windows` are the
    blocks by sliding window, `states` how many states of
    a recurrent layer are kept; one is the prefix itself, and must be that of the row."""

    def __init__(
        self,
        blocks: int,
        budget: int = 8,
        liar: random.Random | None = None,
        blind: bool = False,
        windows: dict[int, int] | None = None,
        states: int = 0,
        **kw: int,
    ) -> None:
        self.windows, self.states = windows or {}, states
        self.s = Scheduler(
            KVCacheManager(
                BlockPool(blocks, SIZE),
                [Window(w, BlockPool(n, SIZE)) for w, n in self.windows.items()],
                StateCache(states, 2) if states else None,
            ),
            context=kw.pop("context", 64),
            prefill_budget=PrefillBudget(fixed=budget),
            **kw,
        )
        self.liar, self.blind = liar, blind
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.flight: list[tuple[list[Entry], list[list[int]]]] = []
        self.out: list[Output] = []

    def step(self) -> None:
        if self.liar and not self.blind:
            self.settle()
        # The engine's gate: some sequences cannot go on from a draft in flight.
        if any(s.inflight_drafts and s.order % 3 == 0 for s in self.s.running):
            self.settle()
        depths = {s: self.liar.randint(0, 4) if self.liar else 0 for s in self.s.decoding()}
        plan = self.s.plan(depths)
        for group, source, target in self.s.copies:
            for i in range(SIZE):
                if (content := self.slots.get((group, source * SIZE + i))) is not None:
                    self.slots[group, target * SIZE + i] = content
        self.s.copies.clear()
        for e in plan:
            if self.liar and e.depth:
                right = answer(self.known(e.seq), e.depth, e.seq.index)
                e.draft = Draft([(t + (self.liar.random() < 0.4)) % VOCAB for t in right])
        sampled = [self.forward(e) for e in plan]
        self.s.submitted(plan)
        waiting = self.flight
        self.flight = [(plan, sampled)] if plan else []
        for done in waiting:
            self.commit(*done)
        self.s.check()
        tiny.check_sequences(self.s)
        for some in (self.s.waiting, self.s.running):
            assert some == sorted(some, key=lambda s: (s.priority, s.order))

    def known(self, seq: Seq) -> list[int]:
        """What is known of it when the step in flight is read."""
        return [*seq.tokens, *(t for plan, rows in self.flight for t in self.new(seq, plan, rows))]

    @staticmethod
    def new(seq: Seq, plan: list[Entry], rows: list[list[int]]) -> list[int]:
        found = [
            accept(e.draft.tokens, r) for e, r in zip(plan, rows, strict=True) if e.seq is seq and r
        ]
        return found[0] if found else []

    def forward(self, e: Entry) -> list[int]:
        late = len(self.known(e.seq)) - e.seq.known if e.inflight_drafts else 0
        assert 0 <= late <= e.inflight_drafts
        e = replace(e, start=e.start + late)
        tokens = [*self.known(e.seq)[: e.start + e.count], *e.draft.tokens]
        for group, (table, window) in enumerate(
            zip(e.seq.tables, [1 << 30, *self.windows], strict=True)
        ):
            slot = [block * SIZE + i for block in table for i in range(SIZE)]
            refs = self.s.kv.pools[group].refs
            for at in range(e.start, e.end):
                assert table[at // SIZE] != 0 and refs[table[at // SIZE]] == 1, "others read it"
                self.slots[group, slot[at]] = tuple(tokens[: at + 1])
            for at in range(max(0, e.start - window + 1), e.end):
                assert table[at // SIZE] != 0
                assert self.slots[group, slot[at]] == tuple(tokens[: at + 1])
        end = e.start + e.count
        sampled = [nth(tokens[: end + i], e.seq.index) for i in range(e.num_sampled)]
        if self.states:  # as the engine: that after the accepted drafts
            assert (e.state.recurrent or ()) == tuple(tokens[: e.start])
            kept = len(accept(e.draft.tokens, sampled)) - 1 if sampled else 0
            e.state.recurrent = tuple(tokens[: end + kept])
        return sampled

    def commit(self, plan: list[Entry], sampled: list[list[int]]) -> None:
        accepted = [
            accept(e.draft.tokens, row) if e.samples else []
            for e, row in zip(plan, sampled, strict=True)
        ]
        news = [cut_at_stop(e, new, []) for e, new in zip(plan, accepted, strict=True)]
        for e, new in zip(plan, news, strict=True):
            if e.draft.tokens and e.recurrent:  # as the engine, where a stop cuts drafts
                state = e.recurrent[: e.start + e.count + new.drafts]
                if e.state.recurrent is e.recurrent:
                    e.state.recurrent = state
                e.recurrent = state
        self.out += self.s.commit(plan, news)

    def settle(self) -> None:
        while self.flight:
            self.commit(*self.flight.pop(0))

    @property
    def busy(self) -> bool:
        return bool(self.s.waiting or self.s.running or self.flight)

    def finish(self) -> None:
        for _ in range(5000):
            if not self.busy:
                break
            self.step()
        assert not self.busy, "the scheduler does not come to rest"

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for o in self.out if (o.request, o.index) == (name, index) for t in o.tokens]


def test_catch_up_in_chunks_then_decode() -> None:
    m = Mock(32, budget=4)
    m.s.add(Request("r", tuple(range(6)), 3))
    seen = []
    for _ in range(5):
        plan = m.s.plan({})
        seen += [(e.start, e.count, e.samples, e.pending) for e in plan]
        sampled = [m.forward(e) for e in plan]
        m.s.submitted(plan)
        m.commit(plan, sampled)
    assert seen == [
        (0, 4, False, False),
        (4, 2, True, False),
        (6, 1, True, False),
        (7, 1, True, False),
    ]
    assert m.tokens("r") == answer(list(range(6)), 3) and m.out[-1].finish == "length"


def test_a_plan_may_feed_the_pending_token_and_stops_at_the_known_end() -> None:
    m = Mock(32)
    m.s.add(Request("r", (1, 2, 3), 3))
    for expected in [(0, 3, False), (3, 1, True), (4, 1, True)]:
        (e,) = plan = m.s.plan({})
        assert (e.start, e.count, e.pending) == expected
        m.flight.append((plan, [m.forward(e)]))
        m.s.submitted(plan)
        if len(m.flight) > 1:
            m.commit(*m.flight.pop(0))
    assert m.s.plan({}) == []  # its last token is on its way
    m.finish()
    assert m.tokens("r") == answer([1, 2, 3], 3)


def test_decodes_come_first_and_prefills_share_the_budget_shortest_first() -> None:
    m = Mock(64, budget=6)
    m.s.add(Request("old", (1,), 9))
    m.step()
    m.step()
    m.s.add(Request("long", tuple([2] * 20), 2))
    m.s.add(Request("short", (3, 3, 3, 3), 2))
    plan = m.s.plan({})
    assert [(e.seq.request.id, e.count) for e in plan] == [("old", 1), ("short", 4), ("long", 2)]


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    m = Mock(200, budget=4)
    m.s.add(Request("long", tuple([1] * 30), 1))
    for i in range(80):
        m.s.add(Request(f"s{i}", (3 + i, 3, 3, 3), 1))  # no two begin alike, so none is cached
        m.step()
    assert any(o.request == "long" and o.finish for o in m.out), (
        f"passed over more than {MAX_DEFERRED} times"
    )


@pytest.mark.parametrize("rows", [6, 20])
def test_an_image_that_is_not_cut_shares_no_step_beyond_the_budget(rows: int) -> None:
    """A step has as many prompt rows as the budget or the image at most: memory is planned for one
    of both, not for their sum."""
    m = Mock(200, budget=8)
    prompts = {}
    for i, before in enumerate((7, 3, 0, 9)):
        image: Any = ImageSpan(before, before + rows, None, rows, 1, both_ways=True)
        prompts[f"{before}"] = prompt = [i] * (before + rows + 3)
        m.s.add(Request(f"{before}", tuple(prompt), 2, images=(image,)))
    prompts["text"] = [9] * 5
    m.s.add(Request("text", tuple(prompts["text"]), 2))
    steps = []
    while m.busy:
        m.step()
        steps += [[e.count for e in plan if e.start < e.seq.prompt_len - 1] for plan, _ in m.flight]
    assert max(map(sum, steps)) <= max(8, rows)
    assert max(map(len, steps)) > 1, "what fits goes together"
    assert {name: m.tokens(name) for name in prompts} == {
        name: answer(prompt, 2) for name, prompt in prompts.items()
    }


def test_short_of_blocks_the_youngest_gives_way_and_comes_back() -> None:
    m = Mock(8, context=28)
    tiny.admit_blindly(m.s)
    for i, name in enumerate("abc"):
        m.s.add(Request(name, (i, i, i, i, i), 16))
    m.finish()
    assert m.s.preemptions > 0
    for i, name in enumerate("abc"):
        assert m.tokens(name) == answer([i] * 5, 16)
    assert next(o for o in m.out if o.finish).request == "a"


def test_the_preempted_wait_in_order_and_report_their_first_hit() -> None:
    m = Mock(9, context=28)
    m.s.add(Request("first", (5, 5, 5, 5, 5), 1))
    m.finish()
    tiny.admit_blindly(m.s)
    for i, name in enumerate("abcd"):
        m.s.add(Request(name, (5, 5, 5, 5, 5, i), 14))
    for _ in range(200):
        m.step()
        orders = [s.order for s in m.s.waiting]
        assert orders == sorted(orders)
    m.finish()
    assert m.s.preemptions > 0
    for i, name in enumerate("abcd"):
        assert m.tokens(name) == answer([5, 5, 5, 5, 5, i], 14)
        assert {o.cached for o in m.out if o.request == name} == {5}


def test_admission_looks_ahead_so_that_nobody_is_preempted() -> None:
    m = Mock(13, context=40, max_sequences=8)
    m.s.add(Request("warm", tuple(range(12)), 1))
    m.finish()
    for i in range(8):
        m.s.add(Request(f"r{i}", (*range(12), 20 + i, *range(10)), 2))
    m.finish()
    assert m.s.preemptions == 0
    assert all(m.tokens(f"r{i}") for i in range(8))


def test_a_hit_on_idle_blocks_takes_them_out_of_what_is_free() -> None:
    m = Mock(13, context=40)
    m.s.add(Request("warm", tuple(range(12)), 1))
    m.finish()
    m.s.add(Request("other", (9,) * 26, 2))  # holds 7 of 12 blocks; 3 of the free ones hold the hit
    m.step()
    m.s.add(Request("hit", (*range(12), 7, 7, 7, 7, 7, 7, 7, 7, 7), 2))
    m.finish()
    assert m.s.preemptions == 0
    assert m.tokens("hit") == answer([*range(12), *[7] * 9], 2)


def test_a_blocked_prompt_is_not_hashed_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Mock(8, context=28)
    m.s.add(Request("a", (1,) * 9, 18))
    m.step()
    m.s.add(Request("b", (2,) * 20, 2))
    looked = []
    match = m.s.pool.match
    monkeypatch.setattr(m.s.pool, "match", lambda *what: looked.append(1) or match(*what))
    for _ in range(10):
        m.step()
    assert len(looked) == 1
    m.finish()
    assert m.tokens("b") == answer([2] * 20, 2)


def test_drafts_are_trimmed_before_anyone_is_preempted() -> None:
    for blocks, depths in ((5, [5, 5]), (4, [5, 1])):  # the blocks that are left go to drafts
        m = Mock(blocks, context=12)
        tiny.admit_blindly(m.s)
        m.s.add(Request("a", (1, 1), 7))
        m.s.add(Request("b", (2, 2), 7))
        m.step()
        m.settle()
        plan = m.s.plan(dict.fromkeys(m.s.decoding(), 5))
        assert [e.depth for e in plan] == depths and not m.s.preemptions


def test_siblings_wait_for_their_leader_and_share_its_prompt() -> None:
    m = Mock(64, budget=3)
    m.s.add(Request("r", tuple(range(10)), 4, n=3))
    rows = 0
    while m.busy:
        m.step()
        rows += sum(e.count for plan, _ in m.flight for e in plan if e.start < 10)
    assert rows == 10 + 1 + 1
    assert [m.tokens("r", i) for i in range(3)] == [answer(list(range(10)), 4, i) for i in range(3)]


def test_siblings_outlive_an_aborted_leader_and_follow_the_next() -> None:
    m = Mock(64)
    m.s.add(Request("r", (1, 2, 3, 4, 5, 6), 4, n=4))
    m.s.plan({})
    m.out += m.s.abort("r", 0)
    rows = 0
    while m.busy:
        m.step()
        rows += sum(e.count for plan, _ in m.flight for e in plan if e.start < 6)
    assert rows == 6 + 1 + 1
    for i in (1, 2, 3):
        assert m.tokens("r", i) == answer([1, 2, 3, 4, 5, 6], 4, i)
    assert [o.finish for o in m.out if o.index == 0] == ["abort"]


def test_a_stop_token_ends_a_choice_and_is_its_last_token() -> None:
    want = answer([1, 2], 12)
    stop = want[3]
    m = Mock(64)
    m.s.add(Request("r", (1, 2), 12, stop_tokens=frozenset({stop})))
    m.finish()
    assert m.tokens("r") == want[: want.index(stop) + 1] and m.out[-1].finish == "stop"


def test_an_abort_frees_blocks_at_once_also_mid_flight() -> None:
    m = Mock(64)
    for name in "abc":
        m.s.add(Request(name, (1, 2, 3, 4, 5), 40))
    for _ in range(4):
        m.step()
    used = m.s.pool.used
    (gone,) = m.s.abort("b")
    assert gone.finish == "abort" and m.s.pool.used < used
    assert m.s.abort("b") == [] and m.s.abort("nobody") == []
    m.finish()
    assert m.tokens("a") == answer([1, 2, 3, 4, 5], 40)


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    m = Mock(64)
    with pytest.raises(UserError, match="64 tokens > 64 maximum"):
        m.s.add(Request("r", (1,) * 64, 5))
    assert not m.busy
    m.s.add(Request("r", (1,) * 60, 5))
    m.finish()
    assert len(m.tokens("r")) == 4, "what the context has room for"


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_lives(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Arrivals, cancels, tiny pools, any budget, windows, states, priorities, with and without a
    lying drafter:
    every survivor says what it must, `check()` holds after every operation, and nothing leaks."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    blocks, budget, sequences = (
        rng.choice([10, 14, 40]),
        rng.choice([1, 3, 8, 50]),
        rng.choice([1, 3, 8]),
    )
    windows = rng.choice([(), (), (3,), (1, 6), (10,)])
    states = rng.choice([0, 0, 1, 5, 100])
    priorities = rng.choice([(0,), (0, 100), (-1000, 0, 3, 1000)])
    monkeypatch.setattr("mlxspec.sequences.MAX_OVERTAKES", rng.choice([1, 5, 64]))
    m = Mock(
        blocks,
        budget=budget,
        liar=rng.choice([None, rng]),
        blind=not states and rng.choice([False, True]),
        windows={w: min(blocks, Window.min_blocks(w, SIZE, sequences, budget, 4)) for w in windows},
        states=states,
        can_draft=rng.random() < 0.9,
        context=36,
        max_sequences=sequences,
    )
    if rng.random() < 0.5:
        tiny.admit_blindly(m.s)
    alive: dict[str, Request] = {}
    for i in range(40):
        if rng.random() < 0.4:
            prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 20)))
            r = Request(f"r{i}", prompt, rng.randint(1, 12), n=rng.choice([1, 1, 3]))
            r = replace(r, priority=rng.choice(priorities))
            m.s.add(r)
            alive[r.id] = r
        if alive and rng.random() < 0.1:
            name = rng.choice(list(alive))
            del alive[name]
            m.out += m.s.abort(name)
        m.s.check()
        m.step()
    m.finish()
    for r in alive.values():
        for index in range(r.n):
            assert m.tokens(r.id, index) == answer(list(r.prompt), r.max_tokens, index)
            assert (
                sum(o.finish is not None for o in m.out if (o.request, o.index) == (r.id, index))
                == 1
            )
    assert [pool.used for pool in m.s.kv.pools] == [0] * (1 + len(windows))
    m.s.check()


def test_a_thousand_random_cancels_leak_nothing() -> None:
    rng = random.Random(1)
    m = Mock(40, budget=6, max_sequences=6)
    for i in range(1000):
        m.s.add(
            Request(f"r{i}", tuple(rng.randrange(3) for _ in range(rng.randint(1, 30))), 20, n=2)
        )
        for _ in range(rng.randint(0, 3)):
            m.step()
        m.s.abort(f"r{rng.randint(max(0, i - 5), i)}")
        if len(m.s.waiting) > 20:
            m.s.abort(m.s.waiting[0].request.id)
        m.s.check()
    for i in range(1000):
        m.s.abort(f"r{i}")
    m.finish()
    assert m.s.pool.used == 0 and not m.s.running and not m.s.waiting
