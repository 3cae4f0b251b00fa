"""The multi-token-prediction head of Qwen3.5 and its successors: one layer of the target's own kind
over fc(norm(embedding of the token), norm(hidden state before it)).

The modules are mlx-lm's; tensor names and computation follow the published checkpoints. Mixture-of-
experts heads come with experts fused, numbered or stacked.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.model.trunk import decoder_layers
from mlxspec.speculate.heads.chained import ChainedPass
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.tensors import load_module

# Norms are zero-centred (w - 1 is stored) iff the larger mean of the norms of queries and keys is
# below the first and the smallest mean of the others is below the second (MTPLX's rule).
CENTRED_QK, CENTRED = 1.25, 0.5
QK_NORMS = ("q_norm.weight", "k_norm.weight")
FIRST_EXPERT = ".experts.0."  # in names of numbered experts


class MTP(nn.Module):
    """`layers` are decoder layers with full attention."""

    def __init__(self, layers: list[nn.Module], size: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.layers = layers
        self.norm = nn.RMSNorm(size, eps)

    def __call__(self, embedded: Array, hidden: Array, caches: Any) -> Any:
        """[B, L, D] of embedded and hidden [B, L, D]."""
        parts = [
            self.pre_fc_norm_embedding(embedded),
            self.pre_fc_norm_hidden(hidden),
        ]
        x = self.fc(mx.concatenate(parts, axis=-1))
        mask = caches[0].make_mask(x.shape[1], return_array=True, window_size=None)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, cache)
        return self.norm(x)


def load_mtp(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel and KeyError."""
    owner: Any = getattr(target, "language_model", target)
    args = owner.args
    attending = [
        layer for layer in decoder_layers(target) if not getattr(layer, "is_linear", False)
    ]
    make: Any = type(attending[0])
    tensors = _final_norms(_stacked_experts(files.tensors, args))
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    index = getattr(args, "full_attention_interval", 1) - 1  # of a layer with full attention
    return build(
        files,
        tensors,
        [make(args, index) for _ in range(count or 1)],
        args=args,
        target=target,
    )


def build(
    files: HeadFiles,
    tensors: dict[str, Array],
    layers: list[nn.Module],
    args: Any,
    target: nn.Module,
) -> HeadModel:
    """The head with these decoder layers and `tensors` as its weights, which may include its own
    embedding and lm_head. Raises UnsupportedModel."""
    module = MTP(layers, args.hidden_size, args.rms_norm_eps)
    embed, lm_head, _ = load_module(files, module, tensors, size=args.hidden_size, target=target)
    return HeadModel(
        "mtp",
        ChainedPass,
        module,
        embed=embed,
        lm_head=lm_head,
        width=args.hidden_size,
        kv_layers=len(layers),
        tap_unknown=True,
    )


def _final_norms(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors, with norms as they are used."""
    norms = {name: array for name, array in tensors.items() if "norm" in name}
    means = {name: float(array.astype(mx.float32).mean()) for name, array in norms.items()}
    qk = [mean for name, mean in means.items() if name.endswith(QK_NORMS)]
    others = [mean for name, mean in means.items() if "layernorm" in name or "fc_norm" in name]
    if max(qk, default=0.0) < CENTRED_QK and min(others, default=1.0) < CENTRED:
        return tensors | {name: array + 1 for name, array in norms.items()}
    return tensors


def _stacked_experts(tensors: dict[str, Array], args: Any) -> dict[str, Array]:
    """Experts under `switch_mlp`, whether they came fused (gate and up in one tensor) or one by
    one. Raises KeyError."""
    stacked = dict(tensors)
    for name in tensors:
        if name.endswith(".experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            gate, up = mx.split(stacked.pop(name), 2, axis=-2)
            stacked |= {
                base + "gate_proj.weight": gate,
                base + "up_proj.weight": up,
            }
            down = name.replace("gate_up_proj", "down_proj")
            stacked[base + "down_proj.weight"] = stacked.pop(down)
    for name in tensors:
        if FIRST_EXPERT in name:
            numbers = range(args.num_experts)
            experts = [stacked.pop(name.replace(FIRST_EXPERT, f".experts.{i}.")) for i in numbers]
            stacked[name.replace(FIRST_EXPERT, ".switch_mlp.")] = mx.stack(experts)
    return stacked
