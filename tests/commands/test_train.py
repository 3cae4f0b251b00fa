"""`mlxspec train` on a tiny model: from the command line to the head that serve uses."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxspec import cli
from mlxspec.commands import models, train
from mlxspec.config import Config
from mlxspec.files import lock
from mlxspec.load.resolve import resolve_model
from mlxspec.service.status import Status
from mlxspec.speculate.heads import load_head
from mlxspec.speculate.heads.files import find_head
from mlxspec.training.run import install
from mlxspec.training.samples import Sample, SampleFile, general_prompts, held_out
from mlxspec.training.trainer import Trainer
from mlxspec.types import UserError
from tests.heads import kinds

WORDS = ("--tokens", "1000")
PROMPTS = sorted(general_prompts(), key=lambda prompt: len(prompt[1]))[:60]
TIMED, TIMED_ROWS = 2, 64  # steps for an estimate, and their rows


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> Path:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "log_to_stderr", lambda level: None)
    monkeypatch.setattr(train, "ANSWER", 48)
    monkeypatch.setattr(train, "general_prompts", lambda: PROMPTS)
    for name in ("ROWS", "LENGTH"):
        monkeypatch.setattr(train, name, TIMED_ROWS)
    return tmp_path / "cache"


ANSWERS: dict[Path, bytes] = {}  # of all tests, by their place in a cache directory


@pytest.fixture
def answered(cache: Path) -> Iterator[Path]:
    """A cache directory with the answers that tests before this one have collected."""
    for place, answers in ANSWERS.items():
        (cache / place).parent.mkdir(parents=True)
        (cache / place).write_bytes(answers)
    yield cache
    for file in cache.glob("training/*/answers.jsonl"):
        ANSWERS.setdefault(file.relative_to(cache), file.read_bytes())


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mlxspec", "train", str(kinds.TARGET), *words])
        cli.main()
    return int(caught.value.code or 0)


def better(monkeypatch: pytest.MonkeyPatch, *figures: float) -> None:
    """What is measured before and after, without measuring."""
    left = iter(figures)
    monkeypatch.setattr(train, "_tokens_per_round", lambda config, samples, wait: next(left))


def test_a_trained_head_is_used_from_then_on(
    answered: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    better(monkeypatch, 1.0, 1.5, 1.5, 1.2)
    config = Config(model=str(kinds.TARGET), cache_dir=str(answered))
    assert resolve_model(config).draft is None
    assert command(*WORDS) == 0
    said = capsys.readouterr().out
    for line in ("memory: ", "time: about ", "training on ", "1.00 tokens a round before, 1.50"):
        assert line in said
    found = resolve_model(config).draft
    assert found is not None
    first = found.path.resolve()
    assert first.is_relative_to(answered / "heads")
    assert resolve_model(replace(config, draft="off")).draft is None
    listed = models.local_models(config)[:2]
    assert [one.kind for one in listed] == ["model", "head"] and listed[1].bytes > 1000

    assert command(*WORDS) == 1  # no better than the first
    found = resolve_model(config).draft
    assert found is not None and found.path.resolve() == first
    assert len(list((answered / "heads").iterdir())) == 2  # the head and the link to it


@pytest.mark.slow
def test_a_head_that_was_learned_before_goes_on(
    answered: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own draft vocabulary; one that cannot be used is replaced by a new head."""
    better(monkeypatch, *(1.0, 1.5) * 4)
    config = Config(model=str(kinds.TARGET), cache_dir=str(answered))

    def made(*words: str) -> tuple[Path, dict, int]:
        assert command(*WORDS, *words) == 0
        draft = resolve_model(config).draft
        assert draft is not None
        place = draft.path.resolve()
        about = json.loads((place / "training.json").read_bytes())
        return place, about, len(mx.load(str(place / "model.safetensors"))["d2t"])

    _, first, size = made("--draft-vocab-size", "300")
    assert first["begins_as"] == {} and size == first["vocabulary"] == 300
    assert "a new head, of 300 tokens" in capsys.readouterr().out
    _, about, size = made()
    assert about["begins_as"] | {"begins_as": {}} == first and size == about["vocabulary"] == 300
    said = capsys.readouterr().out
    assert "resuming the existing head, of 300 tokens" in said
    assert "continuing after step" not in said
    place, about, size = made("--draft-vocab-size", "512")
    assert about["begins_as"] == {} and size == 512
    (place / "config.json").write_text("{}")
    place, about, size = made("--draft-vocab-size", "512")
    assert about["begins_as"] == {} and size == 512


