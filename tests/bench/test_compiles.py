"""What Apple's compiler is given at a model's first start."""

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from bench.compiles import cases_of, instances
from bench.sizes import read_config
from mlxspec.kernels import matmul
from mlxspec.kernels.matmul import Format
from tests import metalsim


def test_an_instance_is_counted_once_for_all_shapes() -> None:
    """Constants and dtypes make one, not how many columns there are."""
    form = Format(4, 64, "affine", mx.bfloat16)
    few = instances([matmul.small_qmm_case(9000, 256, form)])
    assert Counter(name for name, *_ in few) == {"small_qmm": 5, "small_qmm_matrix": 2}
    assert instances([matmul.small_qmm_case(n, 256, form) for n in (9000, 9999)]) == few
    assert len(instances([matmul.small_qmm_case(9000, 256, Format(8, 64, *form_of(form)))])) == 7


def form_of(form: Format) -> tuple[str, mx.Dtype]:
    return form.mode, form.dtype


def test_they_are_the_sources_that_a_proof_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = set()

    class Written(metalsim.Kernel):
        def __call__(self, **how: Any) -> list[mx.array]:
            made = [mx.array(x) for x in how["inputs"]]
            sources.add(self.mlx_source(made, how["output_dtypes"], how["template"]))
            shapes = zip(how["output_shapes"], how["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    case = matmul.small_qmm_case(24, 512, Format(6, 64, "affine", mx.float16))
    monkeypatch.setattr(mx.fast, "metal_kernel", Written)
    for call in case.variants.values():
        for rows in case.rows:
            call(*case.cut(case.inputs(0), rows))
    assert len(sources) == len(instances([case]))


@pytest.mark.parametrize(("name", "bits"), [("gpt-oss-20b", 0), ("qwen3.6-35b-a3b", 4)])
def test_a_model_is_counted_without_its_weights(name: str, bits: int) -> None:
    before = mx.get_active_memory()
    found = instances(cases_of(read_config(name), bits))
    kernels = {kernel for kernel, *_ in found}
    assert {"small_qmm", "small_qmm_experts", "paged_attention", "sample_accept_part"} <= kernels
    assert all(lines > 50 for lines in found.values())
    assert mx.get_active_memory() - before < 64 << 20
