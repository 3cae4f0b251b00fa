"""How long a step takes: the bytes that it reads at the chip's bandwidth, by what its rows cost.

Rule: a prediction. Sampling, launches and Python are left out.
"""

from dataclasses import dataclass, field

from bench.chips import Curve
from bench.heads import Head, Pairing


@dataclass(frozen=True, slots=True)
class Model:
    """What steps read, in bytes: `dense` weights by every step; `experts` weights in all, of which
    a row takes `chosen` (part of 1); K/V of one `token` in layers with full attention, and (window
    in tokens, bytes of one token) in those with a window; `state` of one sequence in recurrent
    ones."""

    dense: int
    token: int
    experts: int = 0
    chosen: float = 0.0
    windows: tuple[tuple[int, int], ...] = ()
    state: int = 0
    matrices: int = field(default=0, compare=False)  # of weights that a step multiplies with
    weights: int = field(default=0, compare=False)  # bytes in memory, those of embeddings too
    mode: str = field(default="affine", compare=False)  # of mx.quantize, of the experts

    def read(self, rows: int, context: int, curve: Curve) -> float:
        """Bytes that a step with `rows` rows of one sequence after `context` tokens is charged
        for. K/V are read once for all rows; a state is read and written."""
        part = 1 - (1 - self.chosen) ** rows if curve.shared else self.chosen * rows
        weights = self.dense * curve.at(rows) + self.experts * part * curve.expert
        return weights + self.kept(context)

    def kept(self, context: int) -> int:
        """Bytes of its own that a step reads and writes for one sequence."""
        return self.cached(context) + 2 * self.state

    def cached(self, context: int) -> int:
        """Bytes of one sequence's K/V."""
        windows = sum(size * min(context, window) for window, size in self.windows)
        return self.token * context + windows


def speed(
    model: Model,
    bandwidth: float,
    context: int,
    depth: int,
    tokens: float,
    curve: Curve,
    draft: float = 0.0,
    reached: float = 1.0,
) -> float:
    """Tokens per second where a round drafts `depth` tokens and gives `tokens`. `bandwidth` in
    GB/s, `reached` the part of it that is; a drafted token costs `draft` plain steps. Raises
    ValueError for what cannot be."""
    if not 1 <= tokens <= depth + 1:
        raise ValueError(f"a round that drafts {depth} gives 1 to {depth + 1} tokens, not {tokens}")
    if bandwidth <= 0 or not 0 < reached <= 1 or context < 0 or draft < 0:
        raise ValueError(
            "bandwidth and its part must be above 0, the part at most 1, context and draft not below 0"
        )
    read = model.read(depth + 1, context, curve) + depth * draft * model.read(1, context, curve)
    return tokens * bandwidth * 1e9 * reached / read


def batch_speed(model: Model, requests: int, width: float, context: int, curve: Curve) -> float:
    """Tokens per second of all `requests`, a row each, at `width` bytes per second."""
    read = model.read(requests, context, curve) + (requests - 1) * model.kept(context)
    return requests * width / read


def round_bytes(model: Model, head: Head, depth: int, context: int, curve: Curve) -> float:
    """Bytes that a round is charged for which drafts `depth` tokens with the head and verifies
    them."""
    read = model.read(depth + 1, context, curve)
    if depth:
        read += head.block * curve.at(depth + 1) + depth * head.token
    return read


def head_speed(model: Model, p: Pairing, width: float, context: int, curve: Curve) -> float:
    """Tokens per second at `width` bytes per second and at the depth that is best, up to that of
    the pairing, if each token is accepted with the same chance."""
    chance = fitted(p.tokens, p.depth)
    found = []
    for depth in range(p.depth + 1):
        read = round_bytes(model, p.head, depth, context, curve)
        found.append(expected(chance, depth) * width / read)
    return max(found)


def expected(p: float, depth: int) -> float:
    """Tokens of a round that drafts `depth` tokens, each accepted with chance `p` if those before
    it were."""
    return sum(p**i for i in range(depth + 1))


def fitted(tokens: float, depth: int) -> float:
    """The chance with which a round that drafts `depth` tokens gives so many."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if expected(middle, depth) < tokens:
            low = middle
        else:
            high = middle
    return low
