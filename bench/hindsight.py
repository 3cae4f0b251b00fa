"""What the best draft lengths would have given: how many tokens of a head's draft are right after
each token of greedy answers, and how long the answers would take with the lengths that mlxspec
chooses, with fixed ones, and with those that hindsight chooses.

    python -m bench.hindsight [MODEL] --workload chat --tasks 20 --tokens 96

Rule: a step costs what was measured when the model was first started; nothing is timed here.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxspec import blas
from mlxspec.config import load_config

blas.load()

from bench.workloads import ALONE, tasks  # noqa: E402  after BLAS
from mlxspec.commands.bench import prompt_of  # noqa: E402
from mlxspec.load.resolve import resolve_model  # noqa: E402
from mlxspec.model.hub import cache_of  # noqa: E402
from mlxspec.progress import progress  # noqa: E402
from mlxspec.speculate.chain import DraftCosts  # noqa: E402
from mlxspec.speculate.controller import AcceptanceRates, Controller, Costs, Proposal  # noqa: E402
from mlxspec.speculate.heads.drafter import HeadDrafter  # noqa: E402
from mlxspec.speculate.ngram import CONTEXT, MAX_MATCH, Corpus, Lookup  # noqa: E402
from mlxspec.speculate.proposer import Proposer  # noqa: E402
from mlxspec.training.collect import answers_to, tokens_of  # noqa: E402
from mlxspec.types import MAX_DEPTH, Request, Sampling  # noqa: E402

TOGETHER = 8  # requests at once while drafts are collected
ALL = sys.maxsize  # tokens to index
Choice = tuple[int, Proposal | None]  # how many tokens to draft, and of what


@dataclass(slots=True)
class Answer:
    """A greedy answer. `right[i]`: how many tokens the head drafts rightly after its first i."""

    prompt: list[int]
    tokens: list[int]
    right: list[int]


@dataclass(slots=True)
class Round:
    """What is known before a round."""

    answer: Answer
    at: int  # tokens of the answer so far
    rates: AcceptanceRates
    options: Sequence[Proposal]

    @property
    def context(self) -> int:
        return len(self.answer.prompt) + self.at

    def right(self, proposal: Proposal) -> int:
        """How many of the proposal's tokens are right."""
        if not proposal.tokens:
            return self.answer.right[self.at]
        return right_ones(proposal.tokens, self.answer.tokens[self.at :])


def right_ones(drafted: Sequence[int], answer: Sequence[int]) -> int:
    """How many drafted tokens are right: those before the first that is wrong."""
    return sum(takewhile(bool, map(eq, drafted, answer)))


# ---- what rounds would take


@dataclass(slots=True)
class Replay:
    """Answers over again, by a `choose` of draft lengths."""

    costs: Costs
    drafting: DraftCosts
    name: str
    depth: int  # the longest draft of the head
    copies: bool = True

    def __call__(
        self, answers: Sequence[Answer], choose: Callable[["Replay", Controller, Round], Choice]
    ) -> tuple[list[float], float]:
        """Seconds of each answer, and tokens a round."""
        control = Proposer(replace(self.costs, factors={}), []).control
        corpus, took, rounds = Corpus(), [], 0
        for answer in answers:
            rates, lookup = control.begin(), Lookup()
            at, seconds = 1, 0.0  # the first token comes with the prompt
            while at < len(answer.tokens) - 1:
                known = answer.prompt + answer.tokens[:at]
                lookup.feed(known, ALL)
                corpus.index(ALL)
                options = self.options(known, len(answer.tokens) - at - 1, lookup, corpus)
                for option in options:
                    option.rates = rates.all_of(option.rate_keys)
                this = Round(answer, at, rates, options)
                depth, proposal = choose(self, control, this)
                accepted = min(depth, this.right(proposal)) if proposal else 0
                seconds += self.seconds(this, depth, proposal)
                keys = proposal.rate_keys[:depth] if proposal else ()
                control.learn(rates, keys, accepted)
                lookup.advance(accepted)
                at += accepted + 1
                rounds += 1
            corpus.add(answer.prompt[-CONTEXT:], answer.tokens)
            took.append(seconds)
        return took, sum(len(a.tokens) - 2 for a in answers) / rounds

    def options(
        self, known: list[int], room: int, lookup: Lookup, corpus: Corpus
    ) -> list[Proposal]:
        found: list[Proposal | None] = []
        if self.copies:
            most = min(MAX_DEPTH, room)
            found += [lookup.propose(most), corpus.propose(known[-MAX_MATCH:], most)]
        keys = [(self.name, "greedy", i + 1) for i in range(min(self.depth, room))]
        costs = self.drafting
        found.append(Proposal(self.name, seconds=costs.token, fixed=costs.fixed, rate_keys=keys))
        return [option for option in found if option and option.rate_keys]

    def seconds(self, this: Round, depth: int, proposal: Proposal | None) -> float:
        step = self.costs.step(1 + depth, this.context, "")
        if not (depth and proposal):
            return step
        passes = proposal.seconds * depth
        return step + proposal.fixed + passes


def plain(replay: Replay, control: Controller, this: Round) -> Choice:
    return 0, None


