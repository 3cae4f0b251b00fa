"""THE test: whatever the engine does, the tokens are those of plain decoding by mlx-lm, by ==.

`make test` runs some rows, with each model, layout, drafter, budget and temperature in several;
`make test-slow` runs them all.
"""

import functools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.kernels import cpu
from mlxspec.profiles import Profile, profiles_of
from mlxspec.speculate import NoSpeculation
from mlxspec.text.structured.loop_guard import LEAST, LoopGuard
from mlxspec.types import Request, Sampling
from tests.support import disk_cache, tiny
from tests.support.drafters import (
    ALL_HEADS,
    HEADS,
    KINDS,
    OTHER_HEADS,
    OWN_HEADS,
    KnownAnswers,
    attach,
    attach_head,
    copies,
    like,
)
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal, fewer, in_turn, only, rotated

PAGED = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"]
LAYOUTS = [(kind, "rows", False) for kind in PAGED] + [
    ("llama", "gather", False),
    ("gemma3_text", "gather", False),
    ("gpt_oss", "rows", False),
    ("gemma2", "gather", True),
    ("llama", "solo", True),
    ("mamba2", "solo", True),
]
LAYOUTS = list(dict.fromkeys(LAYOUTS))
N = 20
BLOCK = 8
DRAFTERS = ["plain", "liar", *KINDS]
RUNS = [  # a draft model needs the rows layout, and solo takes no draft back
    (*layout, name)
    for layout in LAYOUTS
    for name in DRAFTERS
    if layout[1] == "rows" or name in (("plain", "liar") if layout[1] == "solo" else DRAFTERS[:4])
]
# More kinds, with fewer turns each: recurrent layers with rollback and without, latent attention,
# windows.
MORE = [
    *((kind, "rect", True) for kind in ("qwen3_next", "qwen3_5", "nemotron_h")),
    ("lfm2", "rect", True),
    ("kimi_linear", "gather", True),
    ("deepseek_v3", "gather", True),
    ("gemma4_text", "rows", True),
]


MORE_RUNS = diagonal(MORE, DRAFTERS)
# Its state cannot be rolled back: it decodes without drafts.
MORE_RUNS += [pytest.param("mamba", "rect", False, "plain")]
# Trained heads: over hybrids, and over attention alone.
HALVES = ("llama-4bit", "rows", False)  # bf16 with 4-bit weights, as on a Mac
HYBRIDS = [("qwen3_5", "rect"), ("qwen3_next", "rect")]
ATTENTION = [("qwen3", "rows"), ("llama", "gather")]
HEAD_RUNS = in_turn(
    [(*layout, False) for layout in HYBRIDS + ATTENTION], HEADS, [1, 7, 64], [0.0, 0.8], every=6
)
MORE_HEADS = diagonal([(*layout, True) for layout in HYBRIDS + ATTENTION], HEADS)
HEAD_RUNS += in_turn(
    [(*layout, False) for layout in ATTENTION], OTHER_HEADS, [1, 7, 64], [0.0, 0.8], every=5
)
HEAD_RUNS += in_turn([(*HYBRIDS[0], False)], OTHER_HEADS, [7], [0.8], every=3)
MORE_HEADS += diagonal([(*layout, True) for layout in HYBRIDS + ATTENTION], OTHER_HEADS)
GEMMA4 = ("gemma4_text", "rows")
HEAD_RUNS += in_turn([(*GEMMA4, False)], OWN_HEADS, [1, 7, 64], [0.0, 0.8], every=3)
MORE_HEADS += in_turn([(*GEMMA4, True)], OWN_HEADS)
TRAINED = (tiny.TRAINED, "rect")  # with the head that was trained for it
HEAD_RUNS += in_turn([(*TRAINED, False)], [tiny.TRAINED], [1, 7, 64], [0.0, 0.8], every=3)
MORE_HEADS += in_turn([(*TRAINED, True)], [tiny.TRAINED])
ON_QWEN3 = in_turn(["qwen3"], HEADS, [0.0, 0.8], every=3)
ON_QWEN3 += in_turn(["qwen3"], OTHER_HEADS, [0.0, 0.8], every=4)
ON_GEMMA4 = in_turn(["gemma4_text"], OWN_HEADS, [0.0, 0.8])


