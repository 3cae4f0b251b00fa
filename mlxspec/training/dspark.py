"""A new DSpark head (DeepSeek), in the speculators format, and what it drafts of a batch.

Each of its layers starts as the target's last, with the largest neurons of that MLP; K and V of
the context are made of the hidden state before it.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlxspec.model.pages import View
from mlxspec.speculate.heads.block import AUX_LAYERS
from mlxspec.speculate.heads.block_pass import block_mask
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.training.target import START, Batch, Target
from mlxspec.types import Json

BLOCK = 5  # tokens of a draft
RANK = 32  # of the Markov head
STRIDE = 4  # positions between two drafts that are trained on
LAYERS = 3
NARROWER = 4  # than the target's MLP: more layers that read the context are worth more


def dspark_config(
    target: Target,
    vocabulary: Sequence[int],
) -> Json:
    """config.json of a head that drafts the tokens `vocabulary`."""
    pad = target.config.get("pad_token_id")
    layer = target.layer_config()
    layer["intermediate_size"] //= NARROWER
    layer |= {"model_type": "qwen3", "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    # Rows of a block see those before them, so that a shorter draft is the beginning of a longer
    # one; the format has this for sliding layers only.
    layer |= {
        "layer_types": ["sliding_attention"] * LAYERS,
        "use_sliding_window": True,
        "sliding_window": layer["max_position_embeddings"],
    }
    return target.head_config("dspark", layer, len(vocabulary), BLOCK) | {
        "architectures": ["DSparkSpeculator"],
        "block_size": BLOCK,
        "mask_token_id": pad if isinstance(pad, int) else 0,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        AUX_LAYERS: target.read_layers,
    }


def dspark_tensors(
    target: Target,
    config: Json,
) -> dict[str, mx.array]:
    """Its weights before training, without lm_head."""
    layer = config["transformer_layer_config"]
    wide = target.layer_config()["intermediate_size"]
    warm = _narrowed(target.last_layer(layer | {"intermediate_size": wide}), wide // NARROWER)
    made = {f"layers.{i}.{name}": array for name, array in warm.items() for i in range(LAYERS)}
    return (
        target.head_tensors()
        | made
        | {
            "hidden_norm.weight": warm["input_layernorm.weight"],
            "markov_head.markov_w1.weight": mx.random.normal(
                (target.vocab, RANK), scale=START, key=mx.random.key(0)
            ),
            "markov_head.markov_w2.weight": mx.zeros((config["draft_vocab_size"], RANK)),
        }
    )


def _narrowed(
    warm: dict[str, mx.array],
    size: int,
) -> dict[str, mx.array]:
    """A layer's weights with only the `size` largest neurons of its MLP."""
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    norms = mx.linalg.norm(warm[up], axis=1) * mx.linalg.norm(warm[down], axis=0)
    kept = mx.argsort(-norms)[:size]
    narrow = {gate: warm[gate][kept], up: warm[up][kept], down: warm[down][:, kept]}
    return warm | narrow


class Repeated:
    """In the place of a layer's pages and cache while blocks are trained: K and V of B sequences of
    L tokens, of which the block behind each of the `anchors` [n] has a copy."""

    def __init__(
        self,
        view: View,
        anchors: mx.array,
        size: int,
    ) -> None:
        self.view = view
        self.size = size
        self.anchors = len(anchors)
        self.offset = mx.tile(anchors, size)

    def write(
        self,
        k: mx.array,
        v: mx.array,
    ) -> None:
        """k, v: [B * L, kv_heads, 1, D]."""
        self.keys, self.values = self._copies(k), self._copies(v)

    def _copies(self, x: mx.array) -> mx.array:
        """[B * n, kv_heads, L, D]."""
        x = x.reshape(self.size, -1, x.shape[1], x.shape[3]).swapaxes(1, 2)
        return mx.repeat(x, self.anchors, axis=0)

    def update_and_fetch(
        self,
        k: mx.array,
        v: mx.array,
    ) -> tuple[mx.array, mx.array]:
        return mx.concatenate([self.keys, k], axis=2), mx.concatenate([self.values, v], axis=2)


def dspark_drafts(
    head: HeadModel,
    batch: Batch,
) -> Iterator[tuple[mx.array, mx.array]]:
    """For each token of a draft the logits [B, n, draft vocabulary] and the positions [n] whose
    next token they are of; the n drafts begin behind other tokens in each batch."""
    module = head.module
    size, length = batch.tokens.shape
    anchors = mx.arange(0, length - head.depth - STRIDE + 2, STRIDE)
    anchors = anchors + batch.tokens.sum() % STRIDE
    view = View(1, {}, {}, positions=mx.tile(mx.arange(length), size))
    caches = [Repeated(view, anchors, size) for _ in module.layers]
    module.store(batch.taps.flatten(0, 1), caches)
    slots, starts = mx.arange(length), caches[0].offset
    seen = [block_mask(slots, starts, head.depth, x.window, x.causal) for x in module.layers]
    masks = mx.full((len(starts), head.depth - 1), module.mask)
    block = mx.concatenate([batch.tokens[:, anchors].reshape(-1, 1), masks], axis=1)
    out = module(head.embed(block), list(zip(seen, caches, strict=True)))
    logits = head.lm_head(out).reshape(size, len(anchors), head.depth, -1)
    for i in range(head.depth):
        positions = anchors + i
        before = batch.tokens[:, positions]
        yield module.markov_head(logits[:, :, i], out, before), positions
