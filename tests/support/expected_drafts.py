"""What a head should draft after given tokens, by mlx-lm's own caches, from all tokens at once; and
what an engine's head does draft."""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlxspec.engine.engine import Engine
from mlxspec.kernels.reference import gumbel
from mlxspec.model.batch import Step
from mlxspec.model.sampler import seed32
from mlxspec.model.trunk import trunk_of
from mlxspec.sequences import Entry, Plan, Seq
from mlxspec.speculate.chain import deepest_first
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.types import Request
from tests.support import tiny
from tests.support.drafters import random_head

# The tokens that a request may draw: so few that a head with random weights is right every so
# often.
FEW = (11, 103, 207)
BIAS = tuple((token, 1e3) for token in FEW)

TOLERANCE = 2e-4  # of the head's output, whose values are around 1


@dataclass
class Drafted:
    """A draft for a choice of a request after `tokens`, and the head's output [n, D] that its
    tokens were drawn from."""

    request: Request
    index: int
    tokens: tuple[int, ...]
    draft: list[int]
    outputs: np.ndarray


class Chain:
    """A fresh model that nothing else uses, and its head."""

    def __init__(self, kind: str) -> None:
        self.model = tiny.model(kind)
        self.head = random_head(self.model)
        self.known: dict[Any, tuple[list[int], np.ndarray]] = {}

    def like(self, d: Drafted) -> tuple[list[int], np.ndarray]:
        """What the draft should be, with its outputs."""
        key = (d.request.sampling, d.index, d.tokens, len(d.draft))
        if key not in self.known:
            self.known[key] = self._drafts(d.request, d.index, d.tokens, len(d.draft))
        return self.known[key]

    def _drafts(
        self, r: Request, index: int, tokens: tuple[int, ...], n: int
    ) -> tuple[list[int], np.ndarray]:
        hidden = trunk_of(self.model)(mx.array([tokens]))[0]
        cache, made, outputs = KVCache(), [], []
        out = self._rows(tokens[1:], hidden[:-1], cache)[-1:]
        for position in range(len(tokens), len(tokens) + n):
            outputs.append(out[0])
            made.append(self._draw(r, index, out, position))
            out = self._rows(made[-1:], out, cache)
        return made, np.array(mx.stack(outputs))

    def _rows(self, tokens: Any, hidden: mx.array, cache: KVCache) -> mx.array:
        """Attention depends on how far tokens are apart, so the first row may lie in slot 0."""
        m = self.head.module
        embedded = m.pre_fc_norm_embedding(self.head.embed(mx.array(tokens)))
        x = m.fc(mx.concatenate([embedded, m.pre_fc_norm_hidden(hidden)], -1))[None]
        return m.norm(m.layers[0](x, "causal" if len(tokens) > 1 else None, cache))[0]

    def _draw(self, r: Request, index: int, out: mx.array, position: int) -> int:
        logits = self.head.lm_head(out).astype(mx.float32)
        for token, bias in r.sampling.logit_bias:
            logits[:, token] += bias
        if r.sampling.temperature:
            seed = mx.array([seed32(r.sampling.seed, index)], mx.uint32)
            noise = gumbel(seed, mx.array([position], mx.uint32), logits.shape[-1])
            logits = logits / r.sampling.temperature + noise
        return int(mx.argmax(logits).item())


class AssistantChain(Chain):
    """Of Gemma 4's assistant: attends to the target's K/V of all tokens but the newest, in sliding
    layers to as many as that token would; with `kv_bits`, to what quantizing leaves of them."""

    def __init__(self, model: Any, kv_bits: int = 0) -> None:
        self.model, self.kv_bits = model, kv_bits
        self.head = random_head(model, "assistant")
        self.known = {}

    def _drafts(
        self, r: Request, index: int, tokens: tuple[int, ...], n: int
    ) -> tuple[list[int], np.ndarray]:
        m, trunk, position = self.head.module, trunk_of(self.model), len(tokens) - 2
        caches = tiny.rounded(self.model.make_cache(), self.kv_bits)
        hidden = trunk(mx.array([tokens[:-1]]), cache=caches)[0, -1:]
        seen = {}  # by the type of a layer: of the last one
        for cache, kind in zip(caches, trunk.config.layer_types, strict=False):
            first = max(0, len(tokens) - getattr(cache, "max_size", len(tokens)))
            seen[kind] = [x[:, :, first : position + 1] for x in (cache.keys, cache.values)]
        made, outputs = [tokens[-1]], []
        for at in range(len(tokens), len(tokens) + n):
            embedded = trunk.embed_tokens(mx.array(made[-1:])) * trunk.embed_scale
            x = m.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[None]
            for layer in m.layers:
                x = layer(x, shared_kv=seen[layer.layer_type], offset=position)[0]
            out = m.norm(x[0])
            hidden = m.post_projection(out)
            outputs.append(out[0])
            made.append(self._draw(r, index, out, at))
        return made[1:], np.array(mx.stack(outputs))


@functools.cache
def chain(kind: str) -> Chain:
    return AssistantChain(tiny.model(kind)) if kind == "gemma4_text" else Chain(kind)


def recorded(e: Engine, head: HeadDrafter) -> list[Drafted]:
    """The head's drafts from now on."""
    found: list[Drafted] = []
    passes: list[mx.array] = []
    outputs: dict[Entry, list[mx.array]] = {}
    ended: set[Seq] = set()  # before the step; what is in flight then is about other tokens
    lm_head, draft, observe = head.head.lm_head, head.draft, head.observe

    def logits(hidden: mx.array) -> mx.array:
        passes.append(hidden)
        return lm_head(hidden)

    def drafting(plan: Plan, previous: Any) -> None:
        passes.clear()
        draft(plan, previous)
        for n, entry in enumerate(deepest_first(head.chosen(plan))):
            outputs[entry] = [rows[n] for rows in passes if n < len(rows)]

    def record(step: Step, accepted: Any) -> None:
        for entry in step.plan:
            made = outputs.pop(entry, [])
            n, seq = entry.draft.size, entry.seq
            if made and n and seq not in ended:
                tokens = tuple(seq.tokens[: entry.start + entry.count])
                told = [*entry.draft.tokens]
                rows = np.array(mx.stack(made[:n]))
                found.append(Drafted(seq.request, seq.index, tokens, told, rows))
            if seq.finish:
                ended.add(seq)
        observe(step, accepted)

    head.head.lm_head = logits
    head.draft, head.observe = drafting, record  # type: ignore[method-assign]
    return found


def few(name: str, prompt: Any, n: int = 16, **kw: Any) -> Request:
    """A request that draws from FEW."""
    return tiny.request(name, prompt, n, logit_bias=BIAS, **kw)


def check(kind: str, drafted: list[Drafted]) -> int:
    """All drafts are those of the tokens before them; how many were compared."""
    for d in drafted:
        draft, outputs = chain(kind).like(d)
        where = f"{d.request.id}, choice {d.index}, after {len(d.tokens)} tokens"
        assert np.abs(d.outputs - outputs).max() < TOLERANCE, where
        assert d.draft == draft, where
    return len(drafted)
