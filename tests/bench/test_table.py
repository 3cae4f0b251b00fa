"""The figures as they are printed and written."""

import io
import json
from dataclasses import replace

from rich.console import Console

from mlxspec.bench.figures import row
from mlxspec.bench.table import report, table, verdict
from tests.bench.test_figures import scripted


def printed(thing: object, width: int = 150) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_row_is_printed_as_it_was_computed() -> None:
    (line,) = [x for x in printed(table([row(scripted())])) if "edits" in x]
    figures = "edits 1/2 14 1.0 2.7 2.40x 1.78x 2.00 58% copy 86%, model 14%"
    assert line.split() == figures.split()


def test_the_verdict_names_what_differs() -> None:
    cell = scripted()
    assert (
        verdict([row(cell)]).plain
        == "Every prompt gave the same tokens with and without speculation."
    )
    cell.trials[0].drafted.answers[0].tokens[3] += 1
    said = verdict([row(cell)]).plain
    assert said == "1 prompt gave other tokens with speculation than without: a (edits, streams: 1)"
    assert [str(r.style) for r in table([row(cell), row(scripted())]).rows] == ["red", ""]


def test_no_figure_is_cut_in_a_narrow_terminal() -> None:
    wide = replace(row(scripted()), workload="humaneval", streams=16, prompts=160, tokens=123456)
    lines = printed(
        table([replace(wide, plain=123.4, drafted=1234.5, ratio=12.34, kept=1.0)]), width=80
    )
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for text in (
        "16/160",
        "123,456",
        "123.4",
        "1234.5",
        "12.34x",
        "1.78x",
        "2.00",
        "100%",
        "copy 86%,",
    ):
        assert any(text in line for line in lines), text


def test_the_report_holds_everything_and_the_tokens_once() -> None:
    cell = scripted()
    found = json.loads(json.dumps(report({"model": "m"}, [cell], [row(cell)])))
    assert found["model"] == "m" and found["rows"][0]["ratio"] == 2.4
    assert found["answers"] == {"edits": {"a": list(range(9)), "b": list(range(5))}}
    assert [(r["side"], r["seconds"]) for r in found["runs"]] == [
        *(("plain", 10.0), ("drafted", 4.0), ("plain", 6.0), ("drafted", 5.0)),
    ]
    fast = found["runs"][1]["answers"][0]
    assert (fast["name"], fast["tokens"], fast["brought"], fast["kept"]) == (
        "a",
        9,
        [1, 4, 4],
        {"copy": 6},
    )
