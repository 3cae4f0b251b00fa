"""The chain over a tiny engine: who drafts, who is waited for; nothing in a request's life matters
to it."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.sequences import Accepted, Draft, Entry, Seq
from mlxspec.speculate.controller import AcceptanceRates, Costs, Key
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.ngram import FIRST_RATE, bucket
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import MAX_DEPTH, Request
from tests.support import tiny
from tests.support.drafters import KINDS, attach, copies, costs, like, small_model
from tests.support.parameter_rows import diagonal, fewer, in_turn, only
from tests.support.spans import entry

PROMPT = [5, 6, 7, 8] * 5
N = 40
COPIES = {"lookup", "resume", "suffix"}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs as given: what a step takes on a busy machine must not decide what is drafted."""
    monkeypatch.setattr(Costs, "learn", lambda *_, **__: None)


@functools.cache
def model() -> Any:
    return tiny.model("qwen3")


@functools.cache
def small(noise: float = 0.02) -> Any:
    return like(None, "qwen3", noise)


@functools.cache
def plain() -> tiny.Plain:
    return tiny.Plain(tiny.model("qwen3"))


def truth(r: Request, index: int = 0) -> list[int]:
    return plain()(r.prompt, r.max_tokens, r.sampling.temperature, r.sampling.seed, index)


def request(
    name: str = "a", n: int = N, *, wrong: int = 7, prompt: Iterable[int] = PROMPT, **kw: Any
) -> Request:
    """A request whose client predicts its answer, but for every `wrong`th token."""
    r = tiny.request(name, prompt, n, **{"seed": 3, **kw})
    predicted = [0 if i % wrong == wrong - 1 else t for i, t in enumerate(truth(r))]
    return replace(r, prediction=tuple(predicted))


class Traced:
    """An engine with a drafter, and in which order its steps were submitted and read, with what
    drafts."""

    def __init__(
        self,
        kind: str,
        row: float = 1e-6,
        noise: float = 0.02,
        teach: Request | None = None,
        each: float = 0.0,  # seconds of a token that the model drafts, if not those of a row
        **kw: Any,
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self.drafted: dict[int, list[tuple[str, int]]] = {}  # by step
        self.engine = tiny.engine(model(), **kw)
        self.chain = attach(
            self.engine, kind, small(noise) if kind in ("model", "chain") else None, row
        )
        if kind == "suffix" and teach:  # what it was asked before, it knows
            for i in range(teach.n):
                copies(self.chain).corpus.add(teach.prompt[-8:], truth(replace(teach, n=1), i))
            copies(self.chain).corpus.index(10**6)
        if small_model(self.chain):
            small_model(self.chain).costs.token = each or row
        self.engine.trace = self._trace

    def _trace(self, event: str, step: int) -> None:
        self.events.append((event, step))
        if event == "submit":
            plan = self.engine.in_flight.plan
            self.drafted[step] = [(e.draft.source, e.draft.size) for e in plan if e.draft.size]

    def __call__(self, *requests: Request) -> list[Any]:
        for r in requests:
            self.engine.add(r)
        return tiny.run(self.engine)

    def before(self, *pair: tuple[str, int]) -> bool:
        first, second = (self.events.index(event) for event in pair)
        return first < second

    def waited(self, step: int) -> bool:
        """Whether the step before this one had been read when it was submitted."""
        return step == 1 or self.before(("read", step - 1), ("submit", step))


# ---- who drafts
# -------------------------------------------------------------------------------------------


def kept_from(run: Traced) -> set[str]:
    """The sources whose drafts were accepted."""
    return {source for source, _ in +run.engine.spec_metrics.accepted}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "kind, sources",
    [
        ("lookup", {"lookup", "resume"}),
        ("suffix", {"suffix"}),
        ("model", {"model"}),
        ("chain", None),
    ],
)
def test_who_drafts(kind: str, sources: set[str] | None, temperature: float) -> None:
    r = request(temperature=temperature)
    run = Traced(kind, teach=r, each=0.5)
    out = run(r)
    assert tiny.tokens(out, "a") == truth(r)
    last, kept = out[-1], kept_from(run)
    assert kept == sources if sources else kept & {"lookup", "resume"}
    assert last.rounds <= N * 0.6 and last.drafted >= last.accepted == N - last.rounds
    assert sum(k for *_, k in run.engine.stats().drafts) == last.accepted
    assert max(position for _, position, *_ in run.engine.stats().drafts) <= MAX_DEPTH


