"""The pool of KV blocks: reference counts, the prefix cache's index, and eviction.

Rule: a block's content is reused only under its key, a hash chained over all tokens before it; only
full, committed blocks have one. Block 0 is the null block, to which padding points; nobody owns it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import takewhile
from operator import eq

import numpy as np

from mlxspec.types import NULL_BLOCK

MAX_PARTIALS = 8  # copy sources kept under one parent; the oldest is dropped first
TOKEN_BYTES = 4  # of an int32
ROOT = bytes(16)  # the key before the first block

Ids = Sequence[int]
Tokens = tuple[int, ...]
Queue = OrderedDict[int, None]  # of blocks


def after_chunks(parent: bytes) -> bytes:
    """The key that replaces `parent`, the last block computed in whole chunks, for the blocks after
    it: their order of summation is another, so that the same tokens have other bits."""
    return blake2b(b"turn", digest_size=16, key=parent).digest()


class BlockPool:
    """`size` blocks of `block_size` token slots; block 0 is reserved. Not thread-safe.

    `free_blocks` starts with those without content. A free block that is still in the index is
    *idle*: it is shared again on a prefix match, or evicted.
    """

    def __init__(self, size: int, block_size: int) -> None:
        self.size = size
        self.block_size = block_size
        self.refs: Counter[int] = Counter()
        self.free_blocks: Queue = OrderedDict.fromkeys(range(1, size))
        self.idle: Queue = OrderedDict()  # free blocks in the index, in eviction order
        self.highest = NULL_BLOCK  # the highest block ever allocated: memory is taken up to it
        self.save_memory = False  # evict idle blocks before going above `highest`
        self.by_key: dict[bytes, int] = {}  # full blocks
        self.keys: dict[int, bytes] = {}
        self.parents: dict[int, bytes] = {}  # every block in the index -> the key before it
        self.partials: dict[bytes, dict[int, Tokens]] = {}  # parent -> its latest blocks' tokens

    @property
    def capacity(self) -> int:
        """Tokens that fit when one sequence has the pool to itself."""
        return (self.size - 1) * self.block_size

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.size - 1 - len(self.free_blocks)

    # ---- the index

    def chain(self, tokens: Ids, parent: bytes = ROOT, chunked: int = -1) -> Iterator[bytes]:
        """The keys of the full blocks of `tokens`, which follow the block with key `parent`. The
        first `chunked` end the whole chunks, see `after_chunks`; below 0: no chunks end here."""
        key = parent
        content = np.asarray(tokens, np.int32).tobytes()
        size = TOKEN_BYTES * self.block_size
        for end in range(size, len(content) + 1, size):
            block = content[end - size : end]
            if end == (chunked + 1) * size:
                key = after_chunks(key)
            key = blake2b(block, digest_size=16, key=key).digest()
            yield key

    def match(self, tokens: Ids, chunked: int = -1) -> list[bytes]:
        """The keys of the longest cached prefix of `tokens`, in full blocks. Changes nothing."""
        return list(takewhile(self.by_key.__contains__, self.chain(tokens, chunked=chunked)))

    def match_partial(self, parent: bytes, tokens: Ids) -> tuple[int, int]:
        """The block after `parent` that shares the most leading tokens with `tokens`, and their
        number; the null block and 0 where none shares any."""
        best, most = NULL_BLOCK, 0
        siblings = self.partials.get(parent, {})
        for block, content in siblings.items():
            same = map(eq, content, tokens)
            shared = sum(takewhile(bool, same))
            if shared > most:
                best = block
                most = shared
        return best, most

    def parent(self, keys: Sequence[bytes], n: int, chunked: int = -1) -> bytes:
        """The key before block `n` of a chain whose first `chunked` blocks are in whole chunks."""
        key = keys[n - 1] if n else ROOT
        return after_chunks(key) if n == chunked else key

    def cache(self, block: int, parent: bytes, tokens: Tokens, key: bytes = b"") -> None:
        """Index a block that holds `tokens` after the block with key `parent`, by its own `key`.

        Without a key the block is partly filled, and a copy source: its first slots are never
        rewritten. The first block of a key stays, and a block keeps its key."""
        indexed = block in self.keys or key in self.by_key
        if indexed or block == NULL_BLOCK:
            return
        self._evict(block)
        if key:
            self.by_key[key] = block
            self.keys[block] = key
        self.parents[block] = parent
        siblings = self.partials.setdefault(parent, {})
        siblings[block] = tokens
        if len(siblings) > MAX_PARTIALS:
            del siblings[_first(siblings)]

    # ---- references

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, their content evicted; None if too few are free."""
        if n > len(self.free_blocks):
            return None
        return [self._allocate_one() for _ in range(n)]

    @contextmanager
    def lent(self, tokens: int) -> Iterator[list[int]]:
        """Blocks for `tokens` tokens, or as many as are free, until the `with` ends."""
        needed = -(-tokens // self.block_size)
        table = self.allocate(min(needed, len(self.free_blocks))) or []
        try:
            yield table
        finally:
            self.free(table)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; an idle one keeps its content."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.refs[block] == 0:
                self._take(block)
            self.refs[block] += 1

    def free(self, blocks: Ids, low_priority: bool = False) -> None:
        """Drop a reference to each block, the last block first, so that a prefix is evicted last.

        A free block without content is the next to be allocated; `low_priority` content is evicted
        before any other."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            self.free_blocks[block] = None
            if block not in self.parents:
                self.free_blocks.move_to_end(block, last=False)
                continue
            self.idle[block] = None
            self.idle.move_to_end(block, last=not low_priority)

    def _evict(self, block: int) -> None:
        """Remove a block that has references from the index."""
        key = self.keys.pop(block, b"")
        self.by_key.pop(key, None)
        parent = self.parents.pop(block, b"")
        siblings = self.partials.get(parent, {})
        siblings.pop(block, None)
        if not siblings:
            self.partials.pop(parent, None)

    def evict(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the index, in use or not."""
        for block in blocks:
            self.share([block])
            self._evict(block)
            self.free([block])

    def evict_idle(self) -> int:
        """Evict all idle blocks. Returns their number."""
        evicted = list(self.idle)
        self.evict(evicted)
        return len(evicted)

    def check(self, tables: Iterable[Ids]) -> None:
        """Assert every invariant; `tables` are all the block tables with references."""
        unused = {block for block in range(1, self.size) if not self.refs[block]}
        assert self.free_blocks.keys() == unused
        held = Counter(block for table in tables for block in table)
        del held[NULL_BLOCK]
        assert held == self.refs, "tables and references differ"
        assert self.idle.keys() == self.free_blocks.keys() & self.parents.keys()
        assert self.keys == {block: key for key, block in self.by_key.items()}
        assert self.keys.keys() <= self.parents.keys()
        for parent, siblings in self.partials.items():
            assert 0 < len(siblings) <= MAX_PARTIALS
            parents = {self.parents[block] for block in siblings}
            assert parents == {parent}

    def _allocate_one(self) -> int:
        """Take a free block without content, else the first idle one."""
        block = _first(self.free_blocks)
        grows = self.save_memory and block > self.highest
        if self.idle and (grows or block in self.idle):
            block = _first(self.idle)
        self._take(block)
        self._evict(block)
        self.refs[block] = 1
        self.highest = max(self.highest, block)
        return block

    def _take(self, block: int) -> None:
        """Remove a block from the free list."""
        del self.free_blocks[block]
        self.idle.pop(block, None)


def _first(blocks: Iterable[int]) -> int:
    return next(iter(blocks))
