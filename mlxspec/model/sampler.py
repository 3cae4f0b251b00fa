"""From logits to tokens, for every row of a step at once, each by its own request's parameters.

Rule: a token is a function of (its logits, its history, the request's sampling, seed, position).
The noise is keyed by (seed, position), so neither the batch nor a drafter can change what is drawn.
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
    """Lazy results of a step. `tokens` int32 [R]; `kept` int32 [sampling entries], how many drafted
    tokens stand, if something was drafted; the rest only if some row asked for
    log-probabilities."""

    tokens: mx.array
    kept: mx.array | None = None
    chosen: mx.array | None = None  # [R] float32
    top: mx.array | None = None  # [R, k] int32, unordered
    top_logprobs: mx.array | None = None  # [R, k]

    def arrays(self) -> list[mx.array]:
        return [
            a
            for a in (self.tokens, self.kept, self.chosen, self.top, self.top_logprobs)
            if a is not None
        ]


@dataclass(slots=True)
class Row:
    """One sampled row: its entry, its request's sampling, and the position of the token that it
    draws; where the entry's start is a lower bound, so is the position."""

    entry: Entry
    sampling: Sampling
    position: int
    # rows of the step's input, up to and including this one, that are this entry's sampled span
    behind: int
    mask: bytes = b""  # the tokens that may be drawn, a bit each; empty: all


def rows_of(plan: Sequence[Entry]) -> list[Row]:
    """The sampled rows of a plan, in plan order."""
    return [
        Row(e, e.seq.request.sampling, e.start + e.count + i, i + 1, e.masks[i] if e.masks else b"")
        for e in plan
        for i in range(e.sampled)
    ]


@lru_cache(256)
def seed32(seed: int, index: int) -> int:
    """The 32-bit noise key of choice `index` of a request with `seed` (any int). Choices are
    independent."""
    data = (seed % (1 << 128)).to_bytes(16, "little") + index.to_bytes(2, "little")
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little")


def sample(
    logits: mx.array,
    rows: Sequence[Row],
    inputs: mx.array,
    spans: Sequence[int],
    late: mx.array | None = None,
    drafts: Sequence[tuple[int, int]] = (),
) -> Sampled:
    """logits [R, vocab] of `rows`; `inputs` [T] are the step's input tokens (maybe lazy) and
    `spans[r]` the index in it of the first sampled row of row r's entry; `late` int32 [R], if
    given, is added to the rows' positions; `drafts` as of drafts_of. Nothing is evaluated here."""
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    x = logits.astype(mx.float32) if wanted else logits
    logprobs = x - mx.logsumexp(x, axis=-1, keepdims=True) if wanted else None
    x = _penalize(_bias(x, rows), rows, inputs, spans)
    tokens, kept = sample_accept(x, _draws(x, rows, late), inputs, drafts)
    result = Sampled(tokens, kept)
    if logprobs is not None:
        result.chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        if k := min(max(wanted), x.shape[-1] - 1):
            result.top = mx.argpartition(-logprobs, k, axis=-1)[:, :k].astype(mx.int32)
            result.top_logprobs = mx.take_along_axis(logprobs, result.top, axis=-1)
    return result


def drafts_of(plan: Sequence[Entry], spans: Sequence[int]) -> list[tuple[int, int]]:
    """Where the drafts of the entries that sample lie in the step's input, as sample_accept takes
    them; [] where nothing was drafted."""
    drafts = [(span + 1, len(e.draft)) for e, span in zip(plan, spans, strict=True) if e.samples]
    return drafts if any(count for _, count in drafts) else []


def read(sampled: Sampled, rows: Sequence[Row]) -> tuple[list[int], list[list[Logprob]]]:
    """The step's one host read: tokens [R] and, for rows that asked, their log-probabilities."""
    mx.eval(sampled.arrays())
    tokens = np.array(sampled.tokens).tolist()
    if sampled.chosen is None:
        return tokens, [[] for _ in rows]
    chosen = np.array(sampled.chosen).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in rows]
    if sampled.top is not None:
        ids, values = np.array(sampled.top), np.array(sampled.top_logprobs)
        order = np.lexsort((ids, -values), axis=-1)
        ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
        tops = [
            list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
        ]
    return tokens, [
        [] if (n := row.sampling.logprobs) is None else [Logprob(t, p, tuple(top[:n]))]
        for row, t, p, top in zip(rows, tokens, chosen, tops, strict=True)
    ]


def _bias(x: mx.array, rows: Sequence[Row]) -> mx.array:
    pairs = [
        (r, token, value) for r, row in enumerate(rows) for token, value in row.sampling.logit_bias
    ]
    if not pairs:
        return x
    at, token, value = (mx.array(list(column)) for column in zip(*pairs, strict=True))
    return x.astype(mx.float32).at[at, token].add(value.astype(mx.float32))


