"""State of recurrent layers (SSM, gated delta rule, short convolutions) and its rollback.

Rule: a sequence's state is a flat tuple of arrays [1, ...] that nobody writes into; None before its
first row. A forward with drafts records what each recurrence read; once some drafts are rejected,
the recurrences run again over the accepted rows alone, without the model's weights.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from mlxspec.types import Entry, Plan, Seq, UnsupportedModel

StateArrays = tuple[mx.array, ...]
# Indices of sequences of a batch and a number of rows -> their state [n, ...] behind these rows.
Replay = Callable[[mx.array, int], mx.array]

# Known rows of an entry that may still take a draft: its inputs are recorded for all its rows.
MAX_RECORDED_ROWS = 16
NOT_RECORDED = "a recurrent layer's state update cannot be recorded"
# mlx-lm's functions that return (output, new state): the axis of their rows, the arguments that
# have that axis, and the argument that is the old state.
RECURRENCES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "gated_delta_update": (
        1,
        ("q", "k", "v", "a", "b"),
        "state",
    ),
    "ssm_update": (
        1,
        ("hidden_states", "B", "C", "dt"),
        "state",
    ),
    "recurrent_gla": (
        2,
        ("q", "k", "v"),
        "h",
    ),
}


@dataclass(slots=True, eq=False)
class StateRecorder:
    """What the recurrences of one forward [B, L] read; `replays` has one per state array."""

    layer: "LayerState | None" = None  # at work: the last one that was asked for its state
    convolutions: list[tuple["LayerState | None", mx.array]] = field(default_factory=list)
    recurrences: list[tuple[mx.array, Replay]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)

    def finish(self, layers: Iterable["LayerState"]) -> None:
        """Match every state array with what made it. Raises UnsupportedModel."""
        made_by = {id(new): replay for new, replay in self.recurrences}
        for layer in layers:
            windows = [x for owner, x in self.convolutions if owner is layer]
            for array in layer.cache:
                replay = made_by.get(id(array))
                if replay is None:
                    if not windows or windows[0].shape[::2] != array.shape[::2]:
                        raise UnsupportedModel(NOT_RECORDED)
                    window = windows.pop(0)
                    replay = partial(_window_behind, window, array.shape[1])
                self.replays.append(replay)
        self.layer = None
        self.convolutions.clear()
        self.recurrences.clear()

    def state_behind(self, batch: Sequence[int], rows: int) -> list[mx.array]:
        """The states [n, ...] of these sequences of the batch behind their first `rows` rows."""
        index = mx.array(list(batch))
        return [replay(index, rows) for replay in self.replays]


# The recorder of the forward that is being built. mlx-lm's layers call module-level functions, so
# there is no argument through which they could be handed one.
_recorder: ContextVar[StateRecorder | None] = ContextVar("recorder", default=None)


class LayerState(ArraysCache):  # mlx-lm's models ask whether it is one
    """One layer's cache as the model sees it: the states of a forward's sequences, batched."""

    cache: list[Any]

    def __getitem__(self, i: int) -> Any:
        recorder = _recorder.get()
        if recorder:
            recorder.layer = self
        return self.cache[i]


class RecordedConv1d(nn.Conv1d):
    """A layer's convolution over [state ++ rows]; tells the recorder what it reads."""

    def __call__(self, x: mx.array) -> Any:
        recorder = _recorder.get()
        if recorder:
            recorder.convolutions.append((recorder.layer, x))
        return super().__call__(x)  # type: ignore[no-untyped-call]


def _window_behind(
    x: mx.array,
    keep: int,
    index: mx.array,
    rows: int,
) -> mx.array:
    """A convolution's state: the last `keep` rows of [state ++ rows] that it keeps."""
    return x[:, rows : rows + keep][index]


def _recorded(
    update: Any,
    axis: int,
    inputs: Sequence[str],
    state: str,
) -> Any:
    """`update` that also tells the recorder how to compute its new state for fewer rows."""
    signature = inspect.signature(update)

    def state_behind(
        given: dict[str, Any],
        index: mx.array,
        rows: int,
    ) -> Any:
        given = dict(given)
        for name in inputs:
            chosen = given[name][index]
            given[name] = mx.split(chosen, [rows], axis)[0]
        if given.get(state) is not None:
            given[state] = given[state][index]
        _, new = update(**given)
        return new

    @wraps(update)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        y, new = update(*args, **kwargs)
        recorder = _recorder.get()
        if recorder:
            bound = signature.bind(*args, **kwargs)
            replay = partial(state_behind, bound.arguments)
            recorder.recurrences.append((new, replay))
        return y, new

    wrapper.recorded = True  # type: ignore[attr-defined]
    return wrapper


