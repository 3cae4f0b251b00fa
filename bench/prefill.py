"""How fast a prompt is read alone, against fixed numbers of rows a step, and how long an answer
waits beside one. `python -m bench.prefill MODEL`: rounds are interleaved, times are the engine's.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from mlxspec import blas

blas.load()

from rich.console import Console  # noqa: E402  after BLAS
from rich.table import Table  # noqa: E402

from mlxspec.config import Config  # noqa: E402
from mlxspec.engine.budget import PrefillBudget  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.types import Request  # noqa: E402

FIXED = (32, 128, 256, 512, 1024, 2048)
ANSWER = 4000  # tokens: longer than a prompt is read beside it


def prompt_of(tokens: int, seed: int, vocab: int) -> tuple[int, ...]:
    """Tokens that no other seed has at the same place."""
    return tuple((7 * i + 31 * seed + 1) % vocab for i in range(tokens))


def reading(engine: Engine, budget: PrefillBudget, prompt: tuple[int, ...]) -> float:
    """Seconds to the first token of a prompt that is read alone."""
    engine.reset()
    engine.scheduler.prefill_budget = budget
    began = time.perf_counter()
    engine.add(Request("alone", prompt, 1))
    while engine.busy:
        engine.step()
    return time.perf_counter() - began


def waiting(engine: Engine, context: int, seed: int) -> tuple[list[float], float]:
    """Seconds of each step in which an answer of `context` tokens waits for a prompt of as many,
    and of a step without one."""
    engine.reset()
    engine.add(Request("answer", prompt_of(context, seed, engine.vocab), ANSWER))
    while not engine.step():
        pass
    plain = [took(engine) for _ in range(5)]
    engine.add(Request("other", prompt_of(context, seed + 1, engine.vocab), 1))
    steps: list[float] = []
    while engine.scheduler.waiting or len(engine.scheduler.running) > 1:
        steps.append(took(engine))
    engine.abort("answer")
    while engine.busy:
        engine.step()
    return steps, statistics.median(plain)


def took(engine: Engine) -> float:
    engine.step()
    return engine.step_seconds


def alone(
    engine: Engine, own: PrefillBudget, fixed: Sequence[int], tokens: int, rounds: int
) -> Table:
    """Tokens a second of our budget and of fixed ones."""
    budgets = {"by time": own} | {str(n): PrefillBudget(fixed=n) for n in fixed}
    seconds: dict[str, list[float]] = {name: [] for name in budgets}
    for turn in range(rounds):
        for i, (name, budget) in enumerate(budgets.items()):
            prompt = prompt_of(tokens, turn * len(budgets) + i, engine.vocab)
            seconds[name].append(reading(engine, budget, prompt))
    table = Table(
        "rows a step", "tokens/s", "by time, times as fast", title=f"{tokens} tokens alone"
    )
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["by time"], strict=True))
        table.add_row(name, f"{tokens / statistics.median(found):.1f}", f"{ratio:.3f}")
    return table


def beside(engine: Engine, own: PrefillBudget, contexts: Sequence[int], rounds: int) -> Table:
    """How long an answer waits."""
    engine.scheduler.prefill_budget = own
    table = Table(
        "context", "longest", "median", "without a prompt", "steps", title="beside an answer, s"
    )
    for context in contexts:
        found = [waiting(engine, context, 1000 * context + 2 * n) for n in range(rounds)]
        longest = [max(steps) for steps, _ in found]
        each = [statistics.median(steps) for steps, _ in found]
        plain = statistics.median(seconds for _, seconds in found)
        row = (max(longest), statistics.median(each), plain)
        table.add_row(str(context), *(f"{x:.3f}" for x in row), str(len(found[0][0])))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="as for serve; default: built in")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt that is read alone")
    parser.add_argument("--fixed", type=int, nargs="*", default=FIXED, help="rows a step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 6000])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = Config(model=args.model, speculate=False, cache_gb=0.0)
    engine, _ = resolve_model(config).load()
    own = engine.scheduler.prefill_budget
    # The first long prompt shows what rows and attention cost.
    reading(engine, own, prompt_of(min(args.tokens, engine.scheduler.limit - 2), -1, engine.vocab))
    console = Console()
    console.print(alone(engine, own, args.fixed, args.tokens, args.rounds))
    console.print(beside(engine, own, args.contexts, args.rounds))


if __name__ == "__main__":
    main()
