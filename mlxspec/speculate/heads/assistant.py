"""Gemma 4's assistant: a chain of passes over the newest token, in which each layer attends to the
target's own keys and values, those of its last layer of the same type.

It has no keys and values of its own. The row keeps the position of the newest token with keys and
values in the target over the whole chain, as in vLLM and mlx-vlm; only token and hidden state
change.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.core import array as Array

from mlxspec.model.batch import fill_view
from mlxspec.model.pages import Pages, View
from mlxspec.model.runner import Runner
from mlxspec.model.trunk import decoder_layers, trunk_of
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadInput, HeadModel, Pass
from mlxspec.speculate.heads.tensors import load_tensors
from mlxspec.types import UnsupportedModel

CENTROIDS, ORDERING = "centroids.weight", "token_ordering"


class Assistant(nn.Module):
    """The head's modules under their published names, for a target of hidden size `width`, whose
    layers `reads` have the keys and values for each of its own. With `clusters` of tokens, only
    those of the `best` ones are drafted: token_ordering [vocab] lists them cluster by cluster."""

    def __init__(
        self,
        layers: list[Any],
        args: Any,
        width: int,
        reads: tuple[int, ...],
        clusters: int,
        best: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, vocab = args.hidden_size, args.vocab_size
        self.reads, self.best = reads, best
        self.embed_tokens = nn.Embedding(vocab, size)
        self.pre_projection = nn.Linear(2 * width, size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(size, args.rms_norm_eps)
        self.post_projection = nn.Linear(size, width, bias=False)
        if clusters:
            self.centroids = nn.Linear(size, clusters, bias=False)
            self.token_ordering = mx.zeros(vocab, mx.int32)

    def __call__(
        self,
        embedded: Array,
        hidden: Array,
        pages: Sequence[Pages],
    ) -> tuple[Array, Array]:
        """The input of `logits`, [n, D], and what stands for the target's next hidden states,
        [n, width]; for embedded tokens and hidden states [n, width], a row for each sequence in
        the pages' view."""
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[:, None]
        for layer, cache in zip(self.layers, pages, strict=True):
            mask = cache.make_mask(1, return_array=True, window_size=cache.window)
            kv = cache.keys_and_values()
            x, _, _ = layer(x, mask, shared_kv=kv, offset=cache.offset)
        out = self.norm(x[:, 0])
        return out, self.post_projection(out)

    def logits(self, out: Array) -> Array:
        """[n, vocab]; -inf for tokens that are not among the best clusters'."""
        if "centroids" not in self:
            logits: Array = self.embed_tokens.as_linear(out)
            return logits
        scores = self.centroids(out)
        best = mx.argpartition(scores, -self.best)[:, -self.best :]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        ids = clusters[best].flatten(1)
        logits = (self.embed_tokens(ids) @ out[..., None])[..., 0]
        none = mx.full((len(out), clusters.size), -mx.inf, out.dtype)
        return mx.put_along_axis(none, ids, logits, axis=-1)


class AssistantPass(Pass):
    """`head.module` is an Assistant."""

    def __init__(self, head: HeadModel, runner: Runner) -> None:
        super().__init__(head, runner)
        # A sliding layer sees what the newest token would, less that token itself.
        target = runner.view
        blocks = {window and window - 1: n for window, n in target.num_blocks.items()}
        self.view = View(target.block_size, blocks, {}, dense=target.dense)
        self.read_from = [runner.caches[i] for i in head.module.reads]

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        hidden = rows.hidden[rows.newest(chain.shift)]
        newest = [replace(e, start=e.start - 1) for e in chain.spans]  # with keys and values
        pages = [self._borrowed(target_pages) for target_pages in self.read_from]
        seen = 0  # sequences in the view
        while n := len(chain.spans):
            if seen != n:
                fill_view(self.view, newest[:n], chain.shift)
                seen = n
            embedded = self.head.embed(chain.tokens)
            out, hidden = self.head.module(embedded, hidden[:n], pages)
            mx.async_eval(out, hidden)
            chain.sample_next(self.head.lm_head(out))

    def _borrowed(self, pages: Pages) -> Pages:
        """The pages of a layer of the target, as this head sees them. To be dropped after a draft:
        the next step would copy a pool that is still referenced."""
        borrowed = copy(pages)
        borrowed.view = self.view
        borrowed.window = pages.window and pages.window - 1
        return borrowed


def load_assistant(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel."""
    target_layers: list[Any] = decoder_layers(target)
    holders = {
        layer.layer_type: i
        for i, layer in enumerate(target_layers)
        if getattr(layer.get("self_attn"), "has_kv", False)
    }
    if not holders:
        raise UnsupportedModel(f"the head in {files.path} is for Gemma 4, which this model is not")
    owner: Any = getattr(target, "language_model", target)
    tensors = {
        name.removeprefix("model.").removeprefix("masked_embedding."): array
        for name, array in files.tensors.items()
        if name != "lm_head.weight"  # the embedding again
    }
    size, vocab = owner.args.hidden_size, owner.args.vocab_size
    clusters = 0
    if ORDERING in tensors:
        order = tensors[ORDERING] = tensors[ORDERING].astype(mx.int32)
        clusters = len(tensors[CENTROIDS])
        if order.min() < 0 or order.max() >= vocab:
            raise UnsupportedModel(f"the head in {files.path} is damaged: {ORDERING}")
    text = files.config["text_config"]
    count = text["num_hidden_layers"]
    overrides = dict(num_kv_shared_layers=count, hidden_size_per_layer_input=0, vocab_size=vocab)
    args = type(owner.args).from_dict(text | overrides)
    make: Any = type(target_layers[0])
    layers = [make(args, i) for i in range(count)]
    reads = tuple(holders[layer.layer_type] for layer in layers)
    best = files.config.get("centroid_intermediate_top_k", 32)
    module = Assistant(layers, args, size, reads=reads, clusters=clusters, best=best)
    load_tensors(files, module, tensors)
    trunk = trunk_of(target)
    return HeadModel(
        "assistant",
        AssistantPass,
        module,
        embed=lambda tokens: trunk.embed_tokens(tokens) * trunk.embed_scale,
        lm_head=module.logits,
        width=size,
        kv_layers=0,
    )
