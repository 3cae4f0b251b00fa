"""The picture is a PNG, shows what it is given, and is refused in time where it cannot be drawn."""

import importlib.util
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mlxspec.bench import plot
from mlxspec.bench.figures import Answer, Cell, Side, Trial, row
from mlxspec.types import UserError
from tests.bench.test_figures import scripted


def test_a_png_is_written(tmp_path: Path) -> None:
    cell = scripted()
    plot.draw(tmp_path / "a.anything", "title", [cell], [row(cell)])
    data = (tmp_path / "a.anything").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000


def test_the_bars_are_the_figures() -> None:
    cell = scripted()
    left, right = Figure().subplots(1, 2)
    plot._lengths(left, [cell])
    assert [round(bar.get_height(), 3) for bar in left.patches] == [
        *(round(100 * n / 7, 3) for n in (4, 1, 0, 2, *[0] * 8)),
    ]
    plot._speeds(right, [row(cell)])
    assert [bar.get_width() for bar in right.patches] == [1.0, 8 / 3]
    assert "2.40x" in [text.get_text() for text in right.texts]


def test_every_round_is_in_the_bar_that_names_it() -> None:
    brought = [1, 8, 9, 12, 13, 16, 17, 24, 25, 300]
    long = Answer("a", list(range(sum(brought))), brought)
    left = Figure().subplots()
    plot._lengths(left, [Cell("chat", 1, [Trial(Side([], 1.0), Side([long], 1.0))])])
    shown = dict(zip([t.get_text() for t in left.get_xticklabels()], left.patches, strict=True))
    assert {name: round(bar.get_height()) for name, bar in shown.items() if bar.get_height()} == {
        **{"1": 10, "8": 10, "9-12": 20, "13-16": 20, "17-24": 20, "25+": 20},
    }


def test_nothing_measured_is_drawn_too(tmp_path: Path) -> None:
    one = Side([Answer("a", [1], [1], rounds=1)], 1.0)
    cell = Cell("chat", 1, [Trial(one, one)])
    plot.draw(tmp_path / "a.png", "title", [cell], [row(cell)])
    assert (tmp_path / "a.png").stat().st_size


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run: pip install 'mlxspec\[bench\]'"):
        plot.need()
