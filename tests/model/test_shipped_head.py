"""The built-in model's head: whole, of that model, small, and used without a flag."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlxspec.commands.bench import prompt_of, run_group, tasks_of, tokens_of
from mlxspec.config import BUILT_IN, load_config
from mlxspec.load.resolve import resolve_model
from mlxspec.model.cards import cards
from mlxspec.model.hub import Resolved, learned_head
from mlxspec.speculate import NoSpeculation
from mlxspec.speculate.heads import load_head
from mlxspec.speculate.heads.files import find_head
from mlxspec.types import Request, Sampling

MOST_BYTES = 25_000_000


@pytest.fixture
def head(tmp_path: Path) -> Path:
    found = learned_head(Resolved(tmp_path, BUILT_IN), tmp_path)
    assert found is not None
    return found


def test_it_is_small_and_says_how_it_was_made(head: Path) -> None:
    assert sum(path.stat().st_size for path in head.iterdir()) < MOST_BYTES
    made = json.loads((head / "training.json").read_text())
    card = (head / "README.md").read_text()
    for name in ("tokens", "epochs", "vocabulary"):
        assert str(made[name]) in card.replace(",", ""), name


def test_it_loads_for_the_model_of_the_card(head: Path) -> None:
    files = cards()[BUILT_IN].files["config.json"]
    target = llama.Model(llama.ModelArgs.from_dict(files))  # lazily: only embeddings are made
    loaded = load_head(find_head(head), target)
    assert loaded.name == json.loads((head / "training.json").read_text())["kind"]
    logits = loaded.lm_head(mx.zeros((1, files["hidden_size"])))
    assert logits.shape == (1, files["vocab_size"])


@pytest.mark.slow
def test_it_drafts_for_the_real_model(smollm2: Path) -> None:
    found = load_config({"draft_depth": "2"}, {})  # whether drafts pay here or not
    config = replace(found, cache_dir=str(smollm2.parents[1]), cache_gb=0.0)
    model = resolve_model(config)
    engine, _ = model.load()
    heads = engine.proposer
    tokens = rounds = 0
    for task in tasks_of("chat")[:2]:
        prompt = prompt_of(task, model.tokenizer)
        request = Request(task.name, prompt, 64, Sampling(0.0))
        drafted = run_group(engine, heads, [request])[task.name]
        plain = run_group(engine, NoSpeculation(), [request])[task.name]
        assert tokens_of(drafted) == tokens_of(plain)
        last = drafted[-1][1]
        tokens, rounds = tokens + 64, rounds + last.rounds
        assert last.accepted > 0
    assert tokens / rounds > 1.2
