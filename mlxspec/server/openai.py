"""POST /v1/chat/completions and /v1/completions: from a checked body to the engine's requests.

Rule: everything that can be wrong with a request is found here, before anything is queued.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from mlxspec.server.answer import Job, answer
from mlxspec.server.errors import unfit
from mlxspec.server.front import Front, read_body, while_connected
from mlxspec.server.schema_openai import Chat, Completion, Tokenize, parse
from mlxspec.server.stream import Choice, Shape
from mlxspec.text.prompt import encode, render_chat, template_reads
from mlxspec.text.reader import Reader
from mlxspec.types import COLDEST, Request, Sampling

T = TypeVar("T")

CHARS_PER_TOKEN = 32  # of a prediction, on average: more text than that is not worth encoding to be cut


async def chat(http: HttpRequest) -> ASGIApp:
    arrived, front = time.monotonic(), http.app.state.front
    body, ignored = parse(Chat, await read_body(http))
    front.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise unfit(
            "top_logprobs", f"top_logprobs = {body.top_logprobs} needs logprobs; set logprobs to true"
        )
    _check_count(front, body.n or 1, 1)
    options, unread = template_options(front, body)
    rendering = front.on_text_thread(_render, front, body, options)
    prompt, predicted = await while_connected(http.receive, rendering)
    return answer(front, _job(front, body, [prompt], predicted, [*ignored, *unread], arrived))


async def completions(http: HttpRequest) -> ASGIApp:
    arrived, front = time.monotonic(), http.app.state.front
    body, ignored = parse(Completion, await read_body(http))
    front.check_model(body.model)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise unfit(
            "best_of", f"best_of = {body.best_of} is not n = {n}: nothing is ranked; ask for n answers"
        )
    if body.echo and body.logprobs is not None:
        raise unfit(
            "echo", "echo = true with logprobs: a prompt's tokens have none here; leave out one of them"
        )
    _check_count(front, n, len(body.prompt))
    encoding = front.on_text_thread(_encode_all, front, body)
    prompts, texts, predicted = await while_connected(http.receive, encoding)
    echoes = tuple(text for text in texts for _ in range(n))
    return answer(front, _job(front, body, prompts, predicted, ignored, arrived, echoes))


def _check_count(front: Front, n: int, prompts: int) -> None:
    """Raises ApiError for more answers than could ever wait together."""
    most = front.config.max_sequences + front.config.max_queue
    if n * prompts > most:
        raise unfit("n", f"n = {n} for {prompts} prompts is more than {most} answers; ask for fewer")


def template_options(front: Front, body: Chat | Tokenize) -> tuple[dict[str, Any], list[str]]:
    """What the request tells the chat template, and the names of what this template does not look at."""
    given = {f"chat_template_kwargs.{k}": (k, v) for k, v in (body.chat_template_kwargs or {}).items()}
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = ("reasoning_effort", body.reasoning_effort)
    read = {path: template_reads(front.tokenizer, name) for path, (name, _) in given.items()}
    options = {name: value for path, (name, value) in given.items() if read[path]}
    return options, [path for path in given if not read[path]]


def _render(front: Front, body: Chat, options: dict[str, Any]) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of the conversation and of what is predicted."""
    return render_chat(front.tokenizer, body.messages, **options), _predicted(front, body)


def _encode_all(front: Front, body: Completion) -> tuple[list[list[int]], list[str], tuple[int, ...]]:
    """Token ids of each prompt, each one's text where it is to be echoed, and what is predicted."""
    ids = [encode(front.tokenizer, p) if isinstance(p, str) else p for p in body.prompt]
    texts = [p if isinstance(p, str) else str(front.tokenizer.decode(p)) for p in body.prompt if body.echo]
    return ids, texts, _predicted(front, body)


def _predicted(front: Front, body: Chat | Completion) -> tuple[int, ...]:
    """Token ids of what the client expects. They are a hint: what is too much is left out, not refused."""
    if body.prediction is None:
        return ()
    info = front.engine.info
    text = body.prediction.text[: info.context * CHARS_PER_TOKEN]
    return tuple(t for t in encode(front.tokenizer, text, special=False) if t < info.vocab)[: info.context]


def _job(
    front: Front,
    body: Chat | Completion,
    prompts: Sequence[Sequence[int]],
    predicted: tuple[int, ...],
    ignored: list[str],
    arrived: float,
    echoes: tuple[str, ...] = (),
) -> Job:
    """The engine's requests and what reads their answers. Raises ApiError for what cannot be run here."""
    info, n = front.engine.info, body.n or 1
    name = f"{body.prefix}-{secrets.token_hex(12)}"
    sampling = _sampling(front, body)
    ends = frozenset() if body.ignore_eos else frozenset(front.tokenizer.eos_token_ids)
    ends |= frozenset(body.stop_token_ids or ())
    requests, choices = [], []
    for k, prompt in enumerate(prompts):
        _check_prompt(front, prompt, body.source)
        most = min(info.context - len(prompt), body.limit or info.context)
        own = name if len(prompts) == 1 else f"{name}-{k}"
        requests.append(Request(own, tuple(prompt), most, sampling, ends, n, arrived, predicted))
        for i in range(k * n, (k + 1) * n):
            choices.append(
                Choice(i, Reader(front.tokenizer, body.stop or (), ends, body.api == "completions"))
            )
    usage = bool(body.stream_options and body.stream_options.include_usage)
    logprobs = sampling.logprobs is not None
    shape = Shape(body.api, name, info.name, int(time.time()), front.tokenizer, logprobs, usage, echoes)
    headers = {"x-request-id": name, **front.report(ignored)}
    return Job(requests, choices, shape, bool(body.stream), headers, arrived)


def _check_prompt(front: Front, prompt: Sequence[int], source: str) -> None:
    info = front.engine.info
    if not prompt:
        raise unfit(source, f"{source} has no tokens; send some text")
    if max(prompt) >= info.vocab:
        raise unfit(source, f"{source} has the token id {max(prompt)}; ids run from 0 to {info.vocab - 1}")
    if len(prompt) >= info.context:
        raise unfit(
            source,
            f"{source}: this model's maximum context length is {info.context} tokens, and the prompt's"
            f" {len(prompt)} leave no room for an answer; shorten it",
            "context_length_exceeded",
        )


def _sampling(front: Front, body: Chat | Completion) -> Sampling:
    """The request's own settings, where it is silent the model's."""
    defaults, vocab = front.defaults, front.engine.info.vocab
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    if bias and max(bias) >= vocab:
        raise unfit("logit_bias", f"logit_bias has the token id {max(bias)}; ids run from 0 to {vocab - 1}")
    temperature = _or(body.temperature, defaults.temperature)
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple(bias.items()),
        seed=_or(body.seed, secrets.randbits(63)),
        logprobs=body.alternatives,
    )


def _or(own: T | None, default: T) -> T:
    return default if own is None else own
