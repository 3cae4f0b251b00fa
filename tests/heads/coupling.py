"""Whether a head's drafts are better drawn with the target's noise, or its likeliest tokens, on the
trained tiny pair with an MTP head.

    python -m tests.heads.coupling

Prints tokens per round of K = 4 drafts, by temperature.
"""

from dataclasses import replace
from unittest.mock import patch

from mlxspec import blas

blas.load()

from mlxspec.speculate import chain  # noqa: E402  after BLAS
from mlxspec.speculate.controller import Proposal  # noqa: E402
from mlxspec.types import Sampling, Seq  # noqa: E402
from tests.heads import runs  # noqa: E402
from tests.heads.packagings import SIDECAR  # noqa: E402

DEPTH = 4
TEMPERATURES = (0.5, 0.8, 1.0, 1.5, 2.0)
SEEDS = (0, 1)


def drawn(seq: Seq, proposal: Proposal) -> Sampling:
    return seq.request.sampling


def likeliest(seq: Seq, proposal: Proposal) -> Sampling:
    return replace(seq.request.sampling, temperature=0.0)


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
            with patch.object(chain, "sampling_of", how):
                found.append(f"{tokens_per_round(temperature):.2f}")
        print(temperature, *found, flush=True)


if __name__ == "__main__":
    main()
