"""What Anthropic's Messages endpoints take, and the same conversation as OpenAI's chat messages and
tools.

Rule: as for chat, nothing is silently ignored. One conversation has one form however it was
spelled: texts are joined as they are, and what was left out once is left out in every later turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from mlxspec.server import fields
from mlxspec.server.errors import unfit
from mlxspec.server.fields import MAX_ITEMS, MAX_STOPS, Refusals, stops
from mlxspec.server.openai import schema
from mlxspec.server.openai.schema import FIRST, Fraction, Items, Strict
from mlxspec.text.messages import canonical
from mlxspec.types import shown

Json = dict[str, Any]

# Accepted without effect: by name where that means the same everywhere, else by path.
HARMLESS = {
    "cache_control": "the prefix cache finds shared prompts by itself",
    "citations": "documents are not read, so nothing is cited",
    "metadata": "who asks makes no difference here",
    "service_tier": "there is one tier",
    "context_management": "the client keeps the context; nothing of it is cleared here",
    "thinking.budget_tokens": "the model ends its reasoning by itself; max_tokens is for all of an answer",
    "thinking.display": "reasoning is always shown, because the next turn's prompt repeats it",
    "output_config.effort": "how much a model thinks is its own",
    "tools[].eager_input_streaming": "a call is sent when it is complete",
    "tools[].strict": "the model's call is sent as it is; its input is always an object",
    "messages[].content[].signature": "reasoning is not signed here",
    "messages[].content[].data": "redacted reasoning cannot be read; its block is left out of the prompt",
    "messages[].content[].caller": "all calls are the model's",
}
AT_CHAT = "send the request to /v1/chat/completions, which takes it"
# Would change the answer, and this API has no such field: the values that ask for nothing, and the
# mend.
REFUSED: Refusals = {
    **fields.REFUSED,
    **dict.fromkeys(schema.Chat.model_fields, ((), AT_CHAT)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ((0, 0.0), AT_CHAT)),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), ((), "send max_tokens instead")),
    "n": ((1,), AT_CHAT),
    "logprobs": ((False,), AT_CHAT),
    "stop": ((), "send stop_sequences instead"),
    "parallel_tool_calls": ((True,), "send tool_choice.disable_parallel_tool_use instead"),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tool_choice instead"),
    **dict.fromkeys(
        ("response_format", "output_format"), ((), "send output_config.format instead")
    ),
    **dict.fromkeys(
        ("reasoning_effort", "reasoning", "enable_thinking"), ((), "send thinking instead")
    ),
    "mcp_servers": (([],), "connect the client to them and send their tools"),
    "container": ((), "nothing is executed here; leave it out"),
}
BLOCKS: dict[str, Mapping[str, type]] = {  # the fields that each kind of block must have
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "tool_reference": {"tool_name": str},  # stands for the definition of a deferred tool
}
IN_RESULT = ("text", "tool_reference")
SAYS = {  # what each role may say
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
INDEX = re.compile(r"\[\d+\]")


class Tool(Strict):
    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json
    defer_loading: bool | None = None

    @field_validator("type")
    @classmethod
    def _custom(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError(
                "is a tool of Anthropic's, unknown here; send a custom tool with input_schema"
            )
        return value

    @property
    def function(self) -> Json:
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.input_schema}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class Format(Strict):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    format: Format | None = None


class Prompt(Strict):
    """What POST /v1/messages/count_tokens counts."""

    refuses: ClassVar[Refusals] = REFUSED

    model: str | None = None
    system: Any = None
    messages: Annotated[Items, Field(min_length=1)]
    tools: Annotated[list[Tool], FIRST, Field(default_factory=list, max_length=MAX_ITEMS)]
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("tools")
    @classmethod
    def _once(cls, value: list[Tool]) -> list[Tool]:
        names = [tool.name for tool in value]
        if len(names) > len(set(names)):
            raise ValueError("holds a name twice; send each tool once")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _there(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        names = {tool.name for tool in info.data.get("tools", ()) if not tool.defer_loading}
        kind = value and value.type
        if (kind == "any" and not names) or (kind == "tool" and value and value.name not in names):
            raise ValueError(
                "asks for a tool that is not in tools, or is deferred; send it, or leave this out"
            )
        return value

    @property
    def functions(self) -> list[Json]:
        """OpenAI's tools. A deferred one is told where a result refers to it, so that all before it
        stays."""
        return [
            {"type": "function", "function": t.function} for t in self.tools if not t.defer_loading
        ]

    @property
    def deferred(self) -> list[Json]:
        return [{"type": "function", "function": t.function} for t in self.tools if t.defer_loading]

    @property
    def choice(self) -> Any:
        """As a `ChatRequest` has it."""
        if self.tool_choice is None:
            return "auto"
        kind = self.tool_choice.type
        return (
            {"name": self.tool_choice.name}
            if kind == "tool"
            else "required"
            if kind == "any"
            else kind
        )

    @property
    def single(self) -> bool:
        return bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class Messages(Prompt):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[
        list[str], FIRST, Field(default_factory=list, max_length=MAX_STOPS), AfterValidator(stops)
    ]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Fraction | None = None

    @field_validator("messages")
    @classmethod
    def _to_answer(cls, value: list[Any]) -> list[Any]:
        if isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
            raise ValueError(
                "ends with the assistant's: an answer cannot be begun here; end with the user's"
            )
        return value


Body = TypeVar("Body", bound="Prompt")


def parsed(kind: type[Body], data: bytes) -> tuple[Body, list[Json], list[str]]:
    """The checked body, its conversation as OpenAI's chat messages, and the paths of the fields
    that nobody knows. Raises ApiError 400."""
    body, unknown = schema.parse(kind, data)
    ignored = [
        name for name in unknown if name in (body.model_extra or ())
    ]  # inside, our names hold
    messages = chat_messages(body, ignored)
    inner = [(tool, "tools[]") for tool in body.tools]
    inner += [(getattr(body, at), at) for at in ("tool_choice", "thinking", "output_config")]
    ignored += [f"{at}.{name}" for some, at in inner if some for name in some.model_extra or ()]
    known = {
        name for name in ignored if not HARMLESS.keys().isdisjoint((name, name.rpartition(".")[2]))
    }
    return body, messages, [name for name in dict.fromkeys(ignored) if name not in known]


# ---- messages
# -------------------------------------------------------------------------------------------


def chat_messages(body: Prompt, ignored: list[str]) -> list[Json]:
    """Adds to `ignored` the paths of the fields that are not looked at. Raises ApiError."""
    tools = {tool.name: tool.function for tool in body.tools}
    made = (
        [] if body.system is None else _system(_blocks(body.system, "system", ("text",), ignored))
    )
    for i, message in enumerate(body.messages):
        at = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in tuple(SAYS):
            raise unfit(
                f"{at}.role",
                f"{at}.role = {shown(role)} is no role; send user, assistant or system",
            )
        _report(message, ("role", "content"), at, ignored)
        said = _blocks(message.get("content"), f"{at}.content", SAYS[role], ignored)
        if role == "user":
            made += _user(said, f"{at}.content", tools, ignored)
        else:
            made += _assistant(said) if role == "assistant" else _system(said)
    return made


def _blocks(value: Any, at: str, kinds: Sequence[str], ignored: list[str]) -> list[Json]:
    """Blocks of these kinds; a string is one of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise unfit(
            at, f"{at} = {shown(value)} is neither a string nor a list of blocks; send one of these"
        )
    for i, block in enumerate(value):
        here = f"{at}[{i}]"
        kind: Any = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise unfit(
                f"{here}.type",
                f"{here}.type = {shown(kind)} is not supported here: the model reads text only; send"
                f" {' or '.join(kinds)}",
            )
        for name, wanted in BLOCKS[kind].items():
            if not isinstance(block.get(name), wanted):
                what = "an object" if wanted is dict else "a string"
                raise unfit(
                    f"{here}.{name}", f"{here}.{name} = {shown(block.get(name))}: send {what}"
                )
        more = ("content", "is_error") if kind == "tool_result" else ()
        _report(block, ("type", *BLOCKS[kind], *more), here, ignored)
    return value


