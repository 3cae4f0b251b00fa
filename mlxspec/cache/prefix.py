"""A model's KV cache as the scheduler sees it: one pool for full attention, one per sliding window,
and the states of recurrent layers, all indexed by one hash chain.

Rule: a sequence's tables grow together. A prefix is reused up to a position where every pool can
continue; blocks that left the window are freed and replaced by the null block.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.cache.blocks import BlockPool, Tokens
from mlxspec.cache.states import Name, StateCache
from mlxspec.types import NULL_BLOCK
from mlxspec.types import Sequence as Seq

WINDOW_STRIDE = 256  # blocks after which a passed window is kept for a while, so that hits happen
MIN_PROMPT = 4  # blocks of a prompt for which a state before its last token is worth a step

Copies = list[tuple[int, int, int]]  # (pool, source block, target block); pool 0 is full attention


@dataclass(frozen=True, slots=True)
class Window:
    """The layers that see the last `tokens` tokens only, and the pool of their blocks."""

    tokens: int
    pool: BlockPool

    @staticmethod
    def min_blocks(tokens: int, block_size: int, sequences: int, chunk: int, depth: int) -> int:
        """Blocks, null block included, that always suffice for `sequences`: each holds its window
        and `1 + depth` rows of two steps; together they hold `chunk` prompt rows a step."""
        own = tokens + 2 * (1 + depth)
        own_blocks = math.ceil(own / block_size) + 2
        prompt_blocks = math.ceil(2 * chunk / block_size)
        return 1 + sequences * own_blocks + prompt_blocks

    def first(self, position: int) -> int:
        """Index of the first block that the row at `position` sees."""
        oldest = max(0, position - self.tokens + 1)
        return oldest // self.pool.block_size

    def table(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks of a chain; those that the next row cannot see are null."""
        first = self.first(len(keys) * self.pool.block_size)
        passed = [NULL_BLOCK for _ in keys[:first]]
        return passed + [self.pool.by_key[key] for key in keys[first:]]


