"""Images of a prompt: from a file's bytes to patches, and to the token ids that stand for them.

Rule: the ids of an image's rows are negative, 31 bits of its digest each, so that two prompts have
equal ids exactly where their texts and pixels are equal; prefix cache, disk and scheduler know no
images. In texts a marker stands for an image until they are encoded.
"""

import io
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import log
from mlxspec.files import read_json
from mlxspec.text.messages import TooLong, rejected
from mlxspec.text.template import apply_template
from mlxspec.types import Busy, Image, ImageSpan, Json, too_long

EDGE = "\ufdd1"  # of a marker: a noncharacter of Unicode
MARKER = re.compile(f"{EDGE}([0-9a-f]{{32}}){EDGE}")  # with the digest of the image's file
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_DECODED = 1 << 26  # pixels of a file: 256 MiB in each mode that it is converted to
MAX_IMAGES = 100  # of a prompt
MAX_RATIO = 200  # of the sides
CACHED_BYTES = 256 << 20  # of patches that are kept for the next turns
IN_USE_BYTES = 1 << 30  # of patches that are kept, or that requests hold
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class ImageError(ValueError):
    """Why an image cannot be seen."""


Images = Mapping[str, Image | str]  # by the digests of their files: or the text in its place


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How a family reads images, by the figures in its processor_config.json or
    preprocessor_config.json. `merge`: so many patches squared are one row of the model. `pixels`
    are the least and the most after scaling, `longest` bounds a side; 0: no bound. `fills`: an
    image is scaled up to `pixels`, as Gemma's are. `both_ways`: see ImageSpan. `placeholder` is the
    template's text for an image, with `token` in it; `before`, `row_end` and `after` are ids beside
    an image's rows."""

    patch: int
    merge: int
    pixels: tuple[int, int]
    placeholder: str
    token: str
    longest: int = 0
    fills: bool = False
    both_ways: bool = False
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    before: tuple[int, ...] = ()
    row_end: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def uncut(self) -> int:
        """The most rows of an image that see the rows after them; 0: none do."""
        most = self.pixels[1] // (self.patch * self.merge) ** 2
        return self.both_ways * (len(self.before) + most + len(self.after))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size in pixels to which an image is scaled: whole squares of patches."""
        side = self.patch * self.merge
        least, most = self.pixels
        if self.fills:
            factor = math.sqrt(most / (height * width))
            rows, columns = [math.floor(factor * n / side) for n in (height, width)]
            limit = most // side**2
            rows = rows or 1
            if not columns:
                rows, columns = min(height // width, limit), 1
            elif factor * height < side:
                columns = min(width // height, limit)
            return rows * side, columns * side
        if self.longest:
            ratio = max(height, width) / self.longest
            ratio = max(ratio, math.sqrt(height * width / most))
            if ratio > 1:
                height, width = (
                    math.floor(height / ratio),
                    math.floor(width / ratio),
                )
            return -(-max(1, height) // side) * side, -(-max(1, width) // side) * side
        rows, columns = round(height / side), round(width / side)
        area = rows * columns * side**2
        if area > most or area < least:
            factor = math.sqrt((most if area > most else least) / (height * width)) / side
            whole = math.floor if area > most else math.ceil
            rows, columns = [max(1, whole(factor * n)) for n in (height, width)]
        return rows * side, columns * side

    def read(self, data: bytes) -> Image:
        """The image of a file. Raises ImageError."""
        from PIL import Image as Pillow  # 30 ms that text needs not pay

        try:
            with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(picture.size)
                shown = _rgb(picture)
                rows, columns = self.size(shown.height, shown.width)
                scaled = shown.resize((columns, rows), Pillow.Resampling.BICUBIC)
        except ImageError:
            raise
        except Exception as error:  # whatever a broken file makes Pillow raise
            raise ImageError(f"it cannot be read: {type(error).__name__}") from error
        change = ""
        if rows * columns < shown.height * shown.width // 2:
            change = f"{shown.width}x{shown.height} to {columns}x{rows}"
            log.info("an image is scaled down from %s pixels", change)
        pixels = np.asarray(scaled)
        rows, columns = rows // self.patch, columns // self.patch
        patches = pixels.reshape(rows, self.patch, columns, self.patch, 3)
        patches = patches.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        digest = blake2b(
            patches.tobytes() + bytes(f"{rows}x{columns}", "ascii"),
            digest_size=16,
        )
        return Image(
            patches,
            rows,
            columns,
            digest=digest.digest(),
            mean=self.mean,
            std=self.std,
            scaled=change,
        )

    def span(self, image: Image, start: int) -> tuple[list[int], ImageSpan]:
        """The ids of an image whose first stands at `start`, and where it is."""
        rows, columns = image.rows // self.merge, image.columns // self.merge
        own = negative_ids(image.digest, rows * columns)
        ids = list(self.before)
        for row in range(rows):
            ids += own[row * columns : (row + 1) * columns]
            if row < rows - 1:
                ids += self.row_end
        ids += self.after
        span = ImageSpan(
            start,
            start + len(ids),
            image,
            rows=rows,
            columns=columns,
            both_ways=self.both_ways,
        )
        return ids, span


def marker_of(digest: str) -> str:
    """What stands for the image of a file with this digest in a text."""
    return f"{EDGE}{digest}{EDGE}"


def put_texts(text: str, images: Images) -> str:
    """`text` with each marker whose image cannot be seen replaced by its line."""

    if not images:
        return text

    def put(match: re.Match[str]) -> str:
        image = images.get(match[1])
        return image if isinstance(image, str) else match[0]

    return MARKER.sub(put, text)


@dataclass(slots=True)
class ImageEncoder:
    """Encodes a rendered text with markers, piece by piece; `found` are its images so far."""

    reader: ImageReader
    images: Images
    found: list[Image] = field(default_factory=list)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of the next piece; `encode` makes those of text without markers."""
        ids: list[int] = []
        done, behind = 0, ""
        before, after = self.reader.placeholder.split(self.reader.token, 1)
        for match in MARKER.finditer(text):
            image = self.images.get(match[1])
            if isinstance(image, Image):
                ids += encode(behind + text[done : match.start()] + before)
                ids += self.reader.span(image, 0)[0]
                self.found.append(image)
                done, behind = match.end(), after
        return ids + encode(behind + text[done:])

    def check(self, text: str, context: int, field: str) -> None:
        """Raises RejectedRequest for a text with too many images, and TooLong where their rows
        alone are more than `context`; 0: any number."""
        images = [self.images.get(digest) for digest in MARKER.findall(text)]
        seen = [image for image in images if isinstance(image, Image)]
        if len(seen) > MAX_IMAGES:
            raise rejected(field, f"has {len(seen)} images, more than {MAX_IMAGES}; send fewer")
        rows = sum(image.rows * image.columns for image in seen) // self.reader.merge**2
        if context and rows > context:
            why = f"{too_long(rows, context)}; the images alone; send fewer"
            error = TooLong(field, why, "context_length_exceeded")
            error.tokens = rows
            raise error

    def spans(self, ids: list[int]) -> tuple[ImageSpan, ...]:
        """Where the images are in all token ids."""
        spans: list[ImageSpan] = []
        rows = np.flatnonzero(np.array(ids) < 0)
        for image in self.found:
            at = spans[-1].stop if spans else 0
            first = int(rows[np.searchsorted(rows, at)])
            spans.append(self.reader.span(image, first - len(self.reader.before))[1])
        return tuple(spans)


