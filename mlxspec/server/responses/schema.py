"""The body of POST /v1/responses: its fields, its input items as chat messages, its tools as chat
tools.

Rule: an item or a tool is used, or left out and reported in `x-mlxspec-ignored`, or refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from mlxspec.server.body import FIRST, MAX_ITEMS, TEXT_PART, Items, Refused, Strict, validate, wrong
from mlxspec.server.chat_request import Format
from mlxspec.server.openai import schema as openai
from mlxspec.server.stream import Json

# Unsupported fields that would change the answer.
REFUSED: Refused = {
    **openai.RENDERING,
    "set stream to true and wait for the answer": {"background": False},
    "send previous_response_id, or the conversation as input": {
        "conversation": None,
        "messages": [],
    },
    "send instructions and input": {"prompt": None},
    "shorten input": {"truncation": "disabled"},
    "send the request to /v1/chat/completions": {"top_logprobs": 0, "logprobs": False},
    "send text.format": {"response_format": None},
    "send reasoning.effort": {"reasoning_effort": None},
    "send max_output_tokens": {"max_new_tokens": None},
}
# Items of hosted tools of another server. They are left out of the prompt: the messages around them
# tell their results.
HOSTED_ITEMS = frozenset(
    "web_search_call file_search_call image_generation_call code_interpreter_call mcp_list_tools"
    " mcp_call mcp_approval_request mcp_approval_response tool_search_call"
    " tool_search_output".split()
)
# Tools that the client's task depends on; other unknown tools are left out.
HOSTED_TOOLS = frozenset(
    "file_search mcp code_interpreter computer computer_use_preview local_shell shell"
    " apply_patch".split()
)
GAP = "\n\n"  # between two messages, or two summaries, that become one text


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(openai.JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    format: TextFormat | None = None


def _message(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value


class Create(openai.Common):
    refused: ClassVar[Refused] = REFUSED
    alternatives: ClassVar[None] = None  # no log-probabilities

    n: Literal[1] = 1
    input: Annotated[
        list[Json], FIRST, Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(_message)
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    metadata: Json | None = None
    tools: Annotated[Items, Field(default_factory=list)]
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: Text = Text()
    include: Annotated[list[str], FIRST, Field(default_factory=list)]
    chat_template_kwargs: Json | None = None

    @field_validator("include")
    @classmethod
    def _no_logprobs(cls, value: list[str]) -> list[str]:
        if "message.output_text.logprobs" in value:
            raise ValueError("send the request to /v1/chat/completions for log-probabilities")
        return value

    @property
    def format(self) -> Format | None:
        given = self.text.format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return Format("object", "text.format")
        return Format("schema", "text.format.schema", given.value)


class FunctionTool(Strict):
    """`parameters` is the JSON schema of a function's arguments; a custom tool takes plain text
    instead, by the grammar in `format`."""

    type: str
    name: str
    description: str = ""
    parameters: Json = Field(default_factory=lambda: {"type": "object", "properties": {}})
    format: Json = Field(default_factory=dict)

    @property
    def arguments(self) -> Json:
        if self.type == "function":
            return self.parameters
        description = "All of the tool's input, as plain text."
        if grammar := self.format.get("definition"):
            syntax = self.format.get("syntax")
            description += f" It must follow this {syntax} grammar:\n{grammar}"
        text = {"type": "string", "description": description}
        return {"type": "object", "properties": {"input": text}, "required": ["input"]}


class Namespace(Strict):
    name: str
    tools: Items


class NamedTool(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Strict):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], FIRST]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False  # takes plain text, not JSON

    @property
    def full_name(self) -> str:
        """Its name in the prompt, which has no namespaces."""
        return f"{self.namespace.rstrip('_')}__{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools and the tool choice in chat form; `by_name` has each tool by its full name, and by
    its own name where no other tool has that as its full name."""

    definitions: list[Json]
    by_name: Mapping[str, Tool]
    choice: str | Mapping[str, str]
    ignored: list[str]


def toolbox(body: Create) -> Toolbox:
    """Raises ApiError."""
    ignored: list[str] = []
    definitions = dict(_tools(body.tools, "tools", None, ignored))
    by_name = {tool.name: tool for tool in definitions}
    by_name |= {tool.full_name: tool for tool in definitions}
    choice, allowed = _choice(body.tool_choice, list(definitions))
    shown = [definition for tool, definition in definitions.items() if tool in allowed]
    return Toolbox(shown, by_name, choice, ignored)


