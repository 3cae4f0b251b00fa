"""Snapshots of recurrent layers' states, from which a later request with the same prefix continues.

Rule: a state is a function of its prefix: it is named by the key of the last full block and the
tokens after it. The number is bounded; the least recently used goes first, and at most half are
states from inside a prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

Name = tuple[bytes, tuple[int, ...]]  # the key of the last full block, the tokens after it


class StateCache:
    """Up to `capacity` states. A long prompt leaves one every `stride` blocks; `copy` gives a state
    memory of its own, so that no larger buffer is kept alive by it. Engine thread only."""

    def __init__(
        self, capacity: int, stride: int, copy: Callable[[Any], Any] = lambda state: state
    ) -> None:
        self.capacity, self.stride, self.copy = capacity, stride, copy
        self._states: OrderedDict[Name, Any] = OrderedDict()  # least recently used first
        self._tails: dict[bytes, set[tuple[int, ...]]] = {}
        self._inside: OrderedDict[Name, None] = OrderedDict()  # those from inside a prompt

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Name]:
        """The names, the least recently used first."""
        return iter(self._states)

    def tails(self, parent: bytes) -> list[tuple[int, ...]]:
        """The token tails after block `parent` that have a state, the longest first."""
        return sorted(self._tails.get(parent, ()), key=len, reverse=True)

    def use(self, name: Name) -> Any:
        """The state called `name`, which must exist; marks it as used."""
        self._states.move_to_end(name)
        if name in self._inside:
            self._inside.move_to_end(name)
        return self._states[name]

    def peek(self, name: Name) -> Any:
        """The state called `name` or None; does not mark it as used."""
        return self._states.get(name)

    def put(self, name: Name, state: Any, inside: bool = False) -> None:
        """Keep a state and evict one if full. `inside`: it lies within a prompt, where a later
        request is less likely to continue."""
        if name in self._states:
            self.use(name)
        elif self.capacity:
            if len(self._states) >= self.capacity:
                crowded = len(self._inside) > self.capacity // 2
                self._evict(next(iter(self._inside if crowded else self._states)))
            self._states[name] = self.copy(state)
            self._tails.setdefault(name[0], set()).add(name[1])
            if inside:
                self._inside[name] = None

    def clear(self) -> None:
        self._states.clear()
        self._tails.clear()
        self._inside.clear()

    def check(self) -> None:
        """Assert the bound, and that tails and names agree."""
        assert len(self._states) <= self.capacity, "too many states"
        listed = {(parent, tail) for parent, tails in self._tails.items() for tail in tails}
        assert self._inside.keys() <= self._states.keys(), "an inside state is not kept"
        assert listed == self._states.keys() and all(self._tails.values()), "tails differ"

    def _evict(self, name: Name) -> None:
        parent, tail = name
        del self._states[name]
        self._inside.pop(name, None)
        self._tails[parent].discard(tail)
        if not self._tails[parent]:
            del self._tails[parent]
