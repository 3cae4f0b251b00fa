"""Scores the copying drafters on recorded token streams; no model is loaded. `python -m bench.replay
FILE`.

Rule: the drafters and the controller are the server's own; only the target's samples come from the
recording.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from mlxspec import blas
from mlxspec.config import ConfigError

blas.load()

from mlxspec.speculate.controller import GRID, Costs  # noqa: E402  after BLAS
from mlxspec.speculate.ngram import NgramDrafter  # noqa: E402
from mlxspec.speculate.proposer import Proposer  # noqa: E402
from mlxspec.types import (  # noqa: E402
    Accepted,
    Entry,
    Request,
    Seq,
)

MOST = 1 << 28  # bytes of a recording


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer, in token ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class Score:
    """What the drafts of one or more recordings were worth."""

    tokens: int = 0
    rounds: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    cost: float = 0.0  # in plain steps


def read(file: Path) -> list[Recording]:
    """JSON lines, each {"prompt": [ids], "output": [ids]}. Raises ConfigError, naming the line."""
    try:
        if file.stat().st_size > MOST:
            raise ConfigError(f"recording {str(file)!r} is larger than {MOST >> 20} MB; split it")
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"recording {str(file)!r} cannot be read: {error}; name another file"
        ) from error
    found = []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            prompt, output = (tuple(given[key]) for key in ("prompt", "output"))
            if (
                not all(type(t) is int and t >= 0 for t in (*prompt, *output))
                or not prompt
                or not output
            ):
                raise ValueError("prompt and output must be lists of token ids, with one at least")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f'{file}:{n}: {error!s}; give {{"prompt": [ids], "output": [ids]}}'
            ) from error
        found.append(Recording(prompt, output))
    if not found:
        raise ConfigError(f"recording {str(file)!r} holds no recording")
    return found


def flat(row_cost: float) -> Costs:
    """A step in which each row beyond the first costs `row_cost` of a step with one."""
    line = [1 + row_cost * (r - 1) for r in GRID]
    return Costs((64, 65), GRID, (line, line))


def _step(entry: Entry) -> Any:
    return SimpleNamespace(plan=[entry], overlaps=False, taps={})


def score(chain: Proposer, recorded: Recording, total: Score) -> None:
    """Play one recording as the engine would, with nobody beside it."""
    seq = Seq(
        Request("replay", recorded.prompt, len(recorded.output)), tokens=list(recorded.prompt)
    )
    chain.begin(seq)
    first = Entry(seq, 0, len(recorded.prompt), True)
    seq.tokens.append(recorded.output[0])
    seq.computed = len(recorded.prompt)
    chain.observe(_step(first), [Accepted([recorded.output[0]])], 0.0)
    total.tokens += 1
    while seq.generated < len(recorded.output):
        depth = chain.depths([seq]).get(seq, 0)
        entry = Entry(seq, seq.computed, 1, True, depth=depth)
        chain.draft([entry], None)
        rest = recorded.output[seq.generated :]
        drafted = list(entry.draft.tokens)
        kept = next(
            (i for i, t in enumerate(drafted) if i + 1 >= len(rest) or t != rest[i]), len(drafted)
        )
        seconds = float(chain.costs.curve(1 + len(drafted), 64, "exact")[-1])
        new = list(rest[: kept + 1])
        seq.tokens += new
        seq.computed += len(new)
        chain.observe(_step(entry), [Accepted(new)], seconds)
        total.rounds += 1
        total.tokens += len(new)
        total.cost += seconds
        if drafted:
            total.drafted[entry.draft.source] += len(drafted)
            total.kept[entry.draft.source] += kept
    chain.end(seq)


def replay(file: Path, row_cost: float, console: Console) -> None:
    """Score a recording and print the table."""
    recorded = read(file)
    total, chain = Score(), Proposer(flat(row_cost), [NgramDrafter()])
    for one in track(
        recorded, "Replaying", console=Console(stderr=True), disable=not console.is_terminal
    ):
        score(chain, one, total)
    console.print(
        f"{len(recorded)} recordings, {total.tokens} tokens; a row costs {row_cost:.0%} of a step"
    )
    made = Table(
        "source", *(Column(name, justify="right") for name in ("drafted", "kept", "kept %"))
    )
    for source, drafted in sorted(total.drafted.items()):
        kept = total.kept[source]
        made.add_row(source, str(drafted), str(kept), f"{kept / drafted:.0%}")
    console.print(made)
    decoded = total.tokens - len(recorded)  # the first token of each comes with its prompt
    console.print(
        f"{decoded / max(1, total.rounds):.2f} tokens per round,"
        f" {decoded / max(total.cost, 1e-9):.2f} times as fast as plain decoding at this cost"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines with token ids: prompt, output")
    parser.add_argument("--row-cost", type=float, default=0.05, help="of a row, in plain steps")
    args = parser.parse_args()
    replay(args.file, args.row_cost, Console())


if __name__ == "__main__":
    main()
