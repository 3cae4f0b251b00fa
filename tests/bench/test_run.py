"""The command, from its flags to the table, on a tiny model that stands in for the loaded one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxspec import cli
from mlxspec.bench import run
from mlxspec.bench.workloads import NAMES, Task
from mlxspec.config import Config, ConfigError
from mlxspec.engine.engine import Engine
from mlxspec.model.hub import Resolved
from mlxspec.types import ModelInfo
from tests import tiny
from tests.tiny_tokenizer import save_tokenizer

TASKS = [Task(f"t{i}", "hello world " * (i + 1)) for i in range(4)]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the command loads: a tiny model, four tasks; `seen` has the options it asked for."""
    seen = SimpleNamespace(options=None, names=[])
    path = save_tokenizer(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MLXSPEC_CONFIG", "MLXSPEC_MODEL", "MLXSPEC_CACHE_DIR", "MLXSPEC_NAME"):
        monkeypatch.delenv(name, raising=False)

    def start(where: Path, name: str, options: object) -> tuple[Engine, ModelInfo]:
        seen.options = options
        engine = tiny.engine(tiny.model("llama"), vocab=tiny.VOCAB)
        return engine, ModelInfo(name, 512, tiny.VOCAB, "rows", 8, 64, 1, 1, 0)

    def resolve(name: str, cache: Path, metal: bool) -> Resolved:
        seen.names.append(name)
        return Resolved(path, "tiny")

    monkeypatch.setattr("mlxspec.engine.loader.start", start)
    monkeypatch.setattr("mlxspec.resolve.resolve", resolve)
    monkeypatch.setattr("mlxspec.bench.workloads.tasks", lambda name, cache: TASKS)
    return seen


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mlxspec", "bench", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_from_flags_to_table_and_json(
    loaded: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "some/model",
        "--workload",
        "edits",
        "--prompts",
        "3",
        "--max-tokens",
        "6",
        "--streams",
        "1,2",
    ]
    words += ["--rounds", "2", "--json", str(tmp_path / "b.json")]
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    lines = [x.split() for x in said.splitlines() if x.startswith("edits")]
    assert [x[:3] for x in lines] == [["edits", "1/3", "36"], ["edits", "2/4", "48"]]
    assert "the same tokens" in said
    assert loaded.names == ["some/model"] and loaded.options.max_sequences == 2
    found = json.loads((tmp_path / "b.json").read_text())
    assert (found["model"], found["max_tokens"], len(found["runs"])) == ("tiny", 6, 2 * 2 * (3 + 2))


def test_all_are_the_three_workloads(
    loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--prompts", "1", "--max-tokens", "3") == 0
    said = capsys.readouterr().out
    first = [line.partition(" ")[0] for line in said.splitlines()]
    assert [w for w in first if w in NAMES] == ["edits", "humaneval", "chat"]


@pytest.mark.parametrize(
    "words",
    [
        ["--workload", "all", "--prompts", "4", "--max-tokens", "3", "--streams", "1,4"],
        [
            "big",
            "--draft",
            "small",
            "--workload",
            "edits",
            "--prompts",
            "1",
            "--max-tokens",
            "3",
        ],
    ],
)
def test_the_lines_of_the_pages(
    words: list[str], loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, *words) == 0
    assert loaded.options.max_sequences == (4 if "1,4" in words else 1)
    assert loaded.names == (["big", "small"] if "big" in words else [""])
    assert (loaded.options.draft is not None) == ("big" in words)


def test_a_difference_is_the_exit_status(
    loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(*args: object) -> object:
        about, cells = measure(*args)
        cells[0].trials[0].drafted.answers[0].tokens[0] += 1
        return about, cells

    measure = run._measure
    monkeypatch.setattr(run, "_measure", differ)
    assert command(monkeypatch, "--workload", "edits", "--prompts", "2", "--max-tokens", "3") == 1
    assert "1 prompt gave other tokens with speculation than without: t0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--workload", "poems"),
            "--workload = 'poems' is not a workload; give one of edits, humaneval, chat",
        ),
        (
            ("--streams", "1,x"),
            "--streams = '1,x' is not a list of whole numbers from 1 to 256; give",
        ),
        (("--streams", "0"), "--streams = '0' is not"),
        (("--streams", ""), "--streams = '' is not"),
        (("--streams", "257"), "--streams = '257' is not"),
        (("--streams", "5"), "--streams = 5: the workload has 4 prompts; give no more streams"),
        (("--json", "/gone/b.json"), "--json = '/gone/b.json' cannot be written; name"),
        (("--json", "/"), "--json = '/' cannot be written; name"),
        (("--prompts", "0"), "--prompts"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--rounds", "0"), "--rounds"),
    ],
)
def test_mistakes_are_named_before_the_model_is_loaded(
    loaded: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    assert command(monkeypatch, *words) == 2
    assert said in capsys.readouterr().err
    assert loaded.names == [] and loaded.options is None


def test_streams_are_each_taken_once() -> None:
    assert run.streams_of(" 4,1, 4") == (4, 1)
    with pytest.raises(ConfigError):
        run.streams_of("²")


def test_the_settings_reach_the_engine(
    loaded: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = run.Ask(("edits",), prompts=1, max_tokens=2, streams=(1,), rounds=1)
    assert run.bench(Config(block_size=16, context=300, layout="gather", name="mine"), ask) == 0
    options = loaded.options
    assert (options.block_size, options.context, options.layout) == (16, 300, "gather")
    assert options.max_sequences == 1


def test_a_timeline_from_the_flag_to_the_file(
    loaded: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "t.json"
    words = ("--workload", "edits", "--max-tokens", "20", "--streams", "1,2", "--trace", str(file))
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "nothing" in said and str(file) in said.replace("\n", "")
    assert [x.split()[1:4] for x in said.splitlines() if x.startswith("edits")] == [
        ["1", "stream,", "plain"],
        ["2", "streams,", "plain"],
    ]
    assert {"plan", "run", "read"} <= {
        e["name"] for e in json.loads(file.read_text())["traceEvents"]
    }
    assert command(monkeypatch, "--max-tokens", "20", "--trace", str(file)) == 0
    lines = [x.split(",")[0] for x in capsys.readouterr().out.splitlines()]
    assert [x for x in lines if x in NAMES] == ["edits", "humaneval", "chat"]
    assert command(monkeypatch, "--trace", "/gone/t.json") == 2
    capsys.readouterr()
    assert command(monkeypatch, "--trace", str(file), "--json", str(file.with_suffix(".x"))) == 2
    assert "leave out --json" in " ".join(capsys.readouterr().err.split())
