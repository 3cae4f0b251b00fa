"""paged_attention in the simulator: the reference's values, and rows that do not know of each
other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import attention, reference
from mlxspec.kernels.inputs import Attention, Group
from mlxspec.kernels.quantized_kv import Packing
from tests import metalsim
from tests.kernels import on_simulator

STEP = {mx.float32: 0.0, mx.float16: 2**-10, mx.bfloat16: 2**-7}  # one step of the result
SUMMING = (
    1e-5  # of the largest value: scores of a few hundred products, weights that move with them
)
RAGGED = ((1, (0, 37, 300)), (5, (0, 250)))
Shapes = Sequence[tuple[int, Sequence[int]]]
pytestmark = pytest.mark.usefixtures("device")


def kernel(*args: object) -> mx.array:
    return attention.paged_attention(Attention(*args), unproven=True)


@dataclass(frozen=True)
class Step:
    """Groups of sequences (their rows, their starts) over scattered blocks. What no row may see is
    NaN."""

    shapes: Shapes = RAGGED
    dtype: mx.Dtype = mx.float32
    heads: int = 8
    kv: int = 2
    dims: tuple[int, int] = (32, 32)
    window: int | None = None
    sinks: bool = False
    bits: int = 0
    size: int = 16
    first: int = 0

    def some(self, seed: int, *shape: int) -> mx.array:
        return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(
            self.dtype
        )

    @property
    def packings(self) -> tuple[Packing | None, Packing | None]:
        k, v = (Packing(d, self.dtype, self.bits) if self.bits else None for d in self.dims)
        return k, v

    def make(self) -> tuple:
        """The fields of Attention."""
        spans = [(s, s + n) for n, starts in self.shapes for s in starts]
        blocks = 1 + sum(-(-end // self.size) for _, end in spans)
        free = (np.random.default_rng(1).permutation(blocks - 1) + 1).tolist()
        seen = np.zeros(blocks * self.size, bool)
        groups, lo, tables = [], 0, []
        for start, end in spans:
            tables.append([free.pop() for _ in range(-(-end // self.size))])
            low = max(self.first, start - self.window + 1) if self.window else self.first
            for at in range(low, end):
                seen[tables[-1][at // self.size] * self.size + at % self.size] = True
        left = iter(tables)
        for n, starts in self.shapes:
            hi = lo + n * len(starts)
            groups.append(
                Group(
                    lo,
                    hi,
                    n,
                    list(starts),
                    {None: [next(left) for _ in starts]},
                    self.size,
                    first=self.first,
                )
            )
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
            p.width * 4 if p else d * self.dtype.size
            for d, p in zip(self.dims, self.packings, strict=True)
        ]
        return [slots * self.kv * width for width in widths]


def simulated(args: tuple, order: int = 0) -> mx.array:
    with metalsim.patch(order=order):
        return kernel(*args)


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
    want = np.array(reference.paged_attention(Attention(q, k, v, groups, scale, window, sinks)))
    assert got.dtype == step.dtype and got.shape == want.shape
    # Two roundings of an unpacked value may differ by a step, in K and in V.
    allowed = (SUMMING + 2 * STEP[step.dtype] * bool(step.bits)) * np.abs(np.array(v)).max()
    off = np.abs(np.array(got.astype(mx.float32)) - want)
    assert (off <= allowed + STEP[step.dtype] * np.abs(want)).all(), off.max()


@pytest.mark.parametrize("window, sinks", [(None, False), (None, True), (20, True), (300, False)])
@pytest.mark.parametrize("bits", [0, 8])
def test_masks(bits: int, window: int | None, sinks: bool) -> None:
    check(Step(window=window, sinks=sinks, bits=bits, shapes=((1, (0, 37)), (5, (290,)))))


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
    shapes = ((1, (3, 150)), (2, (40,)), (5, (127,)))
    check(Step(shapes, dtype, heads, kv, (dim, dim), 140, True, bits))


@pytest.mark.parametrize("first, window", [(1, None), (1, 20), (150, None), (150, 40)])
def test_slots_before_the_first_are_not_seen(first: int, window: int | None) -> None:
    """Also where they fill whole parts."""
    shapes = ((1, (first, first + 37, 300)), (5, (290,)))
    check(Step(shapes, window=window, first=first))


FAR = [  # parts of each length, without a window and with one
    Step(((2, (8191,)),), heads=1, kv=1, dims=(16, 16)),
    Step(((2, (900,)),), heads=2, kv=1, dims=(16, 16), window=600),
    Step(((2, (3000,)),), heads=1, kv=1, dims=(16, 16), window=2100),
]


@pytest.mark.parametrize("step", FAR, ids=["all", "window-256", "window-512"])
def test_parts_of_all_lengths(step: Step) -> None:
    check(step)


@pytest.mark.slow
@pytest.mark.parametrize("window, sinks", [*product((None, 100), (False, True))])
@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [2, 7, 8])
def test_every_shape(
    heads: int, dim: int, dtype: mx.Dtype, window: int | None, sinks: bool
) -> None:
    for rows, bits in product((1, 4, 16), (0, 8, 4)):
        if not bits or dim % 32 == 0:
            shapes = ((1, (0, 260)), (rows, (250, 31)))
            for kv in {1, 2 - heads % 2}:
                check(Step(shapes, dtype, heads, kv, (dim, dim), window, sinks, bits))


@pytest.mark.parametrize("dims", [(64, 32), (32, 160), (24, 16)])
def test_k_and_v_of_different_widths(dims: tuple[int, int]) -> None:
    shapes = ((1, (0, 37, 200)), (5, (150,)))
    check(Step(shapes, dims=dims, dtype=mx.bfloat16))


@pytest.mark.parametrize("order, bits", [(1, 0), (7, 8)])
def test_any_order_of_threads(order: int, bits: int) -> None:
    """Which also shows that what threads share is not read before it is written."""
    args = Step(((1, (37,)), (5, (130,))), bits=bits, dims=(160, 160)).make()
    assert mx.array_equal(simulated(args, order), simulated(args))


def spoilt(pool: mx.array, packing: Packing | None, slot: int, value: float) -> mx.array:
    """All of what a slot holds is `value`."""
    bad = mx.full((pool.shape[0], packing.dim if packing else pool.shape[2]), value, mx.float32)
    if packing:  # `pack` alone keeps half precision finite
        words, scales, biases = mx.quantize(
            mx.zeros_like(bad).astype(packing.dtype), packing.group, packing.bits
        )
        bad = mx.concatenate(
            [words, mx.concatenate([scales, biases + value], -1).view(mx.uint32)], -1
        )
    pool = pool + 0
    pool[:, slot] = bad.astype(pool.dtype)
    return pool


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("dtype", list(STEP), ids=str)
def test_what_is_not_finite_stays_with_the_rows_that_see_it(dtype: mx.Dtype, bits: int) -> None:
    """At positions behind a row and before its window; V's counts as 0."""
    step = Step(((4, (40,)),), dtype, window=16, bits=bits)
    q, k, v, (group,), *rest = step.make()
    slots = [
        group.tables[None][0][at // step.size] * step.size + at % step.size for at in range(44)
    ]
    want = simulated((q, k, v, [group], *rest))
    for value in (float("nan"), float("inf"), -float("inf")):
        for at, clean in ((43, [0, 1, 2]), (42, [0, 1]), (25, [1, 2, 3]), (26, [2, 3])):
            bad = [
                spoilt(x, p, slots[at], value) for x, p in zip((k, v), step.packings, strict=True)
            ]
            got = simulated((q, *bad, [group], *rest))
            assert mx.array_equal(got[mx.array(clean)], want[mx.array(clean)]), (value, at)
        held = simulated((q, k, bad[1], [group], *rest))
        zero = spoilt(v, step.packings[1], slots[26], 0.0)
        assert mx.array_equal(held, simulated((q, k, zero, [group], *rest)))
        specified = [
            reference.paged_attention(Attention(q, k, values, [group], *rest))
            for values in (bad[1], zero)
        ]
        assert mx.array_equal(*specified)


# Rows on both sides of parts' bounds, of a window's and of a block's.
ALONE = [
    Step(((16, (505,)),)),
    Step(((16, (505,)),), window=150, sinks=True, dtype=mx.bfloat16),
    Step(((16, (250,)),), bits=8, dtype=mx.float16, heads=7, kv=1),
    Step(
        ((16, (120,)),), dims=(256, 256), heads=8, kv=1, dtype=mx.bfloat16
    ),  # more than one threadgroup's rows
    Step(((16, (2040,)),), dims=(16, 16), heads=2, kv=1),
]


@pytest.mark.parametrize("step", ALONE, ids=["parts", "window", "packed", "wide", "far"])
def test_a_row_does_not_depend_on_what_runs_beside_it(step: Step) -> None:
    q, k, v, (group,), *rest = step.make()
    whole = simulated((q, k, v, [group], *rest))
    ((rows, (start,)),) = step.shapes

    def part(lo: int, hi: int, at: int = 0) -> Group:
        return Group(at, at + hi - lo, hi - lo, [start + lo], group.tables, step.size)

    for lo, hi in ((0, 1), (15, 16), (6, 11)):
        got = simulated((q[lo:hi], k, v, [part(lo, hi)], *rest))
        assert mx.array_equal(got, whole[lo:hi]), (lo, hi)
    # A neighbour that sees less, and one that sees as much with more rows, in one launch.
    table = group.tables[None][0]
    early = 40 if step.window is None else start  # what lies before a window is NaN
    groups = [
        part(7, 8),
        Group(1, 9, 4, [start + 3, early], {None: [table, table]}, step.size),
        part(2, 14, 9),
    ]
    got = simulated((mx.concatenate([q[7:8], q[3:7], q[:4], q[2:14]]), k, v, groups, *rest))
    for mine, lo, hi in ((got[:1], 7, 8), (got[1:5], 3, 7), (got[9:], 2, 14)):
        assert mx.array_equal(mine, whole[lo:hi]), (lo, hi)
    assert rows == 16 and mx.isfinite(got).all()


@on_simulator
@pytest.mark.parametrize("window", [None, 20, 257])
def test_starts_that_only_the_device_knows(window: int | None) -> None:
    """A larger grid and longer tables, and the same bits; what is not needed is not read either."""
    step = Step(((3, (126, 40)), (5, (254,))), window=window)
    q, k, v, groups, *rest = step.make()
    with reports() as known:
        want = kernel(q, k, v, groups, *rest)
    for behind in ((2, 0), (0, 2), (3, 3)):
        a = replace(
            groups[0], starts=[126 - behind[0], 40 - behind[1]], max_shift=3, shift=mx.array(behind)
        )
        b = replace(groups[1], starts=[250], max_shift=4, shift=mx.array([4]))
        with reports() as shifted:
            got = kernel(q, k, v, [a, b], *rest)
        assert mx.array_equal(got, want)
        for name, one, other in (
            ("keys", known[0], shifted[0]),
            ("values", known[0], shifted[0]),
            ("sums", known[1], shifted[1]),
        ):
            assert one.traffic[name].read == other.traffic[name].read
    mixed = [replace(groups[0]), b]
    assert mx.array_equal(simulated((q, k, v, mixed, *rest)), want)


@on_simulator
@pytest.mark.parametrize("bits, window", [(0, None), (8, 100), (4, None)])
@pytest.mark.parametrize("dtype, dim", [(mx.bfloat16, 128), (mx.float32, 64), (mx.float16, 256)])
def test_k_and_v_are_read_once_for_all_rows_and_heads(
    dtype: mx.Dtype, dim: int, bits: int, window: int | None
) -> None:
    """Each byte that a row sees by one lane of the whole grid, no other byte: GQA 8, 5 rows."""
    step = Step(((1, (17,)), (5, (125, 260))), dtype, 16, 2, (dim, dim), window, False, bits)
    with reports() as found:
        kernel(*step.make())
    traffic = found[0].traffic
    assert len(found) == 2
    for name, needed in zip(("keys", "values"), step.needed(), strict=True):
        assert traffic[name].read == traffic[name].read_unique == needed


@on_simulator
def test_rows_that_fill_more_than_a_threadgroup_share_what_they_can() -> None:
    """128 rows and heads of 256 values are two threadgroups' work: each of them reads K and V."""
    step = Step(((16, (100,)),), mx.bfloat16, 8, 1, (256, 256))
    with reports() as found:
        kernel(*step.make())
    read = found[0].traffic["keys"].read / step.needed()[0]
    assert 1.9 < read <= 2


@on_simulator
@pytest.mark.parametrize(
    "dtype, rows, dim",
    [(mx.bfloat16, 5, 128), (mx.bfloat16, 16, 128), (mx.float16, 5, 256)],
    ids=str,
)
def test_a_part_costs_its_sums_once_and_its_rows_of_q_once(
    dtype: mx.Dtype, rows: int, dim: int
) -> None:
    """Nothing of q is read for each tile of keys again, nothing of stats for each value that is put
    out."""
    start = 300
    step = Step(((rows, (start,)),), dtype, 8, 1, (dim, dim))
    with reports() as found:
        kernel(*step.make())
    parts, pairs = attention._part(start, 0) + 1, rows * 8
    assert parts == 3 and found[0].traffic["sums"].size == parts * pairs * dim * 4
    for name, each in (("sums", dim * 4), ("stats", 8)):
        assert found[0].traffic[name].written == found[1].traffic[name].read == parts * pairs * each
    assert found[0].traffic["q"].read <= -(-pairs // 64) * 64 * dim * dtype.size * parts


@pytest.mark.parametrize("context, most", [(2048, 0.5), (8192, 0.28), (32768, 0.15)])
def test_parts_cost_little_beside_k_and_v(context: int, most: float) -> None:
    """Sums and stats, written and read, and q, of 5 rows and 8 heads: as the test above counts
    them. And a part is no more than an eighth of the context, so that there is something to do for
    all cores."""
    parts = attention._part(context - 1, 0) + 1
    bytes_of_a_part = 5 * 8 * (2 * (128 * 4 + 8) + 128 * 2)
    assert parts * bytes_of_a_part < most * context * 2 * 128 * 2
    begins = [
        at for at in range(1, context) if attention._part(at, 0) != attention._part(at - 1, 0)
    ]
    assert max(b - a for a, b in zip([0, *begins], [*begins, context], strict=True)) <= context / 8


def test_a_window_has_parts_of_one_length() -> None:
    for window, length in ((1, 128), (511, 128), (512, 256), (4096, 512), (9000, 1024)):
        assert [attention._part(at, window) for at in range(0, 9 * length, length)] == list(
            range(9)
        )
        assert attention._part(length - 1, window) == 0


@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_rows_beside_the_pools_are_as_good_as_in_them(count: int, dtype: mx.Dtype) -> None:
    """The last positions' K and V, of sequences of which two are in one group, for sequences whose
    starts only the device knows as well. What the pools hold at these positions is not read."""
    step = Step(((1, (9, 130, 300)), (1, (12,))), dtype, size=4, dims=(32, 64), sinks=True, first=1)
    q, *pools, groups, scale, window, sinks, packings = step.make()
    rest = scale, window, sinks, packings
    late = replace(groups[1], starts=[9], max_shift=4, shift=mx.array([3]))
    want = simulated((q, *pools, groups, *rest)).astype(mx.float32)
    tables = [(s, t) for g in groups for s, t in zip(g.starts, g.tables[None], strict=True)]
    rows = []
    for back in range(count - 1, -1, -1):
        slots = mx.array([t[(s - back) // 4] * 4 + (s - back) % 4 for s, t in tables])
        rows.append(tuple(pool[:, slots].swapaxes(0, 1)[:, :, None] for pool in pools))
        rows[-1] = tuple(mx.concatenate([x, x]) for x in rows[-1])  # of some that draft no more
        pools = [pool.at[:, slots].add(float("nan")) for pool in pools]
    a = Attention(q, *pools, [groups[0], late], *rest)
    with metalsim.patch():
        got = attention.attention_beside(a, attention.shape_of(a), rows).astype(mx.float32)
    off = mx.abs(got - want)
    assert (off <= SUMMING * mx.abs(want).max() + 2 * STEP[dtype] * mx.abs(want)).all(), off.max()


@on_simulator
def test_nothing_is_read_of_a_sum_that_nobody_wrote() -> None:
    step = Step(((1, (3,)), (5, (400,))), window=None)
    with reports() as found:
        kernel(*step.make())
    written, read = found[0].traffic["sums"], found[1].traffic["sums"]
    assert found[0].kinds == {"output-not-written"}, "the short sequence has no sums of later parts"
    assert read.read_unique == written.written == written.written_unique


@pytest.mark.parametrize(
    "shapes, rows",
    [
        (((1, (3,)), (5, (30, 2)), (20, (0,))), slice(0, 11)),
        (((20, (0,)), (1, (3,)), (17, (4,)), (30, (0,))), slice(20, 21)),
    ],
    ids=["one", "neighbours"],
)
def test_longer_groups_go_through_the_reference(shapes: Shapes, rows: slice) -> None:
    q, k, v, *rest = Step(shapes).make()
    args = q, mx.nan_to_num(k), mx.nan_to_num(v), *rest
    got, want = simulated(args), reference.paged_attention(Attention(*args))
    same = np.array((got == want).all(axis=(1, 2)))
    assert not same[rows].any() and np.delete(same, rows).all()
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("window", [None, 12])
def test_rows_that_see_later_ones_go_through_the_reference(window: int | None) -> None:
    """In layers with a window alone; their neighbours keep the kernel's bits."""
    step = Step(((1, (3,)), (5, (30,)), (1, (9,))), window=window)
    q, k, v, groups, *rest = step.make()
    pools = mx.nan_to_num(k), mx.nan_to_num(v)
    plain = simulated((q, *pools, groups, *rest))
    groups[1].ends = mx.array([[-1, 34, 34, 34, -1]])
    args = q, *pools, groups, *rest
    got, want = simulated(args), reference.paged_attention(Attention(*args))
    same = np.array((got == plain).all(axis=(1, 2)))
    assert same[[0, 6]].all() and same[1:6].all() == (window is None)
    assert mx.allclose(got, want, atol=1e-5)
    shape = attention.shape_of(Attention(*args))
    assert shape and (window is None or not attention.kernel_alone(shape, groups))


@pytest.mark.parametrize("heads, kv", [(1, 1), (2, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("start", [3, 40, 140])
def test_few_heads(start: int, heads: int, kv: int) -> None:
    """One row of a short context has few sums: MLX passes fewer than 8 values otherwise."""
    check(Step(((1, (start,)),), heads=heads, kv=kv, dims=(16, 16)))
