"""Trained heads: small drafters that read the target's hidden states, as they are published.

Rule: a head can only make answers faster. One that is damaged or belongs to another model is left
out with a line that says why, and the model runs without it.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.model import quantized
from mlxspec.model.cards import head_of
from mlxspec.model.layout import CacheBytes, bytes_of_layers, load_weights
from mlxspec.speculate.heads.block import BlockModel, load_block
from mlxspec.speculate.heads.chained import HeadModel
from mlxspec.speculate.heads.eagle import load_eagle
from mlxspec.speculate.heads.files import HeadFiles, find_head, promised
from mlxspec.speculate.heads.mtp import load_mtp
from mlxspec.speculate.heads.nextn import load_nextn
from mlxspec.types import UnsupportedModel, line_of

LOADERS: dict[str, Callable[[HeadFiles, nn.Module], HeadModel | BlockModel]] = {
    "mtp": load_mtp,
    "nextn": load_nextn,
    "eagle3": load_eagle,
    "block": load_block,
}

log = logging.getLogger("mlxspec")


def load_head(path: Path, target: nn.Module) -> HeadModel | BlockModel | None:
    """The head in a directory, for a loaded target; its weights stay on disk. None where there is
    none, or none that fits: the log says why."""
    try:
        files = find_head(path)
        if files is None:
            if promised(path):
                log.warning(
                    "config.json in %s promises an MTP head, but no file has its tensors; give it"
                    " with --draft %s",
                    path,
                    head_of(path.name) or "HEAD",
                )
            return None
        head = LOADERS[files.kind](files, target)
    except UnsupportedModel as error:
        log.warning("decoding without a head: %s", error)
        return None
    except Exception as error:  # mlx-lm's own code, with the tensors of another model
        log.warning("decoding without a head: that in %s does not fit: %s", path, line_of(error))
        return None
    quantized.install(head.module)
    return head


def read_weights(head: HeadModel | BlockModel) -> bool:
    """Read a head's weights into memory; False where they are damaged: the log says so."""
    try:
        load_weights(head.module)
        leaves: Any = tree_flatten(head.module.parameters())
        for name, array in leaves:
            if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all():
                raise UnsupportedModel(f"{name} is not finite: download the head again")
    except UnsupportedModel as error:
        log.warning("decoding without a head: %s", error)
        return False
    return True


def cache_bytes(head: HeadModel | BlockModel) -> CacheBytes:
    """What a head caches: K/V of each token, and a hidden state with each recurrent state."""
    if isinstance(head, BlockModel):
        return bytes_of_layers(len(head.module.layers), head.module.fill)
    hidden = head.embed(mx.array([[0, 0]]))
    run = partial(head.module, hidden, hidden)
    return bytes_of_layers(len(head.module.layers), run)._replace(state=hidden[0, 0].nbytes)
