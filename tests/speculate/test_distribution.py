"""Speculated tokens have the distribution of plain sampling, whatever the drafter: chi-square over many
seeds.

A bias leaves four tokens, so that the exact probability of every answer can be written down.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlxspec.speculate.controller import AcceptanceRates, Controller, Costs, Proposal
from mlxspec.types import Request
from tests.support import tiny
from tests.support.drafters import attach, copies, like
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal

PROMPT = (5, 6, 7)
TOKENS = (17, 58, 141, 272)
N = 5  # tokens of an answer: two are plain at least before a copy can be waited for
GUESS = (TOKENS[1], TOKENS[0], TOKENS[0], TOKENS[0], TOKENS[0], *range(8))
DRAFTERS = ["lookup", "suffix", "model", "chain", "liar"]
ANSWERS = list(itertools.product(range(4), repeat=N))


@functools.cache
def model() -> Any:
    return flat(tiny.model("qwen3"))


@functools.cache
def small() -> Any:
    return flat(like(None, "qwen3", 0.3))


def flat(m: Any) -> Any:
    """Smaller weights give even chances."""
    m.update(tree_map(lambda x: x * 0.6 if x.ndim > 1 else x, m.parameters()))
    return m


@functools.cache
def logits() -> np.ndarray:
    """The four tokens' logits in every context, float64 [answers, N, 4], by mlx-lm's own
    forward."""
    rows = [[*PROMPT, *(TOKENS[i] for i in answer[:-1])] for answer in ANSWERS]
    found = np.array(flat(tiny.model("qwen3"))(mx.array(rows)))
    return found[:, len(PROMPT) - 1 :, list(TOKENS)].astype(np.float64)


@functools.cache
def bias() -> tuple[tuple[int, float], ...]:
    """Far above the others, and each about as likely as the next."""
    return tuple(zip(TOKENS, (60 - logits().mean((0, 1))).round(2).tolist(), strict=True))


@functools.cache
def exact(temperature: float) -> np.ndarray:
    """The probability of every answer, float64 [4] * N."""
    x = (logits() + [b for _, b in bias()]) / temperature
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.take_along_axis(p, np.array(ANSWERS)[:, :, None], -1)[:, :, 0]
    return chosen.prod(-1).reshape([4] * N)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be drafted is, so that few seeds tell much."""

    def decide(
        self: Controller,
        pilots: list[AcceptanceRates],
        options: list[list[Proposal]],
        *_: Any,
        **__: Any,
    ) -> list[Any]:
        return [(len(some[0].rates), some[0]) if some else (0, None) for some in options]

    monkeypatch.setattr(Controller, "decide", decide)
    monkeypatch.setattr(Costs, "learn", lambda *_, **__: None)


def engine(kind: str) -> tiny.Engine:
    e = tiny.engine(model(), budget=256, blocks=128, max_sequences=32)
    if kind == "liar":
        e.proposer = NoisyOracle({(PROMPT, 0): list(GUESS[:N])}, lies=0.2, most=N)
        return e
    chain = attach(e, kind, small() if kind in ("model", "chain") else None)
    if kind == "suffix":
        for two in itertools.product(TOKENS, repeat=2):
            copies(chain).corpus.add(PROMPT, (*two, *GUESS[2:]))
        copies(chain).corpus.index(10**6)
    return e


def counts(
    kind: str, temperature: float, n: int
) -> tuple[np.ndarray, dict[tuple[str, int], tuple[int, int]]]:
    """How often each answer came from `n` seeds, and (drafted, kept) by source and position."""
    e = engine(kind)
    found = np.zeros([4] * N)
    for start in range(0, n, 32):
        for seed in range(start, min(n, start + 32)):
            r = tiny.request(
                str(seed), PROMPT, N, temperature=temperature, seed=seed, logit_bias=bias()
            )
            e.add(predicted(r) if kind in ("lookup", "chain") and seed % 2 else r)
        answers: dict[str, list[int]] = {}
        for o in tiny.run(e):
            answers.setdefault(o.request, []).extend(o.tokens)
        for answer in answers.values():
            found[tuple(TOKENS.index(t) for t in answer)] += 1
    return found, e.stats().drafts


def predicted(r: Request) -> Request:
    return replace(r, prediction=GUESS)


def surprise(found: np.ndarray, p: np.ndarray) -> float:
    """Chi-square as a part of its 99.99 % quantile (Wilson-Hilferty); rare classes are merged."""
    expect, found = p.ravel() * found.sum(), found.ravel()
    order = np.argsort(expect)
    expect, found = expect[order], found[order]
    rare = int(np.searchsorted(np.cumsum(expect), 8.0)) + 1
    expect = np.append(expect[rare:], expect[:rare].sum())
    found = np.append(found[rare:], found[:rare].sum())
    chi2, k = float(((found - expect) ** 2 / expect).sum()), len(expect) - 1
    assert k >= 2, "too few classes to tell"
    return chi2 / (k * (1 - 2 / (9 * k) + 3.72 * (2 / (9 * k)) ** 0.5) ** 3)


def check(kind: str, temperature: float, n: int) -> None:
    found, drafts = counts(kind, temperature, n)
    p = exact(temperature)
    assert found.sum() == n
    others = {i: tuple(j for j in range(N) if j != i) for i in range(N)}
    for at in range(1, N):  # each is drafted in some rounds, by some first, by others later
        assert surprise(found.sum(others[at]), p.sum(others[at])) < 1, at
    assert surprise(found, p) < 1, "whole answers"
    tried, kept = (sum(d[i] for d in drafts) for i in (2, 3))
    assert tried > n / 4 and n / 40 < kept < tried, "most were drafted, some kept, some refused"
    assert max(at for _, at, _, kept in drafts if kept) >= 2


@pytest.mark.parametrize("kind, temperature", diagonal(DRAFTERS, [0.5, 1.0], every=5))
def test_chi_square(kind: str, temperature: float) -> None:
    check(kind, temperature, 1200)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_chi_square_of_many(kind: str, temperature: float) -> None:
    check(kind, temperature, 20_000)


def test_the_check_sees_a_biased_sampler() -> None:
    """Where one draft in five is kept against the rule, it is found."""
    p, rng = exact(1.0), np.random.default_rng(0)
    fair = rng.multinomial(1200, p.ravel()).reshape(p.shape)
    biased = p * 0.8
    biased[:, TOKENS.index(GUESS[1])] += 0.2 * p.sum(1)
    counted = rng.multinomial(1200, biased.ravel()).reshape(p.shape)
    first = (0, 2, 3, 4)
    assert surprise(fair.sum(first), p.sum(first)) < 1 and surprise(fair, p) < 1
    assert surprise(counted.sum(first), p.sum(first)) > 1 and surprise(counted, p) > 1
