"""The model that a head is trained for: what the head reads of it, and what it is to draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model.layers import decoder_layer
from mlxspec.model.layout import flat
from mlxspec.model.pages import View
from mlxspec.model.trunk import decoder_layers, embedding_and_lm_head, install_taps, trunk_of
from mlxspec.speculate.heads.tensors import sizes_of
from mlxspec.training.samples import Sample
from mlxspec.types import Json, Tap, UnsupportedModel

ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_traditional")
START = 0.02  # standard deviation of weights that start at random


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids `tokens` int32 [B, L], the target's hidden states `taps` [B, L, width], its logits
    `teacher` [B, L, draft vocabulary]; `learned` bool [B, L]: whether the next token is to be
    learned, `weight` [B, L]: 1 where it can be drafted too, else 0."""

    tokens: mx.array
    taps: mx.array
    teacher: mx.array
    learned: mx.array
    weight: mx.array


class Target:
    """A loaded model, `config` its config.json. Raises UnsupportedModel where no head can read its
    hidden states."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        config: Json,
    ) -> None:
        self.name = name
        self.model = model
        self.config = flat(config)
        self.trunk = trunk_of(model)
        embed, self._lm_head = embedding_and_lm_head(model)
        self.layers = len(decoder_layers(model))
        self.width, self.vocab = sizes_of(model)
        self.dtype = embed(mx.array([0])).dtype
        self._view = View(1, {None: 1}, {None: 1})

    # ---- what a batch of it is ---------------------------------------------------------------

    def tap(
        self,
        taps: Sequence[Tap],
        drafted: mx.array,
    ) -> None:
        """Hand out these hidden states, and logits of the tokens `drafted`."""
        install_taps(self.trunk, self._view, taps)
        self.drafted = drafted
        self._is_drafted = mx.zeros((self.vocab,)).at[self.drafted].add(1)

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Samples side by side, computed."""
        length = max(len(s.tokens) for s in samples)
        tokens = mx.array([s.tokens + [0] * (length - len(s.tokens)) for s in samples])
        after = range(1, length + 1)
        learned = mx.array([[s.first <= i < len(s.tokens) for i in after] for s in samples])
        following = mx.roll(tokens, -1, 1)
        logits: Any = self.model(tokens)
        taps = mx.concatenate([self._view.tapped[t] for t in self._view.taps], axis=-1)
        self._view.tapped.clear()
        weight = learned * self._is_drafted[following]
        made = Batch(tokens, taps, logits[..., self.drafted], learned, weight)
        mx.eval(made.taps, made.teacher, made.weight)
        return made

    # ---- what a head of it starts as ---------------------------------------------------------

    def layer_config(self) -> Json:
        """The settings of a decoder layer like its own, in the terms of a llama."""
        known, size = self.config, self.width
        heads = known.get("num_attention_heads") or max(1, size // 64)
        wanted = known.get("intermediate_size")
        wide = wanted if isinstance(wanted, int) else 3 * size  # else one for each layer
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": size,
            "vocab_size": self.vocab,
            "num_attention_heads": heads,
            "num_key_value_heads": known.get("num_key_value_heads") or heads,
            "head_dim": known.get("head_dim") or size // heads,
            "intermediate_size": min(wide, 4 * size),
            "rms_norm_eps": known.get("rms_norm_eps") or 1e-6,
            "max_position_embeddings": known.get("max_position_embeddings") or 8192,
            **{name: known[name] for name in ROPE if known.get(name) is not None},
        }

    @property
    def read_layers(self) -> list[int]:
        """Ids of the layers before which a new head reads hidden states; the last one's it passes
        on."""
        return [2, self.layers // 2, self.layers - 1]

    def head_tensors(self) -> dict[str, mx.array]:
        """What a head begins with beside its layers: `fc` passes the last hidden state on."""
        size = self.width
        last = mx.concatenate([mx.zeros((size, 2 * size)), mx.eye(size)], axis=1)
        norm = _weight(self.trunk.get("norm", {}))
        scales = mx.ones(size) if norm is None else norm.astype(mx.float32)
        return {"fc.weight": last, "norm.weight": scales}

    def last_layer(self, config: Json) -> dict[str, mx.array]:
        """Weights fp32 for a decoder layer with this config, by their names in it: those of the
        last layer where they have the same shape, else random ones."""
        found = _weights(decoder_layers(self.model)[-1])
        made: dict[str, mx.array] = {}
        for name, own in _weights(decoder_layer(config)).items():
            if name in found and found[name].shape == own.shape:
                made[name] = found[name].astype(mx.float32)
            elif own.ndim == 1:
                made[name] = mx.ones(own.shape)
            else:
                made[name] = mx.random.normal(own.shape, scale=START, key=mx.random.key(len(made)))
        return made

    def lm_head_rows(self, ids: mx.array) -> mx.array:
        """[len(ids), D]: what lm_head multiplies hidden states with for these tokens."""
        owner = getattr(self._lm_head, "__self__", self._lm_head)  # tied: embed.as_linear
        weight = _weight(owner, ids)
        if weight is None:
            raise UnsupportedModel("no head can be trained: the model's lm_head has no weight")
        return weight


def _weights(layer: nn.Module) -> dict[str, mx.array]:
    """The weights of a layer by their names, as they are used: norms with all that is added to
    their weight, matrices dequantized."""
    named: Any = layer.named_modules()
    found = {f"{name}.weight": _weight(module) for name, module in named}
    return {name: weight for name, weight in found.items() if weight is not None}


def _weight(
    module: Any,
    rows: Any = slice(None),
) -> mx.array | None:
    weight = module.get("weight")
    if not isinstance(weight, mx.array):
        return None
    if weight.ndim == 1:
        signs = 1.0 - 2 * (mx.arange(len(weight)) % 2)  # what every kind of norm leaves as it is
        scaled: mx.array = signs * module(signs[None])[0]
        return scaled
    if "scales" not in module:
        return weight[rows]
    scaling: Any = {name: module[name][rows] for name in ("scales", "biases") if name in module}
    return mx.dequantize(
        weight[rows],
        **scaling,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
