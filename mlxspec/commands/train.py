"""`mlxspec train`: makes a head for a model, on this machine and from what stays on it.

Rule: a running server comes first: while it has a request, no step is made here.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlxspec import blas, log
from mlxspec.config import Config
from mlxspec.files import format_size, lock, read_json
from mlxspec.progress import progress
from mlxspec.service.status import get_status
from mlxspec.types import Json, OutOfMemory, Request, Sampling, UserError, line_of

blas.load()

from mlxspec.commands.bench import Task, prompt_of, run_group  # noqa: E402  after BLAS
from mlxspec.engine import memory  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.models import release_memory  # noqa: E402
from mlxspec.model.hub import cache_of, storage_name  # noqa: E402
from mlxspec.model.layout import load, load_weights, weights  # noqa: E402
from mlxspec.resolve import ResolvedModel, resolve_model  # noqa: E402
from mlxspec.text.chat import Tokenizer, encode  # noqa: E402
from mlxspec.training.collect import PARALLEL, Prompt, collect  # noqa: E402
from mlxspec.training.recorder import recorded  # noqa: E402
from mlxspec.training.run import (  # noqa: E402
    MADE,
    Training,
    drop_others,
    install,
    known_head,
    load_taught,
    new_head,
    save_head,
)
from mlxspec.training.samples import (  # noqa: E402
    Sample,
    SampleFile,
    file_prompts,
    general_prompts,
    held_out,
    key_of,
    pieces,
)
from mlxspec.training.target import Target  # noqa: E402
from mlxspec.training.trainer import LENGTH, ROWS, Trainer, vocabulary_of, windows  # noqa: E402

CONTEXT = 4 * LENGTH  # of a prompt and its answer
WARM = 0.7  # temperature of every second answer
ROWS_PER_TOKEN = 1.5  # with prompts and padding; of answers to our prompts it is 1.4
KNOWN_RATE = 0.3  # of the learning rate, for a head that knows something: NOTES.md
VOCABULARY = 16_384  # of a new head
ASK_S = 1.0  # between two questions to the server
MEASURED = 32  # held-out windows
TRIED = 8  # tokens of each answer that is timed
COMPARED, COMPARED_TOKENS = 8, 96  # held-out prompts at the end, most tokens of each answer


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `data`: a directory of texts; `tokens`: of all that is learned from;
    `vocabulary`: how many tokens the head can draft; None: as many as the one that is there."""

    data: str | None
    tokens: int
    epochs: int
    vocabulary: int | None


@dataclass(slots=True)
class Server:
    """The server that is not to be disturbed. Raises UserError where it does not answer."""

    url: str
    api_key: str
    asked: float = 0.0

    def wait(self) -> None:
        """Return once it has no request."""
        while time.monotonic() - self.asked > ASK_S:
            now = get_status(self.url, self.api_key)
            self.asked = time.monotonic()
            if now.state == "unwell":  # a wrong key, for example: it cannot say what it does
                raise UserError(f"the server at {self.url} cannot be asked: {now.why}")
            if now.running + now.waiting or now.state == "loading":
                time.sleep(2 * ASK_S)


def train(config: Config, options: Options, server: Server) -> int:
    """Make a head and put it in its place. Returns the exit status. Raises UserError, OSError."""
    settings = replace(config, context=CONTEXT, max_sequences=PARALLEL, cache_gb=0.0, others=())
    model = resolve_model(settings)
    model = replace(model, config=replace(model.config, speculate="off"))
    cache, name = cache_of(config), storage_name(model.name, model.path)
    made = cache / "heads" / f"{name}.{time.time_ns()}"
    with lock(cache / "training" / f"{name}.lock", wait=False) as alone:
        if not alone:
            raise UserError(f"another training of {model.name} runs; wait until it ends")
        try:
            compared = _train(model, options, cache / "training" / name, made, server)
            before = _tokens_per_round(config, compared, server.wait)
            after = _tokens_per_round(replace(config, draft=str(made)), compared, server.wait)
            print(
                f"held-out prompts: {before:.2f} tokens a round before, {after:.2f} with the head"
            )
            if after > before:
                install(made, made.with_name(name))
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            return 130
        except RuntimeError as error:  # MLX's, without memory for example
            log.debug("the training failed", exc_info=True)
            raise UserError(f"{line_of(error)}; the same command goes on from here") from error
        finally:
            drop_others(made.with_name(name))
    if after <= before:
        print("the head is not used: it is no better than what drafts now")
        return 1
    if config.draft or config.speculate == "off":
        print(f"your settings do not use it; give --draft {made.with_name(name)}")
    else:
        print(f"serve uses it when it loads {model.name} again; --draft off leaves it")
    return 0


