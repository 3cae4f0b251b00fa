"""A head is trained: it learns, goes on where it was stopped, and replaces another as a whole."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.speculate.heads.files import find_head
from mlxspec.training.eagle import new_head
from mlxspec.training.run import drop_others, install, run, save_head
from mlxspec.training.samples import Sample
from mlxspec.training.trainer import LENGTH, ROWS, Trainer, batches, vocabulary_of, windows
from tests.heads import kinds
from tests.support.parameter_rows import only
from tests.training import pair

SAMPLES = [
    Sample(prompt + answer, len(prompt))
    for prompt, answer in zip(
        kinds.reference("eagle3")["prompts"], kinds.reference("eagle3")["greedy"], strict=True
    )
]


def nothing() -> None:
    """In the place of waiting for a server."""


def start(epochs: int = 2) -> tuple[Trainer, list[list[Sample]]]:
    own = pair.target()
    mx.random.seed(0)
    plan = batches(SAMPLES[1:], epochs)
    return Trainer(own, new_head(own, pair.VOCABULARY), len(plan)), plan


def trained(state: Path, epochs: int = 2, wait: Callable[[], None] = nothing) -> Trainer:
    """After all steps, or as many as `wait` lets it make."""
    trainer, plan = start(epochs)
    run(trainer, plan, SAMPLES[:1], state, {}, wait)
    assert trainer.done == len(plan)
    return trainer


def stop_after(steps: int) -> Callable[[], None]:
    left = iter(range(steps))

    def wait() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return wait


def assert_equal(one: Trainer, other: Trainer) -> None:
    """Equal weights, to the last bit."""
    found, expected = tree_flatten(one.weights), tree_flatten(other.weights)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, x), (_, y) in zip(found, expected, strict=True):
        assert mx.array_equal(x, y), name


@pytest.mark.slow
def test_a_training_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole.safetensors", epochs=3)
    assert whole.done >= 3
    for _ in range(whole.done - 1):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "stopped.safetensors", epochs=3, wait=stop_after(1))
    assert_equal(trained(tmp_path / "stopped.safetensors", epochs=3), whole)


@pytest.mark.slow
def test_a_step_that_was_made_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while MLX computes."""
    whole = trained(tmp_path / "whole.safetensors")
    trainer, plan = start()
    evaluate = mx.eval

    def interrupted(*arrays: object) -> None:
        evaluate(*arrays)
        if trainer.done == 1:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(mx, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(trainer, plan, SAMPLES[:1], tmp_path / "stopped.safetensors", {}, nothing)
    assert_equal(trained(tmp_path / "stopped.safetensors"), whole)


@pytest.mark.slow
def test_a_state_of_another_training_is_not_used(tmp_path: Path) -> None:
    """Of other samples, or damaged."""
    state = tmp_path / "state.safetensors"
    trained(state)
    fresh = trained(state, epochs=1)
    assert_equal(fresh, trained(tmp_path / "other.safetensors", epochs=1))
    state.write_bytes(state.read_bytes()[:-99])
    assert_equal(trained(state, epochs=1), fresh)


def test_a_trained_head_is_read_as_a_published_one(tmp_path: Path) -> None:
    """By the tensors of its directory; what it drafts is what was trained."""
    trainer = trained(tmp_path / "state.safetensors")
    save_head(trainer, new_head(pair.target(), pair.VOCABULARY), tmp_path / "head", {"tokens": 1})
    found = find_head(tmp_path / "head")
    assert found.standalone and found.config["speculators_model_type"] == "eagle3"
    own = pair.target()
    again = Trainer(own, found, 1)
    waits = []
    expected = trainer.measure(SAMPLES[:1], lambda: waits.append(1))
    assert waits, "a server with a request comes first"
    assert again.measure(SAMPLES[:1]) == pytest.approx(expected, abs=0.03)  # bfloat16
    assert json.loads((tmp_path / "head/training.json").read_bytes())["tokens"] == 1


@pytest.mark.parametrize("linked", [False, True])
def test_a_head_is_replaced_as_a_whole(linked: bool, tmp_path: Path) -> None:
    """Also where the cache directory lies behind a link."""
    if linked:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        tmp_path = tmp_path / "link"
    place = tmp_path / "model-1234"
    for number in range(2):
        made = tmp_path / f"model-1234.{number}"
        made.mkdir()
        (made / "config.json").write_text(str(number))
        install(made, place)
        drop_others(place)
        assert (place / "config.json").read_text() == str(number)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model-1234", made.name]
    (tmp_path / "model-1234.9").mkdir()  # of a training that was killed
    drop_others(place)
    assert not (tmp_path / "model-1234.9").exists()
    assert (place / "config.json").read_text() == "1"


WRITER = """
import resource, sys
from pathlib import Path
import mlx.core as mx
from mlxspec.training.eagle import new_head
from mlxspec.training.run import write_tensors
path, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
n = 0
while True:
    n += 1
    write_tensors(path, {"w": mx.full((1 << 20,), n, mx.float32)}, {"n": str(n)})
    print(n, flush=True)
"""


def writer(path: Path, limit: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("after", only([0.0, 0.003, 0.006, 0.009], 1))
def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_file(
    after: float, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    with writer(path, 0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after)
        os.kill(process.pid, signal.SIGKILL)
    tensors, about = mx.load(str(path), return_metadata=True)
    assert (tensors["w"] == int(about["n"])).all()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"old")
    with writer(path, 1 << 20) as process:
        _, said = process.communicate(timeout=100)
    assert "OSError" in said and "state.safetensors" in said
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_windows_hold_what_is_to_be_learned() -> None:
    """Of a long prompt the end, of a long answer all."""
    tokens = list(range(4 * LENGTH))
    for first in (1, 300, LENGTH, 3 * LENGTH + 7, 4 * LENGTH - 40):
        found = windows([Sample(tokens, first)])
        learned = [t for window in found for t in window.tokens[window.first :]]
        assert learned == tokens[first:]
        assert all(len(window.tokens) <= LENGTH for window in found)
        assert found[0].tokens[0] <= max(0, first - LENGTH // 4)


def test_batches_hold_every_sample_once(tmp_path: Path) -> None:
    samples = [Sample(list(range(2 + 7 * n % 500)), 1) for n in range(300)]
    both = batches(samples, 2)
    epochs = both[: len(both) // 2], both[len(both) // 2 :]
    for made in epochs:
        assert sorted(len(s.tokens) for b in made for s in b) == sorted(
            len(s.tokens) for s in samples
        )
        assert all(len(b) * max(len(s.tokens) for s in b) <= ROWS for b in made if len(b) > 1)
    assert epochs[0] == batches(samples) != epochs[1]


def test_the_drafted_tokens_are_the_most_frequent_ones() -> None:
    samples = [Sample([9, 9, 9, 5, 5, 7], 2), Sample([9, 3, 3, 3], 1)]
    assert vocabulary_of(samples, 3, 10) == [3, 5, 7]
    assert vocabulary_of(samples, 6, 10) == [0, 1, 3, 5, 7, 9]
    assert vocabulary_of(samples, 99, 10) == list(range(10))
