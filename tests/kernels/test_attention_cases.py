"""What of paged_attention is proven, that nothing else runs, and that an engine with it says the
same."""

import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxspec.kernels import attention, cpu, reference, trial
from mlxspec.kernels.inputs import Attention
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.trial import Case, Verdict
from mlxspec.kernels.verify import KERNELS
from tests import metalsim
from tests.kernels import on_simulator
from tests.kernels.test_attention import STEP, Step, reports
from tests.support import tiny
from tests.test_lossless import drafted, drive, equip, same

pytestmark = pytest.mark.usefixtures("device")


@on_simulator
def test_only_what_is_proven_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(((1, (3,)), (2, (9,)), (5, (30, 2))), size=32)
    q, k, v, *rest = step.make()
    args = Attention(q, mx.nan_to_num(k), mx.nan_to_num(v), *rest)
    want = reference.paged_attention(args, cpu.attention)  # where no kernel runs
    recorded: list[Case] = []
    monkeypatch.setattr(KERNELS, "recorded", recorded)
    with reports() as found:
        assert mx.array_equal(attention.paged_attention(args), want) and not found
        name = "paged_attention float32 8/2x32+32 block 32 window 0 kv_bits 0 sinks 0"
        contexts = [f"{name} context 512", f"{name} ragged", f"{name} context 32768"]
        assert [case.name for case in recorded] == contexts
        verdicts = [Verdict("matrix", 1, 4), Verdict("matrix", 2, 16)]
        for context, verdict in zip(contexts, verdicts, strict=False):
            monkeypatch.setitem(KERNELS.verdicts, context, verdict)
        assert mx.array_equal(attention.paged_attention(args), want) and not found, (
            "the long context is unproven"
        )
        monkeypatch.setitem(KERNELS.verdicts, contexts[2], Verdict("matrix", 1, 16))
        got = attention.paged_attention(args)
        assert (
            len(found) == 2
            and mx.array_equal(got[:1], want[:1])
            and mx.array_equal(got[3:], want[3:])
        )
        assert found[0].traffic["q"].size == 2 * 8 * 32 * 4
        verdicts[0].variant = ""  # parked
        assert mx.array_equal(attention.paged_attention(args), want) and len(found) == 2
        assert {case.name for case in recorded} == set(contexts)


def packed(dtype: mx.Dtype, bits: int, *dims: int) -> tuple:
    return tuple(Packing(dim, dtype, bits) if bits else None for dim in dims)


