"""Sampling and acceptance of drafts by metal/sample_accept.metal, or by the reference.

Rule: the kernel draws MLX's own noise, so both sample the same tokens.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels import reference
from mlxspec.kernels.inputs import Draws
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.trial import Case, Inputs
from mlxspec.kernels.verify import KERNELS

VARIANT = "two passes"
ROWS = 64  # of a case without masks, at most
MASKED = 4  # more of its rows, with masks
MAX_LOGITS = 8 << 20  # of these rows
PAIRS = 512  # pairs of tokens of a SIMD-group
SIMDS = 4  # SIMD-groups of a threadgroup
PART = MetalKernel(
    "sample_accept_part",
    "sample_accept",
    "logits params masks min_logits shift",
    outputs="part_max part_argmax",
    body="sample_accept_part<PAIRS, T>(logits, params, masks, min_logits, shift, part_max,"
    " part_argmax, logits_shape[1], masks_shape[1], threadgroup_position_in_grid.y,"
    f" {SIMDS} * threadgroup_position_in_grid.x + simdgroup_index_in_threadgroup, PARTS,"
    " thread_index_in_simdgroup);",
)
MERGE = MetalKernel(
    "sample_accept_merge",
    "sample_accept",
    "part_max part_argmax entries inputs",
    outputs="tokens accepted",
    body="sample_accept_merge(part_max, part_argmax, entries, inputs, tokens, accepted,"
    " part_max_shape[1],"
    " threadgroup_position_in_grid.x, thread_index_in_simdgroup);",
)


def sample_accept(
    logits: Array,
    draws: Draws,
    inputs: Array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
    unproven: bool = False,
) -> tuple[Array, Array | None]:
    """As reference.sample_accept, by the kernel where it is proven, or without proof if
    `unproven`."""
    rows, vocab = logits.shape
    case = sample_accept_case(vocab, logits.dtype)
    if not (unproven or KERNELS.variant(case.name, rows)):
        return reference.sample_accept(logits, draws, inputs, drafts=drafts)
    params = _params(draws)
    # The kernel does not read these, but needs some array.
    floor = params.view(mx.float32) if draws.min_logits is None else draws.min_logits
    shift = params if draws.shift is None else draws.shift.astype(mx.uint32)
    masks = reference.mask_rows(draws.masks, vocab if any(draws.masks) else 0)
    count = max(SMALLEST, ceil(vocab / (2 * PAIRS)))
    parts = PART(  # the highest value and its token in each part of the vocabulary
        [logits, params, mx.array(masks), floor, shift],
        (32 * SIMDS * ceil(count / SIMDS), rows, 1),
        (32 * SIMDS, 1, 1),
        output_shapes=[(rows, count), (rows, count)],
        output_dtypes=[mx.uint32, mx.uint32],
        T=logits.dtype,
        PAIRS=PAIRS,
        PARTS=count,
    )
    ids = parts[1] if inputs is None else inputs
    entries = []
    row = 0
    for first, length in drafts or [(0, 0) for _ in range(rows)]:
        entries.append((row, 1 + length, first, 0))
        row += 1 + length
    tokens, accepted = MERGE(
        [*parts, mx.array(entries), ids.view(mx.int32)],
        (32 * len(entries), 1, 1),
        (32, 1, 1),
        output_shapes=[(rows,), (len(entries),)],
        output_dtypes=[mx.int32, mx.int32],
    )
    return tokens, accepted if drafts else None


def _params(draws: Draws) -> Array:
    """uint32 [R, 8]: the kernel's parameters of each row, listed in its source."""
    params = np.zeros((len(draws.masks), 8), np.uint32)
    params[:, 0] = draws.seeds
    params[:, 1] = draws.positions
    params[:, 2] = np.array(draws.temperatures, np.float32).view(np.uint32)
    params[:, 3] = [len(mask) > 0 for mask in draws.masks]
    params[:, 4] = draws.shift is not None
    params[:, 5] = draws.min_logits is not None
    return mx.array(params)


@cache
def sample_accept_case(vocab: int, dtype: mx.Dtype) -> Case:
    """Samples of a vocabulary, which must all equal the reference's. Every fourth row is greedy,
    every third has a lowest logit, the last MASKED have masks. Half of a draft is accepted."""
    most = min(ROWS, MAX_LOGITS // vocab)
    mask = np.random.default_rng(vocab).bytes(ceil(vocab / 8))

    def draws(min_logits: Array) -> Draws:
        rows = range(len(min_logits))
        return Draws(
            temperatures=[0.0 if row % 4 == 3 else 0.7 + row / 16 for row in rows],
            seeds=[977 * row for row in rows],
            positions=[4096 + row for row in rows],
            masks=[mask if row >= most else b"" for row in rows],
            min_logits=min_logits,
        )

    def inputs(seed: int) -> Inputs:
        rows = mx.arange(most + MASKED)
        logits = mx.random.normal(
            (rows.size, vocab),
            scale=3,
            key=mx.random.key(seed),
        )
        logits = logits.astype(dtype)
        min_logits = mx.where(rows % 3 == 1, 2.0, -mx.inf)
        sampled, _ = reference.sample_accept(logits, draws(min_logits))
        return logits, min_logits, sampled + (rows == rows.size // 2)

    def run(sample: Callable[..., Any], *arrays: Array) -> Array:
        """int32 [R, 2]: the token of each row, and whether all drafts before it are accepted."""
        logits, min_logits, drafted = arrays
        drafts = [(0, len(logits) - 1)]
        tokens, accepted = sample(logits, draws(min_logits), drafted, drafts=drafts)
        return mx.stack([tokens, mx.arange(len(tokens)) <= accepted], axis=1)

    plain = partial(run, reference.sample_accept)
    return Case(
        name=f"sample_accept {vocab} {dtype_name(dtype)}",
        rows=(1, 3, most + MASKED),
        raced=(1, 2, 5, 16, most),
        inputs=inputs,
        by_row=3,
        stock=plain,
        reference=plain,
        variants={VARIANT: partial(run, partial(sample_accept, unproven=True))},
        tolerance=0.0,
    )
