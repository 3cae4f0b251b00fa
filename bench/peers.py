"""Speculating servers side by side: mlxspec, mlx_lm.server with a draft model, others by a command of yours.

Rule: every server has the same BLAS loaded first, the same prompts in the same order, and the same turns; the
order of the servers alternates. `python -m bench.peers MODEL [--draft MODEL]`.
"""

import argparse
import asyncio
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from mlxspec import blas

blas.load()

import httpx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import servers  # noqa: E402
from mlxspec.bench.workloads import Task, tasks  # noqa: E402
from mlxspec.model.catalog import default_cache_dir  # noqa: E402


@dataclass
class Run:
    """What one server did. Seconds are whole requests, prompt included."""

    tokens: int = 0
    seconds: float = 0.0
    texts: list[str] = field(default_factory=list)


def commands(model: Path, draft: Path | None, others: list[str]) -> dict[str, list[str]]:
    """By name: ours with and without speculation, mlx-lm's with the draft model and without, and `others`,
    each NAME=COMMAND with {port} in it."""
    ours, peer = servers.ours(model), servers.mlx_lm(model)
    found = {
        "mlxspec, no speculation": [*ours, "--speculate", "off"],
        "mlxspec": [*ours, *(("--draft", str(draft)) if draft else ())],
        "mlx_lm.server": peer,
    }
    if draft:
        found["mlx_lm.server --draft-model"] = [*peer, "--draft-model", str(draft), "--num-draft-tokens", "4"]
    for other in others:
        name, _, command = other.partition("=")
        found[name] = shlex.split(command)
    return found


async def ask(url: str, task: Task, tokens: int, run: Run) -> None:
    body = {
        "messages": [{"role": "user", "content": task.text}],
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 1,
    }
    began = time.perf_counter()
    async with httpx.AsyncClient(timeout=1800) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise SystemExit(f"{url}: {answer.status_code} {answer.text[:300]}")
    found = answer.json()
    run.seconds += time.perf_counter() - began
    run.tokens += found["usage"]["completion_tokens"]
    run.texts.append(found["choices"][0]["message"]["content"])


def turns(names: list[str], some: list[Task]) -> Iterator[tuple[str, Task]]:
    for i, task in enumerate(some):
        for name in names if i % 2 == 0 else names[::-1]:
            yield name, task


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--workload", default="edits")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--other", action="append", default=[], help="NAME=COMMAND, with {port}")
    parser.add_argument("--only", action="append", help="a NAME of these; all run at once, so memory counts")
    args = parser.parse_args()
    some = tasks(args.workload, default_cache_dir())[: args.prompts]
    console = Console()
    with ExitStack() as running:
        urls = {
            name: running.enter_context(servers.started(name, command))
            for name, command in commands(args.model, args.draft, args.other).items()
            if not args.only or name in args.only
        }
        runs = {name: Run() for name in urls}
        for url in urls.values():
            asyncio.run(ask(url, Task("warm", "Say hello."), 4, Run()))
        plan = list(turns(list(urls), some))
        for name, task in track(plan, "Measuring", console=Console(stderr=True)):
            asyncio.run(ask(urls[name], task, args.max_tokens, runs[name]))
    base, *_ = (run for name, run in runs.items() if not name.startswith("mlxspec"))
    table = Table(
        title=f"{args.model.name}, {args.workload}: {len(some)} prompts, greedy, to {args.max_tokens} tokens"
    )
    for column in ("", "tokens", "s", "tokens/s", "x the first peer", "answers as mlxspec's"):
        table.add_column(column)
    for name, run in runs.items():
        rate = run.tokens / run.seconds
        same = sum(a == b for a, b in zip(run.texts, runs["mlxspec"].texts, strict=True))
        ratio = rate / (base.tokens / base.seconds)
        table.add_row(name, str(run.tokens), f"{run.seconds:.1f}", f"{rate:.2f}", f"{ratio:.2f}", str(same))
    console.print(table)


if __name__ == "__main__":
    main()