@functools.cache
def plain(kind: str) -> tiny.Plain:
    return tiny.Plain(tiny.model(kind), tiny.kv_bits(kind))


@functools.cache
def model(kind: str):
    made = tiny.model(kind)
    cpu.install(made)  # as where a model is loaded
    return made


@functools.cache
def small(kind: str):
    return like(None, kind, 0.02)


def prompts() -> dict[str, list[int]]:
    """Lengths around the block and the window; three share a start, one of them is exactly that
    start."""
    rng = random.Random(0)

    def some(n: int) -> list[int]:
        return [rng.randrange(tiny.VOCAB) for _ in range(n)]

    shared = some(3 * BLOCK)
    return {
        "long": shared + some(31),
        "fork": shared + some(5),
        "exact": shared,
        "inside": [*shared[: 2 * BLOCK + 3], *some(9)],
        "alone": some(13),
        "one": some(1),
    }


def requests(temperature: float) -> dict[str, Request]:
    return {
        name: tiny.request(name, p, N, temperature=temperature, seed=i)
        for i, (name, p) in enumerate(prompts().items())
    }


def truth(kind: str, r: Request, index: int = 0) -> list[int]:
    return plain(kind)(r.prompt, r.max_tokens, r.sampling.temperature, r.sampling.seed, index)


def liar(kind: str, all_of: dict[str, Request]) -> NoisyOracle:
    return NoisyOracle(
        {(r.prompt, i): truth(kind, r, i) for r in all_of.values() for i in range(r.n)}
    )


def hint(kind: str, r: Request, index: int = 0) -> tuple[int, ...]:
    """Something to copy from: the true answer, with a token wrong here and there, and one
    missing."""
    told = truth(kind, r, index)
    return tuple((t + (i % 7 == 5)) % tiny.VOCAB for i, t in enumerate(told) if i != 11)


def equip(e: Engine, name: str, kind: str, all_of: dict[str, Request]) -> dict[str, Request]:
    """Give the engine the drafter `name`, with something to say; the requests as they are to be
    sent."""
    if name == "liar":
        e.proposer = liar(kind, all_of)
    elif name in ALL_HEADS:
        told = partial(truth, kind) if name == "told" else None
        attach_head(e, told, kind="mtp" if told else name)
    elif name != "plain":
        known = KnownAnswers(lambda r, i: truth(kind, r, i), BLOCK)
        chain = attach(e, name, small(kind) if e.runner.layout == "rows" else known)
        for r in all_of.values():
            copies(chain).corpus.add((), hint(kind, r))
    if name in ("lookup", "chain"):
        return {n: replace(r, prediction=hint(kind, r)) for n, r in all_of.items()}
    return all_of


def drafted(e: Engine, name: str) -> bool:
    """Whether the drafter said something, part of it right: drafts that never come show nothing."""
    if name == "plain":
        return True
    assert not isinstance(e.proposer, NoSpeculation), "the drafter failed"
    tried, kept = e.spec_metrics.drafted.total(), e.spec_metrics.accepted.total()
    if name in ALL_HEADS:
        assert e.proposer.drafters, "the head failed"
    if name in ("mtp", *OTHER_HEADS, *OWN_HEADS):  # their weights are random
        return kept < tried
    return 0 < kept and (name == "model" or kept < tried)


def reread(e: Engine) -> int:
    """How many tokens more than the last a full hit leaves to compute."""
    return int(e.scheduler.kv.recompute_last)


