"""Has the model answer prompts, many at a time, through the engine that serves.

Rule: answers are yielded in the order of their prompts, and saved when they end, so a run that was
stopped continues with the next one.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from mlxspec.engine.engine import Engine
from mlxspec.training.samples import Sample, SampleFile
from mlxspec.types import Output, Request

# Outputs with tokens of one prompt, each after its time in seconds from the start.
Answer = list[tuple[float, Output]]


def tokens_of(answer: Answer) -> list[int]:
    return [token for _, output in answer for token in output.tokens]


def collect(
    engine: Engine,
    prompts: Sequence[tuple[str, Request]],
    file: SampleFile,
    wait: Callable[[], None],
) -> Iterator[tuple[str, Sample]]:
    """The answer to each prompt, with the subject before it; those in `file` are not
    generated again. Raises OSError."""
    samples = file.read()
    missing = {prompt.id: prompt for _, prompt in prompts if prompt.id not in samples}
    answers = answers_to(engine, missing.values(), wait)
    for subject, prompt in prompts:
        while prompt.id not in samples:
            request, answer = next(answers)
            tokens = [*request.prompt, *tokens_of(answer)]
            samples[request.id] = Sample(tokens, len(request.prompt))
            file.append(request.id, samples[request.id])
        yield subject, samples[prompt.id]


def answers_to(
    engine: Engine,
    requests: Collection[Request],
    wait: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Request, Answer]]:
    """Each request when it ends, with its answer. `wait` is called before each step. Raises
    InvalidRequest for a prompt that is too long."""
    running: dict[str, tuple[Request, Answer]] = {}
    began = time.perf_counter()
    for request in requests:
        running[request.id] = request, []
        engine.add(request)
    while engine.busy:
        wait()
        for output in engine.step():
            if output.finish == "error":
                raise RuntimeError(f"{output.request} failed: {output.error}")
            _, answer = running[output.request]
            answer.append((time.perf_counter() - began, output))
            if output.finish:
                yield running.pop(output.request)