def _report(given: Json, known: Sequence[str], at: str, ignored: list[str]) -> None:
    ignored += [f"{INDEX.sub('[]', at)}.{name}" for name in given if name not in known]


def _text(blocks: Sequence[Json], kind: str = "text") -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def _system(blocks: list[Json]) -> list[Json]:
    """Nothing where nothing is left of it, as of Claude Code's billing header."""
    made = canonical(
        [{"role": "system", "content": [{"type": "text", "text": b["text"]} for b in blocks]}]
    )
    return made if made[0]["content"] else []


def _user(blocks: list[Json], at: str, tools: Mapping[str, Json], ignored: list[str]) -> list[Json]:
    """Results first: they belong to the calls before them."""
    made = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            content = [] if block.get("content") is None else block["content"]
            inner = _blocks(content, f"{at}[{i}].content", IN_RESULT, ignored)
            text = "".join(
                b["text"] if "text" in b else _defined(b["tool_name"], tools) for b in inner
            )
            text = f"Error: {text}" if block.get("is_error") else text
            made.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    says = [block for block in blocks if block["type"] == "text"]
    return [*made, {"role": "user", "content": _text(says)}] if says or not made else made


def _defined(name: str, tools: Mapping[str, Json]) -> str:
    """A deferred tool, for the text of a result."""
    if name not in tools:
        return f"The tool {name} is not available.\n"
    return f"You can call this tool from now on:\n{json.dumps(tools[name], ensure_ascii=False)}\n"


def _assistant(blocks: list[Json]) -> list[Json]:
    made: Json = {"role": "assistant", "content": _text(blocks)}
    if thought := _text(blocks, "thinking"):
        made["reasoning_content"] = thought
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        made["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["input"]},
            }
            for call in calls
        ]
    return [made]
