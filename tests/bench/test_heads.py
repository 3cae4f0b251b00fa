"""Heads in the roofline: bytes against sums by hand, and the depth that is best."""

import pytest

from bench.chips import CURVES
from bench.formula import Model, expected, fitted, head_speed
from bench.heads import REACHED, Head, Pairing, eagle3, mtp, pairings, peagle, small
from bench.sizes import read_config

IDEAL, LINEAR = CURVES["ideal"], CURVES["linear"]
STEP = Model(dense=10 * 10**9, token=0)


def text(name: str) -> dict:
    config = read_config(name)
    return config.get("text_config", config)


def test_heads_by_hand() -> None:
    wide = text("qwen3.8-27b")
    layer = 5120 * (12288 + 2 * 1024) + 6144 * 5120 + 3 * 5120 * 17408 + 2 * 5120**2
    assert mtp(wide).token == (layer + 248320 * 5120) * 4.5 / 8
    assert layer == pytest.approx(425e6, rel=0.01)  # as the published files have it
    one = eagle3(wide, 17408)
    assert peagle(wide, 17408, layers=1).block == one.block + one.token
    assert small(10, 2.0, 4) == Head(token=20.0, token_matrices=29)
    assert Head(5, 2, 3, 1).draft(4) == 13 and Head(5, 2, 3, 1).matrices(4) == 7


def test_all_pairings_can_be_predicted() -> None:
    found = pairings({name: text(name) for name in REACHED})
    assert {p.target for p in found} == set(REACHED)
    for p in found:
        assert 1 < p.tokens <= p.depth + 1 and p.source and p.head.draft(p.depth) > 0


def test_the_chance_that_fits() -> None:
    assert expected(fitted(5.09, 7), 7) == pytest.approx(5.09)
    assert expected(fitted(2.5, 3), 3) == pytest.approx(2.5)


def test_the_best_depth() -> None:
    p = Pairing("", 4, Head(), "", 3, 4.0, "")
    assert head_speed(STEP, p, 100e9, 0, IDEAL) == pytest.approx(40)
    assert head_speed(STEP, p, 100e9, 0, LINEAR) == pytest.approx(10)
    dear = Pairing("", 4, Head(token=10e9), "", 3, 4.0, "")
    assert head_speed(STEP, dear, 100e9, 0, IDEAL) == pytest.approx(10)
