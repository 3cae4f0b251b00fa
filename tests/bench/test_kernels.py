"""What is counted for our kernels: its bounds, that the sources still are what was counted, and that
tables say what is predicted."""

import re
from pathlib import Path

import pytest

from bench import kernels, peers, roofline
from bench.chips import CHIPS, CURVES, RATES, STOCK
from bench.formula import batch_speed
from bench.kernels import ROWS, before_after, cycles, ours
from bench.sizes import read_config, sized
from bench.tables import NOTE
from mlxspec.kernels import matmul

METAL = Path(__file__).resolve().parents[2] / "metal"


def test_every_chip_with_a_bandwidth_has_a_rate_with_a_source() -> None:
    assert RATES.keys() == CHIPS.keys()
    assert all(rate > 0 and source.startswith("https://") for rate, source in RATES.values())


def test_the_page_has_bandwidths_and_rates() -> None:
    page = (METAL.parent / "docs/roofline.md").read_text("utf-8")
    for chip, (width, source) in CHIPS.items():
        rate, other = RATES[chip]
        line = rf"\| {chip} \| {width:g} \| .*\({re.escape(source)}\) \| {rate:g} \| .*"
        found = re.search(line, page)
        assert found and other.partition(", ")[0] in found[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_more_rows_never_cost_less_and_always_less_than_reading_for_each(bits: int) -> None:
    for chip in CHIPS:
        points = ours(chip, bits).points
        assert [rows for rows, _ in points] == list(range(1, ROWS + 1))
        costs = [cost for _, cost in points]
        assert costs == sorted(costs) and costs[0] == 1
        assert all(cost < rows for rows, cost in points[1:])


def test_cycles_by_hand() -> None:
    assert cycles(1, 4) == 8  # the pipeline of conversions
    assert cycles(6, 4) == 3 + 5 / 8 + 6 * 1.5
    assert cycles(8, 4) == 3 + 5 / 8 + 10  # by matrices
    assert cycles(16, 8) == 3 + 6 / 8 + 20
    assert cycles(1, 4, "mxfp4") == 7 / 8 + 3 / 2 + 3 + 3 / 8 + 1.5


def test_a_slow_chip_computes_and_a_byte_a_weight_is_read() -> None:
    assert ours("M1 Max", 4).at(8) == pytest.approx(cycles(8, 4) / 5.31e12 * 400e9 / 0.5625)
    assert ours("M4 Pro", 8).at(8) == 1 < ours("M4 Pro", 4).at(8)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bits"):
        ours("M1", 3)


def test_the_kernels_are_as_they_were_counted() -> None:
    text = (METAL / "small_qmm.metal").read_text() + (METAL / "qmm_weights.metal").read_text()
    found = dict(re.findall(r"constexpr int (QMM_(?:COLUMNS|TILES|RUN)) = (\d+)", text))
    run, tiles = int(found["QMM_RUN"]), int(found["QMM_TILES"])
    assert (run, int(found["QMM_COLUMNS"])) == (kernels.RUN, kernels.SHARED)
    assert matmul.ROWS == ROWS
    held = 2 * run, tiles * 2 * run  # values of x and weights that a lane has for 8 rows
    assert 2 * held[0] / held[1] == kernels.MATRIX_X


def test_ours_is_used_where_it_is_faster_and_one_row_is_the_old_prediction() -> None:
    model = sized(read_config("qwen3-4b"), 4)

    def rate(requests: int):
        return lambda curve: batch_speed(model, requests, CHIPS["M1"][0] * 1e9, 0, curve)

    plain = rate(1)(CURVES["ideal"])
    assert before_after("M1", 4, plain, rate(1)) == f"{plain:.0f} / {plain:.0f}"
    before, after = map(int, before_after("M1", 4, plain, rate(8)).split(" / "))
    assert before == round(plain) and 2 * before < after < 8 * before
    assert ("M1", 8) not in STOCK and before_after("M1", 8, plain, rate(8)).startswith("? / ")


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--kernels", "--peers", "--long"])
def test_tables_say_what_is_predicted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main([flag])
    printed = capsys.readouterr().out
    assert NOTE in " ".join(printed.split()) and "* is predicted" in " ".join(printed.split())
    heading = next(x for x in printed.splitlines() if x.startswith("|"))
    names = {name.strip() for name in heading.strip("| ").split("|")}
    figures = names - {"model", "chats", "chip", "measured by", "step", "tokens"}
    measured = {"mlx-lm", "theirs", "Splash 1.3.0", "JustFit 2.3.0", "mlx-vlm"}
    assert figures - measured and all(name.endswith("*") for name in figures - measured)


@pytest.mark.slow
def test_no_prediction_is_below_mlx() -> None:
    made = kernels.with_kernels(["M1 Pro", "M4 Pro"], 4096)
    cells = [cell for column in made.columns[2:] for cell in column.cells]
    both = [str(cell).split(" / ") for cell in cells if " / " in str(cell)]
    assert both and all(int(after) >= int(before) for before, after in both if before != "?")


def test_figures_of_others_are_printed_as_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", peers.PEERS[3:4])
    made = {str(column.header): next(iter(column.cells)) for column in peers.beside_peers().columns}
    assert (made["mlx-lm"], made["theirs"]) == ("87.0 tok/s", "271.0 tok/s")
    assert made["off*"] == f"{float(str(made['ours*']).split()[0]) / 271 - 1:+.0%}"
