"""What mlx-vlm's own loop does with a head: tokens per round and drafts, greedily. Needs mlx-vlm,
which nothing else here does."""

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from tests.heads.packagings import read_json, write_json

VERSION = "0.7.10"
LENGTH = 64  # tokens of an answer
FAMILIES = {"mtp": "mtp", "assistant": "mtp", "eagle3": "eagle3"}  # others are DFlash's
FIRST = 2  # prompts whose drafts are kept

Tokens = list[int]
Mistake = Callable[[Any], None]


def load_target(path: Path, at: Path) -> Any:
    """The target in mlx-vlm: its text-only twin of qwen3_5 has a flat config, written at `at`."""
    from mlx_vlm.utils import load_model

    at.mkdir(parents=True)
    write_json(at / "config.json", read_json(path / "config.json")["text_config"])
    (at / "model.safetensors").symlink_to((path / "model.safetensors").resolve())
    return load_model(at).language_model


class Qwen3:
    """mlx-lm's qwen3 as mlx-vlm's loops want a target: hidden states on demand, and caches that give
    rows back."""

    def __init__(self, model: Any) -> None:
        self.model, self.lm_head, self.config = model.model, model.lm_head, model.args

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.model.layers]

    def __call__(self, x: mx.array, cache: Any, capture_layer_ids: Any = (), **_: Any) -> Any:
        from mlx_vlm.models.base import LanguageModelOutput

        h, kept = self.model.embed_tokens(x), []
        mask = create_attention_mask(h, cache[0])
        for i, (layer, each) in enumerate(zip(self.model.layers, cache, strict=True)):
            h = layer(h, mask, each)
            if i in capture_layer_ids:
                kept.append(h)
        return LanguageModelOutput(logits=self.lm_head(self.model.norm(h)), hidden_states=kept)

    def rollback_speculative_cache(
        self, caches: Any, state: Any, accepted: Any, block_size: int
    ) -> None:
        for cache in caches:
            cache.trim(block_size - 1 - int(accepted))


def load_gemma4(path: Path) -> Any:
    """Gemma 4 in mlx-vlm, whose text-only twin hands out no keys and values."""
    from mlx_vlm.models.gemma4.config import TextConfig
    from mlx_vlm.models.gemma4.language import LanguageModel

    model = LanguageModel(TextConfig.from_dict(read_json(path / "config.json")))
    model.load_weights(str(path / "model.safetensors"))
    return model


def target_of(kind: str, model: Any, path: Path) -> Any:
    """What a kind's head drafts for, loaded by mlx-lm from `path`, as mlx-vlm's loops want it."""
    return load_gemma4(path) if kind == "assistant" else Qwen3(model)


def load_drafter(path: Path) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter

    return load_drafter(str(path))[0]


def sampler(temperature: float, seed: int) -> Any:
    """What mlx-vlm's server draws the target's tokens with; None: greedily."""
    from mlx_vlm.server.generation import _PositionedTargetSampler

    return (
        _PositionedTargetSampler(temperature=temperature, top_p=1.0, seed=seed)
        if temperature
        else None
    )


def rounds(
    target: Any, drafter: Any, prompt: Tokens, depth: int, kind: str, sampler: Any = None
) -> tuple[Tokens, Tokens, list[Tokens]]:
    """One answer: its tokens, how many drafts each full round kept, and the drafts of all. Greedily
    or drawn by `sampler`."""
    from mlx_vlm.speculative import utils as speculative

    prompts = mx.array([prompt])
    cache = target.make_cache()
    family = FAMILIES.get(kind, "dflash")
    asked = speculative.speculative_prefill_kwargs(family, drafter)
    out = target(prompts, cache=cache, **asked)
    newest = out.logits[:, -1]
    logprobs = newest - mx.logsumexp(newest, axis=-1, keepdims=True)
    first = int(
        sampler.sample_target(logprobs, row_ids=[0], positions=[0]) if sampler else newest.argmax()
    )
    drafts: list[Tokens] = []
    name = "draft_block_greedy" if family == "dflash" else "draft_block"
    stock = getattr(drafter, name)

    def recorded(*args: Any, **kwargs: Any) -> mx.array:
        block: mx.array = stock(*args, **kwargs)
        drafts.append(block[0].tolist())
        return block

    object.__setattr__(drafter, name, recorded)
    drafter.prefer_requested_block_size = True  # its own controller would draft less
    loop = getattr(speculative, f"_{family}_rounds")(
        target,
        drafter,
        cache,
        speculative.speculative_hidden_state(family, out),
        *([out.shared_kv_states or {}] if family == "mtp" else []),
        **({} if family == "dflash" else {"prompt_tokens": prompts}),
        first_bonus=first,
        max_tokens=LENGTH,
        sampler=sampler or (lambda x: x.argmax(-1)),
        draft_block_size=depth + 1,
        greedy_sampling=not sampler,
    )
    tokens = [first, *(int(t) for t, _ in loop)]
    object.__delattr__(drafter, name)
    lengths = zip(drafter.accept_lens, drafter.draft_lens, strict=True)
    return tokens, [kept for kept, drafted in lengths if drafted == depth], drafts


