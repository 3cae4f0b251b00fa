"""small_qmm by Metal 4's tensor operations: the reference's values in any layout and order of
summing that Apple allows, rows that do not know of each other, weights that are read once."""

import mlx.core as mx
import pytest

from mlxspec.kernels import matmul, metal, reference_matmul, trial
from mlxspec.kernels.matmul import Format
from mlxspec.kernels.reference_matmul import Weights
from mlxspec.kernels.trial import Rejected, Timer, relative_error
from tests import metalsim
from tests.kernels import on_simulator
from tests.kernels.test_small_qmm import (
    ODD,
    OF_FLOATS,
    OTHERS,
    ROUNDING,
    arrays_of,
    dequantized,
    every_code,
    some,
)

# Of the sum of the products' magnitudes: what two bfloat keep of a weight; they vary in sign.
KEPT = 2**-18
FORMATS = [*((group, bits, "affine") for group in (32, 64, 128) for bits in (4, 8)), *OTHERS]
DTYPES = (mx.bfloat16, mx.float16)
ORDERS = (0, 1, 2, 3, 7, 12)
pytestmark = pytest.mark.usefixtures("device", "accelerators")


@pytest.fixture
def accelerators() -> None:
    if mx.default_device() == mx.Device(mx.gpu) and not metal.has_tensors():
        pytest.skip("this GPU has no neural accelerators")


def simulated(x: mx.array, weights: Weights, order: int = 0) -> mx.array:
    with metalsim.patch(order=order):
        return matmul.small_qmm(x, weights, "tensor")


def check(y: mx.array, x: mx.array, weights: Weights) -> None:
    want = reference_matmul.small_qmm(x, weights)
    assert y.dtype == x.dtype and y.shape == want.shape
    how = weights.group_size, weights.bits, weights.mode
    scales = weights.scales.astype(mx.float32) if weights.mode == "affine" else weights.scales
    arrays = (weights.weight, scales, weights.biases)
    w = mx.abs(mx.dequantize(*arrays, *how[:2], mode=how[2], dtype=mx.float32))
    allowed = KEPT * mx.abs(x.astype(mx.float32)) @ w.T
    assert (mx.abs(y - want) <= allowed + ROUNDING[x.dtype] * mx.abs(want)).all()


def rows_and_bytes(
    columns: int,
    k: int,
    form: tuple[int, int, str],
    dtype: mx.Dtype,
    order: int,
    counts: tuple[int, ...],
) -> None:
    """All of 16 rows against the reference, fewer of them to the bit, and each byte read once."""
    group, bits, mode = form
    x, weights = some(16, columns, k, group, bits, dtype, mode)
    whole = simulated(x, weights, order)
    fewer = []
    for rows in counts:
        fewer.append(simulated(x[:rows], weights, order))
        read = {name: each.read for name, each in metalsim.last().traffic.items()}
        for name, array in arrays_of(weights).items():
            assert read[name] == array.nbytes, (rows, name)
    check(whole, x, weights)
    for rows, y in zip(counts, fewer, strict=True):
        assert mx.array_equal(y, whole[:rows]), rows


@on_simulator
@pytest.mark.parametrize("order", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: tuple[int, int, str], dtype: mx.Dtype, order: int) -> None:
    rows_and_bytes(ODD, 9 * max(form[0], 32), form, dtype, order, (1, 2, 9, 16))


@pytest.mark.parametrize("order", ORDERS)
def test_each_count_of_rows_in_each_layout(order: int) -> None:
    x, weights = some(16, ODD, 320, 64, 4, mx.bfloat16)
    whole = simulated(x, weights, order)
    check(whole, x, weights)
    for rows in range(1, 16):
        assert mx.array_equal(simulated(x[:rows], weights, order), whole[:rows]), rows


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("columns", [8, 31, 32, 33, 70])
@pytest.mark.parametrize("k", [32, 96, 288, 992])
def test_shapes(k: int, columns: int, order: int) -> None:
    x, weights = some(3, columns, k, 32, 4, mx.bfloat16)
    check(simulated(x, weights, order), x, weights)


