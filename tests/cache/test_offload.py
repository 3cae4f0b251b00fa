"""The prompt cache on disk under an engine: a second engine on the same directory continues where
the first one stopped."""

import functools
import shutil
import threading
from io import BytesIO
from pathlib import Path

import pytest

from mlxspec.cache import offload
from mlxspec.cache.disk import DiskCache, read_label
from mlxspec.cache.offload import MAX_CHAINS, MIN_GAIN
from mlxspec.engine.engine import Engine
from mlxspec.model.runner import Runner
from tests.support import tiny
from tests.support.disk_cache import attach, finish
from tests.support.parameter_rows import diagonal, only

BLOCK = 8
KINDS = [
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "nemotron_h",
    "deepseek_v3",
    "llama:8",
    "gpt_oss:4",
]
LAYOUTS = {"qwen3_next": "rect", "nemotron_h": "rect", "deepseek_v3": "gather"}
PROMPT = [i * 37 % tiny.VOCAB for i in range(90)]
READ = 88  # tokens of it in full blocks: the most that can be found of it


def start(root: Path, kind: str, **kw) -> tuple[Engine, DiskCache]:
    kw |= dict(layout=LAYOUTS.get(kind, "rows"), block=BLOCK, kv_bits=tiny.kv_bits(kind))
    e = tiny.engine(tiny.model(kind), **kw)
    return e, attach(e, root)


def first(root: Path, kind: str, **kw) -> list[int]:
    """One answer, all of it saved."""
    e, disk = start(root, kind, **kw)
    e.add(tiny.request("first", PROMPT, 30, temperature=0.8, seed=3))
    answer = tiny.tokens(finish(e, disk), "first")
    assert disk.close(5)
    return answer


@functools.cache
def plain(kind: str) -> tiny.Plain:
    return tiny.Plain(tiny.model(kind), tiny.kv_bits(kind))


@pytest.mark.parametrize("kind", only(KINDS, 3, 7))
def test_a_conversation_continues_after_a_restart(tmp_path: Path, kind: str) -> None:
    answer = first(tmp_path, kind)
    assert answer == plain(kind)(PROMPT, 30, 0.8, 3)
    turn = [*PROMPT, *answer, 5, 6, 7]
    e, disk = start(tmp_path, kind)
    e.add(tiny.request("second", turn, 20, temperature=0.8, seed=4))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "second") == plain(kind)(turn, 20, 0.8, 4)
    saved = (
        96 if e.runner.states.layers else (len(PROMPT) + 29) // BLOCK * BLOCK
    )  # every third block a state
    assert outputs[-1].cached == saved and e.counters["prompt_tokens"] == len(turn) - saved
    assert not e.offloader._restores
    disk.close(5)


@pytest.mark.parametrize("kind, steps", diagonal(["qwen3", "gemma3_text", "qwen3_next"], [40, 5]))
def test_what_an_abort_ends_is_kept(tmp_path: Path, kind: str, steps: int) -> None:
    """While its prompt is read, and in the middle of its answer, whose last step is in flight; as a
    stop string or a client that leaves ends it."""
    e, disk = start(tmp_path, kind)
    e.add(tiny.request("gone", PROMPT, 60, temperature=0.8, seed=3))
    outputs = [output for _ in range(steps) for output in e.step()]
    [seq] = e.scheduler.running
    whole = len(seq.block_hashes) * BLOCK
    e.abort("gone")
    finish(e, disk)
    assert disk.close(5)
    said = [*PROMPT, *tiny.tokens(outputs, "gone")]
    assert 0 < whole < len(PROMPT) if steps == 5 else whole > READ + 2 * BLOCK
    e, disk = start(tmp_path, kind)
    turn = [*said, 5, 6, 7]
    e.add(tiny.request("next", turn, 20, temperature=0.8, seed=4))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "next") == plain(kind)(turn, 20, 0.8, 4)
    every = tiny.STRIDE * BLOCK if e.runner.states.layers else BLOCK
    assert outputs[-1].cached == whole // every * every
    disk.close(5)


