"""Trains the tiny attention model and its EAGLE-3, DFlash, DFlash 2 and DSpark heads of
tests/heads/data, with mlx-vlm's modules."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from tests.heads import kinds
from tests.heads.language import END, SPECIAL, VOCAB
from tests.heads.training import CHAIN, ENDS, MODEL, Batches, Unroll, soft_cross_entropy, train

MASK = SPECIAL.index("<|mask|>")
TARGET_LAYERS = 7
WIDTH = MODEL["hidden_size"]
DENSE = MODEL | dict(rope_theta=10000.0)
TARGET = DENSE | dict(model_type="qwen3", num_hidden_layers=TARGET_LAYERS)
EAGLE_IDS = [2, TARGET_LAYERS // 2, TARGET_LAYERS - 3]  # EAGLE-3's default
REDUCED = VOCAB // 3  # tokens that EAGLE-3 drafts: the commonest
BLOCK, TAPS, LAYERS = 8, [1, 3, 5], 3
ANCHORS = 16  # blocks of one text that are trained together


def make_target() -> Any:
    return qwen3.Model(qwen3.ModelArgs.from_dict(TARGET))


def target_config() -> dict[str, Any]:
    own = dict(architectures=["Qwen3ForCausalLM"], hidden_act="silu", attention_bias=False)
    return own | TARGET | ENDS


def hidden_states(target: Any, x: mx.array, taps: Sequence[int]) -> tuple[mx.array, mx.array]:
    """The target's hidden states after the layers `taps`, side by side, and its distributions."""
    inner, kept = target.model, []
    h = inner.embed_tokens(x)
    for i, layer in enumerate(inner.layers):
        h = layer(h, "causal", None)
        if i in taps:
            kept.append(h)
    teacher = mx.softmax(target.lm_head(inner.norm(h)), -1)
    return mx.stop_gradient(mx.concatenate(kept, -1)), mx.stop_gradient(teacher)


def drafter(config: dict[str, Any]) -> Any:
    """mlx-vlm's module for a head's config.json."""
    from mlx_vlm.utils import get_model_and_args

    arch, _ = get_model_and_args(dict(config))
    return arch.Model(arch.ModelConfig.from_dict(config))


# ---- EAGLE-3
# --------------------------------------------------------------------------------------------


def eagle_config(vocab: int) -> dict[str, Any]:
    layer = DENSE | dict(model_type="llama", num_hidden_layers=1, hidden_act="silu")
    layer |= dict(attention_bias=False, mlp_bias=False, rope_scaling=None, dtype="float32")
    method = dict(proposal_type="greedy", speculative_tokens=3)
    method |= dict(accept_tolerance=0.0, verifier_accept_k=1)
    verifier = dict(name_or_path="../target", architectures=["Qwen3ForCausalLM"])
    return dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        speculators_version="0.9.0",
        dtype="float32",
        draft_vocab_size=vocab,
        norm_before_residual=True,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        embed_requires_grad=False,
        target_hidden_size=None,
        eagle_aux_hidden_state_layer_ids=EAGLE_IDS,
        tie_word_embeddings=False,
        transformer_layer_config=layer,
        speculators_config=dict(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[method],
            verifier=verifier,
        ),
    )


def train_eagle3(target: Any, data: Batches, steps: int, r: random.Random) -> Any:
    """With the target's embeddings, from its lm_head; each step of the chain takes the head's own
    output for the hidden state."""
    head = drafter(eagle_config(VOCAB))
    head.embed_tokens.weight = target.model.embed_tokens.weight
    head.lm_head.weight = target.lm_head.weight
    head.freeze()
    head.unfreeze()
    head.embed_tokens.freeze()
    taps = [i - 1 for i in EAGLE_IDS]  # id i is the hidden state before layer i

    def loss(x: mx.array) -> mx.array:
        fused, teacher = hidden_states(target, x, taps)
        rows, unroll, total = x.shape[1] - CHAIN, Unroll(), 0.0
        h = head._prepare_target_hidden(fused[:, :rows])
        for s in range(CHAIN):
            unroll.offset = s
            embedded = head.embed_tokens(x[:, 1 + s : 1 + s + rows])
            h = head.layers[0](embedded, h, unroll.mask(rows), unroll, 1 + s)
            right = teacher[:, 1 + s : 1 + s + rows]
            total += 0.8**s * soft_cross_entropy(right, head._logits(h)).mean()
        return total

    train("EAGLE-3", head, loss, data, steps)
    return head