def test_a_model_fills_in_where_nothing_can_be_copied() -> None:
    """The first half is predicted, the second is not."""
    r = request()
    run = Traced("chain", each=0.1)
    out = run(replace(r, prediction=r.prediction[: N // 2]))
    assert "model" in kept_from(run) and kept_from(run) & {"lookup", "resume"}
    assert tiny.tokens(out, "a") == truth(r)


def test_greedy_answers_say_nothing_about_warm_ones() -> None:
    """With a fixed depth, a model that is right at temperature 0 and drafts badly with noise turns
    to its likeliest tokens, though greedy requests came before."""
    e = tiny.engine(model(), vocab=tiny.VOCAB)
    attach(e, "model", small=small()).fixed_depth = 2
    e.proposer.tries_likeliest = True
    used: Counter[str] = Counter()
    learn = e.proposer.control.learn

    def learned(stats: AcceptanceRates, keys: Sequence[Key], accepted: int) -> None:
        how = keys[0][1] if keys else ""
        used[how] += 1
        learn(stats, keys, 0 if how == "drawn" else accepted)

    e.proposer.control.learn = learned
    for temperature in (0.0, 1.0):
        used.clear()
        e.add(tiny.request("r", PROMPT, 30, temperature=temperature))
        tiny.run(e)
        assert used["greedy"] == 0 or not temperature
    assert used["likeliest"] > used["drawn"] > 0


def test_an_answer_is_remembered_until_it_is_forgotten() -> None:
    run, r = Traced("suffix"), tiny.request("a", PROMPT, N, seed=3)
    assert [run(r)[-1].rounds, run(r)[-1].rounds < 8] == [N, True]
    run.engine.reset()
    assert run(r)[-1].rounds == N


def test_a_prediction_that_is_right_takes_a_round_for_many_tokens() -> None:
    r = request(wrong=99)
    out = Traced("lookup")(r)
    assert tiny.tokens(out, "a") == truth(r) and out[-1].rounds <= 5
    assert Traced("lookup")(tiny.request("a", PROMPT, N, seed=3))[-1].rounds > 30, (
        "without it there is none"
    )


def test_matching_tokens_fall_in_buckets() -> None:
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 500)] == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
    ]
    assert set(map(bucket, range(200))) == set(range(len(FIRST_RATE)))


# ---- who is waited for
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "suffix", "chain"])
def test_a_copy_waits_for_the_tokens_before_it(kind: str) -> None:
    r = request(temperature=0.8)
    run = Traced(kind, teach=r, each=0.5)
    assert tiny.tokens(run(r), "a") == truth(r)
    copied = [
        n for n, drafts in run.drafted.items() if any(source in COPIES for source, _ in drafts)
    ]
    assert len(copied) >= 2 and all(run.waited(n) for n in copied)


@pytest.mark.parametrize("temperature", only([0.0, 0.8], 1))
def test_a_model_waits_for_nothing(temperature: float) -> None:
    r = tiny.request("a", PROMPT, 120, temperature=temperature, seed=3)
    run = Traced("model")
    assert tiny.tokens(run(r), "a") == truth(r)
    drafted = [n for n, drafts in run.drafted.items() if drafts and n + 1 in run.drafted]
    blind = [n for n in drafted if not run.waited(n + 1)]
    assert len(blind) >= 6 and len(blind) >= 0.7 * len(drafted), "only its end is near"
    assert blind == drafted[: len(blind)]
    assert sum(len(run.drafted[n + 1]) for n in blind) >= 0.7 * len(blind), (
        "and drafts go on meanwhile"
    )


def test_penalties_wait_for_drafts() -> None:
    """What was generated must be known before it is counted."""
    r = tiny.request(
        "a", PROMPT, N, temperature=0.8, seed=3, frequency_penalty=0.5, repetition_penalty=1.2
    )
    e = tiny.engine(model())
    e.add(r)
    want = tiny.tokens(tiny.run(e), "a")
    run = Traced("model")
    out = run(r)
    assert tiny.tokens(out, "a") == want and out[-1].accepted
    drafted = [n for n in run.drafted if run.drafted[n]]
    assert drafted and all(run.waited(n + 1) for n in drafted if n + 1 in run.drafted)


def test_plain_rounds_overlap() -> None:
    """Nothing to copy: as if there were no drafter."""
    run = Traced("lookup")
    some = (tiny.request("a", [1, 2, 3], 12, temperature=0.8, seed=s) for s in range(20))
    run(next(r for r in some if len(set(pairwise(r.prompt + tuple(truth(r))))) == 14))
    assert not any(run.drafted.values()) and not any(run.waited(n) for n in range(2, 13))


