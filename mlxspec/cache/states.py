"""Snapshots of recurrent layers' states, from which a later request with the same prefix continues.

Rule: a state is a function of its prefix: its key is the hash of the last full block with the
tokens after it. The number of states is bounded; the least recently used is evicted first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

StateKey = tuple[bytes, tuple[int, ...]]  # the hash of the last full block, the tokens after it


@dataclass(slots=True)
class StateCache:
    """Up to `capacity` states. A long prompt leaves one every `stride` blocks; `copy` gives a state
    memory of its own, so that it keeps no larger buffer alive. Engine thread only."""

    capacity: int
    stride: int
    copy: Callable[[Any], Any] = lambda state: state
    # Least recently used first.
    _states: OrderedDict[StateKey, Any] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[StateKey]:
        """The keys, the least recently used first."""
        return iter(self._states)

    def use(self, key: StateKey) -> Any:
        """The state of `key`, which must exist; it is now the most recently used."""
        self._states.move_to_end(key)
        return self._states[key]

    def peek(self, key: StateKey) -> Any:
        """The state of `key` or None; the order of use does not change."""
        return self._states.get(key)

    def put(self, key: StateKey, state: Any) -> None:
        """Keep a state and evict one if full; the first state of a key stays."""
        if key not in self._states:
            self._states[key] = self.copy(state)
        self.use(key)
        if len(self._states) > self.capacity:
            self._states.popitem(last=False)

    def clear(self) -> None:
        self._states.clear()
