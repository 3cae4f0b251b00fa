"""The bodies of Anthropic's Messages API, and their conversation as OpenAI's chat messages.

Rule: one conversation has one form however it was spelled: texts are joined as they are, and what
is left out of one turn is left out of all later ones.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from mlxspec.server.body import (
    FIRST,
    MAX_ITEMS,
    TEXT_PART,
    Count,
    Refused,
    Stops,
    Strict,
)
from mlxspec.server.openai.schema import Common
from mlxspec.server.stream import Json
from mlxspec.text.messages import canonical

# Unsupported fields that would change the answer.
REFUSED: Refused = {
    "send max_tokens": {"max_new_tokens": None},
    "send output_config.format": {"response_format": None, "output_format": None},
    "send thinking": {"reasoning_effort": None, "reasoning": None, "enable_thinking": None},
    "send tools": {"functions": [], "mcp_servers": []},
    "nothing is executed here; leave it out": {"container": None},
    "send the request to /v1/chat/completions": {
        "grammar": None,
        "logprobs": False,
        "chat_template_kwargs": {},
    },
}
# The types of blocks, with the fields that each must have. A tool_reference stands for the
# definition of a deferred tool.
BLOCKS = {
    "text": {"text"},
    "thinking": {"thinking"},
    "redacted_thinking": set[str](),
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id"},
    "tool_reference": {"tool_name"},
}
# The types of blocks that a message of each role, or a tool result, may have.
ROLES = {
    "tool": {"text", "tool_reference"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}


class Block(Strict):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Json = Field(default_factory=dict)
    tool_use_id: str = ""
    tool_name: str = ""
    content: "Blocks" = Field(default_factory=list)  # of a tool result
    is_error: bool = False

    @model_validator(mode="after")
    def _complete(self) -> "Block":
        if self.type not in BLOCKS:
            raise ValueError("this type of block is not supported; the model reads text only")
        missing = BLOCKS[self.type] - self.model_fields_set
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        _check_types(self.content, "tool")
        return self


Blocks = Annotated[list[Block], FIRST, TEXT_PART]


def _check_types(blocks: Sequence[Block], role: str) -> None:
    for block in blocks:
        if block.type not in ROLES[role]:
            raise ValueError(f"a block of type {block.type} cannot be here; send text")


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _fits_role(self) -> "Message":
        _check_types(self.content, self.role)
        return self


class Tool(Strict):
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json
    defer_loading: bool = False

    @property
    def function(self) -> Json:
        described = {"description": self.description} if self.description is not None else {}
        return {"name": self.name, **described, "parameters": self.input_schema}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class Format(Strict):
    type: Literal["json_schema"]
    value: Json = Field(alias="schema")


class OutputConfig(Strict):
    format: Format | None = None


class Prompt(Strict):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    system: Blocks = Field(default_factory=list)
    messages: Annotated[list[Message], FIRST, Field(min_length=1, max_length=MAX_ITEMS)]
    tools: Annotated[list[Tool], FIRST, Field(default_factory=list, max_length=MAX_ITEMS)]
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @property
    def parallel_tool_calls(self) -> bool:
        return not self.tool_choice.disable_parallel_tool_use

    def functions(self, deferred: bool) -> list[Json]:
        """The tools in OpenAI's form. The prompt holds a deferred tool only where a tool result
        refers to it."""
        tools = [tool for tool in self.tools if tool.defer_loading == deferred]
        return [{"type": "function", "function": tool.function} for tool in tools]

    @property
    def choice(self) -> str | Mapping[str, str]:
        """The tool choice of a ChatRequest."""
        kind, name = self.tool_choice.type, self.tool_choice.name
        if kind == "tool":
            return {"name": name}
        return "required" if kind == "any" else kind


class Messages(Prompt, Common):
    """The body of POST /v1/messages."""

    refused: ClassVar[Refused] = REFUSED
    alternatives: ClassVar[None] = None  # no log-probabilities

    n: Literal[1] = 1
    max_tokens: Count
    stop: Stops = Field(default=[], validation_alias=AliasChoices("stop_sequences", "stop"))

    @field_validator("messages")
    @classmethod
    def _last(cls, value: list[Message]) -> list[Message]:
        if value[-1].role == "assistant":
            raise ValueError("an answer cannot be continued; end with a user message")
        return value


def chat_messages(body: Prompt) -> list[Json]:
    tools = {tool.name: tool.function for tool in body.tools}
    made = _system(body.system)
    for message in body.messages:
        if message.role == "user":
            made += _user(message.content, tools)
        elif message.role == "assistant":
            made.append(_assistant(message.content))
        else:
            made += _system(message.content)
    return made


def _text(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks)


def _system(blocks: Sequence[Block]) -> list[Json]:
    """Empty if nothing is left of the text, as of Claude Code's billing header."""
    parts = [{"type": "text", "text": block.text} for block in blocks]
    made = canonical([{"role": "system", "content": parts}])
    return made if made[0]["content"] else []


def _user(blocks: Sequence[Block], tools: Mapping[str, Json]) -> list[Json]:
    """Tool results come first: they belong to the calls of the message before."""
    made = []
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        text = "".join(_result(part, tools) for part in block.content)
        if block.is_error:
            text = f"Error: {text}"
        made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if not made or len(results) < len(blocks):
        made.append({"role": "user", "content": _text(blocks)})
    return made


def _result(block: Block, tools: Mapping[str, Json]) -> str:
    """A block of a tool result as text; for a tool_reference, the tool's definition."""
    if block.type == "text":
        return block.text
    if block.tool_name not in tools:
        return f"The tool {block.tool_name} is not available.\n"
    definition = json.dumps(tools[block.tool_name], ensure_ascii=False)
    return f"You can call this tool from now on:\n{definition}\n"


def _assistant(blocks: Sequence[Block]) -> Json:
    message: Json = {"role": "assistant", "content": _text(blocks)}
    if thinking := "".join(block.thinking for block in blocks):
        message["reasoning_content"] = thinking
    calls = [block for block in blocks if block.type == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in calls
        ]
    return message
