"""What drafters would branch into at each position of an answer: trained heads, and copies.

Rule: heads and the index for copies are the server's own; the answers are the target's, so whether
a drafted token would be accepted is known without a verification.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.model.trunk import install_taps, trunk_of
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.block_pass import BlockPass
from mlxspec.speculate.heads.files import find_head
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.ngram import MAX_MATCH, Index, bucket
from mlxspec.types import FINAL_NORM

DEPTH = 7  # tokens of a path that a head drafts at most
WIDE, CHILDREN = 8, 4  # nodes that are continued at each depth, children of each
BINS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of a drafter's probability


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted token: the index of its parent, -1: the newest token; its `rank` among its
    siblings, 0: that of the chain; and what its acceptance depends on."""

    parent: int
    token: int
    rank: int
    key: Hashable


Tree = list[Node]  # parents come before their children


@dataclass(slots=True)
class Answer:
    """The tokens of a prompt and its answer, which begins at `start`; with noise float32
    [positions, vocab] where it was drawn at a temperature."""

    tokens: list[int]
    start: int
    noise: np.ndarray | None = None


class Session(Protocol):
    """A drafter behind one position."""

    def first(self) -> mx.array:
        """Logits [1, vocab] of the next token."""

    def deeper(self, rows: Sequence[int], tokens: Sequence[int]) -> mx.array:
        """Logits [n, vocab] of what follows, for the given rows of the last logits each with the
        token drafted from it."""


