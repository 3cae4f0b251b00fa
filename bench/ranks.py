"""A step of several ranks beside mlx-lm's own sharded generate, in turns on the same machine.

`mlx.launch -n 2 --backend ring -- .venv/bin/python -m bench.ranks [MODEL]` prints the ratio of
each round and the median: of the seconds between two tokens of one answer, greedy, without drafts.
Without MODEL it is a random one of 128 million weights, as the built-in one has 9 heads.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from mlx_lm.generate import generate_step, generation_stream  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from mlxspec.config import Config  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.load.loader import load_engine  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.model.mirror import Follower  # noqa: E402
from mlxspec.model.parallel import ProcessGroup, join  # noqa: E402
from mlxspec.types import Request, Sampling  # noqa: E402

PROMPT = tuple(range(1000, 1032))
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}


def made_up(folder: Path) -> Path:
    """A model's directory, the same on each rank."""
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model.save_weights(str(folder / "model.safetensors"))
    return folder


def theirs(model: Any, tokens: int) -> tuple[float, list[int]]:
    """Seconds a step, and the answer."""
    answer = []
    began = 0.0
    mx.synchronize()  # what two streams send would mix
    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=tokens):
        began = began or time.perf_counter()
        answer.append(int(token))
    seconds = (time.perf_counter() - began) / (tokens - 1)
    mx.synchronize(generation_stream)  # the token after the last
    return seconds, answer


def ours(engine: Engine, name: str, tokens: int) -> tuple[float, list[int]]:
    answer: list[int] = []
    began = 0.0
    engine.add(Request(name, PROMPT, tokens, Sampling(temperature=0)))
    while engine.busy:
        for output in engine.step():
            began = began or time.perf_counter()
            answer += output.tokens
    return (time.perf_counter() - began) / (len(answer) - 1), answer


def follow(follower: Follower, ranks: ProcessGroup) -> None:
    """Another rank: do what rank 0 tells until one answer is done."""
    while True:
        for _, what, *args in ranks.receive(0):
            if what == "done":
                return
            follower.call(what, *args)


def tell_done(ranks: ProcessGroup) -> None:
    ranks.call("", "done")
    ranks.flush()


def measure(path: Path, config: Config, ranks: ProcessGroup, tokens: int, rounds: int) -> None:
    model: Any = load_model(path, lazy=True)[0]
    model.shard(ranks.group)
    mx.eval(model.parameters())
    engine, _ = load_engine(path, "bench", config, group=ranks)
    if ranks.rank:
        follower = Follower(engine, ranks)
        follow(follower, ranks)  # rank 0 warms up
    else:
        tell_done(ranks)
    ratios = []
    for number in range(rounds + 1):
        lm_seconds, expected = theirs(model, tokens)
        if ranks.rank:
            follow(follower, ranks)
            continue
        seconds, answer = ours(engine, str(number), tokens)
        tell_done(ranks)
        assert answer == expected
        if number:  # the first compiles
            ratios.append(seconds / lm_seconds)
            print(f"{1e3 * seconds:.2f} ms, mlx-lm {1e3 * lm_seconds:.2f} ms: {ratios[-1]:.3f}")
    if not ranks.rank:
        print(f"median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        ranks.end()
    else:
        ranks.receive(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    config = Config(speculate=False, cache_gb=0, context=2048, model=args.model)
    with TemporaryDirectory() as folder:
        path = resolve_model(config).path if args.model else made_up(Path(folder))
        measure(path, config, join(1), args.tokens, args.rounds)


if __name__ == "__main__":
    main()
