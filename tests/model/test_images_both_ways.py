"""Gemma 4's larger models: an image's rows see those after them in the layers with a window, clamped
to it, and only those before them in the others, as transformers 5.24 has it. The oracle is mlx-lm's
own model with masks of our own making."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxspec.config import Config
from mlxspec.kernels.inputs import Group
from mlxspec.load.exact import record
from mlxspec.load.loader import load_engine
from mlxspec.load.vision import image_error
from mlxspec.model import invariant
from mlxspec.model.runner import Layout, Runner
from mlxspec.text.images import image_reader
from mlxspec.types import ImageSpan, Request, Sampling
from tests.model.test_vision import BLOCK, Prompt, ours
from tests.support import tiny, vision

KIND = "gemma4" + vision.BOTH_WAYS
CLOSE = 1e-4


def sees(spans: Sequence[ImageSpan], tokens: list[int], window: int) -> np.ndarray:
    """Bool [rows, rows]: who sees whom."""
    at = np.arange(len(tokens))
    allowed = at[None] <= at[:, None]
    if window:
        for span in spans:
            rows = [i for i in range(span.start, span.stop) if tokens[i] < 0]
            allowed[np.ix_(rows, rows)] = True
        allowed &= at[None] > at[:, None] - window
    return allowed


def wanted(path: Path, tokens: list[int], spans: Sequence[ImageSpan], eyes: Any) -> mx.array:
    """float32 [rows, vocab], by mlx-lm's model in one pass."""
    model: Any = load_model(path)[0]
    text = model.language_model.model
    ids = mx.maximum(mx.array([tokens]), 0)
    x = text.embed_tokens(ids)
    rows = mx.array([i for i, token in enumerate(tokens) if token < 0])
    x[0, rows] = mx.concatenate([eyes.features(each.image) for each in spans]) / text.embed_scale

    def masks(self: Any, *_: Any) -> list[mx.array]:
        windows = [
            self.config.sliding_window if layer.layer_type == "sliding_attention" else 0
            for layer in self.layers
        ]
        return [mx.array(sees(spans, tokens, window)) for window in windows]

    with patch.object(type(text), "_make_masks", masks):
        logits: mx.array = model.language_model(ids, input_embeddings=x)[0]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("layout", ["rows", "gather"])
@pytest.mark.parametrize("cut", ["whole", "around", "tokens"])
@pytest.mark.parametrize("name", ["one", "two", "longer than the window", "ends"])
def test_logits_are_those_of_the_rule(name: str, cut: str, layout: Layout, tmp_path: Path) -> None:
    path = vision.save(tmp_path, KIND)
    seen = vision.open_model(path)
    rng = random.Random(0)

    def text(n: int) -> list[int]:
        return [rng.randrange(300) for _ in range(n)]

    parts: dict[str, list[Any]] = {
        "one": [text(5), seen.image(20, 16), text(9)],
        "two": [text(3), seen.image(20, 16), text(2), seen.image(16, 30, seed=1), text(4)],
        "longer than the window": [text(20), seen.image(48, 48, seed=2), text(6)],
        "ends": [text(6), seen.image(20, 16)],
    }
    tokens, spans = vision.prompt(seen, *parts[name])
    assert all(span.both_ways for span in spans)
    places = {edge for span in spans for edge in (span.start, span.stop)}
    if cut == "tokens":  # those of texts
        places |= set(range(1, spans[0].start)) | set(range(spans[-1].stop, len(tokens)))
    cuts = sorted(places - {0, len(tokens)}) if cut != "whole" else []
    want = wanted(path, tokens, spans, seen.eyes)
    got = ours(replace(seen, layout=layout), Prompt(tokens, spans, []), cuts)
    rows = mx.array([stop - 1 for stop in (*cuts, len(tokens))])
    assert mx.abs(got - want[rows]).max().item() <= CLOSE


def test_the_rule_matters(tmp_path: Path) -> None:
    """Rows that see only what is before them give other logits."""
    path = vision.save(tmp_path, KIND)
    seen = vision.open_model(path)
    tokens, spans = vision.prompt(seen, [3, 1, 4], seen.image(20, 16), [1, 5, 9])
    want = wanted(path, tokens, spans, seen.eyes)
    causal = partial(sees, [])
    with patch(f"{__name__}.sees", lambda _, *given: causal(*given)):
        other = wanted(path, tokens, spans, seen.eyes)
    assert mx.abs(want - other)[-1].max().item() > 1000 * CLOSE


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("budget", [1, 8, 0])
def test_an_image_of_more_rows_than_the_budget(budget: int, sequences: int, tmp_path: Path) -> None:
    """Has room in the pools of windows, however few rows a step reads, beside another like it."""
    path = vision.save(tmp_path, KIND)
    settings = {"image_processor": {"max_soft_tokens": 280}}
    (path / "processor_config.json").write_text(json.dumps(settings))
    config = Config(
        cache_gb=0, prefill_budget=budget, block_size=8, max_sequences=sequences, draft="off"
    )
    engine, info = load_engine(path, "sees", config)
    assert info.sees and engine.runner.view.num_blocks.keys() > {None}
    reader = image_reader(path, json.loads((path / "config.json").read_text()), 1 << 20)
    assert reader
    for seed, name in enumerate(("one", "other")):
        image = reader.read(vision.png(64, 64, seed=seed))
        ids, span = reader.span(image, 3)
        assert span.rows * span.columns > 200
        prompt = (5, 6, 7, *ids, 9)
        engine.add(Request(name, prompt, 3, Sampling(0.0), images=(span,)))
    outputs = tiny.run(engine)
    assert {len(tiny.tokens(outputs, name)) for name in ("one", "other")} == {3}


def test_whole_chunks_of_prompts_end_before_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are exact with chunks, whatever number of rows comes before and behind it."""
    monkeypatch.setattr(invariant, "CHUNK", 16)
    seen = vision.seeing(KIND)
    calls = record(Runner(seen.model, "rows", BLOCK, 32), list(range(1, 32)))
    how = invariant.find_invariance(calls, BLOCK, True)
    assert how.chunk == 16
    image = seen.image(32, 40)
    for before, behind in [(1, 60), *((11, n) for n in range(1, 34)), (37, 20)]:
        rng = random.Random(behind)
        texts = [[rng.randrange(300) for _ in range(n)] for n in (before, behind)]
        ids, spans = vision.prompt(seen, texts[0], image, texts[1])
        request = Request("a", tuple(ids), 4, Sampling(0.0, logprobs=0), images=tuple(spans))
        told = []
        for budget in (7, 64):
            e = tiny.engine(seen.model, block=BLOCK, blocks=96, budget=budget)
            e.runner.see(seen.eyes)
            e.runner.set_invariance(how)
            e.scheduler.kv.chunk = how.chunk
            for name in ("a", "again"):
                e.add(replace(request, id=name))
                out = tiny.run(e)
                told.append([each.logprob for o in out for each in o.logprobs])
            e.runner.set_invariance(None)
        assert len(told[0]) == 4 and told[1:] == told[:-1]


def test_a_model_whose_rows_do_not_see_each_other_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = vision.seeing(KIND)
    runner = Runner(seen.model, "rows", 4, 64)
    runner.see(seen.eyes)
    assert image_error(runner, seen.reader) == ""
    monkeypatch.setattr(Group, "last", lambda group, rows, window: rows)
    assert "do not see" in image_error(runner, seen.reader)