@pytest.mark.parametrize("kind", ["lookup", "chain"])
def test_a_drafter_is_asked_once_for_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to wait and what to draft come from one answer; from two if what was waited for
    changed it."""
    run, asked = Traced(kind, each=0.1), Counter[tuple[int, str, Seq]]()

    def counted(inner: Any) -> Any:
        def options(self: Any, seq: Seq) -> Any:
            asked[run.engine.counters["steps"] + 1, self.name, seq] += 1
            return inner(self, seq)

        return options

    for kind_of in map(type, run.chain.drafters):
        monkeypatch.setattr(kind_of, "options", counted(kind_of.options))
    run(*(request(f"r{i}", seed=i, temperature=0.8) for i in range(4)))
    times = {step: set() for step, *_ in asked if step in run.drafted}
    for (step, *_), n in asked.items():
        times.get(step, set()).add(n)
    assert {1, 2} == set.union(*times.values())
    for step, counts in times.items():
        assert max(counts) <= 1 + run.waited(step)


# ---- parking
# ----------------------------------------------------------------------------------------------


def test_a_losing_model_is_parked_and_asked_again() -> None:
    r = tiny.request("a", PROMPT, 300, temperature=0.8, seed=3)
    run = Traced("model", row=0.2, noise=3.0)
    out = run(r)
    assert tiny.tokens(out, "a") == truth(r)
    drafted = [n for n in run.drafted if run.drafted[n]]
    later = [n for n in drafted if n > 100]
    assert 1 <= len(later) <= 15, "asked again, seldom"
    assert all(run.drafted[n] == [("model", 1)] for n in later), "with one token"
    assert len(drafted) < 40 and run.engine.stats().parked_seconds > 0


def test_a_losing_copy_is_parked() -> None:
    """A text that begins alike and goes on otherwise every time."""
    r = request(n=200, wrong=2, temperature=0.8)
    run = Traced("lookup", row=0.5)
    out = run(r)
    assert tiny.tokens(out, "a") == truth(r)
    rows = sum(length for n, drafts in run.drafted.items() for _, length in drafts if n > 60)
    assert rows < 30 and out[-1].rounds > 150


# ---- a request's life
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", only(KINDS, 0, 3))
def test_max_tokens_is_never_exceeded(kind: str) -> None:
    for n in range(1, 13):
        r = request(n=n, wrong=99, temperature=0.8)
        out = Traced(kind, noise=0.0, teach=r)(r)
        assert tiny.tokens(out, "a") == truth(r) and out[-1].finish == "length"


@pytest.mark.parametrize("kind", only(KINDS, 0))
def test_a_stop_token_cuts_what_was_accepted(kind: str) -> None:
    r = request(n=24, wrong=99, temperature=0.8)
    want, inside = truth(r), 0
    for at in range(1, 20):
        if want[at] in want[:at]:
            continue
        run = Traced(kind, noise=0.0, teach=r)
        out = run(replace(r, stop_tokens=frozenset({want[at]})))
        assert tiny.tokens(out, "a") == want[: at + 1] and out[-1].finish == "stop"
        inside += len(out[-1].tokens) > 1
        again = run(replace(r, id="b"))
        assert tiny.tokens(again, "b") == want, "what was cut off left nothing behind"
    assert inside > 8


@pytest.mark.parametrize("kind, at", in_turn(KINDS, [1, 2, 3, 4, 6, 9, 14], every=9))
def test_a_cancel_between_any_two_rounds(kind: str, at: int) -> None:
    gone, stays = (
        request("gone", temperature=0.8),
        request("stays", temperature=0.8, seed=8, prompt=[9, 8, 7]),
    )
    run = Traced(kind, teach=gone)
    e: Engine = run.engine
    e.add(gone)
    e.add(stays)
    got = []
    for step in range(at):
        got += e.step() if e.busy else []
        e.check()
        assert step < 40
    got += e.abort("gone")
    e.check()
    got += tiny.run(e)
    seen = tiny.tokens(got, "gone")
    assert seen == truth(gone)[: len(seen)] and tiny.tokens(got, "stays") == truth(stays)
    assert e.scheduler.pool.used == 0 and not run.chain._stats and not copies(run.chain)._live
    assert not small_model(run.chain) or not small_model(run.chain)._live
    assert tiny.tokens(run(replace(gone, id="again")), "again") == truth(gone)


@pytest.mark.parametrize("kind, temperature", fewer(diagonal(KINDS, [0.0, 0.8], every=3), 2))
def test_choices_draft_each_their_own(kind: str, temperature: float) -> None:
    r = replace(request(temperature=temperature), n=4)
    out = Traced(kind, teach=r)(r)
    for i in range(4):
        assert tiny.tokens(out, "a", i) == truth(r, i)
    assert all(o.accepted for o in out if o.finish and o.index == 0)


@pytest.mark.parametrize("kind", only(KINDS, 1, 2))
def test_logprobs_are_those_without_drafts(kind: str) -> None:
    r = request(temperature=0.8, logprobs=3)
    e = tiny.engine(model())
    e.add(r)
    want = [lp for o in tiny.run(e) for lp in o.logprobs]
    out = Traced(kind, teach=r)(r)
    got = [lp for o in out for lp in o.logprobs]
    assert out[-1].accepted and all(len(o.logprobs) == len(o.tokens) for o in out)
    for a, b in zip(want, got, strict=True):
        assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


@pytest.mark.parametrize("kind, temperature", fewer(diagonal(KINDS, [0.0, 0.8], every=3), 2, 1))
def test_sequences_push_each_other_out(kind: str, temperature: float) -> None:
    some = [
        request(f"r{i}", prompt=[i, *PROMPT[: 5 + 3 * i]], temperature=temperature, seed=i)
        for i in range(4)
    ]
    run = Traced(kind, blocks=14)
    tiny.admit_blindly(run.engine.scheduler)
    out = run(*some)
    for r in some:
        assert tiny.tokens(out, r.id) == truth(r), r.id
    assert run.engine.scheduler.preemptions > 0
    del run.engine.scheduler._lacking
    assert tiny.tokens(run(replace(some[1], id="again")), "again") == truth(some[1])


def step(entry: Entry, mode: str) -> Any:
    return SimpleNamespace(plan=[entry], overlaps=mode == "overlap", taps={})


@pytest.mark.parametrize(
    "verb, temperature",
    in_turn(["begin", "options", "draft", "_hidden", "observe", "end"], [0.0, 0.8], every=4),
)
def test_a_model_that_raises_leaves_copies(
    verb: str, temperature: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once drafts of it are on their way: no token differs, and copies go on."""
    some = [
        tiny.request(name, [i, 9, 4, 17, 2], N, seed=3, temperature=temperature)
        for i, name in enumerate("ab")
    ]
    run = Traced("chain", each=1e-6)
    own = getattr(HeadDrafter, verb)

    def fails(*args: Any) -> Any:
        if not any(source == "model" for drafts in run.drafted.values() for source, _ in drafts):
            return own(*args)
        if verb == "draft":
            own(*args)  # half way
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(HeadDrafter, verb, fails)
    out = run(*some)
    for r in some:
        assert tiny.tokens(out, r.id) == truth(r)
    copied = request("c", temperature=temperature)
    run.engine.spec_metrics.accepted.clear()
    out = run(copied)
    assert tiny.tokens(out, "c") == truth(copied)
    assert small_model(run.chain) is None and run.engine.proposer is run.chain
    assert kept_from(run) and kept_from(run) <= COPIES
    assert caplog.text.count("drafting by model failed") == 1


