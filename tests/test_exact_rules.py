"""Each rule of tests/test_exact.py's grid is needed: without it rows lose their bits there."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.kernels import invariant as kernels
from mlxspec.kernels.attention import paged_attention
from mlxspec.load.exact import examine
from mlxspec.load.exact_proof import MOST
from mlxspec.model import attention, invariant, recurrent
from mlxspec.model.invariant import Invariance
from mlxspec.model.layout import LayoutChoice
from mlxspec.types import CacheBytes
from tests import metalsim
from tests.support import architectures, tiny
from tests.support.metal_rules import (
    CHIPS,
    GEMV,
    GEMV_HALF,
    GEMV_WIDE,
    NAX,
    QMV,
    QMV_QUAD,
    QMV_WIDE,
    REDUCED,
    REDUCED_TWICE,
    SPLIT,
    TILES,
    Matrix,
    contiguous,
    reduced,
)
from tests.support.parameter_rows import fewer, in_turn
from tests.test_exact import (
    CHUNK,
    MQA,
    RECURRENT,
    alone,
    found,
    layout_of,
    model,
    on,
    requests,
    together,
    verdict,
)

Mutant = Callable[[Invariance, pytest.MonkeyPatch], Invariance]


def without_calls(kind: str = "") -> Mutant:
    """Rows reach these layers as they come."""

    def change(how: Invariance, _: pytest.MonkeyPatch) -> Invariance:
        kept = {key: calls for key, calls in how.calls.items() if kind not in key}
        assert len(kept) < len(how.calls)
        return replace(how, calls=kept)

    return change


def with_usual_attention(how: Invariance, patch: pytest.MonkeyPatch) -> Invariance:
    patch.setattr(
        attention, "invariant_attention", lambda a, shape, _: paged_attention(a, shape=shape)
    )
    return how


def with_one_part(how: Invariance, patch: pytest.MonkeyPatch) -> Invariance:
    """The products of a short context with one head of K and V stand alone."""
    patch.setattr(kernels, "PARTS", 1)
    return how


def with_all_rows_at_once(how: Invariance, patch: pytest.MonkeyPatch) -> Invariance:
    """Rows reach Mamba-2's recurrence as they come."""
    patch.setattr(recurrent, "ORDERED_BY_ROWS", "")
    return how


RULES: dict[str, Mutant] = {
    "calls": without_calls(),
    "experts": without_calls("Switch"),
    "routers": without_calls("Gate"),
    "attention": with_usual_attention,
    "parts": with_one_part,
    "rows": with_all_rows_at_once,
}
OWN = [
    (MQA, "parts", "M1", "affine"),
    (MQA, "parts", "M5", "bf16"),
    ("qwen3_moe", "experts", "M3", "affine"),
    ("gpt_oss", "experts", "M1", "mxfp4"),
    ("nemotron_h", "routers", "M3", "bf16"),
    ("mamba2", "rows", "M4", "affine"),
    ("nemotron_h", "rows", "M1", "affine"),
]
DENSE = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"]
WITHOUT = [pytest.param(*row) for row in OWN]
WITHOUT += in_turn([*DENSE, *RECURRENT], ["calls"], ["M1", "M5"], ["affine", "bf16"], every=7)
ATTEND = [kind for kind in (*DENSE, *RECURRENT) if kind != "mamba2"]
WITHOUT += in_turn(ATTEND, ["attention"], ["M2", "M4"], ["mxfp4"], every=7)