def write_eagle3(out: Path, head: Any, ids: np.ndarray) -> None:
    """`ids`: the text that was trained on. The commonest tokens are kept."""
    common = np.argsort(-np.bincount(ids, minlength=VOCAB), kind="stable")[:REDUCED]
    kept = sorted(int(t) for t in common)
    tensors = dict(tree_flatten(head.parameters()))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][mx.array(kept)]
    tensors["d2t"] = mx.array([t - i for i, t in enumerate(kept)], mx.int64)
    tensors["t2d"] = mx.array([t in kept for t in range(VOCAB)])
    kinds.save_head(out / "eagle3", tensors, eagle_config(REDUCED))


# ---- blocks
# ---------------------------------------------------------------------------------------------


def block_config(kind: str) -> dict[str, Any]:
    full = dict(layer_types=["full_attention"] * LAYERS, max_window_layers=LAYERS)
    config = DENSE | full | dict(model_type="qwen3", num_hidden_layers=LAYERS)
    config |= dict(num_target_layers=TARGET_LAYERS, rope_scaling=None, hidden_act="silu")
    config |= dict(attention_bias=False, attention_dropout=0.0, sliding_window=None)
    config |= dict(use_sliding_window=False, eos_token_id=END, dtype="bfloat16")
    inner: dict[str, Any] = dict(mask_token_id=MASK, target_layer_ids=TAPS)
    if kind == "dspark":
        own = dict(markov_rank=32, markov_head_type="vanilla")
        own |= dict(enable_confidence_head=True, confidence_head_with_markov=True)
        more = dict(projector_type="dspark", num_target_layers=TARGET_LAYERS)
        config |= own | inner | dict(architectures=["Qwen3DSparkModel"])
        # Here the newest token is not counted.
        return config | dict(block_size=BLOCK - 1, dflash_config=inner | own | more)
    config |= dict(block_size=BLOCK, tie_word_embeddings=True, dflash_config=inner)
    if kind == "dflash":
        names = dict(auto_map={"AutoModel": "dflash.DFlashDraftModel"})
        return config | names | dict(architectures=["DFlashDraftModel"])
    inner |= dict(block_size=BLOCK, conv_kernel_size=2, conv_group_size=16)
    inner |= dict(selector_rank=32, selector_top_k=16)
    names = dict(auto_map={"AutoModel": "dflash2.DFlash2DraftModel"})
    return config | names | dict(architectures=["DFlash2DraftModel"])


def anchored_attention(
    self: Any, x: mx.array, context: mx.array, rope: Any, anchors: list[int], projected: Any = None
) -> mx.array:
    """DFlash's attention for many blocks of each text at once: the block at an anchor sees the
    context before it, and itself."""
    (texts, length, _), (blocks, rows, _), count = context.shape, x.shape, len(anchors)

    def heads(y: mx.array, many: int) -> mx.array:
        return y.reshape(*y.shape[:2], many, self.head_dim).transpose(0, 2, 1, 3)

    def placed(y: mx.array, norm: Any) -> mx.array:
        normed = norm(y.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        return rope(normed, offset=mx.array(anchors * texts))

    def by_text(y: mx.array) -> mx.array:
        apart = y.reshape(texts, count, y.shape[1], rows, -1).transpose(0, 2, 1, 3, 4)
        return apart.reshape(texts, y.shape[1], count * rows, -1)

    q = by_text(placed(heads(self.q_proj(x), self.n_heads), self.q_norm))
    k = by_text(placed(heads(self.k_proj(x), self.n_kv_heads), self.k_norm))
    v = by_text(heads(self.v_proj(x), self.n_kv_heads))
    before_k = rope(self.k_norm(heads(self.k_proj(context), self.n_kv_heads)), offset=0)
    before_v = heads(self.v_proj(context), self.n_kv_heads)
    owner = mx.repeat(mx.arange(count), rows)
    seen = mx.arange(length)[None] < mx.array(anchors)[owner][:, None]
    mask = mx.concatenate([seen, owner[:, None] == owner[None]], 1)
    keys, values = mx.concatenate([before_k, k], 2), mx.concatenate([before_v, v], 2)
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask)
    out = out.reshape(texts, -1, count, rows, self.head_dim).transpose(0, 2, 3, 1, 4)
    made: mx.array = self.o_proj(out.reshape(blocks, rows, -1))
    return made


