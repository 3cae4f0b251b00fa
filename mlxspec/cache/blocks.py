"""The block pool: who holds which KV block, and which blocks are known by content.

Rule: a block's content is only trusted under its key, a hash chained over everything before it;
only full, committed blocks carry one. Block 0 is the null block: padding points there, nobody owns
it.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile

import numpy as np

from mlxspec.types import NULL_BLOCK

# that content is left alone which can be had again; as long as Anthropic's cache keeps its own
AGE_S = 300.0
LOOKS = 64  # blocks that are looked at for one that is no loss
PARTS = 8  # copy sources remembered under one parent; the oldest is forgotten first


@dataclass(frozen=True, slots=True)
class Match:
    """What the pool knows of a prompt: whole `blocks` to share, with their `keys`, then `copy =
    (block, n)`: the first `n` slots of a block whose content starts as the prompt goes on, to be
    copied, not shared."""

    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]
    copy: tuple[int, int] | None


class BlockPool:
    """`blocks` blocks of `block_size` token slots; block 0 is reserved. Seven verbs: match, alloc,
    share, drop, publish, forget, check. Not thread-safe: the engine thread owns it."""

    def __init__(self, blocks: int, block_size: int, salt: bytes = b"") -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(
                f"a pool needs 2 blocks and 1 slot at least, got {blocks} of {block_size}"
            )
        self.size, self.block_size = blocks, block_size
        self.root = blake2b(salt, digest_size=16).digest()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(1, blocks)
        )  # in eviction order
        self.idle: OrderedDict[int, float] = (
            OrderedDict()
        )  # those with known content, and since when
        self.kept: Callable[[bytes], bool] | None = None  # whether a key's content can be had again
        self.spent: OrderedDict[int, None] = OrderedDict()  # of these, what is hardly of use
        self.refs = [0] * blocks
        self.given = NULL_BLOCK  # the highest block that was ever given out
        self.thrifty = False  # rather forget than take memory for a block that was never given out
        self.index: dict[bytes, int] = {}
        self.key: dict[int, bytes] = {}
        self.parts: dict[
            bytes, dict[int, tuple[int, ...]]
        ] = {}  # parent key -> block -> its tokens
        self.parent: dict[int, bytes] = {}
        self.clock = time.monotonic

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the pool to itself."""
        return (self.size - 1) * self.block_size

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest known prefix of `tokens`. Looks only; `share` takes the references."""
        size, keys = self.block_size, tuple(takewhile(self.index.__contains__, self.chain(tokens)))
        start = len(keys) * size
        rest = tokens[
            start : min(start + size, len(tokens) - 1)
        ]  # a hit leaves one token to compute
        part = self.part(keys[-1] if keys else self.root, rest)
        return Match(tuple(self.index[key] for key in keys), keys, part)

    def chain(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the full blocks of `tokens`, known or not."""
        key = self.root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = _key(key, tokens[start : start + self.block_size])
            yield key

    def part(self, parent: bytes, rest: Sequence[int]) -> tuple[int, int] | None:
        """The block behind `parent` that starts most like `rest`, and how many of its tokens do."""
        best, found = 0, None
        for block, content in self.parts.get(parent, {}).items():
            if (n := _common(content, rest)) > best:
                best, found = n, (block, n)
        return found

    def alloc(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None and nothing taken. What they held is
        forgotten."""
        if n > len(self.free):
            return None
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        """A block without known content, else one that is spent, else the one not used for longest.
        One that can be had again goes, once it is old, before one that was never given out, which
        may take memory."""
        block = next(iter(self.free))
        if block > self.given and self.idle:
            block = next(iter(self.idle)) if self.thrifty else self._spare() or block
        if self.spent and block in self.idle:
            block = next(iter(self.spent))
        del self.free[block]
        self.idle.pop(block, None)
        self.spent.pop(block, None)
        self._forget(block)
        self.refs[block] = 1
        self.given = max(self.given, block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; a free one comes back to life with its content."""
        for block in blocks:
            if self.refs[block] == 0:
                del self.free[block]
                self.idle.pop(block, None)
                self.spent.pop(block, None)
            self.refs[block] += 1

    def drop(self, blocks: Sequence[int], spent: bool = False) -> None:
        """One reference less to each, the tail first, so that a prefix outlives what followed it;
        what is `spent` goes before all other known content."""
        now = self.clock()
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if not self._known(block):
                    self.free.move_to_end(block, last=False)
                    continue
                self.idle[block] = now
                if spent:
                    self.spent[block] = None

    def publish(
        self, tokens: Sequence[int], table: Sequence[int], keys: list[bytes], upto: int
    ) -> None:
        """Make the full blocks of `tokens[:upto]` known, and extend `keys`, their hash chain, in
        place."""
        size = self.block_size
        for i in range(len(keys), upto // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            keys.append(_key(keys[-1] if keys else self.root, content))
            self.name(table[i], keys, i, content)

    def name(self, block: int, keys: Sequence[bytes], i: int, content: tuple[int, ...]) -> None:
        """Make `block` known as the one with `keys[i]`, unless another is or it is known
        already."""
        if block != NULL_BLOCK and keys[i] not in self.index and block not in self.key:
            self.index[keys[i]] = block
            self.key[block] = keys[i]
            self._offer(keys[i - 1] if i else self.root, block, content)

    def publish_tail(
        self, tokens: Sequence[int], table: Sequence[int], keys: list[bytes], upto: int
    ) -> None:
        """Offer the slots of the last, partly filled block of `tokens[:upto]` as a source to copy
        from.

        They are committed and never rewritten, whatever its owner adds behind them."""
        i = upto // self.block_size
        if upto % self.block_size and len(keys) == i and table[i] not in self.key:
            content = tuple(tokens[i * self.block_size : upto])
            self._offer(keys[-1] if keys else self.root, table[i], content)

    def forget(self) -> int:
        """Forget what the free blocks hold; how many were known."""
        known = list(self.idle)
        for block in reversed(known):
            self._forget(block)
            self.free.move_to_end(block, last=False)  # before those that would take new memory
        self.idle.clear()
        self.spent.clear()
        return len(known)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant; `tables`, if given, are all the block tables that hold
        references."""
        assert NULL_BLOCK not in self.free and self.refs[NULL_BLOCK] == 0, "the null block is owned"
        for block in range(1, self.size):
            assert (self.refs[block] == 0) == (block in self.free), (
                f"block {block} is both free and held"
            )
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            assert NULL_BLOCK not in held, "a table holds the null block"
            assert all(self.refs[b] == held[b] for b in range(self.size)), (
                "references differ from the tables"
            )
        assert self.spent.keys() <= self.idle.keys(), "a spent block is not idle"
        assert list(self.idle) == [b for b in self.free if self._known(b)], (
            "idle blocks are not those known"
        )
        assert self.key == {block: key for key, block in self.index.items()}, (
            "index and keys differ"
        )
        listed = {block: parent for parent, blocks in self.parts.items() for block in blocks}
        assert listed == self.parent, "copy sources differ from their parents"
        assert all(0 < len(blocks) <= PARTS for blocks in self.parts.values()), (
            "a parent lists too many"
        )

    @property
    def used(self) -> int:
        return self.size - 1 - len(self.free)

    def _spare(self) -> int | None:
        """An old block that is no loss, among the oldest: it can be had again, is hardly of use, or
        is only a part of one."""
        if self.kept is None:
            return None
        until = self.clock() - AGE_S
        for block, since in islice(self.idle.items(), LOOKS):
            if since >= until:
                break
            if block in self.spent or block not in self.key or self.kept(self.key[block]):
                return block
        return None

    def _known(self, block: int) -> bool:
        return block in self.key or block in self.parent

    def _offer(self, parent: bytes, block: int, content: tuple[int, ...]) -> None:
        if block in self.parent:
            self._withdraw(block)
        blocks = self.parts.setdefault(parent, {})
        blocks[block] = content
        self.parent[block] = parent
        if len(blocks) > PARTS:
            oldest = next(iter(blocks))
            self._withdraw(oldest)
            if oldest in self.free and oldest not in self.key:
                self.idle.pop(oldest)
                self.spent.pop(oldest, None)
                self.free.move_to_end(oldest, last=False)

    def _withdraw(self, block: int) -> None:
        parent = self.parent.pop(block)
        del self.parts[parent][block]
        if not self.parts[parent]:
            del self.parts[parent]

    def _forget(self, block: int) -> None:
        if block in self.key:
            del self.index[self.key.pop(block)]
        if block in self.parent:
            self._withdraw(block)


def _key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16, key=parent).digest()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
