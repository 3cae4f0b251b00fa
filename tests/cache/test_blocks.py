"""The pool's verbs, one by one and in random order with `check()` after each."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxspec.cache.blocks import AGE_S, LOOKS, PARTS, BlockPool

SIZE = 4


def hold(pool: BlockPool, tokens: list[int], upto: int | None = None) -> list[int]:
    """Blocks for `tokens`, published up to `upto` (default: all)."""
    table = pool.alloc(-(-len(tokens) // SIZE))
    assert table is not None
    upto = len(tokens) if upto is None else upto
    keys: list[bytes] = []
    pool.publish(tokens, table, keys, upto)
    pool.publish_tail(tokens, table, keys, upto)
    return table


def test_a_prefix_is_found_by_content_and_position() -> None:
    pool = BlockPool(16, SIZE)
    table = hold(pool, list(range(12)))
    assert pool.match(list(range(12))).blocks == tuple(table)
    assert pool.match([*range(8), 99, 99, 99, 99]).blocks == tuple(table[:2])
    assert (
        pool.match(list(range(4, 12))).blocks == ()
    )  # the same tokens elsewhere are other content
    assert pool.match([*range(4, 8), *range(4, 8)]).blocks == ()


def test_the_partial_block_is_offered_for_copying_and_one_token_is_left() -> None:
    pool = BlockPool(16, SIZE)
    table = hold(pool, list(range(10)))
    assert pool.match(list(range(10))).copy == (table[2], 1)
    assert pool.match([*range(10), 50]).copy == (table[2], 2)
    assert pool.match([*range(9), 50, 51]).copy == (table[2], 1)
    assert pool.match(list(range(8))).copy is None  # an exact multiple shares all of it
    assert pool.match([0, 1, 99]).copy == (table[0], 2)  # a full block serves as a source as well


def test_what_is_not_published_is_not_found() -> None:
    pool = BlockPool(16, SIZE)
    hold(pool, list(range(12)), upto=6)
    found = pool.match(list(range(12)))
    assert len(found.blocks) == 1 and found.copy is not None and found.copy[1] == 2


def test_salt_separates() -> None:
    a, b = BlockPool(8, SIZE, b"a"), BlockPool(8, SIZE, b"b")
    hold(a, [1, 2, 3, 4])
    assert a.root != b.root and not b.match([1, 2, 3, 4, 5]).blocks


def test_dropped_content_lives_until_its_block_is_needed_tails_first() -> None:
    pool = BlockPool(5, SIZE)
    tokens = list(range(16))
    table = hold(pool, tokens)
    pool.drop(table)
    assert (pool.used, len(pool.idle)) == (0, 4)
    assert pool.alloc(1) == [table[3]]
    assert pool.match(tokens).blocks == tuple(table[:3])
    pool.share(table[:3])
    assert pool.alloc(1) is None
    pool.check([table[:3], [table[3]]])


def test_forgetting_spares_what_is_held() -> None:
    pool = BlockPool(8, SIZE)
    held = hold(pool, [1, 2, 3, 4, 5])
    pool.drop(hold(pool, [6, 7, 8, 9, 1, 2]))
    assert pool.forget() == 2 and pool.forget() == 0
    assert pool.match([6, 7, 8, 9, 1, 2]).blocks == ()
    assert pool.match([1, 2, 3, 4, 5]).blocks == tuple(held[:1])
    pool.check([held])


def test_what_was_forgotten_comes_before_what_would_take_new_memory() -> None:
    pool = BlockPool(20, 4)
    for first in (0, 100):
        table, keys = pool.alloc(3) or [], []
        pool.publish(range(first, first + 12), table, keys, 12)
        pool.drop(table)
    assert pool.given == 6 and pool.forget() == 6
    assert sorted(pool.alloc(6) or []) == [1, 2, 3, 4, 5, 6]
    pool.check()


def test_a_thrifty_pool_rather_forgets_than_takes_new_memory() -> None:
    pool = BlockPool(20, 4)
    table, keys = pool.alloc(3) or [], []
    pool.publish(range(12), table, keys, 12)
    pool.drop(table)
    pool.thrifty = True
    assert sorted(pool.alloc(2) or []) == [2, 3] and len(pool.idle) == 1
    assert pool.alloc(2) == [1, 4], "and takes it where nothing else is left"
    pool.check()


def test_what_nobody_used_for_long_gives_way_before_memory_is_taken() -> None:
    now = 0.0
    pool = BlockPool(20, SIZE)
    pool.clock, pool.kept = lambda: now, lambda key: True
    old, young = hold(pool, [1, 2, 3, 4, 5]), hold(pool, [7] * 8)
    pool.drop(old)
    pool.drop(young)
    now = AGE_S
    assert pool.alloc(1) == [5], "not yet"
    hit = pool.match([7] * 9).blocks
    pool.share(hit)
    pool.drop(hit)  # used once more
    now = 1.5 * AGE_S
    assert pool.alloc(3) == [2, 1, 6], "the old one's, tail first, then what was never given out"
    assert pool.match([7] * 9).blocks == tuple(young)
    pool.check()


def test_what_cannot_be_had_again_does_not_give_way_before_memory_is_taken() -> None:
    """The blocks that the disk lacks hold up no others, unless they are many; less than a block is
    no loss, nor is what is hardly of use."""
    now, lost = 0.0, set[bytes]()
    pool = BlockPool(20 + LOOKS, SIZE)
    pool.clock, pool.kept = lambda: now, lambda key: key not in lost

    def chain(blocks: int, token: int, spent: bool = False) -> list[bytes]:
        table, keys, tokens = pool.alloc(blocks) or [], list[bytes](), [token] * (SIZE * blocks - 1)
        pool.publish(tokens, table, keys, len(tokens))
        pool.publish_tail(tokens, table, keys, len(tokens))
        pool.drop(table, spent)
        return keys

    keys = chain(4, 1)
    lost |= {keys[0], keys[2]}
    now = 2 * AGE_S
    assert pool.alloc(4) == [4, 2, 5, 6], "the tail, what the disk has, and then memory"
    lost.clear()
    assert pool.alloc(2) == [3, 1]
    lost.update(chain(2, 2, spent=True))
    now = 4 * AGE_S
    assert pool.alloc(3) == [8, 7, 9]
    lost.update(chain(LOOKS + 2, 3)[1:])
    now = 6 * AGE_S
    first = pool.given
    assert pool.alloc(3) == [first, first + 1, first + 2], "so many it does not look at"
    pool.check()


def test_unknown_blocks_are_reused_before_known_ones() -> None:
    pool = BlockPool(4, SIZE)
    known = hold(pool, [1, 2, 3, 4])
    blank = pool.alloc(2)
    assert blank
    pool.drop(known)
    pool.drop(blank)
    assert set(pool.alloc(2) or ()) == set(blank)
    assert pool.match([1, 2, 3, 4, 5]).blocks == tuple(known)


def test_copy_sources_under_one_parent_are_bounded() -> None:
    pool = BlockPool(64, SIZE)
    for i in range(3 * PARTS):
        hold(pool, [i, i, i])
    assert sum(map(len, pool.parts.values())) == PARTS
    pool.check()


@pytest.mark.parametrize("blocks, size", [(1, 4), (0, 4), (8, 0)])
def test_no_pool_without_room(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(blocks, size)


class Machine(RuleBasedStateMachine):
    """Sequences over a small alphabet share, grow, publish and leave; a model of the content
    watches."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(12, SIZE)
        self.pool.clock, self.pool.kept = lambda: self.now, lambda key: key[0] < 128
        self.live: list[tuple[list[int], list[int], list[bytes]]] = []
        self.content: dict[
            int, dict[int, tuple[int, ...]]
        ] = {}  # block -> slot -> the whole prefix there

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), upto=st.integers(0, 20))
    def arrive(self, tokens: list[int], upto: int) -> None:
        found = self.pool.match(tokens)
        for i, block in enumerate(found.blocks):
            for slot in range(SIZE):
                assert self.content[block][slot] == tuple(tokens[: i * SIZE + slot + 1])
        start = len(found.blocks) * SIZE
        if found.copy:
            block, n = found.copy
            assert 0 < n and start + n < len(tokens)
            for slot in range(n):
                assert self.content[block][slot] == tuple(tokens[: start + slot + 1])
        self.pool.share(found.blocks)
        fresh = self.pool.alloc(-(-len(tokens) // SIZE) - len(found.blocks))
        if fresh is None:
            self.pool.drop(found.blocks)
            return
        table, keys = [*found.blocks, *fresh], list(found.keys)
        for block in fresh:
            self.content[block] = {}
        for at in range(start, len(tokens)):
            self.content[table[at // SIZE]][at % SIZE] = tuple(tokens[: at + 1])
        upto = min(max(upto, start), len(tokens))
        self.pool.publish(tokens, table, keys, upto)
        self.pool.publish_tail(tokens, table, keys, upto)
        self.live.append((tokens, table, keys))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, table, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.drop(table)

    @rule(thrifty=st.booleans())
    def time_passes(self, thrifty: bool) -> None:
        self.now += AGE_S
        self.pool.thrifty = thrifty

    @rule()
    def forget(self) -> None:
        known, held = len(self.pool.idle), self.pool.used
        assert self.pool.forget() == known and (len(self.pool.idle), self.pool.used) == (0, held)

    @invariant()
    def holds(self) -> None:
        self.pool.check([table for _, table, _ in self.live])
        assert self.pool.used + len(self.pool.free) == self.pool.size - 1


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestMachine = Machine.TestCase
