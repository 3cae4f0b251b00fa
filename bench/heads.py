"""What drafts of trained heads read, and how often they are accepted, as others published.

Rule: nothing here was measured by this project. An acceptance and a speed have their source beside
them; what is carried over from another model, or assumed, is marked so. Sizes follow from the
formats.
"""

from dataclasses import dataclass, field
from typing import Any

WEIGHT = 4.5 / 8  # bytes of a weight in 4 bits with scale and bias, in groups of 64
HALF = 2.0  # of one in 16 bits
LAYER = 7  # matrices of a decoder layer


@dataclass(frozen=True, slots=True)
class Head:
    """Bytes that a draft reads, and in how many matrices: `block` once, by all rows of the block,
    `token` for each drafted token."""

    block: float = 0.0
    token: float = 0.0
    block_matrices: int = 0
    token_matrices: int = 0
    weights: float = field(default=0.0, compare=False)  # bytes in memory, where they are counted

    def draft(self, depth: int) -> float:
        """Bytes of a draft of `depth` tokens where a block's rows read the weights once."""
        return self.block + depth * self.token

    def matrices(self, depth: int) -> int:
        return self.block_matrices + depth * self.token_matrices


def _attention(width: int, heads: int, kv_heads: int, dim: int, reads: int = 1) -> float:
    """Weights of q, k and v, which read `reads` times the width, and of o."""
    return width * dim * (reads * (heads + 2 * kv_heads) + heads)


