"""Copies: the index equals a brute-force search, stays fast, and the copy follows edits."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.speculate.ngram import (
    FIRST_RATE,
    LONG,
    MAX_CANDIDATES,
    MAX_MATCH,
    MAX_MISSES,
    SEPARATOR,
    SHORT,
    Index,
    Lookup,
    bucket,
)
from tests.support.examples import examples

texts = st.integers(1, 4).flatmap(lambda k: st.lists(st.integers(0, k - 1), max_size=220))


def common(text: list[int], end: int, context: list[int]) -> int:
    """Tokens before and at `end` that equal the end of `context`, MAX_MATCH at most."""
    n = 0
    while n < min(MAX_MATCH, len(context), end + 1) and text[end - n] == context[-1 - n]:
        n += 1
    return n


def brute(text: list[int], indexed: int, context: list[int]) -> tuple[int, int] | None:
    """The rule written down: of the latest MAX_CANDIDATES ends that share LONG tokens, or else SHORT
    tokens, the longest, and of these the latest."""
    for size in (LONG, SHORT):
        ends = [e for e in range(indexed) if common(text, e, context) >= size][-MAX_CANDIDATES:]
        goes_on = [e for e in ends if e + 1 < len(text) and text[e + 1] != SEPARATOR]
        if found := [(common(text, e, context), e) for e in goes_on]:
            return max(found)
    return None


@settings(max_examples=examples(300))
@given(texts, st.data())
def test_find_equals_a_search_through_the_text(text: list[int], data: st.DataObject) -> None:
    if text and data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = SEPARATOR
    index = Index(list(text))
    while data.draw(st.booleans()) and index.index(data.draw(st.integers(0, 60))):
        pass
    inside = data.draw(st.integers(0, max(0, len(text) - 1)))
    foreign = data.draw(st.lists(st.integers(0, 3), max_size=8))
    for context in (text, text[:inside], text[:inside] + foreign, foreign):
        context = context[-MAX_MATCH:]
        if SEPARATOR in context:
            context = context[len(context) - context[::-1].index(SEPARATOR) :]
        assert index.find(context) == brute(text, index.indexed, context)


@settings(max_examples=200)
@given(texts)
def test_the_first_found_is_the_longest_match_there_is(text: list[int]) -> None:
    """Where an n-gram is not more frequent than what is compared, nothing longer exists."""
    index = Index(list(text))
    index.index(len(text))
    best = max((common(text, e, text) for e in range(len(text) - 1)), default=0)
    size = LONG if best >= LONG else SHORT
    rivals = sum(common(text, e, text) >= size for e in range(len(text)))
    found = index.find(text[-MAX_MATCH:])
    assert bool(found) == (best >= SHORT) or rivals > MAX_CANDIDATES
    if found and rivals <= MAX_CANDIDATES:
        assert found[0] == min(best, MAX_MATCH)


@settings(max_examples=100)
@given(texts, st.lists(st.integers(0, 50), max_size=20))
def test_slices_give_what_one_call_gives(text: list[int], slices: list[int]) -> None:
    whole, parts = Index(list(text)), Index(list(text))
    assert whole.index(len(text) + 9) == len(text) and whole.index(9) == 0
    done = 0
    for most in [*slices, len(text)]:
        new = parts.index(most)
        assert new == min(most, len(text) - done)
        done += new
    assert parts == whole


def code(n: int) -> list[int]:
    """Tokens as uneven as a text's, with long repeats."""
    rng = random.Random(4)
    out: list[int] = []
    while len(out) < n:
        if out and rng.random() < 0.1:
            at = rng.randrange(len(out))
            out += out[at : at + 200]
        out += [int(rng.paretovariate(0.6)) % 32000 for _ in range(50)]
    return out[:n]


@pytest.mark.parametrize("text", [code(100_000), [7] * 100_000], ids=["uneven", "one token"])
def test_long_texts_are_indexed_without_a_stall(text: list[int]) -> None:
    began = time.thread_time()
    for _ in range(3):  # what this machine takes for as many small tuples
        dict.fromkeys(zip(text, text[1:], text[2:], strict=False))
    unit = time.thread_time() - began
    index, slices = Index(text), []
    while True:
        began = time.thread_time()
        new = index.index(4096)
        slices.append(time.thread_time() - began)
        if not new:
            break
    *most, _ = sorted(slices)  # one may meet the garbage collector
    assert sum(most) < 12 * unit, (sum(most), unit)
    assert most[-1] < 0.05
    began = time.thread_time()
    for at in range(200, 100_000, 1000):
        index.find(text[at - MAX_MATCH : at])
    assert time.thread_time() - began < 0.1, "100 searches"


def fed(tokens: list[int], prediction: tuple[int, ...] = ()) -> Lookup:
    lookup = Lookup(prediction)
    lookup.feed(tokens, 10**6)
    return lookup


def tokens_of(lookup: Lookup, most: int = 8) -> tuple[int, ...]:
    made = lookup.propose(most)
    return made.tokens if made else ()


