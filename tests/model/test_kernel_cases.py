"""What kernels could do is known of a model before its pools take memory."""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.model import quantized
from mlxspec.model.quantized import CASE_BLOCKS, kernel_cases
from mlxspec.model.runner import Layout, Runner
from tests.support import tiny


def cases(model: nn.Module, block: int = 8, layout: Layout = "rows", bits: int = 0) -> list[str]:
    runner = Runner(model, layout, block, CASE_BLOCKS, kv_bits=bits)
    return list(dict.fromkeys(case.name for case in kernel_cases(runner)))


def attention(model: nn.Module, block: int, layout: Layout = "rows", bits: int = 0) -> list[str]:
    """What there is but drawing, whatever the context."""
    names = cases(model, block, layout, bits)
    assert names[-1] == f"sample_accept {tiny.VOCAB} float32"
    return list(dict.fromkeys(re.sub(r" (ragged|context \d+)$", "", name) for name in names[:-1]))


@pytest.mark.parametrize(
    "kind, layout, names",
    [
        ("llama", "rows", ["4/2x16+16 block 8 window 0 kv_bits 0 sinks 0"]),
        (
            "gpt_oss",
            "rows",
            [
                "4/2x16+16 block 8 window 12 kv_bits 0 sinks 1",
                "4/2x16+16 block 8 window 0 kv_bits 0 sinks 1",
            ],
        ),
        ("qwen3_next", "rect", ["4/2x16+16 block 8 window 0 kv_bits 0 sinks 0"]),
        ("deepseek_v3", "gather", []),  # its attention is its own
        ("llama4", "solo", []),
    ],
)
def test_the_shapes_of_a_step(kind: str, layout: Layout, names: list[str]) -> None:
    found = attention(tiny.model(kind), 8, layout)
    assert found == [f"paged_attention float32 {name}" for name in names]


def test_each_has_its_own() -> None:
    """Not those of models that were asked before."""
    first, second = tiny.model("llama"), tiny.model("gpt_oss")
    assert attention(first, 8) == attention(first, 8) != attention(second, 8)
    assert attention(first, 16)[0].startswith("paged_attention float32 4/2x16+16 block 16 ")
    assert attention(first, 2), "a step may take several blocks"


def test_drawing_in_both_dtypes() -> None:
    model = tiny.model("llama")
    model.set_dtype(mx.bfloat16)
    names = cases(model)
    assert names[3:] == [f"sample_accept {tiny.VOCAB} {dtype}" for dtype in ("bfloat16", "float32")]


def test_quantized_weights_and_kv() -> None:
    model = tiny.model("llama:8")
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    quantized.install(model)
    found = attention(model, 8, bits=8)
    (paged,) = (name for name in found if name.startswith("paged_attention float32 "))
    assert paged.endswith("block 8 window 0 kv_bits 8 sinks 0")
    assert len(found) > 2 and sum(name.startswith("small_qmm ") for name in found) == len(found) - 1


def test_nothing_is_computed_and_the_model_stays(tmp_path: Path) -> None:
    model = tiny.model("llama")
    mx.eval(model.parameters())
    file = tmp_path / "weights.safetensors"
    mx.save_safetensors(str(file), dict(tree_flatten(model.parameters())))
    model.load_weights(list(mx.load(str(file)).items()))
    before = mx.get_active_memory()
    cases(model)
    assert mx.get_active_memory() - before < 4096
    assert Runner(model, "rows", 8, 4).trunk, "the trunk can still be wrapped"
