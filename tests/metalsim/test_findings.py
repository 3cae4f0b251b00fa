"""Every kind of mistake the simulator must see."""

import mlx.core as mx
import numpy as np
import pytest

from tests import metalsim as ms


def run(
    src, n=64, tg=64, x=None, out=None, dt=mx.float32, header="", init=None, inputs=None, names=("x",), **kw
):
    x = mx.arange(n).astype(mx.float32) if x is None else x
    k = ms.metal_kernel("k", list(names), ["o"], src, header)
    with ms.configure(**kw):
        return k(
            inputs=inputs or [x],
            grid=(n, 1, 1),
            threadgroup=(tg, 1, 1),
            output_shapes=[(out or n,)],
            output_dtypes=[dt],
            init_value=init,
        )[0]


I = "uint i = thread_position_in_grid.x; uint l = thread_index_in_threadgroup; uint lane = thread_index_in_simdgroup; (void)i; (void)l; (void)lane;\n"
BAD = {
    "oob-read": "o[i] = x[i + 1];",
    "oob-write": "o[i + 1] = x[i];",
    "write-to-const": "((device float*)x)[i] = 1; o[i] = 0;",
    "uninitialised-read": "threadgroup float s[64]; if (l < 63) s[l] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[l];",
    "race": "threadgroup float s[64]; s[l] = x[i]; o[i] = s[63 - l];",
    "barrier-divergence": "if (l < 32) threadgroup_barrier(mem_flags::mem_none);\n else threadgroup_barrier(mem_flags::mem_none);\n o[i] = 0;",
    "barrier-after-exit": "o[i] = 0; if (l >= 60) return; threadgroup_barrier(mem_flags::mem_none);",
    "shuffle-from-inactive-lane": "o[i] = simd_shuffle(x[i], 32);",
    "array-index": "float a[4] = {0, 0, 0, 0}; a[l & 7] = 1; o[i] = a[0];",
    "misaligned": "o[i] = 0; if (i < 8) { float4 v = *(const device float4*)(x + i); o[i] = v.x + v.w; }",
    "threadgroup-oob": "threadgroup float s[64]; threadgroup float t[64]; threadgroup float* p = s; p[l + 1] = 1; t[l] = 2; threadgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[l | 1] + t[l];",
    "wild-pointer": "o[i] = *((const device float*)((ulong)x * 3));",
    "timeout": "o[i] = 0; while (x[i] >= 0) {}",
    "integer-division": "int z = (int)x[0]; o[i] = l / z;",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad(kind):
    with pytest.raises(ms.MetalSimError) as e:
        run(I + BAD[kind], timeout=2.0, severity={"benign-race": "error"})
    kinds = {f.kind for f in e.value.report.errors}
    assert kind in kinds, str(e.value)
    print(e.value)


def test_race_across_simdgroups_only_without_tg_barrier():
    src = (
        I
        + "threadgroup float s[64]; s[l] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[%s];"
    )
    run(src % "l ^ 1")
    with pytest.raises(ms.MetalSimError):
        run(src % "l ^ 32")


def test_barrier_flag_matters():
    src = (
        I
        + "o[i] = x[i]; threadgroup_barrier(mem_flags::%s); float v = o[l ^ 33]; threadgroup_barrier(mem_flags::mem_device); o[i] = v;"
    )
    run(src % "mem_device")
    with pytest.raises(ms.MetalSimError):
        run(src % "mem_threadgroup")


def test_race_between_threadgroups():
    with pytest.raises(ms.MetalSimError):
        run(I + "o[l] = x[i];", n=128)
    with pytest.raises(ms.MetalSimError):
        run(I + "if (l == 0) { if (i == 0) o[0] = x[i]; else o[0] += x[i]; }", n=128, out=1)


def test_benign_race_is_a_warning():
    run(I + "o[i] = x[i]; o[0] = 0;")
    assert [f.kind for f in ms.last().findings] == ["benign-race"]


def test_unwritten_output():
    run(I + "if (i != 7) o[i] = x[i];")
    assert "output-not-written" in {f.kind for f in ms.last().findings}
    run(I + "if (i != 7) o[i] = x[i];", init=0.0)
    assert not ms.last().findings


def test_simd_divergence_active_lanes():
    o = run(I + "o[i] = 0; if (lane < 5) o[i] = simd_sum(1.0f);", n=32, tg=32)
    assert np.array(o).tolist() == [5.0] * 5 + [0.0] * 27
    assert "simd-divergence" in {f.kind for f in ms.last().findings}


def test_implicit_bfloat():
    with pytest.raises(ms.MetalSimError) as e:
        run(I + "o[i] = x[i] * 2.0f;", dt=mx.bfloat16)
    assert e.value.report.errors[0].kind == "bfloat-implicit-conversion"
    run(I + "o[i] = static_cast<bfloat>(x[i] * 2.0f);", dt=mx.bfloat16)


@pytest.mark.parametrize(
    "src",
    [
        "threadgroup float s[4]; device float* p = s; o[i] = p[0];",
        "float* p = o; p[i] = 0;",
        "const device float& r = o[i]; thread const float* q = &r; o[i] = *q;",
        "o[i] = f(x);",
        "double d = 1; o[i] = d;",
        "o[i] = max(1, 2u);",
        "o[i] = exp(1);",
        "int n = (int)x[0]; float a[n]; o[i] = a[0];",
        "x[i] = 1; o[i] = 0;",
        "half h = bfloat(1.0f); o[i] = h;",
    ],
)
def test_compile_errors(src):
    with pytest.raises(ms.MetalCompileError):
        run(I + src, header="inline float f(threadgroup float* p) { return p[0]; }")


def test_nonuniform_edge_threadgroup_and_orders():
    src = I + "o[i] = simd_sum(x[i]) + threads_per_threadgroup.x;"
    ref = None
    for order in (0, 1, 5):
        o = np.array(run(src, n=100, tg=64, order=order))
        ref = o if ref is None else ref
        assert (o == ref).all() and o[99] == sum(range(96, 100)) + 36


def test_half_and_bfloat_round_each_operation():
    x = mx.array([0.1, 0.2, 0.3] * 10 + [1, 2], mx.float16)
    o = run(I + "o[i] = x[i] * x[i] + x[i];", n=32, tg=32, x=x, dt=mx.float16)
    assert (np.array(o) == np.array(x * x + x)).all()
    x = x.astype(mx.bfloat16)
    o = run(I + "o[i] = x[i] * x[i] + x[i];", n=32, tg=32, x=x, dt=mx.bfloat16)
    assert mx.array_equal(o, x * x + x).item()


def test_atomics():
    k = ms.metal_kernel(
        "k",
        ["x"],
        ["o"],
        "atomic_fetch_add_explicit(&o[thread_position_in_grid.x % 4], x[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    o = k(
        inputs=[mx.arange(128).astype(mx.float32)],
        grid=(128, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(4,)],
        output_dtypes=[mx.float32],
        init_value=0,
    )[0]
    assert np.array(o).tolist() == [sum(range(j, 128, 4)) for j in range(4)]


def test_strides():
    x = mx.arange(48).reshape(6, 8).astype(mx.bfloat16).T
    k = ms.metal_kernel(
        "k",
        ["x"],
        ["o"],
        "uint i = thread_position_in_grid.x; o[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];",
        ensure_row_contiguous=False,
    )
    o = k(
        inputs=[x], grid=(48, 1, 1), threadgroup=(48, 1, 1), output_shapes=[x.shape], output_dtypes=[x.dtype]
    )[0]
    assert mx.array_equal(o, x).item()


def test_simdgroup_matrix():
    src = """
    simdgroup_half8x8 a, b; simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k = 0; k < 24; k += 8) { simdgroup_load(a, x + k, 24); simdgroup_load(b, y + k, 24, ulong2(0, 0), true); simdgroup_multiply_accumulate(c, a, b, c); }
    simdgroup_store(c, o, 8);"""
    x, y = (mx.random.normal((8, 24)).astype(mx.float16) for _ in range(2))
    o = run(src, n=32, tg=32, inputs=[x, y], names=("x", "y"), out=64)
    assert np.allclose(
        np.array(o).reshape(8, 8), np.array(x, np.float32) @ np.array(y, np.float32).T, atol=1e-4
    )


def test_vectors():
    src = (
        I
        + """
    float4 a = float4(x[0], float2(1, 2), 3); a.yz = a.zy; half4 h = half4(a); vec<float, 2> b = vec<float, 2>(1.5f, 2.5f);
    using V = vec<int, 4>; V v = V(1, 2, 3, 4); o[i] = float(h.y) + b.x + dot(a, float4(v)) + as_type<float>(as_type<uint>(a.w)) + any(v == V(4)) + select(1.0f, 2.0f, true) + 1.0h;"""
    )
    assert np.array(run(src))[0] == 2 + 1.5 + (2 * 2 + 1 * 3 + 3 * 4) + 3 + 1 + 2 + 1
