"""Lets the model answer prompts, many at a time, through the engine that serves.

Rule: prompts are answered in their order until the answers are long enough together. An answer is
kept when it ends, so a run that was stopped goes on with the next one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlxspec.engine.engine import Engine
from mlxspec.progress import Report
from mlxspec.training.samples import Sample, SampleFile
from mlxspec.types import Request, Sampling

PARALLEL = 32  # answers at a time
ANSWER = 256  # most tokens of an answer
MASK = 0xFFFFFFFF  # of a seed


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to answer; `key` names it in the file of answers."""

    key: str
    tokens: tuple[int, ...]
    temperature: float
    held_out: bool


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    stop_tokens: frozenset[int],
    file: SampleFile,
    wanted: int,
    report: Report,
    wait: Callable[[], None],
) -> dict[str, Sample]:
    """The first answers that have `wanted` tokens together, or all, by their prompts' keys. `wait`
    is called before each step. Raises OSError."""
    known = file.read()
    running: dict[str, tuple[Prompt, list[int]]] = {}
    while True:
        for prompt in _needed(prompts, known, wanted):
            if len(running) == PARALLEL:
                break
            if prompt.key in known or prompt.key in running:
                continue
            running[prompt.key] = prompt, []
            sampling = Sampling(prompt.temperature, seed=int(prompt.key, 16) & MASK)
            engine.add(Request(prompt.key, prompt.tokens, ANSWER, sampling, stop_tokens))
        if not running:
            return {p.key: known[p.key] for p in _needed(prompts, known, wanted)}
        report(min(sum(map(len, known.values())), wanted), wanted)
        wait()
        for output in engine.step():
            prompt, new = running[output.request]
            new += output.tokens
            if output.finish == "error":
                raise RuntimeError(f"an answer failed: {output.error}")
            if output.finish:
                del running[output.request]
                known[prompt.key] = Sample([*prompt.tokens, *new], len(prompt.tokens))
                file.append(prompt.key, known[prompt.key])


def _needed(
    prompts: Sequence[Prompt],
    known: Mapping[str, Sample],
    wanted: int,
) -> Iterator[Prompt]:
    """The first prompts, until those of them that are answered have `wanted` tokens together."""
    tokens = 0
    for prompt in prompts:
        if tokens >= wanted:
            return
        yield prompt
        tokens += len(known.get(prompt.key, ()))