def grow(
    session: Session,
    depth: int,
    temperature: float,
    noise: np.ndarray | None,
    bins: Sequence[float],
) -> Tree:
    """The most probable paths, as EAGLE-2 (arXiv 2406.16858) looks for them. `noise` [depth, vocab]
    is that of the target, None: siblings are the likeliest tokens."""
    tree: Tree = []
    parents, joint = [-1], np.ones(1)
    logits = session.first()
    for level in range(depth):
        x = np.array(logits.astype(mx.float32)) / (temperature or 1.0)
        if noise is not None:
            x = x + noise[level]
        p = np.exp(x - x.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        best = np.argpartition(-p, CHILDREN, axis=1)[:, :CHILDREN]
        made = []  # (joint probability, row, index in the tree)
        for row, found in enumerate(best):
            found = found[np.argsort(-p[row, found], kind="stable")]
            for rank, token in enumerate(found):
                chance = float(p[row, token])
                key = min(rank, 2), int(np.searchsorted(bins, chance))
                made.append((joint[row] * chance, row, len(tree)))
                tree.append(Node(parents[row], int(token), rank, key))
        if level + 1 == depth:
            break
        chain = made[0]  # the first row is always the chain's
        rest = sorted(made[1:], key=lambda node: -node[0])[: WIDE - 1]
        kept = [chain, *rest]
        parents = [index for *_, index in kept]
        joint = np.array([chance for chance, *_ in kept])
        logits = session.deeper([row for _, row, _ in kept], [tree[i].token for i in parents])
    return tree


# ---- heads


class PathCache:
    """K/V of one layer: those of a prefix, behind them those of each path so far."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys, values
        self.offset = keys.shape[2]

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def choose(self, rows: mx.array) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.concatenate([self.keys, k], axis=2)
        self.values = mx.concatenate([self.values, v], axis=2)
        self.offset += 1
        return self.keys, self.values


class ChainSession:
    """A head that drafts token by token: `out` [1, D] is its output in the newest row, `caches` hold
    the rows up to it."""

    def __init__(self, head: HeadModel, out: mx.array, caches: list[PathCache]) -> None:
        self.head, self.out, self.caches = head, out, caches

    def first(self) -> mx.array:
        return self.head.lm_head(self.out)

    def deeper(self, rows: Sequence[int], tokens: Sequence[int]) -> mx.array:
        chosen = mx.array(list(rows))
        for cache in self.caches:
            cache.choose(chosen)
        embedded = self.head.embed(mx.array(list(tokens)))[:, None]
        self.out = self.head.module(embedded, self.out[chosen][:, None], self.caches)[:, 0]
        return self.head.lm_head(self.out)


class BlockSession:
    """A head that makes a block in one pass: `out` [depth, D] in the rows that predict."""

    def __init__(self, head: HeadModel, out: mx.array, anchor: int) -> None:
        self.head, self.out, self.anchor = head, out, anchor
        self.logits = head.lm_head(out)
        self.level = 0

    def first(self) -> mx.array:
        return self._scores([self.anchor])

    def deeper(self, rows: Sequence[int], tokens: Sequence[int]) -> mx.array:
        self.level += 1
        return self._scores(tokens)

    def _scores(self, before: Sequence[int]) -> mx.array:
        shape = len(before), -1
        logits = mx.broadcast_to(self.logits[self.level], (shape[0], self.logits.shape[1]))
        hidden = mx.broadcast_to(self.out[self.level], (shape[0], self.out.shape[1]))
        return self.head.module.scores(logits, hidden, mx.array(list(before)))


class Taps:
    """Stands for a runner's view: takes what the tapped layers hand out."""

    taps: tuple[int, ...] = ()
    tapped: dict[int, mx.array]
    sampled = None


def hidden_states(target: Any, taps: Sequence[int], tokens: Sequence[int]) -> mx.array:
    """[T, taps * D] of a target that mlx-lm loaded, side by side."""
    trunk, view = trunk_of(target), Taps()
    install_taps(trunk, view, taps)
    view.tapped[FINAL_NORM] = trunk(mx.array([list(tokens)]), cache=make_prompt_cache(target))
    found = mx.concatenate([view.tapped[tap][0] for tap in taps], axis=-1)
    install_taps(trunk, view, ())
    return found


def chain_sessions(head: HeadModel, target: Any, answer: Answer):
    """A function from a position to the session behind the token there."""
    tokens = answer.tokens
    hidden = head.prepare(hidden_states(target, head.taps, tokens))
    caches = [KVCache() for _ in head.module.layers]
    embedded = head.embed(mx.array([tokens[1:]]))
    out = head.module(embedded, hidden[None, :-1], caches)[0]  # row i: of the token at i + 1
    mx.eval(out)
    states = [(cache.keys, cache.values) for cache in caches]

    def at(position: int) -> Session:
        paths = [PathCache(k[:, :, :position], v[:, :, :position]) for k, v in states]
        return ChainSession(head, out[position - 1 : position], paths)

    return at


class Context:
    """Stands for a layer's pages: takes the context rows of an answer."""

    def __init__(self, positions: mx.array) -> None:
        self.view = self
        self.positions = positions

    def write(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys.swapaxes(0, 2), values.swapaxes(0, 2)  # [1, heads, T, dim]


def block_sessions(head: HeadModel, target: Any, answer: Answer):
    """A function from a position to the session behind the token there."""
    tokens, depth = answer.tokens, min(DEPTH, head.depth)
    taps = hidden_states(target, head.taps, tokens)
    context = [Context(mx.arange(len(tokens))) for _ in head.module.layers]
    head.module.store(taps, context)
    mx.eval([c.keys for c in context], [c.values for c in context])
    extra = 0 if head.module.from_anchor else 1

    def at(position: int) -> Session:
        rows = depth + extra
        block = [tokens[position], *(head.module.mask for _ in range(rows - 1))]
        caches = [
            (
                _mask(position, rows, layer),
                PathCache(c.keys[:, :, :position], c.values[:, :, :position]),
            )
            for layer, c in zip(head.module.layers, context, strict=True)
        ]
        out = head.module(head.embed(mx.array([block])), caches)[0, extra:]
        return BlockSession(head, out, tokens[position])

    return at


def _mask(position: int, rows: int, layer: Any) -> mx.array:
    """bool [1, 1, rows, position + rows]: what a block's rows see of the context and the block."""
    row = np.arange(rows)[:, None]
    slot = np.arange(position)[None]
    own = np.ones((rows, rows), bool)
    if layer.causal:
        own = np.tril(own)
    before = np.ones((rows, position), bool)
    if layer.window:
        before = slot > position + (row if layer.causal else 0) - layer.window
        before = np.broadcast_to(before, (rows, position))
    return mx.array(np.concatenate([before, own], axis=1))[None, None]


def head_trees(
    head: HeadModel,
    target: Any,
    answer: Answer,
    temperature: float = 0.0,
    coupled: bool = False,
) -> list[Tree]:
    """The tree behind each token of the answer but the last. `coupled`: drawn with its noise."""
    block = issubclass(head.pass_type, BlockPass)
    sessions = block_sessions if block else chain_sessions
    at = sessions(head, target, answer)
    depth = min(DEPTH, head.depth) if block else DEPTH
    trees = []
    for position in range(answer.start, len(answer.tokens) - 1):
        noise = None
        if coupled:
            assert answer.noise is not None
            noise = answer.noise[position + 1 : position + 1 + depth]
        trees.append(grow(at(position), depth, temperature, noise, BINS))
    return trees


def answer_of(
    target: Any, prompt: Sequence[int], length: int, temperature: float, seed: int
) -> Answer:
    """What the target says, token by token, with noise that depends on the position alone."""
    tokens, cache, x = list(prompt), make_prompt_cache(target), mx.array([list(prompt)])
    noise = None
    for i in range(length):
        logits = np.array(target(x, cache=cache)[0, -1].astype(mx.float32))
        if temperature:
            if noise is None:
                rng = np.random.default_rng(seed)
                shape = len(prompt) + length + DEPTH, len(logits)
                noise = rng.gumbel(size=shape).astype(np.float32)
            logits = logits / temperature + noise[len(prompt) + i]
        tokens.append(int(logits.argmax()))
        x = mx.array([tokens[-1:]])
    return Answer(tokens, len(prompt), noise)


# ---- copies


def copy_trees(answer: Answer, most: int) -> list[Tree]:
    """Behind each token of the answer but the last: what followed the longest earlier match, which
    is the chain, and where other matches went on otherwise. Paths have `most` tokens at most."""
    index = Index(answer.tokens[: answer.start])
    trees = []
    for token in answer.tokens[answer.start : -1]:
        index.tokens.append(token)
        index.index(len(index.tokens))
        tree: Tree = []
        at: dict[tuple[int, int], int] = {}  # (parent, token) -> its index
        for rank, (match, place) in enumerate(index.find(index.tokens[-MAX_MATCH:])):
            parent = -1
            for i, token in enumerate(index.copy("", match, place, most).tokens):
                if (parent, token) not in at:
                    at[parent, token] = len(tree)
                    siblings = sum(node.parent == parent for node in tree)
                    key = min(rank, 3), min(siblings, 2), bucket(match + i)
                    tree.append(Node(parent, token, siblings, key))
                parent = at[parent, token]
        trees.append(tree)
    return trees


def load_files(model: Path, head: Path) -> tuple[Any, HeadModel]:
    """A model that mlx-lm loads, and a head for it."""
    target = load_model(model)[0]
    loaded = load_head(find_head(head), target)
    assert loaded is not None and read_weights(loaded)
    return target, loaded


def load_pair(kind: str, data: Path) -> tuple[Any, Any, list[list[int]], list[list[int]]]:
    """(target, head, prompts, greedy answers) of the trained pairs of tests/heads."""
    folder, path = ("mtp", data / "mtp/sidecar") if kind == "mtp" else ("qwen3", data / kind)
    target, head = load_files(data / folder / "target", path)
    reference = json.loads((data / folder / "reference.json").read_text("utf-8"))
    return target, head, reference["prompts"], reference["greedy"]
