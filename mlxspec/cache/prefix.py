"""A model's KV memory as the scheduler sees it: a pool for layers that see everything, one for each
sliding window, and the states of recurrent layers, all named by one hash chain.

Rule: the tables of a sequence grow and go together. A prefix is reused up to a position from which
every group can go on; a block that no later row can see is given back, and leaves the null block in
its table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.states import StateCache
from mlxspec.types import NULL_BLOCK
from mlxspec.types import Sequence as Seq

# blocks after which a window that has passed stays known for a while, so that a hit is possible
STRIDE = 256
LEAST = (
    4  # blocks of a prompt for which a state behind the last full one is worth a step of its own
)

Copies = list[tuple[int, int, int]]  # (group, source block, target block); group 0 sees everything


@dataclass(frozen=True, slots=True)
class Window:
    """The layers that see the last `tokens` tokens only, and the pool of their blocks."""

    tokens: int
    pool: BlockPool

    @staticmethod
    def least(tokens: int, block_size: int, sequences: int, chunk: int, depth: int) -> int:
        """Blocks, the null block included, with which none of `sequences` is ever short: each holds
        its window and the rows of two steps, `1 + depth` in each; they share `chunk` rows of
        prompts a step."""
        each = -(-(tokens + 2 * (1 + depth)) // block_size) + 2
        return 1 + sequences * each + -(-2 * chunk // block_size)

    def first(self, position: int) -> int:
        """Index of the first block that the row at `position` sees."""
        return max(0, position - self.tokens + 1) // self.pool.block_size


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What need not be computed of a prompt: its first `length` tokens. `tables` are the blocks to
    share, by group, `sources` those whose first slots are to be copied behind them; `known` tokens
    are known to the group that sees everything, though another cannot go on from there."""

    length: int = 0
    keys: tuple[bytes, ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    sources: tuple[int, ...] = ()
    state: Any = None
    known: int = 0


@dataclass(slots=True)
class KVCacheManager:
    """`pool` sees everything and has the hash chain; `states` is there if the model has recurrent
    layers."""

    pool: BlockPool
    windows: Sequence[Window] = ()
    states: StateCache | None = None

    def __post_init__(self) -> None:
        assert all(w.pool.root == self.pool.root for w in self.windows), "pools of different salts"

    @property
    def pools(self) -> list[BlockPool]:
        return [self.pool, *(w.pool for w in self.windows)]

    @property
    def free(self) -> int:
        """Blocks that can be had in every group."""
        return min(len(pool.free) for pool in self.pools)

    # ---- what is known
    # --------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The longest prefix of `tokens` that can be reused, but for its last token. Looks only,
        and counts the state that it finds as used."""
        found, size, last = self.pool.match(tokens), self.pool.block_size, len(tokens) - 1
        fits, known = self._fits(found.keys, last), len(found.keys) * size
        for n in range(len(found.keys), -1, -1):
            if not fits[n]:
                continue
            parent = found.keys[n - 1] if n else self.pool.root
            rest = tokens[n * size : min((n + 1) * size, last)]
            if self.states is None:
                parts = [pool.part(parent, rest) for pool in self.pools]
                sources = [part[0] for part in parts if part]
                extra = min(part[1] for part in parts if part) if len(sources) == len(parts) else 0
                return self._hit(
                    found.blocks, found.keys[:n], min(n * size, last), sources, extra, known
                )
            for tail in self.states.tails(parent):
                if n * size + len(tail) > last or tuple(rest[: len(tail)]) != tail:
                    continue
                parts = [pool.part(parent, tail) for pool in self.pools] if tail else []
                sources = [part[0] for part in parts if part and part[1] == len(tail)]
                if len(sources) == len(parts):
                    state = self.states.use((parent, tail))
                    return self._hit(
                        found.blocks, found.keys[:n], n * size, sources, len(tail), known, state
                    )
        return PrefixMatch(known=known)

    def _hit(
        self,
        blocks: Sequence[int],
        keys: tuple[bytes, ...],
        length: int,
        sources: Sequence[int],
        extra: int,
        known: int,
        state: Any = None,
    ) -> PrefixMatch:
        tables = [tuple(blocks[: len(keys)])]
        for w in self.windows:
            first = w.first(length)
            tables.append(
                tuple(w.pool.index[k] if i >= first else NULL_BLOCK for i, k in enumerate(keys))
            )
        return PrefixMatch(
            length + extra, keys, tuple(tables), tuple(sources) if extra else (), state, known
        )

    def _fits(self, keys: Sequence[bytes], last: int) -> list[bool]:
        """Whether the windows can go on behind the first n blocks, for n from 0."""
        fits = [True] * (len(keys) + 1)
        for w in self.windows:
            run = 0  # known blocks in a row
            for n in range(len(keys) + 1):
                fits[n] &= run >= n - w.first(min(n * self.pool.block_size, last))
                run = run + 1 if n < len(keys) and keys[n] in w.pool.index else 0
        return fits

    def publish(self, seq: Seq, upto: int) -> None:
        """Make the full blocks of the sequence's first `upto` tokens known, and extend its chain of
        keys."""
        size, first = self.pool.block_size, len(seq.keys)
        self.pool.publish(seq.tokens, seq.table, seq.keys, upto)
        for w, table in zip(self.windows, seq.windows, strict=True):
            for i in range(first, len(seq.keys)):
                w.pool.name(table[i], seq.keys, i, tuple(seq.tokens[i * size : (i + 1) * size]))

    def publish_tail(self, seq: Seq, upto: int) -> None:
        """Offer the partly filled block at `upto` for copying."""
        keys = seq.keys[: upto // self.pool.block_size]
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.publish_tail(seq.tokens, table, keys, upto)

    def remember(self, seq: Seq, upto: int, state: Any) -> None:
        """Keep the state behind the sequence's first `upto` tokens, which are published."""
        assert self.states is not None
        n = upto // self.pool.block_size
        parent = seq.keys[n - 1] if n else self.pool.root
        passing = upto != seq.prompt_len and seq.finish is None and n not in seq.marks
        self.states.put(
            (parent, tuple(seq.tokens[n * self.pool.block_size : upto])), state, passing
        )

    # ---- what is held
    # ---------------------------------------------------------------------------------

    def take(self, seq: Seq, hit: PrefixMatch) -> Copies:
        """Give the sequence, which has nothing, what was found; the blocks to copy."""
        tables = [list(table) for table in hit.tables] or [[] for _ in self.pools]
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(_live(table))
        if hit.sources and not self.free and hit.state is not None:
            for pool, table in zip(self.pools, tables, strict=True):
                pool.drop(_live(table))
            return self.take(
                seq, PrefixMatch(known=hit.known)
            )  # its state stands behind slots that cannot be had
        copies: Copies = []
        length, size = hit.length, self.pool.block_size
        if hit.sources and self.free:
            for group, (pool, source) in enumerate(zip(self.pools, hit.sources, strict=True)):
                tables[group] += pool.alloc(1) or ()
                copies.append((group, source, tables[group][-1]))
        elif hit.sources:
            length = len(hit.keys) * size
        seq.table, *seq.windows = tables
        seq.keys, seq.state, seq.computed = list(hit.keys), hit.state, length
        seq.shared = len(hit.keys) * size
        seq.marks = [hit.known // size] if hit.known > hit.length else []
        if self.states is None or seq.prompt_len - length > LEAST * size:
            seq.marks.append((seq.prompt_len - 1) // size)
        return copies

    def lacking(self, seq: Seq, upto: int) -> int:
        """Blocks that each of the sequence's tables needs to hold `upto` tokens."""
        return max(0, -(-upto // self.pool.block_size) - len(seq.table))

    def grow(self, seq: Seq, n: int) -> bool:
        """`n` more blocks for each table, or nothing taken."""
        if n > self.free:
            return False
        for pool, table in zip(self.pools, seq.tables, strict=True):
            table += pool.alloc(n) or ()
        return True

    def slide(self, seq: Seq, low: int) -> None:
        """Give back what rows from position `low` on cannot see. What a later hit may want stays
        known for as long as there is room, the rest goes first."""
        for w, table in zip(self.windows, seq.windows, strict=True):
            for i in range(min(w.first(low), len(table)) - 1, -1, -1):
                if table[i] == NULL_BLOCK:
                    break
                w.pool.drop([table[i]], spent=not self._wanted(seq, w, i))
                table[i] = NULL_BLOCK

    def _wanted(self, seq: Seq, w: Window, i: int) -> bool:
        """Whether block `i` is in sight of a mark."""
        marks = [*seq.marks, (i // STRIDE + 1) * STRIDE]
        return any(w.first(mark * self.pool.block_size) <= i < mark for mark in marks)

    def cut(self, seq: Seq, rows: int) -> int:
        """How many of the next `rows` rows to compute in one go, so that a state is at hand where
        one is to be kept."""
        if self.states is None or not self.states.capacity:
            return rows
        size, stride = self.pool.block_size, self.states.stride
        at = seq.computed // size
        marks = [*seq.marks, (at // stride + 1) * stride]
        return min([rows, *(mark * size - seq.computed for mark in marks if mark > at)])

    def marked(self, seq: Seq, at: int) -> bool:
        """Whether a state is to be kept at position `at`: at the prompt's end, where prompts
        parted, every `stride` blocks."""
        if self.states is None:
            return False
        n, rest = divmod(at, self.pool.block_size)
        return at == seq.prompt_len or (
            not rest and (n in seq.marks or n % self.states.stride == 0)
        )

    def drop(self, seq: Seq) -> None:
        """Take everything from the sequence."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.drop(_live(table))
        seq.table, seq.windows, seq.keys = [], [[] for _ in self.windows], []
        seq.state = seq.batch = None
        seq.computed = seq.shared = seq.cached = 0

    def forget(self) -> int:
        """Forget what is known and not in use; how many blocks that were."""
        if self.states is not None:
            self.states.clear()
        return sum(pool.forget() for pool in self.pools)

    def check(self, seqs: Iterable[Seq]) -> None:
        """Assert every invariant of the pools and of these sequences, which are all there are."""
        for group, pool in enumerate(self.pools):
            pool.check([_live(s.tables[group]) for s in seqs])
        for seq in seqs:
            assert len({len(table) for table in seq.tables}) == 1, "tables of different lengths"
            assert NULL_BLOCK not in seq.table, "a null block where everything is seen"
        if self.states is not None:
            self.states.check()


def _live(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != NULL_BLOCK]
