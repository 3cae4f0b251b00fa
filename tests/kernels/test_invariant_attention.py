"""Attention whose rows keep their bits: contexts of several parts, alone and beside longer ones."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import attention, invariant
from mlxspec.kernels.attention import ROWS
from mlxspec.kernels.inputs import Attention, Group
from mlxspec.kernels.reference import paged_attention
from tests import metalsim
from tests.kernels.test_attention import Step
from tests.support import dispatch

HEADS, KV, DIM, SIZE = 4, 2, 16, 32
# Two of them with rows whose windows of 100 or 300 begin on both sides of a part's bound.
CONTEXTS = (40, 100, 128, 129, 200, 228, 300, 310, 380, 428, 500, 640, 900)
BLOCKS = sum(-(-n // SIZE) for n in CONTEXTS) + 1


@pytest.fixture(autouse=True)
def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan in a tree, as a GPU may have it: what adds by one has other bits beside a longer
    neighbour."""

    def scan(x: mx.array, axis: int) -> mx.array:
        step, x = 1, mx.moveaxis(x, axis, 0)
        while step < len(x):
            x = mx.concatenate([x[:step], x[:-step] + x[step:]])
            step *= 2
        return mx.moveaxis(x, 0, axis)

    monkeypatch.setattr(mx, "cumsum", scan)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_keeps_its_bits(rows: int, window: int | None, sinks: bool) -> None:
    """Beside longer contexts, and whether it is one row of a step or the last of several."""
    rng = np.random.default_rng(2)
    pools = [mx.array(rng.normal(size=(KV, BLOCKS * SIZE, DIM)).astype(np.float32)) for _ in "kv"]
    order = iter(rng.permutation(np.arange(1, BLOCKS)).tolist())
    tables = [[next(order) for _ in range(-(-n // SIZE))] for n in CONTEXTS]
    q = rng.normal(size=(len(CONTEXTS), rows, HEADS, DIM)).astype(np.float32)
    sink = mx.array(rng.normal(size=HEADS).astype(np.float32)) if sinks else None

    def attend(of: list[int], first: int) -> list[mx.array]:
        """The rows from `first` on of these sequences in one step."""
        starts = [CONTEXTS[i] - rows + first for i in of]
        count = (rows - first) * len(of)
        group = Group(0, count, rows - first, starts, {None: [tables[i] for i in of]}, SIZE)
        given = Attention(
            mx.array(q[of][:, first:].reshape(count, HEADS, DIM)),
            *pools,
            [group],
            0.3,
            window,
            sink,
        )
        got = invariant.attention(given)
        assert np.allclose(np.array(got), np.array(paged_attention(given)), atol=1e-5)
        return mx.split(got, len(of))

    together = attend(list(range(len(CONTEXTS))), 0)
    for i, rows_of_it in enumerate(together):
        [alone] = attend([i], 0)
        assert mx.array_equal(rows_of_it, alone), CONTEXTS[i]
        [last] = attend([i], rows - 1)
        assert mx.array_equal(alone[-1:], last), CONTEXTS[i]


@pytest.mark.parametrize("window", [None, 300])
def test_another_order_of_parts_shows(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's parts in pairs, as those of other layers; all parts in one sum of MLX's."""
    usual = invariant._sum

    def added(parts: mx.array, _: bool) -> mx.array:
        return usual(parts, False) if window else mx.cumsum(parts, axis=3)[:, :, :, -1]

    monkeypatch.setattr(invariant, "_sum", added)
    with pytest.raises(AssertionError):
        test_a_row_keeps_its_bits(5, window, False)


SHAPES = [(4, 1, 128), (8, 1, 256), (1, 1, 16), (8, 2, 128), (3, 3, 64)]


@pytest.mark.parametrize("chip", dispatch.CHIPS)
@pytest.mark.parametrize("heads, kv, dim", SHAPES)
def test_its_products_go_by_one_kernel(heads: int, kv: int, dim: int, chip: str) -> None:
    """On any chip: of rows alone, together, and beside shorter and longer contexts."""
    rng = np.random.default_rng(3)
    contexts, most = (30, 100, 128, 200, 300), 17
    tables = np.split(1 + np.arange(50), 5)
    pools = [mx.array(rng.normal(size=(kv, 51 * SIZE, dim)).astype(np.float32)) for _ in "kv"]
    q = mx.array(rng.normal(size=(5, most, heads, dim)).astype(np.float32)).astype(mx.bfloat16)

    def attend(of: list[int], first: int, to: int) -> mx.array:
        """Rows [of, to - first, heads, dim]."""
        starts = [contexts[i] - most + first for i in of]
        count = (to - first) * len(of)
        group = Group(0, count, to - first, starts, {None: [tables[i].tolist() for i in of]}, SIZE)
        rows = q[mx.array(of), first:to].reshape(count, heads, dim)
        got = invariant.attention(Attention(rows, *pools, [group], 0.1, None, None))
        return got.reshape(len(of), to - first, heads, dim)

    with dispatch.on(dispatch.CHIPS[chip]):
        for i in range(5):
            one = mx.concatenate([attend([i], t, t + 1)[0] for t in range(most)])
            for first, to in ((0, 2), (3, 8), (0, most)):
                assert mx.array_equal(attend([i], first, to)[0], one[first:to]), (i, first, to)
                beside = attend([0, i, 4], first, to)[1]
                assert mx.array_equal(beside, one[first:to]), (i, first, to)


BY_KERNEL = [
    Step(dtype=mx.bfloat16),
    Step(dtype=mx.bfloat16, heads=4, kv=1),
    Step(dtype=mx.float16, window=100, sinks=True),
    Step(bits=8, heads=7, kv=1, window=150),
    Step(dtype=mx.bfloat16, heads=8, kv=1, dims=(256, 256)),
    Step(heads=1, kv=1, dims=(16, 16), sinks=True),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("far", [120, 505, 2040])
@pytest.mark.parametrize("step", BY_KERNEL)
def test_a_row_keeps_its_bits_by_the_kernel(step: Step, far: int) -> None:
    """One row alone, in steps of 2 to 17, and beside shorter and longer contexts."""
    most = ROWS + 1
    others = [(1, (3,)), (4, (far + 90,)), (1, (far // 2,)), (most, (40,))]
    args = replace(step, shapes=((most, (far,)), *others)).make()
    q, keys, values, (group, *beside), *rest = args

    def attend(rows: list[mx.array], groups: list[Group]) -> mx.array:
        a = Attention(mx.concatenate(rows), keys, values, groups, *rest)
        with metalsim.patch(checked=False):
            return attention.invariant_attention(a, attention.shape_of(a), True)

    def part(lo: int, hi: int, at: int = 0) -> Group:
        return Group(at, at + hi - lo, hi - lo, [far + lo], group.tables, step.size)

    def moved(other: Group, by: int) -> Group:
        return replace(other, lo=other.lo + by, hi=other.hi + by)

    one = mx.concatenate([attend([q[i : i + 1]], [part(i, i + 1)]) for i in range(most)])
    for count in range(2, most + 1):
        got = attend([q[:count]], [part(0, count)])
        assert mx.array_equal(got, one[:count]), count
    for lo, hi in ((0, 1), (6, 8), (1, most)):
        after = [moved(other, hi - lo - most) for other in beside]
        got = attend([q[lo:hi], q[most:]], [part(lo, hi), *after])
        assert mx.array_equal(got[: hi - lo], one[lo:hi]), (lo, hi)
        before = [moved(other, -most) for other in beside]
        got = attend([q[most:], q[lo:hi]], [*before, part(lo, hi, len(q) - most)])
        assert mx.array_equal(got[lo - hi :], one[lo:hi]), (lo, hi)
