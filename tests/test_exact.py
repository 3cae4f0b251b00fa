"""The promise on a GPU: tokens and log-probabilities equal plain decoding, alone and a row at a
time, by `==`, where MLX's kernels depend on the number of rows (tests/support/dispatch.py)."""

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from mlxspec.kernels import cpu
from mlxspec.kernels.invariant import PART, Calls
from mlxspec.load.exact import Exactness, examine, record
from mlxspec.load.exact_proof import MOST
from mlxspec.model import attention, invariant, recurrent
from mlxspec.model.call_search import MANY, Tries
from mlxspec.model.invariant import Invariance, find_invariance
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.runner import Runner
from mlxspec.types import CacheBytes, Request
from tests.support import disk_cache as tiers
from tests.support import dispatch, tiny
from tests.support.drafters import attach, attach_head, copies, like
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import fewer, in_turn, only, rotated

N, BLOCK, CHUNK = 10, 8, 16
CPU = "CPU"
NUMBERS = ["fp32", "bf16", "affine", "mxfp4"]
DRAFTERS = ["plain", "liar", "chain", "mtp"]
MQA = "llama with one head of K and V"
Told = tuple[list[int], list[float]]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)


@cache
def model(kind: str, numbers: str, **config: int) -> nn.Module:
    if kind == MQA:
        return model("llama", numbers, num_key_value_heads=1)
    return in_numbers(tiny.model(kind, **config), numbers)


def in_numbers(made: nn.Module, numbers: str) -> nn.Module:
    """A model of fp32 in these numbers, as it serves."""
    if numbers != "fp32":
        made.update(tree_map(_halved, made.parameters()))
    if numbers not in ("fp32", "bf16"):
        nn.quantize(made, 32, 4, mode=numbers, class_predicate=_fits)
    cpu.install(made)
    mx.eval(made.parameters())
    return made


def _halved(x: mx.array) -> mx.array:
    return x.astype(mx.bfloat16) if x.dtype == mx.float32 else x


