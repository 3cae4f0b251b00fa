"""Whether a server's greedy answers are those of the model: every one is compared with plain
decoding.

Rule: cells of prefix x batch x length, each with its own prompts, on a model whose answers a wrong
cache changes (`tiny`). The whole is done with the server's drafting off and, where it can draft,
with a small model or copies, and with a head on a trained pair.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_model

from bench import tiny
from bench.http import Answer, Early, Silent, ask, plain
from bench.servers import Running
from mlxspec.text.chat import encode, load_tokenizer
from tests.heads.language import Language

PREFIXES = ("none", "hit", "partial", "grown")
BATCHES = ("alone", "six", "joining")
LENGTHS = {"multiple": (48, 96, 128), "other": (45, 99, 131)}  # of 16, 32 and 64 tokens
TOKENS = 24
VARIANTS = ("no draft", "draft", "head")
PAIR = "mtp"  # the kind of head, one that a peer loads too
NOISE = 0.1  # of the small model that drafts: often right
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
    """Plain decoding of a model in a folder, and prompts whose answer has no near tie. `text` makes
    one of at least so many tokens."""

    def __init__(self, folder: Path, text: Callable[[random.Random, int], str]) -> None:
        self.folder, self.text = folder, text
        self.model, self.tokenizer = load_model(folder)[0], load_tokenizer(folder)
        self.rng = random.Random(11)

    def probe(self, prefix: str, length: int) -> Probe:
        while True:
            before, prompt = self._prompts(prefix, length)
            answer, margin = tiny.decode(self.model, prompt, TOKENS)
            texts = [self.tokenizer.decode(ids) for ids in (before, prompt, answer)]
            kept = [self._ids(text) for text in texts[:2]] == [before, prompt]
            if kept and margin > tiny.MARGIN and not self.tokenizer.eos_token_ids & {*answer}:
                return Probe(*texts)

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, special=False)

    def _new(self, length: int) -> list[int]:
        return self._ids(self.text(self.rng, length))[:length]

    def _prompts(self, prefix: str, length: int) -> tuple[list[int], list[int]]:
        prompt = self._new(length)
        if prefix == "hit":
            return prompt, prompt
        if prefix == "partial":  # the same up to a place inside of a block
            return prompt[: length * 2 // 3] + self._new(length // 3), prompt
        if prefix == "grown":  # the conversation went on: question, answer, question
            begun = prompt[: length // 2]
            said, _ = tiny.decode(self.model, begun, TOKENS)
            return begun, (begun + said + prompt)[:length]
        return [], prompt


@dataclass(frozen=True, slots=True)
class Probed:
    """Folders of a model and of what drafts for it, and what is asked of them."""

    model: Path
    draft: Path
    cells: tuple[Cell, ...]


def probed(folder: Path, each: int) -> dict[str, Probed]:
    """By variant; the random models are written below `folder`."""
    model = tiny.model()
    drawn = Truth(tiny.save(folder / "tiny", model), tiny.prompt)
    small = tiny.save(folder / "draft", model, NOISE)
    random_one = Probed(drawn.folder, small, tuple(cells(drawn, each)))
    target, head = tiny.pair(PAIR)
    trained = Probed(target, head, tuple(cells(Truth(target, Language(0).text), each)))
    return dict(zip(VARIANTS, (random_one, random_one, trained), strict=True))


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
                await ask(server, _body(probe.before))
        if cell.batch == "alone":
            return sum([await _right(server, probe) for probe in cell.probes])
        beside = [Answer() for _ in range(NEIGHBOURS if cell.batch == "joining" else 0)]
        running = [asyncio.create_task(ask(server, _hot(i), a)) for i, a in enumerate(beside)]
        try:
            for task, answer in zip(running, beside, strict=True):
                await _begun(task, answer)
            return sum(await asyncio.gather(*(_right(server, probe) for probe in cell.probes)))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _right(server: Running, probe: Probe) -> bool:
    said = (await ask(server, _body(probe.prompt))).text
    return said.lstrip() == probe.answer.lstrip()  # some leave out a space at the beginning


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
    return plain(tiny.prompt(random.Random(seed), 40), 600) | {"temperature": 2.0, "top_p": 1.0}