def same(kind: str, outputs, all_of: dict[str, Request]) -> None:
    got = {name: tiny.tokens(outputs, name) for name in all_of}
    assert got == {name: truth(kind, r) for name, r in all_of.items()}


def drive(e: Engine, all_of: dict[str, Request], when: dict[str, int] | None = None):
    """Run all requests; each joins at its step, the first at once."""
    when = when or {}
    for name, r in all_of.items():
        if not when.get(name):
            e.add(r)
    joins = {step: [all_of[n] for n in when if when[n] == step] for step in when.values()}
    return tiny.run(e, lambda i: [e.add(r) for r in joins.get(i, ())], last=max(joins, default=0))


@pytest.mark.parametrize(
    "kind, layout, lone, name, budget, temperature",
    fewer(rotated(RUNS, [1, 7, 64], [0.0, 0.8]), 5, 0, 2)
    + fewer(rotated([(*HALVES, name) for name in DRAFTERS], [1, 7, 64], [0.0, 0.8]), 5)
    + fewer(HEAD_RUNS, 5, 2),
)
def test_batch(
    kind: str, layout: str, lone: bool, name: str, budget: int, temperature: float
) -> None:
    """Cold prompts, hits, partial hits and an exact multiple of the block; neighbours join and
    leave."""
    all_of = requests(temperature)
    e = tiny.engine(model(kind), layout=layout, lone=lone, block=BLOCK, budget=budget)
    all_of = equip(e, name, kind, all_of)
    late = 5 + 90 // budget  # by then the first prompts are known
    joins = {"fork": late, "exact": late + 5, "inside": late + 6, "one": 3}
    same(kind, drive(e, all_of, joins), all_of)
    if layout != "solo":
        stateful = bool(e.runner.states.layers)  # none lies behind the shared blocks
        assert e.counters["cached_tokens"] >= 3 * BLOCK + (not stateful)
    assert drafted(e, name) or layout == "solo"


@pytest.mark.parametrize(
    "kind, layout, rollback, name",
    fewer(
        [
            run
            for run in MORE_RUNS
            if run.values[1] != "rows" or run.values[3] in ("plain", "chain")
        ],
        5,
        0,
        2,
    )
    + fewer(MORE_HEADS, 8, 3, 6),
)
def test_more_kinds(kind: str, layout: str, rollback: bool, name: str) -> None:
    """Neighbours join and leave, some are cut off; where the pool is small, they push each other
    out."""
    for budget, temperature in ((7, 0.8), (64, 0.0)) if name in ("plain", "liar") else ((7, 0.8),):
        all_of = requests(temperature)
        e = tiny.engine(model(kind), layout=layout, block=BLOCK, budget=budget, rollback=rollback)
        all_of = equip(e, name, kind, all_of)
        same(kind, drive(e, all_of, {"fork": 8, "exact": 9, "inside": 12, "one": 3}), all_of)
        assert drafted(e, name)
    e = tiny.engine(model(kind), layout=layout, block=BLOCK, blocks=12, budget=7, rollback=rollback)
    all_of = equip(e, name, kind, all_of)
    tiny.admit_blindly(e.scheduler)
    for r in all_of.values():
        e.add(r)
    outputs = tiny.run(e, lambda i: e.abort("alone") if i == 6 else None, last=6)
    assert e.scheduler.preemptions > 0
    same(kind, outputs, {n: r for n, r in all_of.items() if n != "alone"})


@pytest.mark.parametrize(
    "kind, name, temperature",
    fewer(diagonal(PAGED, DRAFTERS, [0.0, 0.8]), 2, 1) + fewer(ON_QWEN3 + ON_GEMMA4, 5, 3),
)
def test_hits(kind: str, name: str, temperature: float) -> None:
    """Every prompt again, alone, when everything is cached: the same tokens, one token of
    compute."""
    all_of = requests(temperature)
    e = tiny.engine(model(kind), block=BLOCK)
    all_of = equip(e, name, kind, all_of)
    same(kind, drive(e, all_of), all_of)
    for r in all_of.values():
        before = e.counters["prompt_tokens"]
        e.add(r)
        outputs = tiny.run(e)
        assert tiny.tokens(outputs, r.id) == truth(kind, r), r.id
        left = min(1 + reread(e), len(r.prompt))
        assert e.counters["prompt_tokens"] - before == left, r.id
        assert outputs[-1].cached == len(r.prompt) - left
    assert drafted(e, name)


