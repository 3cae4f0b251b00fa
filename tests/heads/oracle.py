"""What mlx-vlm's own loop does with a head: tokens per round and drafts, greedily. Needs mlx-vlm,
which nothing else here does."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.heads.packagings import read_json, write_json

VERSION = "0.7.10"
LENGTH = 64  # tokens of an answer
FIRST = 2  # prompts whose drafts are kept

Tokens = list[int]


def load_target(path: Path, at: Path) -> Any:
    """The target in mlx-vlm: its text-only twin of qwen3_5 has a flat config, written at `at`."""
    from mlx_vlm.utils import load_model

    at.mkdir(parents=True)
    write_json(at / "config.json", read_json(path / "config.json")["text_config"])
    (at / "model.safetensors").symlink_to((path / "model.safetensors").resolve())
    return load_model(at).language_model


def load_drafter(path: Path) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter

    return load_drafter(str(path))[0]


def rounds(
    target: Any, drafter: Any, prompt: Tokens, depth: int
) -> tuple[Tokens, Tokens, list[Tokens]]:
    """One answer: its tokens, how many drafts each full round kept, and the drafts of all."""
    from mlx_vlm.speculative import utils as speculative

    prompts = mx.array([prompt])
    cache = target.make_cache()
    asked = speculative.speculative_prefill_kwargs("mtp", drafter)
    out = target(prompts, cache=cache, **asked)
    first = int(out.logits[0, -1].argmax())
    drafts: list[Tokens] = []
    stock = drafter.draft_block

    def recorded(*args: Any, **kwargs: Any) -> mx.array:
        block: mx.array = stock(*args, **kwargs)
        drafts.append(block[0].tolist())
        return block

    object.__setattr__(drafter, "draft_block", recorded)
    loop = speculative._mtp_rounds(
        target,
        drafter,
        cache,
        speculative.speculative_hidden_state("mtp", out),
        {},
        prompt_tokens=prompts,
        first_bonus=first,
        max_tokens=LENGTH,
        sampler=lambda x: x.argmax(-1),
        draft_block_size=depth + 1,
        greedy_sampling=True,
    )
    tokens = [first, *(int(t) for t, _ in loop)]
    object.__delattr__(drafter, "draft_block")
    lengths = zip(drafter.accept_lens, drafter.draft_lens, strict=True)
    return tokens, [kept for kept, drafted in lengths if drafted == depth], drafts


def measure(
    target: Any, drafter: Any, prompts: Sequence[Tokens], answers: Sequence[Tokens], depth: int
) -> dict[str, Any]:
    """Tokens per full round over all prompts, and the drafts of the first ones."""
    kept, drafts = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, accepted, drafted = rounds(target, drafter, prompt, depth)
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


# Well-known mistakes of a loader, to see how far below the right one they fall.
MISTAKES: dict[str, Callable[[Any], None]] = {
    "norms_without_one": lambda drafter: change(drafter, "norm.weight", lambda w: w - 1),
    "hidden_first": lambda drafter: change(
        drafter, "fc.weight", lambda w: mx.roll(w, w.shape[0], 1)
    ),
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
