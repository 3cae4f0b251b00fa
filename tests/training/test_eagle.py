"""A new EAGLE-3 head: it begins as the target's last layer, and is trained as it is served."""

from pathlib import Path

import mlx.core as mx

from mlxspec.training.eagle import CHAIN
from tests.heads import kinds
from tests.training import pair


def test_a_new_head_begins_as_the_last_layer(tmp_path: Path) -> None:
    own = pair.target()
    last = own.model.layers[-1]
    head = pair.head_of(own, pair.new_head(tmp_path, changed=False))
    wide = head.module.layers[0].self_attn.k_proj.weight
    assert mx.array_equal(wide[:, own.width :], last.self_attn.k_proj.weight)
    taps = mx.random.normal((3, head.width))
    assert mx.allclose(head.prepare(taps), taps[:, -own.width :])


def test_a_draft_is_trained_as_it_is_served(tmp_path: Path) -> None:
    path = pair.new_head(tmp_path, changed=True)
    prompt = kinds.reference("eagle3")["prompts"][0]
    known, draft, expected = pair.served(path, prompt, CHAIN)
    own = pair.target()
    found = pair.trained(own, pair.head_of(own, path), known, draft)
    assert mx.allclose(found, expected, atol=1e-4), abs(found - expected).max()


def test_gradients_reach_every_tensor(tmp_path: Path) -> None:
    own = pair.target()
    head = pair.head_of(own, pair.new_head(tmp_path, changed=True))
    found = pair.gradients(own, head)
    assert {"fc.weight", "layers.0.hidden_norm.weight", "norm.weight"} <= found.keys()
    assert "lm_head.weight" not in found and min(found.values()) > 0, found
