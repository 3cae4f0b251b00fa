"""Attention among patches: rotary positions in two dimensions, and queries in tiles."""

import mlx.core as mx
from mlx.core import array as Array

TILE = 512  # patches whose scores are in memory at once, where MLX does not fuse attention


def attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Attention of all patches to all, [1, heads, patches, D] each."""
    tiles = [
        mx.fast.scaled_dot_product_attention(
            q[:, :, at : at + TILE],
            k,
            v,
            scale=scale,
        )
        for at in range(0, q.shape[2], TILE)
    ]
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def turns(rows: int, columns: int, by_row: Array, by_column: Array) -> Array:
    """float32 [rows * columns, frequencies]: the angles of each patch, row-major: its row times the
    first frequencies, then its column times the others."""
    y = mx.broadcast_to(
        mx.outer(mx.arange(rows), by_row)[:, None],
        (rows, columns, by_row.size),
    )
    x = mx.broadcast_to(
        mx.outer(mx.arange(columns), by_column),
        (rows, columns, by_column.size),
    )
    return mx.concatenate([y, x], axis=-1).flatten(0, 1)


def rotated(x: Array, angles: Array) -> Array:
    """x [..., patches, D] turned by angles [patches, D / 2], in halves of D."""
    cos, sin = mx.cos(angles), mx.sin(angles)
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return mx.concatenate(turned, axis=-1).astype(x.dtype)