def measure(
    target: Any,
    drafter: Any,
    prompts: Sequence[Tokens],
    answers: Sequence[Tokens],
    depth: int,
    kind: str = "mtp",
) -> dict[str, Any]:
    """Tokens per full round over all prompts, and the drafts of the first ones."""
    kept, drafts = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, accepted, drafted = rounds(target, drafter, prompt, depth, kind)
        assert tokens == answer, "mlx-vlm's target answers otherwise than mlx-lm's"
        kept += accepted
        drafts.append(drafted)
    rate = round(1 + sum(kept) / len(kept), 3)
    return dict(tokens_per_round=rate, drafts_of_first=drafts[:FIRST])


def change(drafter: Any, ending: str, f: Callable[[mx.array], mx.array]) -> None:
    """Change the drafter's parameters whose names end so."""
    found = tree_flatten(drafter.parameters())
    changed = [(name, f(array)) for name, array in found if name.endswith(ending)]
    drafter.load_weights(changed, strict=False)


def other_layers(by: int) -> Mistake:
    """Reads the hidden states so many layers later."""

    def changed(drafter: Any) -> None:
        for name in ("capture_layer_ids", "target_layer_ids"):
            if hasattr(drafter.config, name):
                ids = getattr(drafter.config, name)
                setattr(drafter.config, name, [i + by for i in ids])

    return changed


def without(ending: str) -> Mistake:
    return lambda drafter: change(drafter, ending, mx.zeros_like)


def scales(w: mx.array) -> mx.array:
    """By how much the columns of Gemma's embedding are scaled, and those of the hidden state."""
    half = w.shape[1] // 2
    return mx.concatenate([mx.full(half, half**0.5), mx.ones(half)])


# Well-known mistakes of a loader, to see how far below the right one they fall.
MISTAKES: dict[str, dict[str, Mistake]] = {
    "mtp": {
        "norms_without_one": lambda drafter: change(drafter, "norm.weight", lambda w: w - 1),
        "hidden_first": lambda drafter: change(
            drafter, "fc.weight", lambda w: mx.roll(w, w.shape[0], 1)
        ),
    },
    "assistant": {
        "hidden_first": lambda drafter: change(
            drafter, "pre_projection.weight", lambda w: mx.roll(w, w.shape[1] // 2, 1)
        ),
        "embedding_not_scaled": lambda drafter: change(
            drafter, "pre_projection.weight", lambda w: w / scales(w)
        ),
        "no_full_attention": without("layers.3.self_attn.o_proj.weight"),
    },
    "eagle3": {
        "layers_one_late": other_layers(1),
        "no_d2t": lambda drafter: setattr(drafter, "d2t", mx.zeros_like(drafter.d2t)),
    },
    "dflash": {"layers_one_early": other_layers(-1), "layers_one_late": other_layers(1)},
    "dflash2": {
        "layers_one_early": other_layers(-1),
        "no_selector": without("hidden_projection.weight"),
        "no_conv": without("base_kernel"),
    },
    "dspark": {
        "layers_one_early": other_layers(-1),
        "no_markov": without("markov_w2.weight"),
        "slot_one_late": lambda drafter: setattr(drafter.config, "sample_from_anchor", False),
    },
}


def lines(value: Any, depth: int = 0) -> str:
    """JSON with each list of numbers in one line."""
    pad = "  " * depth
    if isinstance(value, dict):
        items = [f"{pad}  {json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"{pad}  {json.dumps(v)}" for v in value) + f"\n{pad}]"
    return json.dumps(value)


def require() -> None:
    """Skip a test where mlx-vlm is missing, or is another version."""
    try:
        found = importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        pytest.skip(f"this compares with mlx-vlm {VERSION}; {found} is installed")
