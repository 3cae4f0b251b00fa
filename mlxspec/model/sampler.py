"""From logits to tokens, for every row of a step at once, each by its own request's parameters.

Rule: a token is a function of (its logits, its history, the request's sampling, seed, position).
The noise is keyed by (seed, position), so neither the batch nor a drafter can change a token.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from mlxspec.kernels import Draws, sample_accept
from mlxspec.kernels.reference import allow
from mlxspec.types import COLDEST, NARROW, Entry, Logprob, Sampling
from mlxspec.types import Sequence as Seq


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
        counts = [] if self.accepted is None else [self.accepted]
        return [self.tokens, *counts, *self.logprobs]


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


def rows_of(plan: Iterable[Entry]) -> list[Row]:
    """The sampled rows of a plan, in plan order."""
    rows = []
    for e in plan:
        sampling, first = e.seq.request.sampling, e.start + e.count
        for i in range(e.sampled):
            mask = e.masks[i] if e.masks else b""
            rows.append(Row(e, sampling, first + i, i + 1, mask))
    return rows


@lru_cache(256)
def seed32(seed: int, index: int) -> int:
    """The 32-bit noise key of choice `index` of a request with `seed` (any int)."""
    data = (seed % (1 << 128)).to_bytes(16, "little") + index.to_bytes(2, "little")
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little")


def sample(
    logits: mx.array,
    rows: Sequence[Row],
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
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    x = logits.astype(mx.float32) if wanted else logits
    own = x - mx.logsumexp(x, axis=-1, keepdims=True) if wanted else x
    x = _add_bias(x, rows)
    x = _penalize(x, rows, inputs, spans)
    result = Sampled(*sample_accept(x, _draws(x, rows, offsets), inputs, drafts))
    if wanted:
        chosen = mx.take_along_axis(own, result.tokens[:, None], axis=-1)
        result.logprobs = [chosen[:, 0]]
        k = min(max(wanted), x.shape[-1] - 1)
        if k:
            top = mx.argpartition(-own, k, axis=-1)[:, :k].astype(mx.int32)
            result.logprobs += [top, mx.take_along_axis(own, top, axis=-1)]
    return result


def read(sampled: Sampled, rows: Sequence[Row]) -> tuple[list[int], list[Logprob | None]]:
    """The step's one host read: tokens [R] and, for rows that asked, their log-probabilities."""
    mx.eval(sampled.arrays())
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
            pairs = zip(*(each[r] for each in best), strict=True)
            top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        logprobs[r] = Logprob(tokens[r], chosen[r], tuple(top[:n]))
    return tokens, logprobs


def _add_bias(x: mx.array, rows: Sequence[Row]) -> mx.array:
    at, tokens, values = [], [], []
    for r, row in enumerate(rows):
        for token, value in row.sampling.logit_bias:
            at.append(r)
            tokens.append(token)
            values.append(value)
    if not at:
        return x
    where = mx.array(at), mx.array(tokens)
    return x.astype(mx.float32).at[where].add(mx.array(values, mx.float32))


def _penalize(x: mx.array, rows: Sequence[Row], inputs: mx.array, spans: Sequence[int]) -> mx.array:
    """Presence and frequency penalties count generated tokens, repetition prompt and generated ones
    (vLLM's rules; repetition is Keskar et al., arXiv 1909.05858)."""
    chosen = [r for r, row in enumerate(rows) if row.sampling.penalized]
    if not chosen:
        return x
    x = x.astype(mx.float32)
    some = [rows[r] for r in chosen]
    in_prompt, counts = _token_counts(some, [spans[r] for r in chosen], inputs, x.shape[-1])
    seen = in_prompt | (counts > 0)
    asked = [row.sampling for row in some]
    repetition = mx.array([each.repetition_penalty for each in asked])[:, None]
    frequency = mx.array([each.frequency_penalty for each in asked])[:, None]
    presence = mx.array([each.presence_penalty for each in asked])[:, None]
    y = _take(x, chosen)
    y = mx.where(seen, mx.where(y > 0, y / repetition, y * repetition), y)
    y = y - counts * frequency - (counts > 0) * presence
    return _put(x, chosen, y)


