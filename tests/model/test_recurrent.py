"""A sequence's state stands at `computed`, holds its own memory only, and can be rolled back behind rejected drafts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.engine.engine import Engine
from mlxspec.model import recurrent
from mlxspec.model.runner import Runner
from mlxspec.sequences import Draft, Entry, Seq, SeqState, Span
from mlxspec.types import UserError
from tests.support import tiny
from tests.support.noisy_oracle import NoisyOracle
from tests.support.spans import span

PROMPT = tuple(range(40, 53))
KINDS = ["qwen3_next", "nemotron_h", "lfm2"]


class Fixed(NoisyOracle):
    """Drafts four tokens whenever it may, of which those at every fifth position are wrong."""

    def depths(self, seqs: Sequence[Seq]) -> dict[Seq, int]:
        return dict.fromkeys(seqs, 4)

    def draft(self, plan: Sequence[Entry], previous: object) -> None:
        for e in plan:
            if e.depth:
                at = e.seq.generated
                rest = enumerate(self.truth[e.seq.request.prompt, 0][at : at + e.depth], at)
                e.draft = Draft([(t + (i % 5 == 3)) % tiny.VOCAB for i, t in rest], "fixed")


def counted(e: Engine) -> Counter[str]:
    """What goes through the model from now on."""
    found: Counter[str] = Counter()
    model = e.runner.model

    def call(tokens: mx.array, cache: object) -> mx.array:
        found.update(forwards=1, rows=tokens.size)
        return model(tokens, cache=cache)

    e.runner.model = call
    return found


def test_rollback_takes_no_pass_of_its_own() -> None:
    m = tiny.model("qwen3_next")
    told = tiny.Plain(m)(PROMPT, 60)
    e = tiny.engine(m, layout="rect", proposer=Fixed({(PROMPT, 0): told}))
    count = counted(e)
    e.add(tiny.request("r", PROMPT, 60))
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "r") == told
    rounds, drafted = outputs[-1].rounds, outputs[-1].drafted
    assert count["forwards"] == rounds and 60 / rounds > 4
    assert count["rows"] == len(PROMPT) + rounds - 1 + drafted, "a row was computed twice"


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_stands_at_what_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each commit, also of one that a stop token ends inside a draft: mlx-lm's own state
    there."""
    m = tiny.model(kind)
    told = tiny.Plain(m)(PROMPT, 30)
    e = tiny.engine(m, layout="rect")
    e.proposer = NoisyOracle({(PROMPT, i): told for i in range(2)})
    stop = frozenset({told[22]})
    e.add(tiny.request("r", PROMPT, 30, choices=2, stop_tokens=stop))
    drop, seen, ended = e.scheduler.kv.free, [], []

    def check(seq: Seq) -> None:
        cache = make_prompt_cache(m)
        m(mx.array([seq.tokens[: seq.computed]]), cache=cache)
        want = [a for c in cache if hasattr(c, "cache") for a in c.cache]
        for a, b in zip(seq.state.recurrent, want, strict=True):
            assert a.shape == b.shape
            assert mx.abs(a - b).max() < 1e-3 * mx.abs(b).max()
        seen.append(seq.computed)

    def dropped(seq: Seq) -> None:
        if seq.finish:
            check(seq)
            ended.append(seq.finish)
        drop(seq)

    monkeypatch.setattr(type(e.scheduler.kv), "free", lambda self, seq: dropped(seq))
    while e.busy:
        e.step()
        for seq in e.scheduler.running:
            if not seq.inflight_drafts and seq.state.recurrent is not None:
                check(seq)
    assert ended == ["stop", "stop"] and len(seen) > 5
    assert 0 < e.proposer.kept < e.proposer.drafted


def test_nothing_is_recorded_without_a_draft_or_for_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(
        recurrent, "StateRecorder", lambda *args: made.append(recorder(*args)) or made[-1]
    )
    one, other = tiny.model("qwen3_next"), tiny.model("qwen3_next")
    e, quiet = (tiny.engine(m, layout="rect") for m in (one, other))
    told = tiny.Plain(one)(PROMPT, 20)
    e.proposer = Fixed({(PROMPT, 0): told})
    e.add(tiny.request("r", PROMPT, 20))
    quiet.add(tiny.request("r", PROMPT, 20))
    got, silent = [], []
    while e.busy or quiet.busy:  # turn by turn, and plain mlx-lm in between
        if e.busy:
            got += e.step()
        before = len(made)
        if quiet.busy:
            silent += quiet.step()
        one(mx.array([PROMPT]), cache=make_prompt_cache(one))
        assert len(made) == before and recurrent._recorder.get() is None
    assert tiny.tokens(got, "r") == tiny.tokens(silent, "r") == told
    assert made and not any(r.convolutions or r.recurrences for r in made)


