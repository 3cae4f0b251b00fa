"""Vision towers are read from files of any packaging, and cost a model nothing where nobody looks."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.load.vision import open_eyes, open_tower
from mlxspec.load.warmup import WarmupCache
from mlxspec.model.checkpoint import load_model, load_weights
from mlxspec.model.layout import find_layout
from mlxspec.model.parallel import ALONE
from mlxspec.model.runner import Runner
from mlxspec.model.vision import FAMILIES, build, load_vision, seam
from mlxspec.model.vision.seam import Eyes
from mlxspec.sequences import SeqState, Span
from mlxspec.text.images import image_reader
from mlxspec.types import UnsupportedModel
from tests.support import vision

PATCH = 4
Weights = dict[str, mx.array]


def weights_of(kind: str) -> Weights:
    """In our names."""
    return dict(tree_flatten(vision.seeing(kind).eyes.tower.parameters()))


def hugging_face(kind: str, name: str, w: mx.array) -> tuple[str, mx.array]:
    if name.endswith("patch_conv.weight"):
        w = w.reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2)
    if name.endswith("patch_embed.proj.weight"):
        w = w.reshape(-1, 1, PATCH, PATCH, 3)
        w = mx.concatenate([0.25 * w, 0.75 * w], axis=1).transpose(0, 4, 1, 2, 3)
    return f"model.{name}", w


def older(kind: str, name: str, w: mx.array) -> tuple[str, mx.array]:
    """Of Mistral Small 3.1 and Pixtral."""
    return hugging_face(kind, name, w)[0].removeprefix("model."), hugging_face(kind, name, w)[1]


def mlx_community(kind: str, name: str, w: mx.array) -> tuple[str, mx.array]:
    if name.endswith("patch_conv.weight"):
        w = w.reshape(-1, PATCH, PATCH, 3)
    if name.endswith("patch_embed.proj.weight"):
        w = w.reshape(-1, 1, PATCH, PATCH, 3)
        w = mx.concatenate([0.25 * w, 0.75 * w], axis=1)
    name = name.replace("visual.", "vision_tower.")
    if kind in ("mistral3", "pixtral"):
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    return name, w


@pytest.mark.parametrize("packaging", [hugging_face, older, mlx_community])
@pytest.mark.parametrize("kind", vision.KINDS)
def test_names_of_all_packagings(
    kind: str, packaging: Callable[[str, str, mx.array], tuple[str, mx.array]]
) -> None:
    known = weights_of(kind)
    packed = dict(packaging(kind, name, w) for name, w in known.items())
    packed |= {"language_model.model.norm.weight": mx.ones(3), "model.norm.weight": mx.ones(3)}
    got = dict(tree_flatten(build(vision.config(kind), packed).parameters()))
    assert got.keys() == known.keys()
    for name, w in got.items():
        assert mx.allclose(w, known[name], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("mode, size, bits", [("affine", 32, 8), ("mxfp4", 32, 4)])
@pytest.mark.parametrize("kind", vision.KINDS)
def test_quantized(kind: str, mode: str, size: int, bits: int) -> None:
    """With a layer of other bits, and layers that are not quantized."""
    known, settings = weights_of(kind), vision.config(kind)
    settings["quantization"] = {"group_size": size, "bits": bits, "mode": mode}
    packed: Weights = {}
    several = [n for n, w in known.items() if w.ndim == 2 and w.shape[-1] % 32 == 0]
    several = [n for n in several if "table" not in n]
    for name, w in known.items():
        path = mlx_community(kind, name, w)[0]
        if name not in several:
            packed[path] = w
            continue
        options: dict[str, Any] = {"group_size": size, "bits": bits, "mode": mode}
        if name == several[1]:
            options = {"group_size": 32, "bits": 6, "mode": "affine"}
            settings["quantization"][path.removesuffix(".weight")] = options
        parts = mx.quantize(w, **options)
        ends = (".weight", ".scales", ".biases")
        for end, part in zip(ends, parts, strict=False):
            packed[path.removesuffix(".weight") + end] = part
        known[name] = mx.dequantize(*parts, **options)
    plain = build(vision.config(kind), known)
    tower = build(settings, packed)
    assert any(name.endswith(".scales") for name, _ in tree_flatten(tower.parameters()))
    image = vision.seeing(kind).image()
    patches = mx.array(image.patches) / 255
    got, want = (each(patches, image.rows, image.columns) for each in (tower, plain))
    assert mx.abs(got - want).max() <= 1e-4 * mx.abs(want).max()


def change(path: Path, **settings: Any) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("kind", vision.KINDS)
def test_files_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    config = vision.config(kind)
    vision.save(tmp_path, kind)
    assert load_vision(tmp_path, config)
    assert load_vision(tmp_path, config | {"vision_config": None}) is None
    assert load_vision(tmp_path, config | {"model_type": "llama"}) is None
    larger = config["vision_config"] | {"hidden_size": 64}
    with pytest.raises(UnsupportedModel, match=r"is \(.*\), not \(.*64"):
        load_vision(tmp_path, config | {"vision_config": larger})
    file = str(tmp_path / "model.safetensors")
    weights: Any = mx.load(file)
    mx.save_safetensors(file, {k: w for k, w in weights.items() if "language" in k})
    with pytest.raises(UnsupportedModel, match="nothing, not"):
        load_vision(tmp_path, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"vision_config": {"model_type": "x"}},
        {"vision_config": {"hidden_size": "many"}},
        {"vision_config": {"hidden_size": None, "patch_size": None}},
        {"vision_config": ["no", "object"]},
        {"vision_config": {"patch_size": 0, "num_attention_heads": 0, "num_heads": 0}},
        {"text_config": {}},
        {"text_config": None},
        {"quantization": "all"},
    ],
)
@pytest.mark.parametrize("kind", vision.KINDS)
def test_a_config_of_any_content(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Leaves a model that reads text only."""
    vision.save(tmp_path, kind)
    config = change(tmp_path, **settings)
    open_tower(tmp_path, Config(), ALONE)
    reader = image_reader(tmp_path, config, 1 << 20)
    assert reader is None or reader.merge


