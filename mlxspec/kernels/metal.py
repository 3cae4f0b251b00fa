"""Builds and launches the kernels of metal/*.metal.

Rule: a kernel is compiled by the current `mx.fast.metal_kernel`, so that a simulator's kernel is
not used on the device.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxspec.config import data_dir

SMALLEST = 8  # elements; MLX passes smaller arrays in another address space
Launch = Callable[..., list[mx.array]]


@dataclass(frozen=True, slots=True)
class MetalKernel:
    """A function of the last of these `files` metal/<file>.metal, which are read one after the
    other, called by `body` with the arrays that `inputs` and `outputs` name."""

    name: str
    files: str
    inputs: str
    outputs: str
    body: str

    def __call__(
        self,
        inputs: list[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        **template: Any,
    ) -> list[mx.array]:
        """Launch it with a grid in threads; `template` are the constants of its instance."""
        return _compiled(mx.fast.metal_kernel, self)(
            inputs=inputs,
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )


@cache
def _compiled(make: Callable[..., Launch], kernel: MetalKernel) -> Launch:
    inputs, outputs = kernel.inputs.split(), kernel.outputs.split()
    text = "".join(map(source, kernel.files.split()))
    return make(kernel.name, inputs, outputs, kernel.body, text)


@cache
def source(file: str) -> str:
    """The text of metal/<file>.metal without comments: MLX hashes all of it at each launch."""
    text = (data_dir("metal") / f"{file}.metal").read_text("utf-8")
    return re.sub("[ \t]*//.*", "", text)


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def has_tensors() -> bool:
    """Whether this GPU has neural accelerators, as MLX decides it: an M5 or later."""
    architecture = str(mx.device_info().get("architecture"))
    return bool(re.match(r"applegpu_g(17[^p]|1[89]|[2-9]\d)", architecture))
