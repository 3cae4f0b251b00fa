"""The body of POST /v1/responses: its fields, its input items as chat messages, its tools as chat
tools.

Rule: an item or a tool is used, or left out and reported in `x-mlxspec-ignored`, or refused.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlxspec.server.body import Many, Parts, Strict, invalid_value, validate
from mlxspec.server.chat_request import OBJECT, AnswerFormat
from mlxspec.server.content import READABLE
from mlxspec.server.errors import Json
from mlxspec.server.openai import schema as openai
from mlxspec.server.stream import call_object
from mlxspec.text.output_parser import Call

# Items of another server's hosted tools. They are left out of the prompt: the messages around them
# contain their results.
HOSTED_ITEMS = frozenset(
    "web_search_call file_search_call image_generation_call code_interpreter_call mcp_list_tools"
    " mcp_call mcp_approval_request mcp_approval_response tool_search_call"
    " tool_search_output".split(),
)
GAP = "\n\n"  # between two messages, or two summaries, that become one text


class TextFormat(openai.JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    format: TextFormat = TextFormat(type="text")


class Named(Strict):
    name: str
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """Its name in the prompt, which has no namespaces."""
        if self.namespace:
            return f"{self.namespace.rstrip('_')}__{self.name}"
        return self.name


class Tool(Named):
    """A tool, or a choice of one. `parameters` is the JSON schema of a function's arguments; a
    custom tool takes plain text instead, by the grammar in `format`."""

    type: Literal["function", "custom"]
    description: str = ""
    parameters: Json = {"type": "object", "properties": {}}
    strict: bool = False
    format: Json = {}

    @property
    def heading(self) -> "Tool":
        """The tool without the fields that only the prompt has."""
        return Tool(name=self.name, namespace=self.namespace, type=self.type)

    @property
    def definition(self) -> Json:
        """The tool in chat form."""
        parameters = self.parameters
        if self.type == "custom":
            description = "All of the tool's input, as plain text."
            if grammar := self.format.get("definition"):
                syntax = self.format.get("syntax")
                description += f" It must follow this {syntax} grammar:\n{grammar}"
            text = {"input": {"type": "string", "description": description}}
            parameters = {"type": "object", "properties": text, "required": ["input"]}
        function: Json = {"name": self.full_name, "description": self.description}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": {**function, "parameters": parameters}}


class Namespace(Strict):
    name: str
    tools: Many[Json]


def _message(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value


class Reasoning(openai.Reasoning):
    """`summary` has no effect: it is always all of the reasoning."""

    summary: str | None = None


class Create(openai.Common, openai.TemplateFields):
    n: Literal[1] = 1
    input: Annotated[Many[Json], Field(min_length=1), READABLE, BeforeValidator(_message)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: Json | None = None
    tools: Many[Json] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: Text = Text()

    @model_validator(mode="before")
    @classmethod
    def _only_allowed(cls, value: Any) -> Any:
        return openai.only_allowed(value)

    @property
    def format(self) -> AnswerFormat | None:
        form = self.text.format
        if form.type == "json_object":
            return AnswerFormat("text.format", OBJECT)
        if form.type == "json_schema":
            return AnswerFormat("text.format.schema", form.value)
        return None


def parse_tools(
    tools: Sequence[Json],
    ignored: list[str],
    at: str = "tools",
    namespace: str | None = None,
) -> dict[str, Tool]:
    """The tools of known types by full name; the types of others go to `ignored`. Raises
    ApiError."""
    by_name: dict[str, Tool] = {}
    for i, entry in enumerate(tools):
        here, kind = f"{at}[{i}]", entry.get("type")
        if kind == "namespace" and namespace is None:
            space = validate(Namespace, entry, here)
            by_name |= parse_tools(space.tools, ignored, f"{here}.tools", namespace=space.name)
        elif kind in ("function", "custom"):
            tool = validate(Tool, {**entry, "namespace": namespace}, here)
            by_name[tool.full_name] = tool
        elif not isinstance(kind, str):
            raise invalid_value(here, entry, "send a function, with type, name and parameters")
        else:
            ignored.append(f"tools[].{kind}")
    return by_name


class Part(Strict):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""


class Message(Strict):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts[Part]

    def chat(self) -> Json:
        return {"role": self.role, "content": _text(self.content)}


class ReasoningItem(Strict):
    summary: Parts[Part] = []
    content: Parts[Part] = []

    def chat(self) -> Json:
        text = _text(self.content or self.summary, GAP)
        return {"role": "assistant", "reasoning_content": text}


class ToolCall(Named):
    """A call of a function, with `arguments`, or of a custom tool, with `input`."""

    call_id: str
    arguments: str = ""
    input: str | None = None

    def chat(self) -> Json:
        arguments = self.arguments
        if self.input is not None:
            arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        call = Call(self.call_id, self.full_name, arguments)
        return {"role": "assistant", "tool_calls": [call_object(call)]}


class CallOutput(Strict):
    call_id: str
    output: Parts[Part]

    def chat(self) -> Json:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


ITEMS: Json = {
    "message": Message,
    "reasoning": ReasoningItem,
    "function_call": ToolCall,
    "custom_tool_call": ToolCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
}


def _text(parts: Sequence[Part], gap: str = "") -> str:
    return gap.join(part.text + part.refusal for part in parts)


def chat_messages(before: Sequence[Json], items: Sequence[Json], ignored: list[str]) -> list[Json]:
    """The items of earlier responses and of this request as chat messages; the types of those left
    out go to `ignored`. Consecutive items of the assistant become one message. Raises ApiError."""
    messages: list[Json] = []  # with the pieces of each field
    last = ""
    for i, item in enumerate([*before, *items], -len(before)):
        at, kind = f"input[{i}]", str(item.get("type") or "message")
        if kind in HOSTED_ITEMS:
            ignored.append(f"input[].{kind}")
            continue
        if kind not in ITEMS:
            raise invalid_value(at, item, "send messages, tool calls and their outputs")
        message = validate(ITEMS[kind], item, at).chat()
        key, value = message.popitem()
        if not (messages and messages[-1]["role"] == message["role"] == "assistant"):
            messages.append(message)
        pieces = messages[-1].setdefault(key, [])
        if key == "tool_calls":
            pieces += value
        elif value:
            pieces += [GAP, value] if pieces and key == last else [value]
        last = key
    for message in messages:
        for key in message.keys() & {"content", "reasoning_content"}:
            message[key] = "".join(message[key])
    return [turn for turn in messages if set(turn) != {"role", "reasoning_content"}]
