"""The bodies of Anthropic's Messages API, and their conversation as OpenAI's chat messages.

Rule: one conversation has one form however it was spelled: texts are joined as they are, and what
is left out of one turn is left out of all later ones.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from mlxspec.server.body import FIRST, MAX_ITEMS, Fraction, Items, Refused, Stops, Strict
from mlxspec.server.errors import unfit
from mlxspec.server.stream import Json
from mlxspec.text.messages import canonical
from mlxspec.types import shown

AT_CHAT = "send the request to /v1/chat/completions, which takes it"
FORMAT = "send output_config.format instead"
REASONING = ("reasoning_effort", "reasoning", "enable_thinking")
# Unsupported fields that would change the answer.
REFUSED: Refused = {
    "stop": (None, "send stop_sequences instead"),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), (None, "send max_tokens instead")),
    **dict.fromkeys(("response_format", "output_format"), (None, FORMAT)),
    **dict.fromkeys(REASONING, (None, "send thinking instead")),
    "functions": ([], "send them as tools"),
    "parallel_tool_calls": (True, "send tool_choice.disable_parallel_tool_use instead"),
    "mcp_servers": ([], "connect the client to them and send their tools"),
    "container": (None, "nothing is executed here; leave it out"),
    "n": (1, AT_CHAT),
    "repetition_penalty": (1, AT_CHAT),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (0, AT_CHAT)),
    **dict.fromkeys(("logprobs", "ignore_eos"), (False, AT_CHAT)),
    **dict.fromkeys(
        ("seed", "grammar", "logit_bias", "stop_token_ids", "chat_template_kwargs"), (None, AT_CHAT)
    ),
}
# The fields that a block of each type must have. A tool_reference stands for the definition of a
# deferred tool.
BLOCKS: dict[str, Mapping[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "tool_reference": {"tool_name": str},
}
# The types of blocks that a message of each role may have.
ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


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
    name: str | None = None
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
    system: Any = ""
    messages: Annotated[Items, Field(min_length=1)]
    tools: Annotated[list[Tool], FIRST, Field(max_length=MAX_ITEMS)] = []
    tool_choice: ToolChoice = Field(default_factory=ToolChoice)
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)

    def functions(self, deferred: bool) -> list[Json]:
        """The tools in OpenAI's form. The prompt holds a deferred tool only where a tool result
        refers to it."""
        return [
            {"type": "function", "function": tool.function}
            for tool in self.tools
            if tool.defer_loading == deferred
        ]

    @property
    def choice(self) -> Any:
        """The tool choice in OpenAI's form."""
        kind = self.tool_choice.type
        if kind == "tool":
            return {"name": self.tool_choice.name or ""}
        return "required" if kind == "any" else kind


class Messages(Prompt):
    """The body of POST /v1/messages."""

    refused: ClassVar[Refused] = REFUSED

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Stops = []
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Fraction | None = None

    @field_validator("messages")
    @classmethod
    def _last(cls, value: list[Any]) -> list[Any]:
        if isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
            raise ValueError("an answer cannot be continued; end with a user message")
        return value


def chat_messages(body: Prompt) -> list[Json]:
    """Raises ApiError."""
    tools = {tool.name: tool.function for tool in body.tools}
    made = _system(_blocks(body.system, "system", ROLES["system"]))
    for i, message in enumerate(body.messages):
        at = f"messages[{i}]"
        role: Any = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise unfit(f"{at}.role", f"{at}.role = {shown(role)}: send one of {', '.join(ROLES)}")
        blocks = _blocks(message.get("content"), f"{at}.content", ROLES[role])
        if role == "user":
            made += _user(blocks, f"{at}.content", tools)
        elif role == "assistant":
            made.append(_assistant(blocks))
        else:
            made += _system(blocks)
    return made


def _blocks(value: Any, at: str, types: Sequence[str]) -> list[Json]:
    """A list of blocks of these types; a string becomes a text block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise unfit(at, f"{at} = {shown(value)}: send a string or a list of blocks")
    for i, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in types:
            where = f"{at}[{i}].type"
            expected = " or ".join(types)
            raise unfit(where, f"{where} = {shown(kind)} is not supported here; send {expected}")
        for name, wanted in BLOCKS[kind].items():
            if not isinstance(block.get(name), wanted):
                where = f"{at}[{i}].{name}"
                what = "an object" if wanted is dict else "a string"
                raise unfit(where, f"{where} = {shown(block.get(name))}: send {what}")
    return value


def _text(blocks: Sequence[Json], kind: str = "text") -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def _system(blocks: list[Json]) -> list[Json]:
    """Empty if nothing is left of the text, as of Claude Code's billing header."""
    parts = [{"type": "text", "text": block["text"]} for block in blocks]
    made = canonical([{"role": "system", "content": parts}])
    return made if made[0]["content"] else []


def _user(blocks: list[Json], at: str, tools: Mapping[str, Json]) -> list[Json]:
    """Tool results come first: they belong to the calls of the message before."""
    made = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            types = ("text", "tool_reference")
            content = _blocks(block.get("content") or "", f"{at}[{i}].content", types)
            text = "".join(_result(part, tools) for part in content)
            if block.get("is_error"):
                text = f"Error: {text}"
            made.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    if not made or any(block["type"] == "text" for block in blocks):
        made.append({"role": "user", "content": _text(blocks)})
    return made


def _result(block: Json, tools: Mapping[str, Json]) -> str:
    """A block of a tool result as text; for a tool_reference, the tool's definition."""
    if block["type"] == "text":
        return str(block["text"])
    name = block["tool_name"]
    if name not in tools:
        return f"The tool {name} is not available.\n"
    return f"You can call this tool from now on:\n{json.dumps(tools[name], ensure_ascii=False)}\n"


def _assistant(blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": _text(blocks)}
    if thinking := _text(blocks, "thinking"):
        message["reasoning_content"] = thinking
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json) -> Json:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}
