"""gather_small_qmm in the simulator: each pair has the bits of small_qmm, an active expert is read
once."""

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import matmul, reference
from mlxspec.kernels.reference import Weights
from mlxspec.kernels.trial import ROUNDING, relative_error
from tests import metalsim
from tests.kernels import FLOATS, on_simulator

Arrays = tuple[mx.array, mx.array, mx.array]
E, N = 6, 13
pytestmark = pytest.mark.usefixtures("device")


def some(
    rows: int, k: int, group: int, bits: int, dtype: mx.Dtype, n: int = N
) -> tuple[mx.array, Arrays]:
    rng = np.random.default_rng(k)
    x, w = (
        mx.array(rng.normal(size=size).astype(np.float32)).astype(dtype)
        for size in ((rows, k), (E, n, k))
    )
    return x, mx.quantize(w, group, bits)


def experts(*of: int) -> mx.array:
    return mx.array(of, mx.uint32)


def drawn(pairs: int, among: int = E) -> mx.array:
    return mx.array(np.random.default_rng(pairs).integers(0, among, pairs).astype(np.uint32))


def simulated(
    x: mx.array,
    weights: Arrays,
    of: mx.array,
    group: int,
    bits: int,
    tokens: int = 16,
    order: int = 0,
) -> mx.array:
    with metalsim.patch(order=order):
        return matmul.gather_small_qmm(x, Weights(*weights, group, bits), of, tokens)