@contextmanager
def trainable() -> Iterator[None]:
    """mlx-vlm's DFlash with the attention above, and without its fused copy of weights, which would
    not learn."""
    from mlx_vlm.speculative.drafters.qwen3_dflash import dflash

    attention, model = dflash.DFlashAttention, dflash.DFlashDraftModel
    stock = attention.__call__, model._project_context_kv
    attention.__call__, model._project_context_kv = anchored_attention, lambda *_: None
    try:
        yield
    finally:
        attention.__call__, model._project_context_kv = stock


def warm_start(head: Any, target: Any, kind: str) -> None:
    """The target's last layers, reading the last tap; DFlash 2 begins as a DFlash."""
    last = target.model.layers[-LAYERS:]
    for mine, its in zip(head.layers, last, strict=True):
        mine.load_weights(tree_flatten(its.parameters()), strict=False)
    head.norm.weight = target.model.norm.weight
    through = mx.concatenate([mx.zeros((WIDTH, WIDTH * (len(TAPS) - 1))), mx.eye(WIDTH)], 1)
    head.fc.weight = 0.1 * head.fc.weight + through
    if kind == "dflash2":
        for conv in (c for each in head.layers for c in (each.attention_conv, each.mlp_conv)):
            passing = [mx.ones((2, 1, WIDTH)), mx.zeros((2, 1, WIDTH))]
            conv.base_kernel = mx.concatenate(passing, 1)
            conv.kernel_projection.weight *= 0.1


def train_block(kind: str) -> Callable[..., Any]:
    """Blocks of any width: a server may draft fewer tokens than a block has."""
    first = int(kind != "dspark")  # the row of the first draft

    def trained(target: Any, data: Batches, steps: int, r: random.Random) -> Any:
        head = drafter(block_config(kind))
        warm_start(head, target, kind)

        def loss(x: mx.array) -> mx.array:
            fused, teacher = hidden_states(target, x, TAPS)
            rows = r.choice([3, 4, 5, 6, 7, 8]) - 1 + first
            anchors = sorted(r.sample(range(8, x.shape[1] - BLOCK), ANCHORS))
            at = mx.array([[a + i for i in range(rows)] for a in anchors])
            tokens = mx.where(mx.arange(rows) == 0, x[:, at].reshape(-1, rows), MASK)
            head.embed_tokens, head.lm_head = target.model.embed_tokens, target.lm_head
            hidden = head._hidden(tokens, fused, [anchors] * LAYERS)[:, first:]
            head.embed_tokens = head.lm_head = None
            truth = teacher[:, at - first].reshape(-1, rows, VOCAB)[:, first:]
            before = x[:, at - first].reshape(-1, rows)[:, first:]
            logits, more = corrected(head, kind, target.lm_head(hidden), hidden, before, truth)
            later = 0.8 ** mx.arange(logits.shape[1])
            return (soft_cross_entropy(truth, logits) * later).mean() + 0.2 * more

        with trainable():
            train(kind, head, loss, data, steps)
        return head

    return trained


def corrected(
    head: Any, kind: str, logits: mx.array, hidden: mx.array, before: mx.array, truth: mx.array
) -> tuple[mx.array, Any]:
    """Logits with what the tokens before say, and the loss of DSpark's confidence head."""
    if kind == "dflash2":
        selector = head.candidate_selector
        pair = selector.predecessor_codebook(before) * selector.hidden_projection(hidden)
        return logits + pair @ selector.successor_codebook.weight.T, 0.0
    if kind == "dspark":
        embedded = head.markov_head.markov_w1(before)
        logits = logits + head.markov_head.markov_w2(embedded)
        kept = (logits.argmax(-1) == truth.argmax(-1)).astype(mx.float32)
        known = mx.concatenate([mx.stop_gradient(hidden), mx.stop_gradient(embedded)], -1)
        sure = head.confidence_head.proj(known)[..., 0]
        return logits, nn.losses.binary_cross_entropy(sure, kept, with_logits=True)
    return logits, 0.0


def write_block(kind: str) -> Callable[[Path, Any, np.ndarray], None]:
    """As published: in bfloat16, codebooks as bare parameters."""

    def written(out: Path, head: Any, ids: np.ndarray) -> None:
        tensors = {
            name.removesuffix(".weight") if "codebook" in name else name: array.astype(mx.bfloat16)
            for name, array in tree_flatten(head.parameters())
        }
        kinds.save_head(out / kind, tensors, block_config(kind))

    return written
