"""The conversion, on a small GGUF file made here and on the real one (slow)."""

import errno
import json
import os
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from mlxspec.model import embedded
from mlxspec.types import UserError

HEADS, KV, DIM, LAYERS, HIDDEN, INNER = 4, 2, 16, 2, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def meta() -> dict:
    tokens = [*SPECIAL, *alphabet(), "Ġt", "he", "Ġthe"]

    def u32(n: int) -> mx.array:
        return mx.array(n, mx.uint32)

    return {
        "general.architecture": "llama",
        "llama.block_count": u32(LAYERS),
        "llama.embedding_length": u32(HIDDEN),
        "llama.feed_forward_length": u32(INNER),
        "llama.attention.head_count": u32(HEADS),
        "llama.attention.head_count_kv": u32(KV),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.freq_base": mx.array(10000.0, mx.float32),
        "llama.context_length": u32(128),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(tokens) - 3), mx.int32),
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.padding_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a q or k matrix: within a head, row i of the first half, row i of the
    second, …"""
    dim = w.shape[0] // heads
    return w.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(w.shape)


def tensors() -> tuple[dict[str, mx.array], dict[str, np.ndarray]]:
    """A GGUF's plain tensors, and what mlx-lm must find, by its names."""
    rng = np.random.default_rng(0)
    vocab = len(meta()["tokenizer.ggml.tokens"])
    out, want = {}, {}

    def put(name: str, target: str, *shape: int, heads: int = 0) -> None:
        w = rng.normal(size=shape).astype(np.float32) * 0.2
        want[f"{target}.weight"] = w
        out[f"{name}.weight"] = mx.array(permuted(w, heads) if heads else w)

    put("token_embd", "model.embed_tokens", vocab, HIDDEN)
    put("output_norm", "model.norm", HIDDEN)
    for i in range(LAYERS):
        a, b = f"blk.{i}", f"model.layers.{i}"
        put(f"{a}.attn_q", f"{b}.self_attn.q_proj", HEADS * DIM, HIDDEN, heads=HEADS)
        put(f"{a}.attn_k", f"{b}.self_attn.k_proj", KV * DIM, HIDDEN, heads=KV)
        put(f"{a}.attn_v", f"{b}.self_attn.v_proj", KV * DIM, HIDDEN)
        put(f"{a}.attn_output", f"{b}.self_attn.o_proj", HIDDEN, HEADS * DIM)
        put(f"{a}.ffn_gate", f"{b}.mlp.gate_proj", INNER, HIDDEN)
        put(f"{a}.ffn_up", f"{b}.mlp.up_proj", INNER, HIDDEN)
        put(f"{a}.ffn_down", f"{b}.mlp.down_proj", HIDDEN, INNER)
        put(f"{a}.attn_norm", f"{b}.input_layernorm", HIDDEN)
        put(f"{a}.ffn_norm", f"{b}.post_attention_layernorm", HIDDEN)
    return out, want


@pytest.fixture
def source(tmp_path: Path) -> Path:
    mx.save_gguf(str(tmp_path / "m.gguf"), tensors()[0], meta())
    return tmp_path / "m.gguf"


