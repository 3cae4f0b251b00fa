"""Snapshots of recurrent layers' states, from which a later request with the same prefix continues.

Rule: a state is a function of its prefix: it is named by the key of the last full block and the
tokens after it. The number is bounded; the least recently used goes first.
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
        self.capacity = capacity
        self.stride = stride
        self.copy = copy
        self._states: OrderedDict[Name, Any] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Name]:
        """The names, the least recently used first."""
        return iter(self._states)

    def use(self, name: Name) -> Any:
        """The state called `name`, which must exist; marks it as used."""
        self._states.move_to_end(name)
        return self._states[name]

    def peek(self, name: Name) -> Any:
        """The state called `name` or None; does not mark it as used."""
        return self._states.get(name)

    def put(self, name: Name, state: Any) -> None:
        """Keep a state and evict one if full; the first state of a name stays."""
        if name not in self._states:
            self._states[name] = self.copy(state)
        self.use(name)
        if len(self._states) > self.capacity:
            self._states.popitem(last=False)

    def clear(self) -> None:
        self._states.clear()

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._states) <= self.capacity, "too many states"