def negative_ids(digest: bytes, count: int) -> list[int]:
    """The ids of the rows of an image, int32 below 0."""
    bits = np.frombuffer(shake_128(digest).digest(4 * count), np.int32)
    return [int(each) for each in bits | np.int32(-(1 << 31))]


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_DECODED:
        raise ImageError(f"it has {width} x {height} pixels, more than {MAX_DECODED}")
    if max(size) > MAX_RATIO * min(size):
        raise ImageError(f"it has {width} x {height} pixels, too long for its width")


def _rgb(picture: Any) -> Any:
    """The first frame as it is meant to be seen: turned as its EXIF data say, on white where it is
    transparent, 16 bits as 8. Copies it where that changes something only: it may be large."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    picture.load()  # which may change its mode
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        deep = values.max(initial=0) > 255
        picture = Pillow.fromarray((values >> 8 if deep else values).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        white = Pillow.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture)
        return white
    return picture if picture.mode == "RGB" else picture.convert("RGB")


class ImageCache:
    """Images that were read last, by the digest of their files: an agent sends each of them again
    in every turn. Bounded in bytes, and with those that requests hold bounded as well. One
    thread's."""

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        self._images: OrderedDict[str, Image] = OrderedDict()
        self._in_use: WeakSet[Image] = WeakSet()

    def get(self, digest: str) -> Image | None:
        """The image of a file with this digest, if it was read lately."""
        if digest in self._images:
            self._images.move_to_end(digest)
        return self._images.get(digest)

    def read(self, digest: str, data: bytes) -> Image:
        """The image of a file with this digest. Raises ImageError, and Busy where those in use take
        too much."""
        if sum(image.patches.nbytes for image in self._in_use) > IN_USE_BYTES:
            raise Busy(1, "other requests have large images")
        image = self.get(digest) or self.reader.read(data)
        self._images[digest] = image
        self._in_use.add(image)
        while sum(each.patches.nbytes for each in self._images.values()) > CACHED_BYTES:
            self._images.popitem(last=False)
        return image


