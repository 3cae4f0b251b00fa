"""The bytes of a model, from mlx-lm's own code of it and a config.json; no weights are read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from mlx import nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

from bench.formula import Model  # noqa: E402
from mlxspec.model.layout import geometry  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)


def read_config(name: str) -> dict[str, Any]:
    """One of bench/configs by its name."""
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return found


def target(name: str, bits: int) -> Model:
    """One of bench/configs as it is recommended: quantized as its config says, else with weights of
    `bits`."""
    config = read_config(name)
    return sized(config, missing_bits(config, bits))


def missing_bits(config: dict[str, Any], bits: int) -> int:
    """`bits` where a config says nothing of its quantization, else 0: as it says."""
    return 0 if config.get("quantization") else bits


def title(name: str, bits: int) -> str:
    """What tables call a target; weights that its config has in fewer bits are named."""
    how = read_config(name).get("quantization")
    others = f"{how['mode'].upper()} and " if how else ""
    return f"{name}, {others}{bits} bits"


def unloaded(config: dict[str, Any], bits: int = 0) -> nn.Module:
    """A model by mlx-lm's own code, quantized as sized says; its random weights are lazy, never
    evaluated."""
    config = _with_bits(config, bits)
    model = _built(config)
    _quantize(model, config)
    return model


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config | (config.get("text_config") or {})


def _with_bits(config: dict[str, Any], bits: int) -> dict[str, Any]:
    if not bits:
        return config
    config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if bits != 16:
        config["quantization"] = {"group_size": 64, "bits": bits}
    return config


def _built(config: dict[str, Any]) -> nn.Module:
    text, classes = _text_of(config), _get_classes(config)
    model: nn.Module = classes[0](classes[1].from_dict(config))
    model.set_dtype(getattr(mx, text.get("torch_dtype") or text.get("dtype") or "bfloat16"))
    return model


def sized(config: dict[str, Any], bits: int = 0) -> Model:
    """A model's bytes, from mlx-lm's own code of it, built without weights. `bits` (4, 8; 16: none)
    replaces the config's quantization, in groups of 64. Raises ValueError where the config does not
    say enough."""
    config = _with_bits(config, bits)
    text, model = _text_of(config), _built(config)
    # A table of embeddings is read row by row, but wholly where it is the output too: where nothing
    # else is.
    found = dict(model.named_modules())
    tables = {n: m.weight.shape for n, m in found.items() if isinstance(m, nn.Embedding)}
    outputs = {m.weight.shape for m in found.values() if isinstance(m, nn.Linear)}
    rows_only = {
        n for n, s in tables.items() if s in outputs or s[1] != text.get("hidden_size", s[1])
    }
    _quantize(model, config)
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    switches = [m for m in model.modules() if isinstance(m, kinds)]
    skipped = [m for n, m in model.named_modules() if n in rows_only]
    experts = sum(map(_bytes, switches))
    token, windows, state = geometry(model)
    if not (token or windows or state):
        raise ValueError(
            "what this model keeps of a token is not known: mlx-lm's code of it does not run here"
        )
    dense = _bytes(model) - experts - sum(map(_bytes, skipped))
    chosen = _chosen(text, switches) if switches else 0.0
    linear = (nn.Linear, nn.QuantizedLinear, *kinds)
    matrices = sum(isinstance(m, linear) for m in model.modules())
    mode = next((getattr(m, "mode", "affine") for m in switches), "affine")
    return Model(dense, token, experts, chosen, windows, state, matrices, _bytes(model), mode)


def _bytes(module: nn.Module) -> int:
    leaves: Any = tree_flatten(module.parameters())
    return sum(a.nbytes for _, a in leaves)


def _chosen(text: dict[str, Any], switches: Sequence[nn.Module]) -> float:
    """The part of the experts that one token goes through."""
    counts = {m.weight.shape[0] for m in switches}
    top = next((text[k] for k in TOP_K if isinstance(text.get(k), int)), 0)
    if len(counts) != 1 or not top:
        raise ValueError(
            f"the config does not say how many experts a token takes: none of {', '.join(TOP_K)}"
        )
    return float(top / counts.pop())


def _quantize(model: nn.Module, config: dict[str, Any]) -> None:
    """As the config says, by layer where it does; else what mlx-lm would quantize."""
    how = config.get("quantization") or config.get("quantization_config")
    if not how:
        return
    if not {"bits", "group_size"} <= how.keys():
        raise ValueError(
            "the config's quantization is not mlx-lm's: it has no bits and group_size; use --bits"
        )
    default = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def chosen(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        if path in how:
            return how[path]
        return module.weight.shape[-1] % how["group_size"] == 0 and default(path, module)

    mode = how.get("mode", "affine")
    nn.quantize(model, how["group_size"], how["bits"], mode=mode, class_predicate=chosen)
