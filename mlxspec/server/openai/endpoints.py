"""POST /v1/chat/completions and /v1/completions: from a request to the engine's requests."""

import secrets
import time
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from mlxspec.server.body import receive
from mlxspec.server.chat_request import (
    ChatRequest,
    Format,
    check_count,
    check_prompt,
    converse,
    encode_prompt,
    predicted,
    sampling,
    sampling_fields,
    stop_tokens,
    template_options,
)
from mlxspec.server.errors import unfit
from mlxspec.server.generate import Generation
from mlxspec.server.openai.schema import Chat, Completion, NamedTool
from mlxspec.server.openai.writer import CompletionWriter
from mlxspec.server.state import Model, while_connected
from mlxspec.server.stream import Choice
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.types import Request


async def chat(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    body, ignored, model = await receive(http, Chat)
    if body.top_logprobs is not None and not body.logprobs:
        raise unfit("top_logprobs", "top_logprobs needs logprobs; set logprobs to true")
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    options, unread = template_options(model, kwargs, reasoning_effort=effort)
    choice = body.tool_choice
    request = ChatRequest.from_body(
        body,
        messages=body.messages,
        tools=body.tools,
        tool_choice={"name": choice.function.name} if isinstance(choice, NamedTool) else choice,
        options=options,
        n=body.n,
        format=_format(body),
    )
    name = f"chatcmpl-{secrets.token_hex(12)}"
    writer = partial(_writer, True, model, body, body.n)
    ignored += unread
    return await converse(http, model, request, writer, name, body.stream, ignored, arrived)


def _format(body: Chat) -> Format | None:
    given = body.response_format
    if given is None or given.type == "text":
        return Format("lark", "grammar", body.grammar) if body.grammar is not None else None
    if body.grammar is not None:
        raise unfit("grammar", "grammar with response_format: send one of them")
    if given.type == "json_object":
        return Format("object", "response_format")
    return Format("schema", "response_format.json_schema.schema", given.json_schema.value)


async def completions(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    body, ignored, model = await receive(http, Completion)
    if body.echo and body.logprobs is not None:
        raise unfit("echo", "echo with logprobs: a prompt's tokens have none; send one of them")
    check_count(model, body.n, len(body.prompts))
    encoding = model.server.on_text_thread(_encode, model, body)
    prompts, expected = await while_connected(http.receive, encoding)
    context, name = model.info.context, f"cmpl-{secrets.token_hex(12)}"
    params = sampling(model, sampling_fields(body))
    ends = stop_tokens(model, body.stop_token_ids or (), body.ignore_eos)
    requests = [
        Request(
            f"{name}-{k}" if k else name,
            tuple(ids),
            min(context - len(ids), body.limit or context),
            params,
            ends,
            body.n,
            arrived,
            expected,
            model=model.name,
        )
        for k, (_, ids) in enumerate(prompts)
    ]
    count = body.n * len(prompts)
    choices = [
        Choice(i, Detokenizer(model.tokenizer, body.stop or (), ends, True)) for i in range(count)
    ]
    headers = {"x-request-id": name, **model.server.report(ignored)}
    writer = _writer(False, model, body, count, name)
    if body.echo:
        writer.echoes = [text for text, _ in prompts for _ in range(body.n)]
    return Generation(model, requests, choices, writer, body.stream, headers, arrived)


def _encode(model: Model, body: Completion) -> tuple[list[tuple[str, list[int]]], tuple[int, ...]]:
    """Each prompt's text and token ids, and the ids of the prediction. Raises ApiError."""
    prompts = []
    for prompt in body.prompts:
        ids = encode_prompt(model, prompt) if isinstance(prompt, str) else prompt
        check_prompt(model, ids, "prompt")  # before the next one is encoded
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        prompts.append((text, ids))
    return prompts, predicted(model, body.prediction.text if body.prediction else "")


def _writer(
    chat: bool, model: Model, body: Chat | Completion, choices: int, name: str
) -> CompletionWriter:
    return CompletionWriter(
        chat,
        name,
        model.name,
        int(time.time()),
        model.tokenizer,
        choices,
        body.alternatives is not None,
        body.stream_options.include_usage,
    )
