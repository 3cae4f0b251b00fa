"""From logits to tokens, for every row of a step at once, each by its own request's parameters.

Rule: a token is a function of (its logits, its history, the request's sampling, seed, position).
The noise is keyed by (seed, position), so neither the batch nor a drafter can change a token.
"""

from collections.abc import Callable, Sequence
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
    drafted tokens were accepted, None if nothing was drafted; the log-probabilities only if some
    row asked for them: of the sampled tokens [R], and of the k best [R, k], unordered."""

    tokens: mx.array
    accepted: mx.array | None = None
    chosen: mx.array | None = None
    top: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        some = (self.tokens, self.accepted, self.chosen, self.top, self.top_logprobs)
        return [a for a in some if a is not None]


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


def rows_of(plan: Sequence[Entry]) -> list[Row]:
    """The sampled rows of a plan, in plan order."""
    rows = []
    for e in plan:
        for i in range(e.sampled):
            mask = e.masks[i] if e.masks else b""
            rows.append(Row(e, e.seq.request.sampling, e.start + e.count + i, i + 1, mask))
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
    of drafts_of.
    """
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    x = logits.astype(mx.float32) if wanted else logits
    logprobs = x - mx.logsumexp(x, axis=-1, keepdims=True) if wanted else None
    x = _penalize(_add_bias(x, rows), rows, inputs, spans)
    tokens, accepted = sample_accept(x, _draws(x, rows, offsets), inputs, drafts)
    result = Sampled(tokens, accepted)
    if logprobs is not None:
        result.chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        k = min(max(wanted), x.shape[-1] - 1)
        if k:
            result.top = mx.argpartition(-logprobs, k, axis=-1)[:, :k].astype(mx.int32)
            result.top_logprobs = mx.take_along_axis(logprobs, result.top, axis=-1)
    return result


def drafts_of(plan: Sequence[Entry], spans: Sequence[int]) -> list[tuple[int, int]]:
    """(first index in the step's input, length) of each sampling entry's draft; [] if there is
    none."""
    drafts = [(span + 1, len(e.draft)) for e, span in zip(plan, spans, strict=True) if e.samples]
    return drafts if any(length for _, length in drafts) else []


