"""The logits that Gemma 4's assistant drafts from in the engine are those of mlx-vlm's own module, on
random weights. Needs mlx-vlm, which nothing else does: pip install mlx-vlm==0.7.10."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.model.trunk import trunk_of
from mlxspec.speculate.heads.drafter import HeadDrafter
from tests.heads import assistant, kinds, oracle, runs
from tests.support import tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its imports

CLOSE = 1e-4  # of the largest logit
DEPTH = 5
WINDOW = 12  # of the target's sliding layers


def ours(path: Path, prompt: list[int]) -> tuple[list[int], list[int], mx.array]:
    """Of the engine's first round: the tokens before it, its draft, and the logits of that."""
    model = tiny.model("gemma4_text")
    e = tiny.engine(model, block=8, budget=256)
    drafter: Any = HeadDrafter(kinds.head_of(path, model), e.runner)
    inner, found = drafter.head.lm_head, []

    def lm_head(out: mx.array) -> mx.array:
        found.append(inner(out))
        return found[-1]

    drafter.head.lm_head = lm_head
    run = runs.run(e, drafter, DEPTH, [prompt])
    first = run.rounds[0][0]
    return (prompt + run.answers[0])[: first.start + 1], first.draft, mx.concatenate(found[:DEPTH])


def theirs(
    path: Path, known: list[int], draft: list[int], shifted: int = 0
) -> tuple[mx.array, list[int]]:
    """Their logits where our draft is, and their draft. `shifted`: with a query so much later."""
    target = tiny.model("gemma4_text")
    caches, seen = target.make_cache(), len(known) - 1
    hidden = trunk_of(target)(mx.array([known[:-1]]), cache=caches)[:, -1:]
    kv = {}
    for cache, kind in zip(caches, target.args.layer_types, strict=False):
        first = max(0, seen - getattr(cache, "max_size", seen))
        kv[kind] = tuple(x[:, :, first:seen] for x in (cache.keys, cache.values))
    drafter = oracle.load_drafter(path)
    drafter.bind(target)
    position = seen - 1 + shifted
    drafter.set_shared_kv(kv, seen, position, kv_valid_len=seen)
    tokens = drafter.draft_block(known[-1], hidden, None, DEPTH + 1, lambda x: x.argmax(-1))
    logits = []
    for token in (known[-1], *draft[:-1]):
        embedded = drafter._input_embed(mx.array([[token]])) * drafter._input_embed_scale
        x = mx.concatenate([embedded, hidden], axis=-1)
        hidden, made = drafter(x, kv, mx.array([[position]]))
        logits.append(made[:, 0])
    return mx.concatenate(logits), tokens[0].tolist()


@pytest.mark.parametrize("length", [5, 3 * WINDOW])
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("clusters", [False, True])
def test_logits_are_those_of_mlx_vlm(
    length: int, bits: bool, clusters: bool, tmp_path: Path
) -> None:
    oracle.require()
    target = tiny.model("gemma4_text")
    path = assistant.write(tmp_path, target, bits, use_ordered_embeddings=clusters)
    rng = random.Random(length)
    known, draft, logits = ours(path, [rng.randrange(tiny.VOCAB) for _ in range(length)])
    found, tokens = theirs(path, known, draft)
    kept = mx.isfinite(logits)
    assert draft == tokens
    if clusters:  # where nothing is drafted, theirs are lower than the lowest
        assert mx.array_equal(kept, found > found.min(-1, keepdims=True))
    else:
        assert kept.all()

    def off(found: mx.array) -> float:
        return float(mx.where(kept, mx.abs(logits - found), 0).max() / mx.abs(found).max())

    print(f"off by {off(found):.1e} of the largest logit")
    assert off(found) <= CLOSE
    wrong, _ = theirs(path, known, draft, shifted=1)
    assert off(wrong) > 10 * CLOSE
