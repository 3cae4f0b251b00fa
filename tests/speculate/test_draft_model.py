"""The draft model: one that equals the target is always right, and it reads every position once."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.engine.engine import Engine
from mlxspec.model.runner import Runner
from mlxspec.sequences import Entry, SeqState, Span
from mlxspec.speculate.controller import Controller, Costs
from mlxspec.speculate.heads.drafter import MAX_LAG, HeadDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Request
from tests.support import tiny
from tests.support.drafters import attach, like, small_model
from tests.support.parameter_rows import diagonal, in_turn, only

N = 24
BLOCK = 8


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "learn", lambda *_, **__: None)


@functools.cache
def model(kind: str = "qwen3") -> Any:
    return tiny.model(kind)


@functools.cache
def plain(kind: str = "qwen3") -> tiny.Plain:
    return tiny.Plain(tiny.model(kind))


def truth(r: Request, index: int = 0, kind: str = "qwen3") -> list[int]:
    return plain(kind)(r.prompt, r.max_tokens, r.sampling.temperature, r.sampling.seed, index)


def some(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB) for _ in range(n)]


@dataclass
class Twins:
    """An engine whose draft model is the target itself, and how often each position of each
    sequence was read by it. Positions behind a draft in flight are lower bounds; they are counted
    apart, as `blind`."""

    kind: str = "qwen3"
    blocks: int = 64
    noise: float = 0.0
    layout: Any = "rows"
    engine: Engine = field(init=False)
    chain: Proposer = field(init=False)
    reads: Counter[tuple[SeqState, int]] = field(default_factory=Counter)
    blind: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self.engine = tiny.engine(
            model(self.kind), layout=self.layout, block=BLOCK, blocks=self.blocks
        )
        self.chain = attach(self.engine, "model", like(None, self.kind, self.noise))
        assert self.draft
        forward = self.runner.forward_rows

        def counted(plan: Sequence[Span], ids: mx.array, offsets: mx.array | None) -> mx.array:
            for e in plan:
                self.rows += e.rows
                if e.inflight_drafts:
                    self.blind += e.count == 2
                    continue
                self.reads.update((e.state, at) for at in range(e.start, e.end))
            return forward(plan, ids, offsets)

        self.runner.forward_rows = counted  # type: ignore[method-assign]

    @property
    def runner(self) -> Runner:
        own: Runner = self.draft.head.module.runner
        return own

    @property
    def draft(self) -> HeadDrafter:
        assert small_model(self.chain)
        return small_model(self.chain)

    def __call__(self, *requests: Request) -> list[Any]:
        """All tokens are plain decoding's, and every drafted one was kept."""
        for r in requests:
            self.engine.add(r)
        out = tiny.run(self.engine)
        for r in requests:
            for i in range(r.n):
                assert tiny.tokens(out, r.id, i) == truth(r, i, self.kind), r.id
        return out

    def all_kept(self, out: list[Any]) -> None:
        ends = [o for o in out if o.finish]
        for o in ends:
            assert o.drafted == o.accepted, (o.request, o.index)
        assert sum(o.drafted for o in ends) >= 0.45 * sum(N for _ in ends)


# ---- a twin is always right
# -------------------------------------------------------------------------------


KINDS = [(kind, "rows") for kind in ("llama", "qwen3", "gemma3_text", "gpt_oss")]
KINDS += [("llama", "gather"), ("llama", "rect")]


@pytest.mark.parametrize("kind, layout, temperature", diagonal(KINDS, [0.0, 0.8], every=6))
def test_cold_prompts_and_hits(kind: str, layout: str, temperature: float) -> None:
    """A whole hit, a partial one, a block's end, and neighbours that join."""
    twins = Twins(kind, layout=layout)
    shared = some(3 * BLOCK)
    prompts = {
        "cold": shared + some(13, 1),
        "again": shared + some(13, 1),
        "fork": shared + some(9, 2),
        "exact": shared,
        "inside": shared[: 2 * BLOCK + 3] + some(5, 3),
        "one": some(1, 4),
    }
    for i, (name, prompt) in enumerate(prompts.items()):
        r = tiny.request(name, prompt, N, temperature=temperature, seed=i)
        twins.all_kept(twins(r))
    assert twins.engine.counters["cached_tokens"] > 6 * BLOCK
    batch = [
        tiny.request(f"{name}2", [*prompt, i], N, temperature=temperature, seed=i + 9)
        for i, (name, prompt) in enumerate(prompts.items())
    ]
    twins.all_kept(twins(*batch))


