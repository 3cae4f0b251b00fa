"""New heads for the trained tiny target, as they are served and as they are trained."""

from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.model.checkpoint import load_model, load_weights
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.training import eagle
from mlxspec.training.eagle import eagle_drafts
from mlxspec.training.samples import Sample
from mlxspec.training.target import Target
from tests.heads import kinds, runs
from tests.heads.packagings import save_head

VOCABULARY = range(1, 640, 2)


def target() -> Target:
    """The trained tiny one, in which no engine has changed anything."""
    model, config = load_model(kinds.TARGET)
    load_weights(model)
    return Target(model, "tiny", config)


def new_head(out: Path, changed: bool) -> Path:
    """In the directory `out`; `changed`: with random weights, among which no zeros hide others."""
    made = eagle.new_head(target(), VOCABULARY)
    tensors = kinds.random_tensors(made.tensors) if changed else made.tensors
    return save_head(out, tensors, made.config)


def head_of(own: Target, path: Path) -> HeadModel:
    """The head in a directory; the target hands out what it reads."""
    head: HeadModel = kinds.head_of(path, own.model)
    own.tap(head.taps, mx.array(list(VOCABULARY)))
    return head


def served(path: Path, prompt: list[int], depth: int) -> tuple[list[int], list[int], mx.array]:
    """Of the first round of an engine with the head in a directory: the tokens before it, its
    draft, and what each of that was drawn from, [depth, tokens that are drafted]."""
    e, drafter = kinds.engine(path)
    found: list[mx.array] = []

    sample_next = Chain.sample_next

    def recorded(self: Chain, logits: mx.array) -> None:
        found.append(logits)
        sample_next(self, logits)

    with mock.patch.object(Chain, "sample_next", recorded):
        run = runs.run(e, HeadDrafter(drafter.head, e.runner), depth, [prompt])
    first = run.rounds[0][0]
    assert len(first.draft) == depth
    logits = mx.concatenate(found[:depth])[:, mx.array(list(VOCABULARY))]
    return (prompt + run.answers[0])[: first.start + 1], first.draft, logits


def trained(own: Target, head: HeadModel, known: list[int], draft: list[int]) -> mx.array:
    """The logits of a draft behind the tokens `known` as training computes them, in a batch with
    another sequence and with other tokens behind the draft: [tokens of a draft, drafted ones]."""
    other = kinds.reference("eagle3")["prompts"][1]
    newest = len(known) - 1
    for filler in range(8):  # not every token of a batch has a draft behind it
        tokens = [*known, *draft, *(filler for _ in range(9))]
        batch = own.batch([Sample(other, 1), Sample(tokens, 1)])
        made = [
            logits[1, positions.tolist().index(newest + i)]
            for i, (logits, positions) in enumerate(eagle_drafts(head, batch))
            if newest + i in positions.tolist()
        ]
        if made:
            return mx.stack(made)
    raise AssertionError(f"no draft behind token {newest}")


def gradients(own: Target, head: HeadModel) -> dict[str, float]:
    """The largest gradient of each of a head's tensors but lm_head."""
    head.module.lm_head.freeze()
    batch = own.batch([Sample(kinds.reference("eagle3")["prompts"][0], 1)])

    def loss() -> Any:
        return sum(mx.sin(logits).sum() for logits, _ in eagle_drafts(head, batch))

    _, grads = nn.value_and_grad(head.module, loss)()
    leaves: Any = tree_flatten(grads)
    return {name: float(abs(x).max().item()) for name, x in leaves}
