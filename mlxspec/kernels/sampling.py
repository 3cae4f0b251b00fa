"""From logits to tokens, and how many drafted ones stand: by metal/sample_accept.metal or the
reference.

Rule: the kernel draws MLX's own noise, so which of the two ran cannot be told from a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.kernels import reference
from mlxspec.kernels.matmul import FLOATS, SMALLEST, named, source
from mlxspec.kernels.proven import VERDICTS, Case
from mlxspec.kernels.reference import Draws
from mlxspec.types import UnsupportedModel

KERNEL, WAY = "sample_accept", "two passes"
PAIRS, TOGETHER = 512, 4  # of tokens, that a SIMD-group draws; SIMD-groups of a threadgroup
Results = tuple[mx.array, mx.array | None]


def sample_accept(
    logits: mx.array,
    draws: Draws,
    inputs: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> Results:
    """As reference.sample_accept, by whatever was proven to be the fastest here."""
    verdict = (
        VERDICTS.get(f"{KERNEL} {_shape(logits.shape[-1], logits.dtype)}") if VERDICTS else None
    )
    proven = verdict is not None and verdict.takes(len(logits))
    return (by_kernel if proven else reference.sample_accept)(logits, draws, inputs, drafts)


def by_kernel(
    logits: mx.array,
    draws: Draws,
    inputs: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> Results:
    """As reference.sample_accept, by the kernel. Raises UnsupportedModel for what it does not
    do."""
    rows, vocab = logits.shape
    if logits.dtype not in FLOATS or logits.size < SMALLEST:
        raise UnsupportedModel(
            f"sample_accept takes {SMALLEST} or more logits in float32, float16 or bfloat16, here are"
            f" {logits.size} in {logits.dtype}; use reference.sample_accept"
        )
    parts = max(SMALLEST, -(-vocab // (2 * PAIRS)))
    part, merge = _kernels(mx.fast.metal_kernel)
    hows = _hows(draws)
    masks = _masks(draws.masks, vocab)
    best, token = part(
        inputs=[
            logits,
            hows,
            hows.view(mx.uint8) if masks is None else masks,  # not read, like the next two
            hows.view(mx.float32) if draws.floors is None else _padded(draws.floors),
            hows if draws.late is None else _padded(draws.late.astype(mx.uint32)),
        ],
        template=[("T", logits.dtype), ("PAIRS", PAIRS), ("PARTS", parts)],
        grid=(32 * TOGETHER * -(-parts // TOGETHER), rows, 1),
        threadgroup=(32 * TOGETHER, 1, 1),
        output_shapes=[(rows, parts)] * 2,
        output_dtypes=[mx.uint32] * 2,
    )
    entries, first = [], 0
    for at, count in drafts or [(0, 0)] * rows:
        entries.append((first, 1 + count, at, 0))
        first += 1 + count
    tokens, kept = merge(
        inputs=[
            best,
            token,
            _padded(mx.array(entries, mx.int32).flatten()),
            hows.view(mx.int32)
            if inputs is None or not drafts
            else _padded(inputs.astype(mx.int32)),
        ],
        grid=(32 * len(entries), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows,), (len(entries),)],
        output_dtypes=[mx.int32] * 2,
    )
    return tokens, kept if drafts else None


@cache
def _kernels(
    make: Callable[..., Any],
) -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    """By `make`, so that a kernel made by a simulator is not kept for the device."""
    group, lane = "threadgroup_position_in_grid", "thread_index_in_simdgroup"
    return (
        make(
            "sample_accept_part",
            ["logits", "hows", "masks", "floors", "late"],
            ["best", "token"],
            "sample_accept_part<PAIRS, T>(logits, hows, masks, floors, late, best, token, logits_shape[1],"
            f" masks_shape[1], {group}.y, {TOGETHER} * {group}.x + simdgroup_index_in_threadgroup, PARTS,"
            f" {lane});",
            source("sample_accept"),
        ),
        make(
            "sample_accept_merge",
            ["best", "token", "entries", "inputs"],
            ["tokens", "kept"],
            "sample_accept_merge(best, token, entries, inputs, tokens, kept, best_shape[1],"
            f" {group}.x, {lane});",
            source("sample_accept"),
        ),
    )


def _hows(draws: Draws) -> mx.array:
    """uint32 [R, 8]: what the kernel is told about each row; see there."""
    hows = np.zeros((len(draws.temperatures), 8), np.uint32)
    hows[:, 0], hows[:, 1] = draws.seeds, draws.positions
    hows[:, 2] = np.array(draws.temperatures, np.float32).view(np.uint32)
    masked = [r for r, mask in enumerate(draws.masks) if mask]
    hows[masked, 3] = range(1, 1 + len(masked))
    hows[:, 4], hows[:, 5] = draws.late is not None, draws.floors is not None
    return mx.array(hows)


def _masks(masks: Sequence[bytes], vocab: int) -> mx.array | None:
    """uint8 [masks, bytes] of those that are not empty. Raises UnsupportedModel where one ends
    before the vocabulary."""
    lengths = sorted({len(mask) for mask in masks if mask})
    if not lengths:
        return None
    if len(lengths) > 1 or 8 * lengths[0] < vocab:
        raise UnsupportedModel(
            f"masks of {lengths} bytes for {vocab} tokens: give all as many, and a bit for each token"
        )
    rows = [mask.ljust(SMALLEST, b"\0") for mask in masks if mask]
    return mx.array(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1))


def _padded(x: mx.array) -> mx.array:
    """MLX gives a kernel arrays of fewer than 8 elements in another address space."""
    return x if x.size >= SMALLEST else mx.pad(x, (0, SMALLEST - x.size))


def _shape(vocab: int, dtype: mx.Dtype) -> str:
    return f"{vocab} {named(dtype)}"


def sample_accept_case(vocab: int, dtype: mx.Dtype) -> Case:
    """The proof of a vocabulary in a dtype, whose tokens must all be the reference's. Every fourth
    row is greedy; by an odd seed others have floors and masks, and a draft of which half stands
    runs along. A chain is threaded through the positions: to copy the logits would cost more than
    to read them."""

    def inputs(rows: int, seed: int) -> tuple[mx.array, ...]:
        logits = (3 * mx.random.normal((rows, vocab), key=mx.random.key(seed))).astype(dtype)
        nudge = mx.zeros((rows,))
        if seed % 2 == 0:
            return logits, nudge
        floors = mx.where(
            mx.arange(rows) % 3 == 1, mx.topk(_scaled(logits), 40, axis=-1).min(-1), -mx.inf
        )
        drawn, _ = reference.sample_accept(logits, _some(logits, floors))
        return logits, nudge, floors, drawn + (mx.arange(rows) == rows // 2)

    def run(way: Callable[..., Results]) -> Callable[..., mx.array]:
        def result(
            logits: mx.array,
            nudge: mx.array,
            floors: mx.array | None = None,
            ids: mx.array | None = None,
        ) -> mx.array:
            drafts = [(0, len(logits) - 1)] if ids is not None else ()
            draws = replace(_some(logits, floors), late=nudge.astype(mx.int32))
            tokens, kept = way(logits, draws, ids, drafts)
            return tokens if kept is None else mx.concatenate([tokens, kept])

        return result

    plain, shape = run(reference.sample_accept), _shape(vocab, dtype)
    return Case(
        KERNEL, shape, (1, 2, 5, 16, 64), inputs, plain, plain, {WAY: run(by_kernel)}, 0.0, linked=1
    )


def _scaled(logits: mx.array) -> mx.array:
    return (
        logits.astype(mx.float32)
        / mx.array([t or 1.0 for t in _some(logits, None).temperatures])[:, None]
    )


def _some(logits: mx.array, floors: mx.array | None) -> Draws:
    """Rows as a proof draws them."""
    rows, vocab = logits.shape
    bits = np.random.default_rng(vocab).bytes(-(-vocab // 8))
    return Draws(
        [0.0 if r % 4 == 3 else 0.7 + r / 16 for r in range(rows)],
        [977 * r for r in range(rows)],
        [4096 + r for r in range(rows)],
        [bits if floors is not None and r % 3 == 2 else b"" for r in range(rows)],
        None,
        floors,
    )
