"""Drafting on the CPU while the GPU verifies: both streams by hand."""

import pytest

from bench.chips import CURVES
from bench.overlap import CPU, Drafter, Mac, ahead, alone, best
from bench.roofline import Model

STEP, IDEAL, GPU = Model(dense=10 * 10**9, token=0), CURVES["ideal"], 0.8


def test_two_streams_by_hand() -> None:
    mac = Mac(100e9, CPU * 100e9, GPU, STEP, IDEAL, 0)
    sure = Drafter("", 0.8e9, 1.0, GPU)
    verify = 10e9 / (GPU * 100e9)
    assert alone(mac, sure, 2) == pytest.approx(3 / (verify + 2 * 0.8e9 / 80e9))
    # 20 GB/s beside the GPU: 3 tokens in a verification, the first stands for the sample.
    assert ahead(mac, sure, 2, 0.0) == pytest.approx(3 / verify, rel=0.01)
    never = Drafter("", 0.8e9, 0.0, GPU)
    assert ahead(mac, never, 2, 0.0) == pytest.approx(1 / (verify + 2 * 0.8e9 / 60e9))
    assert best(mac, [never], None) == (pytest.approx(1 / verify), "none")
