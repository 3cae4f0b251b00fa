"""Images of prompts: files of any kind become pixels or an ImageError, and token ids come from them."""

import io
import math
import struct
import subprocess
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from PIL import Image as Pillow

from mlxspec.text.images import (
    ImageEncoder,
    ImageError,
    ImageReader,
    image_reader,
    marker_of,
    negative_ids,
    put_texts,
    with_placeholder,
)
from mlxspec.types import Image
from tests.support import vision
from tests.support.parameter_rows import only
from tests.tiny_tokenizer import save_tokenizer

READER = ImageReader(4, 2, (64, 4096), "<start><image><end>", "<image>")
RED, WHITE, BLUE = (255, 0, 0), (255, 255, 255), (0, 0, 255)


def file(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def plain(mode: str, size: tuple[int, int], color: Any) -> Any:
    return Pillow.new(mode, size, color)


def pixels(image: Image) -> np.ndarray:
    """uint8 [height, width, 3]."""
    side = int((image.patches.shape[1] // 3) ** 0.5)
    squares = image.patches.reshape(image.rows, image.columns, side, side, 3)
    return squares.transpose(0, 2, 1, 3, 4).reshape(image.rows * side, image.columns * side, 3)


def animation() -> bytes:
    frames = [plain("P", (16, 16), color).convert("RGB") for color in (0, 1)]
    frames[0].paste(RED, (0, 0, 16, 16))
    return file(frames[0], "GIF", save_all=True, append_images=frames[1:])


def palette() -> bytes:
    """Left half red, right half transparent."""
    picture = plain("P", (16, 16), 0)
    picture.putpalette([*RED, *BLUE])
    picture.paste(1, (8, 0, 16, 16))
    return file(picture, transparency=1)


def halves(mode: str, left: Any, right: Any) -> Any:
    picture = plain(mode, (16, 16), left)
    picture.paste(right, (8, 0, 16, 16))
    return picture


FILES: dict[str, tuple[bytes, Any, Any]] = {  # and the colours of their left and right halves
    "JPEG in CMYK": (file(plain("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"), RED, RED),
    "the first frame": (animation(), RED, RED),
    "palette": (palette(), RED, WHITE),
    "alpha": (file(halves("RGBA", (*RED, 255), (*BLUE, 0))), RED, WHITE),
    "grey and alpha": (file(halves("LA", (0, 255), (0, 0))), (0, 0, 0), WHITE),
    "a colour is transparent": (file(halves("RGB", RED, BLUE), transparency=BLUE), RED, WHITE),
    "16 bits": (file(halves("I;16", 0x8000, 0xFFFF)), (128, 128, 128), WHITE),
    "1 bit": (file(halves("1", 0, 1)), (0, 0, 0), WHITE),
    "WebP": (file(halves("RGB", RED, BLUE), "WEBP", lossless=True), RED, BLUE),
    "BMP": (file(halves("RGB", RED, BLUE), "BMP"), RED, BLUE),
    "TIFF": (file(halves("RGB", RED, BLUE), "TIFF"), RED, BLUE),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_seen(name: str) -> None:
    data, left, right = FILES[name]
    image = READER.read(data)
    seen = pixels(image).astype(int)
    assert seen.shape == (16, 16, 3) and (image.rows, image.columns) == (4, 4)
    assert np.abs(seen[:, :4] - left).max() <= 2 and np.abs(seen[:, -4:] - right).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_is_turned_as_its_exif_says(kind: str, orientation: int) -> None:
    """Before it is scaled: a photo of a phone held upright is not squashed."""
    upright = Pillow.new("RGB", (16, 48), WHITE)
    upright.paste(RED, (0, 0, 16, 16))  # its upper third
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that it undoes
    stored = upright if orientation == 1 else upright.transpose(back[orientation])
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    image = READER.read(file(stored, kind, exif=exif))
    assert (image.rows, image.columns) == (12, 4)
    seen = pixels(image).astype(int)
    assert np.abs(seen[:12] - RED).max() < 20 and np.abs(seen[20:] - WHITE).max() < 20


def header(width: int, height: int) -> bytes:
    """A PNG that says so large a size, and has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + crc + b"\0\0\0\0IDAT" + crc


GOOD = vision.png(40, 30)
BAD = {
    "nothing": b"",
    "text": b"no image",
    "a PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "cut in two": GOOD[: len(GOOD) // 2],
    "only a signature": GOOD[:8],
    "no pixels": header(40, 30),
    "of no size": header(0, 0),
    "JPEG's start": b"\xff\xd8\xff\xe0" + bytes(40),
    "20,000 x 10": file(plain("L", (20_000, 10), 0)),
    "10 x 20,000": file(plain("L", (10, 20_000), 0)),
    "a bomb": header(60_000, 60_000),
    "a small bomb": header(8_193, 8_193),
    "the largest header": header(2**31 - 1, 2**31 - 1),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read(name: str) -> None:
    with pytest.raises(ImageError) as error:
        READER.read(BAD[name])
    assert len(str(error.value)) < 120


def test_any_changed_byte() -> None:
    """An image or an ImageError, whatever became of the file."""
    rng = np.random.default_rng(0)
    kinds = {"PNG": {}, "JPEG": {}, "GIF": {}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}}
    picture = Pillow.open(io.BytesIO(GOOD))
    for kind, options in (kinds | {"WEBP": {}}).items():
        good = file(picture, kind, **options)
        for _ in range(60):
            data = bytearray(good)
            for at in rng.integers(0, min(len(data), 200), 3):
                data[at] = rng.integers(256)
            try:
                image = READER.read(bytes(data))
            except ImageError:
                continue
            assert image.patches.nbytes <= 3 * 4096


SIZE = 4000
PEAK = """
import resource, sys
from PIL import Image
from mlxspec.text.images import ImageReader
data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ImageReader(4, 2, (64, 4096), "<image>", "<image>").read(data)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("mode, copies", only([("RGB", 1), ("RGBA", 2), ("L", 2)], 2))
def test_memory(mode: str, copies: int) -> None:
    """A decoded file, and what it is on white, or as RGB."""
    data = file(plain(mode, (SIZE, SIZE), 7), compress_level=1)
    done = subprocess.run([sys.executable, "-c", PEAK], input=data, stdout=-1, check=True)
    peak = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert peak < (copies + 0.5) * 4 * SIZE**2  # Pillow keeps a pixel in 4 bytes


@pytest.mark.parametrize("kind", vision.KINDS)
@pytest.mark.parametrize("width, height", [(1, 1), (1, 200), (200, 1), (8192, 8192), (1000, 7)])
def test_sizes(kind: str, width: int, height: int) -> None:
    """Whole squares of patches, no more pixels than the model gets."""
    reader = vision.seeing(kind).reader
    rows, columns = reader.size(height, width)
    side = reader.patch * reader.merge
    assert rows % side == columns % side == 0 and rows and columns
    most = reader.longest**2 if reader.longest else reader.pixels[1]
    assert rows * columns <= max(most, side * max(rows, columns))
    if width * height < 1000:
        image = reader.read(file(plain("RGB", (width, height), RED)))
        assert (image.rows * reader.patch, image.columns * reader.patch) == (rows, columns)
        assert (pixels(image) == RED).all()


@pytest.mark.parametrize("kind", vision.KINDS)
def test_most_pixels(kind: str) -> None:
    """What a server allows bounds the pixels where the model would take more."""
    with tempfile.TemporaryDirectory() as folder:
        path = vision.save(Path(folder), kind)
        small, large = (image_reader(path, vision.config(kind), most) for most in (1000, 1 << 20))
    assert small and large
    rows, columns = small.size(50, 60)
    side = small.patch * small.merge
    assert (rows - side) * (columns - side) < 1000 < math.prod(large.size(50, 60))


def test_ids_of_a_span() -> None:
    reader = replace(READER, before=(7, 8), row_end=(9,), after=(5,))
    image = reader.read(vision.png(24, 16))
    ids, span = reader.span(image, 10)
    own = negative_ids(image.digest, 6)
    assert ids == [7, 8, *own[:3], 9, *own[3:], 5]
    assert (span.start, span.stop, span.rows, span.columns) == (10, 20, 2, 3)
    assert span.image is image


def test_negative_ids() -> None:
    one, other = (negative_ids(digest, 500) for digest in (b"1" * 16, b"2" * 16))
    assert all(-(2**31) <= each < 0 for each in one + other)
    assert len({*one, *other}) == 1000
    assert negative_ids(b"1" * 16, 20) == one[:20]


def test_one_pixel_and_one_size_are_another_image() -> None:
    one, pixel = READER.read(vision.png(24, 16)), READER.read(vision.png(24, 16, change=5))
    assert one.digest != pixel.digest and one.digest == READER.read(vision.png(24, 16)).digest
    wide, high = (READER.read(file(plain("RGB", s, RED))) for s in ((32, 8), (8, 32)))
    assert wide.patches.tobytes() == high.patches.tobytes() and wide.digest != high.digest


ONE, OTHER, THIRD = "1" * 32, "2" * 32, "3" * 32


def letters(text: str) -> list[int]:
    return [ord(each) for each in text]


def encoded(text: str, pieces: int = 1) -> tuple[str, ImageEncoder, list[int]]:
    """The text of all ids, with * for those of images."""
    images = {ONE: READER.read(vision.png(24, 16)), OTHER: READER.read(vision.png(8, 8))}
    encoder = ImageEncoder(READER, images | {THIRD: "[no image]"})
    text = put_texts(text, encoder.images)
    ids: list[int] = []
    for piece in text.split("|") if pieces > 1 else [text]:
        ids += encoder.encode(piece, letters)
    return "".join("*" if each < 0 else chr(each) for each in ids), encoder, ids


def test_markers_become_images() -> None:
    one, other = marker_of(ONE), marker_of(OTHER)
    text, encoder, ids = encoded(f"a{one}b{other}c{one}")
    assert text == "a<start>******<end>b<start>*<end>c<start>******<end>"
    spans = encoder.spans(ids)
    assert [(span.start, span.stop) for span in spans] == [(8, 14), (27, 28), (41, 47)]
    assert [span.image for span in spans] == encoder.found
    for span in spans:
        assert ids[span.start : span.stop] == READER.span(span.image, 0)[0]
    assert "".join(chr(each) for each in ids[:8]) == "a<start>"


def test_pieces_of_a_prompt() -> None:
    one, other = marker_of(ONE), marker_of(OTHER)
    whole, encoder, ids = encoded(f"{one}x|{other}{other}|y", pieces=3)
    assert whole == "<start>******<end>x<start>*<end><start>*<end>y"
    assert [span.start for span in encoder.spans(ids)] == [7, 26, 39]


def test_what_is_no_image_stays_text() -> None:
    unknown = marker_of("4" * 32)
    broken = marker_of("5" * 31)
    text, encoder, ids = encoded(f"a{unknown}b{broken}c{marker_of(THIRD)}")
    assert text == f"a{unknown}b{broken}c[no image]"
    assert encoder.spans(ids) == () and not encoder.found


def test_spans_with_ids_around_the_rows() -> None:
    reader = replace(READER, before=(7,), row_end=(9,), after=(5,), placeholder="<image>")
    images = {ONE: reader.read(vision.png(24, 16))}
    encoder = ImageEncoder(reader, images)
    ids = encoder.encode(f"ab{marker_of(ONE)}{marker_of(ONE)}c", letters)
    first, second = encoder.spans(ids)
    assert (first.start, first.stop) == (2, 11) and (second.start, second.stop) == (11, 20)


PARTS = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}{{ IMAGE }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, placeholder",
    [
        (PARTS.replace("IMAGE", "'<one>\n<image><two>'"), "<one>\n<image><two>"),
        (PARTS.replace("IMAGE", "'<image>'"), "<image>"),
        (PARTS.replace("IMAGE", "''"), READER.placeholder),
        (PARTS.replace("IMAGE", "'<image><image>'"), READER.placeholder),
        (PARTS.replace("IMAGE", "raise_exception('no')"), READER.placeholder),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", READER.placeholder),
        ("{{ messages[0].content + 'x' }}", READER.placeholder),
    ],
)
def test_placeholder_of_a_template(template: str, placeholder: str, tmp_path: Path) -> None:
    """What a template writes for an image, if it writes one."""
    save_tokenizer(tmp_path, template=template)
    assert with_placeholder(READER, load_tokenizer(tmp_path)).placeholder == placeholder


def test_families_have_readers(tmp_path: Path) -> None:
    for kind in vision.KINDS:
        assert image_reader(tmp_path, vision.config(kind), 1 << 20)
    text_only = vision.config("mistral3") | {"vision_config": None}
    assert image_reader(tmp_path, text_only, 1 << 20) is None
    assert image_reader(tmp_path, vision.config("pixtral") | {"model_type": "x"}, 1 << 20) is None
    for end in ("", vision.BOTH_WAYS):
        reader = image_reader(tmp_path, vision.config(f"gemma4{end}"), 1 << 20)
        assert reader and reader.both_ways == bool(end)
