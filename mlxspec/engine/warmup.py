"""What an earlier start found out about a model, so that the next need not: how it runs, what steps
take.

Rule: it holds for the very files, versions, machine and settings in whose fingerprint's name it is
kept; what cannot be read is found out again.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx

from mlxspec import __version__, blas, config
from mlxspec.cache.runfile import fingerprint
from mlxspec.files import write_atomic
from mlxspec.kernels.verify import KERNELS
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.runner import Layout
from mlxspec.speculate.controller import GRID, Costs

log = logging.getLogger("mlxspec")

LONGEST = 1e6  # seconds that a step may have taken


@dataclass(slots=True)
class Known:
    """`seconds` is how long the slowest step of the warm-up took, 0 before it; `costs` are those of
    steps with the kernels of `kernels`."""

    fit: LayoutChoice
    seconds: float = 0.0
    costs: Costs | None = None
    kernels: list[list[str | int]] = field(default_factory=list)


def place(cache: Path | None, model: Path, *settings: object) -> Path | None:
    """The file for what is known of `model` under `settings`; None where nothing is kept."""
    if cache is None:
        return None
    about = {name: version(name) for name in ("mlx", "mlx-lm")} | {"mlxspec": __version__}
    about |= {"settings": str(settings)}
    about |= {
        "machine": platform.platform() + platform.processor(),
        "device": str(mx.default_device()),
    }
    about |= {
        "blas": f"{blas.load()} {os.cpu_count()} {os.environ.get('OPENBLAS_NUM_THREADS', '')}"
    }
    about |= {"code": _code()}
    return cache / f"known-{fingerprint(model, about)}.json"


def _code() -> str:
    """Of what runs a model: a version may be worked on."""
    digest, here = blake2b(digest_size=16), Path(config.__file__).parent
    for file in sorted(
        file for part in ("model", "kernels") for file in (here / part).glob("*.py")
    ):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def kernels() -> list[list[str | int]]:
    """That are in use, and for which rows."""
    return sorted([name, v.way, v.least, v.most] for name, v in KERNELS.verdicts.items() if v.way)


def recall(file: Path | None, again: bool = False) -> Known | None:
    """None where nothing of ours is there, or all is to be found out `again`."""
    try:
        found = json.loads(file.read_text("utf-8")) if file and not again else {}
        fit = found["fit"]
        windows = {int(window): int(size) for window, size in fit["windows"].items()}
        made = LayoutChoice(**fit | {"windows": windows, "refused": tuple(fit["refused"])})
        sizes = (made.token_bytes, made.state_bytes, made.vocab, *windows.values())
        if made.layout not in get_args(Layout) or not all(type(n) is int and n >= 0 for n in sizes):
            raise ValueError("not a fit")
        if not 0 <= (seconds := float(found["seconds"])) < LONGEST:
            raise ValueError("not seconds")
        return Known(made, seconds, _costs(found["costs"]), found["kernels"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None  # not there yet, or not ours


def _costs(found: Mapping[str, Any] | None) -> Costs | None:
    """Raises ValueError, KeyError, TypeError and AttributeError where these are none."""
    if found is None:
        return None
    (short, long), (low, high) = found["contexts"], found["measured"]
    drawn = {str(kind): float(s) for kind, s in found["sampling"].items()}
    sane = len(low) == len(high) == len(GRID) and all(0 < s < LONGEST for s in (*low, *high))
    if not sane or not all(0 <= s < LONGEST for s in drawn.values()):
        raise ValueError("not costs")
    return Costs((int(short), int(long)), GRID, (low, high), drawn)


def keep(file: Path | None, known: Known) -> None:
    """Without it the next start is slower, no more: failures are told. What want of memory may have
    decided is decided anew."""
    try:
        if file is not None and known.fit.sure:
            write_atomic(file, json.dumps(asdict(known)).encode())
    except OSError as error:
        log.warning("%s: %s; the next start will find it out again", file, error.strerror)
