"""Each sampling parameter has the distribution it promises, and no row depends on another."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels.reference import gumbel
from mlxspec.model.sampler import _floors, _penalize, read, sample, sampled_row_specs, seed32
from mlxspec.sequences import Draft, Entry, Seq
from mlxspec.types import NARROW, NOT_FINITE, Logprob, Request, Sampling
from tests.support.parameter_rows import only
from tests.support.spans import entry

VOCAB = 23
RNG = np.random.default_rng(5)
LOGITS = (RNG.normal(size=VOCAB) * 2).astype(np.float32)


def drawn_by(sampling: Sampling, prompt=(1, 2, 3), output=(), index=0) -> Entry:
    request = Request("r", tuple(prompt), 99, sampling)
    seq = Seq(request, index, tokens=[*prompt, *output])
    return entry(seq, len(seq.tokens) - 1, 1, samples=True)


def draw(entries, logits=None) -> tuple[list[int], list[Logprob | None]]:
    rows = sampled_row_specs(entries)
    inputs = mx.array([e.seq.tokens[-1] for e in entries])
    x = mx.array(np.stack([LOGITS] * len(rows)) if logits is None else logits.copy())
    return read(sample(x, rows, inputs), rows)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def expected_logits(s: Sampling, prompt, output) -> np.ndarray:
    x = LOGITS.astype(np.float64)
    for token, value in s.logit_bias:
        x[token] += value
    counts = np.bincount(output, minlength=VOCAB)
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        )
    return x - s.frequency_penalty * counts - s.presence_penalty * (counts > 0)


def expected(s: Sampling, prompt, output) -> np.ndarray:
    """The distribution in float64, written down from the definitions."""
    x = expected_logits(s, prompt, output) / s.temperature
    order = np.argsort(-x)
    if s.top_k:
        x[order[s.top_k :]] = -np.inf
    p = softmax(x)
    if s.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s.top_p]] = 0
    if s.min_p:
        p[p < s.min_p * p.max()] = 0
    return p / p.sum()


CASES = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=4),
    "top_p": Sampling(top_p=0.7),
    "min_p": Sampling(min_p=0.15),
    "top_k and top_p, cold": Sampling(temperature=0.7, top_k=6, top_p=0.8),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=0.8),
    "repetition": Sampling(repetition_penalty=1.6),
    "bias": Sampling(logit_bias=((2, 3.0), (7, -100.0), (11, 1.5))),
    "all": Sampling(0.8, 9, 0.9, 0.02, 1.2, 0.3, 0.4, ((5, 1.0),)),
}
PROMPT, OUTPUT = (1, 2, 3, 5), (5, 9, 9, 9, 11)


@pytest.mark.parametrize("name", only(CASES, 0, 3, 6, 11))
def test_chi_square(name: str) -> None:
    """Thousands of seeds against the exact distribution; the bound is the 99.99 % quantile
    (Wilson-Hilferty)."""
    s = CASES[name]
    n = 20_000 if name in ("plain", "all") else 6_000
    p = expected(s, PROMPT, OUTPUT)
    counts = np.zeros(VOCAB)
    counted = drawn_by(s, PROMPT, OUTPUT)
    draw([counted])
    for start in range(0, n, 1000):
        batch = [drawn_by(_seeded(s, start + i), PROMPT, OUTPUT) for i in range(1000)]
        for e in batch:
            e.state.counts = counted.state.counts  # the same history: it is counted once
        counts += np.bincount(draw(batch)[0], minlength=VOCAB)
    assert counts[p == 0].sum() == 0, "a token that was filtered out came"
    expect = p[p > 0] * n
    chi2 = float(((counts[p > 0] - expect) ** 2 / expect).sum())
    k = int((p > 0).sum()) - 1
    assert chi2 < k * (1 - 2 / (9 * k) + 3.72 * (2 / (9 * k)) ** 0.5) ** 3


def _seeded(s: Sampling, seed: int) -> Sampling:
    return Sampling(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
        s.frequency_penalty, s.logit_bias, seed, s.logprobs,
    )  # fmt: skip


def test_positions_and_choices_draw_independently() -> None:
    """Successive positions of one seed, and choices at one position, are as random as seeds are."""
    n = 20_000
    p = softmax(LOGITS.astype(np.float64))
    seeds = mx.full((n,), seed32(3, 0), mx.uint32)
    along = np.array(
        mx.argmax(mx.array(LOGITS) + gumbel(seeds, mx.arange(n).astype(mx.uint32), VOCAB), -1)
    )
    choices = mx.array([seed32(3, i % 60_000) for i in range(n)], mx.uint32)
    across = np.array(
        mx.argmax(mx.array(LOGITS) + gumbel(choices, mx.zeros(n, mx.uint32), VOCAB), -1)
    )
    for drawn in (along, across):
        chi2 = ((np.bincount(drawn, minlength=VOCAB) - p * n) ** 2 / (p * n)).sum()
        assert chi2 < 57.0  # 99.99 % quantile of 22 degrees of freedom
    pairs = np.histogram2d(along[:-1], along[1:], bins=VOCAB, range=[[0, VOCAB]] * 2)[0]
    top = np.argsort(-p)[:4]
    for a in top:
        for b in top:
            want = p[a] * p[b] * (n - 1)
            assert abs(pairs[a, b] - want) < 6 * want**0.5 + 5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    mix = [drawn_by(_seeded(s, 40 + i), PROMPT, OUTPUT) for i, s in enumerate(CASES.values())]
    mix += [
        drawn_by(Sampling(temperature=0), PROMPT, OUTPUT),
        drawn_by(Sampling(0, presence_penalty=2), PROMPT, OUTPUT),
    ]
    logits = RNG.normal(size=(len(mix), VOCAB)).astype(np.float32)
    together = draw(mix, logits)[0]
    alone = [draw([e], logits[i : i + 1])[0][0] for i, e in enumerate(mix)]
    assert together == alone
    assert together[::-1] == draw(mix[::-1], logits[::-1])[0]


LARGE = 3 * NARROW


@pytest.mark.parametrize(
    "s",
    [
        Sampling(top_k=1), Sampling(top_k=20, top_p=0.8), Sampling(top_k=NARROW, top_p=0.999, min_p=1e-4),
        Sampling(top_k=NARROW + 1), Sampling(top_p=0.9), Sampling(temperature=0.6, top_k=50, min_p=0.05),
    ],
)  # fmt: skip
def test_a_large_vocabulary_keeps_the_tokens_that_the_definitions_keep(s: Sampling) -> None:
    """Rows that rank a few tokens beside rows that rank all of them; each keeps what it should."""
    logits = (RNG.normal(size=LARGE) * 3).astype(np.float32)
    rows = sampled_row_specs(
        [drawn_by(s), drawn_by(Sampling(top_k=7)), drawn_by(Sampling(top_p=0.5)), drawn_by(s)]
    )
    x = mx.array(np.stack([logits for _ in rows]))
    scaled = mx.array(np.stack([logits / np.float32(r.sampling.temperature) for r in rows]))
    kept = np.array(scaled >= _floors(x, rows)[:, None])
    p = softmax(logits.astype(np.float64) / s.temperature)
    order = np.argsort(-p)
    p[order[s.top_k or LARGE :]] = 0
    before = np.cumsum(p[order]) / p.sum()
    want = np.zeros(LARGE, bool)
    want[order] = np.concatenate([[0], before[:-1]]) < s.top_p
    want &= p >= s.min_p * p.max()
    want &= p > 0
    assert abs(int(kept[0].sum()) - int(want.sum())) <= (0 if s.top_p == 1 else 1), (
        "but for rounding"
    )
    assert (kept[0] == want).mean() > 1 - 2 / LARGE
    assert kept[1].sum() == 7 and (kept[0] == kept[3]).all()
    alone = np.array(scaled[:1] >= _floors(x[:1], rows[:1]))
    assert (alone[0] == kept[0]).all(), "a row does not depend on its neighbours"


def test_greedy_takes_the_best_after_bias_and_penalties() -> None:
    best = int(LOGITS.argmax())
    assert draw([drawn_by(Sampling(temperature=0))])[0] == [best]
    ban = Sampling(temperature=0, logit_bias=((best, -100.0),))
    assert draw([drawn_by(ban)])[0] == [int(np.argsort(-LOGITS)[1])]
    assert draw([drawn_by(Sampling(temperature=0, frequency_penalty=2.0), output=[best] * 9)])[
        0
    ] != [best]


def test_penalties_count_the_token_that_is_still_on_the_device() -> None:
    """The last token of the history may be unread: the host holds a placeholder's place, the step's
    input holds the token."""
    best = int(LOGITS.argmax())
    e = drawn_by(Sampling(temperature=0, presence_penalty=2.0), output=[0])
    e.seq.tokens.pop()
    e.seq.pending, e.pending = 1, True
    rows = sampled_row_specs([e])
    x = mx.array(LOGITS[None])
    after = {
        t: read(sample(x, rows, mx.array([t])), rows)[0][0] for t in (best, (best + 1) % VOCAB)
    }
    assert after[(best + 1) % VOCAB] == best != after[best]


def test_penalties_read_what_is_new_alone() -> None:
    """Of 5,000 tokens a step reads the one that came, and the rows of a draft share what is
    known."""

    class Watched(list[int]):
        read = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            self.read += len(found) if isinstance(at, slice) else 1
            return found

        def __iter__(self) -> Iterator[int]:
            self.read += len(self)
            return super().__iter__()

    s = Sampling(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    )
    output = RNG.integers(0, VOCAB, 2500).tolist()
    e = drawn_by(s, RNG.integers(0, VOCAB - 9, 2500).tolist(), output)
    tokens = e.tokens = e.seq.tokens = Watched(e.seq.tokens)
    draw([e])
    assert 5000 - 10 <= tokens.read <= 5000
    tokens.read = 0
    for new in (3, 4, 5):
        tokens.append(new)
        e = entry(e.seq, len(tokens) - 1, 1, samples=True, draft=Draft([7] * 8, "liar"))
        rows, inputs = sampled_row_specs([e]), mx.array([new, *[7] * 8])
        x = mx.array(np.stack([LOGITS] * 9))
        got = _penalize(x, rows, inputs)
        assert tokens.read <= 3
        for i, row in enumerate(np.array(got)):
            said = [*list.__getitem__(tokens, slice(2500, None)), *[7] * i]
            want = expected_logits(s, list.__getitem__(tokens, slice(2500)), said)
            assert np.allclose(row, want, atol=1e-4), i
        tokens.read = 0


KINDS = [
    Sampling(0.0),
    Sampling(0.8, seed=3),
    Sampling(0.9, top_k=5, top_p=0.8, seed=4),
    Sampling(0.7, min_p=0.05, seed=5, logprobs=3),
    Sampling(0.0, repetition_penalty=1.4, frequency_penalty=0.3, logit_bias=((2, 3.0),)),
]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_row_that_is_not_finite_samples_nothing_and_changes_no_other(
    bad: float, everywhere: bool
) -> None:
    entries = [drawn_by(s, output=(4, 5)) for s in KINDS]
    alone = [draw([e]) for e in entries]
    logits = np.stack([LOGITS] * (2 * len(entries)))
    logits[1::2, slice(None) if everywhere else 7] = bad
    both = [e for e in entries for _ in range(2)]
    tokens, logprobs = draw(both, logits)
    assert tokens[::2] == [token for [token], _ in alone]
    assert logprobs[::2] == [logprob for _, [logprob] in alone]
    if bad == -np.inf and not everywhere:  # as of models that exclude tokens so
        assert min(tokens) >= 0 and 7 not in tokens[1::2]
    else:
        assert tokens[1::2] == [NOT_FINITE] * len(entries)


def test_log_probabilities_are_numbers() -> None:
    """Where a mask leaves finite logits alone, they are still those of all tokens."""
    e, plain = drawn_by(Sampling(0.0, logprobs=2)), drawn_by(Sampling(0.0))
    e.masks = plain.masks = [bytes([0, 0, 255])]
    logits = np.stack([LOGITS] * 2)
    logits[:, 3] = np.nan
    tokens, _ = draw([e, plain], logits)
    assert tokens[0] == NOT_FINITE and tokens[1] == 16 + LOGITS[16:].argmax()


def test_logprobs_are_the_models_own_and_sorted() -> None:
    s = Sampling(temperature=0, logprobs=3, logit_bias=((4, 50.0),))
    tokens, found = draw(
        [drawn_by(s), drawn_by(Sampling(temperature=0)), drawn_by(Sampling(0, logprobs=0))]
    )
    p = np.log(softmax(LOGITS.astype(np.float64)))
    assert tokens[0] == 4 and found[1] is None
    first, third = found[0], found[2]
    assert first.logprob == pytest.approx(p[4], abs=1e-5)
    order = np.argsort(-p)[:3]
    assert [t for t, _ in first.top] == order.tolist()
    assert [v for _, v in first.top] == pytest.approx(p[order].tolist(), abs=1e-5)
    assert third.top == () and third.logprob == pytest.approx(p.max(), abs=1e-5)


def test_the_coldest_temperature_is_greedy() -> None:
    for t in (1e-5, 1e-38, 1e-40):
        assert (
            draw([drawn_by(Sampling(temperature=t, seed=i)) for i in range(20)])[0]
            == [int(LOGITS.argmax())] * 20
        )


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64, 2**200])
def test_any_seed_is_a_key(seed: int) -> None:
    assert 0 <= seed32(seed, 0) < 2**32 and seed32(seed, 0) != seed32(seed, 1)