@pytest.mark.parametrize("temperature", only([0.0, 0.8], 1))
def test_sequences_that_join_and_leave(temperature: float) -> None:
    twins = Twins()
    rs = [
        tiny.request(f"r{i}", some(5 + 11 * i, i), N, temperature=temperature, seed=i)
        for i in range(4)
    ]
    twins.engine.add(rs[0])
    out = tiny.run(
        twins.engine, lambda i: [twins.engine.add(r) for r in rs[1:] if int(r.id[1]) * 2 == i], 8
    )
    assert all(tiny.tokens(out, r.id) == truth(r) for r in rs)
    twins.all_kept(out)


@pytest.mark.parametrize("temperature", only([0.0, 0.8], 0))
def test_choices_of_one_prompt(temperature: float) -> None:
    twins = Twins()
    r = tiny.request("r", some(21), N, temperature=temperature, seed=4, choices=3)
    twins.all_kept(twins(r))


@pytest.mark.parametrize("at, temperature", in_turn([1, 2, 3, 4, 5, 7], [0.0, 0.8], every=6))
def test_after_an_abort_and_another_admission(at: int, temperature: float) -> None:
    """Blocks change hands with drafts in flight; what the next owner finds there is right."""
    twins = Twins(blocks=14)
    prompt = some(17, 5)
    gone = tiny.request("g", prompt, N, temperature=temperature, seed=1)
    stays = tiny.request("s", prompt, N, temperature=temperature, seed=2)
    twins.engine.add(gone)
    twins.engine.add(stays)
    out = [o for _ in range(at) for o in twins.engine.step()]
    twins.engine.abort("g")
    out += tiny.run(twins.engine)
    assert tiny.tokens(out, "s") == truth(stays)
    assert all(o.drafted == o.accepted for o in out if o.finish == "length")
    for name, again in {
        "again": prompt,
        "other": some(30, 6),
        "turn": prompt + truth(gone)[:9],
    }.items():
        twins.all_kept(twins(tiny.request(name, again, N, temperature=temperature, seed=1)))


@pytest.mark.parametrize("temperature", only([0.0, 0.8], 1))
def test_after_preemption(temperature: float) -> None:
    """A twin is right again after it came back; only what was drafted counts, not how much."""
    twins = Twins(blocks=14)
    tiny.admit_blindly(twins.engine.scheduler)
    rs = [
        tiny.request(f"r{i}", some(6 + 3 * i, i), 40, temperature=temperature, seed=i)
        for i in range(4)
    ]
    out = twins(*rs)
    assert twins.engine.scheduler.preemptions > 0
    for o in out:
        assert not o.finish or o.drafted == o.accepted, o.request


# ---- it reads once
# ----------------------------------------------------------------------------------------


def test_a_prompt_is_read_once_and_a_repeated_one_not_again() -> None:
    twins, prompt = Twins(), some(100)
    twins(tiny.request("a", prompt, 2))
    assert twins.rows <= len(prompt) + 2
    before = twins.rows
    twins(tiny.request("b", prompt, 2))
    assert twins.rows - before <= BLOCK + 2, "what the last block lacks"
    before = twins.rows
    twins(tiny.request("c", prompt + some(20, 1), 2))
    assert twins.rows - before <= BLOCK + 20 + 2


@pytest.mark.parametrize("temperature, noise", in_turn([0.0, 0.8], [0.0, 0.3], every=4))
def test_no_position_is_read_twice_but_one_row_per_blind_round(
    temperature: float, noise: float
) -> None:
    """Where drafts were refused, what was read for them is read again with the right token."""
    twins = Twins(noise=noise)
    r = tiny.request("a", some(40), 60, temperature=temperature, seed=2)
    out = twins(r)
    assert all(n == 1 for (_, at), n in twins.reads.items() if at < len(r.prompt)), "prompt"
    refused = out[-1].drafted - out[-1].accepted
    assert bool(refused) == bool(noise)
    assert (
        twins.blind > 3 and twins.rows <= len(r.prompt) + r.max_tokens + twins.blind + refused + 8
    )


def test_a_sequence_without_drafts_is_read_in_steps_and_not_left_far_behind() -> None:
    """Parked for long, it still knows all but LAG tokens, so that a question costs little."""
    twins = Twins()
    twins.draft.costs.token = 100.0
    r = tiny.request("a", some(20), 120)
    twins.engine.add(r)
    for _ in range(110):
        twins.engine.step()
        for seq, live in twins.draft._live.items():
            assert len(seq.tokens) - live.read <= MAX_LAG + 20 + 2
    assert max(twins.reads.values()) == 1
    tiny.run(twins.engine)


