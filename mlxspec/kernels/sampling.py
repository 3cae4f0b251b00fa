"""metal/sample_accept.metal: from logits to tokens and accepted drafts, or the reference.

Rule: the kernel draws MLX's own noise, so both sample the same tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.metal import SMALLEST, MetalKernel, dtype_name
from mlxspec.kernels.reference import Draws
from mlxspec.kernels.trial import Case, Inputs
from mlxspec.kernels.verify import KERNELS

VARIANT = "two passes"
ROWS = 68  # of a case
MASKED = 64  # of them have no mask
RACED = (1, 2, 5, 16, MASKED)
PAIRS = 512  # pairs of tokens of a SIMD-group
SIMDS = 4  # SIMD-groups of a threadgroup
Drafts = Sequence[tuple[int, int]]
Results = tuple[mx.array, mx.array | None]
PART = MetalKernel(
    "sample_accept_part",
    "sample_accept",
    "logits hows masks floors late",
    "best token",
    "sample_accept_part<PAIRS, T>(logits, hows, masks, floors, late, best, token, logits_shape[1],"
    " masks_shape[1], threadgroup_position_in_grid.y,"
    f" {SIMDS} * threadgroup_position_in_grid.x + simdgroup_index_in_threadgroup, PARTS,"
    " thread_index_in_simdgroup);",
)
MERGE = MetalKernel(
    "sample_accept_merge",
    "sample_accept",
    "best token entries inputs",
    "tokens kept",
    "sample_accept_merge(best, token, entries, inputs, tokens, kept, best_shape[1],"
    " threadgroup_position_in_grid.x, thread_index_in_simdgroup);",
)


def sample_accept(
    logits: mx.array,
    draws: Draws,
    inputs: mx.array | None = None,
    drafts: Drafts = (),
    variant: str = "",
) -> Results:
    """As reference.sample_accept, by the kernel where it is proven, or with `variant` without
    proof."""
    rows, vocab = logits.shape
    variant = variant or KERNELS.variant(_case_name(vocab, logits.dtype), rows)
    if not variant:
        return reference.sample_accept(logits, draws, inputs, drafts)
    best, token = _best(logits, draws)
    proposed = best if inputs is None else _padded(inputs)  # any array: nothing of it is read
    entries = []
    row = 0
    for at, count in drafts or [(0, 0) for _ in range(rows)]:
        entries.append((row, 1 + count, at, 0))
        row += 1 + count
    tokens, accepted = MERGE(
        [
            best,
            token,
            _padded(mx.array(entries).flatten()),
            proposed.view(mx.int32),
        ],
        (32 * len(entries), 1, 1),
        (32, 1, 1),
        [(rows,), (len(entries),)],
        [mx.int32, mx.int32],
    )
    return tokens, accepted if drafts else None


def _best(logits: mx.array, draws: Draws) -> list[mx.array]:
    """The highest value and its token in each part of the vocabulary, uint32 [R, parts] each."""
    rows, vocab = logits.shape
    parts = max(SMALLEST, ceil(vocab / (2 * PAIRS)))
    params = _params(draws)
    # Where the kernel reads nothing, any array will do.
    floors = params.view(mx.float32) if draws.floors is None else _padded(draws.floors)
    late = params if draws.late is None else _padded(draws.late.astype(mx.uint32))
    return PART(
        [
            logits,
            params,
            _masks(draws.masks, vocab),
            floors,
            late,
        ],
        (32 * SIMDS * ceil(parts / SIMDS), rows, 1),
        (32 * SIMDS, 1, 1),
        [(rows, parts), (rows, parts)],
        [mx.uint32, mx.uint32],
        T=logits.dtype,
        PAIRS=PAIRS,
        PARTS=parts,
    )


def _params(draws: Draws) -> mx.array:
    """uint32 [R, 8]: the kernel's parameters of each row, see there."""
    masked = np.array([len(mask) > 0 for mask in draws.masks])
    params = np.zeros((len(masked), 8), np.uint32)
    params[:, 0] = draws.seeds
    params[:, 1] = draws.positions
    params[:, 2] = np.array(draws.temperatures, np.float32).view(np.uint32)
    params[:, 3] = masked * np.cumsum(masked)
    params[:, 4] = draws.late is not None
    params[:, 5] = draws.floors is not None
    return mx.array(params)


def _masks(
    masks: Sequence[bytes],
    vocab: int,
) -> mx.array:
    """uint8 [masks, bytes] of those that are not empty; tokens beyond their end are excluded."""
    width = max(SMALLEST, ceil(vocab / 8), *map(len, masks))
    packed = b"".join(mask.ljust(width, b"\0") for mask in masks if mask)
    packed = packed or bytes(width)  # not read
    rows = np.frombuffer(packed, np.uint8)
    return mx.array(rows.reshape(-1, width))


def _padded(x: mx.array) -> mx.array:
    """MLX passes arrays of fewer than 8 elements in another address space."""
    return x if x.size >= SMALLEST else mx.pad(x, (0, SMALLEST - x.size))


def _case_name(vocab: int, dtype: mx.Dtype) -> str:
    return f"sample_accept {vocab} {dtype_name(dtype)}"


def sample_accept_case(vocab: int, dtype: mx.Dtype) -> Case:
    """The tokens of a vocabulary, which must all be the reference's. Every fourth row is greedy,
    every third has a floor, those that are not raced have masks. Half of a draft is accepted."""

    def inputs(seed: int) -> Inputs:
        key = mx.random.key(seed)
        logits = mx.random.normal((ROWS, vocab), scale=3, key=key)
        logits = logits.astype(dtype)
        rows = mx.arange(ROWS)
        floors = mx.where(rows % 3 == 1, 2.0, -mx.inf)
        drawn, _ = reference.sample_accept(logits, _draws(vocab, floors))
        return logits, floors, drawn + (rows == ROWS // 2)

    def run(sample: Callable[..., Any], *arrays: mx.array) -> mx.array:
        logits, floors, drafted = arrays
        drafts = [(0, len(logits) - 1)]
        return mx.concatenate(sample(logits, _draws(vocab, floors), drafted, drafts))

    plain = partial(run, reference.sample_accept)
    return Case(
        name=_case_name(vocab, dtype),
        rows=(ROWS,),
        raced=RACED,
        inputs=inputs,
        by_row=3,
        stock=plain,
        reference=plain,
        variants={VARIANT: partial(run, partial(sample_accept, variant=VARIANT))},
        tolerance=0.0,
    )


def _draws(vocab: int, floors: mx.array) -> Draws:
    """A case's parameters, of as many rows as floors."""
    mask = np.random.default_rng(vocab).bytes(ceil(vocab / 8))
    rows = range(len(floors))
    return Draws(
        temperatures=[0.0 if row % 4 == 3 else 0.7 + row / 16 for row in rows],
        seeds=[977 * row for row in rows],
        positions=[4096 + row for row in rows],
        masks=[mask if row >= MASKED else b"" for row in rows],
        floors=floors,
    )
