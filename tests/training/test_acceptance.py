"""A head that learned from 10,000 tokens of a tiny model's answers drafts about as well as the one
that was trained at length for the tests."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.speculate.heads.files import find_head
from mlxspec.training.eagle import new_head
from mlxspec.training.run import run
from mlxspec.training.samples import Sample
from mlxspec.training.target import Target
from mlxspec.training.trainer import Trainer, batches, vocabulary_of
from tests.heads import kinds
from tests.training import pair

ANSWERS, HELD_OUT, LENGTH, FIRST = 80, 8, 152, 8
EPOCHS = 6


def answers(own: Target) -> list[Sample]:
    """Drawn at temperature 1, all at the same time."""
    cache = make_prompt_cache(own.model)
    drawn = [mx.random.randint(4, own.vocab, (ANSWERS, 1), key=mx.random.key(1))]
    for key in mx.random.split(mx.random.key(2), LENGTH):
        logits = own.model(drawn[-1], cache=cache)[:, -1]
        drawn.append(mx.random.categorical(logits, key=key)[:, None])
        mx.eval(drawn[-1])
    return [Sample(tokens, FIRST) for tokens in mx.concatenate(drawn, axis=1).tolist()]


@pytest.mark.slow
def test_it_learns_as_much_as_a_head_that_was_trained_at_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.training.trainer.ROWS", 256)  # 70 steps an epoch
    own = pair.target()
    samples = answers(own)
    learned, held_out = samples[HELD_OUT:], samples[:HELD_OUT]
    assert 10_000 <= sum(map(len, learned)) < 10_500

    known = find_head(kinds.DATA / "eagle3")
    expected = Trainer(own, known, 1).measure(held_out)

    vocabulary = vocabulary_of(learned, len(own.drafted), own.vocab)
    plan = batches(learned, EPOCHS)
    trainer = Trainer(own, new_head(own, vocabulary), len(plan))
    before = trainer.measure(held_out)
    after = run(trainer, plan, held_out, tmp_path / "state.safetensors", {}, lambda: None)
    print(f"kept {before} before, {after} after, {expected} by the other head")
    assert before[0] < 0.1
    assert after[0] >= 0.9 * expected[0]
    assert 1 + sum(after) >= 0.9 * (1 + sum(expected))
