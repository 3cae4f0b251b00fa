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
from bench.sizes import sized
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