recorder = recurrent.StateRecorder


def test_a_failed_forward_leaves_nothing_behind() -> None:
    m = tiny.model("lfm2")
    runner = Runner(m, "rect", 8, 8)
    rows = span([1, 2, 3], PROMPT, 0, 13, draft=Draft([1, 2]))
    model, runner.model = runner.model, None
    with pytest.raises(TypeError):
        runner.forward([rows], None)
    runner.model = model
    assert recurrent._recorder.get() is None and rows.state.recurrent is None
    assert all(a is None for layer in runner.states.layers for a in layer.cache)


def test_what_is_not_recorded_is_refused() -> None:
    runner = Runner(tiny.model("mamba"), "rect", 8, 8)
    rows = span([1, 2, 3], PROMPT, 0, 13, draft=Draft([1, 2]))
    with pytest.raises(UserError, match="cannot be recorded"):
        runner.forward([rows], None)


def wide() -> Runner:
    """A model whose convolutions read far more than their state keeps."""
    from tests.support import architectures

    config = architectures.config("lfm2") | dict(
        hidden_size=1024, block_dim=1024, num_hidden_layers=2
    )
    arch = architectures.module("lfm2")
    m = arch.Model(arch.ModelArgs.from_dict(config))
    mx.eval(m.parameters())
    return Runner(m, "rect", 32, 40)


def held(runner: Runner, work: list[list[Span]]) -> int:
    """Bytes that are held after these steps and were not before, the pools aside."""
    plan: list[Span]
    for plan in work:
        done = runner.forward(plan, None)
        mx.eval(done.logits)
        kept = [row.span.draft.size // 2 for row in done.sampled_rows if row.ordinal == 1]
        if any(kept):
            runner.states.keep_accepted(mx.array(kept), list(done.first_row))
        for e in plan:
            mx.eval(e.state.recurrent)
    runner.view.groups = []  # its masks live until the next step
    return mx.get_active_memory()


def test_a_state_holds_neither_its_chunk_nor_its_batch_nor_a_tape() -> None:
    runner = wide()
    seqs = [SeqState() for _ in range(3)]
    first = SeqState()

    def rows(i: int, start: int, count: int, samples: bool = False, **more: Any) -> Span:
        table = range(1 + 10 * i, 11 + 10 * i)
        return span(table, [1] * 300, start, count, samples, state=seqs[i], **more)

    def firsts(start: int, count: int) -> Span:
        return span([35, 36], [1] * 40, start, count, False, state=first)

    base = held(runner, [[firsts(0, 20)]])  # pools are made, everything is compiled
    own = sum(a.nbytes for a in first.recurrent)
    slack = 1 << 15
    assert own == 2 * 1024 * 4
    assert held(runner, [[rows(i, 0, 256) for i in range(3)]]) <= base + 3 * own + slack
    drafts = [[rows(i, 256, 1, True, draft=Draft([5] * 8)) for i in range(3)]]
    assert held(runner, drafts) <= base + 3 * (own + slack)
    many = [[rows(n, 260 + i, 1) for n in range(i, 3)] for i in range(3)]
    now = held(runner, [*many, [firsts(20, 1)]])
    del many
    assert now <= base + 3 * (own + slack)
    assert [s.batch for s in seqs] == [None] * 3


def test_a_batch_that_stays_together_is_not_cut_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    m = tiny.model("qwen3_next")
    e = tiny.engine(m, layout="rect", budget=64)
    for name in "abc":
        e.add(tiny.request(name, PROMPT, 20))
    joined = []
    join = mx.concatenate
    for _ in range(4):
        e.step()
    monkeypatch.setattr(
        recurrent.mx, "concatenate", lambda *a, **kw: joined.append(1) or join(*a, **kw)
    )
    enter = recurrent.RecurrentStates.load
    inside = []

    def entered(self, entries):
        before = len(joined)
        tape = enter(self, entries)
        inside.append(len(joined) - before)
        return tape

    monkeypatch.setattr(recurrent.RecurrentStates, "load", entered)
    for _ in range(4):
        e.step()
    assert inside == [0] * 4
    e.abort("b")
    e.step()
    assert inside[-1] > 0
    tiny.run(e)
