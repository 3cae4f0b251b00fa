"""The bodies of Anthropic's Messages API, and their conversation as OpenAI's chat messages.

Rule: one conversation has one form however it was spelled: texts are joined as they are, and what
is left out of one turn is left out of all later ones.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo

from mlxspec.server.body import FIRST, MAX_ITEMS, TEXT_PART, Count, Stops, Strict
from mlxspec.server.chat_request import Format
from mlxspec.server.content import LEFT_OUT, READABLE
from mlxspec.server.errors import Json
from mlxspec.server.openai.schema import Budget, Common, TextPart
from mlxspec.text.messages import BILLING

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
    content: Annotated[list[ResultPart], FIRST, TEXT_PART] = Field([])
    is_error: bool = False


Block = Annotated[
    TextPart | Thought | RedactedThought | ToolUse | ToolResult, Field(discriminator="type")
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FIRST, TEXT_PART]

    @property
    def open(self) -> bool:
        """Whether it is an answer that can be continued: it ends in text, and calls nothing."""
        last = self.content[-1] if self.content else None
        text = isinstance(last, TextPart) and not last.text.endswith(LEFT_OUT)
        calls = any(isinstance(block, ToolUse) for block in self.content)
        return self.role == "assistant" and text and not calls


class Tool(Strict):
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json
    defer_loading: bool = False

    @property
    def function(self) -> Json:
        function = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {**function, "parameters": self.input_schema}


def _hosted(tool: Any, info: ValidationInfo) -> Any:
    """A tool; in the place of another server's a deferred one, which no prompt has."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if info.context is None or not isinstance(kind, str) or kind.startswith(CLIENT_TOOLS):
        return tool
    info.context.append(f"tools[].{kind}")
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


class Prompt(Strict):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    system: Annotated[list[TextPart], FIRST, TEXT_PART] = Field([])
    messages: Annotated[list[Message], FIRST, Field(min_length=1, max_length=MAX_ITEMS), READABLE]
    tools: Annotated[list[Annotated[Tool, BeforeValidator(_hosted)]], FIRST] = Field(
        [], max_length=MAX_ITEMS
    )
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    thread: Json | None = None

    @property
    def parallel_tool_calls(self) -> bool:
        return not self.tool_choice.disable_parallel_tool_use

    @property
    def format(self) -> Format | None:
        form = self.output_config.format
        if form is None:
            return None
        return Format("output_config.format.schema", form.value)

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
    stop: Stops = Field(default=[], validation_alias=AliasChoices("stop_sequences", "stop"))


def chat_messages(body: Prompt) -> list[Json]:
    """Of tool results and text in one message, the results come first: they belong to the calls of
    the message before."""
    tools = {tool.name: tool.function for tool in body.tools}
    made = _system(body.system)
    for message in body.messages:
        if message.role == "system":
            made += _system(message.content)
            continue
        text, thinking, calls = "", "", []
        for block in message.content:
            if isinstance(block, TextPart):
                text += block.text
            elif isinstance(block, Thought):
                thinking += block.thinking
            elif isinstance(block, ToolResult):
                made.append(_result(block, tools))
            elif isinstance(block, ToolUse):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
        turn: Json = {"role": message.role, "content": text}
        if thinking:
            turn["reasoning_content"] = thinking
        if calls:
            turn["tool_calls"] = calls
        if {block.type for block in message.content} != {"tool_result"}:
            made.append(turn)
    return made


def _system(blocks: list[Any]) -> list[Json]:
    """Empty if nothing is left of the text, as of Claude Code's billing header."""
    text = "".join(BILLING.sub("", each.text) for each in blocks if isinstance(each, TextPart))
    return [{"role": "system", "content": text}] if text else []


def _result(block: ToolResult, tools: Json) -> Json:
    """The message of a tool. A tool_reference in it becomes the definition of the tool, the first
    of several to one of `tools`."""
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
