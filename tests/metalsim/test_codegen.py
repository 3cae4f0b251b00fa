"""Our generated source must equal, byte for byte, what the installed MLX generates.  MLX prints it (verbose=True) while tracing
for export, which works without Metal."""

import os
import sys
import tempfile

import mlx.core as mx
import pytest

from tests import metalsim as ms


def mlx_source(name, ins, outs, source, header, atomic, inputs, shapes, dtypes, template):
    k = mx.fast.metal_kernel(
        name=name, input_names=ins, output_names=outs, source=source, header=header, atomic_outputs=atomic
    )

    def f(*xs):
        return k(
            inputs=list(xs),
            template=template,
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
            verbose=True,
        )

    with tempfile.TemporaryFile() as t, tempfile.TemporaryDirectory() as d:
        sys.stdout.flush()
        old = os.dup(1)
        os.dup2(t.fileno(), 1)
        try:
            mx.export_function(os.path.join(d, "e.mlxfn"), f, *inputs)
        finally:
            os.dup2(old, 1)
            os.close(old)
        t.seek(0)
        s = t.read().decode()
    return s[s.index("```\n") + 4 : s.rindex("\n```")]


A = mx.zeros
CASES = [
    (["x"], ["o"], "o[0]=x[0];", "", False, [A((4,))], [(4,)], [mx.float32], None),
    (
        ["x", "s"],
        ["o", "p"],
        "uint i=thread_position_in_grid.x; o[i]=x[i]*s+x_shape[0]+x_strides[0]+x_ndim; p[i]=thread_index_in_simdgroup;",
        "inline float f(float x){return x;}\n",
        False,
        [A((4, 16)), mx.array(2.0)],
        [(64,), (64,)],
        [mx.float16, mx.uint32],
        [("T", mx.bfloat16), ("N", 4), ("B", True), ("C", False)],
    ),
    (
        ["x", "y", "z"],
        ["o"],
        "threads_per_threadgroup threadgroup_position_in_grid simdgroup_index_in_threadgroup y_shape z_strides",
        "",
        True,
        [A((7,)), A((8,), mx.int64), A((3, 3), mx.bool_)],
        [(64,)],
        [mx.float32],
        [("T", mx.complex64)],
    ),
]


@pytest.mark.parametrize("c", CASES)
def test_same_source(c):
    ins, outs, src, hdr, atomic, inputs, shapes, dts, tmpl = c
    want = mlx_source("k", ins, outs, src, hdr, atomic, inputs, shapes, dts, tmpl)
    assert ms.Kernel("k", ins, outs, src, hdr, True, atomic).mlx_source(inputs, dts, tmpl) == want
