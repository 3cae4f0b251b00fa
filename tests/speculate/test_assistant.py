"""Gemma 4's assistant: what is read of its files, what it sees of the target, and which models it
is refused for. Against mlx-vlm: test_assistant_oracle.py."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlxspec.config import Config
from mlxspec.load.loader import load_engine
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_head
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.proposer import Proposer
from tests.heads import assistant, kinds
from tests.heads.assistant import BEST, CLUSTERS, SIZE
from tests.heads.packagings import Tensors
from tests.support import architectures, tiny
from tests.support.checkpoints import save
from tests.support.drafters import costs
from tests.support.engine_with_head import head_of, loud, some
from tests.support.expected_drafts import TOLERANCE, AssistantChain, Drafted, check, few, recorded
from tests.support.parameter_rows import diagonal

KIND = "gemma4_text"
Change = Callable[[Tensors, kinds.Config], None]


def loaded(path: Path, target: Any) -> HeadModel:
    head = load_head(find_head(path), target)
    assert head is not None and read_weights(head)
    return head


def build() -> Any:
    """A target as the large ones are: its heads wide enough to be quantized, those of full attention
    wider and with one set of K/V, which serve as both; the last layers share the K/V of others."""
    module = architectures.module("gemma4")
    wide = dict(head_dim=32, global_head_dim=64, attention_k_eq_v=True)
    wide |= dict(num_global_key_value_heads=1)
    config = architectures.config("gemma4")
    config["text_config"] |= wide
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda x: x * 2.5 if x.ndim > 1 else x, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


# ---- what is read


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("clusters", [False, True])
def test_every_packaging_is_a_head(bits: bool, clusters: bool, tmp_path: Path) -> None:
    target = tiny.model(KIND)
    path = assistant.write(tmp_path, target, bits, use_ordered_embeddings=clusters)
    assert find_head(path).standalone
    module = loaded(path, target).module
    assert ("scales" in module.pre_projection) == bits
    out = mx.random.normal((5, SIZE))
    logits, everything = module.logits(out), module.embed_tokens.as_linear(out)
    kept = mx.isfinite(logits)
    tokens = BEST * tiny.VOCAB // CLUSTERS if clusters else tiny.VOCAB
    assert kept.sum(-1).tolist() == [tokens for _ in range(5)]
    assert mx.abs(mx.where(kept, logits - everything, 0)).max() < 1e-5


def test_a_copy_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    target = tiny.model(KIND)
    config = assistant.config_of(target)
    tensors = assistant.tensors_of(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0
    loaded(kinds.save_head(tmp_path, tensors, config), target)


def test_only_tokens_of_the_best_clusters_are_drafted(tmp_path: Path) -> None:
    target = tiny.model(KIND)
    path = assistant.write(tmp_path, target, use_ordered_embeddings=True)
    tensors = mx.load(str(path / "model.safetensors"))
    order = np.array(tensors["masked_embedding.token_ordering"]).reshape(CLUSTERS, -1)
    out = mx.random.normal((1, SIZE))
    scores = np.array(tensors["masked_embedding.centroids.weight"]) @ np.array(out[0])
    best = {int(token) for i in np.argsort(scores)[-BEST:] for token in order[i]}
    logits = np.array(loaded(path, target).module.logits(out)[0])
    assert {i for i in range(tiny.VOCAB) if np.isfinite(logits[i])} == best


# ---- what it sees


@pytest.mark.parametrize(
    "layout, kv_bits, own", diagonal(["rows", "gather"], [0, 8], [True, False], every=2)
)
def test_it_reads_the_pages_of_the_target(layout: Any, kv_bits: int, own: bool) -> None:
    """Quantized ones too, with pools of their own for sliding windows or without; neighbours join."""
    model = build()
    e = tiny.engine(model, layout=layout, kv_bits=kv_bits, own=own, blocks=128)
    drafter = HeadDrafter(assistant.random_assistant(model), e.runner)
    e.proposer = Proposer(costs(), [drafter], fixed_depth=4)
    drafted = recorded(e, drafter)
    asked = [few(f"r{i}", some(3 + 9 * i, i), 20, temperature=0.8, seed=i) for i in range(4)]
    tiny.run(e, lambda i: e.add(asked[i]) if i < 4 else None, last=4)
    tried, kept = e.spec_metrics.drafted.total(), e.spec_metrics.accepted.total()
    assert 0 < kept < tried and len(drafted) > 15
    right = share_of(drafted, AssistantChain(build(), kv_bits))
    if kv_bits:  # neighbours change the last bits, and so now and then what a value is rounded to
        assert right > 0.5 and share_of(drafted, AssistantChain(build())) < 0.1
    else:
        assert right == 1


def share_of(drafted: list[Drafted], chain: AssistantChain) -> float:
    """How many of the drafts were made of the same outputs."""
    off = [np.abs(d.outputs - chain.like(d)[1]).max() for d in drafted]
    return float(np.mean(np.array(off) < TOLERANCE))


@pytest.mark.slow
def test_a_server_drafts_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes no memory but that of its weights."""
    target = tmp_path / "target"
    target.mkdir()
    save(target, KIND)
    path = assistant.write(tmp_path / "head", tiny.model(KIND))
    settings = Config(cache_gb=0, block_size=8, kv_blocks=64, cache_dir=str(tmp_path / "cache"))
    _, plain = load_engine(target, "tiny", settings)
    with caplog.at_level(logging.INFO):
        e, info = load_engine(target, "tiny", settings, path)
    assert "assistant drafts from the hidden states after the final norm" in caplog.text
    assert info.kv_bytes == plain.kv_bytes and info.weight_bytes > plain.weight_bytes
    drafted = recorded(e, head_of(e))
    loud(e)
    e.add(few("r", some(30), 24))
    tiny.run(e)
    assert check(KIND, drafted) > 3


