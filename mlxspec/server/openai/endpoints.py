"""POST /v1/chat/completions, /v1/completions, and those that fill in the middle: from a request to
the engine's requests."""

import secrets
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from mlxspec.server.body import receive
from mlxspec.server.chat_request import ChatRequest, chat_generation, encode_prompt, engine_request
from mlxspec.server.errors import HttpRequest, invalid
from mlxspec.server.generate import Generation
from mlxspec.server.openai.schema import Chat, Completion, Fill, Infill
from mlxspec.server.openai.writer import CompletionWriter
from mlxspec.server.state import Model, run_on_text_thread
from mlxspec.server.stream import Choice
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.fim import FORMS, fill_in_middle
from mlxspec.text.messages import listed

# Of bodies, by path.
KINDS: dict[str, type[Completion]] = {"/fim/completions": Fill, "/infill": Infill}


async def chat(http: HttpRequest) -> ASGIApp:
    body, model = await receive(http, Chat)
    asked = ChatRequest(
        body.messages,
        body.tools,
        body.tool_choice,
        options=body.options,
        budget=body.reasoning.max_tokens,
    )
    writer = CompletionWriter(model, body, True, f"chatcmpl-{secrets.token_hex(12)}")
    writer.legacy = bool(body.functions)
    made = Generation(model, body, writer)
    return await run_on_text_thread(http, chat_generation, made, asked)


async def completions(http: HttpRequest) -> ASGIApp:
    kind = KINDS.get(http.scope["path"].removeprefix("/v1"), Completion)
    body, model = await receive(http, kind)
    writer = CompletionWriter(model, body, kind is Fill, f"cmpl-{secrets.token_hex(12)}")
    made = Generation(model, body, writer)
    return await run_on_text_thread(http, completion_generation, made)


def completion_generation(generation: Generation) -> Generation:
    """The response, ready to answer; on the text thread. Raises RejectedRequest and ApiError."""
    model, body = generation.model, generation.body
    id = name = generation.writer.id
    for prompt in listed(body.prompt):
        text, ends = prompt, frozenset[int]()
        if body.suffix or isinstance(body, Fill):
            text, ends = _gap(model, body, prompt)
        ids = encode_prompt(model, text) if isinstance(text, str) else text
        request = engine_request(model, body, name, ids, "prompt")
        request = replace(request, stop_tokens=request.stop_tokens | ends)
        generation.requests.append(request)
        name = f"{id}-{len(generation.requests)}"
        for _ in range(body.n):
            reader = Detokenizer(model.tokenizer, body.stop, request.stop_tokens, True)
            generation.choices.append(Choice(len(generation.choices), request, reader))
    return generation


def _gap(model: Model, body: Any, prefix: str | list[int]) -> tuple[str, frozenset[int]]:
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
