"""A training run, from its settings to the head's files; progress is saved, so that a run that was
stopped continues.

Rule: only a complete head replaces the one in use.
"""

import glob
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.files import read_json, write_atomic
from mlxspec.progress import progress
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.files import HeadFiles, find_head
from mlxspec.training.samples import Sample
from mlxspec.training.target import Target
from mlxspec.training.trainer import Trainer
from mlxspec.types import Json

RECORD = "training.json"  # beside a head: how it was trained
SAVE_S = 60.0  # between two saves of the state, at least
SAVE_PART = 50  # one part in so many of the time, at most, goes into saving
MEASURES = 8  # on held-out samples while it trains


def trained_head(target: Target, path: Path, size: int | None) -> HeadFiles | None:
    """The head in a directory, if it was trained here and drafts `size` different tokens; None: any
    number. The log says why a head cannot be used."""
    about = read_json(path / RECORD)
    if not about or size not in (None, about.get("vocabulary")):
        return None
    files = find_head(path)
    head = load_head(files, target.model)
    return files if head and read_weights(head) else None


def run(
    trainer: Trainer,
    plan: Sequence[Sequence[Sample]],
    held_out: Sequence[Sample],
    state: Path,
    about: Json,
    wait: Callable[[], None],
) -> list[float]:
    """Train on the batches of a plan, a step for each, continuing after those saved in `state`.
    `about` distinguishes this training from others. Returns `measure` of the held-out samples at
    the end. Raises OSError."""
    tokens = json.dumps([about, *(s.tokens for batch in plan for s in batch)])
    digest = blake2b(tokens.encode()).hexdigest()
    if state.exists():
        resume(trainer, state, digest)
    due = time.monotonic() + SAVE_S
    try:
        with progress("Training") as report:
            while trainer.done < len(plan):
                wait()
                loss = trainer.step(plan[trainer.done])
                report(trainer.done, len(plan))
                if trainer.done % max(1, len(plan) // MEASURES) == 0:
                    kept = 1 + sum(trainer.measure(held_out, wait))
                    print(
                        f"step {trainer.done} of {len(plan)}: loss {loss:.2f},"
                        f" {kept:.2f} tokens a round on held-out answers",
                        flush=True,
                    )
                if time.monotonic() > due:
                    began = time.monotonic()
                    write_tensors(state, trainer.state(), {"samples": digest})
                    ended = time.monotonic()
                    due = ended + max(SAVE_S, SAVE_PART * (ended - began))
    finally:
        write_tensors(state, trainer.state(), {"samples": digest})
    return trainer.measure(held_out, wait)


def resume(trainer: Trainer, state: Path, digest: str) -> None:
    """Continue from a saved state, if it is whole and of the training with this digest."""
    with suppress(RuntimeError, ValueError):  # MLX's, of a damaged file
        loaded: Any = mx.load(str(state), return_metadata=True)
        tensors, about = loaded
        if about.get("samples") == digest:
            trainer.resume(tensors)
            print(f"continuing after step {trainer.done}")
            return
    print("starting over: the options, texts or head have changed, or the file is damaged")


def write_tensors(path: Path, tensors: dict[str, mx.array], about: dict[str, str]) -> None:
    """Write a whole safetensors file or nothing. Raises OSError."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    part = path.with_name(f"part-{path.name}")
    try:
        mx.save_safetensors(str(part), tensors, metadata=about)
        part.replace(path)
    except RuntimeError as error:  # MLX's, where the disk is full
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def save_head(trainer: Trainer, files: HeadFiles, place: Path, about: Json) -> None:
    """Write the trained head, which began as `files`, into a directory. Raises OSError."""
    flat: Any = tree_flatten(trainer.head.module.parameters())
    tensors = {name: array.astype(mx.bfloat16) for name, array in flat}
    tensors |= {name: files.tensors[name] for name in ("d2t", "t2d")}
    write_tensors(place / "model.safetensors", tensors, {"format": "pt"})
    for name, content in (("config.json", files.config), (RECORD, about)):
        write_atomic(place / name, json.dumps(content, indent=2).encode() + b"\n")


def install(head: Path, place: Path) -> None:
    """Point the link `place` to a head's directory beside it, atomically. Raises OSError."""
    link = place.with_name(f"{place.name}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(head.name)
    link.replace(place)


def drop_others(place: Path) -> None:
    """Delete the heads beside the one that `place` points to."""
    kept = place.resolve()
    for other in place.parent.glob(f"{glob.escape(place.name)}.*"):
        if other.resolve() != kept:
            shutil.rmtree(other, ignore_errors=True)
