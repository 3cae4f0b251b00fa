"""`record = on`: which answers are kept, how much of them, and that nothing waits for them."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.files import lock
from mlxspec.model.hub import storage_name
from mlxspec.server import process
from mlxspec.text.chat import encode, load_tokenizer
from mlxspec.training import recorder as module
from mlxspec.training.recorder import LENGTH, PROMPT, WAITING, Recorder, recorded
from mlxspec.training.samples import Sample
from tests.support.checkpoints import save
from tests.support.scripted import END, MESSAGES, Connection, Server, server
from tests.tiny_tokenizer import save_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FULL = Path("/dev/full")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.fixture
def make(tokenizer: Any, model_dir: Path, tmp_path: Path) -> Callable[..., Server]:
    def make(record: bool = True, **script: Any) -> Server:
        config = Config(record=record, cache_dir=str(tmp_path))
        return server(tokenizer, model_dir, config, **script)

    return make


def until(seen: Callable[[], object]) -> None:
    """Answers are written a little after they were sent."""
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.005)


def kept(folder: Path, model: Path, count: int) -> list[Sample]:
    until(lambda: len(recorded(folder, model)) >= count)
    found = recorded(folder, model)
    assert len(found) == count
    return found


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


# ---- the real server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("tiny"))
    save(path, "llama")
    return path


@pytest.fixture
def start(model: Path, tmp_path: Path, bare_settings: None) -> Iterator[Callable[..., Any]]:
    workers = []

    def start(**change: Any) -> Any:
        config = Config(model=str(model), kv_blocks=256, cache_dir=str(tmp_path), **change)
        app = process._load(config)
        workers.append(app.state.server.worker)
        return app

    yield start
    for worker in workers:
        worker.stop()


@pytest.mark.anyio
async def test_an_answer_is_kept_as_token_ids(
    start: Callable[..., Any], model: Path, folder: Path
) -> None:
    app = start(record=True, name="my/model")
    prompt = list(range(64, 90))
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = (await Connection(app, COMPLETIONS, body).answer()).json
    (sample,) = kept(folder, model, 1)
    assert sample.tokens[: sample.first] == prompt
    assert len(sample) == answer["usage"]["completion_tokens"]
    text = load_tokenizer(model).decode(sample.tokens[sample.first :])
    assert text == answer["choices"][0]["text"]

    chat = {"messages": MESSAGES, "max_tokens": 8, "ignore_eos": True, "stream": True}
    assert (await Connection(app, CHAT, chat).answer()).events[-1] == "[DONE]"
    assert len(kept(folder, model, 2)[1]) == 8

    (path,) = folder.glob("*.jsonl")
    assert path.stem == storage_name("my/model", model) and path.stem.startswith("my--model-")
    assert path.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    for line in path.read_text().splitlines():
        key, values = json.loads(line)
        assert int(key, 16) >= 0 and set(values) == {"tokens", "first"}


@pytest.mark.anyio
async def test_an_answer_that_its_client_left_is_not_kept(
    start: Callable[..., Any], model: Path, folder: Path
) -> None:
    app = start(record=True)
    long = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection = Connection(app, COMPLETIONS, long)
    await connection.until(b'"text"')
    connection.leave()
    await connection.task
    short = {"prompt": "world", "max_tokens": 4, "ignore_eos": True}
    await Connection(app, COMPLETIONS, short).answer()
    (sample,) = kept(folder, model, 1)
    assert len(sample) == 4


@pytest.mark.anyio
async def test_off_by_default(start: Callable[..., Any], folder: Path) -> None:
    app = start()
    await Connection(app, COMPLETIONS, {"prompt": "hello", "max_tokens": 4}).answer()
    assert app.state.server.recorder is None and not folder.exists()


# ---- which answers


@pytest.mark.anyio
async def test_each_choice_of_each_prompt(
    make: Callable[..., Server], tokenizer: Any, model_dir: Path, folder: Path
) -> None:
    s = make(says=("hello", "world"))
    await s.complete(prompt=["one", "two"], n=2, max_tokens=50)
    found = {
        (tuple(s.tokens[: s.first]), tuple(s.tokens[s.first :])) for s in kept(folder, model_dir, 4)
    }
    assert found == {
        (tuple(encode(tokenizer, prompt)), (*encode(tokenizer, said, special=False), END))
        for prompt in ("one", "two")
        for said in ("hello", "world")
    }


@pytest.mark.anyio
async def test_up_to_a_stop_string_and_no_further(
    make: Callable[..., Server], tokenizer: Any, model_dir: Path, folder: Path
) -> None:
    s = make(says=("hello world and more",), group=64)
    shown = (await s.complete(stop=["world"])).json
    (sample,) = kept(folder, model_dir, 1)
    assert tokenizer.decode(sample.tokens[sample.first :]) == shown["choices"][0]["text"] + "world"


@pytest.mark.anyio
async def test_of_a_failed_request_only_what_had_finished(
    make: Callable[..., Server], model_dir: Path, folder: Path
) -> None:
    s = make(holds=True)
    connection = Connection(s.app, COMPLETIONS, {"prompt": "hello", "n": 2})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello", finish="stop", index=1)
    s.engine.push("wor", index=0)
    s.engine.push(finish="error", error="injected", index=0)
    assert (await connection.answer()).status == 500
    (sample,) = kept(folder, model_dir, 1)
    assert sample.tokens[-1] == END


@pytest.mark.anyio
async def test_the_same_answer_is_learned_once(
    make: Callable[..., Server], model_dir: Path, folder: Path
) -> None:
    s = make()
    for prompt in ("hello", "hello", "world"):
        await s.complete(prompt=prompt)
    kept(folder, model_dir, 2)


# ---- how much


def test_the_end_of_a_prompt_and_the_beginning_of_an_answer(folder: Path, model_dir: Path) -> None:
    recorder = Recorder(folder, {"m": model_dir})
    for prompt, answer in ((10_000, 96), (5, LENGTH), (PROMPT, 3), (5, 6)):
        recorder.add("m", range(prompt), [300] * answer)
    found = kept(folder, model_dir, 4)
    assert [len(sample.tokens) for sample in found] == [PROMPT + 96, LENGTH, PROMPT + 3, 11]
    assert [sample.first for sample in found] == [PROMPT, 5, PROMPT, 5]
    assert found[0].tokens[:2] == [10_000 - PROMPT, 10_001 - PROMPT]


def test_the_oldest_make_room(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 3000)
    recorder = Recorder(folder, {"m": model_dir})
    line = len(json.dumps(["0" * 16, {"tokens": [300] * 100, "first": 50}]))
    for i in range(200):
        recorder.add("m", [300] * 50, [i] * 50)
        until(lambda i=i: any(s.tokens[-1] == i for s in recorded(folder, model_dir)))
        with lock(folder / "lock"):  # the writer may be renaming a file
            assert size(folder) < 2 * (3000 + line)
            assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.glob("*.jsonl"))
    last = [sample.tokens[-1] for sample in recorded(folder, model_dir)]
    assert last == list(range(last[0], 200)) and size(folder) > 3000


def test_models_have_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "a/model", tmp_path / "b/model"
    first = Recorder(folder, {"model": one, "other/model": two})
    second = Recorder(folder, {"renamed": one})
    first.add("model", [64], [65])
    first.add("other/model", [64], [66])
    second.add("renamed", [64], [67])
    assert {sample.tokens[1] for sample in kept(folder, one, 2)} == {65, 67}
    assert [sample.tokens[1] for sample in kept(folder, two, 1)] == [66]


# ---- what goes wrong


@pytest.mark.anyio
async def test_without_a_directory_it_stops_and_serving_goes_on(
    make: Callable[..., Server], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("in the way")
    s = make()
    with caplog.at_level(logging.WARNING, "mlxspec"):
        for _ in range(3):
            assert (await s.complete()).status == 200
        until(lambda: "no longer recorded" in caplog.text)
    assert caplog.text.count("no longer recorded") == 1 and str(folder) in caplog.text
    assert folder.read_text() == "in the way"


@pytest.mark.skipif(not FULL.exists(), reason="has no device that is always full")
def test_a_full_disk(folder: Path, model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    path = folder / f"{storage_name('m', model_dir)}.jsonl"
    path.symlink_to(FULL)
    recorder = Recorder(folder, {"m": model_dir})
    with caplog.at_level(logging.WARNING, "mlxspec"):
        for i in range(3):
            recorder.add("m", [64], [i] * 9000)
        until(lambda: "No space left" in caplog.text)
        path.unlink()
        for i in range(WAITING + 9):  # none of them waits
            recorder.add("m", [64], [i])
            time.sleep(1e-4)
    assert len(caplog.records) == 1 and not path.exists()


def test_a_disk_that_is_too_slow(
    folder: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it, and what waits to be written has a bound."""
    recorder = Recorder(folder, {"m": model_dir})
    with caplog.at_level(logging.WARNING, "mlxspec"), lock(folder / "lock"):
        for i in range(WAITING + 11):
            recorder.add("m", [64], [i])
    assert 10 <= caplog.text.count("too slow") <= 11  # one may be in the writer's hands
    until(lambda: len(recorded(folder, model_dir)) >= WAITING)
    recorder.add("m", [64], [0, 0])
    until(lambda: any(len(sample) == 2 for sample in recorded(folder, model_dir)))
