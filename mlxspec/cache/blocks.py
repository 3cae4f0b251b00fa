"""The pool of KV blocks: reference counts, the prefix cache's index, and eviction.

Rule: a block's content is reused only under its key, a hash chained over all tokens before it; only
full, committed blocks have one. Block 0 is the null block: padding points there, nobody owns it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from mlxspec.types import NULL_BLOCK

MAX_PARTIALS = 8  # copy sources kept under one parent; the oldest is dropped first


class BlockPool:
    """`size` blocks of `block_size` token slots; block 0 is reserved. Not thread-safe.

    `free_blocks` is in eviction order. A free block that is still in the index is *idle*: it is
    reused on a prefix match, or evicted.
    """

    def __init__(self, size: int, block_size: int, salt: bytes = b"") -> None:
        self.size, self.block_size = size, block_size
        self.root = blake2b(salt, digest_size=16).digest()  # the key before the first block
        self.refs = [0] * size
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, size))
        self.idle: OrderedDict[int, None] = OrderedDict()  # free blocks in the index
        self.low_priority: OrderedDict[int, None] = OrderedDict()  # idle blocks to evict first
        self.highest = NULL_BLOCK  # the highest block ever allocated: memory is taken up to it
        self.save_memory = False  # evict idle blocks before going above `highest`
        self.by_key: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}  # block -> its key
        self.partials: dict[bytes, dict[int, tuple[int, ...]]] = {}  # parent -> block -> tokens
        self.parents: dict[int, bytes] = {}  # block -> the key that it stands under in `partials`

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the pool to itself."""
        return (self.size - 1) * self.block_size

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.size - 1 - len(self.free_blocks)

    # ---- the index

    def chain(self, tokens: Sequence[int], parent: bytes = b"") -> Iterator[bytes]:
        """The keys of the full blocks of `tokens`, which follow the block with key `parent`."""
        key = parent or self.root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            content = np.asarray(tokens[start : start + self.block_size], np.int32)
            key = blake2b(content.tobytes(), digest_size=16, key=key).digest()
            yield key

    def match(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the longest cached prefix of `tokens`, in full blocks. Changes nothing."""
        return list(takewhile(self.by_key.__contains__, self.chain(tokens)))

    def match_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that shares the most leading tokens with `tokens`, and how many.

        The null block and 0 where none shares any."""
        best = (NULL_BLOCK, 0)
        for block, content in self.partials.get(parent, {}).items():
            n = _common_prefix(content, tokens)
            if n > best[1]:
                best = (block, n)
        return best

    def parent(self, keys: Sequence[bytes], n: int) -> bytes:
        """The key of the block before block `n` of a chain."""
        return keys[n - 1] if n else self.root

    def cache(self, block: int, key: bytes, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Index a full block, unless its key or the block itself is indexed already."""
        if block != NULL_BLOCK and key not in self.by_key and block not in self.keys:
            self.by_key[key] = block
            self.keys[block] = key
            self._add_partial(block, parent, tokens)

    def cache_partial(self, block: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Offer the first slots of a partly filled block as a copy source.

        They are committed and never rewritten, whatever the owner adds after them."""
        if block not in self.keys:
            self._add_partial(block, parent, tokens)

    # ---- references

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, their content evicted; None if too few are free."""
        if n > len(self.free_blocks):
            return None
        return [self._allocate_one() for _ in range(n)]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; an idle one keeps its content."""
        for block in blocks:
            if self.refs[block] == 0:
                self._take(block)
            self.refs[block] += 1

    def free(self, blocks: Sequence[int], low_priority: bool = False) -> None:
        """Drop a reference to each block, the last block first, so that a prefix is evicted last.

        `low_priority` content is evicted before all other."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            self.free_blocks[block] = None
            if self._cached(block):
                self.idle[block] = None
                if low_priority:
                    self.low_priority[block] = None
            else:
                self.free_blocks.move_to_end(block, last=False)

    def evict_idle(self) -> int:
        """Evict all idle blocks; how many they were."""
        blocks = list(self.idle)
        for block in reversed(blocks):
            self._evict(block)
            self._make_blank(block)
        return len(blocks)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant; `tables`, if given, are all the block tables with references."""
        assert self.free_blocks.keys() == {b for b in range(1, self.size) if not self.refs[b]}
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            assert held == Counter(dict(enumerate(self.refs))), "tables and references differ"
        assert self.low_priority.keys() <= self.idle.keys()
        assert list(self.idle) == [block for block in self.free_blocks if self._cached(block)]
        assert self.keys == {block: key for key, block in self.by_key.items()}
        listed = {block: parent for parent, blocks in self.partials.items() for block in blocks}
        assert listed == self.parents
        assert all(0 < len(blocks) <= MAX_PARTIALS for blocks in self.partials.values())

    def _allocate_one(self) -> int:
        """Take a free block without content, else a low-priority one, else the longest idle one."""
        block = next(iter(self.free_blocks))
        if block > self.highest and self.save_memory and self.idle:
            block = next(iter(self.idle))
        if block in self.idle and self.low_priority:
            block = next(iter(self.low_priority))
        self._take(block)
        self._evict(block)
        self.refs[block] = 1
        self.highest = max(self.highest, block)
        return block

    def _take(self, block: int) -> None:
        """Remove a block from the free ones."""
        del self.free_blocks[block]
        self.idle.pop(block, None)
        self.low_priority.pop(block, None)

    def _cached(self, block: int) -> bool:
        return block in self.keys or block in self.parents

    def _add_partial(self, block: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        self._drop_partial(block)
        blocks = self.partials.setdefault(parent, {})
        blocks[block] = tokens
        self.parents[block] = parent
        if len(blocks) > MAX_PARTIALS:
            oldest = next(iter(blocks))
            self._drop_partial(oldest)
            if oldest in self.idle and oldest not in self.keys:  # nothing of it is cached now
                self._make_blank(oldest)

    def _make_blank(self, block: int) -> None:
        """An idle block lost its content: it is allocated first."""
        del self.idle[block]
        self.low_priority.pop(block, None)
        self.free_blocks.move_to_end(block, last=False)

    def _drop_partial(self, block: int) -> None:
        if block in self.parents:
            parent = self.parents.pop(block)
            del self.partials[parent][block]
            if not self.partials[parent]:
                del self.partials[parent]

    def _evict(self, block: int) -> None:
        if block in self.keys:
            del self.by_key[self.keys.pop(block)]
        self._drop_partial(block)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
