"""A dense model of mlx-lm run row by row: any positions, any mask, sublayers left out.

Rule: the weights and modules are mlx-lm's; only the order of rows and what each of them sees are the
caller's. It is for models made as llama and qwen2 are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

KV = tuple[mx.array, mx.array]  # keys and values [1, kv_heads, S, dim] of a layer
Sublayer = tuple[int, str]  # (layer, "self_attn" or "mlp")
PARTS = ("self_attn", "mlp")


@dataclass(frozen=True, slots=True)
class Dense:
    model: Any

    @property
    def layers(self) -> list[Any]:
        return list(self.model.model.layers)

    @property
    def sublayers(self) -> list[Sublayer]:
        return [(i, part) for i in range(len(self.layers)) for part in PARTS]

    @property
    def lm_head(self) -> Callable[[mx.array], mx.array]:
        tied = self.model.model.embed_tokens.as_linear
        return tied if self.model.args.tie_word_embeddings else self.model.lm_head

    def share(self, skip: frozenset[Sublayer]) -> float:
        """The part of a step's bytes that is read without these sublayers."""
        parts = {sub: _bytes(self.layers[sub[0]][sub[1]]) for sub in self.sublayers}
        whole = sum(parts.values()) + _bytes(self.model.model.embed_tokens)
        return 1 - sum(parts[sub] for sub in skip) / whole

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        mask: mx.array | None,
        before: Sequence[KV | None],
        skip: frozenset[Sublayer] = frozenset(),
    ) -> tuple[mx.array, list[KV | None]]:
        """(logits [T, vocab], K/V of the rows by layer, None where attention is left out). `mask`
        bool [T, S + T] says what each row sees of `before` and of the rows, None: all of the former
        and the rows up to its own."""
        offset = mx.array(list(positions))
        x = self.model.model.embed_tokens(mx.array([list(tokens)]))
        made: list[KV | None] = []
        for i, (layer, kept) in enumerate(zip(self.layers, before, strict=True)):
            kv = None
            if (i, "self_attn") not in skip:
                out, kv = _attend(layer.self_attn, layer.input_layernorm(x), offset, mask, kept)
                x = x + out
            if (i, "mlp") not in skip:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            made.append(kv)
        return self.lm_head(self.model.model.norm(x))[0], made

    def read(self, tokens: Sequence[int]) -> tuple[mx.array, list[KV]]:
        """(logits [T, vocab], K/V by layer) of a whole text."""
        none = [None for _ in self.layers]
        logits, made = self(tokens, range(len(tokens)), None, none)
        mx.eval(logits, made)
        return logits, [kv for kv in made if kv is not None]


def _attend(
    attention: Any, x: mx.array, offset: mx.array, mask: mx.array | None, kept: KV | None
) -> tuple[mx.array, KV]:
    rows = x.shape[1]

    def heads(y: mx.array, count: int) -> mx.array:
        return y.reshape(rows, 1, count, -1).swapaxes(1, 2)  # a batch of rows, for their positions

    def together(y: mx.array) -> mx.array:
        return y.transpose(2, 1, 0, 3)  # [1, heads, T, dim]

    q = together(attention.rope(heads(attention.q_proj(x), attention.n_heads), offset=offset))
    k = together(attention.rope(heads(attention.k_proj(x), attention.n_kv_heads), offset=offset))
    v = together(heads(attention.v_proj(x), attention.n_kv_heads))
    keys, values = k, v
    if kept is not None:
        keys, values = mx.concatenate([kept[0], k], axis=2), mx.concatenate([kept[1], v], axis=2)
    seen = "causal" if mask is None else mask
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=attention.scale, mask=seen)
    return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(1, rows, -1)), (k, v)


def _bytes(module: nn.Module) -> int:
    leaves: Any = tree_flatten(module.parameters())
    return sum(a.nbytes for _, a in leaves)