def read(sampled: Sampled, rows: Sequence[Row]) -> tuple[list[int], list[list[Logprob]]]:
    """The step's one host read: tokens [R] and, for rows that asked, their log-probabilities."""
    mx.eval(sampled.arrays())
    tokens = np.array(sampled.tokens).tolist()
    if sampled.chosen is None:
        return tokens, [[] for _ in rows]
    chosen = np.array(sampled.chosen).tolist()
    best: list[list[tuple[int, float]]] = [[] for _ in rows]
    if sampled.top is not None:
        ids, values = np.array(sampled.top), np.array(sampled.top_logprobs)
        order = np.lexsort((ids, -values), axis=-1)
        ids = np.take_along_axis(ids, order, -1).tolist()
        values = np.take_along_axis(values, order, -1).tolist()
        best = [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
    logprobs: list[list[Logprob]] = []
    for row, token, logprob, top in zip(rows, tokens, chosen, best, strict=True):
        n = row.sampling.logprobs
        logprobs.append([] if n is None else [Logprob(token, logprob, tuple(top[:n]))])
    return tokens, logprobs


def _add_bias(x: mx.array, rows: Sequence[Row]) -> mx.array:
    biases = [(r, token, v) for r, row in enumerate(rows) for token, v in row.sampling.logit_bias]
    if not biases:
        return x
    at, token, value = (mx.array(list(column)) for column in zip(*biases, strict=True))
    return x.astype(mx.float32).at[at, token].add(value.astype(mx.float32))


def _penalize(x: mx.array, rows: Sequence[Row], inputs: mx.array, spans: Sequence[int]) -> mx.array:
    """Presence and frequency penalties count generated tokens, repetition prompt and generated ones
    (vLLM's rules; repetition is Keskar et al., arXiv 1909.05858)."""
    chosen = [r for r, row in enumerate(rows) if row.sampling.penalized]
    if not chosen:
        return x
    x = x.astype(mx.float32)
    penalized = [rows[r] for r in chosen]
    in_prompt, generated = _token_counts(penalized, [spans[r] for r in chosen], inputs, x.shape[-1])

    def column(value: Callable[[Sampling], float]) -> mx.array:
        return mx.array([value(row.sampling) for row in penalized])[:, None]

    everything = len(chosen) == len(rows)
    y = x if everything else x[mx.array(chosen)]
    seen = in_prompt | (generated > 0)
    repetition = column(lambda s: s.repetition_penalty)
    y = mx.where(seen, mx.where(y > 0, y / repetition, y * repetition), y)
    frequency = generated * column(lambda s: s.frequency_penalty)
    presence = (generated > 0) * column(lambda s: s.presence_penalty)
    y = y - frequency - presence
    if everything:
        return y
    x[mx.array(chosen)] = y
    return x


def _token_counts(
    rows: Sequence[Row], spans: Sequence[int], inputs: mx.array, vocab: int
) -> tuple[mx.array, mx.array]:
    """For each row which tokens stand in the prompt, bool [R, vocab], and how often each was
    generated before it, float32 [R, vocab]; tokens of the step itself are counted lazily."""
    index: dict[Seq, int] = {}
    prompts: list[mx.array] = []
    outputs: list[mx.array] = []
    owners: list[int] = []  # of the rows, among the sequences
    at: list[int] = []  # input tokens of this step that a row comes behind,
    of: list[int] = []  # and that row
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        seq = row.entry.seq
        first = row.position - row.behind  # the span's first token may be unread, those before not
        if seq not in index:
            index[seq] = len(index)
            prompt, output = _host_counts(seq, first, vocab)
            prompts.append(prompt)
            outputs.append(output)
        owners.append(index[seq])
        generated = range(span + max(0, seq.prompt_len - first), span + row.behind)
        at += generated
        of += [i for _ in generated]
    owner = mx.array(owners)
    in_prompt, counts = mx.stack(prompts)[owner], mx.stack(outputs)[owner]
    if at:
        counts = counts.at[mx.array(of), inputs[mx.array(at)]].add(1.0)
    return in_prompt, counts


def _host_counts(seq: Seq, upto: int, vocab: int) -> tuple[mx.array, mx.array]:
    """Which tokens stand in the prompt, bool [vocab], and how often each was generated before
    position `upto`, float32 [vocab]. Kept with the sequence: a step counts only what is new."""
    if seq.counts is None:
        prompt = mx.zeros((vocab,), mx.bool_)
        prompt[mx.array(np.unique(np.array(seq.request.prompt, np.int32)))] = True
        seq.counts = seq.prompt_len, prompt, mx.zeros((vocab,))
    counted, prompt, output = seq.counts
    if upto > counted:
        output = output.at[mx.array(seq.tokens[counted:upto])].add(1.0)
        seq.counts = upto, prompt, output
    return prompt, output


def _draws(x: mx.array, rows: Sequence[Row], offsets: mx.array | None) -> Draws:
    """How the rows of x [R, vocab] are drawn; filters become the lowest logit that stays."""
    temperatures, seeds = [], []
    for row in rows:
        sampling = row.sampling
        greedy = sampling.temperature == 0
        temperatures.append(0.0 if greedy else max(sampling.temperature, COLDEST))
        seeds.append(0 if greedy else seed32(sampling.seed, row.entry.seq.index))
    positions, masks = [row.position for row in rows], [row.mask for row in rows]
    draws = Draws(temperatures, seeds, positions, masks, offsets)
    filtered = [r for r, row in enumerate(rows) if temperatures[r] and row.sampling.filtered]
    if not filtered:
        return draws
    at, everything = mx.array(filtered), len(filtered) == len(rows)
    y = allow((x if everything else x[at]).astype(mx.float32), [masks[r] for r in filtered])
    y = y / mx.array([temperatures[r] for r in filtered])[:, None]
    floors = _floors(y, [rows[r] for r in filtered])[:, 0]
    if everything:
        draws.floors = floors
    else:
        draws.floors = mx.full((len(rows),), -mx.inf)
        draws.floors[at] = floors
    return draws


def _floors(x: mx.array, rows: Sequence[Row]) -> mx.array:
    """float32 [R, 1], the lowest of x [R, vocab] that stays: top_k, then top_p over what top_k
    left, and min_p relative to the best; ties at a threshold stay. A row with a small top_k ranks
    NARROW tokens alone, whichever rows it shares the batch with."""
    vocab = x.shape[-1]
    narrow = [i for i, row in enumerate(rows) if 0 < row.sampling.top_k <= NARROW < vocab]
    if not narrow:
        return _floor(mx.sort(x, axis=-1)[:, ::-1], rows)
    floors = mx.zeros((len(rows), 1), mx.float32)
    at = mx.array(narrow)
    ranked = mx.sort(mx.topk(x[at], NARROW, axis=-1), axis=-1)[:, ::-1]
    floors[at] = _floor(ranked, [rows[i] for i in narrow])
    rest = sorted(set(range(len(rows))) - set(narrow))
    if rest:
        at = mx.array(rest)
        floors[at] = _floor(mx.sort(x[at], axis=-1)[:, ::-1], [rows[i] for i in rest])
    return floors


def _floor(ranked: mx.array, rows: Sequence[Row]) -> mx.array:
    """The lowest logit that stays, float32 [R, 1]. `ranked` [R, n]: the n >= top_k best, sorted."""
    vocab = ranked.shape[-1]
    top_k = mx.array([min(row.sampling.top_k or vocab, vocab) for row in rows])[:, None]
    kept = mx.where(mx.arange(vocab)[None] < top_k, ranked, -mx.inf)
    probs = mx.softmax(kept, axis=-1, precise=True)
    # 2 where top_p is off: a sum that rounds to 1 must not cut the tail
    top_p = [row.sampling.top_p if row.sampling.top_p < 1 else 2.0 for row in rows]
    better = mx.cumsum(probs, axis=-1) - probs  # mass of the better tokens
    last = ((better < mx.array(top_p)[:, None]) & (probs > 0)).sum(-1, keepdims=True)
    floor = mx.take_along_axis(ranked, mx.maximum(mx.minimum(last, top_k), 1) - 1, axis=-1)
    min_p = [np.log(row.sampling.min_p) if row.sampling.min_p else -np.inf for row in rows]
    return mx.maximum(floor, ranked[:, :1] + mx.array(min_p, mx.float32)[:, None])
