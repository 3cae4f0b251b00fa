"""Past outputs: the longest match wins, the text stays bounded, the oldest is evicted."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.speculate.ngram import SEPARATOR, Corpus, bucket


def corpus(*outputs: list[int], context: tuple[int, ...] = (), capacity: int = 1000) -> Corpus:
    made = Corpus(capacity)
    for output in outputs:
        made.add(context, output)
    made.index(10**6)
    return made


FILLER = 8  # tokens
FILLERS = count(1000, FILLER)


def padded(*tokens: int) -> list[int]:
    """An output that begins with tokens of no other."""
    start = next(FILLERS)
    return [*range(start, start + FILLER), *tokens]


def test_the_longest_match_wins_then_the_latest() -> None:
    some = [padded(1, 2, 3, 4, 5), padded(1, 2, 3, 4, 6), padded(9, 2, 3, 7, 7)]
    made = corpus(*some).propose([1, 2, 3], 2)
    assert made and made.source == "suffix" and made.tokens == (4, 6)
    assert list(made.rate_keys) == [("suffix", bucket(3)), ("suffix", bucket(4))]


def test_an_output_is_found_behind_the_end_of_its_prompt() -> None:
    made = corpus(list(range(40, 60)), context=(7, 8)).propose([5, 7, 8], 4)
    assert made and made.tokens == (40, 41, 42, 43)


def test_nothing_reaches_from_one_output_into_the_next() -> None:
    made = corpus(padded(1, 2, 3), padded(4, 5, 6)).propose([1, 2], 9)
    assert made and made.tokens == (3,)
    assert corpus(padded(1, 2), padded(3, 4)).propose([1, 2], 9) is None


def test_the_oldest_goes_first() -> None:
    kept, outputs = Corpus(200), [list(range(100 * i, 100 * i + 20)) for i in range(1, 40)]
    for n, output in enumerate(outputs, 1):
        kept.add((), output)
        kept.index(10**6)
        found = [bool(kept.propose(o[:3], 4)) for o in outputs[:n]]
        assert found == sorted(found), "an older output outlived a newer one"
        assert sum(found) >= min(n, 100 // 21), "half of the capacity at least is in use"
        assert len(kept._index.tokens) <= 200


@settings(max_examples=150)
@given(
    st.integers(20, 120), st.lists(st.lists(st.integers(0, 5), max_size=80), max_size=25), st.data()
)
def test_bounds(capacity: int, outputs: list[list[int]], data: st.DataObject) -> None:
    kept = Corpus(capacity)
    for output in outputs:
        kept.add(output[:3], output)
        assert len(kept._index.tokens) <= capacity
        kept.index(data.draw(st.integers(0, 100)))
        assert kept._index.indexed <= len(kept._index.tokens)
        made = kept.propose(data.draw(st.lists(st.integers(0, 5), max_size=6)), 7)
        if made:
            assert 1 <= len(made.tokens) <= 7 and SEPARATOR not in made.tokens
            assert len(made.rate_keys) == len(made.tokens)


@pytest.mark.parametrize("context", range(4))
@pytest.mark.parametrize("length", range(8, 30))
def test_an_output_and_its_context_fit_beside_the_newer_half(length: int, context: int) -> None:
    kept = Corpus(26)
    for output in ([0] * 8, [0] * 8, [0] * 11, [0] * length, [0] * 12):
        kept.add([0] * context, output)
        assert len(kept._index.tokens) <= 26


@pytest.mark.parametrize("length", [20, 80, 95, 300])
def test_the_newest_output_outlives_the_forgetting(length: int) -> None:
    """Its end at least, if it is itself longer than what may be kept."""
    kept = Corpus(200)
    newest = list(range(1000, 1000 + length))
    for output in (list(range(90)), list(range(200, 290)), newest):
        kept.add(range(500, 508), output)
    kept.index(10**6)
    made = kept.propose(newest[-6:-3], 3)
    assert made and made.tokens == tuple(newest[-3:])


def test_a_prompts_end_is_not_joined_to_a_cut_output() -> None:
    """Of an output longer than half the capacity only the end is kept; it did not follow the
    prompt."""
    kept = corpus(list(range(1000, 1150)), context=(7, 8), capacity=200)
    made = kept.propose([7, 8], 3)
    assert made is None or made.tokens == (1000, 1001, 1002)
