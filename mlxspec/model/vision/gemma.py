"""Gemma 4's tower: patches are pooled in squares, of which each becomes one row of the text model.

Names of modules and parameters are those of the published weights. Facts by transformers'
modeling_gemma4.py.
"""

import mlx.core as mx
from mlx import nn
from mlx.core import array as Array

from mlxspec.model.vision.rope import attention, rotated
from mlxspec.types import Json

DEFAULTS: Json = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "pooling_kernel_size": 3,
    "use_clipped_linears": False,
    "standardize": False,
}


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs are clipped to bounds of the weights, if it has
    some."""

    def __init__(self, inputs: int, outputs: int, clipped: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if clipped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def __call__(self, x: Array) -> Array:
        if "input_min" not in self:
            return self.linear(x)
        x = self.linear(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(x, self.output_min, self.output_max)


class Attention(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, head, clipped = (
            config["hidden_size"],
            config["head_dim"],
            config["use_clipped_linears"],
        )
        self.heads = [
            config["num_attention_heads"],
            *[config["num_key_value_heads"]] * 2,
        ]
        self.q_proj, self.k_proj, self.v_proj = [
            ClippedLinear(dim, heads * head, clipped) for heads in self.heads
        ]
        self.o_proj = ClippedLinear(self.heads[0] * head, dim, clipped)
        self.q_norm = nn.RMSNorm(head, eps=1e-6)
        self.k_norm = nn.RMSNorm(head, eps=1e-6)

    def __call__(self, x: Array, angles: tuple[Array, Array]) -> Array:
        n = len(x)
        q, k, v = [
            layer(x).reshape(1, n, heads, -1)
            for layer, heads in zip(
                (self.q_proj, self.k_proj, self.v_proj),
                self.heads,
                strict=True,
            )
        ]
        q, k, v = [
            y.transpose(0, 2, 1, 3)
            for y in (
                self.q_norm(q),
                self.k_norm(k),
                mx.fast.rms_norm(v, None, 1e-6),
            )
        ]
        q, k = _rotated(q, angles), _rotated(k, angles)
        x = attention(q, k, v, scale=1.0)
        return self.o_proj(x.transpose(0, 2, 1, 3).reshape(n, -1))


def _rotated(x: Array, angles: tuple[Array, Array]) -> Array:
    """Each half of the dimensions by an axis of its own."""
    halves = mx.split(x, 2, axis=-1)
    return mx.concatenate(
        [rotated(y, a) for y, a in zip(halves, angles, strict=True)],
        axis=-1,
    )


class MLP(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, hidden = config["hidden_size"], config["intermediate_size"]
        clipped = config["use_clipped_linears"]
        self.gate_proj = ClippedLinear(dim, hidden, clipped)
        self.up_proj = ClippedLinear(dim, hidden, clipped)
        self.down_proj = ClippedLinear(hidden, dim, clipped)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(dim, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(dim, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(dim, eps=eps)

    def __call__(self, x: Array, angles: tuple[Array, Array]) -> Array:
        attended = self.self_attn(self.input_layernorm(x), angles)
        x = x + self.post_attention_layernorm(attended)
        fed: Array = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + fed


class PatchEmbedder(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, patch = config["hidden_size"], config["patch_size"]
        self.input_proj = nn.Linear(3 * patch * patch, dim, bias=False)
        self.position_embedding_table = mx.ones((2, config["position_embedding_size"], dim))

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        by_column, by_row = self.position_embedding_table
        positions = by_row[:rows, None] + by_column[:columns]
        return self.input_proj(patches) + positions.flatten(0, 1)


class Encoder(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [Layer(config) for _ in range(config["num_hidden_layers"])]


class GemmaTower(nn.Module):
    """patches [rows * columns, patch * patch * 3] -> [tokens, hidden]."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config = DEFAULTS | config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = Encoder(config)
        if config["standardize"]:
            self.std_bias = mx.zeros(config["hidden_size"])
            self.std_scale = mx.ones(config["hidden_size"])

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        config, k = self.config, self.config["pooling_kernel_size"]
        x = self.patch_embedder(patches, rows, columns)
        angles = self._angles(rows, columns)
        for layer in self.encoder.layers:
            x = layer(x, angles)
        squares = x.astype(mx.float32).reshape(rows // k, k, columns // k, k, -1)
        pooled: Array = squares.mean(axis=(1, 3)).flatten(0, 1).astype(x.dtype)
        pooled = pooled * config["hidden_size"] ** 0.5
        if config["standardize"]:
            pooled = (pooled - self.std_bias) * self.std_scale
        return pooled

    def _angles(self, rows: int, columns: int) -> tuple[Array, Array]:
        """float32 [rows * columns, head_dim / 4] each: of columns, then of rows."""
        dim = self.config["head_dim"] // 2
        theta = (self.config.get("rope_parameters") or {"rope_theta": 100.0})["rope_theta"]
        frequencies = theta ** (-mx.arange(0, dim, 2) / dim)
        row, column = (
            mx.repeat(mx.arange(rows), columns),
            mx.tile(mx.arange(columns), rows),
        )
        return mx.outer(column, frequencies), mx.outer(row, frequencies)


class Embedder(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        inner, outer = (
            config["vision_config"]["hidden_size"],
            config["text_config"]["hidden_size"],
        )
        self.embedding_projection = nn.Linear(inner, outer, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.embedding_projection(mx.fast.rms_norm(x, None, 1e-6))


class Vision(nn.Module):
    """patches [rows * columns, patch * patch * 3] -> [tokens, text hidden]."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vision_tower = GemmaTower(config["vision_config"])
        self.embed_vision = Embedder(config)

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        return self.embed_vision(self.vision_tower(patches, rows, columns))
