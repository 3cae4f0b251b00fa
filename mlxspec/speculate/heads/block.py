"""Heads that draft a block in one pass: DFlash (z-lab), DFlash 2 (Inco AI) and DSpark (DeepSeek).

K/V of the context come from hidden states of several of the target's layers, one row for each
position; a block is the newest token with mask tokens after it, whose K/V are never stored.
DFlash 2 adds convolutions over the block and chooses among the best tokens by the one before;
DSpark corrects each row's logits by the token before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.model.layers import decoder_layer
from mlxspec.model.pages import Pages
from mlxspec.model.trunk import decoder_layers, trunk_of
from mlxspec.speculate.heads.block_pass import BlockPass
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.tensors import (
    Vocabulary,
    check_taps,
    flat_config,
    load_module,
    mask_of,
    sizes_of,
)
from mlxspec.types import Json, UnsupportedModel, shown

INNER = "dflash_config"  # settings in it override those beside it
AUX_LAYERS = "aux_hidden_state_layer_ids"  # id i stands for the hidden state before layer i
SLIDING = "sliding_attention"
MAX_BLOCK = 256  # tokens
# Settings that change what a head computes but are not read, with the values that change nothing.
UNREAD = {
    "attention_sink_bias": False,
    "dflash_query_causal": False,
    "input_embedding_scale": 1,
    "output_multiplier": 1,
}


class Convolution(nn.Module):
    """DFlash 2's convolution over the last rows of a block, by a kernel that depends on each row.
    `base_kernel` [2, taps, D]: one for a layer's input, one for its output."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taps, self.group = taps, group
        self.base_kernel = mx.zeros((2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * size // group, bias=False)

    def kernels(self, x: Array) -> Array:
        """[n, B, 2, taps, D / group] for rows x [n, B, D]."""
        kernels: Array = self.kernel_projection(x)
        return kernels.reshape(*x.shape[:2], 2, self.taps, -1)

    def __call__(self, x: Array, kernels: Array, which: int) -> Array:
        n, rows, size = x.shape
        groups = x.reshape(n, rows, -1, self.group)
        out = mx.zeros_like(groups)
        for i in range(min(self.taps, rows)):
            shifted = mx.pad(groups, [(0, 0), (i, 0), (0, 0), (0, 0)])[:, :rows]
            base = self.base_kernel[which, i].reshape(-1, self.group).astype(x.dtype)
            out = out + (base + kernels[:, :, which, i, :, None]) * shifted
        return out.reshape(n, rows, size)


class BlockLayer(nn.Module):
    """A decoder layer whose attention sees the context and the block, if `causal` only the rows
    before its own; with DFlash 2's convolutions, if `config` has them. `window`: of a sliding
    layer."""

    def __init__(self, layer: Any, config: Json, window: int | None, causal: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, part in layer.items():
            self[name] = part
        self.window, self.causal = window, causal
        if config.get("conv_kernel_size"):
            shape = (
                config["hidden_size"],
                config["conv_kernel_size"],
                config["conv_group_size"],
            )
            self.attention_conv = Convolution(*shape)
            self.mlp_conv = Convolution(*shape)

    def store(self, context: Array, pages: Pages) -> None:
        """Write K and V of context rows [T, D] at the slots of the pages' view."""
        attend = self.self_attn
        shape = len(context), 1, attend.n_kv_heads, -1
        k = attend.k_norm(attend.k_proj(context).reshape(shape)).swapaxes(1, 2)
        v = attend.v_proj(context).reshape(shape).swapaxes(1, 2)
        pages.write(attend.rope(k, offset=pages.view.positions), v)

    def __call__(self, x: Array, mask: Array, cache: Any) -> Any:
        """[n, B, D]; `mask` bool [n, 1, B or 1, S + B]."""
        attend = partial(self.self_attn, mask=mask, cache=cache)
        x = x + self._around("attention_conv", attend, self.input_layernorm(x))
        return x + self._around("mlp_conv", self.mlp, self.post_attention_layernorm(x))

    def _around(self, name: str, inner: Callable[[Array], Any], x: Array) -> Any:
        """`inner` with a convolution before and after it, if there is one."""
        if name not in self:
            return inner(x)
        conv = self[name]
        kernels = conv.kernels(x)
        return conv(inner(conv(x, kernels, 0)), kernels, 1)


class Selector(nn.Module):
    """DFlash 2's selector: scores the best tokens of a row by the token before it."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        rank, vocab = config["selector_rank"], config["vocab_size"]
        self.best = config["selector_top_k"]
        self.predecessor_codebook = nn.Embedding(vocab, rank)
        self.successor_codebook = nn.Embedding(vocab, rank)
        self.hidden_projection = nn.Linear(config["hidden_size"], rank, bias=False)

    def __call__(self, logits: Array, hidden: Array, before: Array) -> Array:
        """[n, vocab] of logits [n, vocab], the row's output [n, D] and the tokens before [n]; -inf
        for tokens that are not among the best."""
        best = mx.argpartition(logits, -self.best, axis=-1)[:, -self.best :]
        pair = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        edges = (pair[:, None] * self.successor_codebook(best)).sum(-1)
        scores = mx.take_along_axis(logits, best, axis=-1) + edges
        none = mx.full(logits.shape, -mx.inf, scores.dtype)
        return mx.put_along_axis(none, best, scores, axis=-1)


class Markov(nn.Module):
    """DSpark's Markov head: corrects a row's logits by the token before it."""

    def __init__(self, config: Json) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.markov_w1 = nn.Embedding(config["vocab_size"], config["markov_rank"])
        rows = config.get("draft_vocab_size") or config["vocab_size"]
        self.markov_w2 = nn.Linear(config["markov_rank"], rows, bias=False)

    def __call__(self, logits: Array, hidden: Array, before: Array) -> Array:
        return logits + self.markov_w2(self.markov_w1(before))


class Block(nn.Module):
    """The head's modules under their published names. A block is the newest token, which predicts
    a token itself if `from_anchor`, and `mask` tokens. It reads `taps` hidden states of `width`."""

    def __init__(self, config: Json, taps: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        count = config["num_hidden_layers"]
        self.fc = nn.Linear(taps * width, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.norm = nn.RMSNorm(size, eps)
        kinds = config.get("layer_types") or [""] * count
        self.layers = []
        reach = config.get("draft_window_size")  # rows of the context
        for kind in kinds[:count]:
            layer: Any = decoder_layer(config)
            if config.get("rope_is_neox_style") is False:
                layer.self_attn.rope.traditional = True
            window = None
            if kind == SLIDING:
                window = config.get("swa_window_size") or config["sliding_window"]
            both_ways = config.get("sliding_window_non_causal", config.get("markov_rank"))
            usual = kind == SLIDING and not both_ways
            causal = bool(config.get("is_causal", config.get("causal", usual)))
            if reach:
                window = min(window or reach + 1, reach + 1)
            self.layers.append(BlockLayer(layer, config, window, causal=causal))
        if config.get("selector_rank"):
            self.candidate_selector = Selector(config)
        dspark = bool(config.get("markov_rank"))
        if dspark:
            self.markov_head = Markov(config)
        self.mask = config["mask_token_id"]
        self.vocabulary = Vocabulary(None, config["vocab_size"])
        self.from_anchor = dspark and config.get("sample_from_anchor", True)

    def store(self, taps: Array, pages: Sequence[Pages]) -> None:
        """Write the context rows of hidden states [T, taps * width]."""
        context = self.hidden_norm(self.fc(taps))
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            layer.store(context, layer_pages)

    def __call__(self, x: Array, caches: Sequence[tuple[Array, Any]]) -> Any:
        """The head's output [n, B, D] for a block's embeddings [n, B, D]; each layer has its mask
        and its cache."""
        for layer, (mask, cache) in zip(self.layers, caches, strict=True):
            x = layer(x, mask, cache)
        return self.norm(x)

    def scores(self, logits: Array, hidden: Array, before: Array) -> Array:
        """Logits [n, vocab] from which a row's token is sampled, given the token before it."""
        for name in ("candidate_selector", "markov_head"):
            if name in self:
                logits = self[name](logits, hidden, before)
        return self.vocabulary(logits)


def load_block(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel and KeyError."""
    config = flat_config(files.config) | (files.config.get(INNER) or {})
    config |= {"model_type": "qwen3"}
    if ids := config.get(AUX_LAYERS):
        config["target_layer_ids"] = [i - 1 for i in ids]
    layers = len(decoder_layers(target))
    for name, fits in (UNREAD | {"num_target_layers": layers}).items():
        if config.get(name) not in (None, fits):
            raise UnsupportedModel(
                f"the head in {files.path} has {name} = {config[name]}, but only {fits} can be"
                " used with this model",
            )
    width, _ = sizes_of(target)
    dspark = bool(config.get("markov_rank"))
    taps = tuple(config["target_layer_ids"])
    module = Block(config, len(taps), width)
    depth = config["block_size"] - (not dspark or bool(config.get("dspark_bonus_anchor")))
    if type(depth) is not int or not 0 < depth <= MAX_BLOCK:
        value = f"block_size = {shown(config['block_size'])}"
        raise UnsupportedModel(f"the head in {files.path} has {value}; valid: up to {MAX_BLOCK}")
    check_taps(files, taps, layers)
    tensors = {_module_name(name): x for name, x in files.tensors.items()}
    size = config["hidden_size"]
    # A confidence head's verdict comes too late for its draft: see NOTES.md.
    ignored = ("confidence_head",)
    loaded = load_module(files, module, tensors, size=size, target=target, ignored=ignored)
    embed, lm_head, module.vocabulary = loaded
    mask_of(files, config, embed)
    scale = getattr(trunk_of(target), "embed_scale", 1)
    if scale != 1 and "embed_tokens" not in module:
        embed = scaled(embed, scale)
    if cap := config.get("final_logit_softcapping"):
        lm_head = softcapped(lm_head, cap)
    return HeadModel(
        "dspark" if dspark else "dflash",
        BlockPass,
        module,
        embed=embed,
        lm_head=lm_head,
        width=len(taps) * width,
        taps=taps,
        kv_layers=len(module.layers),
        slot_offset=0,
        depth=depth,
    )


def scaled(embed: Callable[[Array], Array], scale: float) -> Any:
    """`embed` as Gemma's trunk uses it."""
    return lambda tokens: embed(tokens) * scale


def softcapped(lm_head: Callable[[Array], Array], cap: float) -> Any:
    """`lm_head` with logits between -cap and cap."""
    return lambda hidden: mx.tanh(lm_head(hidden) / cap) * cap


def _module_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name + ".weight" if name.endswith("_codebook") else name
