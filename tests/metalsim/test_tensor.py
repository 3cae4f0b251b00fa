"""Metal 4's matmul2d: each freedom that Apple's text leaves is taken, each misuse that it names is
found."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import metalsim
from tests.metalsim.trial import run

M, N, K = 16, 32, 16
SEEDS = (0, 1, 2, 3, 11)
HEADER = """
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
#define EACH(t) for (ushort j = 0; j < t.get_capacity(); j++) if (t.is_valid_element(j))
"""
# a: half of x [M, K]; b: bfloat of y [K, N]; c: [M, N]
OPERANDS = """
constexpr auto form = matmul2d_descriptor(16, 32, 16, false, false, {relaxed}, matmul2d_descriptor::mode::{mode});
matmul2d<form, execution_simdgroup> op;
auto a = op.template get_left_input_cooperative_tensor<half, bfloat, float>();
auto b = op.template get_right_input_cooperative_tensor<half, bfloat, float>();
auto c = op.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(a)>, remove_addrspace_t<decltype(b)>, float>();
"""
FILL_A = "EACH(a) { auto at = a.get_multidimensional_index(j); a[j] = x[16 * at[1] + at[0]]; }\n"
FILL_B = "EACH(b) { auto at = b.get_multidimensional_index(j); b[j] = y[32 * at[1] + at[0]]; }\n"
FILL_C = "EACH(c) { auto at = c.get_multidimensional_index(j); c[j] = z[32 * at[1] + at[0]]; }\n"
STORE = "EACH(c) { auto at = c.get_multidimensional_index(j); o[32 * at[1] + at[0]] = c[j]; }\n"


def operands(mode: str = "multiply_accumulate", relaxed: bool = False) -> str:
    return OPERANDS.format(mode=mode, relaxed=str(relaxed).lower())


def arrays(alike: bool = False) -> dict[str, mx.array]:
    """`alike`: all rows of x are one, and all columns of y."""
    rng = np.random.default_rng(4)
    x, y, z = (rng.normal(size=shape) for shape in ((M, K), (K, N), (M, N)))
    if alike:
        x[:], y[:], z[:] = x[0], y[:, :1], z[0, 0]
    return {
        "x": mx.array(x, mx.float16),
        "y": mx.array(y, mx.bfloat16),
        "z": mx.array(z, mx.float32),
    }


def ran(body: str, given: dict[str, mx.array] | None = None, **settings: Any) -> mx.array:
    """[M, N] of one SIMD-group."""
    o = run(body, 32, 32, inputs=given or arrays(), out=M * N, header=HEADER, **settings)
    return o.reshape(M, N)


def product(order: int, given: dict[str, mx.array], relaxed: bool = False) -> np.ndarray:
    body = operands(relaxed=relaxed) + FILL_A + FILL_B + FILL_C + "op.run(a, b, c);" + STORE
    return np.array(ran(body, given, order=order))


def exact(given: dict[str, mx.array]) -> np.ndarray:
    x, y, z = (np.array(given[name].astype(mx.float32), np.float64) for name in "xyz")
    return np.asarray(x @ y + z)


@pytest.mark.parametrize("order", SEEDS)
@pytest.mark.parametrize("checked", [True, False])
def test_a_product_is_right_in_any_layout(order: int, checked: bool) -> None:
    given = arrays()
    with metalsim.configure(checked=checked):
        assert np.allclose(product(order, given), exact(given), rtol=0, atol=4e-6)


def test_multiply_does_not_read_the_destination() -> None:
    given = arrays()
    body = operands("multiply") + FILL_A + FILL_B + "op.run(a, b, c);" + STORE
    want = exact(given) - np.array(given["z"])
    assert np.allclose(np.array(ran(body, given, order=5)), want, rtol=0, atol=4e-6)


def places(role: str, order: int, of: str = "half") -> np.ndarray:
    """[32 lanes, room]: the element that a thread holds there, -1 where none; `of`: a's type."""
    width = {"a": K, "b": N, "c": N}[role]
    body = f"""{operands().replace("<half", f"<{of}")}
    for (int j = 0; j < 20; j++) {{
      auto at = {role}.get_multidimensional_index(j);
      bool has = j < {role}.get_capacity() && {role}.is_valid_element(j);
      o[20 * lane + j] = j >= {role}.get_capacity() ? -2 : has ? at[1] * {width} + at[0] : -1;
    }}"""
    o = run(body, 32, 32, inputs=arrays(), out=640, header=HEADER, order=order)
    found = np.array(o, int).reshape(32, 20)
    assert (found == -2).any(axis=0).tolist() == (found == -2).all(axis=0).tolist()
    return found[:, (found != -2).all(axis=0)]


@pytest.mark.parametrize("role", ["a", "b", "c"])
def test_a_seed_says_where_elements_lie(role: str) -> None:
    """Each lies once; in places that no seed shares, in a room of any size, and not in all of it."""
    size = M * K if role == "a" else M * N
    found = {order: places(role, order) for order in range(8)}
    for lies in found.values():
        assert sorted(lies[lies >= 0]) == list(range(size))
    assert len({lies.shape[1] for lies in found.values()}) > 2, "room"
    assert len({tuple(lies[:, 0]) for lies in found.values()}) == len(found)
    assert any((lies < 0).any() and (lies[:, 0] < 0).any() for lies in found.values())


