"""Values: what the simulator computes is what Metal's language says."""

import mlx.core as mx
import numpy as np
import pytest

from tests import metalsim
from tests.metalsim.trial import run


@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("checked", [True, False])
def test_a_threadgroup_at_the_edge_is_smaller(order: int, checked: bool) -> None:
    body = "o[i] = simd_sum(x[i]) + threads_per_threadgroup.x;"
    o = np.array(run(body, n=100, group=64, order=order, checked=checked))
    sums = [sum(range(a, min(a + 32, 100))) + (64 if a < 64 else 36) for a in range(0, 100, 32)]
    assert o.tolist() == [sums[k // 32] for k in range(100)]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_each_operation_rounds(dtype: mx.Dtype) -> None:
    x = mx.array([0.1, 0.2, 0.3] * 10 + [1, 2], dtype)
    o = run("o[i] = x[i] * x[i] + x[i];", n=32, group=32, x=x, dtype=dtype)
    assert mx.array_equal(o, x * x + x).item()


@pytest.mark.parametrize("checked", [True, False])
def test_atomics(checked: bool) -> None:
    body = "atomic_fetch_add_explicit(&o[i % 4], x[i], memory_order_relaxed);"
    o = run(body, n=128, group=32, out=4, init=0, atomic=True, checked=checked)
    assert o.tolist() == [sum(range(j, 128, 4)) for j in range(4)]


def test_an_atomic_does_not_race_with_another() -> None:
    run(
        "atomic_fetch_add_explicit(&o[0], x[i], memory_order_relaxed);",
        128,
        32,
        out=1,
        init=0,
        atomic=True,
    )
    assert metalsim.last().findings == []


def test_strides_of_a_view() -> None:
    x = mx.arange(48).reshape(6, 8).astype(mx.bfloat16).T
    body = (
        "uint i = thread_position_in_grid.x; o[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];"
    )
    kernel = metalsim.metal_kernel("k", ["x"], ["o"], body, ensure_row_contiguous=False)
    (o,) = kernel(
        inputs=[x],
        grid=(48, 1, 1),
        threadgroup=(48, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    assert mx.array_equal(o, x).item()


@pytest.mark.parametrize("checked", [True, False])
def test_simdgroup_matrix(checked: bool) -> None:
    body = """
        simdgroup_half8x8 a, b;
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int k = 0; k < 24; k += 8) {
          simdgroup_load(a, x + k, 24);
          simdgroup_load(b, y + k, 24, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(c, a, b, c);
        }
        simdgroup_store(c, o, 8);"""
    given = np.random.default_rng(0).normal(size=(2, 8, 24)).astype(np.float16)
    inputs = {"x": mx.array(given[0]), "y": mx.array(given[1])}
    o = run(body, n=32, group=32, inputs=inputs, out=64, checked=checked)
    x, y = given.astype(np.float32)
    assert np.allclose(np.array(o).reshape(8, 8), x @ y.T, atol=1e-4)


def test_vectors() -> None:
    body = """
        float4 a = float4(x[0], float2(1, 2), 3); a.yz = a.zy;
        half4 h = half4(a); vec<float, 2> b = vec<float, 2>(1.5f, 2.5f);
        using V = vec<int, 4>; V v = V(1, 2, 3, 4);
        o[i] = float(h.y) + b.x + dot(a, float4(v)) + as_type<float>(as_type<uint>(a.w))
            + any(v == V(4)) + select(1.0f, 2.0f, true) + 1.0h;"""
    assert run(body)[0].item() == 2 + 1.5 + (2 * 2 + 1 * 3 + 3 * 4) + 3 + 1 + 2 + 1


def test_array_parameters_and_templates() -> None:
    header = """
        template <typename T, int N> T total(const device T a[N], threadgroup T s[2][4], uint l) {
          s[l & 1][0] = 0; T sum = 0;
          for (int k = 0; k < N; k++) sum += a[k];
          return sum;
        }"""
    body = "threadgroup float s[2][4]; o[i] = total<float, 4>(x, s, l) + 1.0;"
    assert run(body, n=2, group=2, x=mx.arange(8) / 2, header=header).tolist() == [4.0, 4.0]
