"""Grammars in a step: which tokens its rows may draw.

Rule: a mask depends on the tokens before it, so a step whose tokens may be restricted waits for the
step before. A draft is cut before the first token that the grammar refuses. A grammar that fails
ends its own choice only.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mlxspec.types import Accepted, Draft, Entry, Seq

Failures = Iterable[tuple[Seq, Exception]]


def mask(plan: Sequence[Entry]) -> Failures:
    """Fill the masks of the entries that sample under a grammar, and cut their drafts to it; yields
    what fails."""
    for e in plan:
        if not e.seq.restricted or not e.samples:
            continue
        # A draft on the device is read here: the masks depend on its tokens.
        draft = e.draft
        tokens = np.array(draft.tokens, np.int32).tolist()
        try:
            e.masks = e.seq.matcher.masks(tokens)
            allowed = tokens[: len(e.masks) - 1]
            e.draft = Draft(allowed, draft.source, draft.rate_keys)
        except Exception as error:
            yield e.seq, error


def advance(pairs: Iterable[tuple[Entry, Accepted]]) -> Failures:
    """Advance the grammars over the tokens that were accepted; yields what fails."""
    for e, new in pairs:
        if not e.seq.matcher or e.seq.finish or new.finish:
            continue
        try:
            e.seq.matcher.take(new.tokens)
        except Exception as error:
            yield e.seq, error
