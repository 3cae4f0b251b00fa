"""One server's batch of eight: some answers are copied, some drafted by a head, some keep to a
grammar, some are drawn at temperature 1. All are as without drafts, under one controller."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mlxspec.engine.engine import Engine
from mlxspec.speculate import NoSpeculation
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import Request, Sampling
from tests.heads import kinds
from tests.support import tiny
from tests.support.drafters import costs
from tests.support.parameter_rows import only
from tests.support.token_grammar import Maze, budget

LENGTH, VOCAB = 40, 640
PACKAGINGS = {"eagle3": "speculators", "dflash": "z-lab", "dspark": "dflash-config"}
PACKAGINGS |= {"assistant": "google"}


class WideMaze(Maze):
    """With a bit for each token of the trained target's vocabulary."""

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        return [mask.ljust(VOCAB // 8, b"\0") for mask in super().masks(draft)]


def eight(prompts: list[list[int]]) -> list[Request]:
    made = []
    for i, prompt in enumerate(prompts[:8]):
        asked = Request(f"{i}", tuple(prompt), LENGTH, Sampling(temperature=0.0))
        match i % 4:
            case 1:
                asked = replace(asked, grammar=WideMaze)
            case 2:
                asked = replace(asked, sampling=Sampling(temperature=1.0, seed=i))
            case 3:
                asked = replace(asked, grammar=lambda: budget(LENGTH - 4))
        made.append(asked)
    return made


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """Each arrives two steps after the one before it."""
    engine.reset()
    outputs = []
    for request in requests:
        engine.add(request)
        outputs += [*engine.step(), *engine.step()]
    outputs += tiny.run(engine)
    return {r.id: tiny.tokens(outputs, r.id) for r in requests}


@pytest.mark.parametrize("kind", only(PACKAGINGS, 2))
def test_a_mixed_batch_is_as_without_drafts(kind: str, tmp_path: Path) -> None:
    path = kinds.write(kind, PACKAGINGS[kind], tmp_path)
    engine, head = kinds.engine(path, kinds.target_of(kind))
    requests = eight(kinds.reference(kind)["prompts"])
    engine.proposer = NoSpeculation()
    plain = answers(engine, requests)
    assert len({tuple(tokens) for tokens in plain.values()}) == 8
    # Every fourth is told before what it will say, with an error here and there, as of an edit.
    for i in (3, 7):
        told = [t if n % 12 != 11 else 7 for n, t in enumerate(plain[f"{i}"])]
        requests[i] = replace(requests[i], prediction=tuple(told))
    engine.proposer = proposer = Proposer(costs(1e-3), [NgramDrafter(), head])
    assert answers(engine, requests) == plain
    assert proposer.drafters[-1] is head, "it failed"
    accepted = engine.spec_metrics.accepted
    sources = Counter(source for source, _ in accepted.elements())
    assert sources[head.name] > 5 and sources["grammar"] > 5 and len(sources) > 2, sources
