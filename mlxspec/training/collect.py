"""Lets the model answer prompts, many at a time, through the engine that serves.

Rule: answers are handed out in the order of their prompts, and kept when they end, so a run that
was stopped goes on with the next one.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from mlxspec.engine.engine import Engine
from mlxspec.training.samples import Sample, SampleFile
from mlxspec.types import Output, Request


def collect(
    engine: Engine,
    prompts: Sequence[tuple[str, Request]],
    file: SampleFile,
    wait: Callable[[], None],
) -> Iterator[tuple[str, Sample]]:
    """The answer to each prompt, with the subject before it; those in `file` are not asked for
    again. Raises OSError."""
    known = file.read()
    missing = {prompt.id: prompt for _, prompt in prompts if prompt.id not in known}
    answers = answers_to(engine, missing.values(), wait)
    for subject, prompt in prompts:
        while prompt.id not in known:
            request, new, _ = next(answers)
            known[request.id] = Sample([*request.prompt, *new], len(request.prompt))
            file.append(request.id, known[request.id])
        yield subject, known[prompt.id]


def answers_to(
    engine: Engine,
    requests: Collection[Request],
    wait: Callable[[], None],
) -> Iterator[tuple[Request, list[int], Output]]:
    """Each request when it ends, with the tokens of its answer and its last output. `wait` is
    called before each step."""
    running: dict[str, tuple[Request, list[int]]] = {}
    for request in requests:
        running[request.id] = request, []
        engine.add(request)
    while engine.busy:
        wait()
        for output in engine.step():
            request, tokens = running[output.request]
            tokens += output.tokens
            if output.finish == "error":
                raise RuntimeError(f"an answer failed: {output.error}")
            if output.finish:
                yield request, tokens, output
