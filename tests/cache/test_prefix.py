"""Pools with one hash chain: what a hit gives each of them, what leaves a window, where states are kept."""

import pytest

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.prefix import MIN_PROMPT, WINDOW_STRIDE, KVCacheManager, StateCache, Window
from mlxspec.sequences import Seq
from mlxspec.types import NULL_BLOCK, Request

SIZE = 4


def groups(blocks: int = 64, *windows: tuple[int, int], states: int = 0) -> KVCacheManager:
    own = [Window(tokens, BlockPool(n, SIZE)) for tokens, n in windows]
    return KVCacheManager(BlockPool(blocks, SIZE), own, StateCache(states, 8) if states else None)


def sequence(g: KVCacheManager, prompt: list[int]) -> Seq:
    seq = Seq(Request("r", tuple(prompt), 8), tokens=list(prompt))
    seq.windows = [[] for _ in g.windows]
    return seq


def read(g: KVCacheManager, prompt: list[int], step: int = SIZE) -> Seq:
    """A sequence whose prompt is computed and published, `step` tokens at a time."""
    seq = sequence(g, prompt)
    g.allocate_prefix(seq, g.match(prompt))
    while seq.computed < len(prompt):
        upto = min(seq.computed + step, len(prompt))
        assert g.allocate(seq, g.blocks_needed(seq, upto))
        seq.computed = upto
        g.cache_blocks(seq, upto)
        g.cache_partial(seq, upto)
        g.free_passed(seq, upto)
    g.check([seq])
    return seq


def test_blocks_outside_the_window_are_freed() -> None:
    g = groups(64, (10, 64))
    seq = read(g, list(range(50)))
    assert len(seq.table) == 13 and NULL_BLOCK not in seq.table
    (table,) = seq.windows
    # the row at 48, where the last block begins, sees 39 to 48
    assert table[:9] == [NULL_BLOCK] * 9 and NULL_BLOCK not in table[9:]
    assert g.windows[0].pool.used == 4
    g.free(seq)
    assert [pool.used for pool in g.pools] == [0, 0]


def test_an_answer_can_be_continued_at_its_end() -> None:
    """Wherever in a block it ends: the window before the last full block is kept."""
    for length in range(40, 48):
        g = groups(64, (10, 64))
        seq = read(g, [1, 2, 3])
        seq.tokens += range(3, length)
        while seq.computed < length:
            assert g.allocate(seq, g.blocks_needed(seq, seq.computed + 1))
            seq.computed += 1
            g.cache_blocks(seq, seq.computed)
            g.free_passed(seq, seq.computed)
        g.cache_partial(seq, length)
        turn = [*seq.tokens, 7]
        g.free(seq)
        assert g.match(turn).length == length


