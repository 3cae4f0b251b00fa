"""A model's KV cache as the scheduler sees it: one pool for full attention, one per sliding window,
and the states of recurrent layers, all indexed by one hash chain.

Rule: a sequence's tables grow together. A prefix is reused up to a position where every pool can
continue; blocks that left the window are freed and replaced by the null block.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.cache.blocks import BlockPool, Tokens
from mlxspec.cache.states import Name, StateCache
from mlxspec.types import NULL_BLOCK, Seq

WINDOW_STRIDE = 256  # blocks after which a passed window is kept for a while, so that hits happen
MIN_PROMPT = 4  # blocks of a prompt for which a state before its last token is worth a step

Keys = Sequence[bytes]
Copies = list[tuple[int, int, int]]  # (pool, source block, target block); pool 0 is full attention


@dataclass(frozen=True, slots=True)
class Window:
    """The layers that see the last `tokens` tokens only, and the pool of their blocks."""

    tokens: int
    pool: BlockPool

    @staticmethod
    def min_blocks(
        tokens: int,
        block_size: int,
        sequences: int,
        chunk: int,
        depth: int,
    ) -> int:
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

    def seen(self, keys: Keys) -> Keys:
        """The last blocks of a chain: those that the next row sees."""
        end = len(keys) * self.pool.block_size
        return keys[self.first(end) :]

    def holds(self, keys: Keys) -> bool:
        """Whether the next row after a chain finds its window in the pool."""
        last_first = reversed(self.seen(keys))
        return all(key in self.pool.by_key for key in last_first)

    def table(self, keys: Keys) -> list[int]:
        """The cached blocks of a chain; those that the next row cannot see are null."""
        blocks = [self.pool.by_key[key] for key in self.seen(keys)]
        passed = [NULL_BLOCK for _ in keys[len(blocks) :]]
        return passed + blocks


FULL_ATTENTION = 1 << 62  # tokens of a window that never slides


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt, `length` tokens long.

    `tables` are the blocks to share, by pool; `sources` the blocks whose first slots are copied
    after them; `state` that of the recurrent layers. `known` tokens are cached in the
    full-attention pool, though another pool may not be able to continue there."""

    length: int = 0
    keys: Keys = ()
    tables: tuple[list[int], ...] = ()
    sources: tuple[int, ...] = ()
    state: Any = None
    known: int = 0


