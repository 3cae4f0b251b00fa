"""Several processes that share a model give the tokens of one, by ==, whatever the batch and the
drafter."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.model import parallel
from mlxspec.model.parallel import WORDS, ProcessGroup, join
from mlxspec.types import UserError
from tests.support.checkpoints import save
from tests.support.drafters import OTHER_HEADS
from tests.support.parameter_rows import in_turn, only
from tests.support.ranks import Group
from tests.tiny_tokenizer import save_tokenizer

KINDS = [("llama", "rows"), ("qwen3", "rows"), ("qwen3_moe", "rows"), ("gpt_oss", "rows")]
KINDS += [("qwen3_5", "rect")]
NAMES = [kind for kind, _ in KINDS]
ROWS = [kind for kind in NAMES if kind != "qwen3_5"]
DRAFTERS = ["plain", "liar", "chain"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=SLOW)])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    ranks = Group(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", only(NAMES, 0, 3, 4))
def test_logits(group: Group, kind: str) -> None:
    """The same bits on each rank, next to those of the whole model; each has its part of the
    weights."""
    told = group.call("logits", kind)
    assert len(set(told["checksums"])) == 1
    assert told["off"] < 1e-3
    assert max(told["bytes"]) < told["whole"]


@pytest.mark.parametrize(
    "kind, layout, name, budget, temperature",
    in_turn(KINDS, DRAFTERS, [7, 64], [0.0, 0.8], every=9),
)
def test_batch(
    group: Group, kind: str, layout: str, name: str, budget: int, temperature: float
) -> None:
    group.call("test_batch", kind, layout, False, name, budget, temperature)


@pytest.mark.parametrize("kind, name, temperature", in_turn(ROWS, DRAFTERS, [0.0, 0.8], every=9))
@pytest.mark.slow
def test_hits(group: Group, kind: str, name: str, temperature: float) -> None:
    group.call("test_hits", kind, name, temperature)


@pytest.mark.parametrize("kind, name, temperature", in_turn(ROWS, DRAFTERS, [0.0, 0.8], every=9))
def test_preemption(group: Group, kind: str, name: str, temperature: float) -> None:
    group.call("test_preemption", kind, name, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_recurrent_layers(group: Group, name: str) -> None:
    """Snapshots of states on all ranks: hits from them, states cut at a stop, preemption."""
    group.call("test_more_hits", "qwen3_5", "rect", True, name)
    group.call("test_more_kinds", "qwen3_5", "rect", True, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["told", *OTHER_HEADS])
def test_heads(group: Group, name: str) -> None:
    """A head is on rank 0 alone; its drafts reach the others on the device."""
    group.call("test_batch", "qwen3", "rows", False, name, 7, 0.8)


@pytest.mark.parametrize("kind, layout", only([KINDS[0], KINDS[-1]], 0))
def test_overlap(group: Group, kind: str, layout: str) -> None:
    """A step is told before the one in front of it is read, in one message of fixed size."""
    told = group.call("overlap", kind, layout, 4, 24)
    assert told["overlapping"] >= 20
    assert told["messages"] <= told["steps"] + 2
    assert told["bytes"] == told["messages"] * 4 * WORDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, status", [("killed", -9), ("unreadable", 3), ("killed at layouts", -9)]
)
def test_a_rank_that_is_lost_while_loading(tmp_path: Path, how: str, status: int) -> None:
    """All end at once: the others wait for the arrays that it reads, or its part of sums."""
    path = save_tokenizer(tmp_path / "model")
    save(path, "llama")
    ranks = Group(2)
    told = ranks.call("load_and_fail", str(path), str(tmp_path), how)
    assert told.startswith("lost: rank 1 is gone")
    assert ranks.processes[1].wait(20) == status
    ranks.processes[0].kill()  # a last message would wait for ever
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, why",
    [
        ("no memory", "refused: it needs more"),
        ("another model", "refused: rank 1: .* m is none of"),
    ],
)
def test_a_model_that_one_rank_cannot_load(tmp_path: Path, how: str, why: str) -> None:
    """It is refused, and all go on."""
    path = save_tokenizer(tmp_path / "model")
    save(path, "llama")
    ranks = Group(2)
    assert re.match(why, ranks.call("load_and_fail", str(path), str(tmp_path), how))
    assert len(set(ranks.call("logits", "llama")["checksums"])) == 1
    ranks.close()
    assert [each.returncode for each in ranks.processes] == [0, 0]


def test_a_rank_that_is_silent_while_loading_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before its first message: it may download the model for hours."""
    monkeypatch.setattr(parallel, "LOAD_S", 0.2)
    monkeypatch.setattr(parallel, "WATCH_S", 0.01)
    monkeypatch.setattr(parallel, "EXIT_S", 0.0)
    ranks = ProcessGroup(mx.distributed.init())  # of one process
    lost: list[parallel.RankLost] = []
    ranks.watch(lost.append)
    ranks.call("model", "load")
    ranks.flush(math.inf)
    time.sleep(0.3)
    assert not lost
    ranks.gather("facts")
    time.sleep(0.5)
    assert list(map(str, lost)) == ["rank 0 is gone: no message for 0 s"]


def test_a_rank_that_ends_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_RANK", "MLX_HOSTFILE"):  # are put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=r"cannot be connected: rank [12] has ended with status 2"):
        join(3, ["--no-such-flag"])
