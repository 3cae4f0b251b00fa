"""Writes the trained MTP head of tests/heads/data, and random ones, in every packaging that is
published: a directory of its own, in a model's shards, in a file beside them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

DATA = Path(__file__).parent / "data/mtp"
TARGET, SIDECAR = DATA / "target", DATA / "sidecar"

Tensors = dict[str, mx.array]
Writer = Callable[[Path, Path], None]  # a new directory, and the trained pair's

NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)
FINAL_NORMS = ("norm.weight", "model.language_model.norm.weight")


def head_tensors(data: Path = DATA) -> Tensors:
    """The trained head's, norms as they are used."""
    return dict(mx.load(str(data / "sidecar/model.safetensors")))


def target_tensors(data: Path = DATA) -> Tensors:
    return dict(mx.load(str(data / "target/model.safetensors")))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def save_head(out: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """Write a head with these tensors in the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config)
    save(out / "model.safetensors", tensors, "pt")
    return out


def save(path: Path, tensors: Mapping[str, mx.array], made_with: str = "mlx") -> None:
    whole = {name: mx.contiguous(array) for name, array in tensors.items()}
    mx.save_safetensors(str(path), whole, metadata={"format": made_with})


def zero_centred(tensors: Tensors) -> Tensors:
    """Norms as Qwen publishes them: their weights less one."""
    return {
        name: array - 1 if name.endswith(NORMS) or name in FINAL_NORMS else array
        for name, array in tensors.items()
    }


def quantized(tensors: Tensors, how: Callable[[str], Mapping[str, Any] | None]) -> Tensors:
    """Every matrix for which `how` names a group size, bits and a mode."""
    made = {}
    for name, array in tensors.items():
        options = how(name) if array.ndim > 1 else None
        if options is None:
            made[name] = array
            continue
        base = name.removesuffix("weight")
        kinds = ("weight", "scales", "biases")
        parts = mx.quantize(array, **options)  # mxfp4 has no biases
        made |= {base + kind: part for kind, part in zip(kinds, parts, strict=False)}
    return made


# ---- sidecars
# ------------------------------------------------------------------------------------------


def sidecar_config(text_config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """As mlx-vlm writes it for a head."""
    start = dict(model_type="qwen3_5_mtp", block_size=3, text_config=dict(text_config))
    return start | dict(tie_word_embeddings=False) | more


def write_sidecar(
    out: Path, tensors: Tensors, config: Mapping[str, Any], data: Path = DATA
) -> Path:
    """A directory with a head alone; names have no prefix."""
    _start(out, data)
    write_json(out / "config.json", config)
    save(out / "model.safetensors", tensors)
    return out


def _sidecar(out: Path, data: Path) -> None:
    write_sidecar(out, head_tensors(data), read_json(data / "sidecar/config.json"), data)


def _poisoned(out: Path, data: Path) -> None:
    """A bad conversion: zero-centred norms where final ones belong."""
    tensors = zero_centred(head_tensors(data))
    write_sidecar(out, tensors, read_json(data / "sidecar/config.json"), data)


def _sidecar_quantized(options: Mapping[str, Any]) -> Writer:
    def write(out: Path, data: Path) -> None:
        config = read_json(data / "sidecar/config.json")
        config |= dict(quantization=options, quantization_config=options)
        write_sidecar(out, quantized(head_tensors(data), lambda _: options), config, data)

    return write


# ---- a whole model with its head
# -----------------------------------------------------------------------


def _shards(out: Path, shards: Mapping[str, Tensors], made_with: str) -> None:
    for name, tensors in shards.items():
        save(out / name, tensors, made_with)
    places = {key: name for name, tensors in shards.items() for key in tensors}
    size = sum(array.nbytes for tensors in shards.values() for array in tensors.values())
    index = dict(metadata=dict(total_size=size), weight_map=places)
    write_json(out / "model.safetensors.index.json", index)


def _embedded(change: Callable[[Tensors], Tensors]) -> Writer:
    """In the shards of a model that was converted for MLX, norms as they are used."""

    def write(out: Path, data: Path) -> None:
        config = _start(out, data)
        own = change(head_tensors(data))
        if any(name.endswith(".scales") for name in own):
            config["quantization"] = {f"language_model.mtp.{k}": v for k, v in MIXED.items()}
            config["quantization"] |= FOUR_BITS
        write_json(out / "config.json", config)
        trunk, second = target_tensors(data), {}
        for name in [name for name in trunk if "lm_head" in name]:
            second[name] = trunk.pop(name)
        second |= {f"language_model.mtp.{name}": array for name, array in own.items()}
        files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        _shards(out, dict(zip(files, (trunk, second), strict=True)), "mlx")

    return write


def _beside(out: Path, data: Path) -> None:
    """In a file that the index does not list and that only config.json names."""
    config = _start(out, data)
    write_json(
        out / "config.json", config | dict(mlx_lm_extra_tensors=dict(mtp_file="mtp.safetensors"))
    )
    save(out / "model.safetensors", target_tensors(data))
    save(
        out / "mtp.safetensors",
        {f"mtp.{name}": array for name, array in head_tensors(data).items()},
    )


def _raw(out: Path, data: Path) -> None:
    """As Qwen publishes it: other names, zero-centred norms, torch's convolutions."""
    write_json(out / "config.json", _start(out, data))
    trunk = {}
    for name, array in target_tensors(data).items():
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head", "lm_head")
        trunk[name] = array.moveaxis(2, 1) if "conv1d.weight" in name else array
    head = {f"mtp.{name}": array for name, array in zero_centred(head_tensors(data)).items()}
    files = (
        "model.safetensors-00001-of-00002.safetensors",
        "model.safetensors-00002-of-00002.safetensors",
    )
    _shards(out, dict(zip(files, (zero_centred(trunk), head), strict=True)), "pt")


def _start(out: Path, data: Path) -> dict[str, Any]:
    """Copies what is no tensor; the target's config."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(data / "target" / name, out)
    return dict(read_json(data / "target/config.json"))


# ---- all of them
# ---------------------------------------------------------------------------------------

FOUR_BITS = dict(group_size=64, bits=4, mode="affine")
NARROW_FOUR_BITS = dict(group_size=32, bits=4, mode="affine")  # also for codebooks
MXFP4 = dict(group_size=32, bits=4, mode="mxfp4")
MIXED = {  # oQ leaves fc as it was and gives each projection what it needs
    "fc": None,
    "layers.0.mlp.down_proj": dict(group_size=32, bits=8, mode="affine"),
}


def mixed_bits(name: str) -> Mapping[str, Any] | None:
    """How oQ quantizes a head's tensor."""
    return MIXED.get(name.removesuffix(".weight"), FOUR_BITS)


WRITERS: dict[str, Writer] = {
    "sidecar": _sidecar,
    "sidecar-4bit": _sidecar_quantized(FOUR_BITS),
    "sidecar-mxfp4": _sidecar_quantized(MXFP4),
    "sidecar-poisoned": _poisoned,
    "embedded": _embedded(dict),
    "embedded-mixed": _embedded(lambda head: quantized(head, mixed_bits)),
    "beside": _beside,
    "raw": _raw,
}
WHOLE = ("embedded", "embedded-mixed", "beside", "raw")  # a model that carries its head


def write(packaging: str, out: Path, data: Path = DATA) -> Path:
    """The trained head of `data` so packaged, in the directory `out`."""
    WRITERS[packaging](out, data)
    return out


# ---- experts
# -------------------------------------------------------------------------------------------

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def fused(tensors: Tensors) -> Tensors:
    """Experts as Qwen publishes them: gate and up in one tensor. From stacked ones."""
    made = {name: array for name, array in tensors.items() if "switch_mlp" not in name}
    for name in [name for name in tensors if name.endswith("switch_mlp.gate_proj.weight")]:
        base = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up, down = (tensors[f"{base}switch_mlp.{p}.weight"] for p in PROJECTIONS)
        made[f"{base}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
        made[f"{base}experts.down_proj"] = down
    return made


def numbered(tensors: Tensors) -> Tensors:
    """Experts one by one, quantized ones too. From stacked ones."""
    made = {}
    for name, array in tensors.items():
        if "switch_mlp" not in name:
            made[name] = array
            continue
        for i in range(array.shape[0]):
            made[name.replace("switch_mlp", f"experts.{i}")] = array[i]
    return made


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "stacked": dict,
    "fused": fused,
    "numbered": numbered,
}