@pytest.mark.parametrize(
    "window, depth, chunk, sequences", [(10, 3, 8, 1), (1, 0, 1, 4), (33, 7, 30, 2)]
)
def test_min_blocks_suffice(window: int, depth: int, chunk: int, sequences: int) -> None:
    """All of them at once, each with a step in flight whose rows are not committed yet."""
    n = Window.min_blocks(window, SIZE, sequences, chunk, depth)
    g = groups(10_000, (window, n))
    seqs = [sequence(g, list(range(900))) for _ in range(sequences)]
    for seq in seqs:
        g.allocate_prefix(seq, g.match(seq.tokens))
    for step in range(800 // chunk):
        for i, seq in enumerate(seqs):
            rows = chunk if i == step % sequences else 1 + depth
            assert g.allocate(seq, g.blocks_needed(seq, seq.computed + rows))
            g.free_passed(seq, seq.computed)  # only what was committed a step ago
            seq.computed += rows if seq.computed < 900 - 2 * chunk else 0
    g.check(seqs)


def test_a_match_needs_the_window_before_it() -> None:
    g = groups(64, (10, 64))
    prompt = list(range(48))
    g.free(read(g, prompt))
    hit = g.match([*prompt, 99])
    assert hit.length == 48 and hit.tables[0].count(NULL_BLOCK) == 0
    assert hit.tables[1][:9] == [NULL_BLOCK] * 9 and NULL_BLOCK not in hit.tables[1][9:]
    (w,) = g.windows
    lost = hit.tables[1][10]
    # Any block may go; the one in the middle of the last window does.
    w.pool.idle.move_to_end(lost, last=False)
    w.pool.free_blocks.move_to_end(lost, last=False)
    for block in [b for b in w.pool.free_blocks if b not in w.pool.parents]:
        w.pool.free_blocks.move_to_end(block)
    assert w.pool.allocate(1) == [lost]
    shorter = g.match([*prompt, 99])
    assert (
        shorter.full_length == 48 and shorter.length == 40
    )  # the last place whose window is whole
    w.pool.free([lost])


def test_the_window_is_kept_where_prompts_branch() -> None:
    """What has passed is evicted first; what a branch point sees stays as long as anything."""
    g = groups(200, (8, 10))
    shared = list(range(40))
    g.free(read(g, [*shared, *range(100, 140)]))
    assert g.match([*shared, 7, 7, 7]).length < 40  # nobody knew that it would be wanted
    second = sequence(g, [*shared, *range(200, 240)])
    hit = g.match(second.tokens)
    assert hit.full_length == 40
    g.free(read(g, second.tokens))
    third = g.match([*shared, 7, 7, 7])
    assert third.length == 40


def test_a_periodic_branch_point_is_kept_of_a_long_prompt() -> None:
    g = groups(2000, (8, 40))
    g.free(read(g, [i % 251 for i in range(WINDOW_STRIDE * SIZE + 400)]))
    assert (
        g.match([i % 251 for i in range(WINDOW_STRIDE * SIZE + 1)]).length == WINDOW_STRIDE * SIZE
    )


def test_a_partial_block_is_copied_in_every_group() -> None:
    g = groups(64, (10, 64))
    held = read(g, list(range(22)))
    hit = g.match([*range(22), 50])
    assert hit.length == 22 and len(hit.sources) == 2
    seq = sequence(g, [*range(22), 50])
    copies = g.allocate_prefix(seq, hit)
    assert copies == [(0, held.table[5], seq.table[5]), (1, held.windows[0][5], seq.windows[0][5])]
    assert seq.computed == 22
    g.check([held, seq])


def test_a_match_ends_at_a_state() -> None:
    g = groups(64, states=4)
    seq = read(g, list(range(30)))
    assert g.match([*range(30), 1]).length == 0 and g.match([*range(30), 1]).full_length == 28
    seq.branch_points.append(12 // SIZE)
    g.cache_state(seq, 12, "at 12")
    g.cache_state(seq, 30, "at 30")
    hit = g.match([*range(30), 1])
    assert (hit.length, hit.state, len(hit.tables[0]), len(hit.sources)) == (30, "at 30", 7, 1)
    hit = g.match(list(range(30)))  # one token is left to compute
    assert (hit.length, hit.state, hit.full_length) == (12, "at 12", 28)
    assert g.match([*range(12), 9]).length == 12 and g.match(list(range(12))).length == 0


def test_a_state_without_a_block_to_copy_to_is_not_used() -> None:
    g = groups(9, states=4)
    seq = read(g, list(range(30)))
    g.cache_state(seq, 30, "at 30")
    late = sequence(g, [*range(30), 1])
    hit = g.match(late.tokens)
    assert (
        g.allocate_prefix(late, hit) == []
        and late.state.recurrent is None
        and late.computed == 0
        and not late.table
    )
    g.check([seq, late])


def test_steps_end_where_a_state_is_kept() -> None:
    g = groups(99, states=4)
    seq = sequence(g, list(range(90)))
    g.allocate_prefix(seq, g.match(seq.tokens))
    ends = []
    while seq.computed < 90:
        seq.computed += g.limit_rows(seq, min(25, 90 - seq.computed))
        ends.append(seq.computed)
    assert ends == [25, 32, 57, 64, 88, 90]  # every 8 blocks, and the last full one of the prompt
    assert g.states and g.allocate(seq, g.blocks_needed(seq, 90))
    g.cache_blocks(seq, 90)
    for at in ends:
        g.cache_state(seq, at, at)
    assert list(g.states.snapshots.values()) == [32, 64, 88, 90]
    short = sequence(g, list(range(100, 100 + MIN_PROMPT * SIZE)))
    g.allocate_prefix(short, g.match(short.tokens))
    assert g.limit_rows(short, MIN_PROMPT * SIZE) == MIN_PROMPT * SIZE
    assert groups().limit_rows(seq, 25) == 25


@pytest.mark.parametrize("window", [0, 10])
def test_a_reread_hit_computes_its_last_token_in_a_copy(window: int) -> None:
    """Of a block that goes on with that very token, which another block with the same start does
    not."""
    for length in range(1, 4 * SIZE + 2):
        g = groups(64, *([(window, 64)] if window else []))
        prompt = list(range(length))
        for last in (99, length - 1, 98):
            g.free(read(g, [*prompt[:-1], last]))
        plain = g.match([*prompt, 7])
        g.recompute_last = True
        match = g.match([*prompt, 7])
        assert match.length == length - 1 == plain.length - 1
        seq = sequence(g, [*prompt, 7])
        copies = g.allocate_prefix(seq, match)
        assert [pool for pool, _, _ in copies] == list(range(len(g.pools)))
        for pool, source, target in copies:
            assert (
                target == seq.tables[pool][(length - 1) // SIZE] and g.pools[pool].refs[target] == 1
            )
            key = g.pools[pool].parents[source]
            held = g.pools[pool].partials[key][source]
            assert held[(length - 1) % SIZE] == length - 1
        g.check([seq])
