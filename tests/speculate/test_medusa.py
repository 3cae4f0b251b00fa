"""Medusa's heads: every naming gives the same ones, what they draft is what a page of numpy drafts,
and heads that do not fit are left out."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.speculate.heads import cache_bytes, load_head
from mlxspec.speculate.heads.files import find_head
from tests.heads import kinds, runs
from tests.heads.kinds import Tensors
from tests.heads.packagings import FOUR_BITS, quantized
from tests.support.parameter_rows import diagonal

HEADS, WIDTH, VOCAB = 3, 64, 640
CONFIG = dict(medusa_num_heads=2, medusa_num_layers=1, base_model_name_or_path="target")


def heads(blocks: int) -> Tensors:
    """Random ones, as Medusa-1 names them."""
    mx.random.seed(6)
    made: Tensors = {}
    for i in range(HEADS):
        for n in range(blocks):
            made[f"{i}.{n}.linear.weight"] = mx.random.normal((WIDTH, WIDTH)) / 8
            made[f"{i}.{n}.linear.bias"] = mx.random.normal((WIDTH,))
        made[f"{i}.{blocks}.weight"] = mx.random.normal((VOCAB, WIDTH))
    return made


def within(tensors: Tensors) -> Tensors:
    """As Medusa-2 names them beside its model."""
    return {f"medusa_head.{name}": x for name, x in tensors.items()}


def by_hand(tensors: Tensors, hidden: np.ndarray) -> np.ndarray:
    """Logits [heads, vocab] of a hidden state: blocks of x + silu(W x + b), then a matrix."""
    found = []
    for i in range(HEADS):
        own = {n.split(".", 1)[1]: np.array(x) for n, x in tensors.items() if n[0] == str(i)}
        x = hidden
        for n in range(sum(name.endswith("bias") for name in own)):
            y = own[f"{n}.linear.weight"] @ x + own[f"{n}.linear.bias"]
            x = x + y / (1 + np.exp(-y))
        (last,) = (matrix for name, matrix in own.items() if "linear" not in name)
        found.append(last @ x)
    return np.stack(found)


def save(path: Path, tensors: Tensors) -> Path:
    return kinds.save_head(path, tensors, CONFIG)


@pytest.mark.parametrize("blocks, named", diagonal([1, 2], [dict, within]))
def test_drafts_are_those_of_numpy(blocks: int, named: Any, tmp_path: Path) -> None:
    tensors = heads(blocks)
    path = save(tmp_path, named(tensors))
    e, drafter = kinds.engine(path)
    assert drafter.head.depth == HEADS and cache_bytes(drafter.head).token == 0
    prompt = kinds.reference("eagle3")["prompts"][0]
    run = runs.run(e, drafter, HEADS, [prompt])
    assert run.answers[0] == kinds.reference("eagle3")["greedy"][0]
    text = prompt + run.answers[0]
    hidden = np.array(kinds.plain_target().model(mx.array([text]))[0])
    assert len(run.rounds[0]) > 50
    for each in run.rounds[0]:
        logits = by_hand(tensors, hidden[each.start - 1])
        assert each.draft == logits.argmax(-1).tolist()[: len(each.draft)]
        for layers, want in zip(drafter.head.module.heads, logits, strict=True):
            x = mx.array(hidden[each.start - 1])
            for layer in layers:
                x = layer(x)
            assert np.abs(np.array(x) - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.slow
def test_a_pt_file_is_converted_as_the_docs_say(tmp_path: Path) -> None:
    """Needs torch, which nothing else here does."""
    torch = pytest.importorskip("torch")
    tensors = heads(1)
    torch.save(
        {n: torch.tensor(np.array(x)) for n, x in tensors.items()}, tmp_path / "medusa_lm_head.pt"
    )
    page = (Path(__file__).parents[2] / "docs" / "heads.md").read_text("utf-8")
    [line] = [line for line in page.splitlines() if "medusa_lm_head.pt'" in line]
    code = line.split('"')[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    found = find_head(tmp_path)
    assert found.kind == "medusa" and set(found.tensors) == set(tensors)
    for name, x in tensors.items():
        assert mx.array_equal(found.tensors[name], x)


def test_four_bits(tmp_path: Path) -> None:
    path = save(tmp_path, quantized(heads(1), lambda _: FOUR_BITS))
    e, drafter = kinds.engine(path)
    assert drafter.head.module.heads[0][1].bits == 4
    prompt = kinds.reference("eagle3")["prompts"][0]
    run = runs.run(e, drafter, HEADS, [prompt])
    assert run.answers[0] == kinds.reference("eagle3")["greedy"][0]


def without(name: str) -> Tensors:
    return {n: x for n, x in heads(1).items() if n != name}


def narrow(name: str, size: int) -> Tensors:
    return {n: x[..., :size] if n == name else x for n, x in heads(1).items()}


@pytest.mark.parametrize(
    "tensors, said",
    [
        (without("1.0.linear.bias"), "heads.1.0.linear.bias"),
        (without("2.1.weight"), "heads.2.1.weight"),
        (narrow("0.0.linear.weight", 32), "heads.0.0.linear.weight"),
        (heads(1) | {"2.1.weight": mx.zeros((600, WIDTH))}, "heads.2.1.weight"),
        (heads(1) | {"spare.weight": mx.zeros(1)}, "spare"),
    ],
)
def test_heads_that_do_not_fit(
    tensors: Tensors, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, tensors)
    assert load_head(find_head(path), kinds.plain_target()) is None
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert "decoding without a head" in lines[0] and said in lines[0]
