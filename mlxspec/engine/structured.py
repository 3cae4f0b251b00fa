"""Grammars in a step: which tokens its rows may draw.

Rule: a mask depends on the tokens before it, so a step with a grammar waits for the step before. A
drafted token that the grammar refuses is cut off with all behind it, never verified. A grammar that
fails ends its own choice only.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from mlxspec.types import Accepted, Draft, Entry
from mlxspec.types import Sequence as Seq

log = logging.getLogger("mlxspec")

Failures = list[tuple[Seq, str]]


def mask(plan: Sequence[Entry]) -> Failures:
    """Fill the masks of the entries that sample under a grammar, and cut their drafts to it."""
    failed: Failures = []
    for e in plan:
        if e.seq.matcher is None or not e.samples:
            continue
        # A lazy draft is read here: the host has to know the tokens that it masks.
        drafted = np.array(e.draft.tokens).tolist() if len(e.draft) else []
        try:
            e.masks = e.seq.matcher.masks(drafted)
            e.draft = Draft(drafted[: len(e.masks) - 1], e.draft.source, e.draft.keys)
        except Exception as error:
            failed.append((e.seq, _reason(error)))
    return failed


def advance(pairs: Iterable[tuple[Entry, Accepted]]) -> Failures:
    """Advance the grammars over the tokens that were accepted."""
    failed: Failures = []
    for e, new in pairs:
        if e.seq.matcher is None or not new.tokens or e.seq.finish is not None or new.finish:
            continue
        try:
            e.seq.matcher.take(new.tokens)
        except Exception as error:
            failed.append((e.seq, _reason(error)))
    return failed


def _reason(error: Exception) -> str:
    log.warning("a grammar failed: %s", error)
    return f"the grammar cannot go on: {error}"