@pytest.mark.parametrize("kind, rule, chip, numbers", fewer(WITHOUT, 2))
def test_without_a_rule_rows_lose_their_bits(
    kind: str, rule: str, chip: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    m = model(kind, numbers)
    how = RULES[rule](found(kind, numbers, chip), monkeypatch)
    with on(chip):
        for seed in range(4):
            all_of = requests(0.8, seed)
            truth = alone(m, layout_of(kind), how, all_of)
            if any(got != truth for got in together(m, kind, "liar", 64, how, all_of, truth)):
                return
    raise AssertionError("nothing depends on the rows: the grid does not show that rule")


def test_what_mlx_takes_for_a_product() -> None:
    """By hand, from its source: 4096 x 4096 in 16 bits, and attention of 4 heads that share K."""
    weights = Matrix((4096, 4096), (1, 4096))

    def dense(chip: str, rows: int, halves: bool = True) -> int:
        return CHIPS[chip].dense(contiguous((rows, 4096)), weights, halves)

    assert [dense("M1", rows) for rows in (1, 2, 64, 65)] == [GEMV, SPLIT + 1, SPLIT + 1, TILES]
    assert [dense("M2", rows) for rows in (128, 129)] == [SPLIT + 1, TILES], "a Max splits more"
    assert [dense("M3", rows) for rows in (5, 6, 15)] == [GEMV_WIDE, GEMV_HALF, GEMV_HALF]
    assert [dense("M5", rows) for rows in (1, 5, 16)] == [GEMV, GEMV_WIDE, NAX]
    assert dense("M5", 5, halves=False) == SPLIT + 1

    def scores(batch: int, rows: int, parts: int) -> int:
        q = Matrix((batch, rows, parts, 4, 256), (rows * 1024, 1024, 0, 256, 1))
        k = Matrix((batch, rows, parts, 256, 128), (parts * 32768, 0, 32768, 1, 256))
        return CHIPS["M1"].dense(q, k, False)

    assert [scores(1, rows, 1) for rows in (1, 9)] == [SPLIT + 2, SPLIT + 1]
    assert {scores(2, 1, 1), scores(1, 1, 2), scores(2, 9, 3), scores(1, 17, 2)} == {TILES}


def test_what_mlx_takes_for_a_quantized_product_and_a_sum() -> None:
    """4096 x 4096 by rows; and sums over rows, and within rows."""

    def quantized(chip: str, rows: int, k: int = 4096, mode: str = "affine") -> int:
        return CHIPS[chip].quantized(rows, 4096, k, mode=mode, bits=4, group=32)

    assert [quantized("M1", rows) for rows in (1, 9, 10, 33, 65)] == [
        QMV,
        QMV,
        SPLIT + 4,
        SPLIT + 2,
        TILES,
    ]
    assert [quantized("M3", rows) for rows in (1, 2, 14, 15)] == [
        QMV,
        QMV_WIDE,
        QMV_WIDE,
        SPLIT + 4,
    ]
    assert [quantized("M1", rows, mode="mxfp4") for rows in (1, 2)] == [QMV, QMV_WIDE]
    assert {quantized("M5", rows, 128) for rows in range(1, 25)} == {QMV_QUAD}
    assert quantized("M5", 129) == NAX
    rows = [
        reduced((length, wide), 0, wide) for length, wide in ((9, 64), (300, 64), (300, 1 << 20))
    ]
    assert rows == [REDUCED, REDUCED_TWICE, REDUCED]
    assert {reduced((count, 5000), 1, count) for count in (1, 31, 32, 4000)} == {REDUCED}


def test_the_proof_sees_how_prompts_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of K and V, and a recurrence: products that are alone only there."""
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    for kind, rows in ((MQA, 33), ("mamba2", 33), (MQA, 0), ("mamba2", 0)):
        if not rows:
            monkeypatch.setattr(kernels, "PARTS", 1)
            monkeypatch.setattr(recurrent, "_begun", lambda update, row: update(**row))
        found = verdict("M1", kind, "affine", layout_of(kind))
        assert found.rows == rows and ("begin together" in found.why) == (not rows)
    found = verdict("M1", "mamba2", "affine", layout_of("mamba2"), rollback=False)
    assert not found.rows and "begin together" in found.why, "also where it takes no drafts"


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_5", "lfm2"])
def test_the_proof_sees_what_is_kept_of_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States after the accepted ones, computed again from what was recorded."""
    usual = recurrent.StateRecorder.states_after
    monkeypatch.setattr(
        recurrent.StateRecorder, "states_after", lambda *a: [x * 1.05 for x in usual(*a)]
    )
    found = verdict("CPU", kind, "affine", layout_of(kind))
    assert found.rows == 1 and "accepted" in found.why and "layer 0" in found.why


def test_the_proof_sees_states_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have no drafts, and are computed again with those that have."""
    usual = recurrent.StateRecorder.states_after

    def spoilt(self: recurrent.StateRecorder, rows: mx.array) -> list[mx.array]:
        by = mx.array([1.0 if span.draft.size else 1.05 for span in self.spans])
        states = usual(self, rows)
        return [x * by.reshape(-1, *(1 for _ in x.shape[1:])).astype(x.dtype) for x in states]

    monkeypatch.setattr(recurrent.StateRecorder, "states_after", spoilt)
    found = verdict("CPU", "mamba2", "affine", "rect")
    assert found.rows == 1 and "neighbour" in found.why


def test_the_proof_reads_prompts_as_serving_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows of a sequence in one step than drafts have."""
    usual = attention.invariant_attention

    def attend(inputs: Any, *rest: Any) -> Any:
        many = max(group.length for group in inputs.groups) > MOST
        return usual(inputs, *rest) * (1 + 0.01 * (many and inputs.groups[0].starts[0] % CHUNK))

    monkeypatch.setattr(attention, "invariant_attention", attend)
    assert verdict("CPU", "llama", "affine").rows == MOST, "with whole chunks of 16"
    monkeypatch.setattr(invariant, "CHUNK", 64)

    def attend_tail(inputs: Any, *rest: Any) -> Any:
        return usual(inputs, *rest) * (1 + 0.01 * (len(inputs.q) == 65))

    monkeypatch.setattr(attention, "invariant_attention", attend_tail)
    found = verdict("CPU", "llama", "affine")
    assert not found.rows and "65 rows of a prompt" in found.why


def test_a_head_that_is_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is multiplied by MLX, whose order nobody tries."""
    usual = architectures.config
    monkeypatch.setattr(
        architectures, "config", lambda name: usual(name) | {"tie_word_embeddings": True}
    )
    for name in ("seed_oss", "minicpm", "llama4_text"):
        found = examine(
            architectures.build(name),
            LayoutChoice("rows", True, False, CacheBytes(), tiny.VOCAB),
            8,
        )
        assert not found.rows and "lm_head is no layer" in found.why


@pytest.mark.parametrize("most", [33, 5])
def test_the_proof_without_drafts_is_of_sequences(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = recurrent._row_by_row

    def many(update: Any, arguments: Any) -> Any:
        y, states = usual(update, arguments)
        return y * (1 + 0.01 * (len(y) > most)), states

    monkeypatch.setattr(recurrent, "_row_by_row", many)
    found = verdict("CPU", "mamba2", "affine", layout_of("mamba2"), rollback=False)
    assert found.rows == most and ("of a sequence each" in found.why) == (most == 5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the simulator runs on Linux")
@pytest.mark.parametrize("kind", [MQA, "gemma3_text", "gpt_oss"])
def test_rows_keep_their_bits_by_our_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the grid whose attention runs in the simulator."""
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    m = model(kind, "affine")
    with on("M3"), metalsim.patch(checked=False):
        how = replace(found(kind, "affine", "M3"), by_kernel=True)
        all_of = requests(0.8)
        truth = alone(m, layout_of(kind), how, all_of)
        for got in together(m, kind, "liar", 64, how, all_of, truth):
            assert got == truth
    assert metalsim.last().kernel.startswith("paged_merge")