def chosen(replay: Replay, control: Controller, this: Round) -> Choice:
    """What the Controller decides."""
    return control.decide([this.rates], [this.options], this.context, "synced")[0]


def fixed(depth: int) -> Callable[[Replay, Controller, Round], Choice]:
    """A copy where the Controller would take one if there were no head, else so many tokens of the
    head."""

    def choose(replay: Replay, control: Controller, this: Round) -> Choice:
        *copies, head = this.options
        copying = control.decide([this.rates], [copies], this.context, "synced")[0]
        if copying[0]:
            return copying
        return min(depth, len(head.rate_keys)), head if depth else None

    return choose


def foreseen(replay: Replay, control: Controller, this: Round) -> Choice:
    """The most tokens per second of this round, knowing which drafts are right."""
    found: list[tuple[float, Choice]] = []
    for option in [None, *this.options]:
        right = this.right(option) if option else 0
        for depth in range(1, right + 1) if option else [0]:
            took = replay.seconds(this, depth, option)
            found.append(((1 + depth) / took, (depth, option)))
    return max(found, key=lambda each: each[0])[1]


# ---- what the head drafts


@dataclass
class Collector(Proposer):
    """Drafts as many tokens as the head can, and remembers how many were right, by the number of
    known tokens."""

    known: list[int] = field(default_factory=list)
    found: dict[int, int] = field(default_factory=dict)

    def observe(self, step: Any, accepted: Any, seconds: float) -> None:
        for e in step.plan:
            if e.draft.size:
                known = e.start + e.count
                right = right_ones([*e.draft.tokens], self.known[known:])
                # Another request's last rounds draft less there, and begin with the same tokens.
                self.found[known] = max(right, self.found.get(known, 0))
        super().observe(step, accepted, seconds)


def collect(
    model: Any, names: Sequence[tuple[str, list[int]]], most: int
) -> tuple[list[Answer], Replay]:
    """The answers, and what plays them again."""
    engine, _ = model.load()
    engine.work_idle()
    proposer = engine.proposer
    heads = [d for d in proposer.drafters if isinstance(d, HeadDrafter)]
    if not heads:
        sys.exit("this model has no head; name one with --head")
    head = heads[0]
    collector = Collector(proposer.costs, [head], head.head.depth)
    answers = []
    with progress("Drafting") as bar:
        for n, (name, prompt) in enumerate(names):
            bar(n, len(names))
            engine.proposer = proposer
            stops = frozenset(model.tokenizer.eos_token_ids)
            request = Request(name, tuple(prompt), most, Sampling(0.0), stops)
            [(_, answer)] = answers_to(engine, [request])
            tokens = tokens_of(answer)
            engine.proposer = collector
            collector.known, collector.found = [*prompt, *tokens], {}
            requests = [
                Request(
                    f"{name}, {i}",
                    (*prompt, *tokens[:i]),
                    head.head.depth + 2,
                    Sampling(0.0),
                )
                for i in range(len(tokens) - 1)
            ]
            for first in range(0, len(requests), TOGETHER):
                list(answers_to(engine, requests[first : first + TOGETHER]))
            right = [collector.found.get(len(prompt) + i, 0) for i in range(len(tokens))]
            answers.append(Answer(prompt, tokens, right))
    return answers, Replay(proposer.costs, head.costs, head.name, head.head.depth)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hindsight", description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--head", help="a directory; default: what serve would use")
    parser.add_argument("--workload", choices=ALONE, default="chat")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    config = load_config({"model": args.model, "draft": args.head})
    model = resolve_model(replace(config, max_sequences=TOGETHER))
    asked = tasks(args.workload, cache_of(config))[: args.tasks]
    prompts = [(task.name, [*prompt_of(task, model.tokenizer)]) for task in asked]
    answers, replay = collect(model, prompts, args.tokens)
    right = [n for answer in answers for n in answer.right[:-1]]
    shares = [
        f"{sum(n > i for n in right) / max(1, sum(n >= i for n in right)):.2f}" for i in range(4)
    ]
    print(f"{args.workload}: a drafted token of {replay.name} is right, if those before it are, in")
    print(f"{', '.join(shares)} of the cases, by its position")
    print_table(answers, replay)


def print_table(answers: Sequence[Answer], replay: Replay) -> None:
    base = sum(replay(answers, plain)[0])
    table = Table("draft lengths", "of plain decoding", "tokens a round")
    alone = replace(replay, copies=False)
    for title, side in (("copies and head", replay), ("head alone", alone)):
        ways = {"as mlxspec chooses": chosen, "of each round, foreseen": foreseen}
        ways |= {f"always {depth}": fixed(depth) for depth in range(5)}
        best = [float("inf") for _ in answers]
        for way, choose in ways.items():
            took, tokens = side(answers, choose)
            table.add_row(f"{title}, {way}", f"{base / sum(took):.3f}", f"{tokens:.2f}")
            if way.startswith("always"):
                best = [min(pair) for pair in zip(best, took, strict=True)]
        table.add_row(f"{title}, the best fixed one of each answer", f"{base / sum(best):.3f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
