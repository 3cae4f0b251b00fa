"""State of recurrent layers (SSM, gated delta rule, short convolutions) and its rollback.

Rule: a sequence's state is a flat tuple of arrays [1, ...] that is never written into; None before
its first row. A forward with drafts records what each recurrence read; once some drafts are
rejected, the recurrences run again over the accepted rows alone, without the model's weights.
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
# (sequences of a batch, number of rows) -> their state [n, ...] after these rows.
Replay = Callable[[slice, int], mx.array]

MAX_SLICED_ROWS = 16  # of an entry; after longer ones its state is copied, not a slice
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
    "recurrent_gla": (2, ("q", "k", "v"), "h"),
}


@dataclass(slots=True, eq=False)
class StateRecorder:
    """What the recurrences of one forward [B, L] read; `replays` has one per state array."""

    convolutions: list[mx.array] = field(default_factory=list)  # in the order of the layers
    recurrences: list[tuple[mx.array, Replay]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)

    def finish(self, arrays: Iterable[mx.array]) -> None:
        """Find what made each of the layers' new state arrays. Raises UnsupportedModel."""
        made_by = {id(new): replay for new, replay in self.recurrences}
        for array in arrays:
            replay = made_by.get(id(array))
            if replay is None:
                if not self.convolutions:
                    raise UnsupportedModel(NOT_RECORDED)
                window = self.convolutions.pop(0)
                replay = partial(_window_after, window, array.shape[1])
            self.replays.append(replay)
        self.recurrences.clear()

    def state_after(
        self,
        i: int,
        rows: int,
    ) -> StateArrays:
        """The state of sequence `i` of the batch after its first `rows` rows."""
        return tuple(replay(slice(i, i + 1), rows) for replay in self.replays)


# The recorder of the forward that is being built. mlx-lm's layers call module-level functions, so
# there is no argument through which they could be handed one.
_recorder: ContextVar[StateRecorder | None] = ContextVar("recorder", default=None)


class RecordedConv1d(nn.Conv1d):
    """A layer's convolution over [state ++ rows]; its input is recorded."""

    def __call__(self, x: mx.array) -> Any:
        recorder = _recorder.get()
        if recorder:
            recorder.convolutions.append(x)
        return super().__call__(x)  # type: ignore[no-untyped-call]


def _window_after(
    x: mx.array,
    keep: int,
    batch: slice,
    rows: int,
) -> mx.array:
    """A convolution's state: the last `keep` of [state ++ rows]."""
    return x[batch, rows : rows + keep]


def _recorded(
    update: Any,
    axis: int,
    inputs: Sequence[str],
    state: str,
) -> Any:
    """`update`, which also records how to compute its new state for fewer rows."""
    signature = inspect.signature(update)

    def state_after(
        given: dict[str, Any],
        batch: slice,
        rows: int,
    ) -> Any:
        given = dict(given)
        for name in inputs:
            given[name] = mx.split(given[name][batch], [rows], axis)[0]
        if given.get(state) is not None:
            given[state] = given[state][batch]
        _, new = update(**given)
        return new

    @wraps(update)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        y, new = update(*args, **kwargs)
        recorder = _recorder.get()
        if recorder:
            bound = signature.bind(*args, **kwargs)
            replay = partial(state_after, bound.arguments)
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
            if update and not hasattr(update, "recorded"):
                setattr(source, name, _recorded(update, *arguments))
        if type(module) is nn.Conv1d:
            module.__class__ = RecordedConv1d


@dataclass(slots=True)
class RecurrentStates:
    """The recurrent layers of a model. `rollback_supported`: forwards with drafts are recorded."""

    layers: list[ArraysCache]
    rollback_supported: bool = True
    forms: Sequence[tuple[tuple[int, ...], mx.Dtype]] = ()  # of a sequence's state, once known
    _last: list[Seq] = field(default_factory=list)  # sequences of the step before
    _recorded: dict[Entry, tuple[StateRecorder, int]] = field(default_factory=dict)

    def begin_step(self, plan: Plan) -> None:
        """Copy the states of sequences that left the batch: a slice pins the batch's array."""
        if not self.layers:
            return
        now = [e.seq for e in plan]
        for seq in self._last:
            if seq not in now and seq.state is not None:
                seq.state = own(seq.state)
                seq.batch = None
        self._last = now

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
        arrays: list[Any] = [array for layer in self.layers for array in layer.cache]
        if not arrays:
            return ()
        self.forms = [((1, *a.shape[1:]), a.dtype) for a in arrays]
        recorder = _recorder.get()
        if recorder:
            recorder.finish(arrays)
        parts = [tuple(arrays)]
        if len(entries) > 1:
            parts = [tuple(a[i : i + 1] for a in arrays) for i in range(len(entries))]
        # The next forward of the same sequences takes the arrays as they are.
        batch: Any = arrays, parts
        if entries[0].rows > MAX_SLICED_ROWS:  # a slice would pin all that the pass read
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
        """Stop recording and drop the layers' arrays: the forward is built, or failed."""
        _recorder.set(None)
        for layer in self.layers:
            layer.cache = [None for _ in layer.cache]

    def rollback(
        self,
        plan: Plan,
        kept_rows: Sequence[int],
    ) -> None:
        """A step was read: bring each sequence's state to the one after its first kept rows."""
        for e, rows in zip(plan, kept_rows, strict=True):
            recorder, i = self._recorded.pop(e, (None, 0))
            if recorder and rows < e.rows and e.seq.state is not None:
                # Submitted now, so that the recorded inputs are free when the step is done.
                e.seq.state = own(recorder.state_after(i, rows))
                e.seq.batch = None


def own(state: StateArrays) -> StateArrays:
    """A copy in memory of its own, submitted: a slice pins the array it was cut from."""
    made = tuple(a + 0 for a in state)
    mx.async_eval(made)
    return made
