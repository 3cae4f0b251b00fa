"""POST /v1/chat/completions and /v1/completions: from a request to the engine's requests."""

import secrets
import time
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from mlxspec.server.ask import (
    Ask,
    Format,
    Wishes,
    check_count,
    check_prompt,
    converse,
    encode_prompt,
    predicted,
    sampling,
    stop_tokens,
    template_options,
)
from mlxspec.server.body import parse
from mlxspec.server.errors import unfit
from mlxspec.server.generate import Job, answer
from mlxspec.server.openai.schema import Chat, Completion
from mlxspec.server.openai.writer import Api, CompletionWriter
from mlxspec.server.state import Model, ServerState, read_body, while_connected
from mlxspec.server.stream import Choice
from mlxspec.text.detokenizer import Reader
from mlxspec.types import Request


async def chat(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    front: ServerState = http.app.state.front
    body, ignored = parse(Chat, await read_body(http))
    model = await front.model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise unfit("top_logprobs", "top_logprobs needs logprobs; set logprobs to true")
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    options, unread = template_options(model, kwargs, reasoning_effort=effort)
    ask = Ask.of(
        body,
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        options=options,
        n=body.n,
        format=_format(body),
    )
    name = f"chatcmpl-{secrets.token_hex(12)}"
    writer = partial(_writer, "chat", model, body, range(body.n))
    return await converse(http, model, ask, writer, name, body.stream, [*ignored, *unread], arrived)


def _format(body: Chat) -> Format | None:
    given = body.response_format
    if given is None or given.type == "text":
        return Format("lark", "grammar", body.grammar) if body.grammar is not None else None
    if body.grammar is not None:
        raise unfit("grammar", "grammar with response_format: send one of them")
    if given.json_schema is None or given.type == "json_object":
        return Format("object", "response_format")
    return Format("schema", "response_format.json_schema.schema", given.json_schema.value)


async def completions(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    front: ServerState = http.app.state.front
    body, ignored = parse(Completion, await read_body(http))
    model = await front.model(body.model)
    n = body.n
    if body.best_of not in (None, n):
        raise unfit("best_of", f"best_of = {body.best_of} must equal n = {n}: nothing is ranked")
    if body.echo and body.logprobs is not None:
        raise unfit("echo", "echo with logprobs: a prompt's tokens have none; send one of them")
    check_count(model, n, len(body.prompt))
    encoding = front.on_text_thread(_encode, model, body)
    prompts, texts, expected = await while_connected(http.receive, encoding)
    context, name = model.info.context, f"cmpl-{secrets.token_hex(12)}"
    params = sampling(model, Wishes.of(body))
    ends = stop_tokens(model, body.stop_token_ids, body.ignore_eos)
    requests = []
    for k, prompt in enumerate(prompts):
        limit = min(context - len(prompt), body.max_tokens or context)
        id = f"{name}-{k}" if len(prompts) > 1 else name
        request = Request(
            id, tuple(prompt), limit, params, ends, n, arrived, expected, model=model.name
        )
        requests.append(request)
    indexes = range(n * len(prompts))
    choices = [Choice(i, Reader(model.tokenizer, body.stop, ends, True)) for i in indexes]
    headers = {"x-request-id": name, **front.report(ignored)}
    writer = _writer("completions", model, body, indexes, name)
    if body.echo:
        writer.echoes = [text for text in texts for _ in range(n)]
    return answer(model, Job(requests, choices, writer, body.stream, headers, arrived))


def _encode(model: Model, body: Completion) -> tuple[list[list[int]], list[str], tuple[int, ...]]:
    """The prompts' token ids and texts, and the ids of the prediction. Raises ApiError."""
    ids, texts = [], []
    for prompt in body.prompt:
        text = prompt
        if isinstance(prompt, str):
            prompt = encode_prompt(model, prompt)
        check_prompt(model, prompt, "prompt")  # before the next one is encoded
        if body.echo and not isinstance(text, str):
            text = model.tokenizer.decode(prompt)
        ids.append(prompt)
        texts.append(text)
    return ids, texts, predicted(model, body.prediction.text if body.prediction else "")


def _writer(
    api: Api, model: Model, body: Chat | Completion, indexes: range, name: str
) -> CompletionWriter:
    return CompletionWriter(
        api,
        name,
        model.name,
        int(time.time()),
        model.tokenizer,
        indexes,
        body.alternatives is not None,
        body.stream_options.include_usage,
    )