# ---- another vocabulary's width
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "width, temperature", in_turn([tiny.VOCAB + 64, tiny.VOCAB - 64], [0.8, 0.0], every=4)
)
def test_logits_of_another_width(
    width: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded vocabularies differ between sizes of one family: what one lacks is never drafted."""
    target, same = model(), like(None, "qwen3", 0.0)
    rows = same.model.embed_tokens.weight
    held = min(width, tiny.VOCAB)
    prompt = [t % held for t in some(20)]
    bias = tuple((t, -1e4) for t in range(held, tiny.VOCAB))
    free = tiny.request("a", prompt, 60, temperature=temperature, seed=3)
    common = tiny.request("b", prompt, 60, temperature=temperature, seed=3, logit_bias=bias)
    alone = tiny.engine(target, block=BLOCK)
    alone.add(common)
    right = truth(free), tiny.tokens(tiny.run(alone), "b")
    monkeypatch.setitem(tiny.CONFIGS, "qwen3", tiny.CONFIGS["qwen3"] | {"vocab_size": width})
    other = tiny.model("qwen3")
    best = mx.zeros((max(0, width - held), rows.shape[1])) + 9.0  # tempting, if it were not cut off
    other.update(same.parameters())
    other.model.embed_tokens.weight = mx.concatenate([rows[:held], best])
    e = tiny.engine(target, block=BLOCK)
    chain = attach(e, "model", other)
    assert (
        small_model(chain)
        and isinstance(small_model(chain).head.module.runner, Runner)
        and small_model(chain).head.module.vocab == tiny.VOCAB
    )
    seen: list[int] = []
    inner = chain.draft

    def draft(entries: Sequence[Entry], before: Any) -> None:
        inner(entries, before)
        seen.extend(t for entry in entries if entry.draft.size for t in entry.draft.tokens)

    monkeypatch.setattr(Proposer, "draft", lambda self, entries, before: draft(entries, before))
    for r, answer in zip((free, common), right, strict=True):
        seen.clear()
        e.add(r)
        out = tiny.run(e)
        assert tiny.tokens(out, r.id) == answer
        assert seen and max(seen) < held
    # The second says only what both know: there the small model is as good as the target.
    assert out[-1].drafted == out[-1].accepted > 10


def test_its_likeliest_tokens_are_drafted_where_the_target_is_surer() -> None:
    """What it draws with the target's noise is rarely right there."""
    unsure = tiny.model("qwen3")
    unsure.model.norm.weight = 0.2 * unsure.model.norm.weight
    e = tiny.engine(model(), block=BLOCK)
    attach(e, "model", unsure)
    r = tiny.request("r", some(20), 120, temperature=0.3, seed=1)
    e.add(r)
    out = tiny.run(e)
    assert tiny.tokens(out, "r") == truth(r)
    assert out[-1].rounds < 40  # 95 with drawn tokens alone


def test_it_follows_a_target_that_rolls_drafts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is what the small model itself would say behind the tokens that stand."""
    e = tiny.engine(model("mamba2"), layout="rect", block=BLOCK)
    chain = attach(e, "model", model("llama"))
    drafted: list[Entry] = []

    def three(p, options, *_):
        return [(3, some[-1]) if some else (0, None) for some in options]

    monkeypatch.setattr(Controller, "decide", lambda self, *args, **_: three(*args))
    draft = HeadDrafter.draft

    def checked(self: HeadDrafter, plan: Sequence[Entry], previous: Any) -> None:
        draft(self, plan, previous)
        drafted.extend(entry for entry in plan if entry.draft.size)

    monkeypatch.setattr(HeadDrafter, "draft", checked)
    rs = [tiny.request(f"r{i}", some(9 + i, i), N) for i in range(2)]
    for r in rs:
        e.add(r)
    out = tiny.run(e)
    assert [tiny.tokens(out, r.id) for r in rs] == [truth(r, kind="mamba2") for r in rs]
    assert e.proposer is chain and len(drafted) > 10
    for entry in drafted:  # whose start is exact by now
        known = entry.seq.tokens[: entry.start + entry.count]
        assert [*entry.draft.tokens] == plain("llama")(known, entry.draft.size)
