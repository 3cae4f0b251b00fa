"""The command: load a model, run the workloads on both sides, print, draw.

Rule: whatever can be refused is refused before the model is loaded.
"""

import functools
import json
import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlxspec import __version__, blas
from mlxspec.bench import figures, plot, workloads
from mlxspec.bench.table import report, table, verdict
from mlxspec.config import Config, ConfigError
from mlxspec.types import ModelInfo, Request, Sampling

if TYPE_CHECKING:
    from mlxspec.bench.measure import Bench, Prompt
    from mlxspec.engine.engine import Engine

WIDE = 150  # columns of a table that goes to a file
MAX_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be measured, as the flags of the command say it. `max_tokens` is by prompt;
    `rounds` is how often the whole is repeated."""

    workloads: tuple[str, ...]
    prompts: int
    max_tokens: int
    streams: tuple[int, ...]
    rounds: int
    draft: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    out: Path | None = None
    json: Path | None = None
    trace: Path | None = None


def workloads_of(text: str) -> tuple[str, ...]:
    """What --workload names. Raises ConfigError."""
    if text == "all":
        return workloads.ALONE
    if text not in workloads.NAMES:
        names = ", ".join(workloads.NAMES)
        raise ConfigError(f"--workload = {text!r} is not a workload; give one of {names}, or all")
    return (text,)


def streams_of(text: str) -> tuple[int, ...]:
    """What --streams lists. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= MAX_STREAMS for p in parts):
        raise ConfigError(
            f"--streams = {text!r} is not a list of whole numbers from 1 to {MAX_STREAMS}; give, say, 1,4,8"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def bench(config: Config, ask: Ask) -> int:
    """Measure and report. Exit status: 0, or 1 where a prompt gave other tokens with speculation
    than without. Raises ConfigError and UserError."""
    for name, file in (("--out", ask.out), ("--json", ask.json), ("--trace", ask.trace)):
        if file and (file.is_dir() or not os.access(file.resolve().parent, os.W_OK)):
            raise ConfigError(
                f"{name} = {str(file)!r} cannot be written; name a file in a directory that is there"
            )
    if ask.trace and (unused := "--out" if ask.out else "--json" if ask.json else ""):
        raise ConfigError(
            f"--trace writes a timeline in place of the comparison; leave out {unused}"
        )
    if ask.out:
        plot.need()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if ask.trace:
        return _trace(config, ask, ask.trace, console)
    about, cells = _measure(config, ask)
    rows = [figures.row(cell) for cell in cells]
    drawn = f"temperature {ask.temperature:g}, top_p {ask.top_p:g}" if ask.temperature else "greedy"
    title = f"{about['model']}, up to {ask.max_tokens} tokens a prompt, {drawn}"
    console.print(title + f", {ask.rounds} round{'s' * (ask.rounds > 1)}")
    console.print(table(rows))
    console.print(verdict(rows))
    if ask.json:
        ask.json.write_text(json.dumps(report(about, cells, rows)), "utf-8")
    if ask.out:
        plot.draw(ask.out, f"mlxspec bench: {title}", cells, rows)
    return int(any(r.differing for r in rows))


def offline(
    recording: Path | None, acceptance: float | None, row_cost: float, draft_cost: float
) -> None:
    """Without a model: score a recording, measure the controller. Raises ConfigError."""
    blas.load()  # the drafters import mlx
    from mlxspec.bench.replay import replay
    from mlxspec.bench.synthetic import synthetic

    if recording:
        replay(recording, row_cost, Console())
    if acceptance is not None:
        synthetic(acceptance, row_cost, draft_cost, Console())


def _trace(config: Config, ask: Ask, file: Path, console: Console) -> int:
    """Serve the first prompts of every workload at every number of streams, on a timeline."""
    blas.load()
    from mlxspec.bench import measure, timeline, trace
    from mlxspec.model.hub import cache_of
    from mlxspec.resolve import resolve_model

    found = [(name, workloads.tasks(name, cache_of(config))) for name in ask.workloads]
    groups = [(name, measure.groups(tasks, 1, n)[0]) for name, tasks in found for n in ask.streams]
    model = resolve_model(
        replace(
            config, draft=ask.draft, speculate="on", max_sequences=max(ask.streams), cache_gb=0.0
        )
    )
    sampling = Sampling(temperature=ask.temperature, top_p=ask.top_p)

    def chosen(engine: "Engine", info: ModelInfo) -> list[tuple[str, list[Request]]]:
        stop = frozenset(model.tokenizer.eos_token_ids)
        bench = measure.bench_of(engine, info.context, ask.max_tokens, stop, sampling)
        return [
            (
                f"{name}, {len(g)} stream{'s' * (len(g) > 1)}",
                [
                    bench.request(measure.prompt_of(task, model.tokenizer), ask.max_tokens)
                    for task in g
                ],
            )
            for name, g in groups
        ]

    sides = trace.record(model.load, chosen)
    timeline.write(file, sides)
    console.print(timeline.table(sides))
    console.print(
        f"the timeline is in {file}: open it in ui.perfetto.dev or chrome://tracing", soft_wrap=True
    )
    return 0


def _measure(config: Config, ask: Ask) -> tuple[dict[str, Any], list[figures.Cell]]:
    """Load the model and run every workload at every number of streams."""
    library = blas.load()
    from mlxspec.bench import measure
    from mlxspec.model.hub import cache_of
    from mlxspec.resolve import resolve_model

    cache = cache_of(config)
    chosen = {
        (name, n): measure.groups(workloads.tasks(name, cache), ask.prompts, n)
        for name in ask.workloads
        for n in ask.streams
    }
    same = replace(
        config, draft=ask.draft, speculate="on", max_sequences=max(ask.streams), cache_gb=0.0
    )
    model = resolve_model(same)
    draft, tokenizer = model.draft, model.tokenizer
    engine, info = model.load()
    sampling = Sampling(temperature=ask.temperature, top_p=ask.top_p)
    stop = frozenset(tokenizer.eos_token_ids)
    bench = measure.bench_of(engine, info.context, ask.max_tokens, stop, sampling)
    prompts = {
        key: [[measure.prompt_of(task, tokenizer) for task in group] for group in groups]
        for key, groups in chosen.items()
    }
    return _about(info, ask, draft.name if draft else "", library), _cells(
        bench, prompts, ask.rounds
    )


def _about(info: ModelInfo, ask: Ask, draft: str, library: str | None) -> dict[str, Any]:
    """What the figures are of."""
    return {
        "mlxspec": __version__,
        "mlx": version("mlx"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "blas": library,
        "model": info.name,
        "draft": draft,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "workloads": ask.workloads,
        "layout": info.layout,
        "max_tokens": ask.max_tokens,
        "rounds": ask.rounds,
    }


def _cells(
    bench: "Bench", prompts: dict[tuple[str, int], list[list["Prompt"]]], rounds: int
) -> list[figures.Cell]:
    """Measure them one after the other, with a bar on stderr."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bars = {
            (name, n): bar.add_task(
                f"{name}, {n} stream{'s' * (n > 1)}", total=2 * rounds * len(groups)
            )
            for (name, n), groups in prompts.items()
        }
        return [
            bench.cell(name, groups, rounds, functools.partial(bar.advance, bars[name, n]))
            for (name, n), groups in prompts.items()
        ]
