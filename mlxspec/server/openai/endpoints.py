"""POST /v1/chat/completions, /v1/completions, and those that fill in the middle: from a request to
the engine's requests."""

import secrets
from dataclasses import replace
from typing import Any

from mlxspec.server.body import takes
from mlxspec.server.chat_request import ChatRequest, encode_prompt, engine_request, prepare_chat
from mlxspec.server.errors import HttpRequest, Json, invalid
from mlxspec.server.generate import Generation, Prepared, respond
from mlxspec.server.openai.schema import Chat, Completion, Fill, Infill
from mlxspec.server.openai.writer import CompletionWriter
from mlxspec.server.state import TextModel
from mlxspec.server.stream import Choice
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.fim import FORMS, fill_in_middle
from mlxspec.text.messages import listed
from mlxspec.types import Request


async def chat(http: HttpRequest, body: Chat, model: TextModel) -> Generation:
    asked = ChatRequest(
        body.messages,
        body.tools,
        body.tool_choice,
        options=body.options,
        budget=body.reasoning.max_tokens,
    )
    writer = CompletionWriter(model, body, True, f"chatcmpl-{secrets.token_hex(12)}")
    writer.legacy = bool(body.functions)
    return await respond(model, body, writer, prepare_chat, asked)


async def completions(http: HttpRequest, body: Completion, model: TextModel) -> Generation:
    mistral = type(body) is Fill  # whose answers have the form of a chat
    writer = CompletionWriter(model, body, mistral, f"cmpl-{secrets.token_hex(12)}")
    return await respond(model, body, writer, prepare_completion)


def prepare_completion(model: TextModel, body: Any, id: str) -> Prepared:
    """What answers each prompt; on the text thread. Raises RejectedRequest and ApiError."""
    requests: list[Request] = []
    choices: list[Choice] = []
    for prompt in listed(body.prompt):
        text, ends = prompt, frozenset[int]()
        if body.suffix or isinstance(body, Fill):
            text, ends = _gap(model, body, prompt)
        ids = encode_prompt(model, text) if isinstance(text, str) else text
        name = f"{id}-{len(requests)}" if requests else id
        request = engine_request(model, body, name, ids, "prompt")
        request = replace(request, stop_tokens=request.stop_tokens | ends)
        requests.append(request)
        for _ in range(body.n):
            reader = Detokenizer(model.tokenizer, body.stop, request.stop_tokens, True)
            choices.append(Choice(len(choices), request, reader))
    return Prepared(requests, choices)


def _gap(model: TextModel, body: Any, prefix: str | list[int]) -> tuple[str, frozenset[int]]:
    """The prompt for what stands between `prefix` and the suffix, and what ends it. Raises
    ApiError."""
    form, file, ends = fill_in_middle(model.tokenizer)
    if not form:
        why = f"{model.name} has no tokens to fill in the middle; serve one of {', '.join(FORMS)}"
        raise invalid("suffix", f"{why}, or leave suffix out")
    if not isinstance(prefix, str):
        raise invalid("prompt", "prompt has token ids; with a suffix, send it as text")
    text = ""
    if isinstance(body, Fill):
        prefix = body.input_prefix + prefix
        for other in body.input_extra:
            text += f"{file}{other.filename}\n{other.text}\n"
        if text:
            text += f"{file}\n"  # the name of the file with the gap is not known
    return text + form.format(prefix=prefix, suffix=body.suffix), ends


ENDPOINTS: Json = {
    "POST /v1/chat/completions": takes(Chat, chat),
    "POST /v1/completions": takes(Completion, completions),
    "POST /v1/fim/completions": takes(Fill, completions),
    "POST /v1/infill": takes(Infill, completions),
}
