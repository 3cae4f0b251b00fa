"""Converts a GGUF checkpoint of the llama family into a directory that mlx-lm loads.

Rule: nothing is guessed. Weights keep their own quantization bit for bit (4bit) or are dequantized
(fp32); an architecture, setting, tokenizer or tensor not known here is refused by name. MLX reads
the file.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxspec.types import UnsupportedModel

Mode = Literal["fp32", "4bit"]
Progress = Callable[[float], None]  # told the share that is done, 0 to 1

GROUP = 32  # weights per scale in the GGUF types that MLX reads packed
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER, UNUSED = 3, 4, 5  # GGUF's token types
ACCEPTED: dict[str, tuple[str | int | None, ...]] = {  # None: the file need not say
    "general.architecture": ("llama",),
    # F32, F16, Q4_0, Q4_1, Q8_0: what MLX takes over as it is; it would round other types to F16
    "general.file_type": (0, 1, 2, 3, 7, None),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("smollm",),
    "tokenizer.ggml.add_bos_token": (False, None),
}
SETTINGS = {  # those that are heeded; any other may change what the model computes
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.vocab_size",
}


def convert(
    source: Path,
    target: Path,
    mode: Mode,
    progress: Progress = lambda share: None,
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Write `target` from the GGUF file `source`, with `sampling` as the model's own defaults. The
    directory appears whole or not at all; one that is there already is left alone. Raises
    UnsupportedModel for what this cannot convert."""
    loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    weights, meta = loaded
    _check(meta)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        config = _config(weights, meta)
        tensors, special = _tensors(weights, config, mode, progress)
        if mode == "4bit":
            config["quantization"] = {"group_size": GROUP, "bits": 4, **special}
        mx.save_safetensors(str(scratch / "model.safetensors"), tensors, {"format": "mlx"})
        _write(scratch / "config.json", config)
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write(scratch / "generation_config.json", {**ids, **sampling})
        _tokenizer(meta).save(str(scratch / "tokenizer.json"))
        _write(scratch / "tokenizer_config.json", _tokenizer_config(meta, config))
        for file in scratch.iterdir():
            _settle(file)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
        progress(1.0)
    except KeyError as error:
        raise UnsupportedModel(
            f"{source.name} does not give {error}; only a complete model can be converted"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _settle(file: Path) -> None:
    """Its bytes on the disk, so that the directory cannot outlive a power cut without them."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _check(meta: dict[str, Any]) -> None:
    for key, accepted in ACCEPTED.items():
        value = meta.get(key)
        value = value.item() if isinstance(value, mx.array) else value
        if value not in accepted:
            known = " or ".join(repr(x) for x in accepted if x is not None)
            raise UnsupportedModel(
                f"{key} is {value!r}; only {known} can be converted, use an mlx-lm directory"
            )
    for key in sorted(meta):
        if key.startswith("llama.") and key not in SETTINGS:
            raise UnsupportedModel(
                f"{key} is a setting that cannot be converted; use an mlx-lm directory"
            )


def _config(weights: dict[str, mx.array], meta: dict[str, Any]) -> dict[str, Any]:
    """config.json in Hugging Face's names."""

    def number(key: str) -> int:
        return int(np.array(meta[key]))

    heads = number("llama.attention.head_count")
    hidden = number("llama.embedding_length")
    turned = (
        number("llama.rope.dimension_count")
        if "llama.rope.dimension_count" in meta
        else hidden // heads
    )
    if turned != hidden // heads:
        raise UnsupportedModel(
            f"llama.rope.dimension_count is {turned}; only whole heads, {hidden // heads}, are known"
        )
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        # stored as float32: its shortest decimal is the number that was meant
        "rms_norm_eps": float(
            str(np.float32(np.array(meta["llama.attention.layer_norm_rms_epsilon"])))
        ),
        "rope_theta": float(np.array(meta["llama.rope.freq_base"])),
        "max_position_embeddings": number("llama.context_length"),
        "tie_word_embeddings": "output.weight" not in weights,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


def _tensors(
    weights: dict[str, mx.array], config: dict[str, Any], mode: Mode, progress: Progress
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """mlx-lm's tensors, and the modules that are not quantized to 4 bits as quantization
    overrides."""
    out: dict[str, mx.array] = {}
    special: dict[str, Any] = {}
    packed = sorted(name.removesuffix(".scales") for name in weights if name.endswith(".scales"))
    plain = sorted(n.removesuffix(".weight") for n in weights if n.endswith(".weight"))
    for i, name in enumerate(plain):
        target, weight = _target(name), weights[f"{name}.weight"]
        order = _unpermute(name, config)
        if name not in packed:
            out[f"{target}.weight"] = _rows(
                weight.astype(mx.float32 if mode == "fp32" else mx.float16), order
            )
        else:
            scales, biases = weights[f"{name}.scales"], weights[f"{name}.biases"]
            bits = 32 * weight.shape[1] // (scales.shape[1] * GROUP)
            if mode == "fp32":
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
                whole = mx.dequantize(weight, scales, biases, group_size=GROUP, bits=bits)
                out[f"{target}.weight"] = _rows(whole, order)
            else:
                if bits != 4:
                    special[target] = {"group_size": GROUP, "bits": bits}
                for part, tensor in (("weight", weight), ("scales", scales), ("biases", biases)):
                    out[f"{target}.{part}"] = _rows(tensor, order)
        mx.eval(list(out.values())[-3:])
        progress(0.9 * (i + 1) / len(plain))
    return out, special


def _target(name: str) -> str:
    if name in TOP:
        return TOP[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if head != "blk" or part not in NAMES:
        raise UnsupportedModel(f"tensor {name} is not one of a llama model's")
    return f"model.layers.{layer}.{NAMES[part]}"


def _unpermute(name: str, config: dict[str, Any]) -> mx.array | None:
    """llama.cpp stores the rows of q and k with the two halves of each head interleaved for its
    rope; the order that undoes it, or None for other tensors."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    n = heads.get(name.rpartition(".")[2])
    if n is None:
        return None
    dim = config["head_dim"]
    return mx.array(np.arange(n * dim).reshape(n, dim // 2, 2).swapaxes(1, 2).reshape(-1))


def _rows(x: mx.array, order: mx.array | None) -> mx.array:
    return x if order is None else x[order]


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of the file, its control tokens marked special. Raises if an id would
    change."""
    tokens, kinds = (
        meta["tokenizer.ggml.tokens"],
        np.array(meta["tokenizer.ggml.token_type"]).tolist(),
    )
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False)
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.decoder = decoders.ByteLevel()
    for i, token in enumerate(tokens):
        if kinds[i] in (CONTROL, USER):
            special = kinds[i] == CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    moved = [
        t for i, t in enumerate(tokens) if kinds[i] != UNUSED and tokenizer.token_to_id(t) != i
    ]
    if moved:
        raise UnsupportedModel(
            f"the tokenizer cannot be rebuilt: {len(moved)} ids change, the first is {moved[0]!r}'s"
        )
    return tokenizer


def _tokenizer_config(meta: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{name}_token": tokens[config[f"{name}_token_id"]] for name in ("bos", "eos", "pad")},
        "unk_token": tokens[int(np.array(meta["tokenizer.ggml.unknown_token_id"]))],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")