def _tools(
    tools: Sequence[Any], at: str, namespace: str | None, ignored: list[str]
) -> Iterator[tuple[Tool, Json]]:
    """Each tool with its definition in chat form; the types of unknown ones go to `ignored`."""
    for i, given in enumerate(tools):
        here = f"{at}[{i}]"
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "namespace" and namespace is None:
            space = validate(Namespace, given, here)
            yield from _tools(space.tools, f"{here}.tools", space.name, ignored)
        elif kind in ("function", "custom"):
            function = validate(FunctionTool, given, here)
            tool = Tool(function.name, namespace, kind == "custom")
            definition = {
                "name": tool.full_name,
                "description": function.description,
                "parameters": function.arguments,
            }
            yield tool, {"type": "function", "function": definition}
        elif not isinstance(kind, str) or kind in HOSTED_TOOLS:
            raise wrong(here, given, "run the tool yourself and send it as a function")
        else:
            ignored.append(f"tools[].{kind}")


def _choice(value: Any, tools: Sequence[Tool]) -> tuple[str | Mapping[str, str], Sequence[Tool]]:
    """The choice in chat form, and the tools that it allows."""
    if value in ("auto", "none", "required"):
        return value, tools
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = validate(AllowedTools, value, "tool_choice")
        return allowed.mode, [_chosen(one, tools) for one in allowed.tools]
    chosen = _chosen(validate(NamedTool, value, "tool_choice"), tools)
    return {"name": chosen.full_name}, tools


def _chosen(choice: NamedTool, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool.name == choice.name and choice.namespace in (None, tool.namespace):
            return tool
    raise wrong("tool_choice", choice.name, "is not in tools; send it there")


class Part(Strict):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""


OutputParser = Annotated[list[Part], FIRST, TEXT_PART]


class Message(Strict):
    role: Literal["user", "assistant", "system", "developer"]
    content: OutputParser

    def chat(self) -> tuple[str, Json]:
        return "content", {"role": self.role, "content": _text(self.content)}


class ReasoningItem(Strict):
    summary: Annotated[OutputParser, Field(default_factory=list)]
    content: Annotated[OutputParser, Field(default_factory=list)]

    def chat(self) -> tuple[str, Json]:
        text = _text(self.content or self.summary, GAP)
        return "reasoning_content", {"role": "assistant", "reasoning_content": text}


class FunctionCall(Strict):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def chat(self) -> tuple[str, Json]:
        name = Tool(self.name, self.namespace).full_name
        function = {"name": name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return "tool_calls", {"role": "assistant", "tool_calls": [call]}


class CustomCall(FunctionCall):
    arguments: str = ""
    input: str

    def chat(self) -> tuple[str, Json]:
        self.arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return FunctionCall.chat(self)


class CallOutput(Strict):
    call_id: str
    output: OutputParser

    def chat(self) -> tuple[str, Json]:
        text = _text(self.output)
        return "content", {"role": "tool", "tool_call_id": self.call_id, "content": text}


ITEMS: dict[Any, type[Message | ReasoningItem | FunctionCall | CallOutput]] = {
    "message": Message,
    "reasoning": ReasoningItem,
    "function_call": FunctionCall,
    "custom_tool_call": CustomCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
}


def _text(parts: Sequence[Part], gap: str = "") -> str:
    return gap.join(part.text + part.refusal for part in parts)


def chat_messages(before: Sequence[Json], items: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """The items of earlier responses and of this request as chat messages, and the types of those
    left out. Consecutive items of the assistant become one message. Raises ApiError."""
    messages: list[Json] = []
    ignored, last = [], ""
    for i, item in enumerate([*before, *items]):
        at, kind = f"input[{i - len(before)}]", str(item.get("type") or "message")
        if kind in HOSTED_ITEMS:
            ignored.append(f"input[].{kind}")
            continue
        if kind not in ITEMS:
            raise wrong(at, item, "send messages, tool calls and their outputs")
        key, message = validate(ITEMS[kind], item, at).chat()
        if not messages or not messages[-1]["role"] == message["role"] == "assistant":
            messages.append(message)
        elif key == "tool_calls":
            messages[-1][key] = [*messages[-1].get(key, ()), *message[key]]
        else:
            text = messages[-1].get(key, "")
            gap = GAP if key == last and text else ""
            messages[-1][key] = text + gap + message[key]
        last = key
    return [one for one in messages if set(one) != {"role", "reasoning_content"}], ignored
