"""The source that we make is, byte for byte, what the installed MLX makes.

MLX prints its own while it traces a function for export, which needs no Metal.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from tests import metalsim
from tests.metalsim.codegen import ATTRIBUTES


class Case(NamedTuple):
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.Dtype]
    source: str
    header: str = ""
    atomic: bool = False
    template: list[tuple[str, Any]] | None = None


def said_by_mlx(case: Case, folder: Path) -> str:
    kernel = mx.fast.metal_kernel(
        name="k",
        input_names=list(case.inputs),
        output_names=list(case.outputs),
        source=case.source,
        header=case.header,
        atomic_outputs=case.atomic,
    )

    def traced(*inputs: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            template=case.template,
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(64,)] * len(case.outputs),
            output_dtypes=list(case.outputs.values()),
            verbose=True,
        )

    with tempfile.TemporaryFile() as file:  # MLX prints from C++
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            mx.export_function(str(folder / "traced.mlxfn"), traced, *case.inputs.values())
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        text = file.read().decode()
    return text[text.index("```\n") + 4 : text.rindex("\n```")]


CASES = [
    Case({"x": mx.zeros(4)}, {"o": mx.float32}, "o[0]=x[0];"),
    Case(
        {"x": mx.zeros((4, 16)), "s": mx.array(2.0)},
        {"o": mx.float16, "p": mx.uint32},
        "uint i=thread_position_in_grid.x; o[i]=x[i]*s+x_shape[0]+x_strides[0]+x_ndim;"
        " p[i]=thread_index_in_simdgroup;",
        "inline float f(float x){return x;}\n",
        template=[("T", mx.bfloat16), ("N", 4), ("B", True), ("C", False)],
    ),
    Case(
        {"x": mx.zeros(7), "y": mx.zeros(8, mx.int64), "z": mx.zeros((3, 3), mx.bool_)},
        {"o": mx.float32},
        "threads_per_threadgroup threadgroup_position_in_grid simdgroup_index_in_threadgroup"
        " y_shape z_strides",
        atomic=True,
        template=[("T", mx.complex64)],
    ),
    Case({"x": mx.zeros(8)}, {"o": mx.float32}, " ".join(ATTRIBUTES)),
]


@pytest.mark.parametrize("case", CASES)
def test_the_source_is_mlxs_own(case: Case, tmp_path: Path) -> None:
    kernel = metalsim.metal_kernel(
        "k",
        list(case.inputs),
        list(case.outputs),
        case.source,
        case.header,
        atomic_outputs=case.atomic,
    )
    ours = kernel.mlx_source(list(case.inputs.values()), list(case.outputs.values()), case.template)
    assert ours == said_by_mlx(case, tmp_path)
