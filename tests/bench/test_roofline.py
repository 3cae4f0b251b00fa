"""The roofline's bytes against sums by hand, its bounds, and that the page shows what its commands
print."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import macs
from bench.chips import CURVES
from bench.formula import Model, batch_speed, speed
from bench.roofline import main
from bench.sizes import sized, target
from bench.tables import NOTE

PAGE = Path(__file__).resolve().parents[2] / "docs/roofline.md"
IDEAL, LINEAR = CURVES["ideal"], CURVES["linear"]
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # q, k and v of half the heads, o, the MLP
LINEAR_WEIGHTS, NORMS = 2 * LAYER + 1000 * 64, 5 * 64


def test_a_dense_model_is_its_matrices_norms_and_kv() -> None:
    assert sized(TINY) == Model(dense=2 * (LINEAR_WEIGHTS + NORMS), token=2 * 2 * 2 * 16 * 2)
    assert sized(TINY | {"torch_dtype": "float32"}).dense == 4 * (LINEAR_WEIGHTS + NORMS)


MIXED: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_layer_is_quantized_as_its_line_says() -> None:
    """Experts in MXFP4 with a byte for 32 weights, the rest in 8 bits with a scale and a bias for
    64."""
    own = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"
    layer = *own, "mlp.router"
    named = "lm_head", *(f"model.layers.{i}.{name}" for i in (0, 1) for name in layer)
    others = {name: {"group_size": 64, "bits": 8} for name in named}
    how = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    made = sized(MIXED | {"quantization": how | others})
    weights = 2 * 8 * 3 * 64 * 128
    assert made.experts == weights * 17 // 32 + 2 * 8 * (2 * 128 + 64) * 2  # biases of columns
    assert (made.mode, made.chosen) == ("mxfp4", 0.25)
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 8 * 64) + 1000 * 64
    others_of_a_layer = 2 * 64 + 2 * 32 + 8 + 2 * 64 + 4  # biases, norms, sinks
    assert made.dense == matrices * 17 // 16 + 2 * (2 * others_of_a_layer + 64)


def test_gpt_oss_is_the_file_that_the_readme_names() -> None:
    """Of MXFP4 and 8 bits, 12.1 GB; a step reads 2.6."""
    made = target("gpt-oss-20b", 8)
    assert made.weights == pytest.approx(12.1e9, rel=0.01)
    assert made.read(1, 0, IDEAL) == pytest.approx(2.57e9, rel=0.01)


def test_speeds_by_hand() -> None:
    made = Model(dense=10 * 10**9, token=10**6)
    assert speed(made, 100, 0, 0, 1, IDEAL) == pytest.approx(10)
    assert speed(made, 100, 10_000, 0, 1, IDEAL) == pytest.approx(5)
    assert speed(made, 100, 0, 3, 2, IDEAL) == pytest.approx(20)
    assert speed(made, 100, 0, 3, 2, LINEAR) == pytest.approx(5)
    assert speed(made, 100, 0, 3, 2, IDEAL, draft=1 / 3) == pytest.approx(10)
    assert speed(made, 100, 0, 3, 2, IDEAL, reached=0.8) == pytest.approx(16)


def test_requests_share_the_weights_alone() -> None:
    made = Model(dense=10 * 10**9, token=10**6, state=10**9)
    assert batch_speed(made, 1, 1e11, 1000, IDEAL) == pytest.approx(100 / 13)
    assert batch_speed(made, 8, 1e11, 1000, IDEAL) == pytest.approx(800 / 34)
    assert batch_speed(made, 8, 1e11, 1000, LINEAR) == pytest.approx(100 / 13)


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    page = PAGE.read_text("utf-8")
    assert "Columns with a * are the **prediction**" in page
    commands = re.findall(r"^    scripts/roofline(.*)$", page, re.M)
    assert len(commands) >= 3
    monkeypatch.chdir(PAGE.parents[1])
    for line in commands:
        main(shlex.split(line))
        printed = capsys.readouterr().out
        assert NOTE in " ".join(printed.split())
        assert ("plain*" in printed) == (not line)
        table = "\n".join(x.rstrip() for x in printed.splitlines() if x.startswith("|"))
        assert table and table in page, f"scripts/roofline{line}: the page's table is another"


@pytest.mark.slow
def test_the_pages_show_what_the_table_of_macs_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for page, argument in (("README.md", []), ("docs/performance.md", ["--speeds"])):
        macs.main(argument)
        printed = capsys.readouterr().out
        assert NOTE in " ".join(printed.split())
        table = "\n".join(x.rstrip() for x in printed.splitlines() if x.startswith("|"))
        assert table in (PAGE.parents[1] / page).read_text("utf-8"), f"{page}: another table"


def test_a_mac_is_large_enough_for_weights_headroom_and_two_contexts() -> None:
    small = Model(dense=0, token=0, weights=4 * macs.GB)
    assert macs.needed(small, 8 * macs.GB) == 4 * macs.GB + (768 << 20)
    assert macs.smallest(small) == 8  # 4.75 of 8 GB, which is less than 0.6
    kept = Model(dense=0, token=100_000, windows=((1000, 500),), state=7, weights=4 * macs.GB)
    caches = 2 * (8192 * 100_000 + 1000 * 500 + 7)
    assert macs.needed(kept, 64 * macs.GB) == 8 * macs.GB + caches
    assert macs.smallest(kept) == 16
    assert macs.smallest(Model(dense=0, token=0, weights=100 * macs.GB)) == 0
