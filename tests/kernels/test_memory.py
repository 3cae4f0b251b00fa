"""What a start-up proof of the largest shapes keeps in memory at once."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxspec.kernels import attention, matmul, sampling, trial
from mlxspec.kernels.experts import experts_case
from mlxspec.kernels.matmul import Format
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.trial import Case, Inputs

LIMIT = 256 << 20
LARGE = attention.Shape(mx.bfloat16, 32, 8, 128, 128, 32)


def size_of_sets(inputs: Inputs) -> int:
    """Bytes of all inputs of a race."""
    size = sum(x.nbytes for x in inputs)
    return size * (1 + min(trial.MAX_SETS, trial.ROTATED_BYTES // size))


def held(case: Case, rows: int) -> int:
    """Bytes of a race, with all that MLX's own op makes for one call."""
    inputs = case.inputs(0)
    mx.eval(inputs)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(case.stock(*case.cut(inputs, rows)))
    return size_of_sets(inputs) + mx.get_peak_memory() - before


def test_attention_of_a_long_context() -> None:
    case = attention.paged_attention_cases(LARGE)[-1]
    assert trial.ROTATED_BYTES < held(case, 2) <= LIMIT
    inputs = case.inputs(0)
    mx.eval(inputs)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(case.reference(*case.cut(inputs, 2)))
    assert mx.get_peak_memory() - before <= 64 << 20, "K and V are not in fp32 all at once"


def test_attention_over_quantized_pools() -> None:
    """Its op makes a copy of the pools and an unpacked one."""
    packing = Packing(128, mx.bfloat16, 8)
    shape = replace(LARGE, packings=(packing, packing))
    inputs = attention.paged_attention_cases(shape)[-1].inputs(0)
    pools = sum(x.nbytes for x in inputs)
    assert size_of_sets(inputs) + pools + attention.MAX_POOL_BYTES <= LIMIT


def test_a_large_lm_head() -> None:
    """Of all its columns the weights alone take 780 MB; an instance of the kernel is the same."""
    case = matmul.small_qmm_case(152_064, 5120, Format(8, 64, "affine", mx.bfloat16))
    inputs = case.inputs(0)
    assert size_of_sets(inputs) <= LIMIT
    columns = len(inputs[1])
    assert columns < 152_064 and matmul._split(columns, 5120) == matmul._split(152_064, 5120)


@pytest.mark.parametrize("n, k", [(151_936, 2048), (5120, 17_408)])
def test_weights_that_are_not_quantized(n: int, k: int) -> None:
    """Not all of them are in fp32 at once."""
    case = matmul.small_qmm_case(n, k, Format(16, 1, "none", mx.bfloat16))
    inputs = case.inputs(0)
    mx.eval(inputs)
    assert size_of_sets(inputs) <= LIMIT
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(case.reference(*inputs))
    assert sum(x.nbytes for x in inputs) + mx.get_peak_memory() - before <= LIMIT


@pytest.mark.parametrize(
    "experts, n, k, top, form",
    [
        (128, 5760, 2880, 4, Format(4, 32, "mxfp4", mx.bfloat16)),
        (256, 2048, 512, 8, Format(4, 64, "affine", mx.bfloat16)),
        (512, 1024, 4096, 10, Format(8, 64, "affine", mx.bfloat16)),
        (256, 512, 2048, 8, Format(16, 1, "none", mx.bfloat16)),
    ],
)
def test_many_experts(experts: int, n: int, k: int, top: int, form: Format) -> None:
    case = experts_case(experts, n, k, top, form, True)
    inputs = case.inputs(0)
    mx.eval(inputs)
    assert size_of_sets(inputs) <= LIMIT
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(case.reference(*inputs))
    assert sum(x.nbytes for x in inputs) + mx.get_peak_memory() - before <= LIMIT
    some, columns, _ = inputs[2].shape
    assert top <= some <= experts
    assert matmul._split(columns * top, k) == matmul._split(n * top, k)


def test_sampling_of_a_large_vocabulary() -> None:
    case = sampling.sample_accept_case(262_144, mx.float32)
    assert held(case, case.raced[-1]) <= LIMIT
