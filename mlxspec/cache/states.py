"""States of recurrent layers, kept by the prefix that they stand behind: where a later request may
go on.

Rule: a state is a function of its prefix, named by the hash chain of its full blocks and the tokens
behind them. Their number is bounded; the one that was not used for longest goes first, and of those
that a prompt only passed no more than half are kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

Name = tuple[bytes, tuple[int, ...]]  # the chain's last key, the tokens behind that block


class StateCache:
    """Holds `capacity` states. `stride` is the distance, in blocks, at which a long prompt leaves
    one behind; `own` gives a state in memory of its own, so that what is kept is what is counted.
    Engine thread only."""

    def __init__(
        self, capacity: int, stride: int, own: Callable[[Any], Any] = lambda state: state
    ) -> None:
        self.capacity, self.stride, self.own = capacity, stride, own
        self._held: OrderedDict[Name, Any] = OrderedDict()
        self._tails: dict[bytes, set[tuple[int, ...]]] = {}
        self._passing: OrderedDict[Name, None] = OrderedDict()  # of these, as old as there

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[Name, Any]]:
        """Every state with its name, the oldest first."""
        return iter(self._held.items())

    def tails(self, parent: bytes) -> list[tuple[int, ...]]:
        """The tokens behind `parent` at which there is a state, the longest first."""
        return sorted(self._tails.get(parent, ()), key=len, reverse=True)

    def use(self, name: Name) -> Any:
        """The state of that name. It is there."""
        self._touch(name)
        return self._held[name]

    def _touch(self, name: Name) -> None:
        self._held.move_to_end(name)
        if name in self._passing:
            self._passing.move_to_end(name)

    def peek(self, name: Name) -> Any:
        """The state of that name or None, and no use of it."""
        return self._held.get(name)

    def put(self, name: Name, state: Any, passing: bool = False) -> None:
        """Keep a state, and forget the oldest where there is no room. `passing`: it lies inside a
        prompt, where nobody is known to go on."""
        if name in self._held:
            return self._touch(name)
        if self.capacity == 0:
            return
        if len(self._held) >= self.capacity:
            many = len(self._passing) > self.capacity // 2
            self._forget(next(iter(self._passing if many else self._held)))
        self._held[name] = self.own(state)
        self._tails.setdefault(name[0], set()).add(name[1])
        if passing:
            self._passing[name] = None

    def clear(self) -> None:
        self._held.clear()
        self._tails.clear()
        self._passing.clear()

    def check(self) -> None:
        """Assert the bound, and that the tails are those of the names."""
        assert len(self._held) <= self.capacity, "too many states"
        listed = {(parent, tail) for parent, tails in self._tails.items() for tail in tails}
        assert self._passing.keys() <= self._held.keys(), "a state that passed is not held"
        assert listed == self._held.keys() and all(self._tails.values()), "tails and names differ"

    def _forget(self, name: Name) -> None:
        parent, tail = name
        del self._held[name]
        self._passing.pop(name, None)
        self._tails[parent].discard(tail)
        if not self._tails[parent]:
            del self._tails[parent]
