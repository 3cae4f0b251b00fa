"""Churn and storms: nothing wrong, nothing lost, nothing that grows."""

import os

import pytest

from tests.support import soak
from tests.support.api_requests import KINDS
from tests.support.churn import CALM, churn

MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
SLACK = 1.1  # of what was held before, and
SPARE = 16 << 20  # bytes of RSS: what Python's and glibc's allocators move
MODEL = 1 << 20  # bytes of MLX: which models are loaded when somebody looks


@pytest.mark.slow
def test_churn() -> None:
    seen = churn(60 * MINUTES)
    print("\n" + ", ".join(f"{n} {what}" for what, n in seen.counts.items()))
    rss, arrays, held = ((seen.most(i, CALM, 0.5), seen.most(i, 0.75, 1)) for i in (1, 2, 3))
    megabytes = [[size >> 20 for size in pair] for pair in (rss, held)]
    print(
        f"RSS {megabytes[0]} MiB, arrays {arrays}, MLX {megabytes[1]} MiB: in the second quarter, in the last"
    )
    assert (
        seen.counts["answered"] > 100 * MINUTES
        and seen.counts["cancelled"]
        and seen.counts["loads"] > 20
    )
    assert rss[1] <= rss[0] * SLACK + SPARE
    assert arrays[1] <= arrays[0] * SLACK and held[1] <= held[0] * SLACK + MODEL


@pytest.mark.slow
def test_everything_on() -> None:
    """30 seconds of what `python -m tests.support.soak` does for longer."""
    seen = soak.soak(30)
    soak.show(seen, 30)
    assert not seen.faults()
    answered = {what.removeprefix("answered ") for what in seen.counts if "answered" in what}
    assert answered >= {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"}
    assert answered >= {"/v1/fim/completions", "/infill", "/v1/embeddings", "/api/embed"}
    assert all(seen.counts[f"with {kind}"] for kind in KINDS)
    assert seen.counts["images read"] and seen.counts["loops ended"] and seen.counts["preflights"]
    assert seen.counts["left in the middle"] and seen.counts["refused"] and seen.storms
