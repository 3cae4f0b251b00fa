"""POST /v1/chat/completions, /v1/completions, and the endpoints that fill in the middle: the
engine's requests for a body, and the answers as one body or as server-sent events.

Rule: each piece of an answer is written once, by the same code for a body and for a stream.
"""

import secrets
import time
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

from mlxspec.server.body import endpoint
from mlxspec.server.chat_request import (
    ChatRequest,
    encode_prompt,
    engine_request,
    loop_guard,
    prepare_chat,
)
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.generate import Generation, Prepared, respond
from mlxspec.server.openai.schema import Chat, Completion, Fill, Infill
from mlxspec.server.state import TextModel
from mlxspec.server.stream import (
    Choice,
    Choices,
    Piece,
    ResponseWriter,
    Usage,
    event,
    message,
    texts,
)
from mlxspec.text.detokenizer import Detokenizer, token_bytes
from mlxspec.text.fim import FORMS, fill_in_middle
from mlxspec.text.messages import as_list
from mlxspec.text.output_parser import Part
from mlxspec.types import Logprob, Request

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity


@dataclass
class CompletionWriter(ResponseWriter):
    """The ResponseWriter of the completion endpoints; `request` is the body it answers."""

    model: TextModel
    request: InitVar[Chat | Completion]
    id: str
    chat: bool  # not a text completion
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds
    legacy: bool = False  # calls are written as `function_call`

    def __post_init__(self, request: Chat | Completion) -> None:
        self._choices, self._infill = request.n, isinstance(request, Infill)
        self._usage = request.stream_options.include_usage
        self._alternatives = request.alternatives

    def opening(self, usage: Usage) -> bytes:
        """The role of each choice of a chat."""
        data = b""
        if self.chat:
            for i in range(self._choices):
                data += self._chunk(i, {"role": "assistant", "content": ""})
        return data

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        deltas = [_delta(choice, part) for part in piece.parts]
        logprobs = None
        if piece.logprobs:
            logprobs = self._logprobs(piece)
            deltas = deltas or [{}]
        data = b""
        for delta in deltas:
            data += self._chunk(choice.index, delta, logprobs)
            logprobs = None
        if piece.finish is not None:
            data += self._chunk(choice.index, {}, finish=_finish_reason(choice))
        return data

    def keepalive(self) -> bytes:
        return self._chunk(0, {"content": ""})

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return event(self._head(".chunk", choices=[], usage=usage_object(usage))) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def body(self, choices: Choices, usage: Usage) -> Json:
        if self._infill:
            return {
                "content": texts(choices[0].whole)["content"],
                "stop": True,
                "tokens_predicted": usage.generated,
                "tokens_evaluated": usage.prompt,
                "tokens_cached": usage.cached,
            }
        written = []
        for choice in choices:
            entry = self._choice(
                choice.index,
                {"message": {**message(choice), "refusal": None}},
                self._logprobs(choice.whole),
                finish=_finish_reason(choice),
            )
            written.append(entry)
        return self._head(choices=written, usage=usage_object(usage))

    def generated(self, choices: Choices, usage: Usage) -> Json:
        """What a stream would have sent before the error."""
        return {} if self._infill else self.body(choices, usage)

    def _head(self, chunk: str = "", **fields: Any) -> Json:
        kind = f"chat.completion{chunk}" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            **fields,
        }

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = self._choice(index, {"delta": delta}, logprobs, finish=finish)
        data = self._head(".chunk", choices=[choice])
        if self._usage:
            data["usage"] = None
        return event(data)

    def _choice(self, index: int, answer: Json, logprobs: Json | None, finish: str | None) -> Json:
        """A choice of a body or chunk, in the form of the request. `answer` is a chat's message
        or delta."""
        [message] = answer.values()
        if not self.chat:
            answer = {"text": message.get("content", "")}
        elif self.legacy:
            if calls := message.pop("tool_calls", None):
                message["function_call"] = calls[0]["function"]
            if finish == "tool_calls":
                finish = "function_call"
        return {"index": index, **answer, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, piece: Piece) -> Json | None:
        if self._alternatives is None:
            return None
        content = [self._entry(lp) for lp in piece.logprobs]
        if self.chat:
            return {"content": content, "refusal": None}
        tops = []
        for entry in content:
            tops.append({e["token"]: e["logprob"] for e in (entry, *entry["top_logprobs"])})
        return {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": tops,
            "text_offset": piece.starts,
        }

    def _entry(self, lp: Logprob) -> Json:
        """A token and its alternatives; bytes of an incomplete character are in hexadecimal."""
        entries = []
        for token, logprob in ((lp.token, lp.logprob), *lp.top):
            raw = token_bytes(self.model.tokenizer, token)
            name = raw.decode("utf-8", "backslashreplace")
            if not self.chat and name.encode() != raw:
                name = f"bytes:{name}"
            logprob = max(logprob, MIN_LOGPROB)
            entries.append({"token": name, "logprob": logprob, "bytes": list(raw)})
        return {**entries[0], "top_logprobs": entries[1:]}