@pytest.mark.parametrize(
    "kind, layout, rollback, name", fewer(MORE_RUNS, 5, 1, 4) + fewer(MORE_HEADS, 11, 7)
)
def test_more_hits(kind: str, layout: str, rollback: bool, name: str) -> None:
    """Every prompt again, and the turn after it: where there are states, from the nearest one."""
    all_of = requests(0.8)
    e = tiny.engine(model(kind), layout=layout, block=BLOCK, budget=16, rollback=rollback)
    all_of = equip(e, name, kind, all_of)
    same(kind, drive(e, all_of), all_of)
    again = tiny.request("long", all_of["long"].prompt, N, temperature=0.8, seed=0)
    answer = truth(kind, again)
    turn = tiny.request("turn", [*again.prompt, *answer, 1, 2, 3], N, temperature=0.8, seed=9)
    stateful = bool(e.runner.states.layers)
    for r in (again, turn):
        e.add(equip(e, name, kind, {r.id: r})[r.id])
        outputs = tiny.run(e)
        assert tiny.tokens(outputs, r.id) == truth(kind, r), r.id
        if r is again:  # where prompts parted, every third block, or behind the last full one
            left = 1 + reread(e)
            assert outputs[-1].cached == (6 * BLOCK if stateful else len(r.prompt) - left)
        else:
            assert outputs[-1].cached == len(r.prompt) - 4 - reread(e)


@pytest.mark.parametrize(
    "kind, layout, rollback, name",
    fewer(diagonal([(kind, "rows", True) for kind in PAGED], DRAFTERS), 2, 1)
    + fewer(MORE_RUNS, 6, 1)
    + fewer(MORE_HEADS, 11, 2, 5),
)
def test_restart(kind: str, layout: str, rollback: bool, name: str, tmp_path: Path) -> None:
    """Another process answers the same prompts and goes on with one, from what the first left on
    the disk."""
    all_of = requests(0.8)
    again = all_of["long"]
    turn = tiny.request(
        "turn", [*again.prompt, *truth(kind, again), 1, 2, 3], N, temperature=0.8, seed=9
    )
    later = {**all_of, "turn": turn}
    for asked in (all_of, later):
        e = tiny.engine(model(kind), layout=layout, block=BLOCK, budget=16, rollback=rollback)
        disk = disk_cache.attach(e, tmp_path)
        for r in equip(e, name, kind, asked).values():
            e.add(r)
        same(kind, disk_cache.finish(e, disk), asked)
        assert drafted(e, name) and disk.close(5)
    assert disk.stats["disk_runs_found"] > 0 and e.counters["cached_tokens"] >= 2 * 4 * BLOCK


@pytest.mark.parametrize(
    "kind, name, temperature",
    fewer(diagonal(PAGED, DRAFTERS, [0.0, 0.8]), 2) + fewer(ON_QWEN3 + ON_GEMMA4, 5, 4),
)
def test_preemption(kind: str, name: str, temperature: float) -> None:
    """A pool so small that sequences push each other out and come back."""
    all_of = requests(temperature)
    e = tiny.engine(model(kind), block=BLOCK, blocks=14)
    all_of = equip(e, name, kind, all_of)
    tiny.admit_blindly(e.scheduler)
    same(kind, drive(e, all_of, {"fork": 6, "one": 4}), all_of)
    assert e.scheduler.preemptions > 0


