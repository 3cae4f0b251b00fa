"""paged_attention in the simulator: the reference's values, and rows that do not know of each other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import Group, Packing, paged, reference
from mlxspec.kernels.proven import VERDICTS, Verdict
from mlxspec.types import Unfit
from tests import metalsim, tiny
from tests.kernels import on_simulator
from tests.test_lossless import drafted, drive, equip, same

STEP = {mx.float32: 0.0, mx.float16: 2**-10, mx.bfloat16: 2**-7}  # one step of the result
SUMMING = 1e-5  # of the largest value: scores of a few hundred products, weights that move with them
RAGGED = ((1, (0, 37, 300)), (5, (0, 250)))
Shapes = Sequence[tuple[int, Sequence[int]]]
pytestmark = pytest.mark.usefixtures("device")


@dataclass(frozen=True)
class Step:
    """Groups of sequences (their rows, their starts) over scattered blocks. What no row may see is NaN."""

    shapes: Shapes = RAGGED
    dtype: mx.Dtype = mx.float32
    heads: int = 8
    kv: int = 2
    dims: tuple[int, int] = (32, 32)
    window: int | None = None
    sinks: bool = False
    bits: int = 0
    size: int = 16

    def some(self, seed: int, *shape: int) -> mx.array:
        return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(self.dtype)

    @property
    def packings(self) -> tuple[Packing | None, Packing | None]:
        k, v = (Packing(d, self.dtype, self.bits) if self.bits else None for d in self.dims)
        return k, v

    def make(self) -> tuple:
        """The arguments of reference.paged_attention."""
        spans = [(s, s + n) for n, starts in self.shapes for s in starts]
        blocks = 1 + sum(-(-end // self.size) for _, end in spans)
        free = (np.random.default_rng(1).permutation(blocks - 1) + 1).tolist()
        seen = np.zeros(blocks * self.size, bool)
        groups, lo, tables = [], 0, []
        for start, end in spans:
            tables.append([free.pop() for _ in range(-(-end // self.size))])
            for at in range(max(0, start - self.window + 1) if self.window else 0, end):
                seen[tables[-1][at // self.size] * self.size + at % self.size] = True
        left = iter(tables)
        for n, starts in self.shapes:
            hi = lo + n * len(starts)
            groups.append(Group(lo, hi, n, list(starts), {None: [next(left) for _ in starts]}, self.size))
            lo = hi
        pools = []
        for seed, (d, packing) in enumerate(zip(self.dims, self.packings, strict=True)):
            pool = self.some(seed, self.kv, blocks * self.size, d)
            bad = float("nan")
            if packing:
                pool, bad = packing.pack(pool), 0xFFFFFFFF  # a NaN as a scale, in every dtype
            pools.append(mx.where(mx.array(seen)[:, None], pool, mx.array(bad, pool.dtype)))
        q, sinks = self.some(2, lo, self.heads, self.dims[0]), self.some(3, self.heads)
        return (
            q,
            *pools,
            groups,
            self.dims[0] ** -0.5,
            self.window,
            sinks if self.sinks else None,
            self.packings,
        )

    def needed(self) -> list[int]:
        """Bytes of K and of V that the step's rows see."""
        slots = sum(
            s + n - (max(0, s - self.window + 1) if self.window else 0)
            for n, starts in self.shapes
            for s in starts
        )
        widths = [
            p.width * 4 if p else d * self.dtype.size for d, p in zip(self.dims, self.packings, strict=True)
        ]
        return [slots * self.kv * width for width in widths]


def simulated(args: tuple, matrix: bool = True, order: int = 0) -> mx.array:
    with metalsim.patch(order=order):
        return paged.paged_attention(*args, matrix=matrix)


@contextmanager
def reports() -> Iterator[list[metalsim.Report]]:
    """Of each launch inside."""
    found: list[metalsim.Report] = []

    def make(*args: object) -> Callable:
        kernel = metalsim.metal_kernel(*args)

        def launch(**named: object) -> list[mx.array]:
            out = kernel(**named)
            found.append(metalsim.last())
            return out

        return launch

    with metalsim.patch():
        mx.fast.metal_kernel = make
        yield found


