"""Counts what Apple's compiler is given at a model's first start: the kernels' instances, and the
lines of each.

Counts hold on any machine: the model is built from its config.json without weights, and nothing is
launched. `python -m bench.compiles [CONFIG.JSON ...]` prints the table.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402

from bench.sizes import CONFIGS, missing_bits, unloaded  # noqa: E402
from bench.tables import empty  # noqa: E402
from mlxspec.kernels.metal import SMALLEST  # noqa: E402
from mlxspec.kernels.trial import Case  # noqa: E402
from mlxspec.model import quantized  # noqa: E402
from mlxspec.model.layout import geometry  # noqa: E402
from mlxspec.model.runner import Layout, Runner  # noqa: E402

BLOCK = 32  # slots of a block
Instance = tuple[Any, ...]  # what MLX compiles once: a kernel, its constants and dtypes


def instances(cases: Iterable[Case]) -> dict[Instance, int]:
    """What proofs of these cases compile, and the lines of each."""
    found: dict[Instance, int] = {}

    def make(name: str, inputs: Any, outputs: Any, body: str, header: str) -> Any:
        lines = sum(bool(line.strip()) for line in (header + body).splitlines())

        def launch(
            inputs: Sequence[mx.array],
            template: Any,
            output_shapes: Any,
            output_dtypes: Any,
            **_: Any,
        ) -> list[mx.array]:
            arguments = tuple((x.dtype, x.size < SMALLEST) for x in inputs)
            found[name, *template, *arguments, *output_dtypes] = lines
            return [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    with mock.patch.object(mx.fast, "metal_kernel", make):
        for case in {case.name: case for case in cases}.values():
            inputs = case.inputs(0)
            for call in case.variants.values():
                for rows in case.rows:
                    call(*case.cut(inputs, rows))
    return found


def cases_of(config: dict[str, Any], bits: int) -> list[Case]:
    """The kernels to verify for a model, without its weights; with recurrent layers, in the layout
    that these need."""
    model = unloaded(config, bits)
    quantized.install(model)
    layout: Layout = "rect" if geometry(model).state else "rows"
    runner = Runner(model, layout, BLOCK, quantized.CASE_BLOCKS)
    with mock.patch.object(mx, "async_eval"):
        return quantized.kernel_cases(runner)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compiles", description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path, default=sorted(CONFIGS.glob("*.json")))
    parser.add_argument(
        "--bits",
        type=int,
        default=0,
        choices=(4, 8, 16),
        help="default: as the config says, else 4",
    )
    args = parser.parse_args(argv)
    made = empty(("model", "cases", "instances", "lines", "by kernel"), 1)
    for path in args.configs:
        config = json.loads(path.read_text("utf-8"))
        cases = cases_of(config, args.bits or missing_bits(config, 4))
        found = instances(cases)
        names = [name for name, *_ in found]
        by_kernel = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
        count, lines = len({case.name for case in cases}), sum(found.values())
        made.add_row(path.stem, f"{count}", f"{len(found)}", f"{lines}", by_kernel)
    Console(width=200).print(made)


if __name__ == "__main__":
    main()
