"""mx.fast.metal_kernel on a CPU: the same call, its source compiled unmodified, run and checked.

Rule: what MLX would refuse is refused with MLX's error; what a GPU would do wrong is a
MetalSimError.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metalsim import abi, build, codegen, report
from tests.metalsim.report import MetalSimError, Name, Report, Traffic
from tests.metalsim.settings import config, configure

TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "float32": "float",
    "bfloat16": "bfloat16_t",
    "complex64": "complex64_t",
}
MOST_THREADS, MOST_THREADGROUP_BYTES, MOST_BUFFERS = 1024, 32768, 31  # of a threadgroup, of Metal
FINDINGS = 64  # kinds and places of a launch; more of the same are counted

Triple = tuple[int, int, int]
_one = threading.Lock()  # the state of a launch is the library's
_last: Report | None = None


def last() -> Report:
    """Of the launch before; raises LookupError where there was none."""
    if _last is None:
        raise LookupError("no kernel was launched yet")
    return _last


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def numpy_type(dtype: mx.Dtype) -> np.dtype[Any]:
    """bfloat16 is carried as uint16."""
    name = type_name(dtype)
    return np.dtype("uint16" if name == "bfloat16" else name)


def to_numpy(x: mx.array) -> np.ndarray:
    """A view with x's strides, where x has elements."""
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
    mx.eval(x)
    if not x.size:
        return np.zeros(x.shape, numpy_type(x.dtype))
    return np.asarray(memoryview(x)) if x.ndim else np.array(x.item(), numpy_type(x.dtype))


def span(a: np.ndarray) -> np.ndarray:
    """The bytes from a's first element to its last: what a kernel may read of a view."""
    if a.flags.c_contiguous or not a.size:
        return np.ascontiguousarray(a)
    count = sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True)) + a.itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(a.ctypes.data), np.uint8).copy()


class Buffers:
    """The arguments of a launch in the order of the kernel's parameters; keeps their memory
    alive."""

    def __init__(self, checked: bool) -> None:
        self.checked = checked
        self.items: list[abi.Buf] = []
        self.names: list[Name] = []
        self.flags: list[np.ndarray] = []
        self.alive: list[np.ndarray] = []

    def add(self, name: str, given: np.ndarray | None, out: np.ndarray | None, item: int) -> None:
        here = given if given is not None else out
        assert here is not None
        flags = (
            np.full(here.nbytes, abi.DEFINED, np.uint8)
            if given is not None
            else np.zeros(here.nbytes, np.uint8)
        )
        self.alive += [array for array in (given, out, flags) if array is not None]
        self.flags.append(flags)
        self.names.append(Name(name, item, here.nbytes))
        self.items.append(
            abi.Buf(
                given=given.ctypes.data if given is not None else None,
                out=out.ctypes.data if out is not None else None,
                size=here.nbytes,
                writable=out is not None,
                flags=flags.ctypes.data if self.checked else None,
            )
        )

    def traffic(self, run: ctypes.Array[abi.Buf]) -> dict[str, Traffic]:
        return {
            name.text: Traffic(name.size, buffer.read_bytes, buffer.written_bytes, flags)
            for name, buffer, flags in zip(self.names, run, self.flags, strict=True)
        }