def check(step: Step, **how: object) -> None:
    """Against the reference over fp32: what is left is the kernel's own error."""
    args = step.make()
    got = simulated(args, **how)
    q, k, v, groups, scale, window, sinks, packings = args
    k, v = (p.unpack(x) if p else x for x, p in zip((k, v), packings, strict=True))
    q, k, v = (mx.nan_to_num(x.astype(mx.float32)) for x in (q, k, v))
    sinks = sinks if sinks is None else sinks.astype(mx.float32)
    want = np.array(reference.paged_attention(q, k, v, groups, scale, window, sinks))
    assert got.dtype == step.dtype and got.shape == want.shape
    # Two roundings of an unpacked value may differ by a step, in K and in V.
    allowed = (SUMMING + 2 * STEP[step.dtype] * bool(step.bits)) * np.abs(np.array(v)).max()
    off = np.abs(np.array(got.astype(mx.float32)) - want)
    assert (off <= allowed + STEP[step.dtype] * np.abs(want)).all(), off.max()


@pytest.mark.parametrize("matrix", [False, True], ids=["plain", "matrix"])
@pytest.mark.parametrize("window, sinks", [(None, False), (None, True), (20, True), (300, False)])
@pytest.mark.parametrize("bits", [0, 8])
def test_masks(bits: int, window: int | None, sinks: bool, matrix: bool) -> None:
    check(Step(window=window, sinks=sinks, bits=bits, shapes=((1, (0, 37)), (5, (290,)))), matrix=matrix)


@pytest.mark.parametrize(
    "dtype, dim, heads, kv, bits",
    [
        (mx.bfloat16, 64, 4, 4, 0),
        (mx.float16, 80, 4, 1, 0),
        (mx.float32, 80, 7, 1, 0),
        (mx.bfloat16, 96, 7, 1, 8),
        (mx.float32, 96, 8, 2, 8),
        (mx.bfloat16, 128, 8, 1, 0),
        (mx.float16, 128, 8, 1, 8),
        (mx.float16, 128, 8, 1, 4),
        (mx.float32, 256, 8, 1, 0),
        (mx.bfloat16, 256, 8, 1, 8),
    ],
)
def test_shapes(dtype: mx.Dtype, dim: int, heads: int, kv: int, bits: int) -> None:
    shapes = ((1, (3, 270)), (2, (40,)), (5, (255,)))
    check(Step(shapes, dtype, heads, kv, (dim, dim), 260, True, bits))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [2, 4, 7, 8, 16])
def test_every_shape(heads: int, dim: int, dtype: mx.Dtype) -> None:
    for rows, window, sinks, bits in product((1, 4, 16), (None, 100), (False, True), (0, 8, 4)):
        if not bits or dim % 32 == 0:
            shapes = ((1, (0, 600)), (rows, (500, 31, 250)))
            for kv in {1, 2 - heads % 2}:
                check(Step(shapes, dtype, heads, kv, (dim, dim), window, sinks, bits))


@pytest.mark.parametrize("dims", [(64, 32), (32, 160), (24, 16)])
def test_k_and_v_of_different_widths(dims: tuple[int, int]) -> None:
    check(Step(dims=dims, dtype=mx.bfloat16))


@pytest.mark.parametrize("order", [1, 7])
@pytest.mark.parametrize("bits", [0, 8])
def test_any_order_of_threads(order: int, bits: int) -> None:
    """Which also shows that what threads share is not read before it is written."""
    args = Step(bits=bits, dims=(160, 160), dtype=mx.float32).make()
    assert mx.array_equal(simulated(args, order=order), simulated(args))


# Rows on both sides of parts' bounds, of a window's and of a block's.
ALONE = [
    Step(((16, (760,)),)),
    Step(((16, (760,)),), window=270, sinks=True, dtype=mx.bfloat16),
    Step(((16, (505,)),), bits=8, dtype=mx.float16, heads=7, kv=1),
    Step(
        ((16, (250,)),), dims=(256, 256), heads=8, kv=1, dtype=mx.bfloat16
    ),  # more than one threadgroup's rows
    Step(((16, (4090,)),), dims=(16, 16), heads=2, kv=2),
]


