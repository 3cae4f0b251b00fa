"""The canonical form of conversations: OpenAI's chat messages, each with a known role and a string.

A conversation has one form however it was spelled, and is rewritten only where the model's template
refuses it or knows no tools, always in the same way: a turn's tokens must not depend on later ones.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mlxspec.types import InvalidRequest, shown

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = ("name", "reasoning_content", "tool_call_id")  # besides role and content

# Claude Code's first system text: a hash of the first user message, for another server's bill. It
# changes with every conversation, so nothing behind it could be in the prefix cache.
BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")

# For models whose template says nothing of tools: the format of Hermes and Qwen.
TOOLS_FOLLOW = "You can call these tools, each a JSON object on its line:"
HOW_TO_CALL = (
    "To call one, write its name and arguments as JSON between tags, and nothing after the last"
    " call:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)

VALUE_TYPES = {str: "string", type(None): "null"}  # those that text can be mistaken for


class Refused(InvalidRequest):
    """A request that cannot be answered. `field` is its path in the request: "messages[2].role";
    `code` is for programs."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class TooLong(Refused):
    """A text of about so many `tokens`."""

    def __init__(self, field: str, tokens: int, message: str) -> None:
        super().__init__(field, message, "context_length_exceeded")
        self.tokens = tokens


def canonical(messages: Sequence[Any]) -> Messages:
    """Messages with a known role and a string as content. Raises Refused for what this server
    cannot read."""
    if not messages:
        raise Refused("messages", "messages = []: send one message at least")
    made: Messages = []
    for i, message in enumerate(messages):
        turn = _message(message, f"messages[{i}]")
        last = made[-1] if made else {}
        split = turn.get("tool_calls") and not turn["content"] and not last.get("tool_calls")
        if split and turn["role"] == last.get("role") == "assistant":
            made[-1] = _joined(last, turn)  # goose sends one reply as two messages
        else:
            made.append(turn)
    return made


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Refused(at, f"{at} = {shown(message)} is not an object; send role and content")
    role = message.get("role")
    if role not in ROLES:
        raise Refused(
            f"{at}.role", f"{at}.role = {shown(role)} is not a role; send one of {', '.join(ROLES)}"
        )
    for key in ("function_call", "audio"):
        if message.get(key):
            raise Refused(
                f"{at}.{key}", f"{at}.{key} is not supported; send tool_calls, or text as content"
            )
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    system = role in ("system", "developer")
    texts = _texts(content, f"{at}.content")
    if system:
        texts = [BILLING.sub("", text) for text in texts]
    plain = {"role": "system" if system else role, "content": "".join(texts)}
    for key in KEPT:
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise Refused(
                    f"{at}.{key}", f"{at}.{key} = {shown(value)} is not text; send a string"
                )
            plain[key] = value
    if calls := message.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise Refused(
                f"{at}.tool_calls", f"{at}.tool_calls must be a list, of an assistant's message"
            )
        plain["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _call(call: Any, at: str) -> dict[str, Any]:
    """A call with an object as arguments, as templates want them."""
    try:
        function, id = call["function"], call.get("id")
        name = function["name"]
        arguments = function.get("arguments")
    except (TypeError, KeyError, AttributeError):
        name = None
    if not isinstance(name, str):
        raise Refused(
            at, f"{at} = {shown(call)}: send id, type and function with name and arguments"
        )
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):  # some model wrote it so; templates want an object
        arguments = {"arguments": arguments}
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **made} if isinstance(id, str) else made


def _texts(content: Any, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Refused(
            at, f"{at} = {shown(content)} is not text; send a string or a list of text parts"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise Refused(
                f"{at}[{i}]",
                f"{at}[{i}] = {shown(part)}: this server reads text only; send"
                " {'type': 'text', 'text': ...}",
            )
        texts.append(text)
    return texts


def clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


class Function(BaseModel):
    """A function that a model may call. `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True)
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


TOOLS = TypeAdapter(list[Tool])


def check_tools(tools: Any, at: str = "tools") -> Tools:
    """A list of functions to call; none where `tools` is None. Raises Refused."""
    if tools is None:
        return ()
    try:
        names = [tool.function.name for tool in TOOLS.validate_python(tools)]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = at
        for step in first["loc"]:
            where += f"[{step}]" if isinstance(step, int) else f".{step}"
        raise Refused(where, f"{where} = {shown(first['input'])}: {first['msg']}") from error
    for i, name in enumerate(names):
        if name in names[:i]:
            where = f"{at}[{i}].function.name"
            raise Refused(where, f"{where} = {name!r} is there twice; send it once")
    return tuple(tools)


def types_of(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema names, itself or in its alternatives; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    types = {name for name in listed(schema.get("type")) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for each in listed(schema.get(key)):
            types |= types_of(each)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    for value in values if isinstance(values, list) else ():
        types.add(VALUE_TYPES.get(type(value), "other"))
    return types


def listed(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return value if isinstance(value, list) else [value]


# Rewriting, for templates that refuse the messages as they came.


def merged(messages: Messages) -> Messages:
    """System text that does not come first becomes user text, and neighbours of one role are
    joined, except tool results."""
    turns: Messages = []
    for message in messages:
        if message["role"] == "system" and any(turn["role"] != "system" for turn in turns):
            text = f"<system>\n{message['content']}\n</system>"
            message = {**message, "role": "user", "content": text}
        if turns and turns[-1]["role"] == message["role"] != "tool":
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**other, **one}
    for key in ("content", "reasoning_content"):
        if texts := [turn[key] for turn in (one, other) if turn.get(key)]:
            both[key] = "\n\n".join(texts)
    if calls := [*one.get("tool_calls", ()), *other.get("tool_calls", ())]:
        both["tool_calls"] = calls
    return both


def without_system(messages: Messages) -> Messages:
    """Merged, for a template that knows no system role: its text opens the first user message."""
    turns = merged(messages)
    if turns[0]["role"] != "system":
        return turns
    return merged([{**turns[0], "role": "user"}, *turns[1:]])


REWRITES: tuple[Callable[[Messages], Messages], ...] = (list, merged, without_system)


def spelled_out(messages: Messages, tools: Tools) -> Messages:
    """For a template that knows no tools: tools, calls and results as plain text."""
    turns: Messages = []
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        text = "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL])
        if messages[0]["role"] == "system":
            text = f"{messages[0]['content']}\n\n{text}"
            messages = messages[1:]
        turns.append({"role": "system", "content": text})
    for message in messages:
        turn = dict(message)
        calls = turn.pop("tool_calls", ())
        turn.pop("tool_call_id", None)
        if turn["role"] == "tool":
            turn["role"] = "user"
            turn["content"] = f"<tool_response>\n{turn['content']}\n</tool_response>"
        texts = [turn["content"]]
        for call in calls:
            said = {key: call["function"][key] for key in ("name", "arguments")}
            texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
        turn["content"] = "\n".join(filter(None, texts))
        turns.append(turn)
    return turns