class Kernel:
    """As mx.fast.metal_kernel returns one; shapes are in elements, grid and threadgroup in
    threads."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
    ) -> None:
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs

    def generate(
        self,
        inputs: Sequence[mx.array],
        dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None,
    ) -> codegen.Generated:
        """Around the body, what MLX itself would put there."""
        return codegen.generate(
            self.name,
            self.source,
            [
                codegen.Input(name, TYPES[type_name(x.dtype)], x.ndim, x.size)
                for name, x in zip(self.input_names, inputs, strict=True)
            ],
            [
                codegen.Output(name, TYPES[type_name(dtype)])
                for name, dtype in zip(self.output_names, dtypes, strict=True)
            ],
            [
                (name, TYPES[type_name(v)] if isinstance(v, mx.Dtype) else v)
                for name, v in template or []
            ],
            self.atomic_outputs,
        )

    def mlx_source(self, *arguments: Any) -> str:
        """Of generate(): the Metal source after MLX's preamble."""
        made = self.generate(*arguments)
        return self.header + made.signature + self.source + made.tail

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        """Raises MetalSimError, MetalCompileError, and ValueError for what MLX or Metal refuses."""
        global _last
        self.refuse(inputs, output_shapes, output_dtypes, threadgroup)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        made = self.generate(arrays, output_dtypes, template)
        if verbose:
            text = self.header + made.signature + self.source + made.tail
            print(f"Generated source code for `{self.name}`:\n```\n{text}\n```")
        buffers = [p for p in made.parameters if p.kind != "attribute"]
        if len(buffers) > MOST_BUFFERS:
            raise ValueError(
                f"`{self.name}` has {len(buffers)} buffers; Metal allows {MOST_BUFFERS}"
            )
        numbers = {id(parameter): i for i, parameter in enumerate(buffers)}
        call = [p.argument(numbers.get(id(p), -1)) for p in made.parameters]
        text = build.unit(self.name, self.header, made.signature, self.source, made.call, call)
        code = build.compiled(text, config.checked)
        if code.threadgroup_bytes > MOST_THREADGROUP_BYTES:
            raise ValueError(
                f"threadgroup memory {code.threadgroup_bytes} exceeds the {MOST_THREADGROUP_BYTES} bytes that"
                " Metal allows"
            )
        outs = [
            np.zeros(tuple(shape), numpy_type(dtype))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        bound = self.bind(buffers, arrays, outs, output_dtypes, init_value)
        _last = said = self.launch(code, bound, grid, threadgroup)
        if said.errors or "timeout" in said.kinds:
            raise MetalSimError(said)
        results = (mx.array(out) for out in outs)
        return [
            x.view(mx.bfloat16) if dtype == mx.bfloat16 else x
            for x, dtype in zip(results, output_dtypes, strict=True)
        ]

    def refuse(
        self,
        inputs: Sequence[Any],
        shapes: Sequence[Any],
        dtypes: Sequence[Any],
        threadgroup: Triple,
    ) -> None:
        for given, names, what in (
            (inputs, self.input_names, "inputs"),
            (shapes, self.output_names, "output_shapes"),
            (dtypes, self.output_names, "output_dtypes"),
        ):
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(given)}."
                )
        if (threads := threadgroup[0] * threadgroup[1] * threadgroup[2]) > MOST_THREADS:
            raise ValueError(
                f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup"
                f" ({MOST_THREADS})."
            )

    def bind(
        self,
        parameters: Sequence[codegen.Parameter],
        arrays: Sequence[mx.array],
        outs: Sequence[np.ndarray],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> Buffers:
        views = [to_numpy(x) for x in arrays]
        if self.ensure_row_contiguous:
            views = [np.ascontiguousarray(view) for view in views]
        bound = Buffers(config.checked)
        for kind, i, _, _ in parameters:
            if kind == "out":
                start = None
                if init_value is not None:
                    start = to_numpy(mx.full(outs[i].shape, init_value, dtypes[i]))
                bound.add(self.output_names[i], start, outs[i], outs[i].itemsize)
            elif kind == "in":
                bound.add(self.input_names[i], span(views[i]), None, views[i].itemsize)
            else:
                layout: np.ndarray = {
                    "_shape": np.array(views[i].shape, np.int32),
                    "_strides": np.array(
                        [s // views[i].itemsize for s in views[i].strides], np.int64
                    ),
                    "_ndim": np.array(views[i].ndim, np.int32),
                }[kind]
                bound.add(self.input_names[i] + kind, layout, None, layout.itemsize)
        return bound

    def launch(
        self, code: build.Compiled, bound: Buffers, grid: Triple, threadgroup: Triple
    ) -> Report:
        tall = [size for at, bytes_, _ in code.elf.threadgroup for size in (at, at + bytes_)]
        buffers, errors = (abi.Buf * len(bound.items))(*bound.items), (abi.Err * FINDINGS)()
        run = abi.Launch(
            bufs=buffers,
            nbufs=len(buffers),
            grid=tuple(grid),
            tg=tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True)),
            checked=config.checked,
            races=config.races,
            order_seed=config.order,
            stack=config.stack,
            timeout=config.timeout,
            syms=(ctypes.c_uint64 * max(1, len(tall)))(*tall),
            nsyms=len(tall) // 2,
            errs=errors,
            maxerrs=FINDINGS,
        )
        with _one:
            code.library.msim_launch(ctypes.byref(run))
        said = Report(
            self.name, threadgroup_bytes=code.threadgroup_bytes, severity=dict(config.severity)
        )
        for found in report.of_compiler(code.warnings):
            said.add(*found)
        for told in report.of_launch(errors[: run.nerrs], code, bound.names, self.name):
            said.add(*told)
        for count in ("access", "switch", "simd", "bar", "tg"):
            said.counts[count] = getattr(run, f"n_{count}")
        if config.checked:
            said.traffic = bound.traffic(buffers)
            if not run.aborted:
                self.unwritten(said, bound)
        return said

    def unwritten(self, said: Report, bound: Buffers) -> None:
        for name, flags in zip(bound.names, bound.flags, strict=True):
            missing = np.count_nonzero(flags & (abi.DEFINED | abi.WRITTEN) == 0) // name.item
            if name.text in self.output_names and missing:
                count = name.size // name.item
                said.add(
                    "output-not-written",
                    name.text,
                    f"{missing} of {count} elements were never written",
                )


def metal_kernel(*arguments: Any, **named: Any) -> Kernel:
    """The signature of mx.fast.metal_kernel."""
    return Kernel(*arguments, **named)


@contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Inside, mx.fast.metal_kernel is the simulator and mx.metal.is_available() is true."""
    before = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel, mx.metal.is_available = metal_kernel, lambda: True
    try:
        with configure(**changes):
            yield
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = before
