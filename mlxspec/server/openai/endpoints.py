"""POST /v1/chat/completions and /v1/completions: from a checked body to what is asked of the
engine."""

import secrets
import time

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

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
from mlxspec.server.generate import Generation, answer
from mlxspec.server.openai.schema import Chat, Completion, parse
from mlxspec.server.state import Model, ServerState, read_body, while_connected
from mlxspec.server.stream import Choice, OpenAI
from mlxspec.text.detokenizer import Reader
from mlxspec.types import Request, shown


async def chat(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    front: ServerState = http.app.state.front
    body, ignored = parse(Chat, await read_body(http))
    model = await front.model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise unfit(
            "top_logprobs",
            f"top_logprobs = {body.top_logprobs} needs logprobs; set logprobs to true",
        )
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    options, unread = template_options(model, kwargs, reasoning_effort=effort)
    ask = ChatRequest.from_body(
        body,
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.choice,
        options=options,
        n=body.n or 1,
        format=_format(body),
    )

    def dialect(name: str) -> OpenAI:
        return _dialect(model, body, name, range(ask.n))

    name = f"{body.prefix}-{secrets.token_hex(12)}"
    return await converse(
        http, model, ask, dialect, name, bool(body.stream), [*ignored, *unread], arrived
    )


def _format(body: Chat) -> Format | None:
    given = body.response_format
    if body.grammar is not None:
        if given and given.type != "text":
            raise unfit("grammar", "grammar with response_format: send one of them")
        return Format("lark", "grammar", body.grammar)
    if given and given.type == "json_schema" and given.json_schema:
        return Format("schema", "response_format.json_schema.schema", given.json_schema.body)
    return Format("object", "response_format") if given and given.type == "json_object" else None


async def completions(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    front: ServerState = http.app.state.front
    body, ignored = parse(Completion, await read_body(http))
    model = await front.model(body.model)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise unfit(
            "best_of",
            f"best_of = {shown(body.best_of)} is not n = {n}: nothing is ranked; ask for n answers",
        )
    if body.echo and body.logprobs is not None:
        raise unfit(
            "echo",
            "echo = true with logprobs: a prompt's tokens have none here; leave out one of them",
        )
    check_count(model, n, len(body.prompt))
    encoding = front.on_text_thread(_encode_all, model, body)
    prompts, texts, expected = await while_connected(http.receive, encoding)
    info, name = model.info, f"{body.prefix}-{secrets.token_hex(12)}"
    drawn = sampling(model, sampling_fields(body))
    ends = stop_tokens(model, body.stop_token_ids or (), bool(body.ignore_eos))
    requests = []
    for k, prompt in enumerate(prompts):
        most = min(info.context - len(prompt), body.max_tokens or info.context)
        own = name if len(prompts) == 1 else f"{name}-{k}"
        requests.append(
            Request(own, tuple(prompt), most, drawn, ends, n, arrived, expected, model=model.name)
        )
    indexes = range(n * len(prompts))
    choices = [Choice(i, Reader(model.tokenizer, body.stop or (), ends, True)) for i in indexes]
    echoes = tuple(text for text in texts for _ in range(n))
    headers = {"x-request-id": name, **front.report(ignored)}
    dialect = _dialect(model, body, name, indexes, echoes)
    return answer(
        model, Generation(requests, choices, dialect, bool(body.stream), headers, arrived)
    )


def _encode_all(
    model: Model, body: Completion
) -> tuple[list[list[int]], list[str], tuple[int, ...]]:
    """Token ids of each prompt, each one's text where it is to be echoed, and what is predicted.
    Raises ApiError."""
    ids = []
    for p in body.prompt:
        ids.append(encode_prompt(model, p) if isinstance(p, str) else p)
        check_prompt(model, ids[-1], "prompt")  # before the others are encoded
    texts = [
        p if isinstance(p, str) else str(model.tokenizer.decode(p))
        for p in body.prompt
        if body.echo
    ]
    return ids, texts, predicted(model, body.prediction.text if body.prediction else "")


def _dialect(
    model: Model, body: Chat | Completion, name: str, indexes: range, echoes: tuple[str, ...] = ()
) -> OpenAI:
    return OpenAI(
        body.api,
        name,
        model.name,
        int(time.time()),
        model.tokenizer,
        indexes,
        body.alternatives is not None,
        bool(body.stream_options and body.stream_options.include_usage),
        echoes,
    )