def _penalize(x: mx.array, rows: Sequence[Row], inputs: mx.array, spans: Sequence[int]) -> mx.array:
    """Presence and frequency count generated tokens, repetition prompt and generated ones (vLLM's
    rules; repetition is Keskar et al., arXiv 1909.05858)."""
    chosen = [r for r, row in enumerate(rows) if row.sampling.penalized]
    if not chosen:
        return x
    x, some = x.astype(mx.float32), len(chosen) < len(rows)
    y = x[mx.array(chosen)] if some else x
    base: dict[Seq, tuple[int, mx.array, mx.array]] = {}
    owners, spread, at = (
        list[int](),
        list[int](),
        list[int](),
    )  # of rows; of a span's tokens, which are `at`
    for i, r in enumerate(chosen):
        row, seq = rows[r], rows[r].entry.seq
        first = (
            row.position - row.behind
        )  # the span's first token may be unread; those before it are not
        if seq not in base:
            base[seq] = len(base), *_counts(seq, first, x.shape[-1])
        owners.append(base[seq][0])
        span = range(
            spans[r] + max(0, seq.prompt_len - first), spans[r] + row.behind
        )  # without the prompt's
        at += span
        spread += [i] * len(span)
    told, said = (
        mx.stack(each)[mx.array(owners)]
        for each in zip(*(b[1:] for b in base.values()), strict=True)
    )
    output = said.at[mx.array(spread), inputs[mx.array(at)]].add(1.0) if at else said
    seen = told | (output > 0)

    def column(value: Callable[[Sampling], float]) -> mx.array:
        return mx.array([value(rows[r].sampling) for r in chosen])[:, None]

    repetition = column(lambda s: s.repetition_penalty)
    y = mx.where(seen, mx.where(y > 0, y / repetition, y * repetition), y)
    y = (
        y
        - output * column(lambda s: s.frequency_penalty)
        - (output > 0) * column(lambda s: s.presence_penalty)
    )
    if not some:
        return y
    x[mx.array(chosen)] = y
    return x


def _counts(seq: Seq, upto: int, vocab: int) -> tuple[mx.array, mx.array]:
    """Which tokens stand in the prompt, bool [vocab], and how often each was generated before the
    position `upto`, float32 [vocab]. Kept with the sequence: a step counts what is new, whatever
    the context."""
    if seq.counts is None:
        told = mx.zeros((vocab,), mx.bool_)
        told[mx.array(np.unique(np.array(seq.request.prompt, np.int32)))] = True
        seq.counts = seq.prompt_len, told, mx.zeros((vocab,))
    counted, told, said = seq.counts
    if upto > counted:
        said = said.at[mx.array(seq.tokens[counted:upto])].add(1.0)
        seq.counts = upto, told, said
    return told, said


def _draws(x: mx.array, rows: Sequence[Row], late: mx.array | None) -> Draws:
    """How the rows of x [R, vocab] are drawn; the rows that filter are ranked here."""
    temperatures = [max(t, COLDEST) if (t := row.sampling.temperature) > 0 else 0.0 for row in rows]
    seeds = [
        seed32(r.sampling.seed, r.entry.seq.index) if r.sampling.temperature > 0 else 0
        for r in rows
    ]
    draws = Draws(temperatures, seeds, [r.position for r in rows], [r.mask for r in rows], late)
    cut = [r for r, row in enumerate(rows) if temperatures[r] and row.sampling.filtered]
    if cut:
        at, some = mx.array(cut), len(cut) < len(rows)
        y = allow((x[at] if some else x).astype(mx.float32), [rows[r].mask for r in cut])
        floors = _floors(
            y / mx.array([temperatures[r] for r in cut])[:, None], [rows[r] for r in cut]
        )[:, 0]
        draws.floors = floors
        if some:
            draws.floors = mx.full((len(rows),), -mx.inf)
            draws.floors[at] = floors
    return draws


def _floors(x: mx.array, rows: Sequence[Row]) -> mx.array:
    """float32 [R, 1], the smallest of x [R, vocab] that stay: top_k, then top_p over what top_k
    left, and min_p relative to the best; ties at a threshold stay.

    A row whose top_k is small ranks NARROW tokens alone, whoever is in the batch with it."""
    vocab = x.shape[-1]
    few = [i for i, row in enumerate(rows) if 0 < row.sampling.top_k <= NARROW < vocab]
    if not few:
        return _floor(mx.sort(x, axis=-1)[:, ::-1], rows)
    rest = sorted(set(range(len(rows))) - set(few))
    floor = mx.zeros((len(rows), 1), mx.float32)
    at = mx.array(few)
    ranked = mx.sort(mx.topk(x[at], NARROW, axis=-1), axis=-1)[:, ::-1]
    floor[at] = _floor(ranked, [rows[i] for i in few])
    if rest:
        at = mx.array(rest)
        floor[at] = _floor(mx.sort(x[at], axis=-1)[:, ::-1], [rows[i] for i in rest])
    return floor


def _floor(ranked: mx.array, rows: Sequence[Row]) -> mx.array:
    """The smallest logit that stays, float32 [R, 1]. `ranked` [R, n] are the best n >= top_k, best
    first."""
    vocab = ranked.shape[-1]
    ks = mx.array([min(r.sampling.top_k or vocab, vocab) for r in rows])[:, None]
    ranked_kept = mx.where(mx.arange(vocab)[None] < ks, ranked, -mx.inf)
    probs = mx.softmax(ranked_kept, axis=-1, precise=True)
    # a sum that rounds to 1 must not cut a tail that nobody asked to cut
    mass = mx.array([r.sampling.top_p if r.sampling.top_p < 1 else 2.0 for r in rows])[:, None]
    before = mx.cumsum(probs, axis=-1) - probs  # mass of better tokens
    last = ((before < mass) & (probs > 0)).sum(-1, keepdims=True)
    floor = mx.take_along_axis(ranked, mx.maximum(mx.minimum(last, ks), 1) - 1, axis=-1)
    ratio = mx.array(
        [np.log(r.sampling.min_p) if r.sampling.min_p else -np.inf for r in rows], mx.float32
    )
    return mx.maximum(floor, ranked[:, :1] + ratio[:, None])
