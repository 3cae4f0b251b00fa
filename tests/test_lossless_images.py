"""THE test with images in the prompts: the tokens are those of the model alone, without drafts,
with the whole prompt in one step, by ==.

Beside mlx-vlm the logits are compared in tests/model/test_vision.py.
"""

import functools
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from mlxspec.engine.engine import Engine
from mlxspec.text.structured.loop_guard import LEAST, LoopGuard
from mlxspec.types import Request
from tests.support import disk_cache, tiny, vision
from tests.support.drafters import OTHER_HEADS, attach, attach_head, copies
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal, fewer, only

N = 14
BLOCK = 8
VOCAB = 300  # of what texts have
DRAFTERS = ["plain", "liar", "lookup", "suffix"]
LAYOUTS = [("mistral3", "rows"), ("mistral3", "gather"), ("pixtral", "rows"), ("qwen3_5", "rect")]
LAYOUTS += [("qwen3_vl", "rows"), ("qwen3_vl", "gather"), ("gemma4", "rows")]
LAYOUTS += [("gemma4" + vision.BOTH_WAYS, layout) for layout in ("rows", "gather")]
LAYOUTS += [("qwen3_5_moe", "rect"), ("qwen3_vl_moe", "rows")]
HALVES = ("mistral3-4bit", "rows")  # bf16 with 4-bit weights, as on a Mac
OWN = {"mistral3": OTHER_HEADS, "qwen3_5": ["mtp", *OTHER_HEADS], "qwen3_vl": ["mtp", *OTHER_HEADS]}
SMALL = [(*layout, "model") for layout in LAYOUTS if layout in (LAYOUTS[0], LAYOUTS[4])]
PAIRS = [(*layout, name) for layout in LAYOUTS for name in (*DRAFTERS, *OWN.get(layout[0], ()))]
PAIRS += [*SMALL, *((*HALVES, name) for name in DRAFTERS)]
# The same with K and V in 8 or 4 bits, the budget and the temperature in turn.
PACKED = [
    (f"{kind}:{bits}", layout, name)
    for kind, layout, name in PAIRS
    for bits in (8, 4)
    if kind != HALVES[0]
]
TURNS = [(7, 0.8), (64, 0.0), (16, 0.8), (1, 0.0), (16, 0.0)]
QUICK = PACKED.index(("qwen3_vl:4", "rows", "liar"))
PACKED_TURNS = [(*run, *TURNS[i % len(TURNS)]) for i, run in enumerate(PACKED)]


def engine(kind: str, layout: str, **options) -> Engine:
    seen = vision.seeing(kind)
    options = {"budget": 16, "block": BLOCK, "blocks": 96, "max_sequences": 8} | options
    e = tiny.engine(seen.model, layout=layout, kv_bits=tiny.kv_bits(kind), **options)
    e.runner.see(seen.eyes)
    return e


