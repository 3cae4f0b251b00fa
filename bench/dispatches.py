"""Counts what Metal would launch for one step, and the bytes that it moves: ours beside mlx-lm's.

Counts hold on any machine: the step's graph is built here and read by `bench.graph`. `python -m
bench.dispatches [MODEL]` prints the table; a round with drafts is one step of the target's with
the passes that drafted for it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS

from bench.graph import Compiled, Work, on_metal, work_of  # noqa: E402

if __name__ == "__main__":  # before mlx-lm compiles its functions
    mx.compile = Compiled  # type: ignore[assignment,misc]

from mlx.nn.layers.base import Module  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import tiny  # noqa: E402
from mlxspec.config import Config  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.kernels.trial import Verdict  # noqa: E402
from mlxspec.kernels.verify import KERNELS  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.model.checkpoint import load_model, load_weights  # noqa: E402
from mlxspec.sequences import Entry  # noqa: E402
from mlxspec.speculate import NoSpeculation  # noqa: E402
from mlxspec.types import Request, Sampling  # noqa: E402

WARM = 4  # steps before the one that is counted, which needs no new block
CONTEXT = 40  # tokens of a sequence when its step is counted
ANSWER = 64  # tokens of an answer, more than are counted


class Always(dict[str, Verdict]):
    """Verdicts by which every kernel runs."""

    def get(self, name: str, default: Any = None) -> Verdict:
        return Verdict("plain", 1, 16)


def counted(step: Callable[[], object]) -> Work:
    """What one `step` launches; its values are of no use. Nothing is evaluated before all of its
    graph is read: an export leaves copies of what it has read behind."""
    submitted: list[mx.array] = []
    counts: list[int] = []

    def submit(*arrays: Any) -> None:
        leaves: list[Any] = tree_flatten(list(arrays))
        submitted.extend(leaf for _, leaf in leaves if isinstance(leaf, mx.array))
        counts.append(len(submitted))

    with (
        on_metal() as stand_ins,
        mock.patch.object(mx, "async_eval", submit),
        mock.patch.object(mx, "eval", submit),
    ):
        step()
        return work_of(submitted, stand_ins, counts)


def prompts(streams: int, context: int) -> list[list[int]]:
    """As long as leaves so many tokens of context in the step that is counted."""
    length = context - WARM - 1
    return [[(7 * i + 3 * j) % 97 + 100 for j in range(length)] for i in range(streams)]


def of_engine(engine: Engine, streams: int, kernels: bool = False, context: int = CONTEXT) -> Work:
    """One step of ours in which all of so many streams decode."""
    for i, prompt in enumerate(prompts(streams, context)):
        engine.add(Request(f"count-{i}", tuple(prompt), ANSWER, Sampling(temperature=0.0)))
    plan: Sequence[Entry] = ()
    while len(plan) < streams or any(e.count > 1 for e in plan):
        if not engine.busy:
            raise RuntimeError("an answer ended before all of them were decoded together")
        engine.step()
        plan = engine.in_flight.plan if engine.in_flight else ()
    for _ in range(WARM):
        engine.step()
    with mock.patch.object(KERNELS, "verdicts", Always() if kernels else {}):
        work = counted(engine.step)
    for i in range(streams):
        engine.abort(f"count-{i}")
    while engine.busy:
        engine.step()
    return work


def learn(engine: Engine) -> None:
    """Have the layers of experts learn from a step of one row what their kernel is, as where one can
    run."""
    with mock.patch.object(KERNELS, "recorded", []):
        of_engine(engine, 1)


def of_mlx_lm(model: Module, streams: int, context: int = CONTEXT) -> Work:
    """One step of mlx-lm's: of `generate_step` for one stream, else of its BatchGenerator."""
    if streams == 1:
        steps = generate_step(mx.array(prompts(1, context)[0]), model, max_tokens=ANSWER)
        for _ in range(WARM):
            next(steps)
        return counted(lambda: next(steps))
    batch = BatchGenerator(model, max_tokens=ANSWER, completion_batch_size=streams)
    batch.insert(prompts(streams, context))
    while len(batch.next()[1]) < streams:
        pass
    for _ in range(WARM - 1):
        batch.next()
    return counted(batch.next)


def rows_of(
    config: Config, streams: Sequence[int], context: int
) -> Iterator[tuple[str, int, Work]]:
    """What is counted: who decodes, for how many streams, and the work."""
    resolved = resolve_model(config)
    model, _ = load_model(resolved.path)
    load_weights(model)
    for n in streams:
        yield "mlx-lm", n, of_mlx_lm(model, n, context)
    engine, _ = resolved.load()
    own = engine.proposer
    engine.proposer = NoSpeculation()
    for n in streams:
        yield "mlxspec", n, of_engine(engine, n, context=context)
    learn(engine)
    for n in streams:  # last: what kernels leave in the pools, others have to clean
        engine.proposer = NoSpeculation()
        yield "mlxspec, its kernels", n, of_engine(engine, n, kernels=True, context=context)
        if config.draft_depth:
            engine.proposer = own
            title = f"mlxspec, its kernels, {config.draft_depth} drafted"
            yield title, n, of_engine(engine, n, kernels=True, context=context)


def table(found: Sequence[tuple[str, int, Work]]) -> Table:
    made = Table(box=None)
    made.add_column("a step of", no_wrap=True)
    for title in ("streams", "launches", "MB read", "MB written"):
        made.add_column(title, justify="right")
    made.add_column("most launched")
    for who, streams, work in found:
        most = ", ".join(f"{name} {count}" for name, count in work.launches.most_common(8))
        read, written = f"{work.read / 1e6:.1f}", f"{work.written / 1e6:.1f}"
        made.add_row(who, str(streams), str(work.total), read, written, most)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatches", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="as for serve; default: built in")
    parser.add_argument(
        "--experts", action="store_true", help="a small random mixture of experts as the model"
    )
    parser.add_argument("--draft", default="", metavar="HEAD_OR_MODEL", help="as for serve")
    parser.add_argument("--draft-depth", type=int, default=0, help="count rounds of such drafts")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument(
        "--context", type=int, default=CONTEXT, metavar="TOKENS", help="%(default)s"
    )
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        print_counts(args, str(tiny.experts(Path(folder))) if args.experts else args.model)


def config_of(model: str, streams: int, draft: str = "", depth: int = 0) -> Config:
    return Config(
        prefill_budget=2048,  # so that all streams are read before the first answer ends
        model=model,
        draft=draft,
        draft_depth=depth,
        cache_gb=0.0,
        max_sequences=streams,
    )


def print_counts(args: argparse.Namespace, model: str) -> None:
    config = config_of(model, max(args.streams), args.draft, args.draft_depth)
    console = Console(width=max(Console().width, 150))
    console.print(table(list(rows_of(config, args.streams, args.context))))


if __name__ == "__main__":
    main()