def install(model: Module) -> None:
    """Make the recurrences and convolutions of a loaded model recordable. Idempotent."""
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        for name, arguments in RECURRENCES.items():
            update = getattr(source, name, None)
            if update is not None and not hasattr(update, "recorded"):
                setattr(source, name, _recorded(update, *arguments))
        if type(module) is nn.Conv1d:
            module.__class__ = RecordedConv1d


@dataclass(slots=True)
class RecurrentStates:
    """The recurrent layers of a model. `rollback_supported`: forwards with drafts are recorded."""

    layers: list[LayerState]
    rollback_supported: bool = True
    forms: Sequence[tuple[tuple[int, ...], mx.Dtype]] = ()  # of a sequence's state, once known
    _last: list[Seq] = field(default_factory=list)  # sequences of the step before
    _recorded: dict[Entry, tuple[StateRecorder, int]] = field(default_factory=dict)

    def begin_step(self, plan: Plan) -> None:
        """Give sequences that left the batch memory of their own: a slice pins the whole array."""
        if not self.layers:
            return
        now = [e.seq for e in plan]
        for seq in self._last:
            if seq not in now and seq.state is not None:
                seq.state = own(seq.state)
                seq.batch = None
        self._last = now

    def form(self, entry: Entry) -> tuple[Any, ...]:
        """Shapes of an entry's state; only equal ones share a forward (None differs from zeros)."""
        state = entry.seq.state
        if not self.layers or state is None:
            return ()
        return tuple(array.shape for array in state)

    def load(self, entries: Plan) -> None:
        """Hand the layers the entries' states; starts recording if one of them has a draft."""
        if not self.layers:
            return
        parts = [e.seq.state for e in entries]
        arrays, batched = entries[0].seq.batch or ((), ())
        if list(map(id, parts)) != list(map(id, batched)):
            arrays = []
            if parts[0] is not None:
                arrays = [mx.concatenate(list(same)) for same in zip(*parts, strict=True)]
        held = iter(arrays)
        for layer in self.layers:
            layer.cache = [next(held, None) for _ in layer.cache]
        if self.rollback_supported and any(len(e.draft) for e in entries):
            _recorder.set(StateRecorder())

    def store(self, entries: Plan) -> Sequence[mx.array]:
        """Cut the layers' new states into the sequences' states; returns the arrays [B, ...]."""
        arrays = []
        for layer in self.layers:
            arrays += layer.cache
        if not arrays:
            return ()
        if any(array is None for array in arrays):
            raise UnsupportedModel("a layer with a state left it empty")
        self.forms = [((1, *a.shape[1:]), a.dtype) for a in arrays]
        recorder = _recorder.get()
        if recorder:
            recorder.finish(self.layers)
        parts = [tuple(arrays)]
        if len(entries) > 1:
            parts = [_row(arrays, i) for i in range(len(entries))]
        # The next forward of the same sequences takes the arrays as they are.
        batch: Any = arrays, parts
        if entries[0].rows > MAX_RECORDED_ROWS:  # a slice would pin all that the pass read
            parts = [own(part) for part in parts]
            batch = None
            arrays = [array for part in parts for array in part]
        for i, e in enumerate(entries):
            if recorder and len(e.draft):
                self._recorded[e] = recorder, i
            e.seq.state = parts[i]
            e.seq.batch = batch
        return arrays

    def release(self) -> None:
        """The forward is built, or failed: stop recording, and let go of the layers' arrays."""
        _recorder.set(None)
        for layer in self.layers:
            layer.cache = [None for _ in layer.cache]

    def rollback(self, plan: Plan, kept_rows: Sequence[int]) -> None:
        """A step was read: bring each sequence's state to the one behind its first kept rows."""
        if not self._recorded:
            return
        replays: dict[tuple[StateRecorder, int], list[tuple[int, Seq]]] = {}
        for e, rows in zip(plan, kept_rows, strict=True):
            recorded = self._recorded.pop(e, None)
            if recorded is None or rows == e.rows or e.seq.state is None:
                continue
            recorder, i = recorded
            members = replays.setdefault((recorder, rows), [])
            members.append((i, e.seq))
        for (recorder, rows), members in replays.items():
            arrays = recorder.state_behind([i for i, _ in members], rows)
            mx.async_eval(arrays)  # now, so that the recorded inputs are free when the step is done
            for at, (_, seq) in enumerate(members):
                seq.state = _row(arrays, at)
                seq.batch = None


def _row(arrays: Sequence[mx.array], i: int) -> StateArrays:
    """The state of sequence `i` of a batch."""
    return tuple(array[i : i + 1] for array in arrays)


def own(state: StateArrays) -> StateArrays:
    """A copy in memory of its own, submitted: a slice pins the array it was cut from."""
    made = tuple(a + 0 for a in state)
    mx.async_eval(made)
    return made
