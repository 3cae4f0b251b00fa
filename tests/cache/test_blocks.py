"""The block pool: each operation alone, and all of them in random order with `check()` after each."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxspec.cache.blocks import MAX_PARTIALS, BlockPool

SIZE = 4


def hold(pool: BlockPool, tokens: list[int], upto: int | None = None) -> list[int]:
    """Blocks for `tokens`, published up to `upto` (default: all)."""
    table = pool.allocate(-(-len(tokens) // SIZE))
    assert table is not None
    publish(pool, tokens, table, len(tokens) if upto is None else upto)
    return table


def publish(pool: BlockPool, tokens: list[int], table: list[int], upto: int) -> list[bytes]:
    """Cache the full blocks of `tokens[:upto]` and the partial one after them; their keys."""
    keys = list(pool.chain(tokens[:upto]))
    for i, key in enumerate(keys):
        content = tuple(tokens[i * SIZE : (i + 1) * SIZE])
        pool.cache(table[i], pool.parent(keys, i), content, key)
    if tail := tuple(tokens[len(keys) * SIZE : upto]):
        pool.cache(table[len(keys)], pool.parent(keys, len(keys)), tail)
    return keys


def match(pool: BlockPool, tokens: list[int]) -> list[int]:
    """The blocks of the longest cached prefix."""
    return [pool.by_key[key] for key in pool.match(tokens)]


def partial(pool: BlockPool, tokens: list[int]) -> tuple[int, int]:
    """The copy source after the cached prefix; one token is left to compute."""
    keys = pool.match(tokens)
    start = len(keys) * SIZE
    rest = tokens[start : min(start + SIZE, len(tokens) - 1)]
    return pool.match_partial(pool.parent(keys, len(keys)), rest)


def test_a_prefix_is_found_by_content_and_position() -> None:
    pool = BlockPool(16, SIZE)
    table = hold(pool, list(range(12)))
    assert match(pool, list(range(12))) == table
    assert match(pool, [*range(8), 99, 99, 99, 99]) == table[:2]
    assert match(pool, list(range(4, 12))) == []  # the same tokens elsewhere are other content
    assert match(pool, [*range(4, 8), *range(4, 8)]) == []


def test_a_partial_block_is_a_copy_source() -> None:
    pool = BlockPool(16, SIZE)
    table = hold(pool, list(range(10)))
    assert partial(pool, list(range(10))) == (table[2], 1)
    assert partial(pool, [*range(10), 50]) == (table[2], 2)
    assert partial(pool, [*range(9), 50, 51]) == (table[2], 1)
    assert partial(pool, list(range(8))) == (0, 0)  # an exact multiple shares all of it
    assert partial(pool, [0, 1, 99]) == (table[0], 2)  # a full block serves as a source as well


def test_only_cached_tokens_match() -> None:
    pool = BlockPool(16, SIZE)
    hold(pool, list(range(12)), upto=6)
    assert len(match(pool, list(range(12)))) == 1 and partial(pool, list(range(12)))[1] == 2


def test_freed_blocks_match_until_evicted_tail_first() -> None:
    pool = BlockPool(5, SIZE)
    tokens = list(range(16))
    table = hold(pool, tokens)
    pool.free(table)
    assert (pool.used, len(pool.idle)) == (0, 4)
    assert pool.allocate(1) == [table[3]]
    assert match(pool, tokens) == table[:3]
    pool.share(table[:3])
    assert pool.allocate(1) is None
    pool.check([table[:3], [table[3]]])


def test_evict_idle_spares_blocks_with_references() -> None:
    pool = BlockPool(8, SIZE)
    held = hold(pool, [1, 2, 3, 4, 5])
    pool.free(hold(pool, [6, 7, 8, 9, 1, 2]))
    assert pool.evict_idle() == 2 and pool.evict_idle() == 0
    assert match(pool, [6, 7, 8, 9, 1, 2]) == []
    assert match(pool, [1, 2, 3, 4, 5]) == held[:1]
    pool.check([held])


def test_evicted_blocks_are_allocated_before_new_ones() -> None:
    pool = BlockPool(20, 4)
    for first in (0, 100):
        pool.free(hold(pool, list(range(first, first + 12))))
    assert pool.highest == 6 and pool.evict_idle() == 6
    held = pool.allocate(6)
    assert held and sorted(held) == [1, 2, 3, 4, 5, 6]
    pool.check([held])


def test_save_memory_evicts_before_taking_new_blocks() -> None:
    pool = BlockPool(20, 4)
    pool.free(hold(pool, list(range(12))))
    pool.save_memory = True
    assert sorted(pool.allocate(2) or []) == [2, 3] and len(pool.idle) == 1
    assert pool.allocate(2) == [1, 4], "and takes it where nothing else is left"
    pool.check([[1, 2, 3, 4]])


def test_blank_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    known = hold(pool, [1, 2, 3, 4])
    blank = pool.allocate(2)
    assert blank
    pool.free(known)
    pool.free(blank)
    assert set(pool.allocate(2) or ()) == set(blank)
    assert match(pool, [1, 2, 3, 4, 5]) == known


def test_copy_sources_under_one_parent_are_bounded() -> None:
    pool = BlockPool(64, SIZE)
    tables = [hold(pool, [i, i, i]) for i in range(3 * MAX_PARTIALS)]
    assert sum(map(len, pool.partials.values())) == MAX_PARTIALS
    pool.check(tables)


class Machine(RuleBasedStateMachine):
    """Sequences over a small alphabet share, grow, publish and leave; a model of the content
    watches."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.live: list[list[int]] = []
        self.content: dict[
            int, dict[int, tuple[int, ...]]
        ] = {}  # block -> slot -> the whole prefix there

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), upto=st.integers(0, 20))
    def arrive(self, tokens: list[int], upto: int) -> None:
        keys, blocks = self.pool.match(tokens), match(self.pool, tokens)
        for i, block in enumerate(blocks):
            for slot in range(SIZE):
                assert self.content[block][slot] == tuple(tokens[: i * SIZE + slot + 1])
        start = len(blocks) * SIZE
        block, n = partial(self.pool, tokens)
        assert n == 0 or start + n < len(tokens)
        for slot in range(n):
            assert self.content[block][slot] == tuple(tokens[: start + slot + 1])
        self.pool.share(blocks)
        fresh = self.pool.allocate(-(-len(tokens) // SIZE) - len(blocks))
        if fresh is None:
            self.pool.free(blocks)
            return
        table = [*blocks, *fresh]
        for block in fresh:
            self.content[block] = {}
        for at in range(start, len(tokens)):
            self.content[table[at // SIZE]][at % SIZE] = tuple(tokens[: at + 1])
        assert publish(self.pool, tokens, table, max(upto, start))[: len(keys)] == keys
        self.live.append(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), low_priority=st.booleans())
    def leave(self, data: st.DataObject, low_priority: bool) -> None:
        table = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.free(table, low_priority)

    @rule(save_memory=st.booleans())
    def memory_changes(self, save_memory: bool) -> None:
        self.pool.save_memory = save_memory

    @rule()
    def evict(self) -> None:
        known, held = len(self.pool.idle), self.pool.used
        assert self.pool.evict_idle() == known and (len(self.pool.idle), self.pool.used) == (
            0,
            held,
        )

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.live)
        assert self.pool.used + len(self.pool.free_blocks) == self.pool.size - 1


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestMachine = Machine.TestCase