@pytest.mark.parametrize(
    "kind, layout, name, temperature",
    diagonal([(kind, "rows") for kind in PAGED], DRAFTERS, [0.0, 0.8], every=2)
    + diagonal(HYBRIDS, ["plain", "lookup"], [0.0, 0.8])
    + in_turn([("qwen3", "rows")], HEADS, [0.0, 0.8], every=3)
    + fewer(in_turn([GEMMA4], OWN_HEADS, [0.0, 0.8]), 2, 1),
)
def test_priorities(kind: str, layout: str, name: str, temperature: float) -> None:
    """More important requests push others out of two slots and of a small pool, again and again:
    who waits, starts first or gives way changes no token."""
    all_of = requests(temperature)
    first = {"long": 100, "alone": 100, "exact": 7, "fork": 0, "inside": -5, "one": 100}
    all_of = {n: replace(all_of[n], priority=p) for n, p in first.items()}
    e = tiny.engine(model(kind), layout=layout, block=BLOCK, blocks=14, budget=16, max_sequences=2)
    all_of = equip(e, name, kind, all_of)
    same(kind, drive(e, all_of, {"exact": 6, "fork": 7, "inside": 8, "one": 4}), all_of)
    assert e.scheduler.preemptions >= 2
    assert drafted(e, name)


@pytest.mark.parametrize(
    "kind, name",
    fewer(
        diagonal(["llama", "qwen3", "gpt_oss"], ["plain", "liar", "lookup", "chain"])
        + in_turn(["qwen3"], HEADS, every=3),
        5,
        1,
    ),
)
def test_profiles(kind: str, name: str) -> None:
    """A model and two profiles of it, asked with the same prompts: each answers as a request that
    says everything itself, and they share what one has computed."""
    tables = [Profile("m", temperature=0.8), Profile("m:greedy", temperature=0.0)]
    found = profiles_of([*tables, Profile("m:seeded", seed=77)], {"m"})
    all_of = {}
    for n, prompt in prompts().items():
        for i, (own, profile) in enumerate(found.items()):
            drawn = profile.over(Sampling(seed=i))
            all_of[f"{own} {n}"] = Request(f"{own} {n}", tuple(prompt), N, drawn)
    drawn = {r.sampling for r in all_of.values()}
    assert {(s.temperature, s.seed) for s in drawn} == {(0.8, 0), (0.0, 1), (0.8, 77)}
    e = tiny.engine(model(kind), block=BLOCK, budget=16)
    all_of = equip(e, name, kind, all_of)
    same(kind, drive(e, all_of, {n: 15 for n in all_of if n.startswith("m:")}), all_of)
    assert e.counters["cached_tokens"] >= 2 * sum(
        len(p) - 1 - reread(e) for p in prompts().values()
    )
    assert drafted(e, name)


@pytest.mark.parametrize(
    "kind, name, steps",
    fewer(
        diagonal(PAGED, ["plain", "chain"], [(range(1, 12, 4),), (range(3, 12, 4),)], every=2)
        + in_turn(["qwen3"], HEADS, [(range(1, 12, 4),), (range(3, 12, 4),)], every=3),
        4,
        1,
    ),
)
def test_leavers_change_nothing(kind: str, name: str, steps: range) -> None:
    """Neighbours that are cut off, at every step of their life, leave the others' tokens alone."""
    all_of = requests(0.8)
    gone = {"long", "alone"}
    for step in steps:
        e = tiny.engine(model(kind), block=BLOCK, budget=7)
        for r in equip(e, name, kind, all_of).values():
            e.add(r)
        outputs = tiny.run(e, lambda i, e=e, step=step: [e.abort(n) for n in gone if i == step])
        e.check()
        rest = {n: r for n, r in all_of.items() if n not in gone}
        same(kind, outputs, rest)


