"""Tiny random models that see, saved as published checkpoints are, and images for them."""

import functools
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from PIL import Image as Pillow

from mlxspec.model.checkpoint import load_model, load_weights
from mlxspec.model.layout import find_layout
from mlxspec.model.runner import Layout
from mlxspec.model.vision import FAMILIES, load_vision
from mlxspec.model.vision.seam import Eyes
from mlxspec.text.images import ImageReader, image_reader
from mlxspec.types import Image, ImageSpan
from tests.support import architectures, tiny
from tests.tiny_tokenizer import save_tokenizer

BOTH_WAYS = "_both_ways"  # the end of a kind whose images' rows see those after them
KINDS = ("mistral3", "pixtral", "qwen3_5", "qwen3_vl", "gemma4")  # and Qwen's with experts
_TOWER: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, patch_size=4
)
_QWEN: dict[str, Any] = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    num_position_embeddings=36,
)
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": _QWEN,
    "qwen3_vl_moe": _QWEN | dict(deepstack_visual_indexes=[0, 1]),
    "mistral3": _TOWER | dict(image_size=64),
    "pixtral": _TOWER | dict(image_size=64),
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN | dict(deepstack_visual_indexes=[0, 1]),
    "gemma4": _TOWER
    | dict(
        num_key_value_heads=2,
        head_dim=16,
        position_embedding_size=64,
        standardize=True,
        use_clipped_linears=True,
    ),
}
SECTIONS = {"qwen3_5": [2, 1, 1], "qwen3_vl": [3, 3, 2]}  # frequencies by time, height and width
WIDE = 32  # values of a head that can be quantized
WIDE_SECTIONS = {"qwen3_5": [3, 3, 2], "qwen3_vl": [6, 5, 5]}

PROCESSORS: dict[str, dict[str, Any]] = {
    "mistral3": {"size": {"longest_edge": 64}},
    "pixtral": {"size": {"longest_edge": 64}},
    "qwen3_5": {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    "qwen3_vl": {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    "gemma4": {"max_soft_tokens": 12},
}


def config(kind: str) -> dict[str, Any]:
    """As config.json would have it. A kind like "mistral3:8" has heads that are wide enough to be
    quantized."""
    kind, _, bits = kind.partition(":")
    both_ways, kind = kind.endswith(BOTH_WAYS), kind.removesuffix(BOTH_WAYS)
    found = architectures.config(kind)
    text = found["text_config"]
    if bits:
        text |= {name: WIDE for name in ("head_dim", "global_head_dim")}
    if both_ways:
        text["use_bidirectional_attention"] = "vision"
    tower = dict(TOWERS[kind])
    if kind.startswith("qwen"):
        tower["out_hidden_size"] = text["hidden_size"]
        sections = (WIDE_SECTIONS if bits else SECTIONS)[kind.removesuffix("_moe")]
        rope = {"mrope_section": sections, "rope_type": "default"}
        if kind.startswith("qwen3_vl"):
            text["rope_scaling"] = rope
        else:
            text["rope_parameters"] |= rope | {"partial_rotary_factor": 0.5}
    if kind == "mistral3":
        found["spatial_merge_size"] = 2
    if kind == "gemma4":
        found |= dict(boi_token_id=301, eoi_token_id=302)
    return found | {"vision_config": tower}


def save(path: Path, kind: str) -> Path:
    """A model directory with its tower in the same file as the text model; of a kind like
    "mistral3-4bit" in bf16, with 4 bits for what language it has."""
    four, kind = kind.endswith(tiny.FOUR), kind.removesuffix(tiny.FOUR)
    save_tokenizer(path)
    settings = config(kind)
    kind = kind.partition(":")[0].removesuffix(BOTH_WAYS)
    model = architectures.build(kind, settings)
    if four:
        tiny.four_bits(model)
        settings["quantization"] = {"group_size": 32, "bits": 4}
    mx.random.seed(5)
    tower = FAMILIES[kind](settings)
    tower.update(tree_map(_weight, tower.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    for name, array in tree_flatten(tower.parameters()):
        weights[name.replace("visual.", "vision_tower.")] = array
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(settings))
    (path / "preprocessor_config.json").write_text(
        json.dumps(PROCESSORS[kind.removesuffix("_moe")])
    )
    return path


def _weight(x: mx.array) -> mx.array:
    """Random: of norms and biases near what they were, of bounds that clip finite."""
    if x.ndim > 1:
        return 0.3 * mx.random.normal(x.shape)
    noise = 0.2 * mx.random.normal(x.shape)
    return mx.where(mx.isinf(x), mx.where(x > 0, 2.0, -2.0), x) + noise


def png(width: int, height: int, seed: int = 0, change: int = 0) -> bytes:
    """The file of a random picture; `change` is added to one value of one pixel."""
    pixels = np.random.default_rng(seed).integers(0, 200, (height, width, 3)).astype(np.uint8)
    pixels[height // 2, width // 2, 0] += change
    out = io.BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class Seeing:
    """A loaded model that sees, and what reads images for it."""

    model: nn.Module
    eyes: Eyes
    reader: ImageReader
    layout: Layout

    def image(self, width: int = 24, height: int = 16, seed: int = 0, change: int = 0) -> Image:
        return self.reader.read(png(width, height, seed, change))


@functools.cache
def seeing(kind: str) -> Seeing:
    """As the program loads it."""
    with tempfile.TemporaryDirectory() as folder:
        return open_model(save(Path(folder), kind))


def open_model(path: Path, change: Callable[[nn.Module], object] = lambda _: None) -> Seeing:
    """`change` makes what it likes of the text model, before it sees."""
    model, files = load_model(path)
    load_weights(model)
    layout = find_layout(model).layout
    change(model)
    tower = load_vision(path, files)
    assert tower
    load_weights(tower)
    reader = image_reader(path, files, 1 << 20)
    assert reader
    return Seeing(model, Eyes(model, tower, files), reader, layout)


def prompt(seen: Seeing, *parts: Sequence[int] | Image) -> tuple[list[int], list[ImageSpan]]:
    """Token ids of texts and images."""
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, Image):
            more, span = seen.reader.span(part, len(ids))
            spans.append(span)
        else:
            more = list(part)
        ids += more
    return ids, spans