class KVCacheManager:
    """`pool` is that of full attention; `states` is there if the model has recurrent layers.

    `layers` and `pools` are all of them: full attention first, then the windows."""

    def __init__(
        self,
        pool: BlockPool,
        windows: Sequence[Window] = (),
        states: StateCache | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.windows = windows
        self.states = states
        self.layers = [Window(FULL_ATTENTION, pool), *windows]
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
        cached = self.pool.match(prompt)
        known = len(cached) * self.block_size
        for n, tail in self._candidates(cached, prompt):
            keys = cached[:n]
            if not all(window.holds(keys) for window in self.windows):
                continue
            parent = self.pool.parent(keys, n)
            found = [pool.match_partial(parent, tail) for pool in self.pools]
            copied = min(length for _, length in found)
            state = None
            if self.states is not None:
                if copied < len(tail):
                    continue
                state = self.states.use((parent, tail))
            sources = tuple(block for block, _ in found) if copied else ()
            tables = tuple(window.table(keys) for window in self.layers)
            length = n * self.block_size + copied
            return PrefixMatch(length, keys, tables, sources, state, known)
        return PrefixMatch(known=known)

    def _candidates(self, keys: Keys, prompt: Tokens) -> Iterator[tuple[int, Tokens]]:
        """Where a prefix may end, the longest first: the number of cached blocks, and the tokens
        behind them to look for. With recurrent layers these are the places that have a state."""
        size = self.block_size
        if self.states is None:
            for n in range(len(keys), -1, -1):
                yield n, prompt[n * size : (n + 1) * size]
            return
        blocks = {key: n for n, key in enumerate([self.pool.root, *keys])}
        found = []
        for parent, tail in self.states:
            if parent in blocks:
                n = blocks[parent]
                end = n * size + len(tail)
                if prompt[n * size : end] == tail:
                    found.append((end, n, tail))
        for _, n, tail in sorted(found, reverse=True):
            yield n, tail

    def cache_blocks(self, seq: Seq, upto: int) -> None:
        """Index the full blocks of the sequence's first `upto` tokens, extending `seq.keys`."""
        n = len(seq.keys)
        new = seq.tokens[n * self.block_size : upto]
        parent = self.pool.parent(seq.keys, n)
        for key in self.pool.chain(new, parent):
            n = len(seq.keys)
            start = n * self.block_size
            content = tuple(seq.tokens[start : start + self.block_size])
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache(table[n], parent, content, key)
            seq.keys.append(key)
            parent = key

    def cache_partial(self, seq: Seq, upto: int) -> None:
        """Offer the partly filled block that ends at `upto` as a copy source."""
        parent, tail = self._name(seq, upto)
        if tail:
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache(table[upto // self.block_size], parent, tail)

    def cache_state(self, seq: Seq, upto: int, state: Any) -> None:
        """Keep the recurrent state after the sequence's first `upto` tokens, which are cached."""
        assert self.states is not None
        self.states.put(self._name(seq, upto), state)

    def _name(self, seq: Seq, upto: int) -> Name:
        """The key of the last full block before `upto`, and the tokens after it."""
        n = upto // self.block_size
        tail = seq.tokens[n * self.block_size : upto]
        return self.pool.parent(seq.keys, n), tuple(tail)

    def evict_cached(self) -> int:
        """Evict all that no sequence uses; how many blocks that were."""
        if self.states is not None:
            self.states.clear()
        return sum(pool.evict_idle() for pool in self.pools)

    # ---- the blocks of a sequence

    def allocate_prefix(self, seq: Seq, match: PrefixMatch) -> Copies:
        """Give a sequence without blocks its cached prefix. Returns the blocks to copy."""
        if match.tables:
            seq.table, *seq.windows = match.tables
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.share(table)
        if match.sources and not self.num_free:  # no block to copy to
            self.free(seq)
            return self.allocate_prefix(seq, PrefixMatch(known=match.known))
        copies = []
        for i, source in enumerate(match.sources):
            table = seq.tables[i]
            table += self.pools[i].allocate(1) or ()
            copies.append((i, source, table[-1]))
        seq.keys = list(match.keys)
        seq.state = match.state
        seq.computed = match.length
        seq.marks = []
        if match.known > match.length:
            seq.marks.append(match.known // self.block_size)
        left = seq.prompt_len - match.length
        if self.states is None or left > MIN_PROMPT * self.block_size:
            seq.marks.append((seq.prompt_len - 1) // self.block_size)
        return copies

    def blocks_needed(self, seq: Seq, upto: int) -> int:
        """Blocks that each of the sequence's tables lacks to hold `upto` tokens."""
        needed = math.ceil(upto / self.block_size)
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
        for window, table in zip(self.windows, seq.windows, strict=True):
            for i in reversed(range(window.first(position))):
                if table[i] == NULL_BLOCK:
                    break
                low_priority = True
                for mark in _marks(seq, i, WINDOW_STRIDE):
                    if window.first(mark * self.block_size) <= i < mark:
                        low_priority = False
                window.pool.free([table[i]], low_priority)
                table[i] = NULL_BLOCK

    def limit_rows(self, seq: Seq, rows: int) -> int:
        """At most `rows` next rows, fewer if a recurrent state is to be kept in between."""
        if self.states is None:
            return rows
        block = seq.computed // self.block_size
        for mark in _marks(seq, block, self.states.stride):
            if mark > block:
                rows = min(rows, mark * self.block_size - seq.computed)
        return rows

    def keeps_state(self, seq: Seq, upto: int) -> bool:
        """Whether to keep the state after `upto` tokens: at the prompt's end, where prompts part,
        and every `stride` blocks."""
        if self.states is None:
            return False
        if upto == seq.prompt_len:
            return True
        n, rest = divmod(upto, self.block_size)
        at_mark = n in seq.marks or n % self.states.stride == 0
        return at_mark and not rest

    def free(self, seq: Seq) -> None:
        """Take all blocks and the state from the sequence."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.free(table)
        seq.table = []
        seq.windows = [[] for _ in self.windows]
        seq.keys = []
        seq.state = seq.batch = None
        seq.computed = seq.cached = 0

    def check(self, seqs: Iterable[Seq]) -> None:
        """Assert every invariant of the pools and of `seqs`, which are all there are."""
        for i, pool in enumerate(self.pools):
            pool.check([seq.tables[i] for seq in seqs])
        for seq in seqs:
            lengths = set(map(len, seq.tables))
            assert len(lengths) == 1, "tables of different lengths"
            assert NULL_BLOCK not in seq.table, "a null block under full attention"
        if self.states is not None:
            self.states.check()


def _marks(seq: Seq, block: int, stride: int) -> list[int]:
    """The blocks where a later prompt may branch off: known ones, and the next of every `stride`
    after `block`."""
    return [*seq.marks, (block // stride + 1) * stride]
