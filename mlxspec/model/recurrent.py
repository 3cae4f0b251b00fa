"""State of recurrent layers (SSM, gated delta rule, short convolutions), with drafts in it.

Rule: a sequence's state is a flat tuple of arrays [1, ...] that is never written into; None before
its first row. A forward with drafts records what each recurrence read; once the drafts are
verified, the recurrences run again over the rows that remain, without the model's weights. Their
number is an array: nothing waits for a step.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.core import array as Array
from mlx.nn import Module
from mlx_lm.models.cache import ArraysCache

from mlxspec.kernels.reference import finite
from mlxspec.sequences import SeqState, Span, Spans
from mlxspec.types import Json, Tap, UnsupportedModel

StateArrays = tuple[Array, ...]
# int32 [B], how many rows of each sequence remain, at least 1 -> the batch's state [B, ...] then.
Replay = Callable[[Array], Array]

MAX_SLICED_ROWS = 16  # of a span; after longer ones its state is a copy, not a slice
NOT_RECORDED = "a recurrent layer's state update cannot be recorded"
# mlx-lm's functions that return (output [B, L, ...], new state), and leave the state of masked rows
# as it is.
RECURRENCES = ("gated_delta_update", "ssm_update")
# Arguments that ssm_update weights with 0 where a row is masked or comes later. Drafted rows may
# hold NaN, and 0 * NaN would reach the rows before them.
WEIGHED = {"hidden_states", "B", "dt"}


@dataclass(slots=True, eq=False)
class StateRecorder:
    """What the recurrences read in one forward [B, L] of `spans`; `replays` has one per state
    array."""

    spans: Spans
    convolutions: list[Array] = field(default_factory=list)  # in the order of the layers
    recurrences: list[tuple[Array, Replay]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)

    def finish(self, arrays: Iterable[Array]) -> None:
        """Find the replay of each of the layers' new state arrays. Raises UnsupportedModel."""
        replays = {id(new): replay for new, replay in self.recurrences}
        for array in arrays:
            replay = replays.get(id(array))
            if not (replay or self.convolutions):
                raise UnsupportedModel(NOT_RECORDED)
            if not replay:  # the last part of [state ++ rows]
                offsets = mx.arange(array.shape[1])
                replay = partial(_part_after, self.convolutions.pop(0), offsets)
            self.replays.append(replay)
        self.recurrences.clear()

    def states_after(self, rows: Array) -> list[Array]:
        """The batch's states [B, ...] after the first `rows` int32 [B] rows of each sequence."""
        return [replay(rows) for replay in self.replays]


# Whether the forward that is being built computes each row as if alone.
one_by_one: ContextVar[bool] = ContextVar("one_by_one", default=False)
# Arguments [B, L, ...] of a recurrence: one entry for each row.
BY_ROW = {"hidden_states", "B", "C", "dt", "mask"}
# mlx-lm's function whose order of summation depends on the number of rows, which may be 1.
ORDERED_BY_ROWS = "ssm_update"

# The recorder of the forward that is being built. mlx-lm's layers call module-level functions, so
# there is no argument through which they could be handed one.
_recorder: ContextVar[StateRecorder | None] = ContextVar("recorder", default=None)


class RecordedConv1d(nn.Conv1d):
    """A layer's convolution over [state ++ rows]; its input is recorded."""

    def __call__(self, x: Array) -> Any:
        recorder = _recorder.get()
        if recorder:
            recorder.convolutions.append(x)
        return super().__call__(x)  # type: ignore[no-untyped-call]


def _part_after(x: Array, offsets: Array, rows: Array) -> Array:
    """Rows [B, offsets, D] of x [B, L, D]: those at rows[b] + offsets of x[b]."""
    places = rows[:, None] + offsets
    return mx.take_along_axis(x, places[..., None], axis=1)


