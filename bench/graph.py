"""Reads the graph of arrays that are not evaluated yet, and says what Metal would launch for it.

MLX's rules are those of mlx/backend/metal and mlx/backend/gpu in 0.32: which primitives only change
strides, which copy first what is laid out otherwise. Layouts are followed with numpy's views of no
memory. A buffer that is still held when it is updated is copied: tests/metalsim/host.py counts that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, log2, prod
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.kernels import cpu

COMPILE, EVALUATE = mx.compile, mx.eval  # which may be replaced while graphs are read
VIEWS = {"Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze", "Transpose", "Slice", "Split"}
PASSING = {"Copy", "CustomTransforms", "Depends", "StopGradient", "NumberOfElements"}
RESHAPES = {"Reshape", "Flatten", "Unflatten", "Contiguous"}
UPDATES = {"Scatter", "ScatterAxis", "SliceUpdate", "DynamicSliceUpdate"}
# What reads its matrices only as rows, and copies them first if they are not.
ROWS = {"QuantizedMatmul", "GatherQMM", "CustomKernel", "Softmax", "LogSumExp", "Sort", "ArgSort"}
SORTED = 4096  # values that one threadgroup sorts
VECTOR = 8  # rows of a sequence that MLX's attention for few rows takes
LONG = 4096  # keys of grouped heads from which it is two launches on every chip: sums and a merge
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "bool": 1, "complex64": 8}

MARK = (
    mx.uint16
)  # of the scalar in a node that stands for a primitive: which of the stand-ins it is
Name = tuple[str, tuple[int, ...], mx.Dtype]  # of an array in an export


@dataclass(frozen=True, slots=True)
class StandIn:
    """A node for a primitive that this machine's MLX lacks. `read`: says the bytes that it reads,
    once the whole graph is known; None: all of its inputs."""

    name: str
    read: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What an operation reads, and the array that it updates in place, by numbers of buffers."""

    reads: frozenset[int]
    updates: int | None = None


@dataclass(slots=True)
class Work:
    """What a graph takes: launches by primitive, and bytes that they read and write. `order`: the
    launches as the graph has them; `ends`: how many of them each submission and those before have.
    """

    launches: Counter[str] = field(default_factory=Counter)
    read: int = 0
    written: int = 0
    order: list[Launch] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def __add__(self, other: "Work") -> "Work":
        both = self.launches + other.launches
        ends = self.ends + [len(self.order) + end for end in other.ends]
        order = self.order + other.order
        return Work(both, self.read + other.read, self.written + other.written, order, ends)

    def launch(self, name: str, read: Sequence[np.ndarray[Any, Any]], written: int) -> None:
        self.launches[name] += 1
        self.read += sum(map(touched, read))
        self.written += written


