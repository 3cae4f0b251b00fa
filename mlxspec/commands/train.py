"""`mlxspec train`: trains a draft head for a model, on this machine and from local data.

Rule: a running server has priority: while it has a request, training pauses.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlxspec import blas, log
from mlxspec.config import Config
from mlxspec.files import format_size, lock, read_json
from mlxspec.progress import progress
from mlxspec.service.status import get_status
from mlxspec.types import OutOfMemory, Request, Sampling, UserError, line_of

blas.load()

from mlxspec.commands.bench import Task, prompt_of  # noqa: E402  after BLAS
from mlxspec.engine import memory  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.manager import release_memory  # noqa: E402
from mlxspec.load.resolve import ResolvedModel, resolve_model, with_table  # noqa: E402
from mlxspec.model.checkpoint import load_model, load_weights, parameter_bytes  # noqa: E402
from mlxspec.model.hub import Resolved, cache_of, learned_head, storage_name  # noqa: E402
from mlxspec.speculate.heads.files import HeadFiles  # noqa: E402
from mlxspec.text.chat import Tokenizer, encode  # noqa: E402
from mlxspec.training.collect import answers_to, collect, tokens_of  # noqa: E402
from mlxspec.training.eagle import new_head  # noqa: E402
from mlxspec.training.recorder import recorded  # noqa: E402
from mlxspec.training.run import (  # noqa: E402
    RECORD,
    drop_others,
    install,
    run,
    save_head,
    trained_head,
)
from mlxspec.training.samples import (  # noqa: E402
    Sample,
    SampleFile,
    file_prompts,
    general_prompts,
    held_out,
    key_of,
    pieces,
    up_to,
)
from mlxspec.training.target import Target  # noqa: E402
from mlxspec.training.trainer import (  # noqa: E402
    LENGTH,
    ROWS,
    Trainer,
    batches,
    vocabulary_of,
    windows,
)

PARALLEL = 32  # answers at a time
ANSWER = 256  # maximum tokens of an answer
CONTEXT = 4 * LENGTH  # of a prompt and its answer
ROWS_PER_TOKEN = 1.5  # with prompts and padding; it is 1.4 for answers to our prompts
TRIED = 8  # tokens of each answer that is timed
WARM = 0.7  # temperature of every second answer
KNOWN_RATE = 0.3  # of the learning rate, for a head that is already trained: NOTES.md
VOCABULARY = 16_384  # of a new head
ASK_S = 1.0  # between two status queries to the server
PATIENCE = 60  # queries: the server may restart, or be stuck for a while
MEASURED = 32  # held-out windows
COMPARED, COMPARED_TOKENS = 8, 96  # held-out prompts at the end, maximum tokens of each answer


@dataclass(frozen=True)
class Options:
    """Options of the command. `data`: a directory of texts; `tokens`: size of the training data;
    `vocabulary`: number of tokens that the head can draft; None: as many as the existing head."""

    data: str | None
    tokens: int
    epochs: int
    vocabulary: int | None


@dataclass
class Server:
    """The server that has priority, if one runs."""

    url: str
    api_key: str
    polled: float = 0.0  # time of the last query
    unwell: int = 0  # queries without a usable answer, in a row

    def wait(self) -> None:
        """Return once it has no request. Raises UserError if it does not give its status, such as
        for a wrong key: at the first query, else after PATIENCE of them."""
        while time.monotonic() - self.polled > ASK_S:
            now = get_status(self.url, self.api_key)
            self.unwell = self.unwell + 1 if now.state == "unwell" else 0
            if self.unwell and (not self.polled or self.unwell > PATIENCE):
                raise UserError(f"the server at {self.url} did not give its status: {now.why}")
            self.polled = time.monotonic()
            if now.running + now.waiting + self.unwell or now.state == "loading":
                time.sleep(2 * ASK_S)


def train(config: Config, options: Options, server: Server) -> int:
    """Train a head and install it. Returns the exit status. Raises UserError, OSError."""
    config = with_table(config)
    settings = replace(config, context=CONTEXT, max_sequences=PARALLEL, cache_gb=0.0, others=())
    model = resolve_model(settings)
    model = replace(model, config=replace(model.config, speculate=False))
    cache, name = cache_of(config), storage_name(model.name, model.path)
    existing = learned_head(Resolved(model.path, model.name), cache)
    if existing and existing.is_relative_to(cache):
        name = existing.name  # the model may have had another name then
    folder = cache / "heads" / f"{name}.{time.time_ns()}"
    with lock(cache / "training" / f"{name}.lock", wait=False) as alone:
        if not alone:
            raise UserError(f"another training of {model.name} runs; wait until it ends")
        try:
            compared = _train(model, options, cache / "training" / name, folder, server)
            before = _tokens_per_round(config, compared, server.wait)
            after = _tokens_per_round(replace(config, draft=str(folder)), compared, server.wait)
            print(
                f"held-out prompts: {before:.2f} tokens a round before, {after:.2f} with the head",
            )
            if after > before:
                install(folder, folder.with_name(name))
        except KeyboardInterrupt:
            print("\nstopped; the same command resumes", file=sys.stderr)
            return 130
        except RuntimeError as error:  # MLX's, without memory for example
            log.debug("the training failed", exc_info=True)
            raise UserError(f"{line_of(error)}; the same command resumes") from error
        finally:
            drop_others(folder.with_name(name))
    if after <= before:
        print("the head is discarded: no improvement over current drafting")
        return 1
    if config.draft or not config.speculate:
        print(f"your settings do not use it; to use it give --draft {folder.with_name(name)}")
    else:
        print(f"serve uses it when it loads {model.name} again; --draft off disables it")
    return 0


def _train(
    model: ResolvedModel,
    options: Options,
    work: Path,
    folder: Path,
    server: Server,
) -> list[Sample]:
    """Train a head into `folder`; intermediate files stay in `work`. Returns held-out answers."""
    # A head that does not fit is refused before hours of answers.
    trainer = _new_trainer(model, options, [], 1)[0]  # its files hold a head's tensors
    server.wait()
    training = _seconds_per_row(trainer) * ROWS_PER_TOKEN * options.tokens * options.epochs
    del trainer
    texts = pieces(Path(options.data)) if options.data else []
    samples = list(up_to(options.tokens // 2, _own_samples(model, texts)))
    wanted = options.tokens - sum(len(sample) for _, sample in samples)
    samples += _answers(model, texts, wanted, work / "answers.jsonl", server, training)
    training_set = [sample for subject, sample in samples if not held_out(subject)]
    held_out_set = [sample for subject, sample in samples if held_out(subject)]
    if not training_set or not held_out_set:
        raise UserError(f"--tokens {options.tokens} is too few to learn from; give 100000")
    plan = batches(windows(training_set), options.epochs)
    trainer, files = _new_trainer(model, options, training_set, len(plan))
    before = read_json(files.path / RECORD)  # of an earlier head, else {}
    before.pop("begins_as", None)  # one step back is enough
    size = len(trainer.target.drafted)
    print(f"{'resuming the existing head' if before else 'a new head'}, of {size} tokens")
    print(f"training on {sum(map(len, training_set))} tokens in {len(plan)} steps")
    load_weights(trainer.target.model)
    about = {"model": model.name, **asdict(options), "vocabulary": size, "begins_as": before}
    state, held = work / "state.safetensors", windows(held_out_set)[:MEASURED]
    kept = run(trainer, plan, held, state, about, server.wait)
    save_head(trainer, files, folder, about | {"kept": kept})
    return held_out_set[:COMPARED]


def _own_samples(
    model: ResolvedModel,
    texts: Sequence[tuple[str, str]],
) -> Iterator[tuple[str, Sample]]:
    """Pairs of subject and sample: recorded answers, newest first, then the user's texts that are
    not held out."""
    folder = cache_of(model.config) / "answers"
    for sample in reversed(recorded(folder, model.path, model.info.vocab)):
        yield str(sample.tokens), sample
    for name, text in texts:
        if not held_out(name):
            yield name, Sample(encode(model.tokenizer, text), 1)


def _answers(
    model: ResolvedModel,
    texts: Sequence[tuple[str, str]],
    wanted: int,
    file: Path,
    server: Server,
    training: float,
) -> list[tuple[str, Sample]]:
    """Pairs of subject and sample: the model's answers to questions about the user's texts and to
    general prompts, in turn. Answers in `file` are not generated again. Prints how long answers and
    `training`, in seconds, will take."""
    general, about = general_prompts(), file_prompts(texts)
    pairs = zip(about, general, strict=False)
    questions = [question for pair in pairs for question in pair] + general[len(about) :]
    prompts = [(subject, _request(text, model.tokenizer)) for subject, text in questions]
    prompts = [(subject, p) for subject, p in prompts if len(p.prompt) < CONTEXT // 2]
    measured = next((n for n, (subject, _) in enumerate(prompts) if held_out(subject)), 0)
    if measured > 1:  # however few are answered, one is for measuring
        prompts.insert(1, prompts.pop(measured))
    release_memory()  # of the trainer
    server.wait()
    engine, _ = model.load()
    stored = SampleFile(file, model.info.vocab)
    missing = max(0, wanted - sum(map(len, stored.read().values())))
    if missing:
        missing += PARALLEL * ANSWER // 2  # of answers that are begun and not needed
    answering = missing * _seconds_per_token(engine)
    print(
        f"time: about {answering / 60:.0f} min to answer prompts and {training / 60:.0f} min to"
        " train; Ctrl-C stops",
    )
    samples = []
    with progress("Answering prompts") as report:
        for sample in up_to(wanted, collect(engine, prompts, stored, server.wait)):
            samples.append(sample)
            report(sum(len(answer) for _, answer in samples), wanted)
    return samples


def _seconds_per_row(trainer: Trainer) -> float:
    """Seconds of training per row, measured in two steps."""
    load_weights(trainer.target.model)
    sample = Sample([n % trainer.target.vocab for n in range(LENGTH)], 1)
    with progress("Measuring a step") as report:
        for done in range(2):  # the first compiles
            report(done, 2)
            began = time.perf_counter()
            trainer.step([sample for _ in range(ROWS // LENGTH)])
    return (time.perf_counter() - began) / ROWS


def _seconds_per_token(engine: Engine) -> float:
    """Seconds per token, with PARALLEL answers at a time."""
    requests = [Request(f"try-{n}", (n + 1, n + 2), TRIED) for n in range(PARALLEL)]
    began = time.perf_counter()
    tokens = sum(len(tokens_of(answer)) for _, answer in answers_to(engine, requests))
    return (time.perf_counter() - began) / tokens


def _request(text: str, tokenizer: Tokenizer) -> Request:
    key = key_of(text)
    number = int(key, 16)
    sampling = Sampling(0.0 if number % 2 else WARM, seed=number)
    prompt = prompt_of(Task(key, text), tokenizer)
    stops = frozenset(tokenizer.eos_token_ids)
    return Request(key, prompt, ANSWER, sampling=sampling, stop_tokens=stops)


def _new_trainer(
    model: ResolvedModel,
    options: Options,
    samples: Sequence[Sample],
    steps: int,
) -> tuple[Trainer, HeadFiles]:
    """The trainer of the existing head, or of a new one, and the head's files. Prints how much
    memory training takes, before the model's weights are read. Raises OutOfMemory, and
    UnsupportedModel if no head can read the model."""
    release_memory()  # of an engine before it
    module, config = load_model(model.path)
    target = Target(module, model.name, config)
    files = model.draft and trained_head(target, model.draft.path, options.vocabulary)
    rate = KNOWN_RATE if files else 1.0
    size = options.vocabulary or VOCABULARY
    files = files or new_head(target, vocabulary_of(samples, size, target.vocab))
    trainer = Trainer(target, files, steps, rate)
    need, free = parameter_bytes(module) + trainer.needed_bytes(), memory.available()
    print(f"memory: {format_size(need)} of {format_size(free)} that are available")
    if need > free:
        raise OutOfMemory(
            f"training needs {format_size(need)} and {format_size(free)} are available;"
            " close other programs, or unload the server's models with mlxspec stop",
            need=need,
        )
    return trainer, files


def _tokens_per_round(config: Config, samples: Sequence[Sample], wait: Callable[[], None]) -> float:
    """Tokens per round of greedy answers to the samples' prompts, with these settings' drafters."""
    release_memory()
    config = replace(
        config,
        speculate=True,
        cache_gb=0.0,
        context=CONTEXT,
        max_sequences=1,
        others=(),
    )
    model = resolve_model(config)
    wait()  # the cost of drafting is measured at load
    engine, _ = model.load()
    stops = frozenset(model.tokenizer.eos_token_ids)
    prompts = [tuple(sample.tokens[: sample.first]) for sample in samples]
    requests = [
        Request(str(n), prompt, COMPARED_TOKENS, sampling=Sampling(0.0), stop_tokens=stops)
        for n, prompt in enumerate(prompts)
    ]
    tokens = rounds = 0
    with progress("Comparing") as report:
        for _, answer in answers_to(engine, requests, wait):
            tokens += len(tokens_of(answer))
            rounds += answer[-1][1].rounds
            report(tokens, COMPARED_TOKENS * len(requests))
    return tokens / rounds