# ---- what it is refused for


def without(name: str) -> Change:
    def change(tensors: Tensors, config: kinds.Config) -> None:
        del tensors[name]

    return change


def as_it_is(tensors: Tensors, config: kinds.Config) -> None:
    """It fits its own target."""


def unordered(tensors: Tensors, config: kinds.Config) -> None:
    tensors["masked_embedding.token_ordering"] += 1


def no_layers(tensors: Tensors, config: kinds.Config) -> None:
    del config["text_config"]["num_hidden_layers"]


def narrow(tensors: Tensors, config: kinds.Config) -> None:
    tensors["post_projection.weight"] = tensors["post_projection.weight"][:32]


def few_tokens(tensors: Tensors, config: kinds.Config) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300]


UNFIT = {
    "no q_proj": (without("model.layers.1.self_attn.q_proj.weight"), KIND, "layers.1.self_attn.q"),
    "no centroids": (without("masked_embedding.centroids.weight"), KIND, "centroids.weight"),
    "no such token": (unordered, KIND, "token_ordering"),
    "no number of layers": (no_layers, KIND, "num_hidden_layers"),
    "another hidden size": (narrow, KIND, "post_projection.weight"),
    "another vocabulary": (few_tokens, KIND, "embed_tokens.weight"),
    "no Gemma 4": (as_it_is, "qwen3", "is for Gemma 4, which this model"),
    "a Gemma 3": (as_it_is, "gemma3_text", "is for Gemma 4, which this model"),
}


@pytest.mark.parametrize("change, kind, said", UNFIT.values(), ids=UNFIT)
def test_a_head_that_does_not_fit(
    change: Change,
    kind: str,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = assistant.config_of(tiny.model(KIND), use_ordered_embeddings=True)
    tensors = assistant.tensors_of(config)
    change(tensors, config)
    kinds.save_head(tmp_path, tensors, config)
    assert load_head(find_head(tmp_path), tiny.model(kind)) is None
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert "decoding without a head" in lines[0] and said in lines[0]
