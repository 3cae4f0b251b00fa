"""Runs the measurements against mlx_lm.server and prints them as ratios."""

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Callable

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import http, servers, steps  # noqa: E402
from mlxspec.model.catalog import default_cache_dir, resolve  # noqa: E402

OURS, THEIRS = "mlxspec", "mlx_lm.server"
Figures = dict[str, dict[str, list[float]]]  # measurement -> server -> one value a round


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--model", default="", help="as for mlxspec serve; default: the embedded model")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; the median counts")
    parser.add_argument("--words", type=int, default=1900, help="length of the long prompt, in words")
    args = parser.parse_args()
    model = resolve(args.model, default_cache_dir(), mx.metal.is_available()).path
    console = Console()
    console.print(f"{model.name} on {platform.machine()} {platform.system()}, {mx.default_device()}")
    with servers.running(OURS, model) as ours, servers.running(THEIRS, model) as theirs:
        figures = asyncio.run(_rounds({OURS: ours, THEIRS: theirs}, args.rounds, args.words))
    console.print(_table(figures, args.rounds))
    for streams in (1, 8):
        ms = steps.measure(model, streams)
        console.print(
            f"Python in a step of {streams} stream(s): {ms['ours']:.2f} ms ours, {ms['seam']:.2f} ms pages"
            f" and attention in the layers, {ms['graph']:.2f} ms mlx-lm's graph; the step {ms['run']:.1f} ms"
        )


async def _rounds(urls: dict[str, str], rounds: int, words: int) -> Figures:
    figures: Figures = {}

    def note(what: str, name: str, value: float) -> None:
        figures.setdefault(what, {}).setdefault(name, []).append(value)

    base = int(time.time())  # prompts that no cache has seen
    for url in urls.values():
        await http.complete(url, "warm up", 4)
    for i in track(range(rounds), description="Measuring", console=Console(stderr=True)):
        order = list(urls.items())
        for name, url in order if i % 2 == 0 else order[::-1]:
            seed = base + 100 * i
            note("tokens/s, 1 stream", name, await http.throughput(url, 1, seed))
            note("tokens/s, 8 streams", name, await http.throughput(url, 8, seed + 1))
            gap, _ = await http.longest_gap(url, seed + 2, words)
            note("longest gap beside a long prefill, s", name, gap)
            cold, hot = await http.first_tokens(url, seed + 4, words)
            note("first token of a long prompt, new, s", name, cold)
            note("first token of a long prompt, again, s", name, hot)
            note("again / new", name, hot / cold)
    return figures


def _table(figures: Figures, rounds: int) -> Table:
    table = Table(title=f"medians of {rounds} interleaved rounds (all values)")
    for column in ("", OURS, THEIRS, "ratio"):
        table.add_column(column)
    for what, found in figures.items():
        ratios = [a / b for a, b in zip(found[OURS], found[THEIRS], strict=True)]
        table.add_row(what, *(_values(found[n]) for n in (OURS, THEIRS)), _values(ratios))
    return table


def _values(values: list[float]) -> str:
    show: Callable[[float], str] = "{:.3g}".format
    return f"{show(statistics.median(values))} ({', '.join(map(show, values))})"


if __name__ == "__main__":
    main()