FULL_ATTENTION = 1 << 62  # tokens of a window that never slides


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt, `length` tokens long.

    `tables` are the blocks to share, by pool; `sources` the blocks whose first slots are copied
    after them; `state` that of the recurrent layers. `known` tokens are cached in the
    full-attention pool, though another pool may not be able to continue there."""

    length: int = 0
    keys: Sequence[bytes] = ()
    tables: Sequence[Sequence[int]] = ()
    sources: Sequence[int] = ()
    state: Any = None
    known: int = 0


@dataclass(slots=True)
class KVCacheManager:
    """`pool` is that of full attention; `states` is there if the model has recurrent layers."""

    pool: BlockPool
    windows: Sequence[Window] = ()
    states: StateCache | None = None
    layers: list[Window] = field(init=False)  # all pools: full attention first, then the windows
    pools: list[BlockPool] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [Window(FULL_ATTENTION, self.pool), *self.windows]
        self.pools = [window.pool for window in self.layers]

    @property
    def num_free(self) -> int:
        """Blocks that are free in every pool."""
        return min(len(pool.free_blocks) for pool in self.pools)

    # ---- the prefix cache

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The longest reusable prefix of `tokens`, their last token excepted. Changes nothing, but
        marks the state that it finds as used."""
        prompt = tuple(tokens[:-1])
        keys = self.pool.match(prompt)
        size = self.pool.block_size
        known = len(keys) * size
        for n, tail in self._candidates(keys, prompt):
            if not self._windows_hold(keys[:n]):
                continue
            parent = self.pool.parent(keys, n)
            found = [pool.match_partial(parent, tail) for pool in self.pools]
            copied = min(length for _, length in found)
            state = None
            if self.states is not None:
                if copied < len(tail):
                    continue
                state = self.states.use((parent, tail))
            sources = [block for block, _ in found] if copied else []
            tables = [window.table(keys[:n]) for window in self.layers]
            return PrefixMatch(n * size + copied, keys[:n], tables, sources, state, known)
        return PrefixMatch(known=known)

    def _candidates(self, keys: Sequence[bytes], prompt: Tokens) -> Iterator[tuple[int, Tokens]]:
        """Where a prefix may end, the longest first: the number of cached blocks, and the tokens
        behind them to look for. With recurrent layers these are the places that have a state."""
        size = self.pool.block_size
        if self.states is None:
            for n in range(len(keys), -1, -1):
                yield n, prompt[n * size : (n + 1) * size]
            return
        blocks = {key: n for n, key in enumerate([self.pool.root, *keys])}
        found = []
        for parent, tail in self.states:
            start = blocks.get(parent)
            if start is not None and prompt[start * size :][: len(tail)] == tail:
                found.append((start, len(tail), tail))
        for n, _, tail in sorted(found, reverse=True):
            yield n, tail

    def _windows_hold(self, keys: Sequence[bytes]) -> bool:
        """Whether every window has the last blocks of a chain that the next row sees."""
        for window in self.windows:
            first = window.first(len(keys) * window.pool.block_size)
            for key in reversed(keys[first:]):
                if key not in window.pool.by_key:
                    return False
        return True

    def cache_blocks(self, seq: Seq, upto: int) -> None:
        """Index the full blocks of the sequence's first `upto` tokens, extending `seq.keys`."""
        size = self.pool.block_size
        start = len(seq.keys) * size
        parent = self.pool.parent(seq.keys, len(seq.keys))
        for key in self.pool.chain(seq.tokens[start:upto], parent):
            content = tuple(seq.tokens[start : start + size])
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache(table[start // size], parent, content, key)
            seq.keys.append(key)
            parent = key
            start += size

    def cache_partial(self, seq: Seq, upto: int) -> None:
        """Offer the partly filled block that ends at `upto` as a copy source."""
        parent, tail = self._name(seq, upto)
        if tail:
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache(table[upto // pool.block_size], parent, tail)

    def cache_state(self, seq: Seq, upto: int, state: Any) -> None:
        """Keep the recurrent state after the sequence's first `upto` tokens, which are cached."""
        assert self.states is not None
        self.states.put(self._name(seq, upto), state)

    def _name(self, seq: Seq, upto: int) -> Name:
        """The key of the last full block before `upto`, and the tokens after it."""
        n = upto // self.pool.block_size
        tail = tuple(seq.tokens[n * self.pool.block_size : upto])
        return self.pool.parent(seq.keys, n), tail

    def evict_cached(self) -> int:
        """Evict all that no sequence uses; how many blocks that were."""
        if self.states is not None:
            self.states.clear()
        return sum(pool.evict_idle() for pool in self.pools)

    # ---- the blocks of a sequence

    def allocate_prefix(self, seq: Seq, match: PrefixMatch) -> Copies:
        """Give a sequence without blocks its cached prefix. Returns the blocks to copy."""
        size = self.pool.block_size
        tables: list[list[int]] = [[] for _ in self.pools]
        for table, shared in zip(tables, match.tables, strict=False):
            table += shared
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(table)
        if match.sources and not self.num_free:  # no block to copy to
            self._free(tables)
            return self.allocate_prefix(seq, PrefixMatch(known=match.known))
        copies: Copies = []
        for i, source in enumerate(match.sources):
            for block in self.pools[i].allocate(1) or ():
                tables[i].append(block)
                copies.append((i, source, block))
        seq.table, *seq.windows = tables
        seq.keys = list(match.keys)
        seq.state = match.state
        seq.computed = match.length
        seq.marks = []
        if match.known > match.length:
            seq.marks.append(match.known // size)
        if self.states is None or seq.prompt_len - match.length > MIN_PROMPT * size:
            seq.marks.append((seq.prompt_len - 1) // size)
        return copies

    def blocks_needed(self, seq: Seq, upto: int) -> int:
        """Blocks that each of the sequence's tables lacks to hold `upto` tokens."""
        needed = math.ceil(upto / self.pool.block_size)
        return max(0, needed - len(seq.table))

    def allocate(self, seq: Seq, n: int) -> bool:
        """Append `n` blocks to each table, or nothing at all."""
        if n > self.num_free:
            return False
        for pool, table in zip(self.pools, seq.tables, strict=True):
            table += pool.allocate(n) or ()
        return True

    def free_passed(self, seq: Seq, position: int) -> None:
        """Free the window blocks that rows from `position` on cannot see. Blocks that a later hit
        may need are evicted like any other, the rest first."""
        size = self.pool.block_size
        for window, table in zip(self.windows, seq.windows, strict=True):
            passed = table[: window.first(position)]
            for i in reversed(range(len(passed))):
                if table[i] == NULL_BLOCK:
                    break
                marks = _marks(seq, i, WINDOW_STRIDE)
                useful = any(window.first(mark * size) <= i < mark for mark in marks)
                window.pool.free([table[i]], low_priority=not useful)
                table[i] = NULL_BLOCK

    def limit_rows(self, seq: Seq, rows: int) -> int:
        """At most `rows` next rows, fewer if a recurrent state is to be kept in between."""
        if self.states is None or not self.states.capacity:
            return rows
        size = self.pool.block_size
        block = seq.computed // size
        for mark in _marks(seq, block, self.states.stride):
            if mark > block:
                rows = min(rows, mark * size - seq.computed)
        return rows

    def keeps_state(self, seq: Seq, upto: int) -> bool:
        """Whether to keep the state after `upto` tokens: at the prompt's end, where prompts part,
        and every `stride` blocks."""
        if self.states is None:
            return False
        n, rest = divmod(upto, self.pool.block_size)
        at_mark = n in seq.marks or n % self.states.stride == 0
        return upto == seq.prompt_len or (not rest and at_mark)

    def free(self, seq: Seq) -> None:
        """Take all blocks and the state from the sequence."""
        self._free(seq.tables)
        seq.table = []
        seq.windows = [[] for _ in self.windows]
        seq.keys = []
        seq.state = seq.batch = None
        seq.computed = seq.cached = 0

    def _free(self, tables: Sequence[Sequence[int]]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free(table)

    def check(self, seqs: Iterable[Seq]) -> None:
        """Assert every invariant of the pools and of `seqs`, which are all there are."""
        for i, pool in enumerate(self.pools):
            pool.check([seq.tables[i] for seq in seqs])
        for seq in seqs:
            for table in seq.windows:
                assert len(table) == len(seq.table), "tables of different lengths"
            assert NULL_BLOCK not in seq.table, "a null block under full attention"
        if self.states is not None:
            self.states.check()


def _marks(seq: Seq, block: int, stride: int) -> list[int]:
    """The blocks where a later prompt may branch off: known ones, and the next of every `stride`
    after `block`."""
    return [*seq.marks, (block // stride + 1) * stride]
