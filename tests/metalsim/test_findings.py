"""Every kind of mistake that the simulator must see, and that it says where."""

import mlx.core as mx
import pytest

from tests import metalsim
from tests.metalsim.trial import run
from tests.support.parameter_rows import only

WAIT = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MISTAKES = {
    "oob-read": "o[i] = x[i + 1];",
    "oob-write": "o[i + 1] = x[i];",
    "write-to-const": "((device float*)x)[i] = 1; o[i] = 0;",
    "uninitialised-read": f"threadgroup float s[64]; if (l < 63) s[l] = x[i]; {WAIT} o[i] = s[l];",
    "uninitialised-variable": "float a; if (x[i] > 7) a = 1; o[i] = a;",
    "race": "threadgroup float s[64]; s[l] = x[i]; o[i] = s[63 - l];",
    "barrier-divergence": f"if (l < 32) {WAIT}\n else {WAIT}\n o[i] = 0;",
    "barrier-after-exit": f"o[i] = 0; if (l >= 60) return; {WAIT}",
    "shuffle-from-inactive-lane": "o[i] = simd_shuffle(x[i], 32);",
    "array-index": "float a[4] = {0, 0, 0, 0}; a[l & 7] = 1; o[i] = a[0];",
    "misaligned": "o[i] = 0; if (i < 8) { float4 v = *(const device float4*)(x + i); o[i] = v.x + v.w; }",
    "threadgroup-oob": f"""
        threadgroup float s[64]; threadgroup float t[64]; threadgroup float* p = s;
        p[l + 1] = 1; t[l] = 2; {WAIT} o[i] = s[l | 1] + t[l];""",
    "wild-pointer": "o[i] = *((const device float*)((ulong)x * 3));",
    "timeout": "o[i] = 0; while (x[i] >= 0) {}",
    "integer-division": "int z = (int)x[0]; o[i] = l / z;",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_found(kind: str) -> None:
    with pytest.raises(metalsim.MetalSimError) as error:
        run(MISTAKES[kind], timeout=1.0, severity={"benign-race": "error"})
    assert kind in {finding.kind for finding in error.value.report.errors}, str(error.value)


def test_memory_that_nobody_writes_is_not_optimised_away() -> None:
    with pytest.raises(metalsim.MetalSimError, match="uninitialised-read"):
        run(f"threadgroup float s[64]; {WAIT} o[i] = s[l];")


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float s[64]; s[l] = 1; threadgroup float* p = s; o[i] = p[l + 128];",
        "threadgroup float s[64]; threadgroup float* p = s; p[l + 128] = 1; o[i] = s[l] = 1;",
    ],
)
def test_what_lies_behind_all_threadgroup_memory_is_outside(body: str) -> None:
    with pytest.raises(metalsim.MetalSimError, match="threadgroup-oob"):
        run(body)


def test_private_memory_holds_no_number_until_it_is_written() -> None:
    o = run("float a[4]; if (l != 1) a[l & 3] = 0; o[i] = a[l & 3];", n=2, group=2)
    assert mx.isnan(o).tolist() == [False, True]


def test_a_finding_says_who_what_and_where() -> None:
    with pytest.raises(metalsim.MetalSimError) as error:
        run("threadgroup float s[64]; s[l] = x[i];\n\n  o[i] = simd_sum(x[i + 1]) + s[63 - l];")
    told = [str(finding) for finding in error.value.report.errors]
    where = "threadgroup 0 thread 63: 4 bytes at `x` byte 256 (element 64 of 64)"
    assert f"error: k.metal:4:19: [oob-read] {where}" in told
    race = next(line for line in told if "race" in line and "read by" in line.split("races")[0])
    assert race.startswith("error: k.metal:4:31: [race] read by threadgroup 0 thread")
    assert "threadgroup `s`" in race and " at k.metal:2:" in race


def test_the_line_is_the_kernels_own_where_a_function_of_metal_reads() -> None:
    with pytest.raises(metalsim.MetalSimError) as error:
        run(
            "simdgroup_float8x8 m;\n  simdgroup_load(m, x + 1, 8);\n  simdgroup_store(m, o, 8);",
            32,
            32,
            out=64,
        )
    assert {f.where.rpartition(":")[0] for f in error.value.report.errors} == {"k.metal:3"}


