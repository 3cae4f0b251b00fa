"""What recurrent layers carry from token to token, for each sequence, and how part of a step is
taken back.

Rule: a sequence's state is a flat tuple of arrays [1, ...] that nobody writes into; None: nothing
was read. Inputs are recorded in forwards with a draft only, and live until the step is read: behind
what stands of it the recurrence runs again, over recorded rows, without the model's weights.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from mlxspec.types import Entry, UnsupportedModel
from mlxspec.types import Sequence as Seq

Carried = tuple[mx.array, ...]
Pick = Callable[[mx.array], mx.array]

SHORT = 16  # rows up to which a slice of what a forward read may live on until the next one
# mlx-lm's functions that return (output, new state): the axis of their rows, the arguments that
# have it, and
# the one that is the old state.
RECURRENCES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "gated_delta_update": (1, ("q", "k", "v", "a", "b"), "state"),
    "ssm_update": (1, ("hidden_states", "B", "C", "dt"), "state"),
    "recurrent_gla": (2, ("q", "k", "v"), "h"),
}


class State(ArraysCache):  # mlx-lm's models ask whether it is one
    """One layer's memory as the model sees it: what the sequences of a forward carry, batched."""

    def __getitem__(self, i: int) -> Any:
        if _tape is not None:
            _tape.layer = self
        return self.cache[i]


class Conv(nn.Conv1d):
    """A layer's convolution over [state ++ rows], which tells the tape what it reads."""

    def __call__(self, x: mx.array) -> mx.array:
        if _tape is not None:
            _tape.conv(x)
        y: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return y


@dataclass(slots=True, eq=False)
class Tape:
    """What the recurrences of one forward [B, L] read, by layer."""

    layer: State | None = None  # whose state was asked for last: the one that is at work
    convs: list[tuple[State | None, mx.array]] = field(default_factory=list)
    runs: list[tuple[mx.array, Callable[[Pick, int], mx.array]]] = field(default_factory=list)
    slots: list[Callable[[Pick, int], mx.array]] = field(default_factory=list)

    def conv(self, x: mx.array) -> None:
        self.convs.append((self.layer, x))

    def close(self, states: Iterable[State]) -> None:
        """Find for each array of each state what it was made from. Raises UnsupportedModel where
        that was not seen."""
        made = {id(new): again for new, again in self.runs}
        for state in states:
            inputs = [x for layer, x in self.convs if layer is state]
            held: list[Any] = state.cache
            for value in held:
                again = made.get(id(value))
                if again is None and inputs and inputs[0].shape[::2] == value.shape[::2]:
                    again = _window(inputs.pop(0), value.shape[1])
                if again is None:
                    raise UnsupportedModel("a layer's state was made in a way that is not recorded")
                self.slots.append(again)
        self.layer, self.convs, self.runs = None, [], []

    def behind(self, batch: Sequence[int], rows: int) -> list[mx.array]:
        """The states [n, ...] of those of the batch, behind their first `rows` rows."""
        index = mx.array(list(batch))
        return [again(lambda x: x[index], rows) for again in self.slots]


_tape: Tape | None = (
    None  # of the forward that is being built, if it is recorded; one thread owns MLX
)


def _window(x: mx.array, keep: int) -> Callable[[Pick, int], mx.array]:
    return lambda pick, rows: pick(x[:, rows : rows + keep])


def _tapped(update: Any, axis: int, inputs: Sequence[str], state: str) -> Any:
    signature = inspect.signature(update)

    @wraps(update)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        y, new = update(*args, **kwargs)
        if _tape is not None:
            given = dict(signature.bind(*args, **kwargs).arguments)

            def again(pick: Pick, rows: int) -> mx.array:
                cut = (*[slice(None)] * axis, slice(rows))
                some = {name: pick(given[name])[cut] for name in inputs}
                old = given.get(state)
                found: mx.array = update(
                    **{**given, **some, state: None if old is None else pick(old)}
                )[1]
                return found

            _tape.runs.append((new, again))
        return y, new

    tapped.tapped = True  # type: ignore[attr-defined]
    return tapped


def install(model: Module) -> None:
    """Let tapes hear the recurrences and convolutions of the model. Idempotent; who records nothing
    calls mlx-lm's own functions as before."""
    modules = [m for _, m in model.named_modules()]
    for module in {sys.modules[type(m).__module__] for m in modules}:
        for name, how in RECURRENCES.items():
            update = getattr(module, name, None)
            if update is not None and not hasattr(update, "tapped"):
                setattr(module, name, _tapped(update, *how))
    for m in modules:
        if type(m) is nn.Conv1d:
            m.__class__ = Conv