@pytest.mark.parametrize("content", [{"size": 64}, {"size": [1]}, {"image_mean": 3}, {"size": "s"}])
@pytest.mark.parametrize("kind", vision.KINDS)
def test_a_processor_of_any_content(kind: str, content: dict[str, Any], tmp_path: Path) -> None:
    vision.save(tmp_path, kind)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    image_reader(tmp_path, vision.config(kind), 1 << 20)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": content}))
    image_reader(tmp_path, vision.config(kind), 1 << 20)


@pytest.mark.parametrize("kind", vision.KINDS)
def test_the_first_start_tries_a_tower(kind: str, tmp_path: Path) -> None:
    """On an image that it reads alike in chunks; the next start believes it. Without a processor
    that is understood, or with a tower that makes no difference, the model stays blind."""
    vision.save(tmp_path, kind)
    layout = find_layout(load_model(tmp_path)[0])

    def opened(**cached: Any) -> tuple[Eyes | None, WarmupCache]:
        model, _ = load_model(tmp_path)
        load_weights(model)
        cache = WarmupCache(layout=layout, file=tmp_path / "warmup.json", **cached)
        tower = open_tower(tmp_path, Config(), ALONE)
        return open_eyes(model, tower, cache, path=tmp_path, config=Config()), cache

    eyes, cache = opened()
    assert eyes and cache.blind == "" and "blind" in cache.file.read_text()
    assert opened(blind="")[0] and opened(blind="it was tried")[0] is None
    weights: Any = mx.load(str(tmp_path / "model.safetensors"))
    last = ("linear_2", "linear_fc2", "embedding_projection")
    changed = {k: w * (not any(part in k for part in last)) for k, w in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), changed)
    eyes, cache = opened()
    assert eyes is None and cache.blind == "another image makes no difference"
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 3, "size": 4}')
    if kind != "gemma4":  # whose figures are fixed
        eyes, cache = opened()
        assert eyes is None and "processor" in str(cache.blind)