def test_a_token_that_a_grammar_refuses_counts_as_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a head whose drafts a grammar refuses would draft for ever."""
    learned = []
    monkeypatch.setattr(Costs, "learn", lambda self, *told, **_: learned.append(told))
    keys = [("model", "likeliest", n) for n in (1, 2)]
    whole = entry(Seq(request()), 20, 1, True, depth=2)
    cut = replace(whole, draft=Draft([], "model", keys))
    drafter: Any = SimpleNamespace(
        name="model", lazy=True, begin=lambda seq: None, observe=lambda *told: None
    )
    chain = Proposer(costs(), [drafter])
    chain.begin(whole.seq)
    before = chain.control.rate.of(keys[0])
    chain.observe(step(cut, "overlap"), [Accepted([1])], 0.1)
    assert chain.control.rate.of(keys[0]) < before
    assert not learned, "the head's time is not the target's"


def test_what_a_lost_model_took_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of it may be in flight where it fails; their time is not the target's."""
    learned = []
    monkeypatch.setattr(Costs, "learn", lambda self, *told, **_: learned.append(told))
    plain = entry(Seq(request()), 20, 1, True)
    drafted = replace(plain, draft=Draft([1, 2], "model"))
    lost: Any = SimpleNamespace(name="model", lazy=True, learn_seconds=lambda *told: None)
    chain = Proposer(costs(), [lost])
    chain.drafters.remove(lost)
    chain.begin(plain.seq)
    chain.observe(step(drafted, "overlap"), [Accepted([1])], 0.1)
    assert not learned
    chain.observe(step(plain, "overlap"), [Accepted([1])], 0.1)
    assert len(learned) == 1