def _train(
    model: ResolvedModel,
    options: Options,
    work: Path,
    made: Path,
    server: Server,
) -> list[Sample]:
    """Train a head into the directory `made`; what was done is kept in `work`. Returns held-out
    answers."""
    texts = pieces(Path(options.data)) if options.data else []
    learned, measured = _own_samples(model, options, texts)
    trainer, _, before = _new_trainer(model, options, learned, 1)
    before.pop("begins_as", None)  # one step back is enough
    size = len(trainer.target.drafted)
    print(f"{'going on with the head that is there' if before else 'a new head'}, of {size} tokens")
    server.wait()
    seconds = _seconds_per_row(trainer) * ROWS_PER_TOKEN * options.tokens * options.epochs
    del trainer
    wanted = options.tokens - sum(map(len, learned))
    prompts = _prompts(model.tokenizer, texts)
    file = SampleFile(work / "answers.jsonl", model.info.vocab)
    answers = _answers(model, prompts, wanted, file, server, seconds)
    for prompt in prompts:
        if prompt.key in answers:
            (measured if prompt.held_out else learned).append(answers[prompt.key])
    if not learned or not measured:
        raise UserError(f"--tokens {options.tokens} is too few to learn from; give 100000")
    about = {"model": model.name, **asdict(options), "vocabulary": size, "begins_as": before}
    training = Training(
        windows(learned),
        windows(measured)[:MEASURED],
        options.epochs,
        json.dumps(about),
        work / "state.safetensors",
    )
    trainer, config, _ = _new_trainer(model, options, learned, len(training.plan))
    print(f"training on {sum(map(len, learned))} tokens in {len(training.plan)} steps")
    kept = training.run(trainer, server.wait)
    save_head(trainer, config, made, about | {"kept": kept})
    return measured[:COMPARED]


def _own_samples(
    model: ResolvedModel, options: Options, texts: Sequence[tuple[str, str]]
) -> tuple[list[Sample], list[Sample]]:
    """Answers that were recorded, the newest first, and the user's texts, up to half of what is to
    be learned; and the recorded answers that are held out."""
    learned: list[Sample] = []
    measured: list[Sample] = []
    left = options.tokens // 2
    folder = cache_of(model.config) / "answers"
    for sample in reversed(recorded(folder, model.path, model.info.vocab)):
        if left > 0:
            (measured if held_out(str(sample.tokens)) else learned).append(sample)
            left -= len(sample)
    for name, text in texts:
        if left > 0 and not held_out(name):
            learned.append(Sample(encode(model.tokenizer, text), 1))
            left -= len(learned[-1])
    return learned, measured


