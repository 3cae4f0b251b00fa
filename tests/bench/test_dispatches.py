"""What Metal would launch, read from graphs made here. The counts of a few operations are those of
MLX's own backend; ours are held beside mlx-lm's for the same model."""

import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench import tiny as of_bench
from bench.dispatches import Always, config_of, of_engine, of_mlx_lm, rows_of
from bench.graph import LONG, Compiled, Work, on_metal, work_of
from mlxspec.kernels import reference, sampling
from mlxspec.kernels.attention import Shape
from mlxspec.kernels.inputs import Draws
from mlxspec.kernels.verify import KERNELS
from mlxspec.model import pages
from tests.support import tiny
from tests.support.drafters import attach_head, random_head
from tests.support.parameter_rows import only

X = mx.zeros((2, 3, 4))
POOL = mx.zeros((2, 64, 4))
WEIGHT = mx.ones((4,))
AT = mx.array([3, 9, 20])
mx.eval(X, POOL, WEIGHT)


@pytest.fixture(autouse=True)
def plain_functions() -> Iterator[None]:
    """What MLX compiled cannot be read; the program replaces mx.compile before it is used."""
    mx.disable_compile()
    yield
    if not os.environ.get("MLX_DISABLE_COMPILE"):
        mx.enable_compile()


def put() -> mx.array:
    pool = POOL + 0
    mx.eval(pool)
    pool[:, 5:8] = X
    return pool


@pytest.mark.parametrize(
    ("make", "launches", "read", "written"),
    [
        (lambda: X.swapaxes(0, 1)[None, ::2], 0, 0, 0),  # strides alone
        (lambda: X.reshape(6, 4), 0, 0, 0),
        (lambda: X.swapaxes(0, 1).reshape(6, 4), 1, 96, 96),  # such a reshape is a copy
        (lambda: X.swapaxes(0, 1) + 1, 1, 96 + 4, 96),
        (lambda: mx.broadcast_to(X[:, :1], X.shape) * 2, 1, 32 + 4, 96),
        (put, 1, 96, 96),  # of a pool, what is written alone
        (lambda: mx.concatenate([X, X]), 2, 192, 192),
        (lambda: mx.fast.rms_norm(X, WEIGHT, 1e-5), 1, 96 + 16, 96),
        (lambda: mx.fast.rms_norm(X.swapaxes(1, 2), WEIGHT[:3], 1e-5), 2, 204, 192),
        (lambda: mx.take(POOL, AT, axis=1), 1, 12 + 96, 96),
        (lambda: mx.argmax(X, axis=-1), 1, 96, 24),
        (lambda: X.view(mx.int32), 0, 0, 0),  # of the same memory
    ],
)
def test_operations_launch_what_mlx_launches(
    make: Callable[[], mx.array], launches: int, read: int, written: int
) -> None:
    with on_metal() as stand_ins:
        work = work_of([make()], stand_ins)
    assert (work.total, work.read, work.written) == (launches, read, written), work