@pytest.mark.parametrize("matrix", [False, True], ids=["plain", "matrix"])
@pytest.mark.parametrize("step", ALONE, ids=["parts", "window", "packed", "wide", "far"])
def test_a_row_does_not_depend_on_what_runs_beside_it(step: Step, matrix: bool) -> None:
    q, k, v, (group,), *rest = step.make()
    whole = simulated((q, k, v, [group], *rest), matrix)
    ((rows, (start,)),) = step.shapes

    def part(lo: int, hi: int, at: int = 0) -> Group:
        return Group(at, at + hi - lo, hi - lo, [start + lo], group.tables, step.size)

    for lo, hi in ((0, 1), (15, 16), (6, 11)):
        got = simulated((q[lo:hi], k, v, [part(lo, hi)], *rest), matrix)
        assert mx.array_equal(got, whole[lo:hi]), (lo, hi)
    # A neighbour that sees less, and one that sees as much with more rows, in one launch.
    table = group.tables[None][0]
    early = 40 if step.window is None else start  # what lies before a window is NaN
    groups = [
        part(7, 8),
        Group(1, 9, 4, [start + 3, early], {None: [table, table]}, step.size),
        part(2, 14, 9),
    ]
    got = simulated((mx.concatenate([q[7:8], q[3:7], q[:4], q[2:14]]), k, v, groups, *rest), matrix)
    for mine, lo, hi in ((got[:1], 7, 8), (got[1:5], 3, 7), (got[9:], 2, 14)):
        assert mx.array_equal(mine, whole[lo:hi]), (lo, hi)
    assert rows == 16 and mx.isfinite(got).all()


@on_simulator
@pytest.mark.parametrize("window", [None, 20, 257])
def test_starts_that_only_the_device_knows(window: int | None) -> None:
    """A larger grid and longer tables, and the same bits; what is not needed is not read either."""
    step = Step(((3, (254, 40)), (5, (510,))), window=window)
    q, k, v, groups, *rest = step.make()
    with reports() as known:
        want = paged.paged_attention(q, k, v, groups, *rest)
    for behind in ((2, 0), (0, 2), (3, 3)):
        a = replace(
            groups[0], starts=[254 - behind[0], 40 - behind[1]], spread=3, late=mx.array(behind), seats={}
        )
        b = replace(groups[1], starts=[506], spread=4, late=mx.array([4]), seats={})
        with reports() as late:
            got = paged.paged_attention(q, k, v, [a, b], *rest)
        assert mx.array_equal(got, want)
        for name, one, other in (
            ("keys", known[0], late[0]),
            ("values", known[0], late[0]),
            ("sums", known[1], late[1]),
        ):
            assert one.traffic[name].read == other.traffic[name].read
    mixed = [replace(groups[0], seats={}), b]
    assert mx.array_equal(simulated((q, k, v, mixed, *rest)), want)


@on_simulator
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype, dim", [(mx.bfloat16, 128), (mx.float32, 64), (mx.float16, 256)])
def test_k_and_v_are_read_once_for_all_rows_and_heads(
    dtype: mx.Dtype, dim: int, bits: int, window: int | None
) -> None:
    """Each byte that a row sees by one lane of the whole grid, no other byte: GQA 8, 5 rows."""
    step = Step(((1, (17,)), (5, (251, 600))), dtype, 16, 2, (dim, dim), window, False, bits)
    with reports() as found:
        paged.paged_attention(*step.make())
    traffic = found[0].traffic
    assert len(found) == 2
    for name, needed in zip(("keys", "values"), step.needed(), strict=True):
        assert traffic[name].read == traffic[name].read_unique == needed


@on_simulator
def test_rows_that_fill_more_than_a_threadgroup_share_what_they_can() -> None:
    """128 rows and heads of 256 values are two threadgroups' work: each of them reads K and V."""
    step = Step(((16, (100,)),), mx.bfloat16, 8, 1, (256, 256))
    with reports() as found:
        paged.paged_attention(*step.make())
    read = found[0].traffic["keys"].read / step.needed()[0]
    assert 1.9 < read <= 2


@on_simulator
def test_nothing_is_read_of_a_sum_that_nobody_wrote() -> None:
    step = Step(((1, (3,)), (5, (700,))), window=None)
    with reports() as found:
        paged.paged_attention(*step.make())
    written, read = found[0].traffic["sums"], found[1].traffic["sums"]
    assert found[0].kinds == {"output-not-written"}, "the short sequence has no sums of later parts"
    assert read.read_unique == written.written == written.written_unique