def _prompts(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[Prompt]:
    """What the model is to answer: questions about the user's texts and general prompts in turn."""
    prompts = [_prompt(tokenizer, *each) for each in general_prompts()]
    about = [_prompt(tokenizer, *each) for each in file_prompts(texts)]
    turns = zip(about, prompts, strict=False)
    prompts = [prompt for pair in turns for prompt in pair] + prompts[len(about) :]
    return [p for p in prompts if len(p.tokens) < CONTEXT // 2]


def _prompt(tokenizer: Tokenizer, subject: str, text: str) -> Prompt:
    key = key_of(text)
    ids = prompt_of(Task(key, text), tokenizer)
    temperature = 0.0 if int(key, 16) % 2 else WARM
    return Prompt(key, ids, temperature, held_out(subject))


def _new_trainer(
    model: ResolvedModel, options: Options, learned: Sequence[Sample], steps: int
) -> tuple[Trainer, Json, Json]:
    """The trainer of the head that was trained before, or of a new one; the head's config.json; and
    the training.json of an earlier head, else {}. Says what memory training takes before the
    model's weights are read. Raises OutOfMemory, and UnsupportedModel where no head can read the
    model."""
    release_memory()  # of an engine before it
    module, config = load(model.path)
    target = Target(module, model.name, config)
    files = model.draft and known_head(target, model.draft.path, options.vocabulary)
    rate = KNOWN_RATE if files else 1.0
    size = options.vocabulary or VOCABULARY
    files = files or new_head(target, vocabulary_of(learned, size, target.vocab))
    trainer = Trainer(load_taught(target, files), target, steps, rate)
    need, free = weights(module) + trainer.needed_bytes(), memory.available()
    print(f"memory: {format_size(need)} of {format_size(free)} that are available")
    if need > free:
        raise OutOfMemory(
            f"training needs {format_size(need)} and {format_size(free)} are available;"
            " close other programs, or unload the server's models with mlxspec stop",
            need=need,
        )
    load_weights(module)
    return trainer, files.config, read_json(files.path / MADE)


def _seconds_per_row(trainer: Trainer) -> float:
    """Of training, by two steps that are made."""
    sample = Sample([n % trainer.target.vocab for n in range(LENGTH)], 1)
    with progress("Measuring a step") as report:
        for done in range(2):  # the first compiles
            report(done, 2)
            began = time.perf_counter()
            trainer.step([sample for _ in range(ROWS // LENGTH)])
    return (time.perf_counter() - began) / ROWS


def _answers(
    model: ResolvedModel,
    prompts: list[Prompt],
    wanted: int,
    file: SampleFile,
    server: Server,
    training: float,
) -> dict[str, Sample]:
    """Let the model answer the prompts, as far as that was not done before; says how long that and
    `training`, in seconds, will take."""
    release_memory()  # the trainer that was timed
    engine, _ = model.load()
    left = max(0, wanted - sum(map(len, file.read().values())))
    server.wait()
    seconds = left * _seconds_per_token(engine), training
    minutes = [f"{each / 60:.0f} min" for each in seconds]
    print(f"time: about {minutes[0]} to answer prompts and {minutes[1]} to train; Ctrl-C stops")
    with progress("Answering prompts") as report:
        stops = frozenset(model.tokenizer.eos_token_ids)
        return collect(engine, prompts, stops, file, wanted, report, server.wait)


def _seconds_per_token(engine: Engine) -> float:
    """Of PARALLEL answers at a time."""
    requests = [Request(f"try-{n}", (n + 1, n + 2), TRIED) for n in range(PARALLEL)]
    began = time.perf_counter()
    run_group(engine, engine.proposer, requests)
    return (time.perf_counter() - began) / (PARALLEL * TRIED)


def _tokens_per_round(config: Config, samples: Sequence[Sample], wait: Callable[[], None]) -> float:
    """Of greedy answers to the prompts of samples, with what drafts by these settings."""
    release_memory()
    config = replace(config, speculate="on", cache_gb=0.0, context=CONTEXT, others=())
    model = resolve_model(config)
    wait()  # what drafting costs is measured at the load
    engine, _ = model.load()
    stops = frozenset(model.tokenizer.eos_token_ids)
    tokens = rounds = 0
    with progress("Comparing") as report:
        for done, sample in enumerate(samples):
            report(done, len(samples))
            wait()
            prompt = tuple(sample.tokens[: sample.first][-CONTEXT // 2 :])
            request = Request("held-out", prompt, COMPARED_TOKENS, Sampling(0.0), stops)
            answer = run_group(engine, engine.proposer, [request])[request.id]
            tokens += sum(len(output.tokens) for _, output in answer)
            rounds += answer[-1][1].rounds
    return tokens / rounds
