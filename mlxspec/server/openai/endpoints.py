"""POST /v1/chat/completions and /v1/completions: from a request to the engine's requests."""

import secrets
import time

from starlette.types import ASGIApp

from mlxspec.server.body import receive
from mlxspec.server.chat_request import (
    ChatRequest,
    chat_generation,
    encode_prompt,
    engine_request,
    template_options,
)
from mlxspec.server.errors import HttpRequest, invalid
from mlxspec.server.generate import Generation
from mlxspec.server.openai.schema import Chat, Completion
from mlxspec.server.openai.writer import CompletionWriter
from mlxspec.server.state import Model, run_on_text_thread
from mlxspec.server.stream import Choice
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.types import Request


async def chat(http: HttpRequest) -> ASGIApp:
    body, ignored, model = await receive(http, Chat)
    effort = body.reasoning_effort or body.reasoning.effort
    options = template_options(body.chat_template_kwargs, reasoning_effort=effort)
    request = ChatRequest(
        body,
        body.messages,
        body.tools,
        body.choice,
        options=options,
        budget=body.reasoning.max_tokens,
    )
    writer = CompletionWriter(model, body, True, f"chatcmpl-{secrets.token_hex(12)}")
    writer.legacy = bool(body.functions)
    return await run_on_text_thread(http, chat_generation, model, request, writer, ignored)


async def completions(http: HttpRequest) -> ASGIApp:
    arrived = time.monotonic()
    body, ignored, model = await receive(http, Completion)
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "echo with logprobs: a prompt's tokens have none; send one of them")
    writer = CompletionWriter(model, body, False, f"cmpl-{secrets.token_hex(12)}")
    return await run_on_text_thread(
        http, _completion_generation, model, body, writer, ignored, arrived
    )


def _completion_generation(
    model: Model,
    body: Completion,
    writer: CompletionWriter,
    ignored: list[str],
    arrived: float,
) -> Generation:
    """On the text thread. Raises RejectedRequest and ApiError."""
    requests: list[Request] = []
    choices: list[Choice] = []
    name = writer.id
    for prompt in body.prompts:
        ids = encode_prompt(model, prompt) if isinstance(prompt, str) else prompt
        request = engine_request(model, body, name, ids, "prompt")
        requests.append(request)
        name = f"{writer.id}-{len(requests)}"
        for _ in range(body.n):
            reader = Detokenizer(model.tokenizer, body.stop, request.stop_tokens, True)
            choices.append(Choice(len(choices), reader))
            if body.echo:
                text = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
                writer.echoes.append(text)
    return Generation(
        model,
        requests,
        choices,
        writer,
        body.stream,
        ignored,
        arrived,
        progress=body.return_progress or body.stream_options.include_progress,
    )
