"""The logits that EAGLE-3 and block heads draft from in the engine are those of mlx-vlm's own
modules, on random weights. Needs mlx-vlm, which nothing else does: pip install mlx-vlm==0.7.10."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.heads import kinds, oracle
from tests.heads.kinds import Config, Tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its imports

CLOSE = 1e-4  # of the largest logit
DEPTH = 7
SLIDING = "sliding_attention"


@pytest.fixture(autouse=True)
def _mlx_vlm() -> None:
    oracle.require()


# ---- variants
# -------------------------------------------------------------------------------------------


def from_masks(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The newest token's own row predicts nothing."""
    inner = config["dflash_config"] | dict(sample_from_anchor=False)
    return tensors, config | dict(sample_from_anchor=False, dflash_config=inner)


def inner(**changed: Any) -> kinds.Writer:
    def change(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        return tensors, config | dict(dflash_config=config["dflash_config"] | changed)

    return change


def other_window(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The inner setting overrides that of the layers."""
    return inner(swa_window_size=24)(tensors, config | SLIDES | dict(sliding_window=4))


SLIDES = dict(layer_types=[SLIDING, "full_attention", SLIDING], sliding_window=24)
WINDOW = SLIDES | dict(is_causal=False)
VARIANTS: dict[str, tuple[str, kinds.Writer]] = {
    **{kind: (kind, kinds.as_it_is) for kind in kinds.KINDS},
    "eagle3, full vocabulary": ("eagle3", kinds.full_vocabulary),
    "eagle3, hidden states not normed": ("eagle3", kinds.setting(norm_before_residual=False)),
    "eagle3, normed taps": ("eagle3", kinds.normed_taps),
    "eagle3, two layers": ("eagle3", kinds.two_layers),
    "dflash, sliding": ("dflash", kinds.setting(**WINDOW)),
    "dflash, sliding as by default": ("dflash", kinds.setting(**SLIDES)),
    "dflash, softcapped": ("dflash", kinds.setting(final_logit_softcapping=2.0)),
    "dflash, the last rows": ("dflash", inner(draft_window_size=24)),
    "dflash, causal": ("dflash", kinds.setting(**WINDOW | dict(is_causal=True))),
    "dflash2, sliding": ("dflash2", kinds.setting(**WINDOW)),
    "dspark, sliding": ("dspark", kinds.setting(**WINDOW)),
    "dspark, another window": ("dspark", other_window),
    "dspark, interleaved rope": ("dspark", kinds.setting(rope_is_neox_style=False)),
    "dspark, softcapped": ("dspark", kinds.setting(final_logit_softcapping=2.0)),
    "dspark, from masks": ("dspark", from_masks),
}


# ---- both sides
# -----------------------------------------------------------------------------------------


def their_drafter(path: Path, kind: str, config: Config) -> Any:
    """Causal where we are by default, as vLLM is: in sliding layers, but of DSpark. mlx-vlm's
    default is nowhere."""
    drafter = oracle.load_drafter(path)
    if kind in ("dflash", "dflash2") and "is_causal" not in config:
        for layer in drafter.layers:
            layer.self_attn.is_causal = layer.self_attn.is_sliding
    return drafter


def taps_of(drafter: Any, known: list[int]) -> mx.array:
    """What the head reads of all tokens but the newest."""
    target = oracle.Qwen3(kinds.plain_target())
    ids = getattr(drafter.config, "capture_layer_ids", None) or drafter.config.target_layer_ids
    out = target(mx.array([known[:-1]]), target.make_cache(), ids)
    return mx.concatenate(out.hidden_states, axis=-1)


def greedy(logits: mx.array) -> mx.array:
    return logits.argmax(-1)


def their_chain(
    drafter: Any, known: list[int], draft: list[int], taps: mx.array
) -> tuple[mx.array, list[int]]:
    """Their logits where our draft is, and the tokens of these."""
    drafter.reset(oracle.Qwen3(kinds.plain_target()))
    tokens = [mx.array([known[1:]]), *(mx.array([[token]]) for token in draft[:-1])]
    hidden, logits = taps, []
    for each in tokens:
        hidden = drafter._forward_tokens(each, hidden, mx.int32)[:, -1:]
        logits.append(drafter._logits(hidden)[0])
    found = mx.concatenate(logits)
    chosen = drafter._draft_to_target(greedy(found), mx.int32)
    return found, [int(token) for token in chosen]


def their_block(
    drafter: Any, known: list[int], draft: list[int], taps: mx.array
) -> tuple[mx.array, list[int]]:
    target = oracle.Qwen3(kinds.plain_target())
    at_anchor = getattr(drafter.config, "sample_from_anchor", False)
    rows = [known[-1], *(3 for _ in range(DEPTH - bool(at_anchor)))]
    hidden = drafter._hidden(mx.array([rows]), taps, drafter.reset(target))
    logits = drafter._logits(hidden[:, -DEPTH:])[0]
    caches = drafter.reset(target)
    tokens = drafter.draft_block(known[-1], taps, caches, DEPTH + 1, greedy)
    return logits, tokens[0].tolist()


THEIRS: dict[str, Callable[..., tuple[mx.array, list[int]]]] = {
    kind: their_chain if kind == "eagle3" else their_block for kind in kinds.KINDS
}


@pytest.mark.parametrize("kind, change", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_mlx_vlm(kind: str, change: kinds.Writer, tmp_path: Path) -> None:
    tensors, config = change(*kinds.trained(kind))
    path = kinds.save_head(tmp_path, kinds.random_tensors(tensors), config)
    prompt = kinds.reference(kind)["prompts"][0]
    known, draft, logits = kinds.first_round(path, prompt, DEPTH)
    if "d2t" in tensors:
        logits = logits[:, kinds.kept_ids(tensors)]
    drafter = their_drafter(path, kind, config)
    rows = config.get("dflash_config", {}).get("draft_window_size", 0)
    taps = taps_of(drafter, known)[:, -rows:]  # its own window lets some more rows in
    theirs, tokens = THEIRS[kind](drafter, known, draft, taps)

    def off(found: mx.array) -> float:
        return float(mx.abs(logits - found).max() / mx.abs(found).max())

    print(f"{kind}: off by {off(theirs):.1e} of the largest logit")
    assert off(theirs) <= CLOSE and draft == tokens
    wrong, _ = THEIRS[kind](drafter, known, draft, taps[:, ::-1])
    assert off(wrong) > 100 * CLOSE


@pytest.mark.parametrize("kind", kinds.TRAINED)
def test_the_reference_is_what_mlx_vlm_does(kind: str) -> None:
    reference = kinds.reference(kind)
    target = oracle.target_of(kind, kinds.plain_target(), kinds.target_of(kind))
    drafter = oracle.load_drafter(kinds.DATA / kind)
    prompts, answers = reference["prompts"], reference["greedy"]
    found = oracle.measure(target, drafter, prompts, answers, 4, kind)
    assert found == reference["by_depth"]["4"]
