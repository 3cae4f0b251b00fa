"""A new DSpark head: it begins as the target's last layer, and is trained as it is served."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.speculate.heads import load_head
from mlxspec.speculate.heads.files import find_head
from mlxspec.training.dspark import BLOCK, dspark_drafts
from tests.heads import kinds
from tests.training import pair


def test_a_new_head_begins_as_the_last_layer(tmp_path: Path) -> None:
    own = pair.target()
    last = own.model.layers[-1]
    head = load_head(find_head(pair.new_head("dspark", tmp_path, changed=False)), own.model)
    assert head is not None
    assert (head.name, head.depth, head.taps) == ("dspark", BLOCK, (1, 2, 5))
    found = head.module.layers[0].self_attn.k_proj.weight
    assert mx.array_equal(found, last.self_attn.k_proj.weight)
    norm, expected = head.module.hidden_norm.weight, last.input_layernorm.weight
    assert mx.allclose(norm, expected, atol=1e-5)
    taps = mx.random.normal((3, head.width))
    assert mx.allclose(head.module.fc(taps), taps[:, -own.width :])


@pytest.mark.parametrize("depth", [1, 2, BLOCK])
def test_a_draft_is_trained_as_it_is_served(tmp_path: Path, depth: int) -> None:
    path = pair.new_head("dspark", tmp_path, changed=True)
    prompt = kinds.reference("dspark")["prompts"][0]
    known, draft, expected = pair.served(path, prompt, depth)
    own = pair.target()
    found = pair.trained(own, pair.head_of(own, path), dspark_drafts, known, draft)
    assert mx.allclose(found[:depth], expected, atol=1e-4), abs(found[:depth] - expected).max()


def test_gradients_reach_every_tensor(tmp_path: Path) -> None:
    own = pair.target()
    head = pair.head_of(own, pair.new_head("dspark", tmp_path, changed=True))
    found = pair.gradients(own, head, dspark_drafts)
    assert {"fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight"} <= found.keys()
    assert "lm_head.weight" not in found and min(found.values()) > 0, found