def test_fp32_has_the_weights_in_mlx_lms_order(source: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    embedded.convert(source, tmp_path / "out", "fp32", shares.append, {"temperature": 0.2})
    defaults = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert defaults["temperature"] == 0.2 and defaults["eos_token_id"] == 2
    found = mx.load(str(tmp_path / "out/model.safetensors"))
    want = tensors()[1]
    assert found.keys() == want.keys()
    for name, w in want.items():
        assert (np.array(found[name]) == w).all(), name
    assert shares == sorted(shares) and shares[-1] == 1.0
    model, config = load_model(tmp_path / "out")
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"]
    assert model(mx.array([[1, 5, 9]])).shape == (1, 3, len(meta()["tokenizer.ggml.tokens"]))


def test_the_tokenizer_keeps_every_id(source: Path, tmp_path: Path) -> None:
    embedded.convert(source, tmp_path / "out", "fp32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = meta()["tokenizer.ggml.tokens"]
    assert tokenizer.encode("the the") == [
        tokens.index("t"),
        tokens.index("he"),
        tokens.index("Ġthe"),
    ]
    assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.eos_token_id == 2
    for text in ("naïve ☕\n\t x", "1234 the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"content": "hé"}], tokenize=False) == "hé"


def q8_0(w: np.ndarray) -> tuple[bytes, np.ndarray]:
    """GGUF's blocks of 32 weights, a half-precision scale and int8 codes, and what they stand
    for."""
    x = w.reshape(-1, 32)
    d = (np.abs(x).max(1) / 127).astype(np.float16)
    q = np.rint(x / d[:, None].astype(np.float32)).clip(-127, 127).astype(np.int8)
    data = b"".join(s.tobytes() + c.tobytes() for s, c in zip(d, q, strict=True))
    return data, (q * d[:, None].astype(np.float32)).reshape(w.shape)


def q4_1(w: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The same with a minimum and 4-bit codes: the first 16 in the low halves of the bytes."""
    x = w.reshape(-1, 32)
    low = x.min(1).astype(np.float16)
    d = ((x.max(1) - x.min(1)) / 15).astype(np.float16)
    base, step = low.astype(np.float32)[:, None], d.astype(np.float32)[:, None]
    q = np.rint((x - base) / step).clip(0, 15).astype(np.uint8)
    rows = zip(d, low, q[:, :16] | q[:, 16:] << 4, strict=True)
    data = b"".join(a.tobytes() + b.tobytes() + c.tobytes() for a, b, c in rows)
    return data, (q * step + base).reshape(w.shape)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(x: object) -> bytes:
    """A metadata value with its type, as the GGUF specification numbers them."""
    if isinstance(x, str):
        return struct.pack("<I", 8) + text(x)
    if isinstance(x, list):
        return struct.pack("<IIQ", 9, 8, len(x)) + b"".join(map(text, x))
    assert isinstance(x, mx.array)
    kind = {mx.uint32: 4, mx.int32: 5, mx.float32: 6}[x.dtype]
    raw = np.array(x).tobytes()
    return struct.pack("<IIQ", 9, kind, x.size) + raw if x.ndim else struct.pack("<I", kind) + raw


def write_packed(path: Path) -> dict[str, np.ndarray]:
    """A GGUF file with Q4_1 matrices and a Q8_0 embedding. Returns the weights that mlx-lm must
    find."""
    plain, _ = tensors()
    parts, infos, want, at = [], b"", {}, 0
    for name, array in plain.items():
        w = np.array(array)
        if w.ndim == 1:
            kind, (data, stands) = 0, (w.tobytes(), w)
        else:
            kind, (data, stands) = (8, q8_0(w)) if name == "token_embd.weight" else (3, q4_1(w))
        heads = {"attn_q": HEADS, "attn_k": KV}.get(name.split(".")[-2])
        target = f"{embedded._target(name.removesuffix('.weight'))}.weight"
        want[target] = restored(stands, heads) if heads else stands
        infos += text(name) + struct.pack("<I", w.ndim) + struct.pack(f"<{w.ndim}Q", *w.shape[::-1])
        infos += struct.pack("<IQ", kind, at)
        parts.append(data + bytes(-len(data) % 32))
        at += len(parts[-1])
    given = meta() | {"general.file_type": mx.array(3, mx.uint32)}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(plain), len(given))
    head += b"".join(text(k) + value(v) for k, v in given.items()) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + b"".join(parts))
    return want


def restored(w: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`, row by row."""
    out, dim = np.empty_like(w), w.shape[0] // heads
    for row in range(w.shape[0]):
        head, i = divmod(row, dim)
        out[head * dim + i % 2 * (dim // 2) + i // 2] = w[row]
    return out


def test_packed_weights_are_kept_bit_for_bit(tmp_path: Path) -> None:
    want = write_packed(tmp_path / "m.gguf")
    embedded.convert(tmp_path / "m.gguf", tmp_path / "fp32", "fp32")
    embedded.convert(tmp_path / "m.gguf", tmp_path / "4bit", "4bit")
    whole = mx.load(str(tmp_path / "fp32/model.safetensors"))
    assert whole.keys() == want.keys()
    packed = mx.load(str(tmp_path / "4bit/model.safetensors"))
    quantization = json.loads((tmp_path / "4bit/config.json").read_text())["quantization"]
    special = {"group_size": 32, "bits": 8}
    assert quantization == {"group_size": 32, "bits": 4, "model.embed_tokens": special}
    for name, w in want.items():
        assert (np.array(whole[name]) == w).all(), name
        base = name.removesuffix(".weight")
        if w.ndim == 2:
            assert packed[f"{base}.scales"].dtype == mx.float16
            scales, biases = (
                packed[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases")
            )
            bits = quantization.get(base, quantization)["bits"]
            again = mx.dequantize(packed[name], scales, biases, group_size=32, bits=bits)
            assert (np.array(again) == w).all(), name
    model, _ = load_model(tmp_path / "4bit")
    ids = mx.array([[1, 5, 9]])
    near = model(ids).astype(mx.float32) - load_model(tmp_path / "fp32")[0](ids)
    assert mx.abs(near).max().item() < 0.05  # activations in half precision


def refused(tmp_path: Path, **change: object) -> str:
    changed = {key: x for key, x in {**meta(), **change}.items() if x is not None}
    mx.save_gguf(str(tmp_path / "m.gguf"), tensors()[0], changed)
    with pytest.raises(UserError) as caught:
        embedded.convert(tmp_path / "m.gguf", tmp_path / "models/out", "fp32")
    assert not (tmp_path / "models").exists() or list((tmp_path / "models").iterdir()) == []
    return str(caught.value)


@pytest.mark.parametrize(
    "key, value, said",
    [
        (
            "general.architecture",
            "rwkv",
            "general.architecture is 'rwkv'; only 'llama' can be converted",
        ),
        (
            "general.file_type",
            mx.array(15, mx.uint32),
            "general.file_type is 15; only 0 or 1 or 2 or 3 or 7",
        ),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model is 'llama'; only 'gpt2'"),
        ("tokenizer.ggml.pre", "qwen2", "tokenizer.ggml.pre is 'qwen2'; only 'smollm'"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type is a setting"),
        ("llama.rope.dimension_count", mx.array(8, mx.uint32), "llama.rope.dimension_count is 8"),
        ("llama.rope.freq_base", None, "does not give 'llama.rope.freq_base'"),
        ("tokenizer.chat_template", None, "does not give 'tokenizer.chat_template'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    assert said in refused(tmp_path, **{key: value})


def test_a_foreign_tensor_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    odd = {**tensors()[0], "blk.0.attn_sinks.weight": mx.zeros((4,))}
    mx.save_gguf(str(tmp_path / "m.gguf"), odd, meta())
    with pytest.raises(UserError, match="attn_sinks"):
        embedded.convert(tmp_path / "m.gguf", tmp_path / "models/out", "fp32")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("place", ["mx.save_safetensors", "_write", "_settle", "os.rename"])
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, monkeypatch, place: str) -> None:
    """Half of the first file is there when it strikes."""

    def full(path: str | Path, *args: object) -> None:
        if Path(path).parent.is_dir() and not Path(path).is_dir():
            Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"mlxspec.model.embedded.{place}", full)
        with pytest.raises(OSError, match="No space left"):
            embedded.convert(source, tmp_path / "models/out", "fp32")
    assert list((tmp_path / "models").iterdir()) == []
    embedded.convert(source, tmp_path / "models/out", "fp32")
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["out"]


def test_a_directory_that_is_there_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    embedded.convert(source, tmp_path / "out", "fp32")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "out"}


def test_its_bytes_are_on_the_disk_before_it_appears(
    source: Path, tmp_path: Path, monkeypatch
) -> None:
    settled: set[int] = set()
    monkeypatch.setattr(embedded.os, "fsync", lambda file: settled.add(os.fstat(file).st_ino))
    rename = os.rename

    def appear(scratch: Path, target: Path) -> None:
        assert {file.stat().st_ino for file in scratch.iterdir()} == settled
        rename(scratch, target)

    monkeypatch.setattr(embedded.os, "rename", appear)
    embedded.convert(source, tmp_path / "out", "fp32")
    assert len(settled) == 5


@pytest.mark.slow
def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """The real file: its 4 bits dequantize to exactly the fp32 weights, and it knows France."""
    from mlx_lm import generate, load

    model, tokenizer = load(str(smollm2))
    assert "Paris" in generate(model, tokenizer, "The capital of France is", max_tokens=8)
    for text in ("def f(x):\n\treturn x  # ☕", "12 + 34 = 46", "naïve  façade"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    from mlxspec.model.hub import resolve

    packed = resolve("", tmp_path, metal=True).path
    small, whole = (
        mx.load(str(packed / "model.safetensors")),
        mx.load(str(smollm2 / "model.safetensors")),
    )
    config = json.loads((packed / "config.json").read_text())["quantization"]
    for name, w in whole.items():
        base = name.removesuffix(".weight")
        if f"{base}.scales" in small:
            scales, biases = (
                small[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases")
            )
            bits = config.get(base, config)["bits"]
            w4 = mx.dequantize(small[name], scales, biases, group_size=32, bits=bits)
            assert mx.array_equal(w4, w).item(), name
    quantized, tokenizer = load(str(packed))
    assert "Paris" in generate(quantized, tokenizer, "The capital of France is", max_tokens=8)
