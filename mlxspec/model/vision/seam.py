"""How images reach a text model of mlx-lm: the rows of its embeddings, and positions in three axes.

Rule: modules only change their class. A pass without an image computes what it computed before, and
in one with images the rows of texts keep their bits.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.core import array as Array

from mlxspec.model.pages import View
from mlxspec.model.trunk import layers_in, mix_in, trunk_of
from mlxspec.sequences import Span, Spans
from mlxspec.types import Image, ImageSpan, Json, UnsupportedModel

CACHED_BYTES = 256 << 20  # of features, for the next chunks and turns


@dataclass(slots=True)
class ImageRows:
    """The rows of images in a pass: `index` int32 [n] among its rows, and their `features`
    [n, hidden * (1 + deep)]."""

    index: Array
    features: Array

    def put(self, x: Array, part: int, scale: float = 1.0) -> Array:
        """x [B, L, hidden] with a part of the features in the images' rows, divided by `scale`."""
        rows = x.flatten(0, 1)
        rows[self.index] = (self._part(x, part) / scale).astype(x.dtype)
        return rows.reshape(x.shape)

    def add(self, x: Array, part: int) -> Array:
        """x [B, L, hidden], to which a part of the features is added in the images' rows."""
        rows = x.flatten(0, 1).at[self.index].add(self._part(x, part).astype(x.dtype))
        return rows.reshape(x.shape)

    def _part(self, x: Array, part: int) -> Array:
        """A part of the features, as wide as x."""
        hidden = x.shape[-1]
        return self.features[:, part * hidden : (part + 1) * hidden]


class _Mixed:
    """Mixed into the class of a module that sees images through the view."""

    _image_view: View | None = None  # another than Tapped has, which is taken away

    @property
    def _seen(self) -> ImageRows | None:
        """The images of the forward that runs."""
        return self._image_view.images if self._image_view else None

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class Embedding(_Mixed):
    """`embed_tokens`: ids below 0 take the features of images."""

    _scale: float = 1.0

    def __call__(self, ids: Array) -> Any:
        images = self._seen
        if images is None:
            return self._plain(ids)
        return images.put(self._plain(mx.maximum(ids, 0)), 0, self._scale)


class PerLayerEmbedding(_Mixed):
    """Gemma's `embed_tokens_per_layer`: those of images are token 0's."""

    def __call__(self, ids: Array) -> Any:
        return self._plain(ids if self._seen is None else mx.maximum(ids, 0))


class Deepened(_Mixed):
    """A decoder layer after which features are added, as Qwen3-VL's first ones (deepstack)."""

    _part: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._plain(*args, **kwargs)
        images = self._seen
        return out if images is None else images.add(out, self._part)


class Rope(_Mixed):
    """Rotary positions in three axes: each frequency turns by one of them."""

    _sections: Sequence[int]  # frequencies of each axis

    def __call__(self, x: Array, offset: Any = 0) -> Any:
        positions = self._image_view.rope if self._image_view else None
        if positions is None:
            return self._plain(x, offset=offset)
        batch, heads, length, dim = x.shape
        rows = x.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, dim)
        time, height, width = [self._plain(rows, offset=axis) for axis in positions]
        axes = axes_of(self._sections, self.dims, dim)  # type: ignore[attr-defined]
        turned = mx.where(axes == 1, height, mx.where(axes == 2, width, time))
        return turned.reshape(batch, length, heads, dim).transpose(0, 2, 1, 3)


def mix(module: Any, kind: type[_Mixed], **values: Any) -> Any:
    """Let a module see images through a view, which `Eyes.attach` sets."""
    mix_in(module, kind)
    for name, value in values.items():
        object.__setattr__(module, name, value)
    return module


def mix_ropes(layers: Iterable[Any], sections: Sequence[int]) -> list[Any]:
    """Let the attention of these layers turn by positions in three axes; returns its ropes."""
    ropes = [layer["self_attn"]["rope"] for layer in layers if "self_attn" in layer]
    return [mix(rope, Rope, _sections=sections) for rope in ropes]


