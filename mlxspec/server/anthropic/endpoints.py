"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets

from starlette.responses import JSONResponse, Response

from mlxspec.server.anthropic.schema import Messages, Prompt, chat_messages
from mlxspec.server.anthropic.writer import MessageWriter
from mlxspec.server.body import takes
from mlxspec.server.chat_request import ChatRequest, prepare_chat, prompt_length
from mlxspec.server.errors import ApiError, HttpRequest, Json
from mlxspec.server.generate import Generation, respond
from mlxspec.server.state import TextModel

THINKING = {"enabled": True, "disabled": False}  # other values leave it to the template


async def count_tokens(http: HttpRequest, body: Prompt, model: TextModel) -> Response:
    """The length of a message's prompt."""
    count = await model.server.on_text_thread(prompt_length, model, _asked(body))
    return JSONResponse({"input_tokens": count})


async def messages(http: HttpRequest, body: Messages, model: TextModel) -> Generation:
    writer = MessageWriter(f"msg_{secrets.token_hex(12)}", model.name)
    return await respond(model, body, writer, prepare_chat, _asked(body))


def _asked(body: Prompt) -> ChatRequest:
    """Raises ApiError."""
    if body.thread:
        details = {"error_code": "thread_unsupported_request"}  # the SDK then sends all messages
        why = "thread is not supported; leave it out and send the whole conversation"
        raise ApiError(400, why, "thread", details=details)
    return ChatRequest(
        chat_messages(body),
        body.functions(deferred=False),
        body.choice,
        body.functions(deferred=True),
        {"enable_thinking": THINKING.get(body.thinking.type)},
        continued=body.messages[-1].open,
        budget=body.thinking.budget_tokens,
    )


ENDPOINTS: Json = {
    "POST /v1/messages": takes(Messages, messages),
    "POST /v1/messages/count_tokens": takes(Prompt, count_tokens),
}