def test_a_prediction_is_drafted_from_its_start() -> None:
    prediction = tuple(range(100, 130))
    lookup = fed([1, 2, 3], prediction)
    made = lookup.propose(5)
    assert made and made.tokens == prediction[:5] and made.source == "resume"
    assert list(made.rate_keys) == [("resume", bucket(i)) for i in range(5)]
    lookup.feed([1, 2, 3, *prediction[:6]], 100)
    lookup.advance(5)
    made = lookup.propose(5)
    assert made and made.tokens == prediction[6:11] and made.rate_keys[0] == ("lookup", bucket(6))
    assert tokens_of(lookup, 99) == prediction[6:], "it ends where the prediction does"


def test_a_copy_goes_on_behind_a_replaced_word() -> None:
    old = list(range(100, 140))
    out = [1, 2, *old, 3, *old[:10]]
    lookup = fed(out)
    assert tokens_of(lookup, 4) == tuple(old[10:14])
    out += [old[10], 999]  # one was right, the second was refused
    lookup.feed(out, 100)
    lookup.advance(1)
    made = lookup.propose(4)
    assert made and made.source == "resume" and made.tokens == tuple(old[12:16])
    out += old[12:17]
    lookup.feed(out, 100)
    lookup.advance(4)
    made = lookup.propose(4)
    assert made and made.source == "lookup" and made.tokens == tuple(old[17:21])


def test_a_copy_that_is_lost_is_given_up_and_found_again() -> None:
    lookup = fed([1, 2], tuple(range(100, 200)))
    out = [1, 2]
    for i in range(MAX_MISSES):
        assert tokens_of(lookup, 3) == (100 + i, 101 + i, 102 + i)
        out.append(900 + i)
        lookup.feed(out, 100)
        lookup.advance(0)
    assert lookup.propose(3) is None
    lookup.feed([*out, 150, 151], 100)
    assert tokens_of(lookup, 3) == (152, 153, 154)
    lookup.advance(3)
    lookup.feed([*out, 150, 151, 152, 153, 154, 777], 100)
    assert lookup.propose(3), "a kept token restores the trust"


def test_the_prompt_is_no_continuation_of_the_prediction() -> None:
    """The two texts are apart: neither does a match reach across, nor does a copy."""
    lookup = fed([7, 8, 9, 1, 2], (5, 6, 1, 2))
    made = lookup.propose(9)
    assert made is None or SEPARATOR not in made.tokens
    assert lookup._index.find([2, 7]) is None


def test_a_new_match_needs_two_tokens() -> None:
    assert tokens_of(fed([1, 2, 3, 9, 2])) == ()
    assert tokens_of(fed([1, 2, 3, 9, 1, 2]), 3) == (3, 9, 1)


@pytest.mark.parametrize("period", [1, 2, 5, 17])
def test_periodic_text_goes_on(period: int) -> None:
    text = [i % period for i in range(period * 12)]
    made = fed(text).propose(10)
    want = [(len(text) + i) % period for i in range(10)]
    match = min(MAX_MATCH, len(text) - period)
    assert made and made.rate_keys[0] == ("lookup", bucket(match))
    assert made.tokens == tuple(want[: len(made.tokens)]) and len(made.tokens) >= min(10, period)


def test_the_latest_of_equal_matches_is_copied() -> None:
    lookup = fed([1, 2, 7, 0, 1, 2, 7, 3, 1, 2, 8, 4, 1, 2])
    made = lookup.propose(2)
    assert made and made.tokens == (8, 4)


@settings(max_examples=examples(200))
@given(texts, texts, st.integers(1, 40), st.data())
def test_bounds(prompt: list[int], prediction: list[int], most: int, data: st.DataObject) -> None:
    lookup, out = Lookup(tuple(prediction)), list(prompt)
    for _ in range(6):
        lookup.feed(out, data.draw(st.integers(0, 300)))
        made = lookup.propose(most)
        kept = 0
        if made:
            assert 1 <= len(made.tokens) == len(made.rate_keys) <= most
            assert SEPARATOR not in made.tokens
            assert all(0 <= matching < len(FIRST_RATE) for _, matching in made.rate_keys)
            kept = data.draw(st.integers(0, len(made.tokens)))
            out += made.tokens[:kept]
        out.append(data.draw(st.integers(0, 3)))
        lookup.advance(kept)


@pytest.mark.parametrize("n", [12, 70, 200])
def test_a_repetition_is_drafted_beyond_the_end_of_the_text(n: int) -> None:
    for text in ([5] * n, [1, 2, 3] * (n // 3)):
        lookup = Lookup()
        lookup.feed(text, 1 << 20)
        made = lookup.propose(32)
        period = len(set(text))
        assert made and made.tokens == tuple((text[-period:] * 32)[:32])


def test_a_match_at_an_end_does_not_hide_one_that_goes_on() -> None:
    lookup = Lookup((9, 6, 1, 2))
    lookup.feed([6, 1, 2, 3, 4, 9, 6, 1, 2], 1 << 20)
    made = lookup.propose(4)
    assert made and made.rate_keys[0] == ("lookup", bucket(3)) and made.tokens == (3, 4, 9, 6)
