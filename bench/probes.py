"""Whether a server's greedy answers are those of the model: every one is compared with plain
decoding.

Rule: cells of prefix x batch x length, each with its own prompts, on a model whose answers a wrong
cache changes (`tiny`). The whole is done with the server's drafting off and, where it can draft,
on.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench import tiny
from bench.http import Answer, Early, Silent, ask, plain
from bench.servers import Running

PREFIXES = ("none", "hit", "partial", "grown")
BATCHES = ("alone", "six", "joining")
LENGTHS = {"multiple": (48, 96, 128), "other": (45, 99, 131)}  # of 16, 32 and 64 tokens
TOKENS = 24
NEIGHBOURS = 2  # at temperature 2, which a joining request finds in the batch
LIMIT = 120  # seconds for a cell


@dataclass(frozen=True, slots=True)
class Probe:
    """`before` is asked first, by itself, if there is any; then `prompt`, whose answer must be
    `answer`."""

    before: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Cell:
    prefix: str
    batch: str
    length: str
    probes: tuple[Probe, ...]

    @property
    def name(self) -> str:
        return f"{self.prefix}/{self.batch}/{self.length}"


class Truth:
    """Plain decoding, and prompts whose answer has no near tie."""

    def __init__(self) -> None:
        self.model = tiny.model()
        self.rng = random.Random(11)

    def probe(self, prefix: str, length: int) -> Probe:
        while True:
            before, prompt = self._texts(prefix, length)
            answer, margin = tiny.decode(self.model, prompt, TOKENS)
            if margin > tiny.MARGIN:
                return Probe(before, prompt, answer)

    def _texts(self, prefix: str, length: int) -> tuple[str, str]:
        prompt = tiny.prompt(length, self.rng)
        if prefix == "hit":
            return prompt, prompt
        if prefix == "partial":  # the same up to a place inside of a block
            return prompt[: length * 2 // 3] + tiny.prompt(length // 3, self.rng), prompt
        if prefix == "grown":  # the conversation went on: question, answer, question
            begun = prompt[: length // 2]
            said, _ = tiny.decode(self.model, begun, TOKENS)
            return begun, (begun + said + prompt)[:length]
        return "", prompt


def cells(truth: Truth, each: int) -> Iterator[Cell]:
    """All cells, with `each` probes of every length."""
    for prefix, batch, (name, lengths) in itertools.product(PREFIXES, BATCHES, LENGTHS.items()):
        probes = [truth.probe(prefix, length) for _ in range(each) for length in lengths]
        yield Cell(prefix, batch, name, tuple(probes))


async def matches(server: Running, cell: Cell) -> int:
    """How many of the cell's probes are answered right. Raises Refused and TimeoutError;
    Early where it could not be asked."""
    async with asyncio.timeout(LIMIT):
        for probe in cell.probes:
            if probe.before:
                await ask(server.url, _body(probe.before))
        if cell.batch == "alone":
            return sum([await _right(server, probe) for probe in cell.probes])
        beside = [Answer() for _ in range(NEIGHBOURS if cell.batch == "joining" else 0)]
        running = [asyncio.create_task(ask(server.url, _hot(i), a)) for i, a in enumerate(beside)]
        try:
            for task, answer in zip(running, beside, strict=True):
                await _begun(task, answer)
            return sum(await asyncio.gather(*(_right(server, probe) for probe in cell.probes)))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _right(server: Running, probe: Probe) -> bool:
    return (await ask(server.url, _body(probe.prompt))).text == probe.answer


async def _begun(task: "asyncio.Task[Answer]", answer: Answer) -> None:
    waiting = asyncio.create_task(answer.started.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        with suppress(Silent):
            task.result()
        raise Early("the neighbour's answer ended before anyone could join it")


def _body(prompt: str) -> dict[str, Any]:
    return plain(prompt, TOKENS)


def _hot(seed: int) -> dict[str, Any]:
    return plain(tiny.prompt(40, random.Random(seed)), 600) | {"temperature": 2.0, "top_p": 1.0}
