"""The pages of the repository say what a table of the comparison says."""

import re
import shutil
from pathlib import Path

import pytest

from bench import report, run
from bench.goals import GOALS
from bench.rows import ABOUT, Rows, read, write

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/performance.md")


def test_the_pages_show_a_table_of_the_repository() -> None:
    """The one that they link: what stands there is made of it, to the letter."""
    linked = re.search(r"\[All values\]\(\.\./(\S+\.csv)\)", (ROOT / PAGES[1]).read_text("utf-8"))
    assert linked, "run python -m bench --report CSV --docs"
    file = ROOT / linked[1]
    for page, text in report.blocks(read(file), file, ROOT).items():
        found = report.BLOCK.search(page.read_text("utf-8"))
        assert found and found[0] == text, (
            f"{page} is stale; run python -m bench --report {linked[1]} --docs"
        )


def test_the_report_of_that_table_has_every_figure() -> None:
    for file in (ROOT / "bench/results").glob("*.csv"):
        made = file.with_suffix(".md").read_text("utf-8")
        pictures = re.findall(r"!\[(.+)\]\(\1\)", made)
        assert made == report.markdown(read(file), pictures), f"{file} has a stale report"
        assert pictures and all((file.parent / name).is_file() for name in pictures)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench/results").mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    monkeypatch.setattr(run, "HERE", tmp_path / "bench")
    return tmp_path


def table(root: Path, rounds: str = "2") -> Path:
    """Three servers, one of them in two settings."""
    rows = Rows()
    for metric, note in {"model": "tiny", "machine": "linux-2-cores", "rounds": rounds}.items():
        rows.add("", ABOUT, metric, 0, 0, note)
    for server, speeds in {"mlxspec": (30, 33), "mlx_lm.server": (20, 20)}.items():
        for n, speed in enumerate(speeds):
            rows.add(server, "chat", "tokens_per_s", n, speed)
            rows.add(server, "streams 4", "tokens_per_s", n, speed)
    for server, speed in {"mlxspec": 9, "rapid-mlx": 7, "rapid-mlx-suffix": 12}.items():
        rows.add(server, "edit", "tokens_per_s", 0, speed)
    for server, memory in {"mlxspec": 1200, "mlx_lm.server": 900, "mlxspec-no-head": 800}.items():
        rows.add(server, "memory", "rss_mb", 0, memory)
    for server, variant, right in (
        ("mlxspec", "draft", 6),
        ("rapid-mlx", "no draft", 6),
        ("rapid-mlx-suffix", "draft", 5),
    ):
        rows.add(server, f"none/alone/other/{variant}", "right", 0, right)
        rows.add(server, f"none/alone/other/{variant}", "asked", 0, 6)
    rows.failed("mlx_lm.server", "edit", 0, "it died")
    write(file := root / "bench/results/m.csv", rows)
    return file


@pytest.mark.slow
def test_pages_are_filled_between_their_marks(root: Path) -> None:
    before = {page: report.BLOCK.split((root / page).read_text("utf-8")) for page in PAGES}
    texts = []
    for _ in range(2):
        run.main(["--report", str(table(root)), "--docs"])
        texts.append({page: (root / page).read_text("utf-8") for page in PAGES})
    assert texts[0] == texts[1]
    assert {page: report.BLOCK.split(text) for page, text in texts[0].items()} == before
    readme, page = (report.BLOCK.search(texts[0][name]) for name in PAGES)
    assert readme and page
    line = "| one chat, tokens/s | \u2265 1.4 | mlx_lm.server | 1.57"
    assert line in page[0] and "what did not work: 1." in page[0]
    assert (
        f"Of {len(GOALS)} [goals](docs/performance.md#measured) 4 were measured, 2 of them missed."
        in readme[0]
    )
    links = re.findall(r"\]\((\.\./[^)]+)\)", page[0])
    assert links and all((root / "docs" / link).is_file() for link in links)
    assert "(m-streams.png)" in (root / "bench/results/m.md").read_text("utf-8")


def test_the_readme_has_the_best_setting_of_each_other_server(root: Path) -> None:
    file = table(root)
    readme = report.blocks(read(file), file, root)[root / "README.md"]
    assert readme.startswith("|  | mlxspec | mlx_lm.server | rapid-mlx |\n")
    assert "| one chat, tokens/s | 31.5 | 20 | - |" in readme
    assert "| code edit, tokens/s after the first | 9 | - | 12 |" in readme
    assert "| right answers | 6/6 | - | **11/12** |" in readme


def test_the_readme_says_what_is_worse(root: Path) -> None:
    file = table(root)
    readme = report.blocks(read(file), file, root)[root / "README.md"]
    worse = "code edit (9 tokens/s after the first; rapid-mlx 12), memory after the workloads (1,200 MB; mlx_lm.server 900)"
    assert f"**mlxspec is worse in**: {worse}. Of " in readme
