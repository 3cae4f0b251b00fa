"""The prefix cache on disk where a head comes and goes: what one start saves, the next one can
use, or computes again."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.engine.engine import Engine
from tests.support import disk_cache, tiny
from tests.support.engine_with_head import BLOCK, SOME, head_of, some, start
from tests.support.expected_drafts import check, few
from tests.support.parameter_rows import fewer

PROMPT = some(5 * BLOCK + 3)
WITH_KV = SOME[:4]  # those whose head has K/V of its own
OTHER = some(5 * BLOCK + 3, 2)
ANSWER = 12


def answers(e: Engine, root: Path, *prompts: list[int]) -> tuple[list[list[int]], list[bool], Any]:
    """Of an engine with the directory `root`: its answers, whether what it has of each prompt was
    cached, and what the disk did."""
    disk = disk_cache.attach(e, root)
    made, known = [], []
    for prompt in prompts:
        e.add(few("r", prompt, ANSWER))
        outputs = disk_cache.finish(e, disk)
        made.append(tiny.tokens(outputs, "r"))
        known.append(outputs[0].cached >= 4 * BLOCK)
    assert disk.close(5) and e.offloader and not e.offloader.broken
    return made, known, disk.stats


def fail_after(e: Engine, passes: int) -> None:
    """Let the head fail in a pass to come."""
    head, done = head_of(e).head, []
    module = head.module

    def fails(*args: Any) -> mx.array:
        assert len(done) < passes, "broken"
        done.append(args)
        return module(*args)

    head.module = fails


@pytest.mark.parametrize("kind, layout", fewer(WITH_KV, 2, 1))
@pytest.mark.parametrize("passes", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_head_that_fails_spoils_nothing(
    kind: str, layout: Any, passes: int, tmp_path: Path
) -> None:
    """In a prompt, or behind it: what was saved before is used by later starts, and nothing is
    saved without the head's part."""
    e, _ = start(kind, layout)
    disk = disk_cache.attach(e, tmp_path)
    want: list[list[int]] = []
    for prompt in (OTHER, PROMPT):
        if want:
            fail_after(e, passes)
        e.add(few("r", prompt, ANSWER))
        want.append(tiny.tokens(disk_cache.finish(e, disk), "r"))
    assert not e.proposer.drafters and disk.close(5)  # type: ignore[attr-defined]
    for known in ([True, False], [True, True]):
        e, drafted = start(kind, layout)
        got, found, stats = answers(e, tmp_path, OTHER, PROMPT)
        assert (got, found) == (want, known)
        assert stats["disk_runs_damaged"] == 0 and check(kind, drafted) > 5


@pytest.mark.parametrize("kind, layout", fewer(WITH_KV, 2))
def test_runs_without_a_heads_part_are_damaged(kind: str, layout: Any, tmp_path: Path) -> None:
    """They are discarded, computed again and replaced: a file with each prompt that reads it."""
    plain = tiny.engine(tiny.model(kind), layout=layout, block=BLOCK, blocks=128, budget=16)
    want, _, stats = answers(plain, tmp_path, PROMPT)
    assert stats["disk_written_bytes"] > 0
    files = 2 if plain.runner.states.layers else 1  # keys and values; a state
    for damaged in [*(True for _ in range(files)), False]:
        e, drafted = start(kind, layout)
        got, known, stats = answers(e, tmp_path, PROMPT)
        assert (got, known) == (want, [not damaged])
        assert (stats["disk_runs_damaged"] > 0) == damaged and check(kind, drafted) > 5
