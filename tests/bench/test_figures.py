"""The figures of a scripted run, by hand."""

from mlxspec.bench.figures import Answer, Cell, Side, Trial, row
from mlxspec.types import Output


def answer(name: str, rounds: list[tuple[float, int]], drafted: int = 0, **kept: int) -> Answer:
    """An answer of rounds (seconds since the start, tokens brought); its tokens are 0, 1, 2, ..."""
    made, at = Answer(name), 0
    for i, (now, n) in enumerate(rounds):
        last = i == len(rounds) - 1
        made.add(
            Output(
                name,
                0,
                tuple(range(at, at + n)),
                rounds=i + 1,
                drafted=drafted if last else 0,
                accepted=tuple(kept.items()) if last else (),
            ),
            now,
        )
        at += n
    return made


def scripted() -> Cell:
    """Two prompts, one at a time; plain decoding brings a token each second after a prompt of 2
    seconds."""
    cell = Cell("edits", 1)
    plain = answer("a", [(2.0 + i, 1) for i in range(9)])
    fast = answer("a", [(2.0, 1), (3.0, 4), (4.0, 4)], drafted=8, copy=6)
    cell.trials.append(Trial(Side([plain], 10.0), Side([fast], 4.0)))
    plain = answer("b", [(2.0 + i, 1) for i in range(5)])
    fast = answer("b", [(2.0, 1), (3.0, 1), (4.0, 1), (5.0, 2)], drafted=4, model=1, copy=0)
    cell.trials.append(Trial(Side([plain], 6.0), Side([fast], 5.0)))
    return cell


def test_the_figures_of_a_scripted_run() -> None:
    r = row(scripted())
    assert (r.workload, r.streams, r.prompts, r.tokens, r.differing) == ("edits", 1, 2, 14, [])
    assert r.plain == 1.0 and r.drafted == (8 / 2 + 4 / 3) / 2
    assert r.ratio == (12 / 5) / (12 / 12)
    assert r.whole == (14 / 9) / (14 / 16)
    assert r.per_round == 14 / 7
    assert r.kept == 7 / 12
    assert r.sources == {"copy": 6 / 7, "model": 1 / 7}


def test_rounds_by_what_they_brought_are_of_the_side_with_speculation() -> None:
    assert scripted().brought() == {1: 4, 4: 2, 2: 1}


def test_an_answer_that_differs_is_counted_once_and_named() -> None:
    cell = scripted()
    cell.trials *= 2
    assert row(cell).differing == [] and row(cell).prompts == 2 and row(cell).tokens == 28
    cell.trials[1].drafted.answers[0].tokens[-1] += 1
    assert row(cell).differing == ["b"]
    cell.trials[0].plain.answers[0].tokens.pop()  # shorter, the same as far as it goes
    assert row(cell).differing == ["a", "b"]


def test_what_was_not_measured_has_no_figure() -> None:
    one = Side([answer("a", [(1.0, 1)])], 1.0)
    r = row(Cell("chat", 1, [Trial(one, one)]))
    assert (r.plain, r.drafted, r.ratio, r.kept, r.sources) == (None, None, None, None, {})
    assert (r.whole, r.per_round) == (1.0, 1.0)


def test_an_output_without_tokens_ends_an_answer_and_brings_nothing() -> None:
    made = answer("a", [(1.0, 2), (2.0, 1)])
    made.add(Output("a", 0, (), finish="length", rounds=3, drafted=5, accepted=(("copy", 2),)), 9.0)
    assert (made.brought, made.last, made.rounds, made.drafted, made.kept) == (
        [2, 1],
        2.0,
        3,
        5,
        {"copy": 2},
    )