def _fits(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def on(chip: str, rounded_once: bool = False):
    return nullcontext() if chip == CPU else dispatch.on(dispatch.CHIPS[chip], rounded_once)


def layout_of(kind: str) -> str:
    return "rect" if kind in ("qwen3_next", "qwen3_5", "nemotron_h", "lfm2", "mamba2") else "rows"


@cache
def found(
    kind: str, numbers: str, chip: str, rounded_once: bool = False, **config: int
) -> Invariance:
    m = model(kind, numbers, **config)
    with on(chip, rounded_once):
        recorded = record(Runner(m, layout_of(kind), BLOCK, 32), list(range(1, 32)))
        return find_invariance(recorded, BLOCK, recurrent.by_rows(m))


def engine(m: nn.Module, layout: str, budget: int, how: Invariance | None, blocks: int = 64):
    e = tiny.engine(m, layout=layout, block=BLOCK, budget=budget, blocks=blocks)
    e.runner.set_invariance(how)
    e.scheduler.kv.chunk = how.chunk if how else 0
    return e


def requests(temperature: float, seed: int = 0) -> dict[str, Request]:
    """Two share a start; one ends at a chunk's end; short and long."""
    rng = random.Random(seed)
    some = [[rng.randrange(tiny.VOCAB) for _ in range(n)] for n in (45, 9, 2 * CHUNK + 1, 1)]
    prompts = {"long": some[0], "fork": some[0][:21] + some[1], "even": some[2], "one": some[3]}
    return {
        name: tiny.request(name, p, N, temperature=temperature, seed=i, logprobs=0)
        for i, (name, p) in enumerate(prompts.items())
    }


def told(outputs, name: str) -> Told:
    pairs = [pair for o in outputs if o.request == name for pair in o.logprobs]
    return [pair.token for pair in pairs], [pair.logprob for pair in pairs]


def alone(m: nn.Module, layout: str, how: Invariance | None, all_of) -> dict[str, Told]:
    """Plain decoding: one sequence, one row a step."""
    answers = {}
    for name, r in all_of.items():
        e = engine(m, layout, 1, how)
        e.add(r)
        answers[name] = told(tiny.run(e), name)
    return answers


def together(m, kind, name, budget, how, all_of, truth) -> list[dict[str, Told]]:
    """With a drafter, beside others that join late; and again from the cache, each alone."""
    e = engine(m, layout_of(kind), budget, how)
    if name == "liar":
        e.proposer = NoisyOracle({(r.prompt, 0): truth[n][0] for n, r in all_of.items()}, most=16)
    elif name == "mtp":
        attach_head(e)
    elif name == "chain":
        chain = attach(e, name, like(None, kind, 0.02))
        for n, r in all_of.items():
            copies(chain).corpus.add((), tuple(truth[n][0]))
            all_of = {**all_of, n: replace(r, prediction=tuple(truth[n][0]))}
    late = {2: "fork", 5: "one"}
    for n, r in all_of.items():
        if n not in late.values():
            e.add(r)
    outputs = tiny.run(e, lambda i: e.add(all_of[late[i]]) if i in late else None, last=5)
    first = {n: told(outputs, n) for n in all_of}
    again = {}
    for n, r in all_of.items():
        e.add(r)
        outputs = tiny.run(e)
        assert outputs[-1].cached >= min(len(r.prompt) - 2, CHUNK) - (1 if name == "mtp" else 0)
        again[n] = told(outputs, n)
    if name == "liar":
        assert 0 < e.proposer.kept
    return [first, again]


MOE = ("qwen3_moe", "gpt_oss")
GRID = in_turn(
    ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"],
    [*dispatch.CHIPS, CPU],
    NUMBERS[1:],
    DRAFTERS[:3],
    [(1, 0.0), (7, 0.8), (64, 0.8)],
    every=29,
)
# MLX's experts on a CPU are fp32 or quantized.
GRID = [row for row in GRID if not ({CPU, "bf16"} < set(row.values) and row.values[0] in MOE)]
GRID += in_turn(["llama", "qwen3_moe", "gemma3_text"], [CPU], NUMBERS[:1], DRAFTERS[:3], [(7, 0.8)])
GRID += in_turn(
    ["mamba2", "qwen3_5", "lfm2", "nemotron_h"], [CPU], ["fp32"], DRAFTERS[:2], [(7, 0.8)]
)
GRID += in_turn(["qwen3"], ["M2", "M5", CPU], NUMBERS[1:3], ["mtp"], [(7, 0.8)])


# Recurrent layers: their projections, convolutions and one-row products, in the rect layout.
RECURRENT = ["qwen3_5", "lfm2", "nemotron_h", "mamba2", "qwen3_next"]
OTHERS = NUMBERS[1:], ["liar", "plain"], [7, 64], [0.8]
GRID += rotated(RECURRENT, ["M1", "M3", "M5"], *OTHERS)
GRID += rotated(["llama", "qwen3_moe"], ["M1", "M5"], NUMBERS[:1], ["liar"], [7, 64], [0.8])
GRID += rotated([(MQA, chip) for chip in ("M1", "M4", CPU)], *OTHERS)


CACHED = [("llama", "M1", "affine"), ("gemma3_text", "M4", "mxfp4"), ("mamba2", CPU, "fp32")]
CACHED += [("qwen3_5", CPU, "fp32")]


@pytest.mark.parametrize("kind, chip, numbers, name, budget, temperature", fewer(GRID, 3, 1))
def test_rows_keep_their_bits(kind, chip, numbers, name, budget, temperature) -> None:
    m = model(kind, numbers)
    how = found(kind, numbers, chip)
    with on(chip):
        all_of = requests(temperature)
        truth = alone(m, layout_of(kind), how, all_of)
        for got in together(m, kind, name, budget, how, all_of, truth):
            assert got == truth


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "llama"])
def test_prompts_of_one_token_begin_together(kind: str) -> None:
    """In one forward, without a state."""
    m = model(kind, "affine")
    how = found(kind, "affine", "M1")
    all_of = {
        f"{token}": tiny.request(f"{token}", [token], N, temperature=0.8, seed=token, logprobs=0)
        for token in (5, 77, 9)
    }
    with on("M1"):
        truth = alone(m, layout_of(kind), how, all_of)
        e = engine(m, layout_of(kind), 64, how)
        for r in all_of.values():
            e.add(r)
        outputs = tiny.run(e)
    assert {n: told(outputs, n) for n in all_of} == truth


@pytest.mark.parametrize("chip", only(dispatch.CHIPS, 0, 2, 4))
def test_without_the_rules_they_do_not(chip: str) -> None:
    m = model("llama", "affine")
    with on(chip):
        flips = 0
        for seed in range(8):
            all_of = requests(0.8, seed)
            truth = alone(m, "rows", None, all_of)
            for got in together(m, "llama", "liar", 64, None, all_of, truth):
                flips += any(got[n][0] != truth[n][0] for n in all_of)
            if flips:
                return
        raise AssertionError("no token depends on the rows: the model of MLX shows nothing")


@pytest.mark.parametrize("kind, chip, numbers", only(CACHED, 1, 3))
def test_preemption(kind: str, chip: str, numbers: str) -> None:
    """A pool so small that sequences push each other out, and compute their answers again."""
    m = model(kind, numbers)
    how = found(kind, numbers, chip)
    with on(chip):
        all_of = requests(0.8)
        truth = alone(m, layout_of(kind), how, all_of)
        e = engine(m, layout_of(kind), 7, how, blocks=14)
        tiny.admit_blindly(e.scheduler)
        e.proposer = NoisyOracle({(r.prompt, 0): truth[n][0] for n, r in all_of.items()})
        for r in all_of.values():
            e.add(r)
        outputs = tiny.run(e)
        assert e.scheduler.preemptions > 0
        assert {n: told(outputs, n) for n in all_of} == truth


