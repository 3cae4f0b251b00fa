"""Medusa (arXiv 2401.10774): small heads on the target's last hidden state, each of which drafts a
token one position further.

Reads the tensors of Medusa-1 and Medusa-2. The heads make a chain, not the paper's tree; none
sees what those before it drafted.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model.trunk import embedding_and_lm_head
from mlxspec.speculate.chain import Chain
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadInput, HeadModel, Pass
from mlxspec.speculate.heads.tensors import load_tensors, sizes_of


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> Any:
        return x + nn.silu(self.linear(x))


class Medusa(nn.Module):
    """`heads`: the blocks and lm_head of each, in the order of the tokens that they draft."""

    def __init__(self, heads: int, blocks: int, size: int, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = [
            [*(ResBlock(size) for _ in range(blocks)), nn.Linear(size, vocab, bias=False)]
            for _ in range(heads)
        ]


class MedusaPass(Pass):
    """`head.module` is a Medusa."""

    def draft(self, rows: HeadInput, chain: Chain) -> None:
        hidden = rows.hidden[rows.newest(chain.shift)]
        heads = iter(self.head.module.heads)
        while chain.spans:
            x = hidden[: len(chain.spans)]
            for layer in next(heads):
                x = layer(x)
            self.submit(x)
            chain.sample_next(x)


def load_medusa(files: HeadFiles, target: nn.Module) -> HeadModel:
    """The head of `files` for a loaded target. Raises UnsupportedModel."""
    size, vocab = sizes_of(target)
    places = [name.split(".") for name in files.tensors]
    heads = 1 + max(int(place[0]) for place in places)
    blocks = max(int(place[1]) for place in places)
    module = Medusa(heads, blocks, size, vocab=vocab)
    load_tensors(files, module, {f"heads.{name}": x for name, x in files.tensors.items()})
    return HeadModel(
        "medusa",
        MedusaPass,
        module,
        *embedding_and_lm_head(target),
        width=size,
        kv_layers=0,
        depth=heads,
    )
