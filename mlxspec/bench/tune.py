"""`mlxspec tune`: kernels, costs and depths of this machine, measured anew and kept where `serve`
finds them.

Rule: it starts a model as `serve` does; there is no second way to measure. BLAS is loaded before
this is imported.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlxspec.bench import curves
from mlxspec.config import Config, ConfigError, url_of
from mlxspec.engine.loader import start
from mlxspec.kernels.verify import KERNELS, missing
from mlxspec.model.hub import cache_of
from mlxspec.resolve import choose
from mlxspec.speculate.controller import Controller, Costs, Option
from mlxspec.speculate.draft_model import MODEL_DEPTH
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import MAX_DEPTH

ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CONTEXTS = (64, 2048, 8192, 32768)
WIDE = 150
HEALTH_S = 1.0
NO_PICTURE = "no picture: matplotlib is not installed; run: pip install 'mlxspec[bench]'"


@dataclass(frozen=True, slots=True)
class Found:
    """`steps`: seconds by rows, for each context. `depths`: for each source of drafts and each
    context, by acceptance, how many tokens are drafted and how many times as fast that is. `gains`
    of kernels by rows."""

    model: str
    steps: Mapping[int, Mapping[int, float]]
    depths: Mapping[str, Mapping[int, Mapping[float, tuple[int, float]]]]
    gains: Mapping[str, Mapping[int, float]]


def tune(config: Config, out: Path | None) -> int:
    """Measure, show, draw. Raises ConfigError and UserError."""
    file = out or cache_of(config) / "tune.png"
    with _writing(file, out):  # before the measuring, which takes minutes
        if not out:
            file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("ab").close()
        if new:
            file.unlink()
    console = Console(markup=False)
    console = console if console.is_terminal else Console(width=WIDE, markup=False)
    if url := _sharing(config):
        said = f"a server runs at {url} and shares this machine: what is measured is too slow; stop it first"
        console.print(said, soft_wrap=True)
    chosen = choose(replace(config, speculate="on", others=()))
    options = replace(chosen.options, again=True, disk_bytes=0)
    engine, info = start(chosen.found.path, chosen.found.name, options)
    gains = {name: verdict.gains for name, verdict in KERNELS.verdicts.items() if verdict.gains}
    console.print(
        f"{info.name}, {info.layout} layout: what was measured is kept in {cache_of(config)}"
    )
    _kernels(console, missing() if config.kernels == "auto" else "kernels = off")
    if not isinstance(engine.drafter, Proposer):
        console.print("no speculation here, so no costs and no depths; the log says why")
        return 0
    found = _found(engine.drafter, info.name, info.context, gains)
    console.print(_costs(found), "", _depths(found))
    if importlib.util.find_spec("matplotlib") is None:
        console.print(NO_PICTURE, soft_wrap=True)
    else:
        with _writing(file, out):
            curves.draw(file, found)
        console.print(f"picture: {file}", soft_wrap=True)
    return 0


@contextmanager
def _writing(file: Path, out: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mend = (
            "--out: name a file in a directory that is there"
            if out
            else "--cache-dir: name another"
        )
        raise ConfigError(f"{mend}; {str(file)!r} cannot be written: {error.strerror}") from error


def _sharing(config: Config) -> str:
    """Where a server answers that has these settings; empty if none does."""
    url = url_of(config.host, config.port)
    asked = HTTPConnection(url.removeprefix("http://"), timeout=HEALTH_S)
    try:
        asked.request(
            "GET", "/health", headers={"Host": "localhost"}
        )  # a name that is always allowed
        found = json.load(asked.getresponse())
    except (OSError, HTTPException, ValueError):
        return ""
    finally:
        asked.close()
    return url if isinstance(found, dict) and "status" in found else ""


def _found(
    chain: Proposer, model: str, most: int, gains: Mapping[str, Mapping[int, float]]
) -> Found:
    """What a step costs and how deep is drafted, by the controller itself. `most` tokens of
    context."""
    costs = chain.costs
    contexts = [c for c in CONTEXTS if c <= most] or [most]
    steps = {
        c: dict(zip(costs.rows, each, strict=True))
        for c, each in zip(costs.contexts, costs.measured, strict=True)
    }
    sources = {"copies": (0.0, MAX_DEPTH)}
    if chain.model:
        sources["the draft model"] = (chain.model.seconds, MODEL_DEPTH)
    depths = {
        source: {c: {p: _depth(costs, p, c, *each) for p in ACCEPTANCES} for c in contexts}
        for source, each in sources.items()
    }
    return Found(model, steps, depths, gains)


def _depth(
    costs: Costs, acceptance: float, context: int, seconds: float, most: int
) -> tuple[int, float]:
    option = Option("tuned", [acceptance] * most, seconds)
    control = Controller(costs, lambda key: acceptance)
    [(depth, _)] = control.decide([control.pilot()], [[option]], context, "exact")
    curve = costs.curve(depth + 1, context, "exact")
    tokens = sum(acceptance**i for i in range(depth + 1))
    return depth, tokens * float(curve[0]) / (float(curve[-1]) + depth * seconds)


def _kernels(console: Console, why: str) -> None:
    if why:
        return console.print(f"{why}: no kernel was tried")
    table = Table(box=None, pad_edge=False, title="Kernels", title_justify="left")
    for column in ("kernel and shape", "used for rows", "times as fast, by rows", "why"):
        table.add_column(column, overflow="fold")
    for name, found in KERNELS.verdicts.items():
        rows = f"{found.least} to {found.most}" if found.way else "none"
        gains = "  ".join(f"{count}: {gain:.2f}" for count, gain in found.gains.items())
        table.add_row(name, rows, gains, "; ".join(filter(None, (found.way, found.why))))
    console.print(table if KERNELS.verdicts else "no kernel of ours fits this model")


def _costs(found: Found) -> Table:
    table = Table(box=None, pad_edge=False, title="A step, in ms", title_justify="left")
    table.add_column("context", justify="right")
    rows = list(next(iter(found.steps.values())))
    for count in rows:
        table.add_column(f"{count} row{'s' * (count > 1)}", justify="right")
    for context, seconds in found.steps.items():
        table.add_row(str(context), *(f"{seconds[count] * 1e3:.1f}" for count in rows))
    return table


def _depths(found: Found) -> Table:
    title = "Tokens drafted (and times as fast as plain steps), by acceptance"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("drafted by", "context"):
        table.add_column(column)
    for acceptance in ACCEPTANCES:
        table.add_column(f"{acceptance:.0%}", justify="right")
    for source, by_context in found.depths.items():
        for context, chosen in by_context.items():
            table.add_row(
                source, str(context), *(f"{depth} ({gain:.2f})" for depth, gain in chosen.values())
            )
    return table