def _recorded(update: Any) -> Any:
    """A wrapper of `update` that also records how to compute its new state for fewer rows."""
    signature = inspect.signature(update)

    def state_after(arguments: Json, length: int, rows: Array) -> Any:
        arguments = arguments | {"mask": mx.arange(length) < rows[:, None]}
        if "lengths" in signature.parameters:
            arguments["lengths"] = rows
        return update(**arguments)[1]

    @wraps(update)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        bound = signature.bind(*args, **kwargs)
        if update.__name__ == ORDERED_BY_ROWS and one_by_one.get():
            y, states = _row_by_row(update, bound.arguments)
            if recorder:
                recorder.recurrences.append((states[-1], partial(_state_of, states)))
            return y, states[-1]
        if not recorder:
            return update(*args, **kwargs)
        for name in WEIGHED & bound.arguments.keys():
            bound.arguments[name] = finite(bound.arguments[name])
        y, new = update(*bound.args, **bound.kwargs)
        replay = partial(state_after, bound.arguments, y.shape[1])
        recorder.recurrences.append((new, replay))
        return y, new

    wrapper.recorded = True  # type: ignore[attr-defined]
    return wrapper


def by_rows(model: Module) -> bool:
    """Whether a model has recurrences that are called with one row after the other."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    return any(hasattr(module, ORDERED_BY_ROWS) for module in modules)


def _row_by_row(update: Any, arguments: Json) -> tuple[Array, list[Array]]:
    """The output [B, L, ...] of a recurrence called with one row after the other, and the state
    after each."""
    rows = arguments["hidden_states"].shape[1]
    outputs: list[Array] = []
    states: list[Any] = [arguments.get("state")]
    for t in range(rows):
        row = dict(arguments)
        for name in BY_ROW & arguments.keys():
            if arguments[name] is not None:
                row[name] = arguments[name][:, t : t + 1]
        row["state"] = states[-1]
        y, state = update(**row) if states[-1] is not None else _begun(update, row)
        outputs.append(y)
        states.append(state)
    return mx.concatenate(outputs, axis=1), states[1:]


def _begun(update: Any, row: Json) -> Any:
    """A recurrence of first rows [B, 1, ...], called with one sequence after the other: MLX takes
    another kernel for a product that is alone (backend/metal/matmul.cpp:1507)."""
    each = []
    for n in range(len(row["hidden_states"])):
        given = {name: row[name][n : n + 1] for name in BY_ROW if row.get(name) is not None}
        each.append(update(**row | given))
    return [mx.concatenate(list(same)) for same in zip(*each, strict=True)]


def _state_of(states: Sequence[Array], rows: Array) -> Array:
    """The state of each sequence after its first `rows` int32 [B], from the states [B, ...] after
    each row."""
    stacked = mx.stack(list(states), axis=1)
    return stacked[mx.arange(len(rows)), rows - 1]


def install(model: Module) -> None:
    """Make the recurrences and convolutions of a loaded model recordable. Idempotent."""
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        for name in RECURRENCES:
            update = getattr(source, name, None)
            if update and not hasattr(update, "recorded"):
                setattr(source, name, _recorded(update))
        if type(module) is nn.Conv1d:
            module.__class__ = RecordedConv1d


@dataclass(slots=True)
class RecurrentStates:
    """The recurrent layers of a model. `rollback_supported`: forwards with drafts are recorded.
    `taps`: these hidden states of a sequence's last row, [1, 1, n * D], are the last array of its
    state: a head that continues from a snapshot needs them."""

    layers: list[ArraysCache]
    rollback_supported: bool = True
    dtypes: Sequence[mx.Dtype] = ()  # of a sequence's state, once known
    taps: Sequence[Tap] = ()
    _last: list[SeqState] = field(default_factory=list)  # sequences of the step before
    _recorded: list[StateRecorder] = field(default_factory=list)  # of the last step's forwards

    def begin_step(self, spans: Spans) -> None:
        """Copy the states of sequences that left the batch: a slice pins the batch's array."""
        self._recorded = []
        if not self.layers:
            return
        now = [e.state for e in spans]
        for state in self._last:
            if state not in now and state.recurrent is not None:
                _detach(state)
        self._last = now

    def load(self, spans: Spans) -> None:
        """Hand the layers the spans' states; starts recording if one of them has a draft."""
        if not self.layers:
            return
        parts = [e.state.recurrent for e in spans]
        arrays, batched = spans[0].state.batch or ((), ())
        if list(map(id, parts)) != list(map(id, batched)):
            states = [] if parts[0] is None else parts
            arrays = [mx.concatenate(list(same)) for same in zip(*states, strict=True)]
        held = iter(arrays)
        for layer in self.layers:
            layer.cache = [next(held, None) for _ in layer.cache]
        if self.rollback_supported and any(e.draft.size for e in spans):
            _recorder.set(StateRecorder(spans))

    def store(self, spans: Spans, tapped: Mapping[Tap, Array]) -> Sequence[Array]:
        """Cut the layers' new states into the sequences' states; returns the arrays [B, ...].
        `tapped` are the forward's hidden states [B, L, D]."""
        arrays: list[Any] = [array for layer in self.layers for array in layer.cache]
        if not arrays:
            return ()
        recorder = _recorder.get()
        if recorder:
            recorder.finish(arrays)
            self._recorded.append(recorder)
        if self.taps:
            hidden = mx.concatenate([tapped[tap] for tap in self.taps], axis=-1)
            arrays.append(hidden[:, -1:])
            if recorder:
                recorder.replays.append(partial(_part_after, hidden, mx.array([-1])))
        self.dtypes = [array.dtype for array in arrays]
        _assign(spans, arrays)
        if recorder or spans[0].rows <= MAX_SLICED_ROWS:
            return arrays
        for e in spans:  # a slice would pin all that the pass read
            _detach(e.state)
        return ()

    def release(self) -> None:
        """Stop recording and drop the layers' arrays: the forward is built, or failed."""
        _recorder.set(None)
        for layer in self.layers:
            layer.cache = [None for _ in layer.cache]

    def last_layer(self) -> list[Array]:
        """The new state [B, ...] of the last layer, until `release`."""
        last: Iterable[Any] = self.layers[-1].cache if self.layers else ()
        return list(last)

    def keep_accepted(self, accepted: Array, samplers: Collection[SeqState]) -> list[StateRecorder]:
        """Roll the states after a forward with drafts back to the last accepted draft, lazily.
        `accepted` int32 [R]: the number of accepted drafts of each of `samplers`. Returns what
        `cut` needs."""
        recordings, self._recorded = self._recorded, []
        for recorder in recordings:
            counts = mx.array([e.count for e in recorder.spans])
            rows = counts + by_span(accepted, samplers, recorder.spans)
            _assign(recorder.spans, recorder.states_after(rows))
        return recordings

    @staticmethod
    def cut(recordings: Iterable[StateRecorder], span: Span, rows: int) -> None:
        """Roll the state of a span that ended at a stop back to its first `rows` rows."""
        for recorder in recordings:
            if span in recorder.spans:
                arrays = recorder.states_after(mx.full(len(recorder.spans), rows, mx.int32))
                state = copied(_part(arrays, recorder.spans.index(span)))
                if span.state.recurrent is span.recurrent:  # no later step has continued from it
                    span.state.recurrent = state
                span.recurrent = state


