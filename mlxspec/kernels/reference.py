"""The kernels' specification in plain MLX ops: attention over pages, sampling; products are in
reference_matmul.

Rule: every Metal kernel must equal its function in one of the two.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels.inputs import Attention, Draws, gather
from mlxspec.types import NOT_FINITE


@partial(mx.compile, shapeless=True)  # one launch
def finite(x: Array) -> Array:
    """x, with 0 for what is not finite."""
    return mx.where(mx.abs(x) < mx.inf, x, 0)


def paged_attention(a: Attention, attend: Any = None) -> Array:
    """[T, heads, Dv] in q's dtype. `attend`: in place of MLX's scaled_dot_product_attention."""
    attend = attend or mx.fast.scaled_dot_product_attention
    of_k, of_v = a.packings
    out = []
    first = a.groups[0].lo
    for group in a.groups:
        rows = a.q[group.lo - first : group.hi - first]
        blocks, mask, keep = group.select(a.window)
        values = gather(a.values, blocks, group.block_size, keep=keep, packing=of_v)
        o = attend(
            rows.reshape(-1, group.length, *rows.shape[1:]).swapaxes(1, 2),
            gather(a.keys, blocks, group.block_size, keep=keep, packing=of_k),
            values if a.clean else finite(values),
            scale=a.scale,
            mask=mask,
            sinks=a.sinks,
        )
        out.append(o.swapaxes(1, 2).flatten(0, 1))
    return mx.concatenate(out)


def gumbel(seeds: Array, positions: Array, vocab: int) -> Array:
    """Standard Gumbel noise float32 [R, vocab], keyed by (seed, position) uint32 [R] each.

    Threefry is a counter-based generator: the noise of (seed, position, token) is the same wherever
    and whenever it is drawn. argmax(logits / T + noise) samples softmax(logits / T)
    (Gumbel-max)."""
    keys = mx.stack([seeds, positions], axis=1)
    noise: Array = mx.vmap(partial(mx.random.gumbel, (vocab,), mx.float32))(keys)
    return noise


def mask_rows(masks: Sequence[bytes], vocab: int) -> np.ndarray:
    """uint8 [R, bytes], 8 bytes at least, with a bit for each allowed token: all for an empty mask,
    none beyond a mask's end."""
    width = max(8, ceil(vocab / 8), *map(len, masks))
    packed = b"".join((mask or b"\xff" * width).ljust(width, b"\0") for mask in masks)
    rows = np.frombuffer(packed, np.uint8)
    return rows.reshape(len(masks), width)


def allow(x: Array, masks: Sequence[bytes]) -> Array:
    """x [R, vocab] with -inf for the tokens that the rows' masks exclude."""
    if not any(masks):
        return x
    vocab = x.shape[-1]
    bits = mask_rows(masks, vocab)
    allowed = np.unpackbits(bits, axis=1, count=vocab, bitorder="little")
    allowed = allowed.view(np.bool_)
    return mx.where(mx.array(allowed), x, -mx.inf)


def sample_accept(
    logits: Array,
    draws: Draws,
    inputs: Array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> tuple[Array, Array | None]:
    """Sampled tokens int32 [R] of float logits [R, vocab]; the lowest of equal ones. NOT_FINITE for
    a row with an allowed logit that is NaN or +inf, and for one without a mask whose logits are all
    -inf.

    `drafts`, for each entry in the rows' order: the first index of its draft in `inputs` int32 [T],
    and its length. An entry has one row more than drafted tokens. The second result is then the
    number of accepted ones, int32 [entries].
    """
    x = logits
    drawing = any(draws.temperatures)
    if drawing or any(draws.masks):
        x = allow(x.astype(mx.float32), draws.masks)
    allowed = x
    if drawing:
        temperatures = mx.array(draws.temperatures)[:, None]
        hot = temperatures > 0
        drawn = x / mx.where(hot, temperatures, 1)
        if draws.min_logits is not None:
            drawn = mx.where(drawn < draws.min_logits[:, None], -mx.inf, drawn)
        positions = mx.array(draws.positions, mx.uint32)
        if draws.shift is not None:
            positions = positions + draws.shift.astype(mx.uint32)
        seeds = mx.array(draws.seeds, mx.uint32)
        drawn = drawn + gumbel(seeds, positions, x.shape[-1])
        x = mx.where(hot, drawn, x)
    tokens = mx.argmax(x, axis=-1).view(mx.int32)
    if draws.checked:
        masked = mx.array([len(mask) > 0 for mask in draws.masks])
        tokens = _or_not_finite(tokens, allowed.max(axis=-1), masked)
    if inputs is None or not drafts:
        return tokens, None
    return tokens, count_accepted(tokens, inputs, drafts)


@partial(mx.compile, shapeless=True)
def _or_not_finite(tokens: Array, best: Array, masked: Array) -> Array:
    """The tokens int32 [R] of rows whose highest logit `best` is finite, or -inf and `masked`."""
    fine = (best < mx.inf) & ((best > -mx.inf) | masked)
    return mx.where(fine, tokens, NOT_FINITE)


def count_accepted(tokens: Array, inputs: Array, drafts: Sequence[tuple[int, int]]) -> Array:
    """The number of accepted drafted tokens of each entry, see sample_accept: up to the first that
    is not the sample of the row before it. Exact at any temperature: only samples are emitted."""
    at_tokens, at_inputs, drafted = _compared(tuple(drafts))
    same = _equal(tokens[at_tokens], inputs[at_inputs], drafted)
    kept = mx.cumprod(same, axis=1)
    return kept.sum(axis=1)


@partial(mx.compile, shapeless=True)
def _equal(tokens: Array, inputs: Array, drafted: Array) -> Array:
    """int32: 1 where a drafted token is sampled."""
    same = drafted & (tokens == inputs) & (tokens != NOT_FINITE)
    return same.astype(mx.int32)


@lru_cache(maxsize=16)  # steps are often alike
def _compared(drafts: tuple[tuple[int, int], ...]) -> tuple[Array, Array, Array]:
    """[entries, longest draft] each: indices of the tokens and the inputs to compare, and whether
    there is a drafted token at all."""
    firsts, counts = np.array(drafts).T[:, :, None]
    ends = np.cumsum(1 + counts, axis=0)
    rows = ends - 1 - counts
    steps = np.arange(max(1, counts.max()))
    drafted = steps < counts
    at_tokens = np.where(drafted, rows + steps, 0)
    at_inputs = np.where(drafted, firsts + steps, 0)
    return mx.array(at_tokens), mx.array(at_inputs), mx.array(drafted)