@pytest.mark.parametrize("order", ORDERS)
def test_more_turns_than_simd_groups(order: int) -> None:
    for k, group, bits in ((2176, 128, 4), (1056, 32, 8)):
        x, weights = some(7, 40, k, group, bits, mx.float16)
        check(simulated(x, weights, order), x, weights)


@pytest.mark.parametrize("mode, bits, group", OF_FLOATS)
def test_each_code_and_scale(mode: str, bits: int, group: int) -> None:
    """Of a format of floats, whose values one bfloat holds: rows of a unit matrix give these."""
    weights, k = every_code(mode, bits, group)
    want = dequantized(weights, mx.bfloat16)
    for first in range(0, k, 16):
        y = simulated(mx.eye(16, k, first).astype(mx.bfloat16), weights, order=4)
        assert mx.array_equal(y.T, want[:, first : first + 16])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_overflows_leaves_its_neighbours(bad: float) -> None:
    x, weights = some(5, ODD, 320, 64, 8, mx.bfloat16)
    want = simulated(x, weights)
    x[2] = bad
    got = simulated(x, weights)
    assert not mx.isfinite(got[2]).all()
    assert all(mx.array_equal(got[i], want[i]) for i in (0, 1, 3, 4))


@pytest.fixture
def m5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_tensors", lambda: True)


@pytest.mark.usefixtures("m5")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bits, group, mode", [(4, 64, "affine"), (8, 32, "affine"), (4, 16, "nvfp4")]
)
def test_a_case(bits: int, group: int, mode: str, dtype: mx.Dtype) -> None:
    """What a trial of it would find here: within the tolerance at a model's K."""
    case = matmul.small_qmm_case(24, 4096, Format(bits, group, mode, dtype))
    given = case.cut(case.inputs(1), 9)
    want = case.reference(*given)
    for order in (0, 3):
        with metalsim.patch(checked=False, order=order):
            relative_error(case.variants["tensor"](*given), want, case.tolerance, dtype)


def test_one_instance_for_all_counts_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()

    def launch(**how: object) -> list[mx.array]:
        made.add(tuple(dict(how["template"]).items()))
        return [mx.zeros(how["output_shapes"][0])]

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda *a: launch)
    x, weights = some(16, 8, 64, 64, 4, mx.bfloat16)
    for rows in range(1, 17):
        matmul.small_qmm(x[:rows], weights, "tensor")
    assert len(made) == 1


def test_where_a_case_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def variants(architecture: object, dtype: mx.Dtype = mx.bfloat16) -> list[str]:
        facts = {"architecture": architecture} if architecture else {}
        monkeypatch.setattr(mx, "device_info", lambda: facts)
        return list(matmul.small_qmm_case(24, 128, Format(4, 64, "affine", dtype)).variants)

    all_three = ["plain", "matrix", "tensor"]
    for each in ("applegpu_g17g", "applegpu_g17s", "applegpu_g18p", "applegpu_g20d"):
        assert variants(each) == all_three and variants(each, mx.float16) == all_three
        assert variants(each, mx.float32) == all_three[:2], "an M5 multiplies fp32 coarsely"
    for other in ("applegpu_g16s", "applegpu_g17p", "applegpu_g9", "x86_64", "", None):
        assert variants(other) == all_three[:2], other


@on_simulator
@pytest.mark.usefixtures("m5")
@pytest.mark.parametrize("order", [0, 1, 5])
def test_a_gpu_whose_bits_depend_on_the_place_is_found(order: int) -> None:
    """Apple does not say that they do not: a trial does."""
    case = matmul.small_qmm_case(40, 256, Format(4, 64, "affine", mx.float16))
    timer = Timer(float("inf"), lambda: None)
    with metalsim.patch(checked=False, order=order):
        trial.compare(case, case.variants["plain"], timer)
        if order < 2:
            trial.compare(case, case.variants["tensor"], timer)
        else:
            with pytest.raises(Rejected, match="a row depends on its place"):
                trial.compare(case, case.variants["tensor"], timer)