def axes_of(sections: Sequence[int], dims: int, head_dim: int) -> Array:
    """int32 [head dim]: 0 for time, 1 for height, 2 for width: of `dims` rotated dimensions whose
    frequencies take turns, as many of each axis as its section says (Qwen3-VL,
    https://arxiv.org/abs/2511.21631)."""
    half = [0 for _ in range(dims // 2)]
    for axis in (1, 2):
        for i in range(axis, min(3 * sections[axis], dims // 2), 3):
            half[i] = axis
    return mx.array([*half, *half, *(0 for _ in range(head_dim - dims))])


class Eyes:
    """A model's tower, and the features of the images that were seen last. Engine thread only."""

    def __init__(self, model: nn.Module, tower: nn.Module, config: Json) -> None:
        """Raises UnsupportedModel where the text model has no place for images."""
        self.tower = tower
        self.view: Any = None
        self.runs = 0  # of the tower
        self.uncut = 0  # rows of an image that one forward must have, at most
        self._features: OrderedDict[bytes, Array] = OrderedDict()
        trunk = trunk_of(model)
        embed = trunk.get("embed_tokens")
        if embed is None:
            raise UnsupportedModel("the model has no embed_tokens; images are left out")
        scale = float(getattr(trunk, "embed_scale", 1.0))
        self._mixed = [mix(embed, Embedding, _scale=scale)]
        if (inner := trunk.get("embed_tokens_per_layer")) is not None:
            self._mixed.append(mix(inner, PerLayerEmbedding))
        layers = list(layers_in(trunk))
        deep = config["vision_config"].get("deepstack_visual_indexes") or []
        for part, layer in enumerate(layers[: len(deep)], start=1):
            self._mixed.append(mix(layer, Deepened, _part=part))
        text = config.get("text_config") or config
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        # Frequencies that turn by each of three axes; none: positions have one.
        self.sections: Sequence[int] = scaling.get("mrope_section") or ()
        if self.sections:
            self._mixed += mix_ropes(layers, self.sections)

    def attach(self, view: View) -> None:
        """See through the view of a runner from now on."""
        self.view = view
        _attach(self._mixed, view)

    def attach_head(self, view: View, layers: Iterable[Any]) -> None:
        """Let the layers of a head turn as the model's, by the positions in the head's view."""
        _attach(mix_ropes(layers, self.sections), view)

    def features(self, image: Image) -> Array:
        """[tokens, hidden * (1 + deep)] of an image: computed once while it is remembered."""
        found = self._features.pop(image.digest, None)
        if found is None:
            pixels = mx.array(image.patches).astype(mx.float32) / 255
            colors = (pixels.reshape(-1, 3) - mx.array(image.mean)) / mx.array(image.std)
            patches = colors.reshape(pixels.shape).astype(self.dtype)
            found = self.tower(patches, image.rows, image.columns)
            mx.eval(found)
            self.runs += 1
        self._features[image.digest] = found
        while sum(each.nbytes for each in self._features.values()) > CACHED_BYTES:
            self._features.popitem(last=False)
        return found

    @property
    def dtype(self) -> Any:
        """Of the tower's patches: that of its norms, as matrices may be quantized."""
        return next(array.dtype for array in _floats(self.tower))

    def look(self, spans: Spans, shift: Array | None, length: int = 0) -> None:
        """Put the rows of images in a forward of these spans into the view, `length` rows each, 0:
        their own; and positions for rope where these are not the rows' numbers. `shift` int32
        [spans]: by how much each is later, as drafts in flight were accepted."""
        view = self.view
        if not any(span.state.images for span in spans):
            return
        index: list[int] = []
        features: list[Array] = []
        counts = [length or span.rows for span in spans]
        ends: dict[int, int] = {}  # by row: the last position that it sees, if that is another's
        first = 0
        for span, count in zip(spans, counts, strict=True):
            for image in span.state.images:
                if _overlap(span, image):
                    rows, part = _part_of(span, image)
                    index += [first + row for row in rows]
                    if image.both_ways and rows:
                        ends |= dict.fromkeys(index[-len(rows) :], span.start + rows[-1])
                    features.append(self.features(image.image)[part])
            first += count
        for group in view.groups if ends else ():
            own = [ends.get(row, -1) for row in range(group.lo, group.hi)]
            if max(own) >= 0:
                group.ends = mx.array(own).reshape(-1, group.length)
        if self.sections:
            turn(view, spans, counts, shift)
        if index:
            view.images = ImageRows(mx.array(index, mx.int32), mx.concatenate(features))


def turn(view: View, spans: Spans, counts: Sequence[int], shift: Array | None) -> None:
    """Put the positions for rope of the spans' rows, `counts` each, into the view: in three axes
    where some are rows of an image. `shift` as for `Eyes.look`."""
    if any(_overlap(span, image) for span in spans for image in span.state.images):
        axes = [positions_of(span, count) for span, count in zip(spans, counts, strict=True)]
        view.rope = mx.array(np.concatenate(axes, axis=1))
        if shift is not None:
            view.rope = view.rope + shift[mx.array(np.repeat(np.arange(len(spans)), counts))]
        return
    shifts = [shift_of(span.state.images, span.start) for span in spans]
    view.positions = view.positions + mx.array(np.repeat(shifts, counts), mx.int32)


def _attach(modules: Iterable[Any], view: View) -> None:
    for module in modules:
        object.__setattr__(module, "_image_view", view)


def _overlap(span: Span, image: ImageSpan) -> bool:
    """Whether some of a span's rows, its draft aside, are an image's."""
    return image.start < span.start + span.count and span.start < image.stop


def _part_of(span: Span, image: ImageSpan) -> tuple[list[int], slice]:
    """Which rows of a span an image has, and which of its features these are."""
    ids = np.array(span.tokens[image.start : image.stop]) < 0
    low = max(span.start, image.start)
    high = min(span.start + span.count, image.stop)
    before = int(ids[: low - image.start].sum())
    rows = np.flatnonzero(ids[low - image.start : high - image.start]) + low - span.start
    return rows.tolist(), slice(before, before + len(rows))


def positions_of(span: Span, length: int) -> np.ndarray:
    """int32 [3, length]: the positions of a span's rows by time, height and width. Those of an
    image begin together where it begins, and count its rows and columns; after it they go
    on from the larger of both (Qwen2-VL, https://arxiv.org/abs/2409.12191)."""
    images = span.state.images
    at = np.arange(span.start, span.start + length)
    axes = np.stack([at, at, at]) + shift_of(images, span.start)
    for image in images:
        if image.stop <= span.start:
            continue
        inside = (at >= image.start) & (at < image.stop)
        begin = image.start + shift_of(images, image.start)
        k = at[inside] - image.start
        axes[:, inside] = [
            begin + 0 * k,
            begin + k // image.columns,
            begin + k % image.columns,
        ]
        axes[:, at >= image.stop] += size_of(image) - (image.stop - image.start)
    return axes.astype(np.int32)


def size_of(image: ImageSpan) -> int:
    """How many positions an image takes."""
    return max(image.rows, image.columns)


def shift_of(images: Sequence[ImageSpan], at: int) -> int:
    """By how much the position of the prompt's row `at` differs from its index: 0 or less."""
    return sum(size_of(each) - (each.stop - each.start) for each in images if each.stop <= at)


def _floats(tower: nn.Module) -> Iterator[Array]:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(tower.parameters())
    return (array for _, array in leaves if mx.issubdtype(array.dtype, mx.floating))
