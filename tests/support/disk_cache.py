"""The prompt cache on disk under a tiny engine, and how to wait for it."""

from pathlib import Path

from mlxspec.cache.disk import DiskCache
from mlxspec.cache.offload import KVOffloader
from mlxspec.engine.engine import Engine
from mlxspec.types import Output
from tests.support import tiny


def attach(e: Engine, root: Path) -> DiskCache:
    """Give the engine a directory that outlives it; its pools are made first, as warm-up does."""
    e.add(tiny.request("warm", range(300, 303), 2))
    tiny.run(e)
    e.reset()
    disk = DiskCache(root, "c0ffee00", 1 << 28)
    e.offloader = e.scheduler.offloader = KVOffloader(disk, e.scheduler.kv, e.runner)
    return disk


def finish(e: Engine, disk: DiskCache) -> list[Output]:
    """Run until all is computed and saved, waiting for the disk after each step."""
    outputs: list[Output] = []
    while e.active:
        outputs += e.step()
        e.check()
        disk._reader.submit(int).result(5)
        assert disk.flush(5)
    assert disk.flush(5)
    return outputs
