"""Kernels in a model's layers: used as far as verdicts say, and the tokens stay those of plain
decoding."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.kernels import experts, matmul
from mlxspec.kernels.verify import KERNELS, Case, Verdict
from mlxspec.model import quantized
from mlxspec.model.runner import Runner
from tests import metalsim
from tests.kernels import gather_mm
from tests.support import tiny
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import only


@pytest.fixture(autouse=True)
def verdicts() -> Iterator[None]:
    KERNELS.verdicts.clear()
    yield
    KERNELS.verdicts.clear()


def quantized_model(kind: str, bits: int = 4, mode: str = "affine", **change: Any) -> nn.Module:
    m = tiny.model(kind, **change)
    if mode == "none":
        m.set_dtype(mx.bfloat16)
    elif mode == "mixed":
        nn.quantize(m, class_predicate=mixed)
    else:
        nn.quantize(m, 16 if mode == "nvfp4" else 32, bits, mode=mode)
    mx.eval(m.parameters())
    return m


MIXED = {
    "q_proj": {"bits": 8},
    "k_proj": {"bits": 6},
    "v_proj": {"mode": "mxfp4"},
    "gate_proj": {"mode": "nvfp4", "group_size": 16},
    "o_proj": {"bits": 5},
    "up_proj": {"bits": 3},
}


def mixed(path: str, layer: nn.Module) -> Any:
    """How each layer of a model is quantized, as files of mixed bits say it."""
    if not hasattr(layer, "to_quantized"):
        return False
    return {"group_size": 32, "bits": 4} | MIXED.get(path.rpartition(".")[2], {})


def recorded(call: Callable[[], Any]) -> list[Case]:
    """The cases of what a call would launch."""
    found: list[Case] = []
    KERNELS.recorded = found
    call()
    KERNELS.recorded = None
    return list({case.name: case for case in found}.values())


def force(cases: list[Case], way: str = "plain") -> None:
    """Each kernel for all the rows that it can take."""
    for case in cases:
        KERNELS.verdicts[case.name] = Verdict(way, 1, matmul.ROWS)


def layer(
    n: int = 24, k: int = 96, bits: int = 4, bias: bool = False, dtype: mx.Dtype = mx.float16
) -> Any:
    mx.random.seed(n)
    linear = nn.Linear(k, n, bias)
    linear.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(linear, 32, bits)


def installed(x: Any) -> tuple[Any, Case]:
    quantized.install(x)
    case = x.case
    KERNELS.verdicts[case.name] = Verdict("plain", 2, 6)
    return x, case


def launched(run: Any) -> tuple[mx.array, bool]:
    """What comes of it, and whether a kernel was launched for it."""
    calls = []

    def make(*names: Any, **more: Any) -> Any:
        kernel = metalsim.metal_kernel(*names, **more)
        return lambda **how: [calls.append(names[0]), kernel(**how)][1]

    with metalsim.patch(checked=False):
        mx.fast.metal_kernel = make
        y = run()
    return y, bool(calls)


@pytest.mark.parametrize("way", ["plain", "matrix"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_uses_what_its_verdict_takes(bias: bool, way: str) -> None:
    own, (ours, case) = layer(bias=bias), installed(layer(bias=bias))
    own.bias = ours.bias = mx.arange(24).astype(mx.float16) if bias else None
    KERNELS.verdicts[case.name].variant = way
    for shape in [(2, 1), (1, 2), (2, 3), (6,), (1,), (7, 1), ()]:
        x = mx.random.normal((*shape, 96)).astype(mx.float16)
        y, used = launched(lambda x=x: ours(x))
        assert used == (shape in [(2, 1), (1, 2), (2, 3), (6,)]), shape
        assert y.dtype == mx.float16 and y.shape == (*shape, 24)
        want = own(x)
        assert mx.allclose(y, want, 2e-2, 2e-2) if used else mx.array_equal(y, want)


def test_a_parked_kernel_is_not_asked_again() -> None:
    ours, case = installed(layer())
    x = mx.random.normal((3, 96)).astype(mx.float16)
    assert launched(lambda: ours(x))[1]
    KERNELS.verdicts[case.name].variant = ""
    y, used = launched(lambda: ours(x))
    assert not used and mx.array_equal(y, layer()(x))


def test_a_layer_of_few_scales_is_mlxs() -> None:
    """MLX would pass them in another address space than the kernel takes."""
    few = layer(2)
    quantized.install(few)
    assert few.scales.size < 8 and type(few) is nn.QuantizedLinear


def test_rows_of_another_dtype_than_the_scales_are_mlxs() -> None:
    ours, _ = installed(layer())
    for dtype in (mx.float32, mx.bfloat16):
        x = mx.random.normal((3, 96)).astype(dtype)
        y, used = launched(lambda x=x: ours(x))
        assert not used and mx.array_equal(y, layer()(x))


def test_a_layer_that_has_changed_is_mlxs() -> None:
    """Its case is of another size or dtype."""
    x = mx.random.normal((3, 96)).astype(mx.float16)
    ours, _ = installed(layer())
    ours.set_dtype(mx.float32)
    y, used = launched(lambda: ours(x))
    assert not used and y.dtype == mx.float32
    larger, ours = layer(32), installed(layer())[0]
    ours.update(larger.parameters())
    y, used = launched(lambda: ours(x))
    assert not used and mx.array_equal(y, larger(x))


def test_of_two_dtypes_a_model_computes_in_the_more_frequent() -> None:
    for dtype, other in ((mx.float16, mx.bfloat16), (mx.bfloat16, mx.float16)):
        m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        m.set_dtype(dtype)
        m.layers[0].set_dtype(mx.float32)
        m.layers[1].weight = m.layers[1].weight.astype(other)
        assert quantized.coarsest_dtype(m) == dtype


def test_biases_of_another_dtype_than_the_scales_count_in_the_result() -> None:
    """As in MLX's."""
    mixed = layer()
    mixed.biases = mixed.biases.astype(mx.float32)
    x = mx.random.normal((3, 96)).astype(mx.float16)
    want = mixed(x)
    ours, case = installed(mixed)
    assert "float16 float32" in case.name
    y, used = launched(lambda: ours(x))
    assert used and y.dtype == want.dtype == mx.float32 and mx.allclose(y, want, 1e-4, 1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_what_a_model_is_stays(kind: str) -> None:
    """Names, parameters and another model of the same kind; and again is as once."""
    m, other = quantized_model(kind), quantized_model(kind)
    names = [(name, type(x)) for name, x in m.named_modules()]
    arrays = dict(tree_flatten(m.parameters()))
    quantized.install(m)
    quantized.install(m)
    assert [name for name, _ in m.named_modules()] == [name for name, _ in names]
    after = dict(tree_flatten(m.parameters()))
    assert after.keys() == arrays.keys() and all(after[n] is a for n, a in arrays.items())
    assert [(name, type(x)) for name, x in other.named_modules()] == names
    assert all(
        isinstance(x, was) for (_, x), (_, was) in zip(m.named_modules(), names, strict=True)
    )


def cases(m: nn.Module) -> list[Case]:
    return quantized.kernel_cases(Runner(m, "rows", 8, quantized.CASE_BLOCKS))


def test_cases_of_a_model() -> None:
    """Each shape once; the embedding too where it is the lm_head."""
    m = quantized_model("qwen3_moe")
    quantized.install(m)
    found = {case.name.split(" of ")[0] for case in cases(m)}
    assert found >= {f"small_qmm {shape}" for shape in ("64x64", "32x64", "4x64", "320x64")}
    m = quantized_model("llama", tie_word_embeddings=False)
    del m.lm_head
    m.lm_head = nn.Linear(64, 320)
    quantized.install(m)
    found = {case.name.split(" of ")[0] for case in cases(m)}
    assert "small_qmm 64x64" in found and "small_qmm 320x64" not in found


def test_layers_of_all_formats_in_a_model() -> None:
    """Each by its own; classes that are not MLX's keep their operation."""
    m = quantized_model("llama", mode="mixed")
    m.layers[0].mlp.up_proj.__class__ = type("Other", (nn.QuantizedLinear,), {})
    quantized.install(m)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert {type(x.self_attn[name]) for x in m.layers} == {
            quantized.CLASSES[nn.QuantizedLinear]
        }
    assert type(m.layers[0].mlp.up_proj).__name__ == "Other"
    names = " ".join(case.name for case in cases(m))
    for part in ("64x64 of 8 bits", "of 6 bits", "32x64 of mxfp4", "of nvfp4"):
        assert part in names


def test_a_format_that_no_kernel_has_is_mlxs() -> None:
    """A column of nvfp4 with 48 inputs is no whole number of 32."""
    odd = nn.QuantizedLinear.from_linear(nn.Linear(48, 24, False), 16, 4, mode="nvfp4")
    quantized.install(odd)
    assert type(odd) is nn.QuantizedLinear


@pytest.mark.parametrize(
    "kind, bits, mode, way, temperature",
    only(
        [
            ("qwen3", 4, "affine", "plain", 0.8),
            ("llama", 4, "affine", "matrix", 0.0),
            ("gpt_oss", 4, "mxfp4", "plain", 0.8),
            ("qwen3_moe", 6, "affine", "plain", 0.0),
            ("llama", 3, "affine", "plain", 0.8),
            ("llama", 4, "nvfp4", "plain", 0.8),
            ("qwen3", 8, "mxfp8", "matrix", 0.0),
            ("llama", 0, "mixed", "plain", 0.8),
            ("llama", 16, "none", "plain", 0.8),
            ("qwen3_moe", 16, "none", "plain", 0.8),
        ],
        1,
        2,
    ),
)
def test_tokens_are_those_of_plain_decoding(
    kind: str,
    bits: int,
    mode: str,
    way: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences with drafts, at most 16 rows a step, by kernels alone; until they are
    parked."""
    m = quantized_model(kind, bits, mode)
    quantized.install(m)
    force(recorded(lambda: m(mx.array([[1, 2]]))), way)
    prompts = {"a": [5, 9, 2, 7, 5, 9, 2], "b": [3, 1, 4], "c": [8] * 9}
    all_of = {
        name: tiny.request(name, prompt, 10, temperature=temperature, seed=i)
        for i, (name, prompt) in enumerate(prompts.items())
    }
    calls, ran = list[str](), list[str]()

    def counted(module: Any, name: str, into: list[str]) -> None:
        product = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: [into.append(name), product(*a, **k)][1])

    counted(matmul, "small_qmm", ran)
    counted(experts, "small_qmm_experts", ran)
    counted(mx, "quantized_matmul", calls)
    if mode == "none":
        monkeypatch.setattr(mx, "gather_mm", gather_mm)
    if way == "plain":  # experts have no other
        counted(mx, "gather_qmm", calls)
        counted(mx, "gather_mm", calls)
    with metalsim.patch(checked=False):
        plain = tiny.Plain(m)
        truth = {n: plain(r.prompt, 10, temperature, r.sampling.seed) for n, r in all_of.items()}
        for parked in (False, True):
            calls.clear()
            liar = NoisyOracle({(r.prompt, 0): truth[n] for n, r in all_of.items()}, lies=0.2)
            e = tiny.engine(m, proposer=liar, budget=4, max_sequences=2)
            for r in all_of.values():
                e.add(r)

            def park(turn: int, parked: bool = parked) -> None:
                if parked and turn == 3:
                    assert not calls
                    for verdict in KERNELS.verdicts.values():
                        verdict.variant = ""

            outputs = tiny.run(e, park)
            assert {n: tiny.tokens(outputs, n) for n in all_of} == truth
            assert 0 < liar.kept < liar.drafted
            assert "small_qmm" in ran and ("small_qmm_experts" in ran) == kind.endswith(
                ("oss", "moe")
            )
            if mode != "none":  # then MLX's product is no function to count
                assert bool(calls) == parked
