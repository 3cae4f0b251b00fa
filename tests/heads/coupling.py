"""Whether a head's drafts are better drawn with the target's noise, or its likeliest tokens, on the
trained tiny pair with an MTP head.

    python -m tests.heads.coupling

Prints tokens per round of K = 4 drafts, by temperature.
"""

from dataclasses import replace
from unittest.mock import patch

from mlxspec import blas

blas.load()

from mlxspec.sequences import Entry  # noqa: E402  after BLAS
from mlxspec.speculate.heads import drafter  # noqa: E402
from mlxspec.types import Sampling  # noqa: E402
from tests.heads import runs  # noqa: E402
from tests.heads.packagings import SIDECAR  # noqa: E402

DEPTH = 4
TEMPERATURES = (0.5, 0.8, 1.0, 1.5, 2.0)
SEEDS = (0, 1)


def drawn(e: Entry) -> Sampling:
    return e.kept.sampling


def likeliest(e: Entry) -> Sampling:
    return replace(e.kept.sampling, temperature=0.0)


def tokens_per_round(temperature: float) -> float:
    prompts, whole = runs.reference()["prompts"], runs.Run([])
    for seed in SEEDS:
        sampling = Sampling(temperature=temperature, seed=seed)
        one = runs.run(*runs.engine(head=SIDECAR), DEPTH, prompts, sampling)
        whole.prompts += one.prompts
        whole.rounds += one.rounds
    return whole.tokens_per_round(DEPTH)


def main() -> None:
    print("temperature, drawn with the target's noise, the likeliest tokens")
    for temperature in TEMPERATURES:
        found = []
        for how in (drawn, likeliest):
            with patch.object(drafter, "sampling_of", how):
                found.append(f"{tokens_per_round(temperature):.2f}")
        print(temperature, *found, flush=True)


if __name__ == "__main__":
    main()
