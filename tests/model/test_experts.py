"""Experts by our kernels in a loaded model's layers, beside the layers as mlx-lm has them."""

import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from bench.compiles import instances
from mlxspec.kernels import experts
from mlxspec.kernels.matmul import ROWS
from mlxspec.kernels.trial import Case, Verdict
from mlxspec.kernels.verify import KERNELS
from mlxspec.model import quantized
from tests import metalsim
from tests.kernels import gather_mm

K, INNER = 64, 64  # gate and down have one shape, as in gpt-oss
FORMS: dict[str, dict[str, Any]] = {
    "affine": {"group_size": 32, "bits": 4},
    "mxfp4": {"group_size": 32, "bits": 4},
    "none": {},
}


@pytest.fixture(autouse=True)
def verdicts() -> Iterator[None]:
    KERNELS.verdicts.clear()
    yield
    KERNELS.verdicts.clear()


class Layer(nn.Module):
    """Experts with biases, and their norm, which says the dtype of rows."""

    def __init__(self, count: int, mode: str) -> None:
        super().__init__()
        mx.random.seed(count)
        self.norm = nn.RMSNorm(K)
        self.mlp = SwitchGLU(K, INNER, count, bias=True)
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.mlp[name].bias = mx.random.normal(self.mlp[name].bias.shape)
        self.set_dtype(mx.float16 if mode == "none" else mx.bfloat16)
        if mode != "none":
            nn.quantize(self, mode=mode, **FORMS[mode])
        mx.eval(self.parameters())

    def __call__(self, x: mx.array, chosen: mx.array) -> Any:
        return self.mlp(x, chosen)


def installed(count: int, top: int, mode: str) -> tuple[Layer, list[Case]]:
    """A layer whose kernels run for any number of rows, and their cases."""
    layer = Layer(count, mode)
    quantized.install(layer)
    KERNELS.recorded = cases = []
    layer(mx.zeros((1, 1, K), layer.norm.weight.dtype), mx.zeros((1, 1, top), mx.uint32))
    KERNELS.recorded = None
    for case in cases:
        KERNELS.verdicts[case.name] = Verdict("plain", 1, ROWS)
    return layer, cases


def step(layer: Layer, rows: int, count: int, top: int) -> tuple[mx.array, mx.array]:
    """Rows of a step, and what they choose."""
    rng = np.random.default_rng(rows)
    x = mx.array(rng.normal(size=(1, rows, K)), mx.float32).astype(layer.norm.weight.dtype)
    chosen = rng.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)[None, :, :top]
    return x, mx.array(chosen.astype(np.uint32))


@pytest.mark.parametrize("mode", FORMS)
@pytest.mark.parametrize("count, top, rows", [(4, 1, 3), (3, 3, 5), (8, 5, 16)])
def test_values_are_those_of_mlx_lms_layer(
    count: int, top: int, rows: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, choices that share a row and that have their own, and sorted ones, from 64 on; a
    row has the same bits in any step."""
    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    plain = Layer(count, mode)
    layer, cases = installed(count, top, mode)
    assert len(cases) == 3 and (top == 1 or len({case.name for case in cases}) > 1)
    x, chosen = step(layer, rows, count, top)
    ran: list[int] = []
    product = experts.small_qmm_experts
    monkeypatch.setattr(experts, "small_qmm_experts", lambda *a: [ran.append(a[3]), product(*a)][1])
    with metalsim.patch(checked=False):
        got = layer(x, chosen)
        alone = [layer(x[:, i : i + 1], chosen[:, i : i + 1]) for i in range(rows)]
        mx.eval(got, alone)
    assert ran == [rows] * 3 + [1] * 3 * rows
    want = plain(x, chosen)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert mx.abs(got - want).max() < 0.03 * mx.abs(want).max()
    assert mx.array_equal(mx.concatenate(alone, axis=1), got)


@pytest.mark.parametrize("count, top", [(4, 2), (32, 4), (128, 8)])
def test_what_runs_is_what_was_proven(count: int, top: int) -> None:
    """Each instance of a step of any number of rows is one that the cases have compiled."""
    layer, cases = installed(count, top, "affine")

    def of_steps(*_: Any) -> mx.array:
        for rows in range(1, ROWS + 1):
            layer(*step(layer, rows, count, top))
        return mx.zeros(1)

    ran = Case("steps", (1,), lambda _: (), of_steps, of_steps, {"steps": of_steps}, 0.0)
    with mock.patch.object(KERNELS, "recorded", None):
        assert instances([ran]).keys() <= instances(cases).keys()


def test_rows_share_experts_in_a_race_as_in_the_model() -> None:
    """A case of so many large experts that not all fit is raced with few rows."""
    form = Layer(4, "affine").mlp.gate_proj
    quantized.install(nn.Sequential(form))
    for count, n, k, top, most in ((32, 2880, 2880, 4, 16), (384, 2048, 7168, 8, 5)):
        case = experts.experts_case(count, n, k, top, form.form, True)
        some = case.inputs(0)[2].shape[0]
        assert max(case.raced) == most and most * top <= 2 * max(some, min(count, 16 * top) / 2)


def test_nothing_of_a_failed_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not computed would keep a model's weights in memory."""
    layer, _ = installed(8, 2, "affine")
    x, chosen = step(layer, 3, 8, 2)
    large = mx.ones(1 << 20)
    mx.eval(x, chosen, large, layer.parameters())

    def fail(*_: Any) -> mx.array:
        raise RuntimeError("no memory")

    def lazy(*_: Any) -> Any:  # the simulator computes its inputs
        return lambda output_shapes, output_dtypes, **_: [
            mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)
        ]

    layer.mlp.activation = fail
    monkeypatch.setattr(mx.fast, "metal_kernel", lazy)
    before = mx.get_active_memory()
    with pytest.raises(RuntimeError, match="no memory"):
        layer(x, chosen + (large.sum() * 0).astype(mx.uint32))
    del large
    gc.collect()
    assert mx.get_active_memory() <= before - (4 << 20)


def test_a_scale_of_the_whole_layer_is_mlxs() -> None:
    """As some nvfp4 files have one, which no kernel knows."""
    layer = nn.Sequential(QuantizedSwitchLinear(K, INNER, 4, bias=False, group_size=32, bits=4))
    layer.layers[0].global_scale = mx.array(2.0)
    quantized.install(layer)
    assert type(layer.layers[0]) is QuantizedSwitchLinear
