"""The body of POST /v1/responses: its fields, its input items as chat messages, its tools as chat
tools.

Rule: an item or a tool is used, or left out and reported in `x-mlxspec-ignored`, or refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mlxspec.server.ask import Format
from mlxspec.server.body import FIRST, MAX_ITEMS, Items, Refused, Strict
from mlxspec.server.errors import ApiError, unfit
from mlxspec.server.openai import schema as openai
from mlxspec.server.stream import Json
from mlxspec.types import shown

# Unsupported fields that would change the answer.
REFUSED: Refused = {
    **openai.RENDERING,
    "background": (False, "set stream to true and wait for the answer"),
    "conversation": (None, "send previous_response_id, or the conversation as input"),
    "messages": (None, "send them as input"),
    "prompt": (None, "send instructions and input"),
    "truncation": ("disabled", "shorten input"),
    "top_logprobs": (0, "send the request to /v1/chat/completions"),
    "response_format": (None, "send text.format"),
    "reasoning_effort": (None, "send reasoning.effort"),
    **dict.fromkeys(
        ("max_completion_tokens", "max_new_tokens"), (None, "send max_output_tokens instead")
    ),
}
# Items of hosted tools of another server. They are left out of the prompt: the messages around them
# tell their results.
HOSTED_ITEMS = frozenset(
    "web_search_call file_search_call image_generation_call code_interpreter_call mcp_list_tools"
    " mcp_call mcp_approval_request mcp_approval_response tool_search_call tool_search_output".split()
)
# Tools that the client's task depends on; other unknown tools are left out.
REFUSED_TOOLS = frozenset(
    "file_search mcp code_interpreter computer computer_use_preview local_shell shell"
    " apply_patch".split()
)
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
GAP = "\n\n"  # between two messages, or two summaries, that become one text


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    value: Any = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and not isinstance(self.value, dict | bool):
            raise ValueError("schema is missing; send a JSON schema")
        return self


class Text(Strict):
    format: TextFormat | None = None


def _message(value: Any) -> Any:
    return (
        [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value
    )


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
    max_output_tokens: openai.Count | None = None
    metadata: Json | None = None
    tools: Items = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    text: Text = Field(default_factory=Text)
    include: Annotated[list[str], FIRST] = []
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

    @property
    def limit(self) -> int | None:
        given = [x for x in (self.max_output_tokens, self.max_tokens) if x is not None]
        return min(given, default=None)


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
    pairs = list(_tools(body.tools, "tools", None, ignored))
    tools = [tool for tool, _ in pairs]
    choice, allowed = _choice(body.tool_choice, tools)
    by_name = {tool.name: tool for tool in tools} | {tool.full_name: tool for tool in tools}
    definitions = [definition for tool, definition in pairs if tool in allowed]
    return Toolbox(definitions, by_name, choice, ignored)


def _tools(
    tools: Sequence[Any], at: str, namespace: str | None, ignored: list[str]
) -> Iterator[tuple[Tool, Json]]:
    """Each tool with its definition in chat form; the types of unknown ones go to `ignored`."""
    for i, given in enumerate(tools):
        here = f"{at}[{i}]"
        kind = _string(given, "type", here)
        if kind == "namespace" and namespace is None:
            inner = given.get("tools")
            if not isinstance(inner, list):
                raise unfit(f"{here}.tools", f"{here}.tools = {shown(inner)}: send a list")
            yield from _tools(inner, f"{here}.tools", _string(given, "name", here), ignored)
        elif kind in ("function", "custom"):
            tool = Tool(_string(given, "name", here), namespace, kind == "custom")
            parameters = given.get("parameters") or {"type": "object", "properties": {}}
            function = {
                "name": tool.full_name,
                "description": given.get("description") or "",
                "parameters": _text_parameter(given) if tool.custom else parameters,
            }
            yield tool, {"type": "function", "function": function}
        elif kind in REFUSED_TOOLS:
            raise unfit(here, f"{here}.type = {kind!r}: run it yourself and send it as a function")
        else:
            ignored.append(f"tools[].{kind}")


def _text_parameter(tool: Json) -> Json:
    """The parameters of a custom tool: one text, with the grammar that it must follow, if any."""
    description = "All of the tool's input, as plain text."
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        syntax = form.get("syntax", "")
        description += f" It must follow this {syntax} grammar:\n{form['definition']}"
    text = {"type": "string", "description": description}
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def _choice(value: Any, tools: Sequence[Tool]) -> tuple[str | dict[str, str], Sequence[Tool]]:
    """The choice in chat form, and the tools that it allows."""
    if value in ("auto", "none", "required"):
        return value, tools
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return {"name": _chosen(value, tools, "tool_choice").full_name}, tools
    if kind == "allowed_tools" and isinstance(value.get("tools"), list):
        mode = value.get("mode", "auto")
        if mode not in ("auto", "required"):
            where = "tool_choice.mode"
            raise unfit(where, f"{where} = {shown(mode)}: send auto or required")
        allowed = enumerate(value["tools"])
        return mode, [_chosen(one, tools, f"tool_choice.tools[{i}]") for i, one in allowed]
    choices = "auto, none, required, or an object of type function, custom or allowed_tools"
    raise unfit("tool_choice", f"tool_choice = {shown(value)}: send {choices}")


def _chosen(value: Any, tools: Sequence[Tool], at: str) -> Tool:
    name, namespace = _string(value, "name", at), value.get("namespace")
    for tool in tools:
        if tool.name == name and namespace in (None, tool.namespace):
            return tool
    raise unfit(at, f"{at} = {shown(value)} is not in tools; send it there")


def chat_messages(before: Sequence[Json], items: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """The items of earlier responses and of this request as chat messages, and the types of those
    left out. Consecutive items of the assistant become one message. Raises ApiError."""
    messages: list[Json] = []
    ignored, last = [], ""
    for i, item in enumerate([*before, *items]):
        kind, message = _chat_message(item, f"input[{i - len(before)}]")
        if not kind:
            ignored.append(f"input[].{item['type']}")
            continue
        if not messages or not messages[-1]["role"] == message["role"] == "assistant":
            messages.append(message)
        elif kind == "tool_calls":
            messages[-1].setdefault(kind, []).extend(message[kind])
        else:
            text = messages[-1].get(kind, "")
            gap = GAP if kind == last and text else ""
            messages[-1][kind] = text + gap + message[kind]
        last = kind
    return [one for one in messages if set(one) != {"role", "reasoning_content"}], ignored


def _chat_message(item: Json, at: str) -> tuple[str, Json]:
    """The key of an item's content and the item as a chat message; "" if it is left out."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            where = f"{at}.role"
            raise unfit(
                where, f"{where} = {shown(role)}: send user, assistant, system or developer"
            )
        return "content", {"role": role, "content": _text(item.get("content"), f"{at}.content")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = _text(parts, f"{at}.summary", GAP)
        return "reasoning_content", {"role": "assistant", "reasoning_content": text}
    if kind in ("function_call", "custom_tool_call"):
        return "tool_calls", {"role": "assistant", "tool_calls": [_call(item, at)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.get("output"), f"{at}.output")
        id = _string(item, "call_id", at)
        return "content", {"role": "tool", "tool_call_id": id, "content": text}
    if isinstance(kind, str) and kind in HOSTED_ITEMS:
        return "", {}
    raise unfit(at, f"{at}.type = {shown(kind)}: send messages, tool calls and their outputs")


def _call(item: Json, at: str) -> Json:
    """A tool call in chat form; the text for a custom tool becomes its one argument."""
    namespace = _string(item, "namespace", at) if item.get("namespace") else None
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": _string(item, "input", at)}, ensure_ascii=False)
    else:
        arguments = _string(item, "arguments", at)
    name = Tool(_string(item, "name", at), namespace).full_name
    function = {"name": name, "arguments": arguments}
    return {"id": _string(item, "call_id", at), "type": "function", "function": function}


def _text(content: Any, at: str, gap: str = "") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unfit(at, f"{at} = {shown(content)}: send a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        here = f"{at}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise unfit(here, f"{here} = {shown(part)}: the model reads text only; send input_text")
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", here))
    return gap.join(texts)


def _string(value: Any, key: str, at: str) -> str:
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, str):
        raise unfit(f"{at}.{key}", f"{at}.{key} = {shown(found)}: send a string")
    return found


def missing(id: str, param: str | None = None) -> ApiError:
    """For a response, or an item of one, that is not stored."""
    message = (
        f"{param or 'id'} = {id[:200]!r} is not stored: it was created with store false, deleted, or"
        " evicted; send the conversation as input"
    )
    if param == "previous_response_id":
        return unfit(param, message, "previous_response_not_found")
    return ApiError(404, message, param=param, code="not_found")
