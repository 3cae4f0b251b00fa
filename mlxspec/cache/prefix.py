"""A model's KV cache as the scheduler sees it: one pool for full attention, one per sliding window,
and the states of recurrent layers, all indexed by one hash chain.

Rule: a sequence's tables grow together. A prefix is reused up to a position where every pool can
continue; a block that left the window is freed, and the null block takes its place in the table.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxspec.cache.blocks import BlockPool, Tokens
from mlxspec.sequences import Seq
from mlxspec.types import NULL_BLOCK

WINDOW_STRIDE = 256  # blocks between the places in a long prompt where its window stays cached
MIN_PROMPT = 4  # blocks to compute, above which a state before the last token is worth a step
FULL_ATTENTION = 1 << 62  # tokens of a window that never slides

StateKey = tuple[bytes, Tokens]  # the hash of the last full block, the tokens after it
Hashes = Sequence[bytes]  # the chain of a prefix, one per full block
Copies = list[tuple[int, int, int]]  # (pool, source block, target block); pool 0 is full attention


@dataclass(frozen=True, slots=True)
class Window:
    """A group of layers that see the last `tokens` tokens only, and the pool of their blocks."""

    tokens: int
    pool: BlockPool

    @staticmethod
    def min_blocks(tokens: int, block_size: int, sequences: int, chunk: int, depth: int) -> int:
        """Blocks, null block included, that always suffice for `sequences`: each holds its window
        and `1 + depth` rows of two steps; together they hold `chunk` prompt rows a step."""
        rows = tokens + 2 * (1 + depth)
        blocks_each = math.ceil(rows / block_size) + 2
        prompt_blocks = math.ceil(2 * chunk / block_size)
        return 1 + sequences * blocks_each + prompt_blocks

    def first(self, position: int) -> int:
        """Index of the first block that the row at `position` sees."""
        oldest = max(0, position - self.tokens + 1)
        return oldest // self.pool.block_size

    def seen(self, hashes: Hashes) -> Hashes:
        """The last blocks of a chain: those that the next row sees."""
        end = len(hashes) * self.pool.block_size
        return hashes[self.first(end) :]

    def table(self, hashes: Hashes) -> list[int]:
        """The cached blocks of a chain; those that the next row cannot see are null."""
        blocks = [self.pool.by_key[key] for key in self.seen(hashes)]
        passed = [NULL_BLOCK for _ in hashes[len(blocks) :]]
        return passed + blocks


@dataclass(slots=True)
class StateCache:
    """Snapshots of recurrent layers' states, from which a later request with the same prefix
    continues: up to `capacity`, then the least recently used is evicted. A long prompt leaves one
    every `stride` blocks; `copy` copies a state to memory of its own, so that no larger buffer
    stays alive. Engine thread only."""

    capacity: int
    stride: int
    copy: Callable[[Any], Any] = lambda state: state
    # The least recently used first.
    snapshots: OrderedDict[StateKey, Any] = field(default_factory=OrderedDict)

    def use(self, key: StateKey) -> Any:
        """The state of `key`, which must exist; it is now the most recently used."""
        self.snapshots.move_to_end(key)
        return self.snapshots[key]

    def put(self, key: StateKey, state: Any) -> None:
        """Keep a state and evict one if full; the first state of a key stays."""
        if key not in self.snapshots:
            self.snapshots[key] = self.copy(state)
        self.use(key)
        if len(self.snapshots) > self.capacity:
            self.snapshots.popitem(last=False)


@dataclass(slots=True)
class PrefixMatch:
    """The cached prefix of a prompt, `length` tokens long.

    `hashes`: of its full blocks; `tables`: the blocks to share, by pool; `sources`: the blocks
    whose first slots are copied after them; `state`: of the recurrent layers. `full_length` tokens
    are cached in the full-attention pool, though another pool may be unable to continue there."""

    length: int = 0
    hashes: Hashes = ()
    tables: Sequence[list[int]] = ()
    sources: Sequence[int] = ()
    state: Any = None
    full_length: int = 0


@dataclass
class KVCacheManager:
    """The pools and states of one model: prefix match, allocation, freeing.

    `pool` is that of full attention; `states` is None without recurrent layers. `groups` and
    `pools` are all of them: full attention first, then the windows."""

    pool: BlockPool
    windows: Sequence[Window]
    states: StateCache | None
    # A hit leaves one token more to compute, as its blocks also hold a head's K and V.
    recompute_last: bool = False
    chunk: int = 0  # of prompts, computed whole: see SeqState.whole_rows

    def __post_init__(self) -> None:
        self.block_size = self.pool.block_size
        self.groups = [Window(FULL_ATTENTION, self.pool), *self.windows]
        self.pools = [group.pool for group in self.groups]

    @property
    def num_free(self) -> int:
        """Blocks that are free in every pool."""
        return min(len(pool.free_blocks) for pool in self.pools)

    # ---- the prefix cache

    def chunked(self, seq: Seq) -> int:
        """The number of blocks in the whole chunks of a sequence's prompt; -1: there are no
        chunks."""
        return seq.state.whole_rows(self.chunk) // self.block_size if self.chunk else -1

    def match(self, tokens: Sequence[int], chunked: int = -1) -> PrefixMatch:
        """The longest reusable prefix of `tokens` without the last one, for a sequence with so many
        `chunked` blocks. The pools do not change; a matching state becomes the most recently
        used."""
        prompt = tuple(tokens[:-1])
        match = self._match(prompt, len(prompt), chunked)
        if not self.recompute_last:
            return match
        whole = max(0, chunked * self.block_size)
        while match.hashes and not match.sources and match.length > whole:
            # The last token is computed again in a copy: the block itself is shared.
            shared = len(match.hashes) - 1
            match = self._match(prompt[: match.length], shared, chunked)
        if match.length > whole:
            match.length -= 1
        return match

    def _match(self, prompt: Tokens, most: int, chunked: int) -> PrefixMatch:
        """The longest reusable prefix of `prompt` that shares at most `most` blocks."""
        size = self.block_size
        cached = self.pool.match(prompt, chunked)[:most]
        full_length = len(cached) * size
        tails: dict[bytes, list[Tokens]] = {}  # of the states, by the block before them
        for key, tail in self.states.snapshots if self.states else ():
            tails.setdefault(key, []).append(tail)
        for n in range(len(cached), -1, -1):
            hashes = cached[:n]
            inside = n < chunked  # the whole chunks
            if inside and n * size % self.chunk:
                continue
            if not all(w.pool.by_key.keys() >= set(w.seen(hashes)) for w in self.windows):
                continue
            before, parent = self.pool.parent(cached, n), self.pool.parent(cached, n, chunked)
            rest = () if inside else prompt[n * size : (n + 1) * size]
            ends = [rest]
            if self.states is not None:
                ends = [t for t in tails.get(parent, ()) if t and rest[: len(t)] == t]
                ends.sort(key=len, reverse=True)
                ends += [t for t in tails.get(before, ()) if not t]
            for tail in ends:
                partials = [pool.match_partial(parent, tail) for pool in self.pools]
                copied = min(length for _, length in partials)
                if self.states is not None and copied < len(tail):
                    continue
                tables = [group.table(hashes) for group in self.groups]
                match = PrefixMatch(n * size + copied, hashes, tables, full_length=full_length)
                if self.states is not None:
                    match.state = self.states.use((parent if tail else before, tail))
                if copied:
                    match.sources = [block for block, _ in partials]
                return match
        return PrefixMatch(full_length=full_length)

    def cache_blocks(self, seq: Seq, upto: int) -> None:
        """Index the full blocks of the sequence's first `upto` tokens and extend
        `seq.block_hashes`."""
        size, hashes = self.block_size, seq.block_hashes
        done, chunked = len(hashes), self.chunked(seq)
        before = self.pool.parent(hashes, done)
        chain = self.pool.chain(seq.tokens[done * size : upto], before, chunked - done)
        for n, key in enumerate(chain, done):
            content = tuple(seq.tokens[n * size : (n + 1) * size])
            for pool, table in self._tables(seq):
                pool.cache(table[n], self.pool.parent(hashes, n, chunked), content, key=key)
            hashes.append(key)

    def cache_partial(self, seq: Seq, upto: int) -> None:
        """Offer the partly filled block that ends at `upto` as a copy source."""
        parent, tail = self._state_key(seq, upto)
        if tail:
            for pool, table in self._tables(seq):
                pool.cache(table[upto // self.block_size], parent, tail)

    def cache_state(self, seq: Seq, upto: int, state: Any) -> None:
        """Keep the recurrent state after the first `upto` tokens, which are cached, where a later
        prompt may continue: at the end of the prompt and of the answer, at branch points and every
        `stride` blocks."""
        if self.states is None:
            return
        n, rest = divmod(upto, self.block_size)
        branches = n in seq.branch_points or n % self.states.stride == 0
        ends = seq.finish or upto == seq.prompt_len
        if ends or (branches and not rest):
            self.states.put(self._state_key(seq, upto), state)

    def forget(self, seq: Seq) -> Hashes:
        """Remove what the sequence has added to the prefix cache, and return the hashes of those
        blocks. The prefix that it matched stays."""
        first = min(seq.reported_cached // self.block_size, seq.shared)
        before = self.pool.parent(seq.block_hashes, first, self.chunked(seq))
        gone = seq.block_hashes[first:]
        for pool, table in self._tables(seq):
            cached = {pool.by_key[key] for key in gone if key in pool.by_key}
            pool.evict(cached.union(table[first:]) & pool.parents.keys())
        tokens = tuple(seq.tokens[first * self.block_size :])
        snapshots = self.states.snapshots if self.states else {}
        for key, tail in list(snapshots):
            if key in gone or (key == before and tail and tail == tokens[: len(tail)]):
                snapshots.pop((key, tail))
        del seq.block_hashes[first:]
        return gone

    def _state_key(self, seq: Seq, upto: int) -> StateKey:
        """The hash of the last full block before `upto`, and the tokens after it."""
        n = upto // self.block_size
        tail = seq.tokens[n * self.block_size : upto]
        chunked = self.chunked(seq) if tail else -1  # up to the last chunk it is the same state
        return self.pool.parent(seq.block_hashes, n, chunked), tuple(tail)

    def evict_cached(self) -> None:
        """Evict everything that no sequence uses."""
        if self.states is not None:
            self.states.snapshots.clear()
        for pool in self.pools:
            pool.evict_idle()

    # ---- the blocks of a sequence

    def _tables(self, seq: Seq) -> Iterator[tuple[BlockPool, list[int]]]:
        """Each pool with the sequence's table in it."""
        return zip(self.pools, seq.tables, strict=True)

    def allocate_prefix(self, seq: Seq, match: PrefixMatch) -> Copies:
        """Give a sequence without blocks its cached prefix. Returns the blocks to copy."""
        if match.tables:
            seq.table, *seq.windows = match.tables
        for pool, table in self._tables(seq):
            pool.share(table)
        if match.sources and not self.allocate(seq, 1):  # no block to copy to
            self.free(seq)
            return self.allocate_prefix(seq, PrefixMatch(full_length=match.full_length))
        copies = [(i, source, seq.tables[i][-1]) for i, source in enumerate(match.sources)]
        seq.block_hashes = list(match.hashes)
        seq.shared = len(match.hashes)
        seq.state.recurrent = match.state
        seq.computed = match.length
        seq.branch_points = []
        if match.full_length > match.length:
            seq.branch_points.append(match.full_length // self.block_size)
        remaining = seq.prompt_len - match.length
        if self.states is None or remaining > MIN_PROMPT * self.block_size:
            last = (seq.prompt_len - 1) // self.block_size
            seq.branch_points.append(last)
        return copies

    def blocks_needed(self, seq: Seq, upto: int) -> int:
        """Blocks that each of the sequence's tables still needs for `upto` tokens."""
        needed = math.ceil(upto / self.block_size)
        return max(0, needed - len(seq.table))

    def allocate(self, seq: Seq, n: int) -> bool:
        """Append `n` blocks to each table, or nothing at all."""
        if n > self.num_free:
            return False
        for pool, table in self._tables(seq):
            table += pool.allocate(n) or ()
        return True

    def free_passed(self, seq: Seq, position: int) -> None:
        """Free the window blocks that rows from the start of the block of `position` on cannot see.
        Those that no branch point sees are evicted first."""
        start = position - position % self.block_size
        for window, table in zip(self.windows, seq.windows, strict=True):
            for i in reversed(range(window.first(start))):
                block = table[i]
                if block == NULL_BLOCK:
                    break
                # A prompt that branches off in block `n` may copy a part of that block too.
                points = _branch_points(seq, i, WINDOW_STRIDE)
                wanted = any(window.first(n * self.block_size) <= i <= n for n in points)
                window.pool.free([block], low_priority=not wanted)
                table[i] = NULL_BLOCK

    def limit_rows(self, seq: Seq, rows: int) -> int:
        """At most `rows` next rows, fewer if a recurrent state is to be kept in between; a whole
        chunk where the sequence has one to compute."""
        if self.chunk and rows and seq.computed < seq.state.whole_rows(self.chunk):
            return self.chunk
        if self.states is None:
            return rows
        block = seq.computed // self.block_size
        points = _branch_points(seq, block, self.states.stride)
        stop = min(n for n in points if n > block)
        return min(rows, stop * self.block_size - seq.computed)

    def free(self, seq: Seq) -> None:
        """Free the sequence's blocks and drop its state."""
        for pool, table in self._tables(seq):
            pool.free(table)
        seq.table = []
        seq.windows = [[] for _ in self.windows]
        seq.block_hashes = []
        seq.state.recurrent = seq.state.batch = None
        seq.computed = 0

    def check(self, seqs: Iterable[Seq]) -> None:
        """Assert every invariant of the pools and of `seqs`, all that there are."""
        for i, pool in enumerate(self.pools):
            pool.check([seq.tables[i] for seq in seqs])
        for seq in seqs:
            lengths = set(map(len, seq.tables))
            assert len(lengths) == 1, "tables of different lengths"
            assert NULL_BLOCK not in seq.table, "a null block under full attention"


def _branch_points(seq: Seq, block: int, stride: int) -> list[int]:
    """Where a later prompt may branch off, in blocks: the sequence's own, and the next multiple of
    `stride` after `block`."""
    return [*seq.branch_points, (block // stride + 1) * stride]