def mtp(text: dict[str, Any]) -> Head:
    """One layer of the target's own kind with gated attention, fc, and the target's lm_head."""
    width, dim = text["hidden_size"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    matrices = LAYER + 2
    other = 0  # experts that a token does not go through
    if experts := text.get("num_experts_per_tok"):
        expert, count = 3 * width * text["moe_intermediate_size"], text["num_experts"]
        mlp = expert * experts + width * count
        mlp += 3 * width * text["shared_expert_intermediate_size"]
        other = expert * (count - experts)
        matrices += 5  # router, shared expert and its gate
    else:
        mlp = 3 * width * text["intermediate_size"]
    own = _attention(width, heads, kv, dim) + width * heads * dim + mlp + 2 * width * width
    read = own + text["vocab_size"] * width
    return Head(0, read * WEIGHT, 0, matrices, (own + other) * WEIGHT)


def block(
    text: dict[str, Any],
    inner: int,
    layers: int = 5,
    taps: int = 5,
    rank: int = 0,
    size: float = WEIGHT,
) -> Head:
    """Layers of Qwen3's kind with 32 heads of 128, 8 for K and V, and an MLP `inner` wide; fc over
    the taps; the target's lm_head, in 4 bits; for each token DSpark's second Markov matrix, of this
    rank. `size`: bytes of a weight of the head's own."""
    width, vocab = text["hidden_size"], text["vocab_size"]
    layer = _attention(width, 32, 8, 128) + 3 * width * inner
    own = layers * layer + taps * width * width
    matrices = layers * LAYER + 2
    read = own * size + vocab * width * WEIGHT
    kept = (own + 2 * rank * vocab) * size
    return Head(read, rank * vocab * size, matrices, int(rank > 0), kept)


def eagle3(text: dict[str, Any], inner: int, vocab: int = 32_000) -> Head:
    """A layer whose q, k and v read twice the width, fc over three taps, which the verified rows
    run, and an lm_head of its own."""
    width, dim = text["hidden_size"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    layer = _attention(width, heads, kv, dim, 2) + 3 * width * inner
    token = (layer + vocab * width) * WEIGHT
    return Head(3 * width * width * WEIGHT, token, 1, LAYER + 1)


def peagle(text: dict[str, Any], inner: int, layers: int = 4, vocab: int = 32_000) -> Head:
    """EAGLE-3's first layer and plain ones after it, once for all tokens."""
    one = eagle3(text, inner, vocab)
    width, dim = text["hidden_size"], text["head_dim"]
    plain = _attention(width, text["num_attention_heads"], text["num_key_value_heads"], dim)
    more = (layers - 1) * (plain + 3 * width * inner) * WEIGHT
    return Head(one.block + one.token + more, 0, layers * LAYER + 2)


def small(weights: float, size: float = WEIGHT, layers: int = 0) -> Head:
    """A model that reads all of its weights for each token, `size` bytes each."""
    read = weights * size
    return Head(token=read, token_matrices=layers * LAYER + 1, weights=read)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A head for a target with weights of `bits`, experts of MXFP4 aside: the tokens of a round that drafts `depth`.
    `source` says where these were published; of another model or workload if it begins with
    "assumed". `published`: what others measured of the same, if anything."""

    target: str
    bits: int
    head: Head
    name: str
    depth: int
    tokens: float
    source: str
    published: str = ""


DSPARK = "mlx-dspark's docs/data/models.json and README"
RATES = "assumed: Qwen3.5-9B's, mlx-lm #990"
# Of the bandwidth: what others published of plain decoding against what is predicted at all of it.
REACHED = {
    "qwen3.8-27b": 0.8,  # 68 to 83 %: bench/chips.py
    "qwen3.6-35b-a3b": 0.6,  # 86.9 tok/s on an M4 Pro: mlx-dspark's README
    "gemma-4-12b": 0.85,  # 18.4 tok/s on an M4 Pro in 8 bits: mlx-dspark's README
    "gpt-oss-20b": 0.6,  # assumed: the other mixture of experts'
    "qwen3-4b": 0.75,  # 63 to 80 %: bench/chips.py
    "qwen3-8b": 0.8,  # assumed: the 27B's; 88 % in 8 bits
}


def pairings(texts: dict[str, dict[str, Any]], size: float = WEIGHT) -> list[Pairing]:
    """`texts` are the targets' text configs by name; `size`: bytes of a weight of Qwen3's DSpark and
    of Gemma's heads."""
    large = [*_dense(texts["qwen3.8-27b"]), *_moe(texts["qwen3.6-35b-a3b"])]
    return [*large, *_others(texts, size), *_qwen3(texts, size)]


def _dense(text: dict[str, Any]) -> list[Pairing]:
    inner = text["intermediate_size"]
    name, own, drafted = "qwen3.8-27b", mtp(text), block(text, inner)
    spark = block(text, inner, rank=256)
    user = "MTPLX #514, Splash's acceptance of a user"
    return [
        Pairing(name, 4, own, "MTP", 1, 1.86, RATES),
        Pairing(name, 4, own, "MTP", 2, 2.64, "mlx-vlm #1167", "60.7 (1.74), mlx-vlm #1167"),
        Pairing(name, 4, own, "MTP", 3, 2.98, RATES, "M5 Max 62.2, MTPLX #335"),
        Pairing(name, 4, own, "MTP", 4, 3.32, RATES + ", between 3 and 5"),
        Pairing(name, 4, drafted, "DFlash 2", 7, 5.09, DSPARK, "M4 Pro 40.0 (2.72)"),
        Pairing(name, 4, drafted, "DFlash 2, code", 7, 6.39, user, "M5 Pro 74, M3 Max 66.5"),
        Pairing(name, 4, drafted, "DFlash 2, prose", 7, 2.96, user, "M3 Max 30.7"),
        Pairing(name, 4, spark, "DSpark", 7, 4.83, DSPARK, "M4 Pro 38.6 (2.63)"),
        Pairing(name, 8, own, "MTP", 2, 2.64, "assumed: of 4 bits, mlx-vlm #1167"),
        Pairing(name, 8, drafted, "DFlash 2", 7, 5.42, DSPARK, "M4 Pro 30.8 (3.74)"),
        Pairing(name, 8, spark, "DSpark", 7, 5.55, DSPARK, "M4 Pro 31.1 (3.79)"),
    ]


def _moe(text: dict[str, Any]) -> list[Pairing]:
    name, own = "qwen3.6-35b-a3b", mtp(text)
    drafted, spark = block(text, 6144), block(text, 6144, rank=256)  # the width is assumed
    code = "assumed: the 27B's"
    return [
        Pairing(name, 4, own, "MTP", 1, 1.86, RATES, "M5 Max 162 (1.24), ollama #17454"),
        Pairing(name, 4, own, "MTP", 2, 2.50, RATES),
        Pairing(name, 4, drafted, "DFlash 2, code", 7, 6.39, code, "M5 Pro 210, Splash's README"),
        Pairing(name, 4, spark, "DSpark", 7, 4.72, DSPARK, "M4 Pro 114.5 (1.32)"),
    ]


def _others(texts: dict[str, dict[str, Any]], size: float) -> list[Pairing]:
    gemma, oss = texts["gemma-4-12b"], texts["gpt-oss-20b"]
    spark = block(gemma, gemma["intermediate_size"], rank=256, size=size)
    assistant = small(0.24e9, size, layers=4)
    cell = "mlxcel #744"
    inner = 4 * oss["hidden_size"]  # assumed
    rate = "assumed: gpt-oss-120b's on MT-Bench, P-EAGLE's paper"
    return [
        Pairing("gemma-4-12b", 4, assistant, "assistant, worst", 3, 2.05, cell, "M5 Max (1.72)"),
        Pairing("gemma-4-12b", 4, assistant, "assistant, best", 3, 3.24, cell, "M5 Max (2.43)"),
        Pairing("gemma-4-12b", 4, spark, "DSpark", 7, 4.98, "assumed: of 8 bits, mlx-dspark"),
        Pairing("gemma-4-12b", 8, spark, "DSpark", 7, 4.98, DSPARK, "M4 Pro 59.8 (3.25)"),
        Pairing("gpt-oss-20b", 8, eagle3(oss, inner), "EAGLE-3", 3, 2.2, "assumed: Qwen3's"),
        Pairing("gpt-oss-20b", 8, peagle(oss, inner), "P-EAGLE", 5, 2.68, rate),
    ]


def _qwen3(texts: dict[str, dict[str, Any]], size: float) -> list[Pairing]:
    made = []
    published = ("qwen3-8b", 3.37, "M4 Pro 64.5 (2.19)"), ("qwen3-4b", 3.23, "M4 Pro 102.5 (1.98)")
    for name, tokens, other in published:
        text = texts[name]
        spark = block(text, text["intermediate_size"], rank=256, size=size)
        source = "assumed: of 8 bits, mlx-dspark"
        made.append(Pairing(name, 4, spark, "DSpark", 7, tokens, source))
        made.append(Pairing(name, 8, spark, "DSpark", 7, tokens, DSPARK, other))
    return made