@pytest.mark.parametrize("name", only(DRAFTERS + HEADS + OTHER_HEADS[1:], 1, 4, 7, 9))
def test_choices_share_their_prompt(name: str) -> None:
    r = tiny.request("r", prompts()["long"], N, temperature=0.8, choices=4, seed=5)
    e = tiny.engine(model("qwen3"), block=BLOCK)
    e.add(equip(e, name, "qwen3", {"r": r})["r"])
    outputs = tiny.run(e)
    assert [tiny.tokens(outputs, "r", i) for i in range(4)] == [
        truth("qwen3", r, i) for i in range(4)
    ]
    each = 1 + reread(e)  # for the others
    assert e.counters["prompt_tokens"] == len(r.prompt) + 3 * each


@pytest.mark.parametrize("name", only(DRAFTERS + HEADS + OTHER_HEADS[:1], 0, 2, 5, 6, 8))
def test_stop_tokens_cut(name: str) -> None:
    """A stop inside what a round accepts cuts tokens and KV there; the next turn reuses what
    stands."""
    all_of = requests(0.8)
    want = truth("llama", all_of["long"])
    stop = want[7]
    cut = want[: want.index(stop) + 1]
    r = tiny.request(
        "long", all_of["long"].prompt, N, temperature=0.8, seed=0, stop_tokens=frozenset({stop})
    )
    e = tiny.engine(model("llama"), block=BLOCK)
    e.add(replace(r, prediction=equip(e, name, "llama", all_of)["long"].prediction))
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "long") == cut and outputs[-1].finish == "stop"
    turn = tiny.request("turn", [*r.prompt, *cut, 5, 6, 7], N)
    e.add(equip(e, name, "llama", {"turn": turn})["turn"])
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "turn") == truth("llama", turn)
    assert outputs[-1].cached >= len(r.prompt) + len(cut) - 1 - reread(e)


@pytest.mark.parametrize(
    "kind, layout, name, temperature",
    diagonal([("qwen3", "rows"), ("llama", "gather")], DRAFTERS, [0.0, 0.8], every=6)
    + only([("qwen3_5", "rect", "mtp", 0.8), ("qwen3_5", "rect", "plain", 0.8)]),
)
def test_the_loop_guard(kind: str, layout: str, name: str, temperature: float) -> None:
    """Answers end where the tokens alone say so; every other one repeats a token that is
    preferred."""
    stop, favourite = 3, 7
    all_of, want = {}, {}
    for i, (n, r) in enumerate(requests(temperature).items()):
        r = replace(r, max_tokens=250, stop_tokens=frozenset({stop}))
        want[n] = truth(kind, r)
        want[n] = want[n][: [*want[n], stop].index(stop) + 1]
        if i % 2:
            r = replace(r, sampling=replace(r.sampling, logit_bias=((favourite, 100.0),)))
            want[n] = [favourite] * LEAST + [stop]
        all_of[n] = replace(r, grammar=partial(LoopGuard, stop, str, str))
    e = tiny.engine(model(kind), layout=layout, block=BLOCK, blocks=256, budget=64)
    outputs = drive(e, equip(e, name, kind, all_of), {"fork": 8, "one": 3})
    assert {n: tiny.tokens(outputs, n) for n in all_of} == want
    assert e.counters["loops"] == len(all_of) // 2 and drafted(e, name)


@pytest.mark.slow
def test_smollm2_greedy(smollm2: Path) -> None:
    """The embedded model itself: 64 tokens of 4 prompts, batched, against mlx-lm's plain
    decoding."""
    from mlx_lm.utils import load_model

    from mlxspec.text.chat import encode, load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time", "1, 2, 3, 4,"]
    real = tiny.Plain(load_model(smollm2)[0])
    all_of = {t: tiny.request(t, encode(tokenizer, t), 64) for t in texts}
    e = tiny.engine(load_model(smollm2)[0], block=16, blocks=64, budget=7)
    outputs = drive(e, all_of, {texts[2]: 3, texts[3]: 5})
    for t, r in all_of.items():
        assert tiny.tokens(outputs, t) == real(r.prompt, 64), t