def test_a_simdgroup_barrier_orders_its_own_simdgroup_only() -> None:
    body = """
        threadgroup float s[64]; s[l] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[%s];"""
    run(body % "l ^ 1")
    with pytest.raises(metalsim.MetalSimError):
        run(body % "l ^ 32")


def test_a_barrier_orders_the_memory_that_it_names() -> None:
    body = """
        o[i] = x[i]; threadgroup_barrier(mem_flags::%s); float v = o[l ^ 33];
        threadgroup_barrier(mem_flags::mem_device); o[i] = v;"""
    run(body % "mem_device")
    with pytest.raises(metalsim.MetalSimError):
        run(body % "mem_threadgroup")


@pytest.mark.parametrize(
    ("body", "out"),
    [("o[l] = x[i];", None), ("if (l == 0) { if (i == 0) o[0] = x[i]; else o[0] += x[i]; }", 1)],
)
def test_threadgroups_race(body: str, out: int | None) -> None:
    with pytest.raises(metalsim.MetalSimError):
        run(body, n=128, out=out)


def test_a_second_reader_does_not_hide_the_first() -> None:
    body = "threadgroup float s[2]; s[0] = 1; " + WAIT
    with pytest.raises(metalsim.MetalSimError) as error:
        run(body + "o[i] = 0; if (l == 0 || l == 40) o[i] = s[0]; if (l == 40) s[0] = 2;")
    assert "race" in {finding.kind for finding in error.value.report.errors}


def test_a_race_of_equal_values_is_a_warning() -> None:
    run("o[i] = x[i]; o[0] = 0;")
    assert {(f.kind, f.severity) for f in metalsim.last().findings} == {("benign-race", "warn")}
    run("o[i] = x[i]; o[0] = 0;", severity={"benign-race": "ignore"})
    assert metalsim.last().findings == []


def test_an_output_not_written_is_told() -> None:
    run("if (i != 7) o[i] = x[i];")
    assert [f.text for f in metalsim.last().findings] == ["1 of 64 elements were never written"]
    run("if (i != 7) o[i] = x[i];", init=0.0)
    assert metalsim.last().findings == []


def test_lanes_that_diverge_are_told_and_left_out() -> None:
    o = run("o[i] = 0; if (lane < 5) o[i] = simd_sum(1.0f);", n=32, group=32)
    assert o.tolist() == [5.0] * 5 + [0.0] * 27
    assert "simd-divergence" in metalsim.last().kinds


def test_bfloat_is_never_converted_to_silently() -> None:
    with pytest.raises(metalsim.MetalSimError) as error:
        run("o[i] = x[i] * 2.0f;", dtype=mx.bfloat16)
    assert [f.kind for f in error.value.report.errors] == ["bfloat-implicit-conversion"]
    run("o[i] = static_cast<bfloat>(x[i] * 2.0f);", dtype=mx.bfloat16)


@pytest.mark.parametrize(
    "body",
    only(
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
        0,
        3,
        5,
        7,
        9,
    ),
)
def test_what_metal_does_not_compile(body: str) -> None:
    with pytest.raises(metalsim.MetalCompileError, match=r"k\.metal:2:\d+: error"):
        run(body, header="inline float f(threadgroup float* p) { return p[0]; }")


@pytest.mark.parametrize(
    ("body", "group", "message"),
    [
        ("threadgroup float s[8193]; s[l] = 0; o[i] = s[l];", 64, "32772 exceeds the 32768 bytes"),
        ("o[i] = 0;", 1025, "1025"),
    ],
)
def test_limits_of_a_threadgroup(body: str, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(body, group=group)


def test_more_buffers_than_metal_has() -> None:
    with pytest.raises(ValueError, match="32 buffers; Metal allows 31"):
        run("o[i] = 0;", inputs={f"x{k}": mx.zeros(1) for k in range(31)})