@pytest.mark.parametrize("kind, length", diagonal(KINDS, [READ, READ + 1, READ - 1], every=2))
def test_the_same_prompt_again(tmp_path: Path, kind: str, length: int) -> None:
    """Around a multiple of the block: as much as leaves a token to compute."""
    for cached in (0, (length - 1) // BLOCK * BLOCK):
        e, disk = start(tmp_path, kind)
        e.add(tiny.request("r", PROMPT[:length], 12))
        outputs = finish(e, disk)
        assert tiny.tokens(outputs, "r") == plain(kind)(PROMPT[:length], 12)
        assert outputs[-1].cached == cached
        disk.close(5)


@pytest.mark.parametrize("kind", only(["qwen3", "gemma3_text", "qwen3_next"], 0, 1))
def test_a_damaged_file_is_a_miss(tmp_path: Path, kind: str) -> None:
    """Each file in turn is lost: whatever is left of the chain is used as far as that is whole."""
    first(tmp_path, kind)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) > 1
    damaged: list[bool] = []
    for i, file in enumerate(files):
        copy = tmp_path.parent / f"{tmp_path.name}-{i}"
        shutil.copytree(tmp_path, copy)
        (copy / file.relative_to(tmp_path)).write_bytes(file.read_bytes()[:-1] + b"\xff\xff")
        e, disk = start(copy, kind)
        e.add(tiny.request("again", PROMPT, 12))
        outputs = finish(e, disk)
        assert tiny.tokens(outputs, "again") == plain(kind)(PROMPT, 12)
        disk.close(5)
        damaged.append(disk.stats["disk_runs_damaged"] > 0)
        assert outputs[-1].cached <= READ
    assert any(damaged)  # some hold what the prompt does not need


def test_only_a_prompt_that_gains_waits_for_the_disk(tmp_path: Path) -> None:
    """A neighbour decodes while a prompt waits for the disk; a short prompt does not ask at all."""
    first(tmp_path, "qwen3")
    e, disk = start(tmp_path, "qwen3")
    e.add(tiny.request("short", PROMPT[: MIN_GAIN * BLOCK - 1], 40))
    e.step()
    assert not e.offloader._restores
    stuck = threading.Event()
    disk._reader.submit(stuck.wait, 10)
    e.add(tiny.request("long", PROMPT, 12))
    e.step()
    assert e.offloader._restores and [s.request.id for s in e.scheduler.running] == ["short"]
    stuck.set()
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "long") == plain("qwen3")(PROMPT, 12)
    assert tiny.tokens(outputs, "short") == plain("qwen3")(PROMPT[: MIN_GAIN * BLOCK - 1], 40)
    disk.close(5)


def test_a_restore_does_not_evict_a_copy_source(tmp_path: Path) -> None:
    """A second choice copies its partial block from a free one, while a prompt lands where blocks
    are few."""
    first(tmp_path, "qwen3")
    for blocks in range(17, 24):
        e, disk = start(tmp_path, "qwen3", blocks=blocks, budget=64)
        ask = tiny.request("twice", PROMPT[5:42], 3, choices=2)
        e.add(tiny.request("long", PROMPT, 3))
        e.add(ask)
        outputs = finish(e, disk)
        for i in range(2):
            assert tiny.tokens(outputs, "twice", i) == plain("qwen3")(ask.prompt, 3, index=i), (
                blocks
            )
        assert tiny.tokens(outputs, "long") == plain("qwen3")(PROMPT, 3)
        disk.close(5)


def test_a_disk_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(tmp_path, "qwen3")
    monkeypatch.setattr(offload, "MAX_WAIT_S", 0.05)
    e, disk = start(tmp_path, "qwen3")
    stuck = threading.Event()
    disk._read = lambda path: stuck.wait(10) and None  # type: ignore[method-assign]
    e.add(tiny.request("r", PROMPT, 12))
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "r") == plain("qwen3")(PROMPT, 12) and outputs[-1].cached == 0
    stuck.set()
    disk.close(5)


@pytest.mark.parametrize("verb", ["export", "host", "place"])
def test_a_failure_switches_the_disk_off_only(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first(tmp_path, "qwen3")
    monkeypatch.setattr(Runner, verb, lambda *rest: [][0])
    e, disk = start(tmp_path, "qwen3")
    e.add(tiny.request("r", [*PROMPT, 3, 4, *range(40)], 12))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "r") == plain("qwen3")([*PROMPT, 3, 4, *range(40)], 12)
    assert e.offloader.broken and "it is not used until the next start" in caplog.text
    e.check()
    disk.close(5)


