"""What an earlier start found out about a model, so that the next need not: how it runs, how fast it reads.

Rule: it holds for the very files, versions, machine and settings in whose fingerprint's name it is kept; what
cannot be read is found out again.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxspec import __version__
from mlxspec.engine.runfile import fingerprint
from mlxspec.model.load import Fit

log = logging.getLogger("mlxspec")


@dataclass(frozen=True, slots=True)
class Known:
    """`seconds` is how long the slowest step of the warm-up took."""

    fit: Fit
    seconds: float


def place(cache: Path | None, model: Path, settings: Mapping[str, object]) -> Path | None:
    """The file for what is known of `model` under `settings`; None where nothing is kept."""
    about = {name: str(value) for name, value in settings.items()}
    about |= {name: version(name) for name in ("mlx", "mlx-lm")} | {"mlxspec": __version__}
    about |= {"machine": platform.node() + platform.machine(), "device": str(mx.default_device())}
    about |= {"threads": f"{os.cpu_count()} {os.environ.get('OPENBLAS_NUM_THREADS', '')}"}
    return cache and cache / f"known-{fingerprint(model, about)}.json"


def recall(file: Path | None) -> Known | None:
    try:
        found = json.loads(file.read_text("utf-8")) if file else {}
        fit = found["fit"]
        windows = {int(window): int(size) for window, size in fit["windows"].items()}
        made = Fit(**fit | {"windows": windows, "refused": tuple(fit["refused"])})
        return Known(made, float(found["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there yet, or not ours


def keep(file: Path | None, known: Known) -> None:
    """Write it beside and move it there. Without it the next start is slower, no more: failures are told."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(asdict(known)), "utf-8")
        made.replace(file)
    except OSError as error:
        log.warning("%s: %s; the next start will find it out again", file, error.strerror)
