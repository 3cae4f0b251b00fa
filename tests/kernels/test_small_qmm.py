"""small_qmm in the simulator: the reference's values, rows that do not know of each other."""

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import matmul, reference_matmul
from mlxspec.kernels.experts import experts_case, small_qmm_experts, sorted_choices
from mlxspec.kernels.matmul import Format
from mlxspec.kernels.metal import MetalKernel
from mlxspec.kernels.reference_matmul import Weights
from mlxspec.kernels.trial import Rejected, relative_error
from tests import metalsim
from tests.kernels import FLOATS, gather_mm, on_simulator

ROUNDING = {mx.float32: 0.0, mx.float16: 2**-10, mx.bfloat16: 2**-7}  # one step of the result
SUMMING = 1e-6  # of the sum of the products' magnitudes, in fp32
ODD = 13  # columns: neither of a SIMD-group's nor of a threadgroup's count
OTHERS = [(32, 3, "affine"), (64, 5, "affine"), (128, 6, "affine"), (64, 2, "affine")]
OTHERS += [(32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]
PLAIN = Format(16, 1, "none", mx.bfloat16)  # weights that are not quantized
pytestmark = pytest.mark.usefixtures("device")


def some(
    rows: int, columns: int, k: int, group: int, bits: int, dtype: mx.Dtype, mode: str = "affine"
) -> tuple[mx.array, Weights]:
    rng = np.random.default_rng(k)
    x, w = (
        mx.array(rng.normal(size=(n, k)).astype(np.float32)).astype(dtype) for n in (rows, columns)
    )
    if mode == "none":
        return x, Weights(w)
    w, scales, *biases = mx.quantize(w, group, bits, mode=mode)
    return x, Weights(w, scales, biases[0] if biases else None, group, bits, mode)


@pytest.fixture(params=[False, True], ids=["plain", "matrix"])
def matrix(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def multiply(x: mx.array, weights: Weights, matrix: bool) -> mx.array:
    return matmul.small_qmm(x, weights, "matrix" if matrix else "plain")


def simulated(x: mx.array, weights: Weights, matrix: bool, order: int = 0) -> mx.array:
    with metalsim.patch(order=order):
        return multiply(x, weights, matrix)


def read_of(name: str) -> int:
    """Bytes of an array that the last launch read; 0 where nothing was launched."""
    traffic = metalsim.last().traffic
    return traffic[name].read if name in traffic else 0


def arrays_of(weights: Weights) -> dict[str, mx.array]:
    arrays = {"w": weights.weight, "scales": weights.scales, "biases": weights.biases}
    return {name: array for name, array in arrays.items() if array is not None}


def check(y: mx.array, x: mx.array, weights: Weights) -> None:
    want = reference_matmul.small_qmm(x, weights)
    assert y.dtype == x.dtype and y.shape == want.shape
    got, want = (np.array(a.astype(mx.float32)) for a in (y, want))
    w = weights.weight.astype(mx.float32)
    if weights.scales is not None:
        w = dequantized(weights, mx.float32)
    allowed = SUMMING * np.abs(np.array(x.astype(mx.float32))) @ np.abs(np.array(w)).T
    assert (np.abs(got - want) <= allowed + ROUNDING[x.dtype] * np.abs(want)).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_reference_is_the_product_with_dequantized_weights(group: int, bits: int) -> None:
    x, weights = some(3, ODD, 384, group, bits, mx.bfloat16)
    scales, biases = weights.scales, weights.biases
    q = (np.array(weights.weight)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (
        2**bits - 1
    )
    s, b, rows = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (scales, biases, x))
    dense = (q.reshape(ODD, -1, group) * s[..., None] + b[..., None]).reshape(ODD, -1)
    got = np.array(reference_matmul.small_qmm(x, weights))
    assert np.allclose(got, rows @ dense.T, rtol=2**-8, atol=1e-5)


def rows_of_any_count(
    group: int, bits: int, dtype: mx.Dtype, matrix: bool, counts: range | tuple[int, ...]
) -> None:
    """All of 16 rows against the reference, and fewer of them to the bit."""
    x, weights = some(16, ODD, 5 * group, group, bits, dtype)
    whole = simulated(x, weights, matrix)
    check(whole, x, weights)
    for count in counts:
        assert mx.array_equal(simulated(x[:count], weights, matrix), whole[:count]), count


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_row_does_not_depend_on_the_count_of_rows(
    group: int, bits: int, dtype: mx.Dtype, matrix: bool
) -> None:
    rows_of_any_count(group, bits, dtype, matrix, (1, 2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_for_every_count_of_rows(group: int, bits: int, dtype: mx.Dtype, matrix: bool) -> None:
    rows_of_any_count(group, bits, dtype, matrix, range(1, 16))


@on_simulator
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("group, bits, mode", OTHERS)
def test_other_formats(group: int, bits: int, mode: str, dtype: mx.Dtype, matrix: bool) -> None:
    """Values, rows that do not know of each other, and each byte read once."""
    x, weights = some(16, ODD, 7 * max(group, 32), group, bits, dtype, mode)
    whole = simulated(x, weights, matrix)
    check(whole, x, weights)
    for rows in (1, 2, 5, 9):
        assert mx.array_equal(simulated(x[:rows], weights, matrix), whole[:rows]), rows
        read = {name: each.read for name, each in metalsim.last().traffic.items()}
        for name, array in arrays_of(weights).items():
            assert read[name] == array.nbytes, (rows, name)


@on_simulator
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("columns, k", [(ODD, 104), (5, 1160), (33, 512)])
def test_weights_that_are_not_quantized(columns: int, k: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(k)
    x, w = (mx.array(rng.normal(size=(n, k)), mx.float32).astype(dtype) for n in (16, columns))

    def run(rows: int, order: int = 0) -> mx.array:
        with metalsim.patch(order=order):
            return matmul.small_qmm(x[:rows], Weights(w))

    whole = run(16, order=7)
    fewer = {rows: (run(rows), read_of("w")) for rows in (1, 2, 5, 9)}
    check(whole, x, Weights(w))
    for rows, (y, read) in fewer.items():
        assert mx.array_equal(y, whole[:rows]), rows
        assert read == w.nbytes


def test_a_case_of_weights_that_are_not_quantized() -> None:
    case = matmul.small_qmm_case(24, 96, PLAIN)
    assert case.name == "small_qmm 24x96 of bfloat16" and set(case.variants) == {"plain"}
    given = case.cut(case.inputs(1), 5)
    want = case.reference(*given)
    with metalsim.patch(checked=False):
        relative_error(case.variants["plain"](*given), want, case.tolerance, mx.bfloat16)
    assert mx.abs(case.stock(*given) - want).max() < 0.05 * mx.abs(want).max()


EXPERTS, TOP = 6, 2


def experts(
    rows: int, columns: int, k: int, group: int, bits: int, dtype: mx.Dtype, mode: str, own: bool
) -> tuple[mx.array, Weights, mx.array]:
    """Rows of K for each row, or for each choice of its `own`; weights; and choices, of which
    expert 3 has most and expert 4 none."""
    x, weights = some(rows * (TOP if own else 1), EXPERTS * columns, k, group, bits, dtype, mode)
    for name in ("weight", "scales", "biases"):
        if (array := getattr(weights, name)) is not None:
            setattr(weights, name, array.reshape(EXPERTS, columns, -1))
    chosen = np.array([(3, (0, 1, 2, 5)[row % 4]) for row in range(rows)], np.uint32)
    return x, weights, mx.array(chosen.flatten())


@on_simulator
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "columns, k, group, bits, mode, dtype",
    [
        (13, 96, 32, 4, "affine", mx.bfloat16),
        (8, 224, 32, 4, "mxfp4", mx.float16),
        (5, 1152, 64, 6, "affine", mx.float32),
        (7, 544, 16, 4, "nvfp4", mx.bfloat16),
        (6, 552, 1, 16, "none", mx.bfloat16),
        (9, 104, 1, 16, "none", mx.float16),
    ],
)
def test_experts(
    columns: int, k: int, group: int, bits: int, mode: str, dtype: mx.Dtype, own: bool
) -> None:
    """Values; choices that do not know of each other; each expert that was chosen is read once."""
    x, weights, chosen = experts(16, columns, k, group, bits, dtype, mode, own)

    def run(rows: int, order: int = 0) -> mx.array:
        count = len(x) // 16 * rows
        with metalsim.patch(order=order):
            choices = sorted_choices(chosen[: rows * TOP])
            return small_qmm_experts(x[:count], weights, choices, rows)

    whole = run(16, order=7)
    fewer = {rows: (run(rows), read_of("w")) for rows in (1, 2, 3, 7)}
    of = np.arange(16 * TOP) // (1 if own else TOP)
    for i in range(0, 16 * TOP, 5):
        e = chosen[i].item()
        arrays = (weights.weight, weights.scales, weights.biases)
        one = Weights(*(None if a is None else a[e] for a in arrays), group, bits, mode)
        check(whole[i : i + 1], x[int(of[i]) : int(of[i]) + 1], one)
    for rows, (y, read) in fewer.items():
        assert mx.array_equal(y, whole[: rows * TOP]), rows
        used = len(set(np.array(chosen)[: rows * TOP]))
        assert read == used * weights.weight.nbytes // EXPERTS


@on_simulator
def test_an_expert_of_more_rows_than_a_launch_holds() -> None:
    """Is read again, and its rows are the same."""
    x, weights, chosen = experts(40, 8, 96, 32, 4, mx.bfloat16, "affine", False)
    with metalsim.patch():
        whole = small_qmm_experts(x, weights, sorted_choices(chosen), 40)
        alone = [
            small_qmm_experts(x[i : i + 1], weights, sorted_choices(chosen[2 * i : 2 * i + 2]), 1)
            for i in range(0, 40, 7)
        ]
    for i, y in zip(range(0, 40, 7), alone, strict=True):
        assert mx.array_equal(whole[2 * i : 2 * i + 2], y)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", [Format(4, 32, "mxfp4", mx.bfloat16), PLAIN])
def test_a_case_of_experts(form: Format, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    case = experts_case(40, 24, 96, 2, form, shared)
    kind = "one row" if shared else "own rows"
    assert case.name == f"small_qmm_experts 2 of 40x24x96 of {form.name}, {kind}"
    inputs = case.inputs(0)
    assert inputs[2].shape[0] == 32, "no more than 16 rows can choose"
    for rows in (1, 5, 16):
        given = case.cut(inputs, rows)
        want = case.reference(*given)
        assert want.shape == (rows, 2, 24) and want.dtype == mx.float32
        with metalsim.patch(checked=False):
            y = case.variants["plain"](*given)
        relative_error(y, want, case.tolerance, mx.bfloat16)
        off = mx.abs(case.stock(*given) - want).max()  # it sums in the rows' own dtype on a CPU
        assert off < 0.05 * mx.abs(want).max()


OF_FLOATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def every_code(mode: str, bits: int, group: int) -> tuple[Weights, int]:
    """Weights that have each code and many scales of a format of floats, and their K."""
    codes = np.tile(np.arange(2**bits, dtype=np.uint8), 32 * 8 // 2**bits)
    if bits == 8:
        codes[codes % 128 == 127] = 0  # no number
    else:
        codes = codes[::2] | codes[1::2] << 4
    weight = mx.array(np.tile(codes, (8, 1)).view(np.uint32))
    k = weight.shape[1] * 32 // bits
    steps = np.arange(8 * k // group).reshape(8, -1)
    scales = mx.array((steps % 126 if mode == "nvfp4" else 40 + 2 * steps).astype(np.uint8))
    return Weights(weight, scales, None, group, bits, mode), k


def dequantized(weights: Weights, dtype: mx.Dtype) -> mx.array:
    w, scales, group, bits = weights.weight, weights.scales, weights.group_size, weights.bits
    if weights.biases is not None:
        scales = scales.astype(dtype)
    return mx.dequantize(w, scales, weights.biases, group, bits, mode=weights.mode, dtype=dtype)


@pytest.mark.parametrize("mode, bits, group", OF_FLOATS)
def test_each_code_and_scale(mode: str, bits: int, group: int, matrix: bool) -> None:
    """Of a format of floats: rows of a unit matrix give the weights themselves."""
    weights, k = every_code(mode, bits, group)
    want = dequantized(weights, mx.float32)
    assert mx.isfinite(want).all()
    found = [simulated(mx.eye(16, k, first), weights, matrix).T for first in range(0, k, 16)]
    assert mx.array_equal(mx.concatenate(found, axis=1), want)


LANES = MetalKernel(
    "lanes",
    "qmm_weights",
    "w scales",
    "y",
    body="const auto weights = qmm_quantized<BITS, GROUP, FORMAT>(w, scales, scales, QMM_SPAN);"
    " float values[QMM_RUN]; const uint n = thread_position_in_grid.y;"
    " weights.run(n, 0, thread_index_in_simdgroup, values);"
    " for (int i = 0; i < QMM_RUN; i++) {"
    " y[n * QMM_SPAN + QMM_RUN * thread_index_in_simdgroup + i] = values[i]; }",
)


@on_simulator
@pytest.mark.parametrize("mode, bits, group", OF_FLOATS)
def test_a_lane_has_what_mlx_dequantizes(mode: str, bits: int, group: int) -> None:
    """Of each code with each scale: those below the normal ones, both zeros, and none, as MLX has
    them: a scale of E8M0's largest code is infinite there."""
    codes = (np.random.default_rng(0).permutation(matmul.SPAN) % 2**bits).astype(np.uint8)
    if bits == 4:  # two a byte
        codes = codes[::2] | codes[1::2] << 4
    w = mx.array(np.tile(codes, (256, 1)).view(np.uint32))
    scales = mx.array(np.repeat(np.arange(256, dtype=np.uint8), matmul.SPAN // group))
    weights = Weights(w, scales.reshape(256, -1), None, group, bits, mode)
    with metalsim.patch():
        (got,) = LANES(
            [w, weights.scales],
            (32, 256, 1),
            (32, 1, 1),
            output_shapes=[(256, matmul.SPAN)],
            output_dtypes=[mx.float32],
            **matmul.template_of(weights),
        )
    want = dequantized(weights, mx.float32)
    none = np.isnan(want)
    assert none.any() and np.isinf(want).any() == (mode != "nvfp4")
    assert np.array_equal(np.isnan(got), none)
    found, expected = (np.array(a).view(np.uint32)[~none] for a in (got, want))
    assert np.array_equal(found, expected)  # to the bit: zeros have a sign


def test_scales_and_biases_of_two_dtypes(matrix: bool) -> None:
    x, weights = some(3, ODD, 128, 64, 4, mx.float32)
    weights.scales = weights.scales.astype(mx.bfloat16)
    check(simulated(x, weights, matrix), x, weights)


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("columns", [8, 15, 33])
@pytest.mark.parametrize("k", [32, 96, 288, 992])
def test_shapes(k: int, columns: int, order: int, matrix: bool) -> None:
    x, weights = some(3, columns, k, 32, 4, mx.bfloat16)
    check(simulated(x, weights, matrix, order), x, weights)


@on_simulator
@pytest.mark.parametrize("columns", [1, 5, ODD])
@pytest.mark.parametrize(
    "k, group, bits, split", [(544, 32, 4, 2), (1152, 128, 8, 4), (2112, 64, 4, 8)]
)
def test_simd_groups_that_share_k(k: int, group: int, bits: int, split: int, columns: int) -> None:
    """Values, rows that do not know of each other, and weights that are read once."""
    assert matmul._split(columns, k) == split
    for order in (0, 7):
        x, weights = some(16, columns, k, group, bits, mx.bfloat16)
        whole = simulated(x, weights, False, order)
        check(whole, x, weights)
        assert metalsim.last().traffic["w"].read == weights.weight.nbytes
    for count in (1, 3):
        assert mx.array_equal(simulated(x[:count], weights, False), whole[:count]), count


@pytest.mark.parametrize("mode", ["affine", "none"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_a_product_is_added_before_it_is_rounded(rows: int, mode: str) -> None:
    """In each instance: of a product and its opposite, which are not whole in fp32, the second
    takes away the exact one, so that what the first has lost by rounding is left."""
    third, w = np.float32(1 / 3), 1.25 + 2**-7
    x = mx.array(np.tile([third, -third, *[0] * 30], (rows, 1)).astype(np.float32))
    weights = Weights(mx.full((8, 32), w, mx.bfloat16))
    if mode == "affine":  # each weight is its bias
        scales = mx.zeros((8, 1))
        weights = Weights(mx.zeros((8, 4), mx.uint32), scales, scales + w, 32, 4)
    exact = w * np.float64(third)
    lost = np.float32(exact) - exact
    assert lost != 0
    assert (np.array(simulated(x, weights, False)) == np.float32(lost)).all()


def test_the_fewest_and_the_most_rows_of_each_instance_are_raced() -> None:
    raced = {*matmul.small_qmm_case(24, 512, PLAIN).raced}
    assert raced == {rows for most in (1, 2, 4, 8, 16) for rows in (most // 2 + 1, most)}


def test_k_is_shared_where_columns_alone_do_not_fill_a_gpu() -> None:
    found = {(n, k): matmul._split(n, k) for n in (64, 1024, 4096, 8192) for k in (256, 512, 4096)}
    assert [found[n, 4096] for n in (64, 1024, 4096, 8192)] == [8, 8, 2, 1]
    assert found[64, 256] == 1 and found[64, 512] == 2 and found[4096, 512] == 2


@pytest.mark.parametrize("columns", range(1, 9))
@pytest.mark.parametrize("k, group, bits", [(256, 32, 4), (512, 64, 8), (1024, 128, 4)])
def test_few_columns(k: int, group: int, bits: int, columns: int, matrix: bool) -> None:
    x, weights = some(2, columns, k, group, bits, mx.float16)
    check(simulated(x, weights, matrix), x, weights)


@on_simulator
@pytest.mark.parametrize("k, group, bits", [(288, 32, 4), (320, 64, 4), (384, 128, 8)])
def test_weights_are_read_once_for_any_count_of_rows(
    k: int, group: int, bits: int, matrix: bool
) -> None:
    """Each byte, by one lane of the whole grid; odd counts of columns and a last span that is not
    full. And rows are those of 16 to the bit."""
    x, weights = some(16, ODD, k, group, bits, mx.bfloat16)
    whole = simulated(x, weights, matrix)
    for rows in (1, 2, 4, 5, 9, 15, 16):
        assert mx.array_equal(simulated(x[:rows], weights, matrix), whole[:rows]), rows
        read = {name: each.read for name, each in metalsim.last().traffic.items()}
        for name, array in arrays_of(weights).items():
            assert read[name] == array.nbytes, (rows, name)


def test_scales_of_another_dtype_than_the_rows(matrix: bool) -> None:
    x, weights = some(3, ODD, 128, 64, 4, mx.bfloat16)
    x = x.astype(mx.float32)
    check(simulated(x, weights, matrix), x, weights)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_row_that_overflows_leaves_its_neighbours(bad: float, matrix: bool) -> None:
    x, weights = some(5, ODD, 320, 64, 8, mx.float32)
    want = simulated(x, weights, matrix)
    x[2] = bad
    got = simulated(x, weights, matrix)
    assert not mx.isfinite(got[2]).all()
    assert all(mx.array_equal(got[i], want[i]) for i in (0, 1, 3, 4))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_case(bits: int, dtype: mx.Dtype) -> None:
    """What a proof of it would find here: each way within the tolerance, inputs by the seed,
    finite."""
    case = matmul.small_qmm_case(24, 128, Format(bits, 64, "affine", dtype))
    assert (
        case.name == f"small_qmm 24x128 of {bits} bits, group 64, {str(dtype).rpartition('.')[2]}"
    )
    given = case.cut(case.inputs(1), 9)
    assert all(
        mx.array_equal(a, b) for a, b in zip(given, case.cut(case.inputs(1), 9), strict=True)
    )
    assert not mx.array_equal(given[1], case.inputs(2)[1])
    want = case.reference(*given)
    assert want.shape == (9, 24) and want.dtype == mx.float32 and mx.abs(want).max() > 0.1
    with metalsim.patch(checked=False):
        found = {way: run(*given) for way, run in case.variants.items()}
    for y in found.values():
        relative_error(y, want, case.tolerance, dtype)
    assert set(found) == {"plain", "matrix"} and case.rows == tuple(range(1, 17))
    stock = case.stock(*given)  # sums in the rows' own dtype on a CPU
    assert stock.dtype == dtype and mx.abs(stock - want).max() < 0.05 * mx.abs(want).max()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_case_sees_small_mistakes(bits: int, dtype: mx.Dtype) -> None:
    """As a kernel would make them that is right but for this: all of it is below what bfloat16
    rounds to."""
    case = matmul.small_qmm_case(64, 1024, Format(bits, 64, "affine", dtype))
    x, w, scales, biases = case.inputs(0)
    want = case.reference(x, w, scales, biases)
    relative_error(want.astype(dtype), want, case.tolerance, dtype)
    last = mx.arange(1024) < 1023
    for wrong in (
        (
            x,
            w & mx.array(~1 & 0xFFFFFFFF, mx.uint32),
            scales,
            biases,
        ),  # the lowest bit of each word is lost
        (x * last.astype(dtype), w, scales, biases),  # the last value of K
        (x, w, scales, mx.where(mx.arange(16) < 15, biases, 0)),  # the last group's bias
    ):
        with pytest.raises(Rejected, match="off by"):
            relative_error(case.reference(*wrong).astype(dtype), want, case.tolerance, dtype)


def test_few_instances_for_all_counts_of_rows(
    matrix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a proof tries each of those that run."""
    seats = []

    def launch(**how: object) -> list[mx.array]:
        seats.append(dict(how["template"])["M"])
        return [mx.zeros(how["output_shapes"][0])]

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda *a: launch)
    x, weights = some(16, 8, 64, 64, 4, mx.float32)
    for rows in range(1, 17):
        multiply(x[:rows], weights, matrix)
    assert seats == ([8] * 8 + [16] * 8 if matrix else [1, 2, 4, 4, *[8] * 4, *[16] * 8])
    raced = {
        seats[rows - 1]
        for rows in matmul.small_qmm_case(8, 64, Format(4, 64, "affine", mx.float32)).raced
    }
    assert raced == set(seats)