def test_a_prompt_that_waits_for_blocks_is_restored_later(tmp_path: Path) -> None:
    first(tmp_path, "qwen3")
    e, disk = start(tmp_path, "qwen3", blocks=20)
    e.add(tiny.request("full", range(100, 200), 40))
    for _ in range(12):
        e.step()
    e.add(tiny.request("long", PROMPT, 12))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "long") == plain("qwen3")(PROMPT, 12)
    assert [o for o in outputs if o.request == "long"][-1].cached == READ
    disk.close(5)


def test_an_abort_cancels_the_restore(tmp_path: Path) -> None:
    first(tmp_path, "qwen3")
    e, disk = start(tmp_path, "qwen3")
    stuck = threading.Event()
    disk._reader.submit(stuck.wait, 10)
    e.add(tiny.request("gone", PROMPT, 12))
    e.step()
    assert e.offloader._restores
    e.abort("gone")
    stuck.set()
    assert not e.offloader._restores and not e.busy
    finish(e, disk)
    e.check()
    disk.close(5)


def test_a_restore_without_free_blocks_is_computed(tmp_path: Path) -> None:
    """A pool that others fill: what cannot be entered is computed when its turn comes."""
    first(tmp_path, "qwen3")
    e, disk = start(tmp_path, "qwen3", blocks=20)
    e.add(tiny.request("full", range(60), 60))
    for _ in range(40):
        e.step()
    e.add(tiny.request("long", PROMPT, 12))
    outputs = finish(e, disk)
    assert tiny.tokens(outputs, "long") == plain("qwen3")(PROMPT, 12)
    disk.close(5)


def test_files_of_another_model_are_misses(tmp_path: Path) -> None:
    """The fingerprint keeps them apart; if it failed to, the disk would be switched off."""
    first(tmp_path, "qwen3")
    for kind in ("gemma3_text", "deepseek_v3"):
        e, disk = start(tmp_path, kind)
        e.add(tiny.request("r", PROMPT, 12))
        outputs = finish(e, disk)
        assert tiny.tokens(outputs, "r") == plain(kind)(PROMPT, 12) and outputs[-1].cached == 0
        disk.close(5)


def test_a_window_is_saved_where_a_chain_ends(tmp_path: Path) -> None:
    """Not for every token that it passed: two chain ends of a window of 12 tokens, 3 or 4 blocks
    each."""
    first(tmp_path, "gemma3_text")
    files = tmp_path.rglob("*.safetensors")
    keys = [key for file in files for key in read_label(BytesIO(file.read_bytes())).run_keys()]
    whole = (len(PROMPT) + 29) // BLOCK
    assert whole < len(keys) <= whole + 8


def test_close_saves_what_waits(tmp_path: Path) -> None:
    e, disk = start(tmp_path, "qwen3")
    e.add(tiny.request("r", PROMPT, 12))
    while e.scheduler.waiting or e.scheduler.running:
        e.step()
    e.close(5)
    e, disk = start(tmp_path, "qwen3")
    e.add(tiny.request("r", PROMPT, 12))
    assert finish(e, disk)[-1].cached == READ
    disk.close(5)


def test_waiting_chains_are_bounded(tmp_path: Path) -> None:
    e, disk = start(tmp_path, "qwen3")
    full = [tiny.request(f"r{i}", [i, *range(20)], 2) for i in range(MAX_CHAINS + 9)]
    e.offloader = None
    for r in full:
        e.add(r)
    while e.busy:
        e.step()
    assert len(e.scheduler.offloader._saves) == MAX_CHAINS
    disk.close(5)


def test_one_file_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "RUN_BLOCKS", 1)
    first(tmp_path, "qwen3")
    e, disk = start(tmp_path, "qwen3")
    stuck = threading.Event()
    disk._reader.submit(stuck.wait, 10)
    reads, read = [], disk.read
    monkeypatch.setattr(disk, "read", lambda path: reads.append(read(path)) or reads[-1])
    for i in range(2):
        e.add(tiny.request(f"r{i}", PROMPT, 12))
    for _ in range(3):
        e.step()
        assert len(reads) == 1
    stuck.set()
    outputs = finish(e, disk)
    for i in range(2):
        assert tiny.tokens(outputs, f"r{i}") == plain("qwen3")(PROMPT, 12)
    assert outputs[-1].cached >= READ
    disk.close(5)
