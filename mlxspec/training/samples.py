"""What a head learns from: answers of the model, and the user's own texts.

Rule: samples have a fixed order, so that the same settings train on the same ones again.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mlxspec.config import data_dir
from mlxspec.types import UserError

MOST_FILES = 4000
TEXT_BYTES = 1 << 20  # of a file; longer ones are rarely written by hand
PIECE_CHARS = 2000
MOST_PIECES = 50_000  # at most 100 MB: far more than training uses
HELD_OUT = 20  # one subject in so many is for measuring


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids; a head learns to draft those from `first` on."""

    tokens: list[int]
    first: int

    def __len__(self) -> int:
        """Number of tokens to learn."""
        return len(self.tokens) - self.first


def up_to(wanted: int, samples: Iterable[tuple[str, Sample]]) -> Iterator[tuple[str, Sample]]:
    """The first samples, each after its subject, until `wanted` tokens are to be learned."""
    for subject, sample in samples:
        yield subject, sample
        wanted -= len(sample)
        if wanted <= 0:
            return


LINE = TypeAdapter(tuple[str, Sample])


@dataclass(frozen=True, slots=True)
class SampleFile:
    """Samples by their keys: JSON lines, each written when its answer ends; of a model with
    `vocab` tokens."""

    path: Path
    vocab: int = 1 << 31

    def read(self) -> dict[str, Sample]:
        """All samples of the file. Skips a truncated line, and one with anything else in it: MLX
        does not check indices."""
        samples = {}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            with suppress(ValidationError):
                key, sample = LINE.validate_json(line, strict=True)
                tokens = sample.tokens
                whole = 0 < sample.first <= len(tokens)
                if whole and 0 <= min(tokens) <= max(tokens) < self.vocab:
                    samples[key] = sample
        return samples

    def append(self, key: str, sample: Sample) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        self.path.touch(0o600)
        with self.path.open("ab") as out:
            out.write(LINE.dump_json((key, sample)) + b"\n")


def general_prompts() -> list[tuple[str, str]]:
    """The prompts of models/training/prompts.toml in a fixed random order, each after its subject,
    which several have in common."""
    prompts = [
        (subject, form.replace("{}", subject))
        for group in _prompts()["group"]
        for form, subject in product(group["forms"], group["subjects"])
    ]
    return sorted(prompts, key=lambda prompt: key_of(prompt[1]))


def file_prompts(texts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A question about each piece of a file, after the file's name."""
    forms = _prompts()["files"]["forms"]
    prompts = []
    for name, text in texts:
        form = forms[int(key_of(text), 16) % len(forms)]
        prompts.append((name, form.replace("{name}", name).replace("{text}", text)))
    return prompts


def held_out(subject: str) -> bool:
    """Whether samples of a subject are for measuring, not for learning."""
    return int(key_of(subject), 16) % HELD_OUT == 0


def key_of(text: str) -> str:
    """16 hex digits; their order is random and stays the same when other texts are added."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _prompts() -> dict[str, Any]:
    file = data_dir("models") / "training" / "prompts.toml"
    return tomllib.loads(file.read_text("utf-8"))


def pieces(directory: Path) -> list[tuple[str, str]]:
    """The text files under a directory in pieces of whole lines, each after its file's name, in a
    fixed random order; skips hidden files and names that are not text. Raises UserError where there
    are none."""
    files = [path for path in directory.rglob("*") if _is_readable(path, directory)]
    files.sort(key=lambda path: key_of(str(path.relative_to(directory))))
    every = (
        (str(path.relative_to(directory)), piece)
        for path in files[:MOST_FILES]
        for piece in _pieces_of(path)
    )
    texts = list(islice(every, MOST_PIECES))
    if not texts:
        raise UserError(f"--data {directory} holds no text; give a directory of code or documents")
    return sorted(texts, key=lambda text: key_of("\0".join(text)))


def _is_readable(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts
    odd = any(part.startswith(".") or not part.isprintable() for part in parts)
    if odd or path.is_symlink() or not path.is_file():
        return False
    return path.stat().st_size <= TEXT_BYTES


def _pieces_of(path: Path) -> Iterator[str]:
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):  # unreadable, or not a text
        return
    if "\0" in text:
        return
    piece = ""
    for line in text.splitlines(keepends=True):
        if len(piece) + len(line) > PIECE_CHARS and piece:
            yield piece
            piece = ""
        piece += line[:PIECE_CHARS]
    if piece.strip():
        yield piece
