"""The promise of tests/test_exact.py with images in the prompts: tokens and log-probabilities equal
plain decoding, alone and a row at a time, by `==`, where MLX's kernels depend on the number of rows.

Not for images whose rows see those after them, which docs/exact.md leaves out.
"""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.load.exact import record
from mlxspec.model import invariant, recurrent
from mlxspec.model.invariant import Invariance, find_invariance
from mlxspec.model.runner import Runner
from mlxspec.types import Request
from tests import test_lossless_images as images
from tests.support import disk_cache, dispatch, tiny, vision
from tests.support.parameter_rows import only
from tests.test_exact import BLOCK, CHUNK, CPU, NUMBERS, Told, in_numbers, on, told

KINDS = [("mistral3", "rows"), ("qwen3_vl", "rows"), ("gemma4", "rows"), ("qwen3_5", "rect")]
KINDS += [("pixtral", "rows"), ("qwen3_vl_moe", "rows"), ("mistral3:4", "rows")]
KINDS += [("qwen3_5:8", "rect")]
CHIPS = [*dispatch.CHIPS, CPU]
DRAFTERS = ["plain", "liar", "lookup", "mtp"]
TURNS = [(1, 0.0), (7, 0.8), (64, 0.8)]  # budgets and temperatures
# MLX's experts on a CPU are fp32 or quantized.
RUNS = [
    (*kind, chip, NUMBERS[2 if (kind[0], chip) == ("qwen3_vl_moe", CPU) else 1 + n % 3])
    for i, kind in enumerate(KINDS)
    for n, chip in enumerate(CHIPS, i)
]
ROWS = [
    (*run, name, *TURNS[(i + n) % len(TURNS)])
    for i, run in enumerate(RUNS)
    for n, name in enumerate(DRAFTERS)
    if name != "mtp" or run[0] in ("qwen3_5", "qwen3_vl")  # whose layers it takes
]
QUICK = ROWS.index(("qwen3_vl", "rows", "M1", "affine", "lookup", 1, 0.0))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)


@cache
def seeing(kind: str, numbers: str) -> vision.Seeing:
    with tempfile.TemporaryDirectory() as folder:
        path = vision.save(Path(folder), kind)
        return vision.open_model(path, lambda model: in_numbers(model, numbers))


@cache
def found(kind: str, numbers: str, chip: str, layout: str) -> Invariance:
    model = seeing(kind, numbers).model
    with on(chip):
        runner = Runner(model, layout, BLOCK, 32, kv_bits=tiny.kv_bits(kind))
        recorded = record(runner, list(range(1, 32)))
        return find_invariance(recorded, BLOCK, recurrent.by_rows(model))


@cache
def requests(kind: str, temperature: float) -> dict[str, Request]:
    return {
        name: replace(r, sampling=replace(r.sampling, logprobs=0))
        for name, r in images.requests(kind, temperature).items()
        if name not in ("two", "last")  # too many for a test
    }


def engine(kind: str, numbers: str, layout: str, how: Invariance | None, **options) -> Engine:
    seen = seeing(kind, numbers)
    options = {"block": BLOCK, "blocks": 96, "kv_bits": tiny.kv_bits(kind)} | options
    e = tiny.engine(seen.model, layout=layout, **options)
    e.runner.see(seen.eyes)
    e.runner.set_invariance(how)
    e.scheduler.kv.chunk = how.chunk if how else 0
    return e


def alone(e: Engine, r: Request) -> Told:
    e.add(r)
    return told(tiny.run(e), r.id)


def truth(
    kind: str, numbers: str, layout: str, how: Invariance | None, temperature: float
) -> dict[str, Told]:
    """Plain decoding: one sequence, one row a step."""
    return {
        name: alone(engine(kind, numbers, layout, how, budget=1), r)
        for name, r in requests(kind, temperature).items()
    }


def drive(e: Engine, name: str, all_of: dict[str, Request], known: dict[str, Told]):
    """With a drafter, beside others that join late."""
    asked = images.equip(e, name, all_of, {n: tokens for n, (tokens, _) in known.items()})
    late = {4: "fork", 6: "pixel"}
    for n, r in asked.items():
        if n not in late.values():
            e.add(r)
    outputs = tiny.run(e, lambda i: e.add(asked[late[i]]) if i in late else None, last=6)
    return {n: told(outputs, n) for n in all_of}


@pytest.mark.parametrize(
    "kind, layout, chip, numbers, name, budget, temperature", only(ROWS, QUICK)
)
def test_rows_keep_their_bits(kind, layout, chip, numbers, name, budget, temperature) -> None:
    """In a batch, and again from the cache, each alone."""
    how = found(kind, numbers, chip, layout)
    all_of = requests(kind, temperature)
    with on(chip):
        want = truth(kind, numbers, layout, how, temperature)
        e = engine(kind, numbers, layout, how, budget=budget)
        assert drive(e, name, all_of, want) == want
        before = e.counters["cached_tokens"]
        assert {n: alone(e, r) for n, r in all_of.items()} == want
        assert e.counters["cached_tokens"] - before > CHUNK * len(all_of)


CACHED = [("mistral3:4", "rows", "M3", "affine"), ("qwen3_vl", "rows", "M1", "mxfp4")]
CACHED += [("qwen3_5", "rect", "M5", "affine")]


@pytest.mark.parametrize("kind, layout, chip, numbers", only(CACHED))
def test_preemption_and_restart(
    kind: str, layout: str, chip: str, numbers: str, tmp_path: Path
) -> None:
    """A pool so small that sequences push each other out; and what another process left on the
    disk."""
    how = found(kind, numbers, chip, layout)
    all_of = requests(kind, 0.8)
    longest = max(len(r.prompt) for r in all_of.values())
    small = {"blocks": 6 + (longest + images.N) // BLOCK, "budget": 7}
    with on(chip):
        want = truth(kind, numbers, layout, how, 0.8)
        known = {name: tokens for name, (tokens, _) in want.items()}
        for options in (small, {}, {}):
            e = engine(kind, numbers, layout, how, **options)
            disk = disk_cache.attach(e, tmp_path)
            if options:
                tiny.admit_blindly(e.scheduler)
            for r in images.equip(e, "liar", all_of, known).values():
                e.add(r)
            outputs = disk_cache.finish(e, disk)
            assert {n: told(outputs, n) for n in want} == want
            assert e.scheduler.preemptions > 0 or not options
            assert disk.close(5)
        assert disk.stats["disk_runs_found"] > 0 and e.counters["cached_tokens"] >= 2 * CHUNK


@pytest.mark.slow
def test_without_the_rules_they_do_not() -> None:
    kind, numbers, layout, chip = "mistral3", "affine", "rows", "M1"
    all_of = requests(kind, 0.8)
    with on(chip):
        want = truth(kind, numbers, layout, None, 0.8)
        assert drive(engine(kind, numbers, layout, None, budget=64), "liar", all_of, want) != want
