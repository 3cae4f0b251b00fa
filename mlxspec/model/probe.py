"""The trial of a layout: a few ragged prompts, whose logits must equal mlx-lm's own.

Rule: it does what serving does: prompts are cut anywhere, drafts are accepted in part.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.model.runner import Runner
from mlxspec.sequences import Draft, SeqState, Span
from mlxspec.types import UnsupportedModel, line_of

PROMPTS = ((3, 1, 4, 1), (9, 2, 6), (5, 3, 5, 8, 9))
CONTINUATION = (
    2,
    7,
    1,
    8,
)  # follows each prompt, partly as accepted drafts
REJECTED = 5  # a token that is not in CONTINUATION
DRAFTS = (
    (7, REJECTED),
    (7, 1),
    (REJECTED,),
)  # one for each prompt, after its first token
ACCEPTED = (1, 2, 0)
BLOCK, BLOCKS = 4, 16  # size and number of the blocks in the pools
WIDTH = 5  # blocks of a prompt and its continuation
TOLERANCE_FP32 = 1e-3  # root mean square error over the standard deviation of the logits
TOLERANCE_HALF = 0.1


def reference_logits(model: Module) -> tuple[list[Array], list[Any]]:
    """mlx-lm's logits [1 + len(CONTINUATION), vocab] for each prompt, from its last token on, in
    one pass each; and its caches of the last prompt. Raises UnsupportedModel."""
    logits = []
    try:
        for prompt in PROMPTS:
            caches = make_prompt_cache(model)
            rows = model(mx.array([(*prompt, *CONTINUATION)]), cache=caches)[0]
            logits.append(rows[len(prompt) - 1 :])
        mx.eval(logits)
    except Exception as failure:  # the model's own code decides what it raises
        raise UnsupportedModel(
            f"mlx-lm itself cannot run this model here: {line_of(failure)}",
        ) from failure
    if mx.isnan(mx.stack(logits)).any().item():
        raise UnsupportedModel("its logits are NaN: the weights are damaged; download them again")
    return logits, caches


def probe_logits(runner: Runner) -> list[dict[int, Array]]:
    """The runner's logits for the prompts of `reference_logits`, all in one batch: the rows that it
    samples, by their index in the reference."""
    texts = [[*prompt, *CONTINUATION] for prompt in PROMPTS]
    tables = [[list(range(1 + WIDTH * i, 1 + WIDTH * (i + 1)))] for i in range(len(PROMPTS))]
    seqs = [SeqState() for _ in PROMPTS]
    computed = [0 for _ in PROMPTS]
    logits: list[dict[int, Array]] = [{} for _ in PROMPTS]

    def step(
        counts: Sequence[int],
        samples: bool = True,
        drafts: Sequence[Sequence[int]] = ((), (), ()),
        accepted: Sequence[int] = (0, 0, 0),
    ) -> None:
        plan: dict[Span, int] = {}
        for i, n in enumerate(counts):
            span = Span(
                seqs[i],
                tables[i],
                texts[i],
                start=computed[i],
                count=n,
                samples=samples,
            )
            span.draft = Draft(drafts[i])
            if n:
                plan[span] = i
        result = runner.forward(list(plan), None)
        mx.eval(result.logits)
        if any(accepted):
            in_order = [accepted[plan[row.span]] for row in result.sampled_rows if row.ordinal == 1]
            runner.states.keep_accepted(mx.array(in_order), result.first_row)
        for e, i in plan.items():
            end = e.start + e.count
            for n in range(accepted[i] + 1 if samples else 0):
                row = result.first_row[e.state] + n
                logits[i][end - len(PROMPTS[i]) + n] = result.logits[row]
            computed[i] = end + accepted[i]

    step((2, 2, 2), samples=False)
    step([len(prompt) - 2 for prompt in PROMPTS])
    if runner.layout != "solo" and runner.states.rollback_supported:
        step((1, 1, 1), drafts=DRAFTS, accepted=ACCEPTED)
        remaining = [len(tokens) - done for tokens, done in zip(texts, computed, strict=True)]
        step([int(n > 1) for n in remaining])  # one leaves the batch
        return logits
    step((1, 1, 1))
    step([len(tokens) - done for tokens, done in zip(texts, computed, strict=True)])
    return logits


def logits_error(logits: Sequence[dict[int, Array]], reference: Sequence[Array]) -> str:
    """How the logits, by their index in the reference, differ from it by more than rounding
    explains, or ""."""
    for by_index, whole in zip(logits, reference, strict=True):
        rows, expected = (
            mx.stack(list(by_index.values())),
            whole[mx.array(list(by_index))],
        )
        tolerance = TOLERANCE_HALF
        if expected.dtype == mx.float32:
            tolerance = TOLERANCE_FP32
        a, b = [np.array(x.astype(mx.float32)) for x in (rows, expected)]
        allowed = ~np.isneginf(b)  # some models mask tokens with -inf
        if (allowed == np.isneginf(a)).any():
            return "other tokens are masked"
        off = (a - b)[allowed]
        error = float(np.sqrt(np.square(off).mean()) / max(b[allowed].std(), 1e-6))
        if not error <= tolerance:
            return f"logits are off by {error:.2g} standard deviations"
    return ""