def test_operands_of_one_size_lie_differently() -> None:
    for order in (2, 3):
        assert not np.array_equal(places("b", order), places("c", order))
        assert not np.array_equal(places("b", order), places("b", order, "bfloat"))


def test_a_sum_may_have_any_order() -> None:
    given = arrays()
    found = [product(order, given) for order in SEEDS]
    assert len({each.tobytes() for each in found}) == len(SEEDS)
    assert all(np.array_equal(product(order, given), found[i]) for i, order in enumerate(SEEDS))


@pytest.mark.parametrize("order", SEEDS)
def test_rows_and_columns_that_are_alike_may_have_other_orders(order: int) -> None:
    """Nothing says that an element's bits do not depend on its place."""
    y = product(order, arrays(alike=True))
    assert (len(np.unique(y)) > 1) == (order > 1)


def test_a_row_does_not_depend_on_what_is_in_others() -> None:
    """What is taken for granted: an order depends on no value."""
    given = arrays()
    want = product(7, given)
    given["x"] = mx.concatenate([given["x"][:3], mx.zeros((M - 3, K), mx.float16)])
    assert np.array_equal(product(7, given)[:3], want[:3])


def test_relaxed_precision_loses_some() -> None:
    given = arrays()
    off = np.abs(product(3, given, relaxed=True) - exact(given)).max()
    assert 1e-4 < off < 0.05


FOUND = [
    ("tensor-lanes-missing", "if (lane < 31) op.run(a, b, c);"),
    ("tensor-unwritten", "op.run(a, d, c);"),
    ("tensor-invalid-element", "c[c.get_capacity()] = 1; op.run(a, b, c);"),
    ("tensor-invalid-element", "for (ushort j = 0; j < d.get_capacity(); j++) d[j] = y[0];"),
]


@pytest.mark.parametrize(("kind", "body"), FOUND)
def test_a_misuse_is_found_where_it_is(kind: str, body: str) -> None:
    before = "o[lane] = 0;" + operands() + "auto d = b;\n" + FILL_A + FILL_B + FILL_C
    with pytest.raises(metalsim.MetalSimError) as error:
        ran(before + body, order=3)
    errors = error.value.report.errors
    assert {each.kind for each in errors} == {kind}, str(error.value)
    line = 2 + before.count("\n")
    assert all(each.where.startswith(f"k.metal:{line}:") for each in errors), str(error.value)


def test_a_part_of_a_simdgroup_cannot_run_it() -> None:
    body = operands() + FILL_A + FILL_B + FILL_C + "op.run(a, b, c); o[lane] = 0;"
    with pytest.raises(metalsim.MetalSimError, match="tensor-lanes-missing"):
        run(body, 24, 24, inputs=arrays(), out=24, header=HEADER)


@pytest.mark.parametrize("missing", ["a", "b", "c"])
def test_what_nobody_has_written_is_found(missing: str) -> None:
    """All but one element."""
    body = operands() + FILL_A + FILL_B + FILL_C
    body = body.replace(f"EACH({missing}) {{", f"EACH({missing}) if (lane || j) {{")
    with pytest.raises(metalsim.MetalSimError, match="nobody has written column"):
        ran(body + "op.run(a, b, c); o[lane] = 0;", order=0)


@pytest.mark.parametrize("order", SEEDS)
def test_a_layout_taken_for_granted_is_found(order: int) -> None:
    """That of an M5, which MLX's kernels know: 8 elements of a fragment of 16 x 16."""
    body = f"""{operands()}
    const short q = lane >> 2, m = (q & 4) | ((lane >> 1) & 3), n = ((q & 2) | (lane & 1)) * 4;
    for (short j = 0; j < 8; j++) {{
      const short row = m + (j >> 2) * 8, column = n + j % 4;
      a[j] = x[16 * row + column];
      b[j] = y[32 * row + column];
      b[8 + j] = y[32 * row + 16 + column];
      c[j] = z[32 * row + column];
      c[8 + j] = z[32 * row + 16 + column];
    }}
    op.run(a, b, c);
    for (short j = 0; j < 8; j++) {{
      o[32 * (m + (j >> 2) * 8) + n + j % 4] = c[j];
      o[32 * (m + (j >> 2) * 8) + 16 + n + j % 4] = c[8 + j];
    }}"""
    given = arrays()
    try:
        got = np.array(ran(body, given, order=order))
    except metalsim.MetalSimError as error:
        assert "tensor-" in str(error)
    else:
        assert not np.allclose(got, exact(given), rtol=0, atol=0.1)


OTHER = "matmul2d<matmul2d_descriptor({}), execution_simdgroup{}> other;"
ANOTHER = "auto d = op.template get_{}_input_cooperative_tensor<{}, bfloat, float>();"
REFUSED = {
    "must be 32": OTHER.format("16, 16, 16", ""),
    "multiple of 16": OTHER.format("8, 8, 32", ""),
    "only one SIMD-group": OTHER.format("16, 32, 16", "s<2>"),
    "transposed": OTHER.format("16, 32, 16, false, true", ""),
    "only half and bfloat": ANOTHER.format("left", "float"),
    "wrong place": "op.run(b, a, c);",
    "another operation": OTHER.format("16, 32, 16", "") + "other.run(a, b, c);",
    "two operations": ANOTHER.format("right", "bfloat") + "op.run(a, d, c);",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_apple_or_the_simulator_refuses(why: str) -> None:
    with pytest.raises(metalsim.MetalCompileError, match=why):
        ran(operands() + REFUSED[why])
