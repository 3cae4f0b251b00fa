"""A training from its settings to the head's files; what was done is kept, so that a run that was
stopped goes on.

Rule: the head that is in use is replaced only by a whole one.
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

MADE = "training.json"  # beside a head: of what it was made
SAVE_S = 60.0  # between two saves of the state, at least
SAVE_PART = 50  # of the time, at most, goes into saving
MEASURES = 8  # on held-out samples while it trains


def known_head(target: Target, path: Path, size: int | None) -> HeadFiles | None:
    """The head in a directory that training made, if it drafts `size` different tokens; None: any
    number. Of one that cannot be used the log says why."""
    about = read_json(path / MADE)
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
    """Make the steps of a plan, a batch for each, from those on that `state` keeps. `about` tells
    this training from others. Returns what `measure` says of held-out samples at the end. Raises
    OSError."""
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
    """Go on from a saved state, if it is whole and of the training with this digest."""
    with suppress(RuntimeError, ValueError):  # MLX's, of a damaged file
        found: Any = mx.load(str(state), return_metadata=True)
        tensors, about = found
        if about.get("samples") == digest:
            trainer.resume(tensors)
            print(f"going on after step {trainer.done}")
            return
    print("starting again: other options, texts or another head than before, or a damaged file")


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
    """Write the files of a head, which began as `files`, into a directory. Raises OSError."""
    flat: Any = tree_flatten(trainer.head.module.parameters())
    tensors = {name: array.astype(mx.bfloat16) for name, array in flat}
    tensors |= {name: files.tensors[name] for name in ("d2t", "t2d")}
    write_tensors(place / "model.safetensors", tensors, {"format": "pt"})
    for name, content in (("config.json", files.config), (MADE, about)):
        write_atomic(place / name, json.dumps(content, indent=2).encode() + b"\n")


def install(made: Path, place: Path) -> None:
    """Let the link `place` point to a head's directory beside it, in one moment. Raises
    OSError."""
    link = place.with_name(f"{place.name}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(made.name)
    link.replace(place)


def drop_others(place: Path) -> None:
    """Delete the heads beside the one that `place` points to."""
    kept = place.resolve()
    for other in place.parent.glob(f"{glob.escape(place.name)}.*"):
        if other.resolve() != kept:
            shutil.rmtree(other, ignore_errors=True)
