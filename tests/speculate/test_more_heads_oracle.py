"""The logits that EAGLE-3 and block heads draft from in the engine are those of mlx-vlm's own
modules, on random weights. Needs mlx-vlm, which nothing else does: pip install mlx-vlm==0.7.10."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.heads import kinds, oracle, runs
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


def setting(**changed: Any) -> kinds.Writer:
    return lambda tensors, config: (tensors, config | changed)


def normed_taps(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    return tensors | {"input_norm.weight": mx.ones(192)}, config | dict(norm_before_fc=True)


def two_layers(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The second sees no embeddings."""
    more = {}
    for name, array in tensors.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            wide = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
            more[name.replace("layers.0.", "layers.1.")] = array[:, :64] if wide else array
    layer = config["transformer_layer_config"] | dict(num_hidden_layers=2)
    return tensors | more, config | dict(transformer_layer_config=layer)


def from_masks(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The newest token's own row predicts nothing."""
    inner = config["dflash_config"] | dict(sample_from_anchor=False)
    return tensors, config | dict(sample_from_anchor=False, dflash_config=inner)


# mlx-vlm's default differs from ours, which is vLLM's: sliding layers are causal, others are not.
WINDOW = dict(layer_types=[SLIDING, "full_attention", SLIDING], sliding_window=24, is_causal=False)
VARIANTS: dict[str, tuple[str, kinds.Writer]] = {
    **{kind: (kind, kinds.as_it_is) for kind in kinds.KINDS},
    "eagle3, full vocabulary": ("eagle3", kinds.full_vocabulary),
    "eagle3, hidden states not normed": ("eagle3", setting(norm_before_residual=False)),
    "eagle3, normed taps": ("eagle3", normed_taps),
    "eagle3, two layers": ("eagle3", two_layers),
    "dflash, sliding": ("dflash", setting(**WINDOW)),
    "dflash, causal": ("dflash", setting(**WINDOW | dict(is_causal=True))),
    "dflash2, sliding": ("dflash2", setting(**WINDOW)),
    "dspark, sliding": ("dspark", setting(**WINDOW)),
    "dspark, from masks": ("dspark", from_masks),
}


# ---- both sides
# -----------------------------------------------------------------------------------------


def ours(path: Path, prompt: list[int]) -> tuple[list[int], list[int], mx.array]:
    """Of the engine's first round: the tokens before it, its draft, and the logits of that, before
    a selector or Markov head."""
    e, drafter = kinds.engine(path)
    inner, found = drafter.head.lm_head, []

    def lm_head(hidden: mx.array) -> mx.array:
        found.append(inner(hidden))
        return found[-1]

    drafter.head.lm_head = lm_head
    run = runs.run(e, drafter, DEPTH, [prompt])
    first = run.rounds[0][0]
    logits = mx.concatenate([each.reshape(-1, each.shape[-1]) for each in found])[:DEPTH]
    return (prompt + run.answers[0])[: first.start + 1], first.draft, logits


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
    known, draft, logits = ours(path, kinds.reference(kind)["prompts"][0])
    if "d2t" in tensors:
        logits = logits[:, kinds.kept_ids(tensors)]
    drafter = oracle.load_drafter(path)
    taps = taps_of(drafter, known)
    theirs, tokens = THEIRS[kind](drafter, known, draft, taps)

    def off(found: mx.array) -> float:
        return float(mx.abs(logits - found).max() / mx.abs(found).max())

    print(f"{kind}: off by {off(theirs):.1e} of the largest logit")
    assert off(theirs) <= CLOSE and draft == tokens
    wrong, _ = THEIRS[kind](drafter, known, draft, taps[:, ::-1])
    assert off(wrong) > 100 * CLOSE


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_the_reference_is_what_mlx_vlm_does(kind: str) -> None:
    reference, target = kinds.reference(kind), oracle.Qwen3(kinds.plain_target())
    drafter = oracle.load_drafter(kinds.DATA / kind)
    prompts, answers = reference["prompts"], reference["greedy"]
    found = oracle.measure(target, drafter, prompts, answers, 4, kind)
    assert found == reference["by_depth"]["4"]
