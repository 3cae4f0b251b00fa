"""POST /v1/messages and /v1/messages/count_tokens."""

import secrets

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from mlxspec.server.anthropic.schema import Messages, Prompt, chat_messages
from mlxspec.server.anthropic.writer import MessageWriter
from mlxspec.server.body import receive
from mlxspec.server.chat_request import ChatRequest, chat_generation, prompt_length
from mlxspec.server.errors import ApiError, HttpRequest
from mlxspec.server.generate import Generation
from mlxspec.server.state import run_on_text_thread

THINKING = {"enabled": True, "disabled": False}  # other values leave it to the template


async def messages(http: HttpRequest) -> ASGIApp:
    """A message; of /v1/messages/count_tokens only the length of its prompt."""
    counts = http.url.path.endswith("/count_tokens")
    body, model = await receive(http, Prompt if counts else Messages)
    if body.thread:
        details = {"error_code": "thread_unsupported_request"}  # the SDK then sends all messages
        why = "thread is not supported; leave it out and send the whole conversation"
        raise ApiError(400, why, "thread", details=details)
    asked = ChatRequest(
        chat_messages(body),
        body.functions(deferred=False),
        body.choice,
        body.functions(deferred=True),
        {"enable_thinking": THINKING.get(body.thinking.type)},
        continued=body.messages[-1].open,
        budget=body.thinking.budget_tokens,
    )
    if counts:
        count = await run_on_text_thread(http, prompt_length, model, asked)
        return JSONResponse({"input_tokens": count})
    writer = MessageWriter(f"msg_{secrets.token_hex(12)}", model.name)
    made = Generation(model, body, writer)
    return await run_on_text_thread(http, chat_generation, made, asked)
