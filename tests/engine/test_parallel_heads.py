"""Heads that draft all tokens from one pass, P-EAGLE and Medusa, under an engine: each draft is that
of the tokens before it, all of which are run again at once."""

import functools
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxspec.kernels.reference import gumbel
from mlxspec.model.pages import View
from mlxspec.model.sampler import seed32
from mlxspec.model.trunk import install_taps, trunk_of
from mlxspec.types import Request
from tests.support import device_waits, tiny
from tests.support.drafters import attach_head, random_head
from tests.support.parameter_rows import diagonal, fewer

BLOCK = 8
DEPTHS = {"peagle": 5, "medusa": 3}
FEW = (10, 102, 206)  # the tokens that a request may draw; reduced vocabularies have even ones
LAYOUTS = [("qwen3_5", "rect"), ("qwen3", "rows"), ("llama", "gather")]

Draft = tuple[Request, tuple[int, ...], list[int]]  # after these tokens


def recorded(e: Any, head: Any) -> list[Draft]:
    """The head's drafts from now on."""
    found: list[Draft] = []
    ended, observe = set(), head.observe

    def record(step: Any, accepted: Any) -> None:
        for entry in step.plan:
            seq, told = entry.seq, entry.draft.tokens
            if len(told) and seq not in ended:
                tokens = tuple(seq.tokens[: entry.start + entry.count])
                found.append((seq.request, tokens, [*told]))
            if seq.finish:
                ended.add(seq)
        observe(step, accepted)

    head.observe = record
    return found


class Plainly:
    """A fresh model that nothing else uses, and its head: all tokens at once."""

    def __init__(self, model: str, kind: str) -> None:
        self.model = tiny.model(model)
        self.head = random_head(self.model, kind)
        self.view = View(BLOCK, {None: 1}, {None: 1})
        self.logits = {"peagle": self._peagle, "medusa": self._medusa}[kind]

    def __call__(self, r: Request, tokens: tuple[int, ...], n: int) -> list[int]:
        logits = self.logits(tokens, n).astype(mx.float32)
        for token, bias in r.sampling.logit_bias:
            logits[:, token] += bias
        if r.sampling.temperature:
            places = mx.arange(len(tokens), len(tokens) + n).astype(mx.uint32)
            seeds = mx.full(n, seed32(r.sampling.seed, 0), mx.uint32)
            noise = gumbel(seeds, places, logits.shape[-1])
            logits = logits / r.sampling.temperature + noise
        return [int(token) for token in logits.argmax(-1)]

    def _peagle(self, tokens: tuple[int, ...], n: int) -> mx.array:
        m = self.head.module
        trunk = trunk_of(self.model)
        install_taps(trunk, self.view, self.head.taps)
        trunk(mx.array([tokens]))
        taps = mx.concatenate([self.view.tapped[tap][0] for tap in self.head.taps], -1)
        masks = mx.repeat(m.mask_hidden, n - 1, axis=0)
        hidden = m.prepare(mx.concatenate([taps[:-1], masks]))
        ids = [*tokens[1:], *(m.mask for _ in range(n - 1))]
        out = m(self.head.embed(mx.array([ids])), hidden[None], [KVCache() for _ in m.layers])
        return self.head.lm_head(out[0, -n:])

    def _medusa(self, tokens: tuple[int, ...], n: int) -> mx.array:
        hidden = trunk_of(self.model)(mx.array([tokens]))[0, -2]
        return mx.stack([functools.reduce(call, head, hidden) for head in self.heads()[:n]])

    def heads(self) -> list[list[Callable[[mx.array], mx.array]]]:
        found: Any = self.head.module.heads
        return list(found)


def call(x: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
    return layer(x)


@functools.cache
def plainly(model: str, kind: str) -> Plainly:
    return Plainly(model, kind)


def few(name: str, prompt: Any, n: int = 16, **kw: Any) -> Request:
    return tiny.request(name, prompt, n, logit_bias=[(token, 1e3) for token in FEW], **kw)


def some(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB) for _ in range(n)]


def check(model: str, kind: str, drafted: list[Draft]) -> int:
    """All drafts are those of the tokens before them; how many were compared."""
    for r, tokens, draft in drafted:
        assert draft == plainly(model, kind)(r, tokens, len(draft)), (r.id, len(tokens))
    return len(drafted)


@pytest.mark.parametrize(
    "kind, model, layout, temperature",
    fewer(diagonal(["peagle", "medusa"], LAYOUTS, [0.0, 0.8]), 3, 1, 2),
)
def test_drafts_of_six_are_those_of_each_alone(
    kind: str, model: str, layout: Any, temperature: float
) -> None:
    """Prompts in several chunks, late arrivals, drafts of several lengths in one step, and a stop
    while the next step is in flight; then all is asked again and continued."""
    e = tiny.engine(tiny.model(model), layout=layout, block=BLOCK, blocks=128, budget=16)
    head = attach_head(e, depth=DEPTHS[kind], kind=kind)
    drafted = recorded(e, head)
    asked = [
        few(f"r{i}", some(3 + 7 * i, i), temperature=temperature, seed=i) for i in range(5)
    ] + [few("stops", some(20, 9), 30, stop_tokens=frozenset({FEW[0]}))]
    late = {2: asked[3], 5: asked[4]}
    for r in asked:
        if r not in late.values():
            e.add(r)
    outputs = tiny.run(e, lambda i: e.add(late[i]) if i in late else None, last=5)
    for r in asked:
        e.add(few(f"{r.id}+", [*r.prompt, *tiny.tokens(outputs, r.id), 1, 2], 9, seed=3))
    tiny.run(e)
    assert e.proposer.drafters, "the head failed"
    assert check(model, kind, drafted) > 50
    lengths = {len(draft) for *_, draft in drafted}
    assert {1, DEPTHS[kind]} <= lengths
    tried, kept = e.spec_metrics.drafted.total(), e.spec_metrics.accepted.total()
    assert tried / 20 < kept < tried / 2, "some are right, some wrong"


@pytest.mark.parametrize("model, layout", LAYOUTS[:2])
def test_p_eagle_takes_one_pass_a_round(
    model: str, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in flight, it waits for nothing."""
    e = tiny.engine(
        tiny.model(model), layout=layout, block=BLOCK, blocks=128, budget=16, whole=True
    )
    head = attach_head(e, depth=5, kind="peagle").head
    module, inner, passes = head.module, e.proposer.draft, []
    calls: list[int] = []

    def counted(embedded: mx.array, *args: Any) -> Any:
        calls.append(len(embedded))
        return module(embedded, *args)

    def draft(plan: Any, previous: Any) -> None:
        before = len(calls)
        with monkeypatch.context() as patch:
            device_waits.forbid(patch)
            inner(plan, previous)
        if any(entry.depth for entry in plan):
            passes.append((len(calls) - before, any(entry.inflight_drafts for entry in plan)))

    counted.mask = module.mask  # type: ignore[attr-defined]
    head.module, e.proposer.draft = counted, draft
    for i in range(3):
        e.add(few(f"r{i}", some(5 + i, i), 20 + 3 * i))
    tiny.run(e)
    assert e.proposer.drafters, "the head failed"
    assert {made for made, _ in passes} == {1}
    assert any(flying for _, flying in passes)
