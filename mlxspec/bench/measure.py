"""Runs groups of prompts on an engine, with its drafter and without, in turn.

Rule: each side starts with an empty prefix cache and a drafter that has seen no answer: a repeated
prompt is as new as the first time. What the controller has learned of chances and costs stays, as
in a server.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxspec.bench.figures import Answer, Cell, Side, Trial
from mlxspec.bench.workloads import Task
from mlxspec.engine.engine import Engine
from mlxspec.speculate import NoSpeculation, Speculator
from mlxspec.text.chat import Tokenizer, encode, render_chat
from mlxspec.types import Request, Sampling, UserError

T = TypeVar("T")

WARM_UP = 16  # tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task in token ids; `name` tells it from the others of its workload."""

    name: str
    tokens: tuple[int, ...]


def prompt_of(task: Task, tokenizer: Tokenizer) -> Prompt:
    """By the model's chat template; a base model, which has none, is given the plain text."""
    if not tokenizer.has_chat_template:
        return Prompt(task.name, tuple(encode(tokenizer, f"{task.text}\n\n{task.opening}")))
    ids = render_chat(tokenizer, [{"role": "user", "content": task.text}])
    return Prompt(task.name, (*ids, *encode(tokenizer, task.opening, special=False)))


def groups(found: Sequence[T], wanted: int, streams: int) -> list[Sequence[T]]:
    """Groups of `streams`: as many as hold the `wanted` ones, or else all that can be filled."""
    full = min(-(-wanted // streams), len(found) // streams)
    if not full:
        raise UserError(
            f"--streams = {streams}: the workload has {len(found)} prompts; give no more streams"
        )
    return [found[at * streams : (at + 1) * streams] for at in range(full)]


@dataclass(slots=True)
class Bench:
    """An idle engine, its own drafter beside it, and how answers end. `context` is in tokens."""

    engine: Engine
    context: int
    max_tokens: int
    stop: frozenset[int]
    drafter: Speculator
    plain: Speculator
    sampling: Sampling

    def cell(
        self,
        workload: str,
        chosen: Sequence[Sequence[Prompt]],
        rounds: int,
        told: Callable[[], object] = lambda: None,
    ) -> Cell:
        """Run every group on both sides, `rounds` times over. `told` is called after each side."""
        cell = Cell(workload, len(chosen[0]))
        for drafter in (self.plain, self.drafter):
            self.side(chosen[0], drafter, min(WARM_UP, self.max_tokens))
        for again in range(rounds):
            for i, group in enumerate(chosen):
                order = (
                    (self.plain, self.drafter)
                    if (i + again) % 2 == 0
                    else (self.drafter, self.plain)
                )
                sides = []
                for drafter in order:
                    sides.append(self.side(group, drafter, self.max_tokens))
                    told()
                plain, drafted = sides if order[0] is self.plain else sides[::-1]
                cell.trials.append(Trial(plain, drafted))
        return cell

    def side(self, group: Sequence[Prompt], drafter: Speculator, most: int) -> Side:
        """Run the group's prompts together, up to `most` tokens each."""
        engine = self.engine
        engine.proposer = drafter
        engine.reset()
        requests = [self.request(prompt, most) for prompt in group]
        answers = {prompt.name: Answer(prompt.name) for prompt in group}
        began = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.busy:
            outputs = engine.step()
            now = time.perf_counter() - began
            for o in outputs:
                if o.finish in ("abort", "error"):
                    raise RuntimeError(f"{o.request} ended by {o.finish}: {o.error}")
                answers[o.request].add(o, now)
        return Side(list(answers.values()), time.perf_counter() - began)

    def request(self, prompt: Prompt, most: int) -> Request:
        """Up to `most` tokens. Raises UserError where there is no room for one."""
        room = self.context - len(prompt.tokens)
        if room < 1:
            raise UserError(
                f"prompt {prompt.name} has {len(prompt.tokens)} tokens, and the model's context"
                f" {self.context}; name another workload or a model with a longer context"
            )
        return Request(prompt.name, prompt.tokens, min(most, room), self.sampling, self.stop)


def bench_of(
    engine: Engine, context: int, max_tokens: int, stop: frozenset[int], sampling: Sampling
) -> Bench:
    """The engine as it was started, against itself with no drafter."""
    return Bench(engine, context, max_tokens, stop, engine.proposer, NoSpeculation(), sampling)