@pytest.mark.parametrize("kind, chip, numbers", only(CACHED, 0, 2))
def test_restart_and_a_longer_turn(kind: str, chip: str, numbers: str, tmp_path: Path) -> None:
    """From the disk; the next turn's whole chunks end behind those of the first."""
    m = model(kind, numbers)
    how = found(kind, numbers, chip)
    with on(chip):
        all_of = requests(0.8)
        first = alone(m, layout_of(kind), how, all_of)
        history = (*all_of["long"].prompt, *first["long"][0], *range(20))
        turn = tiny.request("turn", history, N, temperature=0.8, seed=9, logprobs=0)
        later = {**all_of, "turn": turn}
        truth = alone(m, layout_of(kind), how, later)
        for asked in (all_of, later):
            e = engine(m, layout_of(kind), 16, how)
            disk = tiers.attach(e, tmp_path)
            for r in asked.values():
                e.add(r)
            outputs = tiers.finish(e, disk)
            assert {n: told(outputs, n) for n in asked} == {n: truth[n] for n in asked}
            assert disk.close(5)
        assert disk.stats["disk_runs_found"] > 0 and e.counters["cached_tokens"] >= 2 * CHUNK


EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8}  # whose rows are sorted from 128 on


@pytest.mark.parametrize(
    "kind, chip, numbers, config, lengths",
    only(
        [
            ("llama", "M1", "bf16", {}, [150, 40]),
            (MQA, "M4", "affine", {}, [150, 40, 300]),
            ("qwen3_moe", "M3", "affine", EXPERTS, [50, 50, 50, 50]),
        ],
        1,
    ),
)
def test_no_call_is_larger_than_was_tried(
    kind: str,
    chip: str,
    numbers: str,
    config: dict[str, int],
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX changes kernels beyond the rows of a proof too, which prompts in one step reach."""
    monkeypatch.setattr(invariant, "CHUNK", MANY)
    rng = random.Random(5)
    m = model(kind, numbers, **config)
    all_of = {
        f"{i}": tiny.request(
            f"{i}",
            [rng.randrange(tiny.VOCAB) for _ in range(length)],
            N,
            temperature=0.8,
            seed=i,
            logprobs=0,
        )
        for i, length in enumerate(lengths)
    }
    how = found.__wrapped__(kind, numbers, chip, **config)
    with on(chip):
        truth = alone(m, "rows", how, all_of)
        e = engine(m, "rows", 400, how, blocks=100)
        for r in all_of.values():
            e.add(r)
        outputs = tiny.run(e)
        assert {n: told(outputs, n) for n in all_of} == truth


def verdict(
    chip: str, kind: str, numbers: str, layout: str = "rows", rollback: bool = True
) -> Exactness:
    choice = LayoutChoice(layout, True, False, CacheBytes(), tiny.VOCAB, rollback=rollback)
    with on(chip):
        return examine(model(kind, numbers), choice, BLOCK)


@pytest.mark.parametrize("chip", only(["M2", "M5", CPU], 0, 1))
def test_the_proof(chip: str) -> None:
    proven = verdict(chip, "llama", "affine")
    assert proven.rows == MOST and not proven.why
    assert proven.describe("on") == "exact up to 33 rows" and proven.used("on")
    assert not proven.used("auto") and "when idle" in proven.describe("auto")
    cheap = replace(proven, cost=(0.01, 0.04))
    assert cheap.used("auto") and "4%" in cheap.describe("auto")
    assert not replace(proven, cost=(0.2, 0.0)).used("auto")
    assert not cheap.used("off") and "--exact on" in cheap.describe("off")


def wrong_calls(*_: Any) -> Tries:
    yield
    return Calls(1, 256)


def test_the_proof_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "try_calls", wrong_calls)
    failed = verdict("M3", "llama", "affine")
    assert failed.rows < 17 and "layer 0's self_attn" in failed.describe("on")
    assert "gather" in verdict(CPU, "llama", "bf16", "gather").describe("auto")


@pytest.mark.parametrize("kind, part", [("llama", "self_attn"), ("qwen3", "mlp")])
def test_the_proof_names_what_begins_to_differ(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here attention, or what follows it, of the second layer."""
    second = model(kind, "bf16").layers[1][part]
    usual = type(second).__call__

    def attend(self: Any, x: mx.array, *rest: Any, **more: Any) -> Any:
        out = usual(self, x, *rest, **more)
        return out * (1 + 0.01 * (x.size > x.shape[-1])) if self is second else out

    monkeypatch.setattr(type(second), "__call__", attend)
    differs = verdict(CPU, kind, "bf16")
    assert f"layer 1's {part}" in differs.describe("on")


def test_the_proof_sees_a_context_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours are shorter and longer: attention that minds them there is found out."""
    usual = attention.invariant_attention

    def attend(inputs: Any, *rest: Any) -> Any:
        far = max(start for group in inputs.groups for start in group.starts) > 3 * PART
        return usual(inputs, *rest) * (1 + 0.01 * (far and len(inputs.q) > 1))

    monkeypatch.setattr(attention, "invariant_attention", attend)
    assert not verdict("M3", "llama", "affine").rows
