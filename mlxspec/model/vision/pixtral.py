"""Pixtral's tower and the projectors of Pixtral and Mistral Small 3 (https://arxiv.org/abs/2410.07073).

Names of modules and parameters are those of the published weights.
"""

import mlx.core as mx
from mlx import nn
from mlx.core import array as Array

from mlxspec.model.vision.rope import attention, rotated, turns
from mlxspec.types import Json

DEFAULTS: Json = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "num_channels": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def __call__(self, x: Array, angles: Array) -> Array:
        n, dim = x.shape
        q, k, v = [
            layer(x).reshape(1, n, self.heads, -1).transpose(0, 2, 1, 3)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        q, k = rotated(q, angles), rotated(k, angles)
        scale = (dim // self.heads) ** -0.5
        x = attention(q, k, v, scale=scale)
        return self.o_proj(x.transpose(0, 2, 1, 3).reshape(n, dim))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attention = Attention(dim, config["num_attention_heads"])
        self.attention_norm = nn.RMSNorm(dim, eps=eps)
        self.feed_forward = MLP(dim, config["intermediate_size"])
        self.ffn_norm = nn.RMSNorm(dim, eps=eps)

    def __call__(self, x: Array, angles: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Encoder(nn.Module):
    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [Layer(config) for _ in range(config["num_hidden_layers"])]


class PixtralTower(nn.Module):
    """patches [rows * columns, patch * patch * channels] -> [rows * columns, hidden]."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        config = DEFAULTS | config
        self.config = config
        dim, patch = config["hidden_size"], config["patch_size"]
        self.patch_conv = nn.Linear(patch * patch * config["num_channels"], dim, bias=False)
        self.ln_pre = nn.RMSNorm(dim, eps=config["rms_norm_eps"])
        self.transformer = Encoder(config)

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        x: Array = self.ln_pre(self.patch_conv(patches))
        angles = self._angles(rows, columns)
        for layer in self.transformer.layers:
            x = layer(x, angles)
        return x

    def _angles(self, rows: int, columns: int) -> Array:
        """float32 [rows * columns, head_dim / 2]: frequencies of rows, then of columns, each every
        second one of one-dimensional RoPE."""
        config = self.config
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        frequencies = theta ** (-mx.arange(0, dim, 2) / dim)
        return turns(rows, columns, frequencies[::2], frequencies[1::2])


class PatchMerger(nn.Module):
    def __init__(self, dim: int, merge: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.merging_layer = nn.Linear(dim * merge * merge, dim, bias=False)


class Projector(nn.Module):
    """Features of the tower as rows of the text model; of Mistral Small 3 squares of `merge` times
    `merge` patches are one row."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dim, text = (
            config["vision_config"]["hidden_size"],
            config["text_config"],
        )
        self.merge = config.get("spatial_merge_size", 1)
        bias = config.get(
            "multimodal_projector_bias",
            config["model_type"] == "pixtral",
        )
        if config["model_type"] != "pixtral":
            self.norm = nn.RMSNorm(dim, eps=text.get("rms_norm_eps", 1e-5))
            self.patch_merger = PatchMerger(dim, self.merge)
        self.linear_1 = nn.Linear(dim, text["hidden_size"], bias=bias)
        self.linear_2 = nn.Linear(text["hidden_size"], text["hidden_size"], bias=bias)

    def __call__(self, x: Array, rows: int, columns: int) -> Array:
        if "norm" in self:
            merge = self.merge
            x = self.norm(x).reshape(rows // merge, merge, columns // merge, merge, -1)
            x = x.transpose(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)  # channels first
            x = self.patch_merger.merging_layer(x)
        return self.linear_2(nn.gelu(self.linear_1(x)))


class Vision(nn.Module):
    """patches [rows * columns, patch * patch * channels] -> [tokens, text hidden]."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vision_tower = PixtralTower(config["vision_config"])
        self.multi_modal_projector = Projector(config)

    def __call__(self, patches: Array, rows: int, columns: int) -> Array:
        x = self.vision_tower(patches, rows, columns)
        return self.multi_modal_projector(x, rows, columns)
