"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Rule: a conversation has one form, however it is sent: texts are joined as they are, and what one
turn leaves out, all later ones leave out. A stream has the blocks of the body, in the order of
generation.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo
from starlette.responses import JSONResponse, Response

from mlxspec.server.body import Body, Count, Many, Parts, Stops, Strict, endpoint
from mlxspec.server.chat_request import AnswerFormat, ChatRequest, prepare_chat, prompt_length
from mlxspec.server.content import LEFT_OUT, READABLE, Content
from mlxspec.server.errors import ApiError, HttpRequest, Json
from mlxspec.server.generate import Generation, respond
from mlxspec.server.openai.schema import Budget, Common, TextPart
from mlxspec.server.state import TextModel
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage, typed_event
from mlxspec.text.images import EDGE
from mlxspec.text.messages import BILLING
from mlxspec.text.tool_calls import as_object

# The types of tools that the client runs; its task depends on them, so they are not left out.
CLIENT_TOOLS = ("custom", "bash_", "text_editor_", "memory_", "computer_", "browser_")


class Thought(Strict):
    type: Literal["thinking"]
    thinking: str


class RedactedThought(Strict):
    type: Literal["redacted_thinking"]


class ToolUse(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class ResultPart(Strict):
    """A part of a tool's result. A tool_reference stands for the definition of a deferred tool."""

    type: Literal["text", "tool_reference"]
    text: str = ""
    tool_name: str = ""


class ToolResult(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts[ResultPart] = []
    is_error: bool = False


Block = Annotated[
    TextPart | Thought | RedactedThought | ToolUse | ToolResult,
    Field(discriminator="type"),
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Parts[Block]

    @property
    def open(self) -> bool:
        """Whether it is an answer that can be continued: it ends in text and has no calls."""
        last = self.content[-1] if self.content else None
        text = isinstance(last, TextPart) and not last.text.endswith((LEFT_OUT, EDGE))
        calls = any(isinstance(block, ToolUse) for block in self.content)
        return self.role == "assistant" and text and not calls


class Tool(Strict):
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json
    strict: bool = False
    defer_loading: bool = False

    @property
    def function(self) -> Json:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_defaults=True)
        return {**function, "parameters": self.input_schema}


def _hosted(tool: Any, info: ValidationInfo) -> Any:
    """The tool; for a tool of another server a deferred one, which no prompt has."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    content: Content | None = info.context
    if content is None or content.strict:
        return tool
    if not isinstance(kind, str) or kind.startswith(CLIENT_TOOLS):
        return tool
    content.left_out.append(f"tools[].{kind}")
    return {"name": kind, "input_schema": {}, "defer_loading": True}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    full_name: str = Field(default="", alias="name")
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    value: Json = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None


class Prompt(Body):
    """The body of POST /v1/messages/count_tokens."""

    system: Parts[TextPart] = []
    messages: Annotated[Many[Message], Field(min_length=1), READABLE]
    tools: Many[Annotated[Tool, BeforeValidator(_hosted)]] = []
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    thread: Json | None = None

    @property
    def parallel_tool_calls(self) -> bool:
        return not self.tool_choice.disable_parallel_tool_use

    @property
    def format(self) -> AnswerFormat | None:
        form = self.output_config.format
        if form is None:
            return None
        return AnswerFormat("output_config.format.schema", form.value)

    def functions(self, deferred: bool) -> list[Json]:
        """The tools in OpenAI's form. The prompt holds a deferred tool only where a tool result
        refers to it."""
        tools = [tool for tool in self.tools if tool.defer_loading == deferred]
        return [{"type": "function", "function": tool.function} for tool in tools]

    @property
    def choice(self) -> str | ToolChoice:
        """The tool choice of a ChatRequest."""
        kind = self.tool_choice.type
        if kind == "tool":
            return self.tool_choice
        return {"any": "required"}.get(kind, kind)


class Messages(Prompt, Common):
    """The body of POST /v1/messages."""

    n: Literal[1] = 1
    max_tokens: Count
    stop: Stops = Field([], validation_alias=AliasChoices("stop_sequences", "stop"))


def chat_messages(body: Prompt) -> list[Json]:
    """The messages in OpenAI's chat format. Tool results come before text of the same message: they
    belong to the calls of the message before."""
    tools = {tool.name: tool.function for tool in body.tools}
    turns = _system(body.system)
    for message in body.messages:
        if message.role == "system":
            turns += _system(message.content)
            continue
        text, thinking, calls = "", "", []
        for block in message.content:
            if isinstance(block, TextPart):
                text += block.text
            elif isinstance(block, Thought):
                thinking += block.thinking
            elif isinstance(block, ToolResult):
                turns.append(_result(block, tools))
            elif isinstance(block, ToolUse):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
        turn: Json = {"role": message.role, "content": text}
        if thinking:
            turn["reasoning_content"] = thinking
        if calls:
            turn["tool_calls"] = calls
        if {block.type for block in message.content} != {"tool_result"}:
            turns.append(turn)
    return turns


def _system(blocks: list[Any]) -> list[Json]:
    """A system message; none if no text remains, as of Claude Code's billing header."""
    text = "".join(BILLING.sub("", block.text) for block in blocks if isinstance(block, TextPart))
    return [{"role": "system", "content": text}] if text else []


def _result(block: ToolResult, tools: Json) -> Json:
    """The message of a tool. The first tool_reference to one of `tools` becomes its definition, a
    later one its name."""
    text = "Error: " if block.is_error else ""
    for part in block.content:
        if part.type == "text":
            text += part.text
        elif definition := tools.get(part.tool_name):
            tools[part.tool_name] = part.tool_name
            text += "You can call this tool from now on:\n"
            text += f"{json.dumps(definition, ensure_ascii=False)}\n"
        else:
            text += f"The tool {part.tool_name} is not available.\n"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


KINDS = {"content": "text", "reasoning": "thinking", "call": "tool_use"}
# The first fields of a block in a stream, by its type.
EMPTY: dict[str, Json] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
SIGNATURE = "bWx4c3BlYw=="  # a placeholder: clients send reasoning back only with one


@dataclass
class MessageWriter(ResponseWriter):
    """The ResponseWriter of /v1/messages. The last block of `content` is open until the end."""

    id: str
    model: str
    content: list[Json] = field(default_factory=list)

    def opening(self, usage: Usage) -> bytes:
        """The usage counts the whole prompt: how much is cached is only known at the end."""
        message = self._message({"stop_reason": None, "stop_sequence": None}, usage)
        return typed_event("message_start", message=message) + self.keepalive()

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        data = b""
        for part in piece.parts:
            kind, call = KINDS[part.kind], part.call
            if part.opens or not self.content or self.content[-1]["type"] != kind:
                data += self._close()
                block = {"type": kind, **EMPTY[kind]}
                self.content.append(block)
                if call:
                    block |= {"id": call.id, "name": call.name}
                data += self._block_event("start", content_block=block)
                if call:  # a whole body has all of it here
                    block["input"] = as_object(call.arguments)
            if call:
                delta = {"type": "input_json_delta", "partial_json": part.text}
            else:
                delta = {"type": f"{kind}_delta", kind: part.text}
                self.content[-1][kind] += part.text
            data += self._block_event("delta", delta=delta)
        return data

    def keepalive(self) -> bytes:
        return typed_event("ping")

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        end = typed_event("message_delta", delta=_end(choices[0]), usage=usage_object(usage))
        return self._close() + end + typed_event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return typed_event("error", **error.body(anthropic=True))

    def body(self, choices: Choices, usage: Usage) -> Json:
        for part in choices[0].whole.parts:
            self.chunk(choices[0], Piece([part]))
        self._close()
        return self._message(_end(choices[0]), usage)

    def _message(self, end: Json, usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            **end,
            "usage": usage_object(usage),
        }

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self.content:
            return b""
        data = b""
        if self.content[-1]["type"] == "thinking":
            self.content[-1]["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            data = self._block_event("delta", delta=delta)
        return data + self._block_event("stop")

    def _block_event(self, kind: str, **fields: Json) -> bytes:
        return typed_event(f"content_block_{kind}", index=len(self.content) - 1, **fields)


def _end(choice: Choice) -> Json:
    reason, stopped = "end_turn", choice.stops.stopped
    if choice.finish == "length":
        reason = "max_tokens"
    elif choice.called:
        reason, stopped = "tool_use", None
    elif stopped:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped}


def usage_object(usage: Usage) -> Json:
    """`input_tokens` excludes cached tokens. Writing to the cache costs nothing."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
        **usage.loops_ended,
    }


THINKING = {"enabled": True, "disabled": False}  # other values leave it to the template


async def count_tokens(http: HttpRequest, body: Prompt, model: TextModel) -> Response:
    """The length of a message's prompt."""
    chat_request = await model.server.on_text_thread(_chat_request, body)
    count = await model.server.on_text_thread(prompt_length, model, chat_request)
    return JSONResponse({"input_tokens": count})


async def messages(http: HttpRequest, body: Messages, model: TextModel) -> Generation:
    writer = MessageWriter(f"msg_{secrets.token_hex(12)}", model.name)
    chat_request = await model.server.on_text_thread(_chat_request, body)
    return await respond(model, body, writer, prepare_chat, chat_request)


def _chat_request(body: Prompt) -> ChatRequest:
    """Raises ApiError."""
    if body.thread:
        details = {"error_code": "thread_unsupported_request"}  # the SDK then sends all messages
        why = "thread is not supported; leave it out and send the whole conversation"
        raise ApiError(400, why, "thread", details=details)
    return ChatRequest(
        chat_messages(body),
        body.functions(deferred=False),
        body.choice,
        deferred=body.functions(deferred=True),
        options={"enable_thinking": THINKING.get(body.thinking.type)},
        continued=body.messages[-1].open,
        budget=body.thinking.budget_tokens,
        images=body.seen_images,
    )


ENDPOINTS: Json = {
    "POST /v1/messages": endpoint(Messages, messages),
    "POST /v1/messages/count_tokens": endpoint(Prompt, count_tokens),
}