def image_reader(path: Path, config: Json, most: int) -> ImageReader | None:
    """How the model in a directory reads images, scaled down to `most` pixels; None where its
    family is unknown, or its files have impossible values."""
    try:
        return _reader(path, config, most)
    except (AttributeError, LookupError, TypeError, ValueError):  # of files of another form
        return None


def _reader(path: Path, config: Json, most: int) -> ImageReader | None:
    files = read_json(path / "processor_config.json")
    given = files.get("image_processor") or read_json(path / "preprocessor_config.json")
    vision = config.get("vision_config") or {}
    if not vision:
        return None
    patch = vision.get("patch_size", 16)
    mean, std = (tuple(given.get(key) or HALF) for key in ("image_mean", "image_std"))
    size = given.get("size") or {}
    kind = config.get("model_type", "")
    if kind in ("mistral3", "pixtral"):
        vocabulary = read_json(path / "tokenizer.json").get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in vocabulary}
        return ImageReader(
            patch,
            config.get("spatial_merge_size", 1),
            (0, most),
            "[IMG]",
            "[IMG]",
            longest=size.get("longest_edge") or vision.get("image_size", 1540),
            mean=tuple(given.get("image_mean") or CLIP_MEAN),
            std=tuple(given.get("image_std") or CLIP_STD),
            row_end=_ids(ids, "[IMG_BREAK]"),
            after=_ids(ids, "[IMG_END]"),
        )
    if kind.startswith("qwen3"):
        least = size.get("shortest_edge") or given.get("min_pixels") or 1 << 16
        limit = size.get("longest_edge") or given.get("max_pixels") or 1 << 24
        return ImageReader(
            patch,
            vision.get("spatial_merge_size", 2),
            (least, max(least, min(limit, most))),
            "<|vision_start|><|image_pad|><|vision_end|>",
            "<|image_pad|>",
            mean=mean,
            std=std,
        )
    if kind == "gemma4":
        merge = vision.get("pooling_kernel_size", 3)
        tokens = given.get("max_soft_tokens") or config.get("vision_soft_tokens_per_image", 280)
        return ImageReader(
            patch,
            merge,
            (0, min(tokens * (merge * patch) ** 2, most)),
            "<|image|>",
            "<|image|>",
            fills=True,
            both_ways=config["text_config"].get("use_bidirectional_attention") == "vision",
            before=(config.get("boi_token_id", 255999),),
            after=(config.get("eoi_token_id", 258882),),
        )
    return None


def with_placeholder(reader: ImageReader, tokenizer: TokenizerWrapper) -> ImageReader:
    """The reader, with what this tokenizer's template writes for an image between two texts."""
    parts = [
        {"type": "text", "text": "before"},
        {"type": "image"},
        {"type": "text", "text": "behind"},
    ]
    with suppress(Exception):  # a template raises whatever its author chose
        text = apply_template(tokenizer, [{"role": "user", "content": parts}])
        between, end, _ = text.partition("before")[2].partition("behind")
        if end and between.count(reader.token) == 1:
            return replace(reader, placeholder=between)
    return reader


def _ids(known: dict[str, int], *tokens: str) -> tuple[int, ...]:
    return tuple(known[token] for token in tokens if token in known)
