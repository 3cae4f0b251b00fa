"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from mlxspec.server.anthropic.schema import Messages, Prompt, chat_messages
from mlxspec.server.anthropic.writer import MessageWriter
from mlxspec.server.body import receive
from mlxspec.server.chat_request import (
    ChatRequest,
    chat_generation,
    render_prompt,
    template_options,
)
from mlxspec.server.errors import HttpRequest
from mlxspec.server.state import Model, report, run_on_text_thread
from mlxspec.text.messages import TooLong

THINKING = {"enabled": True, "disabled": False}  # other values leave it to the template


async def messages(http: HttpRequest) -> ASGIApp:
    body, ignored, model = await receive(http, Messages)
    writer = MessageWriter(f"msg_{secrets.token_hex(12)}", model.name)
    return await run_on_text_thread(http, chat_generation, model, _request(body), writer, ignored)


async def count_tokens(http: HttpRequest) -> Response:
    """The length of the prompt that /v1/messages would make of the same body."""
    body, ignored, model = await receive(http, Prompt)
    count = await run_on_text_thread(http, _count, model, _request(body))
    return JSONResponse({"input_tokens": count}, headers=report(ignored))


def _count(model: Model, request: ChatRequest) -> int:
    """An estimate if the text is far beyond the context: the client wants to know how much to
    leave out."""
    try:
        return len(render_prompt(model, request)[1].ids)
    except TooLong as error:
        return error.tokens


def _request(body: Prompt) -> ChatRequest:
    """Raises ApiError."""
    thinking = THINKING.get(body.thinking.type) if body.thinking else None
    return ChatRequest(
        continued=body.messages[-1].open,
        body,
        chat_messages(body),
        body.functions(deferred=False),
        body.choice,
        body.functions(deferred=True),
        template_options(None, enable_thinking=thinking),
    )
