"""What lets a model see images: its tower, read beside the weights, and tried before it is used.

Rule: what fails here leaves a model that reads text only, and says why once, in the log.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.core import array as Array

from mlxspec import log
from mlxspec.config import Config
from mlxspec.files import read_json
from mlxspec.load.warmup import WarmupCache
from mlxspec.model.checkpoint import load_weights, parameter_bytes
from mlxspec.model.parallel import ProcessGroup
from mlxspec.model.probe import BLOCK, logits_error
from mlxspec.model.runner import Runner
from mlxspec.model.vision import load_vision
from mlxspec.model.vision.seam import CACHED_BYTES, Eyes
from mlxspec.sequences import SeqState, Span
from mlxspec.text.images import ImageReader, image_reader
from mlxspec.types import Image, UnsupportedModel, line_of

TEXTS = (3, 1, 4), (1, 5, 9, 2)  # before and after the image that is tried
BLOCKS = 64


def open_tower(path: Path, config: Config, group: ProcessGroup) -> nn.Module | None:
    """The tower of a model, whose weights stay on disk; None where it has none that can be used."""
    if not config.vision:
        return None
    try:
        tower = load_vision(path, read_json(path / "config.json"))
        if tower and group.group:
            raise UnsupportedModel("several ranks share the model")
        return tower
    except UnsupportedModel as error:
        log.warning("%s reads text only: %s", path, error)
        return None


def tower_bytes(tower: nn.Module | None) -> int:
    """What a tower takes in memory, with the features that it keeps."""
    return parameter_bytes(tower) + CACHED_BYTES if tower else 0


def open_eyes(
    model: nn.Module,
    tower: nn.Module | None,
    cache: WarmupCache,
    path: Path,
    config: Config,
) -> Eyes | None:
    """Read the tower's weights, and let the model see by it. The first start tries it on an image;
    None where it fails."""
    if not tower:
        return None
    files = read_json(path / "config.json")
    reader = image_reader(path, files, config.max_image_pixels)
    eyes, why = None, cache.blind or ""
    try:
        if not why and not reader:
            raise UnsupportedModel("what its image processor's files say is not understood")
        if not why and reader:
            load_weights(tower)
            eyes = Eyes(model, tower, files)
            eyes.uncut = reader.uncut
            if cache.blind is None:
                runner = cache.layout.runner(model, BLOCK, BLOCKS)
                runner.see(eyes)
                cache.blind = why = image_error(runner, reader)
    except UnsupportedModel as error:
        cache.blind = why = str(error)
    except RuntimeError as error:  # MLX's: for lack of memory, perhaps; the next start tries again
        why = line_of(error)
    except Exception as error:  # the model's own code
        cache.blind = why = line_of(error)
    cache.save()
    if why:
        log.warning("%s reads text only: %s", path, why)
        return None
    return eyes


def image_error(runner: Runner, reader: ImageReader) -> str:
    """What is wrong with a prompt with a small image, "" if nothing: it must be read alike in one
    forward and in chunks that cut the image, if its rows see only those before them, and another
    image must be read otherwise."""
    if runner.layout == "solo":
        return "in the solo layout the model is mlx-lm's own"
    rng = np.random.default_rng(0)
    side = reader.merge
    shape = 2 * side * 3 * side, 3 * reader.patch**2

    def image(digest: bytes) -> Image:
        patches = rng.integers(0, 256, shape).astype(np.uint8)
        return Image(patches, 2 * side, 3 * side, digest, reader.mean, reader.std)

    one = image(b"one")
    whole = _logits(runner, reader, one, cuts=())
    first = len(TEXTS[0]) + len(reader.before)
    cuts = first + 2, first + 4
    if reader.both_ways:
        span = reader.span(one, len(TEXTS[0]))[1]
        cuts = span.start, span.stop
        causal = _logits(runner, replace(reader, both_ways=False), one, cuts=())
        if mx.array_equal(whole, causal).item():
            return "the rows of an image do not see those after them"
    cut = _logits(runner, reader, one, cuts)
    if wrong := logits_error([{0: cut}], [whole[None]]):
        return f"an image in chunks: {wrong}"
    other = _logits(runner, reader, image(b"other"), cuts=())
    if mx.array_equal(whole, other).item():
        return "another image makes no difference"
    return ""


def _logits(
    runner: Runner,
    reader: ImageReader,
    image: Image,
    cuts: Sequence[int],
) -> Array:
    """[vocab] after a prompt with an image that is computed in chunks."""
    before, behind = TEXTS
    ids, span = reader.span(image, len(before))
    tokens = [*before, *ids, *behind]
    table = list(range(1, 2 + len(tokens) // BLOCK))
    state = SeqState(prompt_len=len(tokens), images=(span,))
    rows = Span(state, [table], tokens, start=0, count=len(tokens), samples=True)
    start = 0
    for stop in (*cuts, len(tokens)):
        part = replace(
            rows,
            start=start,
            count=stop - start,
            samples=stop == len(tokens),
        )
        done = runner.forward([part], None)
        mx.eval(done.logits)
        start = stop
    logits: Array = done.logits[-1]
    return logits
