"""What `mlxspec doctor` shows: the machine, the paths, the server, and what came of every kernel
here.

Rule: it looks. Nothing is started, proven, fetched or written, and no weight is read beyond its
header.
"""

import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from mlxspec import __version__, blas
from mlxspec.commands.models import flaws, weight
from mlxspec.config import FILE, Config, ConfigError, data_dir, url_of
from mlxspec.files import format_size
from mlxspec.service import here, ledger
from mlxspec.service.status import Status, headline, installed, look
from mlxspec.types import UserError

PYTHON = (3, 11)  # requires-python
MACOS = 14  # the first that MLX's wheels run on
WIDE = 150  # columns of a table that goes to a file
NARROW = 100  # columns, below which a table is all height and cuts words
STYLES = {"used": "green", "parked": "bold yellow", "not used": "", "not tried yet": "dim"}


def doctor(config: Config, wrong: str, as_json: bool) -> int:
    """Look and report; `wrong` is what the settings lack, if they could not be read. Exit status:
    0, or 1 where something is broken."""
    report = examine(config)
    report["broken"] = [wrong] * bool(wrong) + report["broken"]
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        console = Console(markup=False)
        show(report, console if console.is_terminal else Console(width=WIDE, markup=False))
    return int(bool(report["broken"]))


def examine(config: Config) -> dict[str, Any]:
    """All that there is to see, as plain data."""
    broken: list[str] = []
    library = blas.load()
    machine = {"mlxspec": __version__, "python": platform.python_version(), "system": _system()}
    for package in ("mlx", "mlx-lm"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            broken.append(f"{package} is not installed; run: pip install mlxspec")
    report: dict[str, Any] = {"machine": machine, "paths": {}, "server": _server(config, broken)}
    report |= {"model": {}, "kernels": [], "broken": broken}
    if not any(data_dir("metal").glob("*.metal")):
        broken.append(f"{data_dir('metal')} holds no kernels; install mlxspec again")
    if sys.platform == "darwin" and platform.machine() != "arm64":
        broken.append(f"Python runs as {platform.machine()}; install one for arm64")
    if tuple(map(int, platform.python_version_tuple()[:2])) < PYTHON:
        broken.append(
            f"Python {platform.python_version()} is too old; install {'.'.join(map(str, PYTHON))}"
        )
    mac = platform.mac_ver()[0]
    if mac and int(mac.partition(".")[0]) < MACOS:
        broken.append(f"macOS {mac} is older than {MACOS}, which MLX needs; update macOS")
    try:
        from mlxspec.engine import memory
        from mlxspec.kernels.verify import machine as facts
        from mlxspec.kernels.verify import missing
        from mlxspec.model.hub import cache_of
    except ImportError as error:
        broken.append(f"{error}; install mlxspec again")
        return report
    machine |= {"chip": facts()["chip"], "memory": memory.gib(memory.total())}
    machine["metal"] = "no" if missing() else "yes"
    machine["blas"] = library or (
        "Accelerate" if sys.platform == "darwin" else "MLX's own, slow; " + blas.MEND
    )
    if missing() and sys.platform == "darwin":
        broken.append(
            "MLX finds no Metal: this Mac's GPU cannot be used; see that no MLX_ variable hides it"
        )
    cache = cache_of(config)
    settings = Path(os.environ.get("MLXSPEC_CONFIG") or FILE).expanduser()
    report["paths"] = {
        "settings": str(settings) + " (not there)" * (not settings.is_file()),
        "cache": f"{cache}, {format_size(_bytes(cache))}",
    }
    if closed := ledger.closed():
        report["server"]["panics"] = f"not seen: {', '.join(closed)} cannot be read"
    there = next(each for each in (cache, *cache.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        broken.append(f"{there} cannot be written; name another directory: --cache-dir")
    report["model"], report["kernels"] = _model(config, broken)
    return report


def _system() -> str:
    mac = platform.mac_ver()[0]
    return (
        f"macOS {mac} {platform.machine()}" if mac else f"{platform.system()} {platform.machine()}"
    )


def _bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def _server(config: Config, broken: list[str]) -> dict[str, str]:
    """Who is at the settings' port, and how the service is, whatever port that has."""
    url = url_of(config.host, config.port)
    now = look(url, config.api_key) if config.port else None
    try:
        at, service = installed(here()), "not installed; mlxspec service install does that"
    except UserError as error:
        at, service = "", str(error)
    if at:
        about = now if now and at == url else look(at, config.api_key)
        service = f"{about.service} at {at}: {about.note or headline(about)}"
        if about.note:
            broken.append(
                f"the service: {about.note}; mlxspec service logs may say why, restart ends it"
            )
        elif about.service == "held" or (about.state == "unwell" and at != url):
            broken.append(f"the service: {about.why}")
    return {"port": _port(config, now, broken) if now else "any free one", "service": service}


def _port(config: Config, now: Status, broken: list[str]) -> str:
    if now.version or now.service in ("waiting", "held"):
        if now.state == "unwell" and now.service != "held":
            broken.append(f"the server at {now.url}: {now.why}; start it anew")
        return f"{now.url} is ours: {headline(now)}"
    if now.state in ("stopped", "not installed"):  # nobody answers; there may still be somebody
        from mlxspec.server.process import bind

        try:
            bind(config).close()
            return f"{now.url} is free"
        except ConfigError as error:
            broken.append(f"{str(error).partition(';')[0]}; {_other(config.port)}")
    else:
        broken.append(
            f"{now.url} is somebody else's ({now.why.partition(';')[0]}); {_other(config.port)}"
        )
    return f"{now.url} is taken"


def _other(port: int) -> str:
    return f"end what has it (lsof -i :{port}), or set another port, by MLXSPEC_PORT or in the settings"


def _model(config: Config, broken: list[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The models by their files, and the kernels for them, besides those that are known of
    others."""
    from mlxspec.kernels.verify import Verdict, VerdictFile, missing
    from mlxspec.model.hub import DEFAULT, cache_of
    from mlxspec.resolve import PROOFS, models_of, on_disk

    about: dict[str, str] = {}
    names: list[str] = []
    for number, (model, kv_bits) in enumerate(models_of(config)):
        which = f" {number + 1}" * bool(number)
        about["name" + which] = (model if number else config.model) or DEFAULT
        try:
            path = on_disk(model, config)
            about["path" + which] = str(path or "not fetched yet: mlxspec pull does it")
            if path:
                about["weights" + which] = format_size(weight(path))
                names += _cases(path, kv_bits, config, broken)
        except UserError as error:
            broken.append(str(error))
    known = VerdictFile(cache_of(config) / PROOFS).load()
    rows = []
    for name in dict.fromkeys([*names, *known]):
        verdict = known.get(name) or Verdict(
            why=missing() and f"{missing()}: it would be proven on a Mac"
        )
        state = "used" if verdict.way else "parked" if verdict.parked else "not used"
        state = state if name in known else "not tried yet"
        rows.append({"name": name, "model": name in names, "state": state, **asdict(verdict)})
    about["kernels"] = config.kernels
    return about, rows


def _cases(path: Path, kv_bits: int, config: Config, broken: list[str]) -> list[str]:
    """The names of what kernels could do for the model at `path`, if its files are whole. Raises
    UserError."""
    from mlxspec.engine import memory
    from mlxspec.model.layout import load
    from mlxspec.model.quantized import cases_of

    room, need = config.memory_bytes or memory.total(), weight(path) + memory.headroom()
    if need > room:
        broken.append(
            f"{path}: weights and headroom take {memory.gib(need)} of {memory.gib(room)} of memory; give a"
            " smaller one: mlxspec models"
        )
    if cut := flaws(path):
        broken += [f"{flaw}; remove {path} and run: mlxspec pull" for flaw in cut]
        return []
    try:
        return [case.name for case in cases_of(load(path)[0], config.block_size, kv_bits)]
    except (RuntimeError, ValueError) as error:  # what MLX says of weights that it cannot take
        broken.append(f"{path}: {error}; remove it and run: mlxspec pull")
        return []


def show(report: dict[str, Any], console: Console) -> None:
    """As tables."""
    for part in ("machine", "paths", "server", "model"):
        for name, value in report[part].items():
            said = str(value).replace(str(Path.home()), "~")  # it may be sent to others
            console.print(Text.assemble((f"{name:9} ", "bold"), said), soft_wrap=True)
        console.print()
    if report["kernels"]:
        _kernels(report["kernels"], console)
    else:
        console.print("no kernel of ours fits this model, or it is not here yet")
    if report["model"].get("kernels") == "off":
        console.print("kernels = off: none of them runs, whatever is said above")
    for wrong in report["broken"]:
        console.print(Text.assemble(("broken: ", "bold red"), wrong), soft_wrap=True)


def _kernels(rows: list[dict[str, Any]], console: Console) -> None:
    """As a table, or a block for each."""
    names = ("kernel and shape", "state", "rows", "times as fast", "error", "why")
    heads = (Column(name, overflow="fold", no_wrap=name in names[1:5]) for name in names)
    table = Table(*heads, box=None, pad_edge=False)
    blocks: list[RenderableType] = []
    for row in rows:
        gains = row["gains"].values()
        first, *rest = cells = (
            Text(row["name"] + " (another model's)" * (not row["model"])),
            Text(row["state"], STYLES[row["state"]]),
            Text(f"{row['least']} to {row['most']}" if row["way"] else ""),
            Text(f"{min(gains):.2f} to {max(gains):.2f}" if gains else ""),
            Text(f"{row['error']:.1e}" if gains else ""),
            Text("; ".join(filter(None, (row["way"], row["why"])))),
        )
        table.add_row(*cells)
        said = [
            Text.assemble(f"{name}: ", cell)
            for name, cell in zip(names[1:], rest, strict=True)
            if cell
        ]
        blocks += [first, *(Padding(each, (0, 0, 0, 2)) for each in said)]
    console.print(*(blocks if console.width < NARROW else [table]), sep="\n")
