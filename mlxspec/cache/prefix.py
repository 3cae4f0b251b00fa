"""A model's KV cache as the scheduler sees it: one pool for full attention, one per sliding window,
and the states of recurrent layers, all indexed by one hash chain.

Rule: a sequence's tables grow together. A prefix is reused up to a position where every pool can
continue; blocks that left the window are freed and replaced by the null block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.states import StateCache
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
        each = -(-(tokens + 2 * (1 + depth)) // block_size) + 2
        return 1 + sequences * each + -(-2 * chunk // block_size)

    def first(self, position: int) -> int:
        """Index of the first block that the row at `position` sees."""
        return max(0, position - self.tokens + 1) // self.pool.block_size


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
    groups: list[Window] = field(init=False)  # full attention first, then the windows
    pools: list[BlockPool] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = [Window(FULL_ATTENTION, self.pool), *self.windows]
        self.pools = [group.pool for group in self.groups]

    @property
    def num_free(self) -> int:
        """Blocks that are free in every pool."""
        return min(len(pool.free_blocks) for pool in self.pools)

    # ---- the prefix cache

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The longest reusable prefix of `tokens`, their last token excepted. Changes nothing, but
        marks the state that it finds as used."""
        size, last = self.pool.block_size, len(tokens) - 1
        keys = self.pool.match(tokens)
        known = len(keys) * size
        for n in self._resumable(keys, last):
            start, parent = min(n * size, last), self.pool.parent(keys, n)
            rest = tuple(tokens[start : min(start + size, last)]) if start == n * size else ()
            if self.states is None:
                sources, extra = self._match_partial(parent, rest)
                return self._matched(keys[:n], start, sources, extra, known)
            tails = self.states.tails(parent) if n * size <= last else []
            for tail in tails:
                sources, extra = self._match_partial(parent, tail)
                if extra == len(tail) and rest[:extra] == tail:
                    state = self.states.use((parent, tail))
                    return self._matched(keys[:n], start, sources, extra, known, state)
        return PrefixMatch(known=known)

    def _match_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[list[int], int]:
        """In each pool the block to copy from, and how many leading tokens all of them share."""
        found = [pool.match_partial(parent, tokens) for pool in self.pools]
        return [block for block, _ in found], min(n for _, n in found)

    def _matched(
        self,
        keys: Sequence[bytes],
        start: int,
        sources: Sequence[int],
        extra: int,
        known: int,
        state: Any = None,
    ) -> PrefixMatch:
        tables = []
        for group in self.groups:
            first = group.first(start)
            blocks = [group.pool.by_key[key] for key in keys[first:]]
            tables.append([NULL_BLOCK] * (len(keys) - len(blocks)) + blocks)
        return PrefixMatch(start + extra, keys, tables, sources if extra else (), state, known)

    def _resumable(self, keys: Sequence[bytes], last: int) -> list[int]:
        """The numbers of leading blocks after which every window can continue, highest first."""
        found = set(range(len(keys) + 1))
        for window in self.windows:
            run = 0  # cached blocks in a row before block n
            for n in range(len(keys) + 1):
                if run < n - window.first(min(n * self.pool.block_size, last)):
                    found.discard(n)
                run = run + 1 if n < len(keys) and keys[n] in window.pool.by_key else 0
        return sorted(found, reverse=True)

    def cache_blocks(self, seq: Seq, upto: int) -> None:
        """Index the full blocks of the sequence's first `upto` tokens, extending `seq.keys`."""
        size, first = self.pool.block_size, len(seq.keys)
        parent = self.pool.parent(seq.keys, first)
        for i, key in enumerate(self.pool.chain(seq.tokens[first * size : upto], parent), first):
            content = tuple(seq.tokens[i * size : (i + 1) * size])
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache(table[i], key, parent, content)
            seq.keys.append(key)
            parent = key

    def cache_partial(self, seq: Seq, upto: int) -> None:
        """Offer the partly filled block that ends at `upto` as a copy source."""
        parent, tail = self._name(seq, upto)
        if tail:
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.cache_partial(table[upto // pool.block_size], parent, tail)

    def cache_state(self, seq: Seq, upto: int, state: Any) -> None:
        """Keep the recurrent state after the sequence's first `upto` tokens, which are cached."""
        assert self.states is not None
        self.states.put(self._name(seq, upto), state)

    def _name(self, seq: Seq, upto: int) -> tuple[bytes, tuple[int, ...]]:
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
        tables = [list(table) for table in match.tables] or [[] for _ in self.pools]
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(_owned(table))
        if match.sources and not self.num_free:  # no block to copy to
            self._free(tables)
            return self.allocate_prefix(seq, PrefixMatch(known=match.known))
        copies: Copies = []
        for group, source in enumerate(match.sources):
            tables[group] += self.pools[group].allocate(1) or ()
            copies.append((group, source, tables[group][-1]))
        seq.table, *seq.windows = tables
        seq.keys, seq.state, seq.computed = list(match.keys), match.state, match.length
        seq.shared = len(match.keys) * size
        seq.marks = [match.known // size] if match.known > match.length else []
        if self.states is None or seq.prompt_len - match.length > MIN_PROMPT * size:
            seq.marks.append((seq.prompt_len - 1) // size)
        return copies

    def blocks_needed(self, seq: Seq, upto: int) -> int:
        """Blocks that each of the sequence's tables lacks to hold `upto` tokens."""
        return max(0, -(-upto // self.pool.block_size) - len(seq.table))

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
            for i in range(min(window.first(position), len(table)) - 1, -1, -1):
                if table[i] == NULL_BLOCK:
                    break
                window.pool.free([table[i]], low_priority=not self._useful(seq, window, i))
                table[i] = NULL_BLOCK

    def _useful(self, seq: Seq, window: Window, i: int) -> bool:
        """Whether a hit at one of the sequence's marks would need window block `i`."""
        marks = [*seq.marks, (i // WINDOW_STRIDE + 1) * WINDOW_STRIDE]
        return any(window.first(mark * self.pool.block_size) <= i < mark for mark in marks)

    def limit_rows(self, seq: Seq, rows: int) -> int:
        """At most `rows` next rows, fewer if a recurrent state is to be kept in between."""
        if self.states is None or not self.states.capacity:
            return rows
        size, stride = self.pool.block_size, self.states.stride
        at = seq.computed // size
        marks = [*seq.marks, (at // stride + 1) * stride]
        return min([rows, *(mark * size - seq.computed for mark in marks if mark > at)])

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
        seq.table, seq.windows, seq.keys = [], [[] for _ in self.windows], []
        seq.state = seq.batch = None
        seq.computed = seq.shared = seq.cached = 0

    def _free(self, tables: Sequence[Sequence[int]]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.free(_owned(table))

    def check(self, seqs: Iterable[Seq]) -> None:
        """Assert every invariant of the pools and of `seqs`, which are all there are."""
        for group, pool in enumerate(self.pools):
            pool.check([_owned(seq.tables[group]) for seq in seqs])
        for seq in seqs:
            assert len({len(table) for table in seq.tables}) == 1, "tables of different lengths"
            assert NULL_BLOCK not in seq.table, "a null block under full attention"
        if self.states is not None:
            self.states.check()


def _owned(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != NULL_BLOCK]
