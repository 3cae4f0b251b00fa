"""Which hidden state a head reads, where its checkpoint does not say: after the model's final norm,
or before it. A trained pair is rewritten so that the two differ, the model's answers do not, and
the head fits one of them."""

import logging
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.config import Config
from mlxspec.load.loader import load_engine
from mlxspec.speculate.calibrate import MEASURED
from mlxspec.types import FINAL_NORM, Tap
from tests.heads import packagings, runs
from tests.heads.packagings import SIDECAR, TARGET
from tests.support import tiny
from tests.support.engine_with_head import head_of

BLOCK = 16
LAST = 3  # layer
NORM = "language_model.model.norm.weight"
LM_HEAD = "language_model.lm_head.weight"


def spread(seed: int) -> mx.array:
    """Weights of a norm, [64]: in large models they differ by factors."""
    return mx.exp(mx.random.normal((64,), key=mx.random.key(seed)))


def pair(root: Path, tap: Tap, seed: int) -> tuple[Path, Path]:
    """The directories of the model and of a head that reads its hidden state `tap`."""
    scale = spread(seed)
    target, head = packagings.target_tensors(), packagings.head_tensors()
    own = target[NORM]
    target |= {NORM: own * scale, LM_HEAD: target[LM_HEAD] / scale}
    wanted = head["pre_fc_norm_hidden.weight"]
    wanted = wanted / scale if tap == FINAL_NORM else wanted * own
    head |= {"pre_fc_norm_hidden.weight": wanted, "norm.weight": head["norm.weight"] * scale}
    for name, source, tensors in ("target", TARGET, target), ("head", SIDECAR, head):
        shutil.copytree(source, root / name)
        packagings.save(root / name / "model.safetensors", tensors)
    return root / "target", root / "head"


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]


@pytest.mark.slow
@pytest.mark.parametrize("tap", [FINAL_NORM, LAST])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_hidden_state_that_a_head_was_trained_with_is_chosen(
    tap: Tap, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mlxspec")
    config = Config(
        cache_dir=str(tmp_path / "cache"),
        cache_gb=0,
        block_size=BLOCK,
        kv_blocks=64 + MEASURED // BLOCK,
    )
    target, head = pair(tmp_path, tap, seed)
    e, _ = load_engine(target, "tiny", config, head)
    assert head_of(e).taps == (tap,), caplog.messages
    prompt, answer = runs.reference()["prompts"][0], runs.reference()["greedy"][0]
    e.add(tiny.request("r", prompt, len(answer)))
    assert tiny.tokens(tiny.run(e), "r") == answer
