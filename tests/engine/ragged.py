"""What unequal contexts cost a model with recurrent layers: steps of six answers at contexts of 9 to
360 tokens against steps at six equal contexts of the same sum.

    python -m tests.engine.ragged

Prints the medians of three interleaved runs and their ratio. No drafts; a random qwen3_5 in fp32.
"""

import statistics
import time
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from mlx.utils import tree_flatten  # noqa: E402

from tests.support import architectures, tiny  # noqa: E402

SIZES = dict(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=8192,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
RAGGED = (9, 40, 90, 150, 251, 360)  # tokens before the first step that is timed
EQUAL = (150, 150, 150, 150, 150, 150)  # as many in all
STEPS, RUNS = 40, 3


def random_model() -> Any:
    arch = architectures.module("qwen3_5")
    config = architectures.config("qwen3_5")
    config["text_config"] |= SIZES
    mx.random.seed(3)
    model = arch.Model(arch.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def step_seconds(model: Any, contexts: tuple[int, ...]) -> float:
    e = tiny.engine(model, layout="rect", block=16, blocks=512, budget=2048, context=1024)
    for i, n in enumerate(contexts):
        e.add(tiny.request(f"r{i}", [1 + (7 * i + j) % 99 for j in range(n)], 3 * STEPS))
    for _ in range(STEPS // 2):  # the prompts and what is compiled
        e.step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        e.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    model = random_model()
    weights = sum(array.size for _, array in tree_flatten(model.parameters()))
    found = [(step_seconds(model, RAGGED), step_seconds(model, EQUAL)) for _ in range(RUNS)]
    ragged, equal = (1e3 * statistics.median(times) for times in zip(*found, strict=True))
    print(f"{weights / 1e6:.0f}M parameters; a step takes {ragged:.1f} ms at {RAGGED},")
    print(f"{equal:.1f} ms at {EQUAL}: {ragged / equal:.2f} times as long")


if __name__ == "__main__":
    main()
