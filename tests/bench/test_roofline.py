"""The roofline's bytes against sums by hand, its bounds, and that the page shows what its commands
print."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chips import CHIPS, CURVES, PUBLISHED, Curve
from bench.roofline import CONFIGS, NOTE, Model, curve, main, sized, speed
from bench.synthetic import expected
from tests import architectures

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
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

models = st.builds(
    Model,
    dense=st.integers(10**6, 10**12),
    token=st.integers(0, 10**6),
    experts=st.integers(0, 10**12),
    chosen=st.floats(0.001, 1),
    windows=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 10**6)), max_size=2).map(tuple),
    state=st.integers(0, 10**9),
)
curves = st.sampled_from(list(CURVES.values()))
bandwidths = st.sampled_from([width for width, _ in CHIPS.values()])
contexts, depths, chances = st.integers(0, 200_000), st.integers(0, 7), st.floats(0, 1)


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return found


def test_a_dense_model_is_its_matrices_norms_and_kv() -> None:
    assert sized(TINY) == Model(dense=2 * (LINEAR_WEIGHTS + NORMS), token=2 * 2 * 2 * 16 * 2)
    assert sized(TINY | {"torch_dtype": "float32"}).dense == 4 * (LINEAR_WEIGHTS + NORMS)


def test_a_shared_table_of_embeddings_is_read_as_the_output() -> None:
    assert sized(TINY | {"tie_word_embeddings": True}) == sized(TINY)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32)])
def test_quantized_weights_have_a_scale_and_a_bias_a_group(bits: int, group: int) -> None:
    packed = LINEAR_WEIGHTS * bits // 8 + LINEAR_WEIGHTS // group * 2 * 2
    found = sized(TINY | {"quantization": {"group_size": group, "bits": bits}})
    assert found == Model(dense=packed + 2 * NORMS, token=256)
    if group == 64:
        assert sized(TINY | {"quantization": {"group_size": 32, "bits": 2}}, bits) == found
    assert sized(TINY | {"quantization": {"group_size": group, "bits": bits}}, 16) == sized(TINY)


def test_a_layer_may_have_a_quantization_of_its_own() -> None:
    how = {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}
    plain = sized(TINY | {"quantization": {"group_size": 64, "bits": 4}})
    assert sized(TINY | {"quantization": how}).dense - plain.dense == 1000 * 64 // 2


def test_experts_are_apart_from_what_every_row_reads() -> None:
    found = sized(config("qwen3-30b-a3b"))
    layer = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2048 * 128 + 2 * 2048 + 2 * 128
    assert found.dense == 2 * (48 * layer + 2048 + 151936 * 2048)
    assert found.experts == 2 * 48 * 128 * 3 * 2048 * 768 and found.chosen == 8 / 128
    assert found.token == 48 * 2 * 4 * 128 * 2
    assert found.read(1, 0, IDEAL) == found.dense + found.experts / 16
    assert found.read(2, 0, IDEAL) == pytest.approx(
        found.dense + found.experts * (1 - (15 / 16) ** 2)
    )
    assert found.read(2, 0, LINEAR) == 2 * found.dense + found.experts / 8


def test_recurrent_layers_keep_a_state_and_no_kv() -> None:
    found = sized(config("qwen3.8-27b"))
    convolution = 3 * (2 * 16 + 48) * 128 * 2
    assert found.token == 16 * 2 * 4 * 256 * 2
    assert found.state == 48 * (48 * 128 * 128 * 4 + convolution)
    assert found.read(1, 100, IDEAL) == found.dense + 100 * found.token + 2 * found.state


def test_a_window_ends_what_is_read() -> None:
    made = Model(dense=1000, token=10, windows=((100, 7),))
    assert made.read(1, 50, IDEAL) == 1000 + 50 * 17
    assert made.read(1, 500, IDEAL) == 1000 + 500 * 10 + 100 * 7
    assert sized(architectures.config("gemma3_text")).windows


@pytest.mark.parametrize(("rows", "cost"), [(1, 1), (2, 1.03), (5, 1.77), (8, 2.69)])
def test_between_measured_rows_lies_a_line(rows: int, cost: float) -> None:
    assert CURVES["m4pro-4bit"].at(rows) == pytest.approx(cost)


def test_nothing_is_said_beyond_what_was_measured() -> None:
    for rows in (0, 9):
        with pytest.raises(ValueError, match=f"{rows} rows: .* 1 to 8"):
            CURVES["m4pro-4bit"].at(rows)


def test_a_curve_of_ones_own() -> None:
    assert curve("m4pro-4bit") is CURVES["m4pro-4bit"]
    assert curve("1:1,2:1.1,8:2").at(5) == pytest.approx(1.55)
    for wrong in ("2:1", "1:1,4:0.9", "1:1,8:2,4:1.5", "1:1,x:2", "1:1,4", "nobody's"):
        with pytest.raises(ValueError):
            curve(wrong)


def test_speeds_by_hand() -> None:
    made = Model(dense=10 * 10**9, token=10**6)
    assert speed(made, 100, 0, 0, 1, IDEAL) == pytest.approx(10)
    assert speed(made, 100, 10_000, 0, 1, IDEAL) == pytest.approx(5)
    assert speed(made, 100, 0, 3, 2, IDEAL) == pytest.approx(20)
    assert speed(made, 100, 0, 3, 2, LINEAR) == pytest.approx(5)
    assert speed(made, 100, 0, 3, 2, IDEAL, draft=1 / 3) == pytest.approx(10)
    assert speed(made, 100, 0, 3, 2, IDEAL, reached=0.8) == pytest.approx(16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 4.1},
        {"tokens": 0.9},
        {"bandwidth": 0},
        {"reached": 1.1},
        {"draft": -1},
        {"context": -1},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    given: dict[str, Any] = {
        "bandwidth": 100,
        "context": 0,
        "depth": 3,
        "tokens": 2,
        "curve": IDEAL,
    }
    with pytest.raises(ValueError):
        speed(Model(dense=1, token=1), **given | wrong)


@given(models, bandwidths, contexts, depths, chances, curves)
def test_never_above_the_bandwidth(
    model: Model, width: float, context: int, depth: int, p: float, curve: Curve
) -> None:
    plain = speed(model, width, context, 0, 1, curve)
    assert plain <= width * 1e9 / (model.dense + model.experts * model.chosen) * (1 + 1e-9)
    drafted = speed(model, width, context, depth, expected(p, depth), curve)
    assert drafted <= expected(p, depth) * plain * (1 + 1e-9)
    assert drafted <= speed(model, width, context, depth, expected(p, depth), IDEAL) * (1 + 1e-9)


@given(
    models, bandwidths, st.tuples(contexts, contexts), depths, st.tuples(chances, chances), curves
)
def test_it_rises_and_falls_as_it_must(
    model: Model,
    width: float,
    context: tuple[int, int],
    depth: int,
    p: tuple[float, float],
    curve: Curve,
) -> None:
    def rate(c: int, p: float, width: float = width, draft: float = 0.0) -> float:
        return speed(model, width, c, depth, expected(p, depth), curve, draft)

    (near, far), (low, high), grown = sorted(context), sorted(p), 1 + 1e-9
    assert rate(far, low) <= rate(near, low) * grown
    assert rate(near, low) <= rate(near, high) * grown
    assert rate(near, low) < rate(near, low, width=2 * width)
    assert rate(near, low, draft=0.5) <= rate(near, low, draft=0.1) * grown


def test_every_chip_and_curve_has_a_source() -> None:
    assert all(width > 0 and source.startswith("https://") for width, source in CHIPS.values())
    for name, one in CURVES.items():
        rows, costs = zip(*one.points, strict=True)
        assert (
            rows[0] == costs[0] == 1
            and list(rows) == sorted(set(rows))
            and list(costs) == sorted(costs)
        )
        assert ("https://" in one.source) == (name not in ("ideal", "linear"))


@pytest.mark.parametrize("p", PUBLISHED, ids=lambda p: f"{p.chip}-{p.config}-{p.bits}-{p.context}")
def test_nobody_published_more_than_the_bandwidth_gives(p: Any) -> None:
    model, width = sized(config(p.config), p.bits), CHIPS[p.chip][0]
    assert p.plain < speed(model, width, p.context, 0, 1, IDEAL)
    if p.drafted:
        assert p.drafted < speed(model, width, p.context, p.depth, p.tokens, IDEAL)
    assert p.source.startswith("https://")


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_page_shows_what_its_commands_print(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
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


def test_the_page_has_every_chip_with_its_source() -> None:
    page = PAGE.read_text("utf-8")
    for chip, (width, source) in CHIPS.items():
        assert re.search(rf"^\| {chip} \| {width:g} \| .*\({re.escape(source)}\)", page, re.M), chip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(TINY | {"quantization": {"quant_method": "gptq"}}), "no bits and group_size"),
        (json.dumps(TINY | {"model_type": "none"}), "none"),
        ("{}", "model_type"),
        ("no json", "Expecting value"),
    ],
)
def test_a_config_that_is_not_understood_ends_with_why(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "config.json")])
    assert said in capsys.readouterr().err


def test_experts_without_a_count_are_refused() -> None:
    wrong = config("qwen3-30b-a3b") | {"num_experts_per_tok": 0}
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        sized(wrong)