def layout(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray[Any, Any]:
    """An array of rows of this shape, over no memory: only its strides may be used."""
    kind = np.dtype(f"V{itemsize(dtype)}")
    strides = [kind.itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(1, kind), shape, strides)


def itemsize(dtype: mx.Dtype) -> int:
    name = str(dtype).rpartition(".")[2]
    return BYTES.get(name) or int(name.lstrip("uint")) // 8


def buffer(x: np.ndarray[Any, Any]) -> int:
    """The number of the buffer that an array lies in; views of it have the same."""
    base: Any = x
    while getattr(base, "base", None) is not None:
        base = base.base
    return id(base)


def touched(x: np.ndarray[Any, Any]) -> int:
    """Bytes of an array, those that are broadcast once."""
    return x.itemsize * prod(n for n, stride in zip(x.shape, x.strides, strict=True) if stride)


def work_of(
    arrays: Sequence[mx.array], stand_ins: Sequence[StandIn], submitted: Sequence[int] = ()
) -> Work:
    """What evaluating these would take on Metal, if they were made inside `on_metal`. `submitted`:
    how many of the arrays each submission and those before have."""
    parts: list[dict[str, Any]] = []
    mx.export_function(parts.append, lambda: list(arrays))
    reader = Reader(parts, stand_ins)
    names = [name for part in parts for name, _, _ in part.get("outputs", ()) if is_result(part)]
    for count in submitted:
        made = (reader.made.get(name, 0) for name in names[:count])
        reader.work.ends.append(max(made, default=0))
    return reader.work


def is_result(part: dict[str, Any]) -> bool:
    """Whether a part of an export names the arrays that were exported."""
    return bool(part["type"] == "outputs")


class Reader:
    """Follows an exported graph."""

    def __init__(self, parts: list[dict[str, Any]], stand_ins: Sequence[StandIn]) -> None:
        self.work = Work()
        self.stand_ins = stand_ins
        self.at: dict[str, np.ndarray[Any, Any]] = {}
        self.marks: dict[str, int] = {}
        self.made: dict[str, int] = {}  # how many launches an array and those before it take
        nodes = [part for part in parts if part["type"] == "primitive"]
        self.uses = Counter(name for node in nodes for name, _, _ in node["inputs"])
        for part in parts:
            for name, array in part.get("constants", ()):
                self.at[name] = layout(array.shape, array.dtype)
                if array.ndim == 0 and array.dtype == MARK:
                    self.marks[name] = array.item()
        for node in nodes:
            before = self.work.total
            self.read(node["name"], node["inputs"], node["outputs"], node["arguments"])
            inputs = [buffer(self.at[name]) for name, _, _ in node["inputs"]]
            updated = inputs.pop(0) if node["name"] in UPDATES else None
            launches = [Launch(frozenset(inputs)) for _ in range(self.work.total - before)]
            pool = len(node["outputs"][0][1]) == 3  # what has fewer dimensions is made by the step
            if updated and launches and pool:
                launches[-1] = Launch(frozenset(inputs), updated)
            self.work.order += launches
            self.made |= {name: len(self.work.order) for name, _, _ in node["outputs"]}

    def read(self, kind: str, inputs: list[Name], outputs: list[Name], args: list[Any]) -> None:
        given = [self.at[name] for name, _, _ in inputs]
        read = None
        if kind == "Depends" and inputs[-1][0] in self.marks:
            stand_in = self.stand_ins[self.marks[inputs[-1][0]]]
            kind, read = stand_in.name, stand_in.read
            given = given[len(outputs) : -1]
        if kind == "Split":
            parts = np.split(given[0], list(args[0]), axis=args[1])
            self.at |= {name: part for (name, _, _), part in zip(outputs, parts, strict=True)}
            return
        same = kind == "View" and itemsize(outputs[0][2]) == given[0].itemsize
        passing = same or kind in PASSING
        for i, (name, shape, dtype) in enumerate(outputs):
            if passing:
                self.at[name] = given[i]
            elif kind in VIEWS:
                self.at[name] = _view(kind, given[0], shape, args)
            elif kind in RESHAPES:
                self.at[name] = self._reshaped(kind, given[0], shape, dtype)
            else:
                self.at[name] = self._like(given, shape, dtype)
        if kind in UPDATES:
            self._update(kind, inputs[0][0], given, outputs[0][0])
        elif not passing and kind not in VIEWS | RESHAPES:
            self._launch(kind, given, [self.at[name] for name, _, _ in outputs])
            if read is not None:
                self.work.read += read() - sum(map(touched, given))

    def _reshaped(
        self, kind: str, x: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> np.ndarray[Any, Any]:
        made = layout(shape, dtype)
        if kind == "Contiguous" and x.flags.c_contiguous:
            return x
        if kind != "Contiguous":
            view = x.view()
            try:
                view.shape = shape
                return view
            except AttributeError:  # it cannot be done without a copy
                pass
        self.work.launch("Copy", [x], made.nbytes)
        return made

    def _like(
        self, given: list[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> np.ndarray[Any, Any]:
        """An operation on values keeps the order of its input in memory."""
        made = layout(shape, dtype)
        dense = [x for x in given if x.shape == shape and x.size == touched(x) // x.itemsize]
        if len(dense) == 1 and not dense[0].flags.c_contiguous:
            strides = [s // dense[0].itemsize * made.itemsize for s in dense[0].strides]
            if max(s * n for s, n in zip(strides, shape, strict=True)) == made.nbytes:
                return np.lib.stride_tricks.as_strided(made, shape, strides)
        return made

    def _update(self, kind: str, base: str, given: list[np.ndarray[Any, Any]], out: str) -> None:
        """In place, unless something else reads what was there before."""
        if self.uses[base] > 1:
            self.work.launch("Copy", given[:1], given[0].nbytes)
        self.work.launch(kind, given[1:], given[1 if kind == "SliceUpdate" else -1].nbytes)
        self.at[out] = given[0]

    def _launch(
        self, kind: str, given: list[np.ndarray[Any, Any]], made: list[np.ndarray[Any, Any]]
    ) -> None:
        written = sum(x.nbytes for x in made)
        if kind == "Concatenate":
            for x in given:
                self.work.launch(kind, [x], touched(x))
            return
        given = [self._copied(x) if self._copies(kind, i, x) else x for i, x in enumerate(given)]
        read = given
        if kind in ("Gather", "GatherAxis"):
            read = [*given[1:], *made]
        elif kind == "GatherQMM":
            experts = min(1.0, given[-1].size / len(given[1]))
            self.work.read -= int((1 - experts) * sum(map(touched, given[1:-2])))
        self.work.launch(kind, read, written)
        if kind == "ScaledDotProductAttention":
            self._merged(given, made[0])
        if kind in ("Sort", "ArgSort", "Partition", "ArgPartition"):
            blocks = ceil(given[0].shape[-1] / SORTED)
            for _ in range(2 * ceil(log2(blocks)) + 1 if blocks > 1 else 0):
                self.work.launch(kind, given, written)

    def _merged(self, given: list[np.ndarray[Any, Any]], made: np.ndarray[Any, Any]) -> None:
        """The second launch of MLX's attention over many keys, and the sums in between; as chips
        other than Max and Ultra have it. That MLX composes attention of over 32 rows of heads that
        share keys, or of heads of other sizes than 64, 96, 128 and 256, is not counted."""
        (_, heads, rows, _), (_, kv_heads, keys, _) = given[0].shape, given[1].shape
        if rows > VECTOR or keys < LONG or kv_heads == heads:
            return
        blocks = 64 if rows * heads // kv_heads >= 4 else 32
        stats = 2 * 4 * made.size // made.shape[-1]  # the largest score and the total, float32
        between = blocks * (made.nbytes + stats)
        self.work.launch("ScaledDotProductAttention", [], between)
        self.work.read += between

    def _copied(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.work.launch("Copy", [x], x.nbytes)
        strides = [x.itemsize * prod(x.shape[i + 1 :]) for i in range(x.ndim)]
        return np.lib.stride_tricks.as_strided(x, x.shape, strides)

    def _copies(self, kind: str, i: int, x: np.ndarray[Any, Any]) -> bool:
        if x.size <= 1 or x.flags.c_contiguous:
            return False
        item = x.itemsize
        if kind == "QuantizedMatmul":
            return x.strides[-1] != item or (x.ndim > 1 and x.strides[-2] != item * x.shape[-1])
        if kind == "Matmul":
            by_rows = x.strides[-1] == item and x.strides[-2] >= item * x.shape[-1]
            by_columns = x.strides[-2] == item and x.strides[-1] >= item * x.shape[-2]
            return not (by_rows or by_columns or 1 in x.shape[-2:])
        if kind == "RMSNorm":
            return i == 0 and (x.strides[-1] != item or not _dense_rows(x))
        if kind == "RoPE":
            return i == 0 and not (_squeezed(x) <= 3 or _transposed(x))
        if kind == "ScaledDotProductAttention":
            return _attention_copies(i, x)
        return kind in ROWS


def _dense_rows(x: np.ndarray[Any, Any]) -> bool:
    return x.ndim < 2 or x.shape[-2] == 1 or x.strides[-2] in (0, x.itemsize * x.shape[-1])


def _squeezed(x: np.ndarray[Any, Any]) -> int:
    """Dimensions from the first longer one on, 3 at least."""
    ndim = x.ndim
    while ndim > 3 and x.shape[-ndim] == 1:
        ndim -= 1
    return ndim


def _transposed(x: np.ndarray[Any, Any]) -> bool:
    """Whether only the second and third of four dimensions are swapped."""
    return x.ndim == 4 and x.transpose(0, 2, 1, 3).flags.c_contiguous


def _attention_copies(i: int, x: np.ndarray[Any, Any]) -> bool:
    """For q, k, v and mask in turn: what the kernel for few rows copies first."""
    if i == 0:
        if x.shape[2] > VECTOR:
            return x.strides[-1] != x.itemsize
        return not (1 in x.shape[:2] and x.transpose(0, 2, 1, 3).flags.c_contiguous)
    if i > 2:
        return False
    regular = 1 in x.shape[:2] or x.strides[0] == x.strides[1] * x.shape[1]
    return x.strides[-1] != x.itemsize or not regular


def _attention_reads(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    sequences: mx.array,
    tables: mx.array,
    window: int,
) -> int:
    """Bytes that our attention reads: of the pools, the positions that a sequence's rows see."""
    start, _, rows, _, _, first, *_ = np.array(sequences).T
    low = np.maximum(first, start - window + 1) if window else first
    slot = keys.nbytes // keys.shape[1] + values.nbytes // values.shape[1]
    return q.nbytes + sequences.nbytes + tables.nbytes + int((start + rows - low).sum()) * slot


def _experts_reads(x: mx.array, experts: mx.array, order: mx.array, *weights: mx.array) -> int:
    """Bytes that our product of experts reads, if each choice is of another one: as for MLX's."""
    part = min(1.0, experts.size / len(weights[0]))
    return x.nbytes + experts.nbytes + order.nbytes + int(part * sum(w.nbytes for w in weights))


def _view(
    kind: str, x: np.ndarray[Any, Any], shape: tuple[int, ...], args: list[Any]
) -> np.ndarray[Any, Any]:
    if kind == "Transpose":
        return x.transpose(args[0])
    if kind == "Slice":
        return x[tuple(slice(*each) for each in zip(*args, strict=True))]
    if kind.startswith("Broadcast"):
        return np.broadcast_to(x, shape)
    view = x.view()
    view.shape = shape
    return view


class Compiled:
    """A function that mx.compile makes one launch of. `mx.compile = Compiled` before mlx-lm is
    imported: what was compiled really cannot be exported."""

    def __init__(self, plain: Callable[..., Any], *rest: Any, **settings: Any) -> None:
        self.plain = plain
        self.real = COMPILE(plain, *rest, **settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.real(*args, **kwargs)


@dataclass(slots=True)
class StandIns:
    """Makes nodes for what this machine's MLX lacks. Their values are zeros."""

    made: list[StandIn] = field(default_factory=list)

    def node(
        self,
        name: str,
        like: Sequence[Any],
        inputs: Sequence[Any],
        read: Callable[[], int] | None = None,
    ) -> list[mx.array]:
        """Arrays of the shapes and dtypes of `like`, made of those of `inputs` that are arrays."""
        blanks = [mx.zeros(x.shape, x.dtype) for x in like]
        mark = mx.array(len(self.made), MARK)
        EVALUATE(blanks, mark)
        self.made.append(StandIn(name, read))
        arrays = [x for x in inputs if isinstance(x, mx.array)]
        return list(mx.depends(blanks, [*arrays, mark]))

    def norm(self, x: mx.array, *rest: Any, **_: Any) -> mx.array:
        return self.node("RMSNorm", [x], [x, *rest])[0]

    def rope(self, x: mx.array, dims: int, *, offset: Any, freqs: Any = None, **_: Any) -> mx.array:
        made = self.node("RoPE", [x], [x, offset, freqs])[0]
        return made if dims == x.shape[-1] else made + 0  # one launch copies what is not rotated

    def attention(self, q: mx.array, k: mx.array, v: mx.array, **rest: Any) -> mx.array:
        like = mx.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        inputs = [q, k, v, rest.get("mask"), rest.get("sinks")]
        return self.node("ScaledDotProductAttention", [like], inputs)[0]

    def contiguous(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return self.node("Contiguous", [x], [x])[0]  # MLX's own cannot be exported

    def metal_kernel(self, name: str, *_: Any, **__: Any) -> Callable[..., list[mx.array]]:
        def launch(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **rest: Any) -> Any:
            like = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            read = None
            if name == "paged_attention":
                read = partial(_attention_reads, *inputs, dict(rest["template"])["WINDOW"])
            elif name in ("small_qmm_experts", "small_mm_experts"):
                read = partial(_experts_reads, *inputs)
            return self.node("CustomKernel", like, inputs, read)

        return launch

    def compiled(self, function: Compiled, *args: Any, **kwargs: Any) -> Any:
        out = function.plain(*args, **kwargs)
        leaves: list[Any] = tree_flatten(out)
        inputs = [x for _, x in tree_flatten([args, kwargs])]
        made = self.node("Compiled", [x for _, x in leaves], inputs)
        named = [(name, x) for (name, _), x in zip(leaves, made, strict=True)]
        return tree_unflatten(named) if named[0][0] else made[0]


@contextmanager
def on_metal() -> Iterator[list[StandIn]]:
    """Inside, arrays are made of the primitives that Metal has and a CPU has not: of MLX's fused
    ones and of kernels. Yields what stands in for them, for `work_of`."""
    stand = StandIns()
    patches = dict(
        rms_norm=stand.norm,
        layer_norm=stand.norm,
        rope=stand.rope,
        scaled_dot_product_attention=stand.attention,
        metal_kernel=stand.metal_kernel,
    )

    def compiled(function: Compiled, *args: Any, **kwargs: Any) -> Any:
        return stand.compiled(function, *args, **kwargs)

    with ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch.object(mx.fast, name, stand_in))
        stack.enter_context(mock.patch.object(Compiled, "__call__", compiled))
        stack.enter_context(mock.patch.object(mx, "contiguous", stand.contiguous))
        stack.enter_context(mock.patch.object(cpu, "in_use", lambda: False))
        yield stand.made