@functools.cache
def requests(kind: str, temperature: float) -> dict[str, Request]:
    """Images alone and between texts, one in two chunks of blocks, two that differ in one pixel, two
    in both orders, one that ends a prompt; a text beside them."""
    seen = vision.seeing(kind)
    rng = random.Random(0)

    def text(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    shared = text(2 * BLOCK + 3)
    one, pixel = seen.image(32, 40), seen.image(32, 40, change=9)
    other = seen.image(20, 9, seed=1)
    parts = {
        "one": (shared, one, text(6)),
        "fork": (shared, one, text(11)),
        "pixel": (shared, pixel, text(6)),
        "two": (text(3), one, text(2), other, text(4)),
        "turned": (text(3), other, text(2), one, text(4)),
        "first": (one, text(5)),
        "last": (text(9), other),
        "text": (shared, text(13)),
    }
    all_of = {}
    for seed, (name, content) in enumerate(parts.items()):
        ids, spans = vision.prompt(seen, *content)
        r = tiny.request(name, ids, N, temperature=temperature, seed=seed)
        all_of[name] = replace(r, images=tuple(spans))
    return all_of


@functools.cache
def truth(kind: str, layout: str, temperature: float) -> dict[str, list[int]]:
    """Each request alone, in one step and then a token at a time."""
    answers = {}
    for name, r in requests(kind, temperature).items():
        e = engine(kind, layout, budget=256)
        e.add(r)
        answers[name] = tiny.tokens(tiny.run(e), name)
    return answers


def equip(e: Engine, name: str, all_of: dict[str, Request], told: dict[str, list[int]]):
    if name == "liar":
        known = {(r.prompt, i): told[n] for n, r in all_of.items() for i in range(r.n)}
        e.proposer = NoisyOracle(known)
    elif name in ("mtp", *OTHER_HEADS):
        attach_head(e, kind=name)
    elif name != "plain":
        chain = attach(e, name, tiny.model("llama"))
        for answer in told.values():
            copies(chain).corpus.add((), tuple(answer))
    if name == "lookup":
        return {n: replace(r, prediction=tuple(told[n])) for n, r in all_of.items()}
    return all_of


Answers = dict[str, list[list[int]]]


def drive(e: Engine, all_of: dict[str, Request], when: dict[str, int]) -> dict[str, list[int]]:
    return {name: first for name, (first, *_) in answers(e, all_of, when).items()}


def answers(e: Engine, all_of: dict[str, Request], when: dict[str, int]) -> Answers:
    """All answers to each request."""
    for name, r in all_of.items():
        if name not in when:
            e.add(r)

    def join(step: int) -> None:
        for name, at in when.items():
            if at == step:
                e.add(all_of[name])

    outputs = tiny.run(e, join, last=max(when.values(), default=0))
    return {n: [tiny.tokens(outputs, n, i) for i in range(r.n)] for n, r in all_of.items()}


@pytest.mark.parametrize(
    "kind, layout, name, budget, temperature",
    fewer(diagonal(PAIRS, [1, 7, 64], [0.0, 0.8], every=11), 4, 0, 1, 2)
    + only(PACKED_TURNS, QUICK),
)
def test_batch(kind: str, layout: str, name: str, budget: int, temperature: float) -> None:
    told = truth(kind, layout, temperature)
    e = engine(kind, layout, budget=budget)
    all_of = equip(e, name, requests(kind, temperature), told)
    late = 6 + 120 // budget
    joins = {"fork": late, "pixel": late + 1, "text": late + 2, "first": 3}
    assert drive(e, all_of, joins) == told
    assert e.counters["cached_tokens"] > 0
    if name != "plain":
        assert e.spec_metrics.drafted.total() or name == "liar"


@pytest.mark.parametrize(
    "kind, layout, name", fewer(diagonal(PAIRS, every=13), 4) + only(PACKED, QUICK)
)
def test_preemption(kind: str, layout: str, name: str) -> None:
    told = truth(kind, layout, 0.8)
    longest = max(len(r.prompt) for r in requests(kind, 0.8).values())
    e = engine(kind, layout, blocks=6 + (longest + N) // BLOCK, budget=7)
    all_of = equip(e, name, requests(kind, 0.8), told)
    tiny.admit_blindly(e.scheduler)
    assert drive(e, all_of, {"fork": 6}) == told
    assert e.scheduler.preemptions > 0


@pytest.mark.parametrize(
    "kind, layout, name", fewer(diagonal(PAIRS, every=13), 4, 1) + only(PACKED, QUICK)
)
def test_restart(kind: str, layout: str, name: str, tmp_path: Path) -> None:
    """Another process answers the same prompts from the disk."""
    told = truth(kind, layout, 0.8)
    for _ in range(2):
        e = engine(kind, layout)
        disk = disk_cache.attach(e, tmp_path)
        for r in equip(e, name, requests(kind, 0.8), told).values():
            e.add(r)
        outputs = disk_cache.finish(e, disk)
        assert {n: tiny.tokens(outputs, n) for n in told} == told
        assert disk.close(5)
    assert disk.stats["disk_runs_found"] > 0 and e.counters["cached_tokens"] >= 4 * BLOCK


@pytest.mark.parametrize(
    "kind, layout, name, temperature",
    fewer(diagonal(PAIRS, [0.8, 0.0], every=13), 4, 2),
)
def test_choices_under_a_grammar(kind: str, layout: str, name: str, temperature: float) -> None:
    """Several answers to a prompt with images, which end where a rule of their tokens says so."""
    stop, favourite = 3, 7
    all_of: dict[str, Request] = {}
    want: Answers = {}
    for i, (n, r) in enumerate(requests(kind, temperature).items()):
        r = replace(r, n=1 + i % 3, stop_tokens=frozenset({stop}))
        if i % 2:
            r = replace(
                r,
                max_tokens=LEAST + 40,
                sampling=replace(r.sampling, logit_bias=((favourite, 100.0),)),
            )
        all_of[n] = r = replace(r, grammar=partial(LoopGuard, stop, str, str))
        want |= answers(engine(kind, layout, budget=256), {n: r}, {})
        if i % 2:
            assert all(answer[-1] == stop and len(answer) > LEAST for answer in want[n])
    e = engine(kind, layout, blocks=256)
    all_of = equip(e, name, all_of, {n: first for n, (first, *_) in want.items()})
    assert answers(e, all_of, {"fork": 8, "two": 9}) == want


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "gather"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_truth_is_that_of_quantized_caches(layout: str, bits: int) -> None:
    """Of mlx-lm for a text; and images are read otherwise with 4 bits."""
    kind = f"qwen3_vl:{bits}"
    told, r = truth(kind, layout, 0.8), requests(kind, 0.8)["text"]
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(vision.save(Path(folder), kind))[0]
    plain = tiny.Plain(model, bits)(r.prompt, N, 0.8, r.sampling.seed)
    assert plain == told["text"]
    if bits == 4:
        seen, wide = vision.seeing(kind), {}
        for name, asked in requests(kind, 0.8).items():
            e = tiny.engine(seen.model, layout=layout, block=BLOCK, blocks=96, budget=256)
            e.runner.see(seen.eyes)
            e.add(asked)
            wide[name] = tiny.tokens(tiny.run(e), name)
        assert any(wide[name] != told[name] for name in told if name != "text")


@pytest.mark.parametrize("kind, layout", only(LAYOUTS, 0, 3, 5))
def test_what_conversations_share(kind: str, layout: str) -> None:
    """One pixel parts two prompts where its image begins; two images in another order share no
    block behind the first."""
    all_of = requests(kind, 0.0)
    e = engine(kind, layout, budget=256)
    cached = {}
    for name in ("one", "fork", "pixel", "two", "turned"):
        e.add(all_of[name])
        cached[name] = tiny.run(e)[-1].cached
    image = all_of["one"].images[0]
    if e.runner.states.layers:  # states lie at every third block, or where prompts parted
        assert cached["fork"] >= image.start // BLOCK * BLOCK >= cached["pixel"]
    else:
        # Blocks are copied up to the first token that differs.
        begin = image.start + len(vision.seeing(kind).reader.before)
        assert cached["fork"] == image.stop and cached["pixel"] == begin
    assert cached["two"] == 0 and cached["turned"] <= all_of["two"].images[0].start