def alone(x: mx.array, weights: Arrays, of: mx.array, group: int, bits: int) -> mx.array:
    """Each pair by small_qmm, one row at a time."""
    w, scales, biases = weights
    share = of.size // len(x)
    with metalsim.patch(checked=False):
        rows = [
            matmul.small_qmm(x[i // share][None], Weights(w[e], scales[e], biases[e], group, bits))
            for i, e in enumerate(of.tolist())
        ]
    return mx.concatenate(rows)


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize(
    "k, group, bits, dtype",
    [
        (96, 32, 4, mx.bfloat16),
        (320, 64, 8, mx.float16),
        (640, 128, 4, mx.float32),  # K is shared by two SIMD-groups
        (2112, 64, 4, mx.bfloat16),  # by eight
    ],
)
def test_each_row_is_that_of_small_qmm(
    k: int, group: int, bits: int, dtype: mx.Dtype, share: int
) -> None:
    """To the bit, whatever the other pairs; and the reference's value."""
    of = drawn(24)
    x, weights = some(24 // share, k, group, bits, dtype)
    y = simulated(x, weights, of, group, bits)
    assert y.dtype == dtype and mx.array_equal(y, alone(x, weights, of, group, bits))
    want = reference.gather_small_qmm(x.astype(mx.float32), Weights(*weights, group, bits), of)
    off = mx.abs(y.astype(mx.float32) - want) - ROUNDING.get(dtype, 0) * mx.abs(want)
    assert off.max() <= matmul.TOLERANCE * mx.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_for_every_count_of_pairs(group: int, bits: int, dtype: mx.Dtype) -> None:
    for pairs in (*range(1, 18), 31, 32, 33, 64, 96, 128):
        of = drawn(pairs)
        x, weights = some(pairs, 5 * group, group, bits, dtype)
        assert mx.array_equal(
            simulated(x, weights, of, group, bits, order=pairs), alone(x, weights, of, group, bits)
        )


def test_the_reference_is_the_product_with_each_experts_weights() -> None:
    x, weights = some(4, 128, 64, 4, mx.float32)
    of = experts(3, 0, 5, 5, 0, 2, 1, 3)
    dense = mx.dequantize(*weights, 64, 4)
    want = mx.stack([dense[e] @ x[i // 2] for i, e in enumerate(of.tolist())])
    got = reference.gather_small_qmm(x, Weights(*weights, 64, 4), of)
    assert got.shape == (8, N) and mx.allclose(got, want, 1e-4, 1e-4)


@on_simulator
@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize(
    "of",
    [
        experts(2),
        experts(4, 1, 4),  # fewer than 8 lie in constant memory
        experts(*[3] * 16),
        experts(*[3] * 9, *[0] * 9),
        experts(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0),
        mx.sort(drawn(64, 5)),
        drawn(128, 5)[::-1],
    ],
    ids=["one", "three", "alike", "two", "apart", "sorted", "most"],
)
def test_runs_wherever_they_lie(of: mx.array, order: int) -> None:
    """Weights that some pair needs are read once, and again for every 16 pairs more; of others, no
    byte."""
    x, weights = some(of.size, 288, 32, 4, mx.bfloat16)
    y = simulated(x, weights, of, 32, 4, order=order)
    found = metalsim.last().traffic
    if not order:
        assert mx.array_equal(y, alone(x, weights, of, 32, 4))
    counts = np.bincount(np.array(of), minlength=E)
    for name, array in zip(("w", "scales", "biases"), weights, strict=True):
        assert found[name].read == array.nbytes // E * int(np.ceil(counts / 16).sum()), name
        was_read = found[name].was_read.reshape(E, -1)
        assert (was_read == (counts > 0)[:, None]).all(), name


@on_simulator
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_room_for_fewer_rows_reads_weights_again_and_changes_no_bit(tokens: int) -> None:
    of = experts(1, 1, 4, 1, 1, 0, 1, 4, 1, 1)  # seven of one expert
    x, weights = some(5, 288, 32, 4, mx.float16)
    want = alone(x, weights, of, 32, 4)
    y = simulated(x, weights, of, 32, 4, tokens)
    heads = {1: 7 + 2 + 1, 2: 4 + 1 + 1, 3: 2 + 1 + 1, 8: 3}[tokens]  # room for 1, 2, 4, 8
    assert metalsim.last().traffic["w"].read == weights[0].nbytes // E * heads
    assert mx.array_equal(y, want)


def test_a_pair_that_overflows_leaves_its_neighbours() -> None:
    of = experts(2, 2, 2, 1)
    x, weights = some(4, 320, 64, 8, mx.float32)
    want = simulated(x, weights, of, 64, 8)
    x[1] = float("nan")
    got = simulated(x, weights, of, 64, 8)
    assert mx.isnan(got[1]).all() and all(mx.array_equal(got[i], want[i]) for i in (0, 2, 3))


@pytest.mark.parametrize("n", [3, 8, 33])
def test_columns(n: int) -> None:
    of = drawn(9)
    x, weights = some(9, 96, 32, 4, mx.bfloat16, n)
    assert mx.array_equal(simulated(x, weights, of, 32, 4), alone(x, weights, of, 32, 4))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_case(rows: int, apart: bool) -> None:
    """Of 6 pairs for a token, whose rows of x it shares or not; 16 tokens' pairs are sorted."""
    case = matmul.gather_small_qmm_case(9, 24, 128, 4, 64, mx.bfloat16, 6, apart)
    assert (
        case.name
        == f"gather_small_qmm 9x24x128 of 4 bits, group 64, bfloat16, top 6{' apart' * apart}"
    )
    most = case.inputs(1)
    given = case.cut(most, rows)
    assert [a.shape for a in given[:2]] == [(rows, 6 if apart else 1, 128), (rows, 6)]
    assert (
        all(len(set(of)) == 6 for of in given[1].tolist()) and given[1].max() < len(given[2]) <= 9
    )
    want = case.reference(*given)
    x = mx.repeat(given[0].reshape(-1, 128), 1 if apart else 6, axis=0).astype(mx.float32)
    dense = mx.dequantize(given[2], *(a.astype(mx.float32) for a in given[3:]), 64, 4)
    pairs = [dense[e] @ x[i] for i, e in enumerate(of_all(given[1]))]
    assert mx.allclose(want, mx.stack(pairs), 1e-4, 1e-4) and mx.abs(want).max() > 0.1
    with metalsim.patch(checked=False):
        relative_error(case.variants["plain"](*given), want, case.tolerance, mx.bfloat16)
    relative_error(
        case.stock(*given), want.astype(mx.bfloat16), 0.05, mx.bfloat16
    )  # a CPU's own sums in bfloat16


def of_all(experts: mx.array) -> list[int]:
    return [int(e) for e in experts.flatten().tolist()]


@pytest.mark.parametrize(
    "top, rows, raced",
    [
        (1, 16, (1, 2, 3, 5, 8, 9, 16)),
        (8, 16, (1, 2, 3, 5, 8, 9, 16)),
        (10, 12, (1, 2, 3, 5, 8, 9, 12)),
        (40, 3, (1, 2, 3)),
    ],
)
def test_what_a_proof_launches_is_what_a_layer_launches(
    top: int, rows: int, raced: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens, as far as 128 pairs go; each instance for the fewest and the most tokens that it
    is for."""
    case = matmul.gather_small_qmm_case(64, 8, 64, 4, 64, mx.float16, top, top == 8)
    assert case.rows == tuple(range(1, rows + 1)) and case.raced == raced
    launched = []

    def launch(**how: object) -> list[mx.array]:
        launched.append((dict(how["template"])["M"], how["inputs"][1].size, len(how["inputs"][0])))
        return [mx.zeros((how["inputs"][1].size, 8), mx.float16)]

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda *a: launch)
    for count in case.rows:
        case.variants["plain"](*case.cut(case.inputs(0), count))
    seats = {n: next(m for m in (1, 2, 4, 8, 16) if m >= n) for n in case.rows}
    shared = [1 if top == 8 or n * top >= matmul.SORTED else top for n in case.rows]
    assert launched == [
        (seats[n], n * top, n * top // s) for n, s in zip(case.rows, shared, strict=True)
    ]
    assert {seats[n] for n in raced} == set(seats.values())


def test_experts_that_no_token_goes_to_are_not_made() -> None:
    case = matmul.gather_small_qmm_case(1000, 8, 64, 4, 64, mx.float16, 2, False)
    _, experts, w, scales, biases = case.inputs(0)
    assert {len(w), len(scales), len(biases)} == {len(set(of_all(experts)))} and 16 < len(w) <= 32
