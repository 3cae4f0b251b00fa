"""One small kernel from a body alone, for the simulator's own tests.

Rule: grids are one-dimensional; input `x` counts from 0 unless given.
"""

from typing import Any

import mlx.core as mx

from tests import metalsim

# i: thread in the grid, l: in its threadgroup, lane: in its SIMD-group. One line: a body begins at
# line 2.
NAMES = (
    "uint i = thread_position_in_grid.x; uint l = thread_index_in_threadgroup;"
    " uint lane = thread_index_in_simdgroup; (void)i; (void)l; (void)lane;\n"
)


def run(
    body: str,
    n: int = 64,
    group: int = 64,
    x: mx.array | None = None,
    inputs: dict[str, mx.array] | None = None,
    out: int | None = None,
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    init: float | None = None,
    atomic: bool = False,
    **settings: Any,
) -> mx.array:
    """Output `o` [out or n] of n threads in threadgroups of `group`."""
    given = inputs or {"x": mx.arange(n).astype(mx.float32) if x is None else x}
    kernel = metalsim.metal_kernel(
        "k", list(given), ["o"], NAMES + body, header, atomic_outputs=atomic
    )
    with metalsim.configure(**settings):
        return kernel(
            inputs=list(given.values()),
            grid=(n, 1, 1),
            threadgroup=(group, 1, 1),
            output_shapes=[(out or n,)],
            output_dtypes=[dtype],
            init_value=init,
        )[0]
