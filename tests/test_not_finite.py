"""Numbers that are not finite stay where they arose: the choice ends with an error, and nothing else changes by them.

A model's embedding of one token is NaN or infinite. Requests with that token run before and beside others, and these
get the tokens of plain decoding by mlx-lm, by ==, whichever blocks, states, heads or files they come to use.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.dispatches import Always
from mlxspec.engine.engine import Engine
from mlxspec.kernels.verify import KERNELS
from mlxspec.types import Output, Request
from tests import metalsim
from tests.support import disk_cache, tiny
from tests.support.drafters import HEADS, OTHER_HEADS, OWN_HEADS, attach, attach_head, like
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal, in_turn, only
from tests.support.spoilt import INF, NAN, spoilt_model, with_spoilt
from tests.test_lossless import BLOCK, requests, same, truth

STEPS = (1, 5, 9)  # in which spoilt requests join


def unused(kind: str, all_of: dict[str, Request]) -> int:
    """A token that is in no prompt and no answer."""
    seen = {t for r in all_of.values() for t in (*r.prompt, *truth(kind, r))}
    return next(t for t in range(tiny.VOCAB) if t not in seen)


def prompts(bad: int) -> dict[str, list[int]]:
    """Whose numbers are not finite from their beginning, their middle, their end."""
    others = [t for t in range(100) if t != bad]
    return {
        "begins": [bad, *others[:20]],
        "inside": [*others[:60], bad, *others[:30]],
        "ends": [*others[:7], bad],
        "alone": [bad],
    }


def spoil(e: Engine, bad: int, name: str = "", n: int = 5, **sampling: Any) -> list[str]:
    """Add requests with that token; their names."""
    names = []
    for each, prompt in prompts(bad).items():
        names.append(f"{name} spoilt {each}")
        e.add(tiny.request(names[-1], prompt, n, **sampling))
    return names


def failed(e: Engine, outputs: Sequence[Output], names: Sequence[str], bad: int) -> None:
    """Each ended once, with an error that says so, without a token; nothing of it is cached."""
    for name in names:
        [output] = [o for o in outputs if o.request == name]
        assert (output.finish, output.fault, output.tokens) == ("error", "numbers", ()), name
        assert "not finite" in output.error and output.embedding is None
    for pool in e.scheduler.kv.pools:
        for prompt in prompts(bad).values():
            assert not set(pool.chain(prompt)) & pool.by_key.keys(), "cached"
        assert not any(bad in tokens for each in pool.partials.values() for tokens in each.values())
    states = e.scheduler.kv.states
    assert not states or not any(bad in tail for _, tail in states.snapshots)


def beside(e: Engine, kind: str, all_of: dict[str, Request], bad: int, **sampling: Any) -> None:
    """Spoilt requests twice alone, then beside others that join: these get what they would
    without."""
    for _ in range(2):
        names = spoil(e, bad)
        failed(e, tiny.run(e), names, bad)
    when = {"fork": 4, "inside": 7, "one": 3}
    names = []

    def more(i: int) -> None:
        for name, r in all_of.items():
            if when.get(name, 0) == i:
                e.add(r)
        if i in STEPS:
            names.extend(spoil(e, bad, str(i), **sampling))

    outputs = tiny.run(e, more, last=STEPS[-1])
    same(kind, outputs, all_of)
    failed(e, outputs, names, bad)
    assert e.scheduler.pool.used == 0


# Full attention, windows, experts, sinks; recurrent states; latent and dense K/V; a cache of one's own.
POOLS = [
    *((kind, "rows", True) for kind in ("llama", "qwen3", "gemma3_text", "gpt_oss", "gemma4_text")),
    *((kind, "rect", True) for kind in ("qwen3_next", "qwen3_5", "nemotron_h", "lfm2")),
    ("mamba", "rect", False),
    *((kind, "gather", True) for kind in ("llama", "gemma3_text", "deepseek_v3", "kimi_linear")),
    ("llama", "solo", False),
    ("mamba2", "solo", False),
    *((f"{kind}:{bits}", "rows", True) for kind in ("llama", "gemma3_text") for bits in (8, 4)),
    ("deepseek_v3:8", "gather", True),
]


@pytest.mark.parametrize(
    "kind, layout, rollback, value", in_turn(POOLS, [NAN, INF, -INF], every=14)
)
def test_in_each_pool(kind: str, layout: Any, rollback: bool, value: float) -> None:
    """Alternatives of sampling meet them in turn."""
    all_of = requests(0.8 if layout == "rect" else 0.0)
    bad = unused(kind, all_of)
    e = tiny.engine(
        spoilt_model(kind, bad, value),
        layout=layout,
        lone=layout == "solo",
        block=BLOCK,
        rollback=rollback,
        kv_bits=tiny.kv_bits(kind),
    )
    sampling: dict[str, Any] = {}
    if value == INF:
        sampling = dict(temperature=0.7, top_p=0.9, min_p=0.01, logprobs=3)
    elif value == -INF:
        sampling = dict(repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((5, 9.0),))
    beside(e, kind, all_of, bad, **sampling)


@pytest.mark.parametrize(
    "kind, layout, dtype",
    diagonal(
        [("llama", "rows"), ("gemma3_text", "gather"), ("qwen3_5", "rect")],
        [mx.bfloat16, mx.float16],
        every=2,
    ),
    ids=str,
)
def test_in_half_precision(kind: str, layout: Any, dtype: mx.Dtype) -> None:
    """Beside one engine that met them, one that did not."""
    all_of = requests(0.8)
    answers = []
    for bad in (319, None):
        m = spoilt_model(kind, 319 if bad else -1, dtype=dtype)
        e = tiny.engine(m, layout=layout, block=BLOCK)
        for _ in range(2):
            names = spoil(e, 319, n=1)
            outputs = tiny.run(e)
            if bad:
                failed(e, outputs, names, bad)
        for r in all_of.values():
            e.add(replace(r, sampling=replace(r.sampling, logit_bias=((319, -100.0),))))
        outputs = tiny.run(e)
        answers.append({name: tiny.tokens(outputs, name) for name in all_of})
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "dtype, kind, value",
    diagonal([mx.bfloat16, mx.float32], ["llama", "llama:8", "llama:4"], [3e38, -3e38]),
    ids=str,
)
def test_values_that_overflow_reach_nobody_else(kind: str, dtype: mx.Dtype, value: float) -> None:
    """V alone is infinite, or so large that a group of it cannot be packed; logits are finite."""
    m = tiny.model(kind)
    m.set_dtype(dtype)
    embedding, v = m.model.embed_tokens.weight, m.layers[0].self_attn.v_proj.weight
    embedding[:, 0] = 0  # token 13 alone has this feature
    embedding[13] = mx.eye(64, dtype=dtype)[0]
    v[::2, 0], v[1::2, 0] = value / 9, -value / 7

    bad, good = [1, 2, 13, *range(4, 13)], [1, 2, 3, *range(4, 13)]
    assert tiny.answers_after(bad, m, kind) == tiny.answers_after(good, m, kind)


ON = {"assistant": ("gemma4_text", "rows"), "model": ("qwen3", "rows"), "mtp": ("qwen3_5", "rect")}


@pytest.mark.parametrize("name", only([*HEADS[:1], *OTHER_HEADS, *OWN_HEADS, "model"], 3, 7))
def test_in_a_heads_pools(name: str) -> None:
    """What is drafted later is what a head drafts that met none of it, token by token."""
    kind, layout = ON.get(name, ("qwen3", "rows"))
    all_of = requests(0.8)
    bad = unused(kind, all_of)
    found = []
    for spoilt in (True, False):
        e = tiny.engine(spoilt_model(kind, bad if spoilt else -1), layout=layout, block=BLOCK)
        if name == "model":
            small = with_spoilt(like(None, kind, 0.02), bad if spoilt else -1)
            attach(e, name, small).fixed_depth = 3
        else:
            attach_head(e, depth=3, kind=name)
        for _ in range(2):
            names = spoil(e, bad, n=1)
            outputs = tiny.run(e)
            if spoilt:
                failed(e, outputs, names, bad)
        drafts: list[Any] = []
        observe = e.proposer.observe

        def observed(step: Any, *rest: Any, observe: Any = observe, drafts: Any = drafts) -> None:
            for each in step.plan:
                place = each.seq.request.id, each.start, each.count
                drafts.append((*place, [*each.draft.tokens]))
            observe(step, *rest)

        e.proposer.observe = observed  # type: ignore[method-assign]
        for r in all_of.values():
            e.add(r)
        same(kind, tiny.run(e), all_of)
        assert e.proposer.drafters and any(tokens for *_, tokens in drafts)
        found.append(drafts)
    assert found[0] == found[1]


class Saboteur(NoisyOracle):
    """Draws the truth, with the token `bad` in it here and there."""

    bad = -1

    def draft(self, plan: Any, previous: object) -> None:
        super().draft(plan, previous)
        for e in plan:
            mixed = [self.bad if self.rng.random() < 0.3 else t for t in e.draft.tokens]
            e.draft = replace(e.draft, tokens=mixed)


def saboteur(all_of: dict[str, Request], answers: dict[str, list[int]], bad: int) -> Saboteur:
    made = Saboteur({(r.prompt, 0): answers[name] for name, r in all_of.items()}, lies=0.1)
    made.bad = bad
    return made


DRAFTED = [each for each in POOLS if each[2]]


@pytest.mark.parametrize("kind, layout, rollback", only(DRAFTED, *range(0, len(DRAFTED), 5)))
def test_a_draft_that_is_not_finite(kind: str, layout: Any, rollback: bool) -> None:
    """Is rejected like any other: neither the tokens before it nor those after it change."""
    all_of = requests(0.8)
    bad = unused(kind, all_of)
    e = tiny.engine(spoilt_model(kind, bad), layout=layout, block=BLOCK, kv_bits=tiny.kv_bits(kind))
    e.proposer = saboteur(all_of, {name: truth(kind, r) for name, r in all_of.items()}, bad)
    for r in all_of.values():
        e.add(r)
    same(kind, tiny.run(e), all_of)
    assert 0 < e.spec_metrics.accepted.total() < e.spec_metrics.drafted.total()


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "kind, layout", [("qwen3", "rows"), ("qwen3_next", "rect"), ("llama", "gather")]
)
def test_tokens_before_it_are_delivered(kind: str, layout: Any, drafted: bool) -> None:
    """A choice ends behind the token that spoils it, drafted or not; a stop before that, or the
    limit, is what it ends with."""
    want = tiny.Plain(tiny.model(kind))([5, 6, 7], 8)
    bad = want[4]
    first = want.index(bad)
    told = want[: first + 1]
    for kw, n, finish, tokens in (
        ({}, 20, "error", told),
        ({}, first + 1, "length", told),
        ({"stop_tokens": frozenset({bad})}, 20, "stop", told),
        ({"temperature": 0.0, "logprobs": 2}, 20, "error", told),
    ):
        e = tiny.engine(spoilt_model(kind, bad), layout=layout)
        r = tiny.request("r", [5, 6, 7], n, **kw)
        if drafted:
            e.proposer = NoisyOracle({(r.prompt, 0): want}, lies=0.0)
        e.add(r)
        outputs = tiny.run(e)
        assert tiny.tokens(outputs, "r") == tokens
        assert [o.finish for o in outputs if o.finish] == [finish]
        assert sum(len(o.logprobs) for o in outputs) == (len(told) if r.sampling.logprobs else 0)


@pytest.mark.parametrize(
    "kind, layout", [("qwen3", "rows"), ("gemma3_text", "rows"), ("qwen3_next", "rect")]
)
def test_nothing_of_it_stays_in_the_prefix_cache(kind: str, layout: Any, tmp_path: Path) -> None:
    """Of a prompt whose end, or whose answer, is not finite: not its blocks and states, not on the
    disk either. What others had there stays, and serves."""
    clean = tiny.request("clean", [*range(100, 100 + 6 * BLOCK)], 4)
    bad = unused(kind, {"clean": clean})
    longer = [*clean.prompt, *range(40, 40 + 6 * BLOCK)]
    prompts = {
        "prompt": tiny.request("prompt", [t for t in longer if t != bad] + [bad, 3, 4], 4),
        "answer": tiny.request(
            "answer", [t for t in longer if t != bad], 4, logit_bias=((bad, 100.0),)
        ),
    }
    for turn in range(2):
        e = tiny.engine(spoilt_model(kind, bad), layout=layout, block=BLOCK)
        disk = disk_cache.attach(e, tmp_path)
        e.add(clean)
        same(kind, disk_cache.finish(e, disk), {"clean": clean})
        pool = e.scheduler.pool
        before = set(pool.by_key)
        for name, r in prompts.items():
            e.add(r)
            outputs = disk_cache.finish(e, disk)
            assert outputs[-1].finish == "error" and outputs[-1].cached <= len(clean.prompt)
            assert tiny.tokens(outputs, name) == ([bad] if name == "answer" else [])
            own = set(pool.chain(r.prompt)) - set(pool.chain(clean.prompt))
            assert not own & pool.by_key.keys() and not any(key in disk for key in own)
            states = e.scheduler.kv.states
            assert not states or not {key for key, _ in states.snapshots} & own
            assert before <= pool.by_key.keys()
        e.add(replace(clean, id="again"))
        outputs = disk_cache.finish(e, disk)
        assert outputs[-1].cached >= 5 * BLOCK - 1
        assert disk.close(5) and (not turn or disk.stats["disk_runs_found"])


@pytest.mark.parametrize(
    "kind, layout",
    only([("qwen3", "rows"), ("gemma3_text", "gather"), ("qwen3_next", "rect")], 0, 2),
)
def test_a_client_that_leaves_before_it_is_known(kind: str, layout: Any) -> None:
    all_of = requests(0.8)
    bad = unused(kind, all_of)
    e = tiny.engine(spoilt_model(kind, bad), layout=layout, block=BLOCK, budget=7)
    for steps in range(1, 4):
        for name in spoil(e, bad, str(steps)):
            for _ in range(steps):
                e.step()
            e.abort(name)
    for r in all_of.values():
        e.add(r)
    same(kind, tiny.run(e), all_of)


def test_each_choice_ends() -> None:
    e = tiny.engine(spoilt_model("qwen3", 9), block=BLOCK)
    e.add(tiny.request("r", [*range(20)], 5, choices=3, temperature=0.8))
    ends = {o.index: o.finish for o in tiny.run(e) if o.finish}
    assert ends == dict.fromkeys(range(3), "error")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "kind, layout", [("qwen3", "rows"), ("deepseek_v3", "gather"), ("llama", "solo")]
)
def test_an_embedding(kind: str, layout: Any, pooling: Any) -> None:
    e = tiny.engine(
        spoilt_model(kind, 9), layout=layout, lone=layout == "solo", block=BLOCK, budget=16
    )
    texts = {"clean": [*range(40, 75)], "bad": [*range(40)], "other": [50, 60]}

    def embedded(names: Sequence[str]) -> dict[str, Output]:
        for name in names:
            e.add(replace(tiny.request(name, texts[name], 1), pooling=pooling))
        return {o.request: o for o in tiny.run(e)}

    alone, beside = embedded(["clean", "other"]), embedded(list(texts))
    failed(e, [beside["bad"]], ["bad"], 9)
    for name in ("clean", "other"):
        assert (beside[name].embedding == alone[name].embedding).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_by_our_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of theirs write values as they are, and all that is not theirs reads these as finite
    ones: prompts' chunks here. They sample no token of such logits either."""
    all_of = {  # chunks that share a call, in which what their last blocks held before is read
        f"{i}": tiny.request(f"{i}", [(31 * i + 7 * j) % 300 for j in range(18)], 12)
        for i in range(3)
    }
    all_of |= requests(0.8)
    bad = unused(kind, all_of)
    monkeypatch.setattr(KERNELS, "verdicts", Always())
    answers = []
    with metalsim.patch(checked=False):
        for spoilt in (True, False):
            e = tiny.engine(spoilt_model(kind, bad if spoilt else -1), block=BLOCK, budget=64)
            for _ in range(2):
                names = spoil(e, bad, n=1)
                outputs = tiny.run(e)
                for i in range(8):  # whose second row, by the kernel, is not finite
                    prompt = [(i + t) % tiny.VOCAB for t in (bad + 9, bad + 5, bad + 7)]
                    e.add(tiny.request(f"late {i}", prompt, 12, logit_bias=((bad, 100.0),)))
                outputs += tiny.run(e)
                if spoilt:
                    failed(e, outputs, names, bad)
                    assert all(tiny.tokens(outputs, f"late {i}") == [bad] for i in range(8))
            assert not any(pages.clean for pages in e.runner.pages())
            for r in all_of.values():
                e.add(r)
            outputs = tiny.run(e)
            answers.append({name: tiny.tokens(outputs, name) for name in all_of})
    assert answers[0] == answers[1] and all(map(len, answers[0].values()))
