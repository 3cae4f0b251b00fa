"""Keeps the tokens of the server's answers, for a head to learn from (`record = on`).

Rule: token ids only, in files that only their owner may read. The server never waits for them; an
answer that cannot be written is lost.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from mlxspec import log
from mlxspec.files import lock
from mlxspec.model.hub import storage_name
from mlxspec.training.samples import Sample, SampleFile, key_of

FILE_BYTES = 32 << 20  # of a file; a model has two, and the older one is replaced
LENGTH = 4096  # most tokens of a sample
PROMPT = 256  # of them from its prompt: a head learns from the answer
WAITING = 256  # most samples waiting to be written, up to some 150 KB each


class Recorder:
    """Appends answers to `<folder>/<storage name>.jsonl`. `paths` are the models' directories by
    their names."""

    def __init__(self, folder: Path, paths: Mapping[str, Path]) -> None:
        self.folder = folder
        self.paths = paths
        self._waiting = Queue[tuple[str, Sample]](WAITING)
        Thread(target=self._write, name="recorder", daemon=True).start()

    def add(self, model: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Queue the end of a prompt and its answer, unless too many wait."""
        tokens = [*prompt[-PROMPT:], *answer][:LENGTH]
        try:
            self._waiting.put_nowait((model, Sample(tokens, min(PROMPT, len(prompt)))))
        except Full:
            log.warning("an answer is not recorded: %s is too slow", self.folder)

    def _write(self) -> None:
        try:
            while True:
                model, sample = self._waiting.get()
                path = self.folder / f"{storage_name(model, self.paths[model])}.jsonl"
                with lock(self.folder / "lock"):
                    SampleFile(path).append(key_of(str(sample.tokens)), sample)
                    if path.stat().st_size > FILE_BYTES:
                        path.replace(path.with_suffix(".old.jsonl"))
        except OSError as error:
            log.warning("answers are no longer recorded in %s: %s", self.folder, error)
        while True:
            self._waiting.get()


def recorded(folder: Path, model: Path, vocab: int = 1 << 31) -> list[Sample]:
    """The answers of the model in a directory, by whatever name it was served. `vocab`: its
    number of tokens, as another model may have been there before. Raises OSError."""
    if not folder.exists():
        return []
    with lock(folder / "lock"):  # a server may replace the older file just now
        files = sorted(folder.glob(f"*{storage_name('', model)}*.jsonl"), reverse=True)
        return [sample for path in files for sample in SampleFile(path, vocab).read().values()]