def test_keys_of_several_sequences_are_copied_for_attention_unless_heads_come_first() -> None:
    q, kv = mx.zeros((2, 4, 1, 8)), mx.zeros((2, 2, 16, 8))
    mx.eval(q, kv)
    with on_metal() as stand_ins:
        plain = mx.fast.scaled_dot_product_attention(q, kv, kv, scale=1.0)
        swapped = mx.fast.scaled_dot_product_attention(
            q, kv.swapaxes(0, 1), kv.swapaxes(0, 1), scale=1.0
        )
        assert work_of([plain], stand_ins).total == 1
        assert work_of([swapped], stand_ins).launches["Copy"] == 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_keeping_values_finite_is_one_launch(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where our kernel reads them; two where models read K as well."""
    monkeypatch.setattr(mx, "compile", Compiled)
    # With functions that this graph's reader can take.
    monkeypatch.setattr(pages, "finite", runpy.run_path(reference.__file__)["finite"])

    def write(by_kernel: bool = False, dense: bool = False) -> Counter[str]:
        view = pages.View(8, {None: 4}, {None: 4}, dense, slots={None: slice(3, 5)})
        layer = pages.Pages(view, None)
        rows = mx.zeros((2, 1, 1, 4), dtype)
        layer.write(rows, rows)
        mx.eval(rows, layer.keys, layer.values)
        if by_kernel:
            layer.shape = Shape(dtype, 1, 1, 4, 4, 8)
            monkeypatch.setattr(KERNELS, "verdicts", Always())
        with on_metal() as stand_ins:
            layer.write(rows, rows)
            return work_of([layer.keys, layer.values], stand_ins).launches

    assert write() == {"SliceUpdate": 2, "Compiled": 1}
    assert write(dense=True) == {"SliceUpdate": 2, "Compiled": 2}
    assert write(by_kernel=True) == {"SliceUpdate": 2}


@pytest.mark.parametrize("dtype, more", [(mx.float32, 1), (mx.bfloat16, 0)], ids=str)
def test_finding_logits_that_are_not_finite(
    dtype: mx.Dtype, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a copy to fp32 that it saves, it is one launch of MLX's, and none of our kernel."""
    monkeypatch.setattr(mx, "compile", Compiled)
    plain = SimpleNamespace(**runpy.run_path(reference.__file__))
    monkeypatch.setattr(sampling, "reference", plain)
    logits, draws = mx.zeros((4, 64), dtype), Draws([0.0] * 4, [0] * 4, [0] * 4, [b""] * 4)
    mx.eval(logits)
    usual = 2 + (dtype != mx.float32)  # without it: to fp32, the highest one, its number as int32
    with on_metal() as stand_ins:
        tokens, _ = sampling.sample_accept(logits, draws)
        assert work_of([tokens], stand_ins).total == usual + more
    with on_metal() as stand_ins:
        tokens, _ = sampling.sample_accept(logits, draws, unproven=True)
        assert work_of([tokens], stand_ins).launches == {"CustomKernel": 2}


def per_layer(count: Callable[[Any], Work]) -> tuple[int, int]:
    """Launches of a further layer, and bytes that it reads."""
    shape = dict(head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    few, more = (count(tiny.model("qwen3", num_hidden_layers=n, **shape)) for n in (1, 2))
    return more.total - few.total, more.read - few.read


@pytest.mark.parametrize(("streams", "context"), only([(1, 40), (8, 40), (1, 4200)], 0, 1))
def test_a_layer_takes_no_more_than_mlx_lms(streams: int, context: int) -> None:
    """With one sequence our attention merges its parts, which mlx's does from 4,096 tokens on."""

    def ours(model: Any) -> Work:
        engine = tiny.engine(model, block=64, blocks=80, budget=512, context=4800, whole=True)
        return of_engine(engine, streams, kernels=True, context=context)

    launches, read = per_layer(lambda model: of_mlx_lm(model, streams, context))
    of_ours, read_by_ours = per_layer(ours)
    assert of_ours <= launches + (streams == 1 and context < LONG)
    assert 0.95 * read < read_by_ours < 1.04 * read, "the tables and the parts' sums are little"


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_a_round_launches_the_target_once_and_a_pass_for_each_drafted_token(kind: str) -> None:
    def round_of(depth: int) -> Counter[str]:
        engine = tiny.engine(tiny.model("qwen3"), block=64, budget=512, whole=True)
        attach_head(engine, depth=depth, kind=kind)
        return of_engine(engine, 1).launches

    one, two, three = map(round_of, (1, 2, 3))
    block = kind == "dflash"  # drafts in one pass: what is left is the drawing of a token
    products = two["Matmul"] - one["Matmul"]
    each = {"dflash": 0, "eagle3": 8, "mtp": 9}  # a layer's 7, lm_head, and MTP's own
    assert products == three["Matmul"] - two["Matmul"] == each[kind]
    for name in ("RMSNorm", "RoPE", "ScaledDotProductAttention"):
        assert (three[name] == two[name]) == block
    assert (three - two).total() <= (20 if block else 75), three - two


def weight_bytes(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_round_reads_the_targets_weights_once_and_a_heads_with_each_pass(kind: str) -> None:
    """With lm_head, which is the target's embedding here. Matrices are so large that all else is a
    small part, and pools so small."""

    def round_of(depth: int) -> int:
        model = tiny.model("qwen3", hidden_size=256, intermediate_size=1024)
        engine = tiny.engine(model, block=64, blocks=4, budget=512, whole=True)
        if depth:
            attach_head(engine, depth=depth, kind=kind)
        return of_engine(engine, 1).read

    model = tiny.model("qwen3", hidden_size=256, intermediate_size=1024)
    target, lm_head = weight_bytes(model), model.model.embed_tokens.weight.nbytes
    head = weight_bytes(random_head(model, kind).module)
    plain, one, two, three = map(round_of, (0, 1, 2, 3))
    assert target < plain < 1.03 * target
    assert head + lm_head < one - plain < (1.07 if kind == "mtp" else 1.2) * (head + lm_head)
    for more in (two - one, three - two):
        if kind == "mtp":
            assert head + lm_head < more < 1.07 * (head + lm_head)
        else:
            assert more < 0.1 * head, "its block is one pass"


@pytest.mark.parametrize("streams", only([1, 8, 16], 1))
def test_a_layer_of_experts_takes_no_more_than_mlx_lms(streams: int, tmp_path: Path) -> None:
    """Of the model that `--experts` counts; with one sequence attention merges its parts."""
    model = str(of_bench.experts(tmp_path / "experts"))
    found = {who: work for who, _, work in rows_of(config_of(model, streams), [streams], 40)}
    theirs, ours = found["mlx-lm"], found["mlxspec, its kernels"]
    assert ours.total <= theirs.total + 2 * (streams == 1)
    assert ours.read < 1.1 * theirs.read
    assert ours.launches["GatherQMM"] == 0 < theirs.launches["GatherQMM"]
