"""Runs the trained pair through the engine, and through a plain simulation without one."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import KVCache

from mlxspec.engine.engine import Engine
from mlxspec.kernels.reference import gumbel
from mlxspec.model.checkpoint import load_model
from mlxspec.model.sampler import seed32
from mlxspec.sequences import Accepted
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_head
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.mtp import MTP
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Request, Sampling
from tests.heads.packagings import DATA, SIDECAR, TARGET, Tensors, read_json
from tests.support import tiny
from tests.support.drafters import costs

BLOCK = 8
LATE = 3  # steps
GREEDY = Sampling(temperature=0.0)

Tokens = list[int]


@functools.cache
def reference() -> Any:
    """mlx-vlm's results with the trained pair."""
    return read_json(DATA / "reference.json")


@dataclass(slots=True)
class Round:
    """A step that decoded: the position of the newest token before it, a lower bound where drafts
    were in flight; its draft, and how many tokens of that were kept."""

    start: int
    draft: Tokens
    kept: int
    overlaps: bool


@dataclass
class Run:
    """What the engine did with the prompts. A prompt whose last token is a step of its own has a
    round more than mlx-vlm's: that token is followed by a draft."""

    prompts: list[Tokens]
    answers: list[Tokens] = field(default_factory=list)
    rounds: list[list[Round]] = field(default_factory=list)

    def kept(self, depth: int) -> list[list[int]]:
        """How many tokens of its draft each round kept, by prompt: of rounds of full depth that
        follow a token of the answer."""
        return [
            [r.kept for r in rounds if len(r.draft) == depth and r.start >= len(prompt)]
            for prompt, rounds in zip(self.prompts, self.rounds, strict=True)
        ]

    def tokens_per_round(self, depth: int) -> float:
        """Over the rounds of `kept`."""
        kept = [n for rounds in self.kept(depth) for n in rounds]
        return 1 + sum(kept) / len(kept)


class Recorded(Proposer):
    """Remembers the rounds of each request."""

    rounds: defaultdict[str, list[Round]]

    def observe(self, step: Any, accepted: Sequence[Accepted], seconds: float) -> None:
        for e, new in zip(step.plan, accepted, strict=True):
            if new.tokens and e.count == 1:
                draft = [int(t) for t in e.draft.tokens]
                made = Round(e.start, draft, new.drafts, step.overlaps)
                self.rounds[e.seq.request.id].append(made)
        super().observe(step, accepted, seconds)


def head_of(path: Path, target: Any) -> HeadModel:
    """The head in a directory, with its weights."""
    head = load_head(find_head(path), target)
    assert head is not None and read_weights(head)
    return head


def engine(
    path: Path = TARGET, head: Path | None = None, layout: Any = "rect", **kw: Any
) -> tuple[Engine, HeadDrafter]:
    """An engine over the model at `path`, and the head there or at `head`, for its proposer."""
    model, _ = load_model(path)
    loaded = head_of(head or path, model)
    made = tiny.engine(model, layout=layout, block=BLOCK, blocks=256, budget=256, **kw)
    return made, HeadDrafter(loaded, made.runner)


def proposer_of(head: HeadDrafter, depth: int) -> Recorded:
    """Always drafts so many tokens."""
    made = Recorded(costs(), [head], fixed_depth=depth)
    made.rounds = defaultdict(list)
    return made


def run(
    e: Engine,
    head: HeadDrafter,
    depth: int,
    prompts: Sequence[Tokens],
    sampling: Sampling = GREEDY,
    together: bool = False,
) -> Run:
    """Answers to the prompts, with drafts of `depth` tokens: each alone, or `together`, each a few
    steps after the one before it."""
    made = Run(list(prompts))
    e.proposer = proposer = proposer_of(head, depth)
    names = [str(i) for i in range(len(prompts))]
    out = []
    for name, prompt in zip(names, prompts, strict=True):
        e.add(Request(name, tuple(prompt), reference()["max_tokens"], sampling))
        out += [each for _ in range(LATE) for each in e.step()] if together else tiny.run(e)
    out += tiny.run(e)
    made.answers = [tiny.tokens(out, name) for name in names]
    made.rounds = [proposer.rounds[name] for name in names]
    assert proposer.drafters == [head], "the head failed"
    return made


def random_tensors(target: Any) -> Tensors:
    """Tensors of a random head for this target, the same every time."""
    owner = getattr(target, "language_model", target)
    layer = type(owner.model.layers[-1])
    place = owner.args.full_attention_interval - 1
    module = MTP([layer(owner.args, place)], owner.args.hidden_size, owner.args.rms_norm_eps)
    mx.random.seed(3)
    made: Tensors = {}
    found: Any = tree_flatten(module.parameters())
    for name, array in found:
        if array.ndim == 1:
            made[name] = 1 + 0.3 * mx.random.normal(array.shape)
        else:
            made[name] = mx.random.normal(array.shape) * 1.5 / array.shape[-1] ** 0.5
    return made


# ---- without an engine
# --------------------------------------------------------------------------------


class DenseHead:
    """A loaded head over mlx-lm's own caches."""

    def __init__(self, head: HeadModel) -> None:
        self.head = head
        self.caches: Any = [KVCache() for _ in head.module.layers]

    def __call__(self, tokens: Tokens, hidden: mx.array) -> mx.array:
        """The outputs [T, D] for these tokens and the hidden states before them."""
        embedded = self.head.embed(mx.array([tokens]))
        return self.head.module(embedded, hidden[None], self.caches)[0]

    def next_token(self, out: mx.array, sampling: Sampling, position: int) -> int:
        """The token for this position, with the noise that the target draws it with."""
        logits = self.head.lm_head(out[-1:])
        if sampling.temperature:
            key = mx.array([seed32(sampling.seed, 0)], mx.uint32)
            noise = gumbel(key, mx.array([position], mx.uint32), logits.shape[-1])
            logits = logits / sampling.temperature + noise
        return int(logits.argmax())

    def trim(self, rows: int) -> None:
        for cache in self.caches:
            cache.trim(rows)


@functools.cache
def plain_target() -> Any:
    """The target as mlx-lm loads it, which no engine has changed."""
    return utils.load_model(TARGET)[0]


@functools.cache
def plain_head(path: Path = SIDECAR) -> HeadModel:
    return head_of(path, plain_target())


def simulate(
    head: HeadModel,
    known: Tokens,
    at: int,
    depths: Iterable[int],
    keep: bool,
    sampling: Sampling = GREEDY,
) -> list[Tokens]:
    """The drafts of a round of each depth, of which the first follows the token at position
    `at`; a round keeps what `known`, prompt and answer, has. `keep`, as in mlx-vlm: rows of kept
    drafts stay as they were drafted; else all are run again with the target's hidden states."""
    hidden = plain_target().language_model.model(mx.array([known]))[0]
    dense = DenseHead(head)
    out = dense(known[1 : at + 1], hidden[:at])
    drafts = []
    for depth in depths:
        if at + 1 == len(known):
            break  # fewer rounds than the engine's
        draft = []
        for i in range(depth):
            if i:
                out = dense(draft[-1:], out[-1:])
            draft.append(dense.next_token(out, sampling, at + 1 + i))
        drafts.append(draft)
        kept = 0
        while kept < min(depth, len(known) - at - 2) and draft[kept] == known[at + 1 + kept]:
            kept += 1
        chained = max(0, depth - 1)
        stay = min(kept, chained) if keep else 0
        dense.trim(chained - stay)
        end = at + kept + 1
        out = dense(known[at + 1 + stay : end + 1], hidden[at + stay : end])
        at = end
    return drafts