def span(tokens: list[int], images: Any = (), start: int = 0) -> Span:
    state = SeqState(prompt_len=len(tokens), images=images)
    table = list(range(1, 9))
    return Span(state, [table], tokens, start=start, count=len(tokens) - start, samples=True)


def runner_of(model: nn.Module, eyes: Eyes | None, layout: Any) -> Runner:
    runner = Runner(model, layout, 8, 16)
    runner.see(eyes)
    return runner


def nodes(array: mx.array) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("rectangle")


@pytest.mark.parametrize("kind", vision.KINDS)
def test_texts_cost_nothing(kind: str, tmp_path: Path) -> None:
    """The graph and the bits of a text are those of the same model without eyes, before an image
    was seen and after."""
    blind, _ = load_model(vision.save(tmp_path, kind))
    load_weights(blind)
    seen = vision.seeing(kind)
    seeing = runner_of(seen.model, seen.eyes, seen.layout)
    texts = [5, 3, 8, 2, 1, 9], [4, 4, 7]

    def forward(runner: Runner) -> tuple[list[int], mx.array]:
        counts, found = [], []
        for text in ([1], *texts):  # the first makes the pools
            logits = runner.forward([span(text)], None).logits
            counts.append(nodes(logits))
            mx.eval(logits)
            found.append(logits)
        return counts[1:], mx.concatenate(found)

    want = forward(runner_of(blind, None, seen.layout))
    got = forward(seeing)
    tokens, spans = vision.prompt(seen, [1, 2], seen.image(), [3])
    seeing.forward([span(tokens, tuple(spans))], None)
    again = forward(seeing)
    for count, logits in (got, again):
        assert count == want[0] and mx.array_equal(logits, want[1])


@pytest.mark.parametrize("kind", vision.KINDS)
def test_features_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tower runs once for an image's chunks and turns, and again when others took its place."""
    seen = vision.open_model(vision.save(tmp_path, kind))
    eyes = seen.eyes
    calls: list[Any] = []
    stock = type(eyes.tower)

    class Counted(stock):
        def __call__(self, *args: Any) -> mx.array:
            calls.append(args)
            return super().__call__(*args)

    eyes.tower.__class__ = Counted
    runner = runner_of(seen.model, eyes, seen.layout)
    tokens, spans = vision.prompt(seen, [1, 2], seen.image(), [3])
    whole = span(tokens, tuple(spans))
    inside = spans[0].start + len(seen.reader.before) + 1
    for start, stop in ((0, inside), (inside, inside + 1), (inside + 1, len(tokens))):
        runner.forward([replace(whole, start=start, count=stop - start)], None)
    assert len(calls) == 1
    images = [seen.image(seed=seed) for seed in range(4)]
    size = eyes.features(images[0]).nbytes
    assert len(calls) == 1  # the same pixels
    monkeypatch.setattr(seam, "CACHED_BYTES", 2 * size)
    for image in images[1:]:
        eyes.features(image)
    assert len(calls) == 4
    eyes.features(images[2])
    eyes.features(images[3])
    assert len(calls) == 4
    eyes.features(images[0])
    assert len(calls) == 5
    eyes.features(images[2])  # longest unused, so that it made room
    assert len(calls) == 6
    monkeypatch.setattr(seam, "CACHED_BYTES", size - 1)
    assert eyes.features(images[1]).nbytes == size and not eyes._features


def test_a_model_without_a_place() -> None:
    seen = vision.seeing("mistral3")
    with pytest.raises(UnsupportedModel):
        Eyes(nn.Linear(2, 2), seen.eyes.tower, vision.config("mistral3"))


def test_every_family_is_tried() -> None:
    """A family that has no tiny model here is another's, but for its experts."""
    assert {kind.removesuffix("_moe") for kind in FAMILIES} == set(vision.KINDS)
