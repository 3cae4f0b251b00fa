"""What of a model kernels could do: a case for each kernel and shape.

Rule: shapes and dtypes are asked for, never values, so a model whose weights are still on the disk
will do.
"""

import logging
from collections.abc import Iterator

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxspec.kernels import attention, sampling
from mlxspec.kernels.proven import Case
from mlxspec.model import quantized
from mlxspec.model.runner import Layout, Runner
from mlxspec.types import Entry, Request, Sequence

log = logging.getLogger("mlxspec")

ROWS = 3  # of a step whose shapes are looked at
LAYOUTS: tuple[Layout, ...] = ("rows", "rect", "gather", "solo")


def cases_of(model: Module, block_size: int, kv_bits: int = 0) -> list[Case]:
    """Each case once. For a model as it was loaded, before a runner grafts its trunk."""
    step = list(
        _step(model, block_size, kv_bits)
    )  # calls the layers, which tells how experts are called
    return list({case.name: case for case in [*quantized.cases(model), *step]}.values())


def _step(model: Module, block_size: int, kv_bits: int) -> Iterator[Case]:
    """Of attention and of drawing tokens: what a step asks for that is built and never computed."""
    table = list(range(1, 1 + -(-ROWS // block_size)))
    seq = Sequence(Request("shapes", (0,) * ROWS, 1), tokens=[0] * ROWS, table=table)
    for layout in LAYOUTS:
        try:
            runner = Runner(model, layout, block_size, 1 + len(table), trunk=False, kv_bits=kv_bits)
            with attention.asked() as shapes:
                logits = runner.logits([Entry(seq, 0, ROWS, True)])
        except (
            Exception
        ) as failed:  # whatever the model's own code raises; `fit` finds another layout
            log.debug("no shapes in the %s layout: %s", layout, failed)
            continue
        for shape in shapes:
            yield from attention.paged_attention_cases(shape)
        for dtype in dict.fromkeys(
            (logits.dtype, mx.float32)
        ):  # a bias or a penalty makes them fp32
            yield sampling.sample_accept_case(logits.shape[-1], dtype)
        return