def _token_counts(
    rows: Sequence[Row], spans: Sequence[int], inputs: mx.array, vocab: int
) -> tuple[mx.array, mx.array]:
    """For each row which tokens stand in the prompt, bool [R, vocab], and how often each was
    generated before it, float32 [R, vocab]; tokens of the step itself are counted lazily."""
    prompts, outputs = [], []
    at: list[int] = []  # input tokens of this step that a row comes behind,
    of: list[int] = []  # and that row
    for r, (row, span) in enumerate(zip(rows, spans, strict=True)):
        seq = row.entry.seq
        first = row.position - row.behind  # the span's first token may be unread, those before not
        prompt, output = _host_counts(seq, first, vocab)
        prompts.append(prompt)
        outputs.append(output)
        for i in range(max(0, seq.prompt_len - first), row.behind):
            at.append(span + i)
            of.append(r)
    counts = mx.stack(outputs)
    if at:
        counts = counts.at[mx.array(of), inputs[mx.array(at)]].add(1.0)
    return mx.stack(prompts), counts


def _host_counts(seq: Seq, upto: int, vocab: int) -> tuple[mx.array, mx.array]:
    """Which tokens stand in the prompt, bool [vocab], and how often each was generated before
    position `upto`, float32 [vocab]. Kept with the sequence: a step counts only what is new."""
    if seq.counts is None:
        prompt = mx.zeros((vocab,), mx.bool_)
        prompt[mx.array(seq.request.prompt)] = True
        seq.counts = seq.prompt_len, prompt, mx.zeros((vocab,))
    counted, prompt, output = seq.counts
    if upto > counted:
        output = output.at[mx.array(seq.tokens[counted:upto])].add(1.0)
        seq.counts = upto, prompt, output
    return prompt, output


def _draws(x: mx.array, rows: Sequence[Row], offsets: mx.array | None) -> Draws:
    """How the rows of x [R, vocab] are drawn; filters become the lowest logit that stays."""
    draws = Draws([], [], [], [], offsets)
    filtered = []
    for r, row in enumerate(rows):
        temperature = row.sampling.temperature
        draws.temperatures.append(max(temperature, COLDEST) if temperature else 0.0)
        draws.seeds.append(seed32(row.sampling.seed, row.entry.seq.index))
        draws.positions.append(row.position)
        draws.masks.append(row.mask)
        if row.sampling.filtered:
            filtered.append(r)
    if filtered:
        some = [rows[r] for r in filtered]
        y = allow(_take(x, filtered).astype(mx.float32), [row.mask for row in some])
        y = y / mx.array([draws.temperatures[r] for r in filtered])[:, None]
        draws.floors = _put(mx.full((len(rows),), -mx.inf), filtered, _floors(y, some))
    return draws


def _floors(x: mx.array, rows: Sequence[Row]) -> mx.array:
    """float32 [R], the lowest of x [R, vocab] that stays. A row with a small top_k ranks NARROW
    tokens alone, whichever rows it shares the batch with."""
    vocab = x.shape[-1]
    narrow, wide = [], []
    for r, row in enumerate(rows):
        if 0 < row.sampling.top_k <= NARROW < vocab:
            narrow.append(r)
        else:
            wide.append(r)
    floors = mx.zeros((len(rows),))
    for chosen in (narrow, wide):
        if chosen:
            y = _take(x, chosen)
            if chosen is narrow:
                y = mx.topk(y, NARROW, axis=-1)
            ranked = mx.sort(y, axis=-1)[:, ::-1]
            floor = _floor(ranked, [rows[r].sampling for r in chosen])
            floors = _put(floors, chosen, floor)
    return floors


def _floor(ranked: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """float32 [R], the lowest logit that stays: top_k, then top_p over what top_k left, and min_p
    relative to the best; ties at a threshold stay. `ranked` [R, n]: the n >= top_k best, sorted."""
    n = ranked.shape[-1]
    top_k = mx.array([min(s.top_k or n, n) for s in samplings])[:, None]
    # 2 where top_p is off: a sum that rounds to 1 must not cut the tail
    top_p = mx.array([s.top_p if s.top_p < 1 else 2.0 for s in samplings])[:, None]
    min_p = mx.array([math.log(s.min_p) if s.min_p else -math.inf for s in samplings])
    probs = mx.softmax(mx.where(mx.arange(n) < top_k, ranked, -mx.inf), axis=-1, precise=True)
    better = mx.cumsum(probs, axis=-1) - probs  # mass of the better tokens
    count = ((better < top_p) & (probs > 0)).sum(-1, keepdims=True)
    last = mx.maximum(mx.minimum(count, top_k), 1) - 1
    floor = mx.take_along_axis(ranked, last, axis=-1)[:, 0]
    return mx.maximum(floor, ranked[:, 0] + min_p)


def _take(x: mx.array, rows: list[int]) -> mx.array:
    """These rows of x; x itself if they are all."""
    return x if len(rows) == len(x) else x[mx.array(rows)]


def _put(x: mx.array, rows: list[int], values: mx.array) -> mx.array:
    """x with other values in these rows."""
    if len(rows) == len(x):
        return values
    x[mx.array(rows)] = values
    return x
