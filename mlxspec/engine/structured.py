"""Grammars in a step: which tokens its rows may draw.

Rule: a mask is a function of the tokens before it, so a step with a grammar in it waits for the
tokens of the step before. A drafted token that the grammar refuses is cut off with all behind it,
never verified. Whatever a grammar does, it ends no more than its own choice.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from mlxspec.types import Draft, Entry
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

Failures = list[tuple[Seq, str]]


def waits(seqs: Iterable[Seq]) -> bool:
    """Whether a mask cannot be made yet, because a token that it depends on has not been read."""
    return any(s.matcher is not None and s.pending for s in seqs)


def mask(plan: Sequence[Entry]) -> Failures:
    """Fill the masks of the entries that sample under a grammar, and cut their drafts to what it
    takes."""
    failed: Failures = []
    for e in plan:
        if e.seq.matcher is None or not e.samples:
            continue
        # A model's draft is read here: nothing else is in flight, and the host has to know what it
        # masks.
        drafted = np.array(e.draft.tokens).tolist() if len(e.draft) else []
        try:
            e.masks = e.seq.matcher.masks(drafted)
        except Exception as error:
            failed.append((e.seq, _why(error)))
            continue
        e.draft = Draft(drafted[: len(e.masks) - 1], e.draft.source)
    return failed


def take(plan: Sequence[Entry], accepted: Sequence[list[int]]) -> Failures:
    """Tell the grammars what was sampled."""
    failed: Failures = []
    for e, new in zip(plan, accepted, strict=True):
        if e.seq.matcher is None or not new or e.seq.finish is not None:
            continue
        try:
            e.seq.matcher.take(new)
        except Exception as error:
            failed.append((e.seq, _why(error)))
    return failed


def _why(error: Exception) -> str:
    log.warning("a grammar failed: %s", error)
    return f"the grammar cannot go on: {error}"
