"""From logits to tokens, for every row of a step at once, each by its own request's parameters.

Rule: a token is a function of (its logits, its history, the request's sampling, seed, position).
The noise is keyed by (seed, position), so neither the batch nor a drafter can change a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from mlxspec.kernels.inputs import Draws
from mlxspec.kernels.reference import allow
from mlxspec.kernels.sampling import sample_accept
from mlxspec.sequences import Span, Spans
from mlxspec.types import COLDEST, NARROW, NOT_FINITE, Logprob, Sampling


@dataclass(slots=True)
class Sampled:
    """Lazy results of a step. `tokens` int32 [R], NOT_FINITE where logits are not; `accepted` int32
    [sampling spans], how many drafted tokens were accepted, None if nothing was drafted.
    `logprobs`, only if some row asked for them: the log-probabilities [R] of the sampled tokens;
    then ids and log-probabilities [R, k] of the k best, best first."""

    tokens: Array
    accepted: Array | None = None
    logprobs: Sequence[Array] = ()


@dataclass(slots=True)
class SampledRow:
    """One sampled row: its span, its request's sampling, and the position of the token that it
    samples (a lower bound where the span's start is one). `ordinal` counts the span's sampled
    rows from 1, of which the first has index `first_input` among the step's input tokens; `mask`
    has a bit for each token that may be sampled, empty: all may."""

    span: Span
    sampling: Sampling
    position: int
    ordinal: int = 1
    first_input: int = 0
    mask: bytes = b""


Rows = Sequence[SampledRow]


def sampled_row_specs(spans: Spans) -> list[SampledRow]:
    """The sampled rows of a forward, in the spans' order."""
    rows = []
    end = 0
    for e in spans:
        end += e.rows
        sampled = e.num_sampled
        for i in range(sampled):
            mask = e.masks[i] if e.masks else b""
            position = e.start + e.count + i
            row = SampledRow(
                e,
                e.state.sampling,
                position,
                ordinal=i + 1,
                first_input=end - sampled,
                mask=mask,
            )
            rows.append(row)
    return rows


def drafts_of(rows: Rows) -> list[tuple[int, int]]:
    """(index of its first token among the input tokens, length) of each sampling span's draft; []
    if nothing was drafted."""
    drafts = [(row.first_input + 1, row.span.draft.size) for row in rows if row.ordinal == 1]
    return drafts if any(count for _, count in drafts) else []


@lru_cache(256)
def seed32(seed: int, index: int) -> int:
    """The 32-bit noise key of choice `index` of a request with `seed` (any int)."""
    seed %= 1 << 128
    data = seed.to_bytes(16, "little") + index.to_bytes(2, "little")
    digest = blake2b(data, digest_size=4).digest()
    return int.from_bytes(digest, "little")


def sample(
    logits: Array,
    rows: Rows,
    inputs: Array,
    shift: Array | None = None,
    checked: bool = True,
) -> Sampled:
    """Lazy samples of logits [R, vocab]. `inputs` int32 [T] are the step's input tokens, `shift`
    int32 [R] is added to the rows' positions; `checked`: see Draws."""
    samplings = [row.sampling for row in rows]
    wanted = [s.logprobs for s in samplings if s.logprobs is not None]
    if wanted:
        logits = logits.astype(mx.float32)
    x = _add_bias(logits, rows)
    if any([s.penalized for s in samplings]):
        x = _penalize(x, rows, inputs)
    draws = Draws(
        _temperatures(rows),
        [seed32(row.sampling.seed, row.span.state.index) for row in rows],
        [row.position for row in rows],
        masks=[row.mask for row in rows],
        shift=shift,
        min_logits=_floors(x, rows),
        checked=checked,
    )
    tokens, accepted = sample_accept(x, draws, inputs, drafts=drafts_of(rows))
    return Sampled(tokens, accepted, _logprobs(logits, tokens, max(wanted)) if wanted else ())


def _temperatures(rows: Rows) -> list[float]:
    temperatures = [row.sampling.temperature for row in rows]
    return [t and max(t, COLDEST) for t in temperatures]


def _logprobs(logits: Array, tokens: Array, k: int) -> list[Array]:
    """Sampled.logprobs: the model's own, before bias and penalties."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
    top = mx.argsort(-logprobs, axis=-1)[:, : max(1, k)]
    best = mx.take_along_axis(logprobs, top, axis=-1)
    return [chosen[:, 0], top, best]


def read(sampled: Sampled, rows: Rows) -> tuple[list[int], list[Logprob | None]]:
    """The step's one host read: tokens [R] and, for rows that asked, their log-probabilities. The
    token is NOT_FINITE if one of these is NaN, even of a token that a mask excludes."""
    tokens = np.array(sampled.tokens).tolist()
    logprobs: list[Logprob | None] = [None for _ in rows]
    if not sampled.logprobs:
        return tokens, logprobs
    chosen, ids, values = [np.array(array).tolist() for array in sampled.logprobs]
    for r, row in enumerate(rows):
        n = row.sampling.logprobs
        if n is None:
            continue
        if any(map(math.isnan, (chosen[r], *values[r][:n]))):
            tokens[r] = NOT_FINITE
        top = zip(ids[r][:n], values[r][:n], strict=True)
        logprobs[r] = Logprob(tokens[r], chosen[r], tuple(top))
    return tokens, logprobs


def _add_bias(x: Array, rows: Rows) -> Array:
    biases = [(r, *bias) for r, row in enumerate(rows) for bias in row.sampling.logit_bias]
    if not biases:
        return x
    at, tokens, values = map(mx.array, zip(*biases, strict=True))
    return x.astype(mx.float32).at[at, tokens].add(values)


def _penalize(x: Array, rows: Rows, inputs: Array) -> Array:
    """Presence and frequency penalties count generated tokens, repetition prompt and generated ones
    (vLLM's rules; repetition is Keskar et al., arXiv 1909.05858)."""
    prompt, generated = _token_counts(rows, inputs, x.shape[-1])
    penalties = []
    for row in rows:
        s = row.sampling
        penalties.append([s.repetition_penalty, s.frequency_penalty, s.presence_penalty])
    columns = mx.array(penalties, mx.float32).T
    repetition, frequency, presence = columns[:, :, None]
    x = x.astype(mx.float32)
    repeated = mx.where(x > 0, x / repetition, x * repetition)
    x = mx.where(prompt + generated > 0, repeated, x)
    return x - generated * frequency - (generated > 0) * presence


def _token_counts(rows: Rows, inputs: Array, vocab: int) -> Array:
    """float32 [2, R, vocab]: how often each token occurs in a row's prompt, and was generated
    before the row; tokens of the step itself are counted lazily."""
    counts_read = []
    unread = []  # generated input tokens of this step, each with a row that comes after it
    for r, row in enumerate(rows):
        first = row.position - row.ordinal  # of the span's input tokens that may be unread
        in_prompt = max(0, row.span.state.prompt_len - first)
        counts_read.append(_host_counts(row.span, first + in_prompt, vocab))
        for i in range(in_prompt, row.ordinal):
            unread.append((row.first_input + i, r))
    counts = mx.stack(counts_read, axis=1)
    if unread:
        at, owners = mx.array(unread).T
        counts = counts.at[1, owners, inputs[at]].add(1.0)
    return counts


def _host_counts(span: Span, upto: int, vocab: int) -> Array:
    """float32 [2, vocab]: how often each token occurs in the prompt, and was generated before
    position `upto`. Kept with the sequence: a step counts only what is new."""
    state = span.state
    counted, counts = state.counts or (0, mx.zeros((2, vocab)))
    if upto > counted:
        generated = mx.arange(counted, upto) >= state.prompt_len
        new = mx.array(span.tokens[counted:upto])
        ones: Array | float = 1.0
        if state.images:  # their rows are no tokens
            ones = (new >= 0).astype(mx.float32)
            new = mx.maximum(new, 0)
        counts = counts.at[generated.astype(mx.int32), new].add(ones)
        state.counts = upto, counts
    totals: Array = counts
    return totals


def _floors(x: Array, rows: Rows) -> Array | None:
    """float32 [R]: the lowest of x [R, vocab] / temperature that top_k, top_p and min_p keep, -inf
    for rows without them; None if no row has one. A row with a small top_k ranks NARROW tokens
    alone, whichever rows it shares the batch with."""
    filtered: dict[bool, list[int]] = {}
    for r, row in enumerate(rows):
        s = row.sampling
        if s.temperature and (s.top_k or s.top_p < 1 or s.min_p):
            narrow = 0 < s.top_k <= NARROW < x.shape[-1]
            filtered.setdefault(narrow, []).append(r)
    if not filtered:
        return None
    floors = mx.full((len(rows),), -mx.inf)
    for narrow, chosen in filtered.items():
        some = [rows[r] for r in chosen]
        at = mx.array(chosen)
        y = allow(x[at].astype(mx.float32), [row.mask for row in some])
        temperatures = mx.array(_temperatures(some))
        y = y / temperatures[:, None]
        if narrow:
            y = mx.topk(y, NARROW, axis=-1)
        ranked = mx.sort(y, axis=-1)[:, ::-1]
        floors[at] = _floor(ranked, [row.sampling for row in some])
    return floors


def _floor(ranked: Array, samplings: Sequence[Sampling]) -> Array:
    """float32 [R], the lowest logit that stays: top_k, then top_p over what top_k keeps, and min_p
    relative to the best; ties at a threshold stay. `ranked` [R, n]: the n >= top_k best, sorted."""
    n = ranked.shape[-1]
    top_k = mx.array([min(s.top_k or n, n) for s in samplings])[:, None]
    # 2 where top_p is off: a sum that rounds to 1 must not cut the tail
    top_p = mx.array([s.top_p if s.top_p < 1 else 2.0 for s in samplings])[:, None]
    min_p = mx.array([s.min_p for s in samplings])
    kept = mx.where(mx.arange(n) < top_k, ranked, -mx.inf)
    probs = mx.softmax(kept, axis=-1, precise=True)
    better = mx.cumsum(probs, axis=-1) - probs  # mass of the better tokens
    inside = (better < top_p) & (probs > 0)
    floor = mx.where(inside, kept, mx.inf).min(axis=-1)
    best = ranked[:, 0]
    return mx.clip(floor, best + mx.log(min_p), best)
