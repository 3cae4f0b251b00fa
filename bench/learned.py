"""What a head adds to copies: plain decoding, copies, and copies with the head, in turn on one
engine, with tokens a round, speed, and whether every answer is the same.

    python -m bench.learned [MODEL] --head DIR --workloads humaneval chat --tasks 8 --tokens 96
"""

import argparse
from collections import defaultdict
from dataclasses import replace

from mlxspec import blas
from mlxspec.config import load_config

blas.load()

from bench.workloads import ALONE, tasks  # noqa: E402  after BLAS
from mlxspec.commands.bench import prompt_of, run_group, seconds, tokens_of  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.model.hub import cache_of  # noqa: E402
from mlxspec.speculate import NoSpeculation, Speculator  # noqa: E402
from mlxspec.speculate.ngram import NgramDrafter  # noqa: E402
from mlxspec.speculate.proposer import Proposer  # noqa: E402
from mlxspec.types import Request, Sampling  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--head", help="a directory; default: what serve would use")
    parser.add_argument("--workloads", nargs="+", choices=ALONE, default=["humaneval", "chat"])
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=1)
    args = parser.parse_args()
    config = load_config({"model": args.model, "draft": args.head})
    model = resolve_model(replace(config, max_sequences=args.streams, cache_gb=0.0))
    engine, _ = model.load()
    with_head = engine.proposer
    assert isinstance(with_head, Proposer)
    copies = Proposer(
        with_head.costs, [d for d in with_head.drafters if isinstance(d, NgramDrafter)]
    )
    sides: dict[str, Speculator] = {"plain": NoSpeculation(), "copies": copies, "head": with_head}
    print("drafters:", ", ".join(drafter.name for drafter in with_head.drafters))
    for workload in args.workloads:
        requests = [
            Request(
                task.name,
                prompt_of(task, model.tokenizer),
                args.tokens,
                Sampling(args.temperature, seed=n),
                frozenset(model.tokenizer.eos_token_ids),
            )
            for n, task in enumerate(tasks(workload, cache_of(config))[: args.tasks])
        ]
        for side in sides.values():  # the first passes of a shape take longer
            run_group(engine, side, requests[: args.streams])
        took: dict[str, list[float]] = defaultdict(list)
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        same = True
        order = list(sides)
        for at in range(0, len(requests), args.streams):
            group = requests[at : at + args.streams]
            answers = {}
            for name in order:
                answers[name] = run_group(engine, sides[name], group)
                found = answers[name].values()
                took[name].append(max(seconds(answer) for answer in found))
                counts[name][0] += sum(len(tokens_of(answer)) for answer in found)
                counts[name][1] += sum(answer[-1][1].rounds for answer in found)
            order.reverse()
            for request in group:
                texts = {tuple(tokens_of(found[request.id])) for found in answers.values()}
                same = same and len(texts) == 1
        print(f"{workload}, {len(requests)} prompts, T = {args.temperature:g}:", end=" ")
        for name in sides:
            ratio = sum(took["plain"]) / sum(took[name])
            tokens, rounds = counts[name]
            print(f"{name} {tokens / rounds:.2f} tokens a round, {ratio:.2f} times plain;", end=" ")
        print("every answer the same" if same else "ANSWERS DIFFER", flush=True)


if __name__ == "__main__":
    main()