def _delta(choice: Choice, part: Part) -> Json:
    if call := part.call:
        function = {"arguments": part.text}
        entry: Json = {"index": choice.calls.index(call), "function": function}
        if part.opens:
            function["name"] = call.name
            entry |= {"id": call.id, "type": "function"}
        return {"tool_calls": [entry]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


def usage_object(usage: Usage) -> Json:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.kept,
            "rejected_prediction_tokens": usage.drafted - usage.kept,
            **usage.loops_ended,
        },
    }


def _finish_reason(choice: Choice) -> str | None:
    return "tool_calls" if choice.called else choice.finish


async def chat(http: HttpRequest, body: Chat, model: TextModel) -> Generation:
    chat_request = ChatRequest(
        body.messages,
        body.tools,
        body.tool_choice,
        options=body.options,
        budget=body.reasoning.max_tokens,
        images=body.seen_images,
    )
    id, legacy = f"chatcmpl-{secrets.token_hex(12)}", bool(body.functions)
    writer = CompletionWriter(model, body, id, chat=True, legacy=legacy)
    return await respond(model, body, writer, prepare_chat, chat_request)


async def completions(http: HttpRequest, body: Completion, model: TextModel) -> Generation:
    mistral = type(body) is Fill  # its answers have the form of a chat's
    writer = CompletionWriter(model, body, f"cmpl-{secrets.token_hex(12)}", chat=mistral)
    return await respond(model, body, writer, prepare_completion)


def prepare_completion(model: TextModel, body: Any, id: str) -> Prepared:
    """The requests and choices for all prompts; on the text thread. Raises RejectedRequest and
    ApiError."""
    requests: list[Request] = []
    choices: list[Choice] = []
    for prompt in as_list(body.prompt):
        text, ends = prompt, frozenset[int]()
        if body.suffix or isinstance(body, Fill):
            text, ends = _gap(model, body, prompt)
        if isinstance(text, str):
            ids, asked, shown = encode_prompt(model, text), text, partial(str, text)
        else:
            ids, asked, shown = text, "", partial(model.tokenizer.decode, text)
        name = f"{id}-{len(requests)}" if requests else id
        request = engine_request(model, body, name, prompt=ids, source="prompt")
        request = replace(request, stop_tokens=request.stop_tokens | ends)
        if guard := loop_guard(model, body, request, asked, shown):
            request = replace(request, grammar=guard)
        requests.append(request)
        for _ in range(body.n):
            detokenizer = Detokenizer(
                model.tokenizer, body.stop, request.stop_tokens, prompt_text_continues=True
            )
            choices.append(Choice(len(choices), request, detokenizer))
    return Prepared(requests, choices)


def _gap(model: TextModel, body: Any, prefix: str | list[int]) -> tuple[str, frozenset[int]]:
    """The prompt for the text between `prefix` and the suffix, and the tokens that end it. Raises
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
    "POST /v1/chat/completions": endpoint(Chat, chat),
    "POST /v1/completions": endpoint(Completion, completions),
    "POST /v1/fim/completions": endpoint(Fill, completions),
    "POST /v1/infill": endpoint(Infill, completions),
}