@pytest.mark.slow
def test_the_head_of_a_real_comparison(answered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is measured before and after is what the engine does."""
    assert command(*WORDS) in (0, 1)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("held-out"))
    before, after = (float(word) for word in line.split() if word[0].isdigit())
    assert before >= 1 and after >= 1


@pytest.mark.slow
def test_a_stopped_training_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers are kept, and so are steps."""
    better(monkeypatch, 1.0, 1.5)
    calls = Counter[str]()

    def interrupt(owner: type, name: str, call: int) -> None:
        usual = getattr(owner, name)

        def called(*args: Any) -> Any:
            calls[name] += 1
            if calls[name] == call:
                raise KeyboardInterrupt
            return usual(*args)

        monkeypatch.setattr(owner, name, called)

    interrupt(SampleFile, "append", 6)
    interrupt(Trainer, "step", 2 * TIMED + 3)
    assert command(*WORDS) == 130
    assert "the same command resumes" in capsys.readouterr().err
    (file,) = (cache / "training").glob("*/answers.jsonl")
    kept = SampleFile(file).read()
    assert len(kept) == 5
    assert command(*WORDS) == 130
    assert "continuing after step" not in capsys.readouterr().out
    assert command(*WORDS) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    after = SampleFile(file).read()
    assert {key: after[key] for key in kept} == kept


FAULTS: list[tuple[str, Exception]] = [
    ("mlxspec.commands.train.save_head", OSError(28, "No space left on device")),
    ("mlxspec.training.run.write_tensors", OSError(28, "No space left on device")),
    ("mlxspec.training.samples.SampleFile.append", OSError(28, "No space left on device")),
    ("mlxspec.training.trainer.Trainer.step", RuntimeError("[malloc] Unable to allocate 8 bytes.")),
    ("mlxspec.engine.engine.Engine.step", RuntimeError("[METAL] Insufficient Memory")),
]


@pytest.mark.slow
@pytest.mark.parametrize("place, error", FAULTS)
def test_what_fails_is_told_in_a_line_and_the_head_in_use_stays(
    place: str,
    error: Exception,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    better(monkeypatch, 1.0, 1.5)
    name = train.storage_name(kinds.TARGET.name, kinds.TARGET)
    used = kinds.write("eagle3", "speculators", cache / "heads" / f"{name}.1")
    install(used, cache / "heads" / name)

    def fails(*args: object, **how: object) -> None:
        raise error

    monkeypatch.setattr(place, fails)
    assert command(*WORDS) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("error: ") == 1
    assert (error.args[1] if isinstance(error, OSError) else str(error)) in said
    found = resolve_model(Config(model=str(kinds.TARGET), cache_dir=str(cache))).draft
    assert found is not None and found.path.resolve() == used.resolve()
    assert {path.name for path in (cache / "heads").iterdir()} == {name, used.name}


@pytest.mark.slow
def test_few_tokens_are_learned_from_and_measured(
    answered: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever among the prompts those for measuring are: it does not work for minutes, then say
    that nothing can be learned."""
    last = sorted(PROMPTS, key=lambda prompt: held_out(prompt[0]))
    assert held_out(last[-1][0]) and not held_out(last[0][0])
    monkeypatch.setattr(train, "general_prompts", lambda: last)
    assert command("--tokens", "1000", "--draft-vocab-size", "512") in (0, 1)
    assert "held-out prompts: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_is_killed_goes_on(cache: Path) -> None:
    """`kill -9` at any moment: what serve would use is no head or a whole one, and the same command
    ends."""
    rng, config = random.Random(5), Config(model=str(kinds.TARGET), cache_dir=str(cache))
    words = [sys.executable, "-m", "mlxspec", "train", str(kinds.TARGET), "--tokens", "8000"]
    words += ["--draft-vocab-size", "512", "--url", "http://127.0.0.1:9"]
    for life in range(8):
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = child.communicate(timeout=rng.uniform(1, 12) if life < 7 else 300)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
        assert child.returncode in (0, 1, -9), said
        if found := resolve_model(config).draft:
            assert load_head(find_head(found.path), kinds.plain_target()) is not None
    assert child.returncode in (0, 1), said
    left = list((cache / "heads").iterdir()) if (cache / "heads").exists() else []
    assert len(left) in (0, 2)  # the head and the link to it
    assert not list(cache.rglob("part-*"))


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", "0"),
        ("--tokens", "many"),
        ("--epochs", "21"),
        ("--draft-vocab-size", "-1"),
        ("--data", str(Path(__file__))),
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_option_is_told_in_a_line(
    words: tuple[str, ...], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words) == 2
    said = capsys.readouterr().err
    assert words[0] in said and "Traceback" not in said


def test_without_a_server_nobody_waits() -> None:
    train.Server("http://127.0.0.1:9", "").wait()


def test_one_training_of_a_model_at_a_time(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = train.storage_name(kinds.TARGET.name, kinds.TARGET)
    with lock(cache / "training" / f"{name}.lock"):
        assert command(*WORDS) == 2
    assert "another training of target runs" in capsys.readouterr().err


@pytest.mark.slow
def test_recorded_answers_come_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many there are, the model answers prompts too."""
    better(monkeypatch, 1.0, 1.5)
    name = train.storage_name("served", kinds.TARGET)
    file = SampleFile(cache / "answers" / f"{name}.jsonl")
    for n in range(40):
        file.append(str(n), Sample([n % 600 + i for i in range(100)], 20))
    assert command(*WORDS) == 0
    found = re.search(r"training on (\d+) tokens", capsys.readouterr().out)
    assert found and int(found[1]) >= 800
    (answers,) = (cache / "training").glob("*/answers.jsonl")
    assert sum(map(len, SampleFile(answers).read().values())) >= 500


@pytest.mark.slow
def test_a_head_keeps_its_place_where_its_model_has_another_name(
    answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two would be found."""
    better(monkeypatch, 1.0, 1.5, 1.5, 1.8)
    assert command(*WORDS) == 0
    monkeypatch.setenv("MLXSPEC_NAME", "coder")
    assert command(*WORDS) == 0
    assert len(list((answered / "heads").iterdir())) == 2  # the last head and the link to it
    assert len(list((answered / "training").glob("*/answers.jsonl"))) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass only while somebody sleeps."""
    now = [100.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train.time, "sleep", lambda s: now.append(now.pop() + s))
    return now


def test_a_server_that_hesitates_is_asked_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of answers are not given up for a question that failed."""
    well, unwell = Status("", "idle"), Status("", "unwell", why="timed out")
    says = iter([well, unwell, unwell, well])
    monkeypatch.setattr(train, "get_status", lambda url, key: next(says))
    server = train.Server("http://127.0.0.1:1", "")
    server.wait()
    train.time.sleep(5)
    server.wait()
    assert next(says, None) is None and server.unwell == 0


def test_a_server_that_stays_unwell_is_given_up(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "get_status", lambda url, key: Status("", "unwell", why="gone"))
    with pytest.raises(UserError, match="gone"):
        train.Server("http://127.0.0.1:1", "", polled=1.0).wait()
    assert clock[0] == 100 + 2 * train.ASK_S * train.PATIENCE


def test_a_server_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key is no reason to compute beside it."""
    unwell = Status("", "unwell", why="the server answered 401; give --api-key")
    monkeypatch.setattr(train, "get_status", lambda url, key: unwell)
    with pytest.raises(UserError, match="401; give --api-key"):
        train.Server("http://127.0.0.1:1", "").wait()


@pytest.mark.slow
def test_texts_of_the_user(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better(monkeypatch, 1.0, 1.5)
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        (texts / f"{n}.py").write_text(f"def f{n}(x):\n    return x + {n}\n" * 9)
    assert command("--tokens", "1500", "--data", str(texts)) == 0
    assert command("--data", str(tmp_path / "missing")) == 2


def test_too_little_memory_is_said_before_anything_is_done(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlxspec.engine.memory.available", lambda: 1000)
    monkeypatch.setattr(train, "load_weights", pytest.fail)
    assert command(*WORDS) == 2
    assert "training needs" in capsys.readouterr().err
    assert not list(cache.rglob("answers.jsonl"))


def test_a_running_server_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed while it has a request."""
    states = iter(
        [
            Status("", "busy", running=1),
            Status("", "busy", waiting=2),
            Status("", "loading"),
            Status("", "idle"),
        ]
    )
    asked: list[Status] = []
    slept: list[float] = []

    def status(url: str, key: str) -> Status:
        asked.append(next(states))
        return asked[-1]

    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(train, "get_status", status)
    monkeypatch.setattr(train.time, "monotonic", lambda: now)
    monkeypatch.setattr(train.time, "sleep", sleep)
    server = train.Server("http://127.0.0.1:1", "")
    server.wait()
    assert [s.state for s in asked] == ["busy", "busy", "loading", "idle"] and len(slept) == 3
    server.wait()  # asked less than a second ago
    assert len(asked) == 4
