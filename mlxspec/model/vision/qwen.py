"""The tower of Qwen3-VL and Qwen3.5 (https://arxiv.org/abs/2511.21631): patches in squares of
`spatial_merge_size`, of which each becomes one row of the text model.

Names of modules and parameters are those of the published weights.
"""

import mlx.core as mx
from mlx import nn
from mlx.core import array as Array

from mlxspec.model.vision.rope import attention, rotated, turns
from mlxspec.types import Json

DEFAULTS: Json = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
THETA = 10_000.0


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def __call__(self, x: Array, angles: Array) -> Array:
        n, dim = x.shape
        q, k, v = self.qkv(x).reshape(n, 3, self.heads, -1).transpose(1, 2, 0, 3)[:, None]
        scale = (dim // self.heads) ** -0.5
        q, k = rotated(q, angles), rotated(k, angles)
        x = attention(q, k, v, scale=scale)
        return self.proj(x.transpose(0, 2, 1, 3).reshape(n, dim))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear_fc1 = nn.Linear(dim, hidden)
        self.linear_fc2 = nn.Linear(hidden, dim)

    def __call__(self, x: Array) -> Array:
        return self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))


class Block(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim = config["hidden_size"]
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, config["num_heads"])
        self.mlp = MLP(dim, config["intermediate_size"])

    def __call__(self, x: Array, angles: Array) -> Array:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Squares of patches [n, merge * merge * hidden] -> rows of the text model."""

    def __init__(self, config: Json, whole: bool) -> None:
        """`whole`: the norm is over a square, not over a patch."""
        super().__init__()  # type: ignore[no-untyped-call]
        dim = config["hidden_size"]
        self.square = dim * config["spatial_merge_size"] ** 2
        self.whole = whole
        self.norm = nn.LayerNorm(self.square if whole else dim, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.square, self.square)
        self.linear_fc2 = nn.Linear(self.square, config["out_hidden_size"])

    def __call__(self, x: Array) -> Array:
        if self.whole:
            x = self.norm(x.reshape(-1, self.square))
        else:
            x = self.norm(x).reshape(-1, self.square)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = config["in_channels"] * config["patch_size"] ** 2
        self.proj = nn.Linear(size, config["hidden_size"])


class QwenTower(nn.Module):
    """patches [rows * columns, patch * patch * channels] -> [tokens, text hidden], and the features
    that are added after the first layers of Qwen3-VL (deepstack)."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config = DEFAULTS | config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config["num_position_embeddings"], config["hidden_size"])
        self.blocks = [Block(config) for _ in range(config["depth"])]
        self.merger = Merger(config, whole=False)
        self.deepstack_merger_list = [
            Merger(config, whole=True) for _ in config["deepstack_visual_indexes"]
        ]

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        config = self.config
        x = self.patch_embed.proj(patches) + self._positions(rows, columns)
        dim = config["hidden_size"] // config["num_heads"] // 2
        frequencies = THETA ** (-mx.arange(0, dim, 2) / dim)
        angles = turns(rows, columns, frequencies, frequencies)
        x, angles = (
            self._squares(x, rows, columns),
            self._squares(angles, rows, columns),
        )
        deep: list[Array] = []
        for i, block in enumerate(self.blocks):
            x = block(x, angles)
            if i in config["deepstack_visual_indexes"]:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return mx.concatenate([self.merger(x), *deep], axis=-1)

    def _squares(self, x: Array, rows: int, columns: int) -> Array:
        """Rows of patches, row-major, in the order of their squares."""
        m = self.config["spatial_merge_size"]
        x = x.reshape(rows // m, m, columns // m, m, -1).transpose(0, 2, 1, 3, 4)
        return x.flatten(0, 3)

    def _positions(self, rows: int, columns: int) -> Array:
        """[rows * columns, hidden]: the learned grid of positions, bilinear between its points."""
        side = int(self.config["num_position_embeddings"] ** 0.5)
        grid = self.pos_embed(mx.arange(side * side)).reshape(side, side, -1)
        for axis, count in enumerate((rows, columns)):
            at = mx.linspace(0, side - 1, count)
            low = at.astype(mx.int32)
            share = (at - low).reshape(-1, *[1 for _ in range(grid.ndim - 1 - axis)])
            share = share.astype(grid.dtype)
            high = mx.minimum(low + 1, side - 1)
            grid = mx.take(grid, low, axis) * (1 - share) + mx.take(grid, high, axis) * share
        flat: Array = grid.flatten(0, 1)
        return flat


class Vision(nn.Module):
    """patches [rows * columns, patch * patch * channels] -> [tokens, text hidden * (1 + deep)]."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visual = QwenTower(config["vision_config"])

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        return self.visual(patches, rows, columns)
