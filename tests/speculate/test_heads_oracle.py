"""The head's logits are those of mlx-vlm's own module, on random weights; the recorded reference is
what its loop does. Needs mlx-vlm, which nothing else does: pip install mlx-vlm==0.7.10."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.model import attention
from mlxspec.model.batch import fill_view
from mlxspec.model.pages import Pages, View
from mlxspec.speculate.heads.model import HeadModel
from tests.heads import oracle, packagings, runs
from tests.heads.packagings import FOUR_BITS, TARGET
from tests.support.spans import span

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its imports

CLOSE = 1e-4  # of the largest logit
PROMPT, CHAINED = 37, 5  # rows with the target's hidden states, and with the head's own
BLOCK = 8
EXPERTS = dict(
    model_type="qwen3_5_moe_text",
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
)


@pytest.fixture(autouse=True)
def _mlx_vlm() -> None:
    oracle.require()


def text_config(experts: bool) -> dict[str, Any]:
    config = packagings.read_json(TARGET / "config.json")["text_config"]
    return dict(config) | (EXPERTS if experts else {})


def make_target(config: dict[str, Any]) -> Any:
    """A random target of mlx-lm's; only its embeddings and its lm_head are used."""
    kind = str(config["model_type"]).removesuffix("_text")
    arch = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(2)
    return arch.Model(arch.ModelArgs(model_type=kind, text_config=config))


def our_logits(head: HeadModel, tokens: mx.array, hidden: mx.array) -> mx.array:
    """Over pages: the rows at once, then chained ones, each with the output of the one before."""
    blocks: dict[int | None, int] = {None: 16}
    view = View(BLOCK, blocks, dict(blocks), first=1)
    pages = [Pages(view, None) for _ in head.module.layers]
    attention.install(head.module)
    outputs, start = [], 1
    for rows in (PROMPT, *(1 for _ in range(CHAINED))):
        fill_view(view, [span(range(1, 16), [], start, rows)], None)
        embedded = head.embed(tokens[start - 1 : start - 1 + rows])
        hidden = head.module(embedded[:, None], hidden[:, None], pages)[:, 0]
        outputs.append(hidden)
        hidden, start = hidden[-1:], start + rows
    return head.lm_head(mx.concatenate(outputs))


def their_logits(path: Path, target: Any, tokens: mx.array, hidden: mx.array) -> mx.array:
    """The same rows by mlx-vlm's loader and module."""
    drafter = oracle.load_drafter(path)
    text = target.language_model
    drafter.reset(SimpleNamespace(embed_tokens=text.model.embed_tokens, lm_head=text.lm_head))
    outputs, at, hidden = [], 0, hidden[None]
    for rows in (PROMPT, *(1 for _ in range(CHAINED))):
        hidden = drafter._forward_tokens(tokens[None, at : at + rows], hidden, mx.int32)
        outputs.append(hidden[0])
        hidden, at = hidden[:, -1:], at + rows
    return text.lm_head(mx.concatenate(outputs))


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("experts", [False, True])
def test_logits_are_those_of_mlx_vlm(experts: bool, bits: int, tmp_path: Path) -> None:
    config = text_config(experts)
    target = make_target(config)
    tensors = runs.random_tensors(target)
    more: dict[str, Any] = {}
    if bits:
        tensors = packagings.quantized(tensors, lambda _: FOUR_BITS)
        more = dict(quantization=FOUR_BITS, quantization_config=FOUR_BITS)
    sidecar = packagings.sidecar_config(config, **more)
    path = packagings.write_sidecar(tmp_path, tensors, sidecar)
    mx.random.seed(4)
    tokens = mx.random.randint(0, config["vocab_size"], (PROMPT + CHAINED,))
    hidden = mx.random.normal((PROMPT, config["hidden_size"]))
    ours = our_logits(runs.head_of(path, target), tokens, hidden)
    theirs = their_logits(path, target, tokens, hidden)
    error = float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())
    print(f"experts {experts}, {bits} bits: off by {error:.1e} of the largest logit")
    assert error <= CLOSE
    wrong = our_logits(runs.head_of(path, target), tokens, hidden[::-1])
    assert float(mx.abs(wrong - theirs).max() / mx.abs(theirs).max()) > 100 * CLOSE


@pytest.mark.parametrize("packaging", ["sidecar", "sidecar-4bit"])
def test_the_reference_is_what_mlx_vlm_does(packaging: str, tmp_path: Path) -> None:
    reference = runs.reference()
    target = oracle.load_target(TARGET, tmp_path / "target")
    drafter = oracle.load_drafter(packagings.write(packaging, tmp_path / packaging))
    prompts, answers = reference["prompts"], reference["greedy"]
    found = oracle.measure(target, drafter, prompts, answers, 4)
    assert found == reference["by_depth"][packaging]["4"]
