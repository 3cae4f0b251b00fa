"""From logits to tokens, for every row of a step at once, each by its own request's parameters.

Rule: a token is a function of (its logits, its history, the request's sampling, seed, position).
The noise is keyed by (seed, position), so neither the batch nor a drafter can change a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from mlxspec.kernels import Draws, sample_accept
from mlxspec.kernels.reference import allow
from mlxspec.types import COLDEST, NARROW, Entry, Logprob, Plan, Sampling, Seq


@dataclass(slots=True)
class Sampled:
    """Lazy results of a step. `tokens` int32 [R]; `accepted` int32 [sampling entries], how many
    drafted tokens were accepted, None if nothing was drafted. `logprobs`, only if some row asked
    for them: the log-probabilities [R] of the sampled tokens; then, if alternatives are to be
    reported, ids and log-probabilities [R, k] of the k best, unordered."""

    tokens: mx.array
    accepted: mx.array | None = None
    logprobs: Sequence[mx.array] = ()

    def arrays(self) -> list[mx.array]:
        arrays = [self.tokens, *self.logprobs]
        if self.accepted is not None:
            arrays.append(self.accepted)
        return arrays


@dataclass(slots=True)
class Row:
    """One sampled row: its entry, its request's sampling, and the position of the token it draws
    (a lower bound where the entry's start is one). `behind` counts the entry's sampled rows up to
    this one; `mask` has a bit for each token that may be drawn, empty: all may."""

    entry: Entry
    sampling: Sampling
    position: int
    behind: int
    mask: bytes = b""


Rows = Sequence[Row]


def rows_of(plan: Plan) -> list[Row]:
    """The sampled rows of a plan, in plan order."""
    rows = []
    for e in plan:
        sampling = e.seq.request.sampling
        first = e.start + e.count
        for i in range(e.sampled):
            row = Row(e, sampling, first + i, i + 1)
            if e.masks:
                row.mask = e.masks[i]
            rows.append(row)
    return rows


@lru_cache(256)
def seed32(seed: int, index: int) -> int:
    """The 32-bit noise key of choice `index` of a request with `seed` (any int)."""
    seed %= 1 << 128
    data = seed.to_bytes(16, "little") + index.to_bytes(2, "little")
    digest = blake2b(data, digest_size=4).digest()
    return int.from_bytes(digest, "little")


def sample(
    logits: mx.array,
    rows: Rows,
    inputs: mx.array,
    spans: Sequence[int],
    offsets: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> Sampled:
    """Lazy samples of logits [R, vocab].

    `inputs` int32 [T] are the step's input tokens, `spans[r]` the index in them of the first
    sampled row of row r's entry; `offsets` int32 [R] are added to the rows' positions; `drafts` as
    of batch.drafts_of.
    """
    asked = [row.sampling.logprobs for row in rows]
    wanted = [n for n in asked if n is not None]
    if wanted:
        logits = logits.astype(mx.float32)
    x = _add_bias(logits, rows)
    x = _penalize(x, rows, inputs, spans)
    draws = _draws(x, rows, offsets)
    tokens, accepted = sample_accept(x, draws, inputs, drafts)
    sampled = Sampled(tokens, accepted)
    if wanted:
        sampled.logprobs = _logprobs(logits, tokens, max(wanted))
    return sampled


def _logprobs(
    logits: mx.array,
    tokens: mx.array,
    k: int,
) -> list[mx.array]:
    """Sampled.logprobs: the model's own, before bias and penalties."""
    own = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(own, tokens[:, None], axis=-1)
    k = min(k, own.shape[-1] - 1)
    if not k:
        return [chosen[:, 0]]
    top = mx.argpartition(-own, k, axis=-1)
    top = top[:, :k].astype(mx.int32)
    best = mx.take_along_axis(own, top, axis=-1)
    return [chosen[:, 0], top, best]


def read(
    sampled: Sampled,
    rows: Rows,
) -> tuple[list[int], list[Logprob | None]]:
    """The step's one host read: tokens [R] and, for rows that asked, their log-probabilities."""
    tokens = np.array(sampled.tokens).tolist()
    logprobs: list[Logprob | None] = [None for _ in rows]
    if not sampled.logprobs:
        return tokens, logprobs
    chosen, *best = [np.array(each).tolist() for each in sampled.logprobs]
    for r, row in enumerate(rows):
        n = row.sampling.logprobs
        if n is None:
            continue
        top: list[tuple[int, float]] = []
        if n:
            ids, values = best
            top = list(zip(ids[r], values[r], strict=True))
            top.sort(key=lambda pair: (-pair[1], pair[0]))
        logprobs[r] = Logprob(tokens[r], chosen[r], tuple(top[:n]))
    return tokens, logprobs


def _add_bias(
    x: mx.array,
    rows: Rows,
) -> mx.array:
    at = []
    tokens = []
    values = []
    for r, row in enumerate(rows):
        for token, value in row.sampling.logit_bias:
            at.append(r)
            tokens.append(token)
            values.append(value)
    if not at:
        return x
    where = mx.array(at), mx.array(tokens)
    biases = mx.array(values, mx.float32)
    return x.astype(mx.float32).at[where].add(biases)


def _penalize(
    x: mx.array,
    rows: Rows,
    inputs: mx.array,
    spans: Sequence[int],
) -> mx.array:
    """Presence and frequency penalties count generated tokens, repetition prompt and generated ones
    (vLLM's rules; repetition is Keskar et al., arXiv 1909.05858)."""
    chosen = [r for r, row in enumerate(rows) if row.sampling.penalized]
    if not chosen:
        return x
    x = x.astype(mx.float32)
    penalized = [rows[r] for r in chosen]
    starts = [spans[r] for r in chosen]
    in_prompt, counts = _token_counts(penalized, starts, inputs, x.shape[-1])
    generated = counts > 0
    penalties = []
    for row in penalized:
        s = row.sampling
        penalties.append((s.repetition_penalty, s.frequency_penalty, s.presence_penalty))
    columns = mx.array(penalties, mx.float32).T
    repetition, frequency, presence = columns[:, :, None]
    y = _take(x, chosen)
    repeated = mx.where(y > 0, y / repetition, y * repetition)
    y = mx.where(in_prompt | generated, repeated, y)
    y = y - counts * frequency
    y = y - generated * presence
    return _put(x, chosen, y)


def _token_counts(
    rows: Rows,
    spans: Sequence[int],
    inputs: mx.array,
    vocab: int,
) -> tuple[mx.array, mx.array]:
    """For each row which tokens stand in the prompt, bool [R, vocab], and how often each was
    generated before it, float32 [R, vocab]; tokens of the step itself are counted lazily."""
    prompts = []
    outputs = []
    at: list[int] = []  # input tokens of this step that a row comes behind,
    of: list[int] = []  # and that row
    for r, row in enumerate(rows):
        seq = row.entry.seq
        first = row.position - row.behind  # the span's first token may be unread, those before not
        prompt, output = _host_counts(seq, first, vocab)
        prompts.append(prompt)
        outputs.append(output)
        for i in range(max(0, seq.prompt_len - first), row.behind):
            at.append(spans[r] + i)
            of.append(r)
    counts = mx.stack(outputs)
    if at:
        tokens = inputs[mx.array(at)]
        counts = counts.at[mx.array(of), tokens].add(1.0)
    return mx.stack(prompts), counts


def _host_counts(
    seq: Seq,
    upto: int,
    vocab: int,
) -> tuple[mx.array, mx.array]:
    """Which tokens stand in the prompt, bool [vocab], and how often each was generated before
    position `upto`, float32 [vocab]. Kept with the sequence: a step counts only what is new."""
    if seq.counts is None:
        prompt = mx.zeros((vocab,), mx.bool_)
        prompt[mx.array(seq.request.prompt)] = True
        output = mx.zeros((vocab,))
        seq.counts = seq.prompt_len, prompt, output
    counted, prompt, output = seq.counts
    if upto > counted:
        new = mx.array(seq.tokens[counted:upto])
        output = output.at[new].add(1.0)
        seq.counts = upto, prompt, output
    return prompt, output


def _draws(
    x: mx.array,
    rows: Rows,
    offsets: mx.array | None,
) -> Draws:
    """How the rows of x [R, vocab] are drawn; filters become the lowest logit that stays."""
    draws = Draws([], [], [], [], offsets)
    filtered = []
    for r, row in enumerate(rows):
        sampling = row.sampling
        temperature = sampling.temperature
        if temperature:
            temperature = max(temperature, COLDEST)
        draws.temperatures.append(temperature)
        draws.seeds.append(seed32(sampling.seed, row.entry.seq.index))
        draws.positions.append(row.position)
        draws.masks.append(row.mask)
        if sampling.filtered:
            filtered.append(r)
    if filtered:
        some = [rows[r] for r in filtered]
        masks = [row.mask for row in some]
        temperatures = [draws.temperatures[r] for r in filtered]
        y = _take(x, filtered).astype(mx.float32)
        y = allow(y, masks)
        y = y / mx.array(temperatures)[:, None]
        none = mx.full((len(rows),), -mx.inf)
        draws.min_logits = _put(none, filtered, _floors(y, some))
    return draws


def _floors(x: mx.array, rows: Rows) -> mx.array:
    """float32 [R], the lowest of x [R, vocab] that stays. A row with a small top_k ranks NARROW
    tokens alone, whichever rows it shares the batch with."""
    vocab = x.shape[-1]
    narrow = []
    wide = []
    for r, row in enumerate(rows):
        if 0 < row.sampling.top_k <= NARROW < vocab:
            narrow.append(r)
        else:
            wide.append(r)
    floors = mx.zeros((len(rows),))
    for chosen in (narrow, wide):
        if not chosen:
            continue
        y = _take(x, chosen)
        if chosen is narrow:
            y = mx.topk(y, NARROW, axis=-1)
        ranked = mx.sort(y, axis=-1)[:, ::-1]
        samplings = [rows[r].sampling for r in chosen]
        floor = _floor(ranked, samplings)
        floors = _put(floors, chosen, floor)
    return floors


def _floor(
    ranked: mx.array,
    samplings: Sequence[Sampling],
) -> mx.array:
    """float32 [R], the lowest logit that stays: top_k, then top_p over what top_k left, and min_p
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
    count = inside.sum(-1, keepdims=True)
    last = mx.clip(count, 1, top_k) - 1
    floor = mx.take_along_axis(ranked, last, axis=-1)[:, 0]
    best = ranked[:, 0]
    return mx.maximum(floor, best + mx.log(min_p))


def _take(
    x: mx.array,
    rows: list[int],
) -> mx.array:
    """These rows of x; x itself if they are all."""
    if len(rows) == len(x):
        return x
    return x[mx.array(rows)]


def _put(
    x: mx.array,
    rows: list[int],
    values: mx.array,
) -> mx.array:
    """x with other values in these rows."""
    if len(rows) == len(x):
        return values
    x[mx.array(rows)] = values
    return x
