"""Trained heads as they are published: small drafters that read the target's hidden states.

Rule: a head can only make answers faster. One that is damaged or belongs to another model is left
out, the log says why, and the model runs without it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec import log
from mlxspec.kernels import cpu
from mlxspec.model import quantized
from mlxspec.model.cards import head_of
from mlxspec.model.checkpoint import load_weights
from mlxspec.model.layout import bytes_of_layers
from mlxspec.speculate.heads.assistant import load_assistant
from mlxspec.speculate.heads.block import load_block
from mlxspec.speculate.heads.eagle import load_eagle
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.medusa import load_medusa
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.heads.mtp import load_mtp
from mlxspec.speculate.heads.nextn import load_nextn
from mlxspec.types import CacheBytes, UnsupportedModel, line_of

LOADERS: dict[str, Callable[[HeadFiles, nn.Module], HeadModel]] = {
    "mtp": load_mtp,
    "nextn": load_nextn,
    "eagle3": load_eagle,
    "block": load_block,
    "medusa": load_medusa,
    "assistant": load_assistant,
}


def load_head(files: HeadFiles, target: nn.Module) -> HeadModel | None:
    """The head in a directory, for a loaded target; its weights stay on disk. None where there is
    none, or none that fits: the log says why."""
    path = files.path
    try:
        if files.error:
            raise files.error
        if not files.kind:
            if files.promised:
                log.warning(
                    "config.json in %s advertises an MTP head, but its weights are missing; pass"
                    " the original checkpoint as --draft %s",
                    path,
                    next(filter(None, map(head_of, path.parts)), "HEAD"),
                )
            return None
        head = LOADERS[files.kind](files, target)
        head.cached = cache_bytes(head)  # may fail too
    except UnsupportedModel as error:
        why = str(error)
    except KeyError as error:
        why = f"the head in {path} lacks {error}"
    except Exception as error:  # mlx-lm's own code, with the tensors of another model
        why = f"the head in {path} does not fit: {line_of(error)}"
    else:
        quantized.install(head.module)
        cpu.install(head.module)
        return head
    log.warning("decoding without a head: %s", why)
    return None


def read_weights(head: HeadModel) -> bool:
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


def cache_bytes(head: HeadModel) -> CacheBytes:
    """What a head caches: K/V of each token, and with each recurrent state, if its rows are made of
    the hidden states before them, the last of these."""
    state = head.slot_offset * head.width * head.embed(mx.array([0])).dtype.size
    run = partial(head.pass_type.fill, head)
    return bytes_of_layers(head.kv_layers, run)._replace(state=state)
