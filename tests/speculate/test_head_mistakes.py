"""Well-known mistakes of a loader, made in what ours reads: they change no token, and so little is
accepted then that the comparisons with mlx-vlm would fail."""

import functools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.heads import kinds, runs
from tests.heads.kinds import Config, Writer
from tests.heads.packagings import Tensors
from tests.support.parameter_rows import only

INNER = "dflash_config"
EAGLE_LAYERS = "eagle_aux_hidden_state_layer_ids"


def changed(ending: str, change: Callable[[mx.array], mx.array]) -> Writer:
    def write(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        found = {name: change(x) for name, x in tensors.items() if name.endswith(ending)}
        assert found
        return tensors | found, config

    return write


def without(ending: str) -> Writer:
    return changed(ending, mx.zeros_like)


def other_layers(by: int) -> Writer:
    def write(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        if EAGLE_LAYERS in config:
            return tensors, config | {EAGLE_LAYERS: [i + by for i in config[EAGLE_LAYERS]]}
        ids = [i + by for i in config[INNER]["target_layer_ids"]]
        return tensors, config | {INNER: config[INNER] | {"target_layer_ids": ids}}

    return write


def slot_one_late(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    return tensors, config | {INNER: config[INNER] | {"sample_from_anchor": False}}


def embedding_not_scaled(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    scale = config["backbone_hidden_size"] ** 0.5

    def change(weight: mx.array) -> mx.array:
        embedded, hidden = mx.split(weight, 2, axis=1)
        return mx.concatenate([embedded / scale, hidden], axis=1)

    return changed("pre_projection.weight", change)(tensors, config)


MISTAKES: dict[tuple[str, str], Writer] = {
    ("eagle3", "layers_one_late"): other_layers(1),
    ("eagle3", "no_d2t"): without("d2t"),
    ("dflash", "layers_one_early"): other_layers(-1),
    ("dflash", "layers_one_late"): other_layers(1),
    ("dflash2", "layers_one_early"): other_layers(-1),
    ("dflash2", "no_selector"): without("hidden_projection.weight"),
    ("dflash2", "no_conv"): without("base_kernel"),
    ("dspark", "layers_one_early"): other_layers(-1),
    ("dspark", "no_markov"): without("markov_w2.weight"),
    ("dspark", "slot_one_late"): slot_one_late,
    ("assistant", "hidden_first"): changed(
        "pre_projection.weight", lambda w: mx.roll(w, w.shape[1] // 2, 1)
    ),
    ("assistant", "embedding_not_scaled"): embedding_not_scaled,
    ("assistant", "no_full_attention"): without("layers.3.self_attn.o_proj.weight"),
}


SUBTLE = ("dspark", "layers_one_early")  # which shows on all prompts together


def run_of(kind: str, path: Path, count: int) -> runs.Run:
    prompts, answers = (kinds.reference(kind)[name][:count] for name in ("prompts", "greedy"))
    run = runs.run(*kinds.engine(path, kinds.target_of(kind)), 4, prompts)
    assert run.answers == answers
    return run


@functools.cache
def right(kind: str, count: int) -> float:
    return run_of(kind, kinds.DATA / kind, count).tokens_per_round(4)


@pytest.mark.parametrize(
    "kind, mistake",
    only(MISTAKES, [*MISTAKES].index(("assistant", "no_full_attention"))),
)
def test_mistakes_show(kind: str, mistake: str, tmp_path: Path) -> None:
    """On the same prompts as without the mistake."""
    made = MISTAKES[kind, mistake](*kinds.trained(kind))
    count = 12 if (kind, mistake) == SUBTLE else 2
    run = run_of(kind, kinds.save_head(tmp_path, *made), count)
    assert run.tokens_per_round(4) < 0.97 * right(kind, count)