@dataclass(slots=True, eq=False)
class Batch:
    """The states that a forward left, and what was cut from them for each of its sequences."""

    arrays: Sequence[mx.array]
    parts: Sequence[Carried]


@dataclass(slots=True)
class States:
    """The recurrent layers of a model. `taped`: a draft is taken back by its tape, else by feeding
    what stands of it again."""

    layers: list[State]
    taped: bool = True
    forms: Sequence[
        tuple[tuple[int, ...], mx.Dtype]
    ] = ()  # of a sequence's state, once there was one
    _last: list[Seq] = field(default_factory=list)  # who ran in the step before

    def begin(self, plan: Sequence[Entry]) -> None:
        """A step is to be built. Whoever ran in the last one and does not now gets memory of its
        own."""
        now = {e.seq for e in plan}
        for seq in self._last:
            if seq not in now and seq.state is not None:
                seq.state, seq.batch = own(seq.state), None
        self._last = list(now) if self.layers else []

    def form(self, entry: Entry) -> tuple[Any, ...]:
        """Only entries of the same form go into one forward: a layer may tell no state from
        zeros."""
        carried = entry.seq.state if self.layers else None
        return () if carried is None else tuple(a.shape for a in carried)

    def enter(self, entries: Sequence[Entry]) -> Tape | None:
        """Hand the layers what the entries' sequences carry; records if one of them has a draft."""
        global _tape
        if not self.layers:
            return None
        parts = [e.seq.state for e in entries]
        batch = entries[0].seq.batch
        arrays: Any = parts[0]
        if batch is not None and [id(p) for p in batch.parts] == [id(p) for p in parts]:
            arrays = batch.arrays
        elif arrays is not None and len(parts) > 1:
            arrays = [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]
        held = iter(arrays or ())
        for layer in self.layers:
            layer.cache = [next(held, None) for _ in layer.cache]
        _tape = Tape() if self.taped and any(len(e.draft) for e in entries) else None
        return _tape

    def leave(self, entries: Sequence[Entry], tape: Tape | None) -> Sequence[mx.array]:
        """Cut what the layers hold now into the sequences' states; returns it whole, [B, ...] each.
        The entries with a draft keep what takes it back."""
        if not self.layers:
            return ()
        arrays: list[Any] = [a for layer in self.layers for a in layer.cache]
        if any(a is None for a in arrays):
            raise UnsupportedModel("a layer with a state left it empty")
        self.forms = [((1, *a.shape[1:]), a.dtype) for a in arrays]
        if tape is not None:
            tape.close(self.layers)
        long = entries[0].rows > SHORT
        parts = [
            tuple(arrays if len(entries) == 1 else (a[i : i + 1] for a in arrays))
            for i in range(len(entries))
        ]
        parts = [_copied(p) for p in parts] if long else parts
        batch = None if long or len(parts) == 1 else Batch(arrays, parts)
        for i, (e, part) in enumerate(zip(entries, parts, strict=True)):
            e.undo = (tape, i, e.seq.state) if len(e.draft) else None
            e.seq.state, e.seq.batch = part, batch
        return [a for p in parts for a in p] if long else arrays

    def close(self) -> None:
        """The forward is built, or failed: nothing is recorded, and the layers hold nothing."""
        global _tape
        _tape = None
        for layer in self.layers:
            layer.cache = [None] * len(layer.cache)

    def rewind(self, plan: Sequence[Entry], stands: Sequence[int]) -> None:
        """A step was read: of each entry, so many rows stand. Their sequences' states are those
        behind these rows, or those before the step where `entry.undone` says that they must be fed
        again."""
        taken: dict[tuple[Tape, int], list[tuple[int, Seq]]] = {}
        for e, n in zip(plan, stands, strict=True):
            undo, e.undo = e.undo, None
            if undo is None or n == e.rows or e.seq.state is None:  # gone meanwhile
                continue
            tape, i, old = undo
            if tape is None:
                e.seq.state, e.seq.batch, e.undone = old, None, True
            else:
                taken.setdefault((tape, n), []).append((i, e.seq))
        for (tape, n), some in taken.items():
            arrays = tape.behind([i for i, _ in some], n)
            mx.async_eval(arrays)  # now, so that the tape's memory is free when the step is done
            for at, (_, seq) in enumerate(some):
                seq.state, seq.batch = tuple(a[at : at + 1] for a in arrays), None


def own(state: Carried) -> Carried:
    """The same values in memory of their own, submitted: a slice holds all that it was cut from."""
    made = _copied(state)
    mx.async_eval(made)
    return made


def _copied(state: Carried) -> Carried:
    return tuple(a + 0 for a in state)


def size(state: Carried | None) -> int:
    """Bytes that a sequence's state takes."""
    return sum(a.nbytes for a in state or ())
