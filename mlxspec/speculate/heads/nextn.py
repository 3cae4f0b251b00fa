"""The multi-token-prediction head of DeepSeek-V3 and GLM: one more decoder layer ("layer N") behind
those of the target in its checkpoint.

The steps are those of Qwen's head; only the names differ. It was trained on the hidden state after
the final norm, so a chain continues from its own output after shared_head.norm. The layer brings
its own embedding and lm_head, or it uses the target's.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxspec.model.trunk import decoder_layers, embedding_and_lm_head
from mlxspec.speculate.heads.chained import HeadModel
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.mtp import MTP
from mlxspec.speculate.heads.weights import fill
from mlxspec.types import FINAL_NORM, UnsupportedModel, line_of

# What is not part of the decoder layer, in checkpoints and sidecars, and its name in our module.
OWN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head_norm": "norm",
    "shared_head.head": "lm_head",
    "lm_head": "lm_head",
    "embed_tokens": "embed_tokens",
}


def load_nextn(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel."""
    owner: Any = getattr(target, "language_model", target)
    layers = decoder_layers(target)
    kept = make_prompt_cache(target)[-1]
    if type(kept) is not KVCache:
        raise UnsupportedModel(
            f"the head in {files.path} cannot be used: its layer keeps a {type(kept).__name__}"
        )
    make: Any = type(layers[-1])
    try:
        args = owner.args
        layer = make(args, len(layers))
        tensors = _sanitized(files.tensors, owner)
    except Exception as error:  # mlx-lm's own code
        raise UnsupportedModel(
            f"the head in {files.path} does not fit the model: {line_of(error)}"
        ) from error
    module = MTP([layer], args.hidden_size, args.rms_norm_eps)
    if "embed_tokens.weight" in tensors:
        module.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
    if "lm_head.weight" in tensors:
        module.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
    fill(module, tensors, files)
    embed, lm_head = embedding_and_lm_head(target)
    return HeadModel(
        "mtp",
        module,
        module.get("embed_tokens", embed),
        module.get("lm_head", lm_head),
        FINAL_NORM,
    )


def _sanitized(tensors: dict[str, mx.array], owner: Any) -> dict[str, mx.array]:
    """The tensors in mlx-lm's form and under our names. They pass for the model's first layer,
    because mlx-lm drops what lies behind the last."""
    first = "model.layers.0."
    named = {first + name.removeprefix("mtp_block."): array for name, array in tensors.items()}
    made = {}
    for name, array in owner.sanitize(named).items():
        inner = name.removeprefix(first)
        module, _, kind = inner.rpartition(".")
        made[f"{OWN[module]}.{kind}" if module in OWN else f"layers.0.{inner}"] = array
    return made
