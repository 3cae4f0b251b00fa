"""The verdict for each architecture of mlx-lm that serves in the rows or rect layout, with MLX's
kernels as on a Mac (tests/support/dispatch.py): where it says exact, answers are."""

from typing import Any

import pytest

from mlxspec.load import exact_proof
from mlxspec.load.exact import examine
from mlxspec.load.exact_proof import MOST
from mlxspec.model import invariant
from mlxspec.model.layout import find_layout
from tests.support import architectures, dispatch, tiny
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import chosen
from tests.test_exact import BLOCK, CHUNK, alone, engine, in_numbers, requests, told

# What docs/exact.md names: products that are no layers.
NOT_EXACT = {"talkie", "recurrent_gemma", "prism_hadamard_qwen35"}
# As a router's weights are a module's own, by other names, and take three axes.
ROUTERS = ("deepseek_v2", "dots1")
FAMILIES = [name for name, layout in architectures.LAYOUTS.items() if layout in ("rows", "rect")]


@pytest.mark.parametrize(
    "name, chip",
    chosen(
        ([*zip(FAMILIES, [*dispatch.CHIPS] * len(FAMILIES), strict=False)],),
        lambda places: FAMILIES[places[0]] in ROUTERS,
    ),
)
def test_a_verdict_holds(name: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "CHUNK", CHUNK)
    monkeypatch.setattr(exact_proof, "CONTEXT", 4 * CHUNK)
    model = architectures.build(name)
    choice = find_layout(model)
    in_numbers(model, "affine")
    with dispatch.on(dispatch.CHIPS[chip]):
        found = examine(model, choice, BLOCK)
        if name in NOT_EXACT:
            assert not found.rows and found.why
            return
        assert (found.rows, found.why) == (MOST, "")
        all_of = requests(0.8)
        truth = alone(model, choice.layout, found.invariance, all_of)
        e = engine(model, choice.layout, 64, found.invariance)
        e.runner.states.rollback_supported = choice.rollback
        if choice.can_draft:
            e.proposer = NoisyOracle(
                {(r.prompt, 0): truth[n][0] for n, r in all_of.items()}, most=16
            )
        for r in all_of.values():
            e.add(r)
        outputs: Any = tiny.run(e)
        assert {n: told(outputs, n) for n in all_of} == truth