def test_longer_groups_go_through_the_reference() -> None:
    step = Step(((1, (3,)), (5, (30, 2)), (20, (0,))))
    args = step.make()
    got, want = (
        simulated(args),
        reference.paged_attention(*args[:1], *map(mx.nan_to_num, args[1:3]), *args[3:]),
    )
    assert mx.array_equal(got[11:], want[11:]) and not mx.array_equal(got[:11], want[:11])
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(dims=(20, 32)), r"8/2x20\+32"),
        (dict(dims=(32, 264)), r"8/2x32\+264"),
        (dict(heads=65, kv=1), "65/1"),
    ],
)
def test_what_it_does_not_do_is_refused_and_runs_in_the_reference(change: dict, why: str) -> None:
    args = Step(((1, (3,)),), **change).make()
    with pytest.raises(Unfit, match=why):
        simulated(args)
    clean = (args[0], *map(mx.nan_to_num, args[1:3]), *args[3:])
    assert mx.array_equal(paged.proven_attention(*clean), reference.paged_attention(*clean))


def test_pools_of_another_dtype_are_refused() -> None:
    q, *rest = Step(((1, (3,)),)).make()
    with pytest.raises(Unfit, match=r"q is mlx.core.float16, K mlx.core.float32"):
        simulated((q.astype(mx.float16), *rest))


@on_simulator
def test_only_what_is_proven_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(((1, (3,)), (2, (9,)), (5, (30, 2))), size=32)
    q, k, v, *rest = step.make()
    args = (q, mx.nan_to_num(k), mx.nan_to_num(v), *rest)
    want = reference.paged_attention(*args)
    monkeypatch.setattr(paged, "ASKED", {})
    paged._shape.cache_clear()
    with reports() as found:
        assert mx.array_equal(paged.proven_attention(*args), want) and not found
        (name,) = paged.ASKED
        assert name == "paged_attention float32 8/2x32 block 32"
        verdict = Verdict("matrix", 2, 4)
        monkeypatch.setitem(VERDICTS, name, verdict)
        got = paged.proven_attention(*args)
        assert len(found) == 2 and mx.array_equal(got[:1], want[:1]) and mx.array_equal(got[3:], want[3:])
        assert found[0].traffic["q"].size == 2 * 8 * 32 * 4
        verdict.way = ""
        assert mx.array_equal(paged.proven_attention(*args), want) and len(found) == 2
        assert [name] == list(paged.ASKED)


@pytest.mark.parametrize("bits", [0, 8])
def test_a_case_can_be_proven(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "CONTEXT", 300)
    case = paged.paged_attention_case(paged.Shape(mx.bfloat16, 8, 2, 64, 64, 16, bits, 200, True))
    kind = "bfloat16 8/2x64 block 16 window 200" + " kv_bits 8" * bool(bits) + " sinks"
    assert case.name == f"paged_attention {kind}"
    for rows in (1, 5):
        inputs = case.inputs(rows, 3)
        assert inputs[0].shape == (rows, 8, 64)
        want = case.reference(*inputs)
        assert mx.array_equal(case.stock(*inputs), want)
        for way in case.ways.values():
            with metalsim.patch():
                off = mx.abs(way(*inputs) - want).max() / mx.abs(want).max()
            assert 0 < off.item() < case.tolerance
    assert not mx.array_equal(case.inputs(1, 3)[0], case.inputs(1, 4)[0])


@on_simulator
@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for kind in ("llama", "llama:8", "gpt_oss") for name in ("plain", "liar")]
    + [("gpt_oss", "model")],
)
def test_an_engine_with_the_kernel_says_the_same(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged decodes and drafts of neighbours that come and go, windows, sinks: plain decoding's tokens."""
    model = tiny.model(kind)
    plain = tiny.Plain(model, tiny.kv_bits(kind))
    asked = {
        n: tiny.request(n, range(at, at + size), 24 if name == "model" else 8, temperature=0.8, seed=at)
        for n, at, size in (("a", 5, 21), ("b", 40, 9), ("c", 3, 30))
    }
    monkeypatch.setattr("tests.test_lossless.plain", lambda kind: plain)
    e = tiny.engine(model, block=8, budget=24, kv_bits=tiny.kv_bits(kind))
    asked = equip(e, name, kind, asked)

    class Proven(dict):
        def get(self, name: str, default: object = None) -> Verdict:
            return Verdict("matrix", 1, paged.ROWS)

    monkeypatch.setattr(paged, "VERDICTS", Proven())
    seat, late = paged._seat, []
    monkeypatch.setattr(
        paged, "_seat", lambda g, w: late.append(any(x.late is not None for x in g)) or seat(g, w)
    )
    with reports() as found:
        same(kind, drive(e, asked, {"b": 2, "c": 4}), asked)
    assert any(late) == (name == "model"), "rows come before the host knows where they start"
    assert drafted(e, name) and len(found) > 2 * len(model.layers) * (8 if name == "plain" else 3)