def by_span(accepted: Array, samplers: Collection[SeqState], spans: Spans) -> Array:
    """int32 [spans]: the value for each span in `accepted` int32 [R], which has one for each of
    `samplers`; 0 for a span whose sequence is not among them."""
    places = {state: n for n, state in enumerate(samplers)}
    indices = [places.get(e.state, -1) for e in spans]
    return mx.pad(accepted, (0, 1))[mx.array(indices)]


def _part(arrays: Sequence[Array], i: int) -> StateArrays:
    """The state of sequence number `i` of a batch."""
    return tuple(array[i : i + 1] for array in arrays)


def _assign(spans: Spans, arrays: Sequence[Array]) -> None:
    """Give the spans' sequences their parts of the batch's states; the next forward of the same
    sequences takes the arrays as they are."""
    parts = [tuple(arrays)]
    if len(spans) > 1:
        parts = [_part(arrays, i) for i in range(len(spans))]
    for e, part in zip(spans, parts, strict=True):
        e.state.recurrent = part
        e.state.batch = arrays, parts


def _detach(state: SeqState) -> None:
    """Copy a sequence's state, so that it pins no batch."""
    state.recurrent = copied(state.recurrent)
    state.batch = None


def copied(state: StateArrays) -> StateArrays:
    """A copy in memory of its own, submitted: a slice pins the array it was cut from."""
    copies = tuple(a + 0 for a in state)
    mx.async_eval(copies)
    return copies
