"""The logits of models that see are those of mlx-vlm's own modules, on random weights: whole
towers, projectors, positions and deepstack. Needs mlx-vlm, which nothing else does:
pip install --no-deps mlx-vlm==0.7.10."""

import functools
import importlib
import io
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image as Pillow

from mlxspec.model.runner import Runner
from mlxspec.sequences import SeqState, Span
from mlxspec.text.images import CLIP_MEAN
from mlxspec.types import ImageSpan
from tests.heads import oracle
from tests.support import vision

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its imports

CLOSE = 1e-4  # of the logits, absolute
BLOCK = 8
PATCH = 4
BREAK, END, START, STOP, IMAGE, VIDEO = 303, 304, 305, 306, 310, 311  # ids that texts have not


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    spans: list[ImageSpan]
    files: list[bytes]


def save(path: Path, kind: str) -> Path:
    """A checkpoint that mlx-vlm can read too: it has no scaled rope of Pixtral's text model, and no
    head of Gemma's own. The weights of Qwen3.5's text model are those of its initialization: it
    makes of rounding errors of 1e-6 in features 1e-4 in logits when they are as sharp as elsewhere,
    in mlx-vlm as well."""
    vision.save(path, kind)
    config = vision.config(kind)
    text = config["text_config"]
    config |= dict(image_token_id=IMAGE, video_token_id=VIDEO)
    config |= dict(vision_start_token_id=START, vision_end_token_id=STOP)
    config["vision_config"] |= dict(head_dim=16)
    if kind == "pixtral":
        text["rope_scaling"] = None
    if kind == "gemma4":
        text["tie_word_embeddings"] = True
        sliding = {"rope_theta": 1e4, "rope_type": "default"}
        full = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
        text["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    (path / "config.json").write_text(json.dumps(config))
    weights: Any = mx.load(str(path / "model.safetensors"))
    if kind == "gemma4":
        del weights["language_model.lm_head.weight"]
    if kind == "qwen3_5":
        weights |= {k: 0.4 * w for k, w in weights.items() if "language" in k and w.ndim > 1}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path


@functools.cache
def both(kind: str) -> tuple[vision.Seeing, Any]:
    """Ours and theirs."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), kind)
        ours = vision.open_model(path)
        theirs = load(path, kind)
    reader = ours.reader
    if reader.mean == CLIP_MEAN:
        reader = replace(reader, row_end=(BREAK,), after=(END,))
    return replace(ours, reader=reader), theirs


def load(path: Path, kind: str) -> Any:
    """mlx-vlm's model of a checkpoint."""
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    params = json.loads((path / "config.json").read_text())
    config = module.ModelConfig.from_dict(params)
    for part, name in (("text_config", "TextConfig"), ("vision_config", "VisionConfig")):
        if isinstance(params[part], dict):
            setattr(config, part, getattr(module, name).from_dict(params[part]))
    model = module.Model(config)
    weights: Any = mx.load(str(path / "model.safetensors"))
    found = {name: _unflat(name, w) for name, w in model.sanitize(weights).items()}
    if kind == "gemma4":
        found = model.language_model.sanitize(found)
    model.load_weights(list(found.items()))
    model.eval()
    return model


def _unflat(name: str, w: mx.array) -> mx.array:
    """A convolution's weight where ours is a matrix; two frames have unequal shares."""
    if name.endswith("patch_conv.weight"):
        return w.reshape(-1, PATCH, PATCH, 3)
    if name.endswith("patch_embed.proj.weight"):
        w = w.reshape(-1, 1, PATCH, PATCH, 3)
        return mx.concatenate([0.25 * w, 0.75 * w], axis=1)
    return w


def inputs(kind: str, files: Sequence[bytes]) -> dict[str, Any]:
    """What mlx-vlm's processor of the family makes of images."""
    size = vision.PROCESSORS[kind]
    pictures = [Pillow.open(io.BytesIO(file)) for file in files]
    if kind == "gemma4":
        from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor

        most = size["max_soft_tokens"]
        made = Gemma4ImageProcessor(patch_size=PATCH, max_soft_tokens=most)(pictures)[0]
        return {"pixel_values": [mx.array(image) for image in made["pixel_values"]]}
    if kind.startswith("qwen"):
        from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

        least, most = size["size"].values()
        made = Qwen3VLImageProcessor(patch_size=PATCH, min_pixels=least, max_pixels=most)(pictures)
    else:
        from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

        side = PATCH * both(kind)[0].reader.merge
        made = PixtralImageProcessor(size["size"], {"height": side, "width": side})(pictures)
    return {name: mx.array(values) for name, values in made.items()}


def theirs(kind: str, model: Any, prompt: Prompt) -> mx.array:
    """float32 [tokens, vocab]."""
    ids = mx.array([[IMAGE if token < 0 else token for token in prompt.tokens]])
    cache = [None for _ in model.language_model.model.layers]
    if hasattr(model.language_model, "make_cache"):
        cache = model.language_model.make_cache()
    logits: mx.array = model(ids, mask=None, cache=cache, **inputs(kind, prompt.files)).logits[0]
    return logits


def ours(seen: vision.Seeing, prompt: Prompt, cuts: Sequence[int]) -> mx.array:
    """float32 [chunks, vocab]: behind each chunk of the prompt."""
    runner = Runner(seen.model, seen.layout, BLOCK, 64)
    runner.see(seen.eyes)
    table = list(range(1, 2 + len(prompt.tokens) // BLOCK))
    state = SeqState(prompt_len=len(prompt.tokens), images=tuple(prompt.spans))
    start, found = 0, []
    for stop in (*cuts, len(prompt.tokens)):
        count = stop - start
        span = Span(state, [table], prompt.tokens, start=start, count=count, samples=True)
        done = runner.forward([span], None)
        found.append(done.logits[-1])
        mx.eval(found)
        start = stop
    return mx.stack(found)


def prompt(kind: str, name: str) -> Prompt:
    """With images: one, three of odd sizes, one in a later turn, one from a block's edge to another
    (or near it, as the family has rows), one that ends the prompt."""
    seen, _ = both(kind)
    rng = random.Random(name)
    qwen = kind.startswith("qwen")
    parts: list[Any] = []
    files: list[bytes] = []

    def text(n: int) -> None:
        parts.append([rng.randrange(300) for _ in range(n)])

    def image(width: int, height: int) -> None:
        files.append(vision.png(width, height, seed=len(files)))
        around = ([START], [STOP]) if qwen else ([], [])
        parts.extend([around[0], seen.reader.read(files[-1]), around[1]])

    if name == "three":
        text(3)
        image(32, 40)
        text(2)
        image(20, 9)
        image(9, 37)
        text(7)
        image(13, 27)
    elif name == "edge":
        text(2 * BLOCK - (qwen or len(seen.reader.before)))
        image(32, 32)
        text(9)
    else:
        text({"one": 5, "later turn": 43, "ends": 6}[name])
        image(40, 32)
        text({"one": 9, "later turn": 12, "ends": 0}[name])
    return Prompt(*vision.prompt(seen, *parts), files)


def cuts(name: str, of: Prompt) -> list[int]:
    """Where the prompt is cut: inside each image, at its ends, at blocks, or before each token."""
    length = len(of.tokens)
    if name == "inside":
        rows = [i for i, token in enumerate(of.tokens) if token < 0]
        ends = [i for span in of.spans for i in (span.start, span.stop)]
        return sorted({*rows[1::3], *ends} - {0, length})
    step = {"whole": length, "blocks": BLOCK, "tokens": 1}[name]
    return list(range(step, length, step))


@functools.cache
def wanted(kind: str, name: str) -> mx.array:
    return theirs(kind, both(kind)[1], prompt(kind, name))


@pytest.mark.parametrize("cut", ["whole", "inside", "blocks", "tokens"])
@pytest.mark.parametrize("name", ["one", "three", "later turn", "edge", "ends"])
@pytest.mark.parametrize("kind", vision.KINDS)
def test_logits_are_those_of_mlx_vlm(kind: str, name: str, cut: str) -> None:
    oracle.require()
    given = prompt(kind, name)
    places = cuts(cut, given)
    got = ours(both(kind)[0], given, places)
    rows = mx.array([stop - 1 for stop in (*places, len(given.tokens))])
    off = mx.abs(got - wanted(kind, name)[rows]).max().item()
    print(f"{kind}, {name}, {cut}: off by {off:.1e}")
    assert off <= CLOSE


@pytest.mark.parametrize("kind", vision.KINDS)
def test_images_matter(kind: str) -> None:
    """Their logits for another image are far away."""
    oracle.require()
    given = prompt(kind, "one")
    other = replace(given, files=[vision.png(40, 32, seed=1)])
    away = mx.abs(theirs(kind, both(kind)[1], other) - wanted(kind, "one"))[-1].max().item()
    assert away > 1000 * CLOSE


@pytest.mark.parametrize("kind", vision.KINDS)
def test_sizes_are_those_of_mlx_vlm(kind: str) -> None:
    """What images of any size are scaled to, with a published model's figures."""
    oracle.require()
    merge = {"pixtral": 1, "gemma4": 3}.get(kind, 2)
    reader = both(kind)[0].reader
    reader = replace(reader, patch=16, merge=merge, pixels=(0, 1 << 30))
    side, rng = 16 * merge, random.Random(kind)
    if kind == "gemma4":
        from mlx_vlm.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

        reader = replace(reader, pixels=(0, 280 * side**2))
        size = functools.partial(
            get_aspect_ratio_preserving_size,
            patch_size=16,
            max_patches=280 * 9,
            pooling_kernel_size=3,
        )
    elif kind.startswith("qwen"):
        from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import _smart_resize_image as resized

        reader = replace(reader, pixels=(1 << 16, 1 << 21))
        size = functools.partial(resized, factor=side, min_pixels=1 << 16, max_pixels=1 << 21)
    else:
        from mlx_vlm.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        reader = replace(reader, longest=1540)

        def size(height: int, width: int) -> Any:
            return get_resize_output_image_size((height, width), 1540, side)

    for _ in range(20_000):
        height, width = (int(10 ** rng.uniform(0, 4)) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            assert reader.size(height, width) == tuple(size(height, width)), (height, width)
