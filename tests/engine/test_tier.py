"""What outlives the process: a second engine on the same directory goes on where the first one stopped."""

from pathlib import Path

import pytest

from mlxspec.engine.disk import Disk
from mlxspec.engine.engine import Engine
from mlxspec.engine.tier import Tier
from mlxspec.model.transfer import Transfer
from tests import tiny

BLOCK = 8
KINDS = ["qwen3", "gemma3_text", "gpt_oss"]
PROMPT = [i * 37 % tiny.VOCAB for i in range(90)]


def start(root: Path, kind: str, **kw) -> tuple[Engine, Disk]:
    e = tiny.engine(tiny.model(kind), block=BLOCK, **kw)
    e.add(tiny.request("warm", range(300, 303), 2))
    tiny.run(e)
    e.forget()
    disk = Disk(root, "c0ffee00", 1 << 28)
    e.tier = e.scheduler.tier = Tier(disk, e.scheduler.groups, Transfer(e.runner))
    return e, disk


def finish(e: Engine, disk: Disk):
    """Run until all is computed and saved, waiting for the disk where the engine does."""
    outputs = []
    while e.busy:
        outputs += e.step()
        e.check()
        if e.rests:
            assert all(land.fetch.wait(5) for land in e.tier._landings.values() if land.fetch)
            assert disk.flush(5)
    assert disk.flush(5)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_goes_on(tmp_path: Path, kind: str) -> None:
    plain = tiny.Plain(tiny.model(kind))
    e, disk = start(tmp_path, kind)
    e.add(tiny.request("first", PROMPT, 30, temperature=0.8, seed=3))
    answer = tiny.tokens(finish(e, disk), "first")
    assert answer == plain(PROMPT, 30, 0.8, 3)
    disk.close(5)

    turn = [*PROMPT, *answer, 5, 6, 7]
    e, disk = start(tmp_path, kind)
    e.add(tiny.request("second", turn, 20, temperature=0.8, seed=4))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "second") == plain(turn, 20, 0.8, 4)
    saved = (len(PROMPT) + 29) // BLOCK * BLOCK
    assert outputs[-1].cached == saved and e.counters["prompt"] == len(turn) - saved
    disk.close(5)
