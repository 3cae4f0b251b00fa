"""The runs themselves, on a tiny model: their order, what each side starts with, and the check of
tokens."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import cast

import pytest

from mlxspec.bench.figures import Side, row
from mlxspec.bench.measure import Bench, Prompt, bench_of, groups, prompt_of
from mlxspec.bench.workloads import Task
from mlxspec.engine.engine import Engine
from mlxspec.speculate import Drafter, NoSpeculation
from mlxspec.text.chat import encode, load_tokenizer, render_chat
from mlxspec.types import Output, Sampling, Sequence, UserError
from tests import tiny
from tests.liar import NoisyOracle
from tests.tiny_tokenizer import save_tokenizer

TOKENS = 24
PROMPTS = [
    Prompt(f"p{i}", tuple((7 * i + 3 * at) % tiny.VOCAB for at in range(20 + i))) for i in range(6)
]


@pytest.fixture(scope="module")
def truth() -> dict[tuple[tuple[int, ...], int], list[int]]:
    plain = tiny.Plain(tiny.model("llama"))
    return {(p.tokens, 0): plain(p.tokens, TOKENS) for p in PROMPTS}


@pytest.fixture
def bench(truth: dict[tuple[tuple[int, ...], int], list[int]]) -> Bench:
    """A tiny engine whose drafter knows the answers and lies now and then."""
    engine = tiny.engine(tiny.model("llama"), proposer=NoisyOracle(truth), vocab=tiny.VOCAB)
    return bench_of(engine, 512, TOKENS, frozenset(), Sampling(temperature=0))


def test_both_sides_give_plain_decoding_and_the_liar_is_faster_by_rounds(
    bench: Bench, truth: dict[tuple[tuple[int, ...], int], list[int]]
) -> None:
    cell = bench.cell("edits", groups(PROMPTS, 6, 2), rounds=1)
    r = row(cell)
    assert (r.streams, r.prompts, r.tokens, r.differing) == (2, 6, 6 * TOKENS, [])
    for drafted in (False, True):
        found = {a.name: a.tokens for a in cell.answers(drafted)}
        assert found == {p.name: truth[p.tokens, 0] for p in PROMPTS}
    assert all(a.brought == [1] * TOKENS and a.drafted == 0 for a in cell.answers(False))
    assert all(sum(a.brought) == TOKENS and a.rounds == len(a.brought) for a in cell.answers(True))
    assert (
        r.per_round
        and r.per_round > 1.3
        and r.kept
        and 0.2 < r.kept < 1
        and set(r.sources) == {"liar"}
    )
    brought = sum(n - 1 for a in cell.answers(True) for n in a.brought)
    assert brought == sum(a.kept["liar"] for a in cell.answers(True))


def recorded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, int]]:
    """(side, first prompt, tokens, prompt tokens that were in the cache) of every side that
    runs."""
    ran: list[tuple[str, str, int, int]] = []
    side: Callable[..., Side] = Bench.side

    def watched(self: Bench, group: Seq[Prompt], drafter: Drafter, most: int) -> Side:
        done = side(self, group, drafter, most)
        name = "plain" if drafter is self.plain else "drafted"
        ran.append((name, group[0].name, most, self.engine.counters["cached"]))
        return done

    monkeypatch.setattr(Bench, "side", watched)
    return ran


def test_the_sides_take_turns_and_start_with_an_empty_cache(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, told = recorded(bench, monkeypatch), []
    cell = bench.cell("edits", groups(PROMPTS, 2, 1), rounds=2, told=lambda: told.append(1))
    assert [r[:3] for r in ran[:2]] == [("plain", "p0", 16), ("drafted", "p0", 16)]  # the warm-up
    assert [(name[0], prompt) for name, prompt, _, _ in ran[2:]] == [
        *(("p", "p0"), ("d", "p0"), ("d", "p1"), ("p", "p1")),
        *(("d", "p0"), ("p", "p0"), ("p", "p1"), ("d", "p1")),
    ]
    assert {(most, cached) for _, _, most, cached in ran[2:]} == {(TOKENS, 0)}
    assert len(told) == 8 and len(cell.trials) == 4
    for trial in cell.trials:
        assert trial.plain.answers[0].drafted == 0 < trial.drafted.answers[0].drafted


def test_past_answers_are_forgotten_before_every_side(bench: Bench) -> None:
    class Keeps(NoisyOracle):
        def forget(self) -> None:
            found.append("forget")

        def begin(self, seq: Sequence) -> None:
            super().begin(seq)
            found.append(seq.request.id)

    found: list[str] = []
    bench.drafter = Keeps(cast(NoisyOracle, bench.drafter).truth)
    bench.cell("edits", groups(PROMPTS, 2, 1), rounds=2)
    assert found == [x for name in ("p0", "p0", "p1", "p0", "p1") for x in ("forget", name)]


def test_a_side_that_changes_a_token_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def wrong(self: Engine) -> list[Output]:
        outputs = step(self)
        if not isinstance(self.drafter, NoSpeculation):
            for o in outputs:
                if o.request == "p1" and o.finish:
                    object.__setattr__(o, "tokens", (*o.tokens[:-1], o.tokens[-1] ^ 1))
        return outputs

    monkeypatch.setattr(Engine, "step", wrong)
    assert row(bench.cell("edits", groups(PROMPTS, 3, 3), rounds=2)).differing == ["p1"]


def test_a_stop_token_ends_an_answer_on_both_sides(
    bench: Bench, truth: dict[tuple[tuple[int, ...], int], list[int]]
) -> None:
    answer = truth[PROMPTS[0].tokens, 0]
    bench.stop = frozenset({answer[5]})
    (trial,) = bench.cell("edits", groups(PROMPTS, 1, 1), rounds=1).trials
    cut = answer[: answer.index(answer[5]) + 1]
    assert trial.plain.answers[0].tokens == trial.drafted.answers[0].tokens == cut


def test_an_answer_is_no_longer_than_the_context(bench: Bench) -> None:
    bench.context = len(PROMPTS[0].tokens) + 3
    side = bench.side(PROMPTS[:1], bench.plain, TOKENS)
    assert len(side.answers[0].tokens) == 3
    bench.context = len(PROMPTS[0].tokens)
    with pytest.raises(
        UserError, match="prompt p0 has 20 tokens, and the model's context 20; name another"
    ):
        bench.side(PROMPTS[:1], bench.plain, TOKENS)


def test_an_engine_that_fails_is_not_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_submit", broken)
    with pytest.raises(ZeroDivisionError):
        bench.cell("edits", groups(PROMPTS, 1, 1), rounds=1)


def broken(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("wanted", "streams", "sizes"),
    [(1, 1, [1]), (3, 2, [2, 2]), (6, 4, [4]), (99, 1, [1] * 6), (1, 6, [6])],
)
def test_groups_are_always_full(wanted: int, streams: int, sizes: list[int]) -> None:
    found = groups(PROMPTS, wanted, streams)
    assert [len(g) for g in found] == sizes
    assert [p for g in found for p in g] == PROMPTS[: sum(sizes)]


def test_more_streams_than_prompts_are_refused() -> None:
    with pytest.raises(
        UserError, match="--streams = 7: the workload has 6 prompts; give no more streams"
    ):
        groups(PROMPTS, 8, 7)


def test_a_task_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "chat"))
    chat = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert prompt_of(Task("a", "hello"), tokenizer) == Prompt("a", tuple(chat))
    opened = (*chat, *encode(tokenizer, "```python\n", special=False))
    assert prompt_of(Task("a", "hello", "```python\n"), tokenizer).tokens == opened
    base = load_tokenizer(save_tokenizer(tmp_path / "base", template=None))
    assert base.decode(list(prompt_of(Task("a", "hello", "you"), base).tokens)) == "hello\n\nyou"