def small(shape: attention.Shape, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases of contexts that a simulator has time for."""
    monkeypatch.setattr(attention, "SHORT", 130)
    monkeypatch.setattr(attention, "LONG", 300)
    return attention.paged_attention_cases.__wrapped__(shape)


@on_simulator
@pytest.mark.parametrize("bits, window", [(0, 0), (8, 200)])
def test_the_kernel_matches_its_cases(
    bits: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SEEDS", 1)
    packings = packed(mx.bfloat16, bits, 32, 64)
    shape = attention.Shape(mx.bfloat16, 4, 2, 32, 64, 16, packings, window, True)
    for case in small(shape, monkeypatch):
        assert case.rows == tuple(range(1, 17)) and set(case.raced) < set(case.rows)
        less = replace(case, rows=(1, 3))
        with metalsim.patch():
            trial.compare(
                less, less.variants[attention.VARIANT], trial.Timer(math.inf, lambda: None)
            )
        given = case.cut(case.inputs(0), 3)
        stock = case.stock(*given)
        assert stock.shape == (5 if case.name.endswith("ragged") else 3, 4, 64), (
            "and two neighbours"
        )
        assert mx.allclose(stock, case.reference(*given), atol=0.05)


def mistaken(**change: object) -> Callable[..., mx.array]:
    """Attention over fp32, rounded once, with something else than what it was called with."""

    def attend(a: Attention, **_: object) -> mx.array:
        by = change.get("by", 0)
        groups = [replace(g, starts=[s + by for s in g.starts]) for g in a.groups]
        if change.get("unshifted"):
            groups = [replace(g, shift=None, max_shift=0) for g in groups]
        if change.get("tables"):
            groups = [replace(g, tables=groups[-1].tables) for g in groups]
        window = a.window and a.window + change.get("window", 0)
        sinks = None if change.get("sinks") == 0 else a.sinks * change.get("sinks", 1)
        wrong = replace(a, groups=groups, window=window, sinks=sinks)
        return attention._exact(wrong).astype(a.q.dtype)

    return attend


MISTAKES = {
    "a key too few": dict(by=-1),
    "a key too many": dict(by=1),
    "no sinks": dict(sinks=0),
    "negated sinks": dict(sinks=-1),
    "a smaller window": dict(window=-1),
    "a larger window": dict(window=1),
    "not shifted": dict(unshifted=True),
    "one table for all": dict(tables=True),
}


@on_simulator
@pytest.mark.parametrize("window, bits", [(0, 0), (128, 0), (0, 8), (1024, 4)])
@pytest.mark.parametrize("dtype", list(STEP), ids=str)
def test_a_case_tells_right_from_wrong(
    dtype: mx.Dtype, window: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of these comes near what is allowed, in any dtype."""
    monkeypatch.setattr(attention, "LONG", 2048)
    packings = packed(dtype, bits, 64, 64)
    shape = attention.Shape(dtype, 4, 2, 64, 64, 32, packings, window, True)
    noticed: dict[str, float] = {}
    for n in range(len(attention.paged_attention_cases.__wrapped__(shape))):
        made = {}
        for what, change in {"right": {}, **MISTAKES}.items():
            monkeypatch.setattr(attention, "paged_attention", mistaken(**change))
            made[what] = attention.paged_attention_cases.__wrapped__(shape)[n]
        right = made["right"]
        inputs = right.cut(right.inputs(0), 5)
        want = right.reference(*inputs)
        for what, case in made.items():
            got = case.variants["matrix"](*inputs)
            off = trial.relative_error(got, want, math.inf, dtype)
            assert what != "right" or off < case.tolerance / 10
            noticed[what] = max(noticed.get(what, 0.0), off)
    for what in MISTAKES:
        if window or "window" not in what:
            assert noticed[what] > 50 * attention.TOLERANCE, (what, noticed)


@pytest.mark.parametrize(
    "heads, kv, dim", [(32, 8, 128), (32, 4, 128), (8, 1, 256), (14, 2, 64), (32, 32, 80)]
)
def test_all_that_serving_can_launch_is_matched_and_memory_is_bounded(
    heads: int, kv: int, dim: int
) -> None:
    shape = attention.Shape(mx.bfloat16, heads, kv, dim, dim, 32)
    cases = attention.paged_attention_cases(shape)
    for case in cases:
        assert case.rows == tuple(range(1, attention.ROWS + 1))
        assert sum(x.nbytes for x in case.inputs(0)) < 1.05 * attention.MAX_POOL_BYTES
    assert int(cases[-1].name.split()[-1]) == min(32768, attention.MAX_POOL_BYTES // (kv * dim * 4))
    if heads == 8 * kv and dim == 128:
        assert {attention._instance(shape, rows)[0] for rows in attention.RACED} == set(
            attention.TILES
        )


@pytest.mark.parametrize(
    "change", [dict(dims=(20, 32)), dict(dims=(32, 264)), dict(heads=65, kv=1)]
)
def test_what_it_does_not_do_runs_in_the_reference(change: dict) -> None:
    q, k, v, *rest = Step(((1, (3,)),), **change).make()
    clean = Attention(q, mx.nan_to_num(k), mx.nan_to_num(v), *rest)
    with reports() as found:
        got = attention.paged_attention(clean, unproven=True)
    assert not found and mx.array_equal(got, reference.paged_attention(clean))


def test_pools_that_do_not_go_together_are_not_for_the_kernel() -> None:
    q, k, v, *rest = Step(((1, (3,)),)).make()
    mixed = Packing(32, mx.float32, 8), Packing(32, mx.float32, 8)
    for args in ((q.astype(mx.float16), k, v, (None, None)), (q.astype(mx.float16), k, v, mixed)):
        assert attention.shape_of(Attention(*args[:3], *rest[:-1], args[3])) is None


@on_simulator
@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for kind in ("llama", "llama:8", "gpt_oss") for name in ("plain", "liar")]
    + [("gpt_oss", "model")],
)
def test_an_engine_with_the_kernel_says_the_same(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged decodes and drafts of neighbours that come and go, windows, sinks: plain decoding's
    tokens."""
    model = tiny.model(kind)
    plain = tiny.Plain(model, tiny.kv_bits(kind))
    asked = {
        n: tiny.request(
            n, range(at, at + size), 24 if name == "model" else 8, temperature=0.8, seed=at
        )
        for n, at, size in (("a", 5, 21), ("b", 40, 9), ("c", 3, 30))
    }
    monkeypatch.setattr("tests.test_lossless.plain", lambda kind: plain)
    e = tiny.engine(model, block=8, budget=24, kv_bits=tiny.kv_bits(kind))
    asked = equip(e, name, kind, asked)

    monkeypatch.setitem(KERNELS.verdicts, "all", Verdict("matrix", 1, 16))
    monkeypatch.setattr(attention, "paged_attention_cases", lambda shape: [])  # all proven
    metadata, shifted = attention._metadata, []
    monkeypatch.setattr(
        attention,
        "_metadata",
        lambda g, w: shifted.append(any(x.shift is not None for x in g)) or metadata(g, w),
    )
    with reports() as found:
        same(kind, drive(e, asked, {"b": 2, "c": 4}), asked)
    assert any(shifted) == (name == "model"), "rows come before the host knows where they start"
    assert drafted(e, name) and len(found) > 2 * len(model.layers) * (8 if name == "plain" else 3)
