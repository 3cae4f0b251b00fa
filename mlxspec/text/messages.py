"""The canonical form of conversations: OpenAI's chat messages, each with a known role and a string.

A conversation has one form however it was spelled, and is rewritten only where the model's template
refuses it or knows no tools, always in the same way: a turn's tokens must not depend on later ones.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

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

TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
}


class Refused(InvalidRequest):
    """A request that cannot be answered. `field` is its path in the request: "messages[2].role";
    `code` is for programs."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class TooLong(Refused):
    """A text of about so many `tokens`."""

    tokens = 0


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
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        why = f"{at}.role = {shown(role)} is not a role; send one of {', '.join(ROLES)}"
        raise Refused(f"{at}.role", why)
    for key in ("function_call", "audio"):
        if message.get(key):
            raise Refused(f"{at}.{key}", f"{at}.{key} is not supported; send content, tool_calls")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    texts = _texts(content, f"{at}.content")
    if role in ("system", "developer"):
        role, texts = "system", [BILLING.sub("", text) for text in texts]
    plain = {"role": role, "content": "".join(texts)}
    for key in KEPT:
        value = message.get(key)
        if not isinstance(value, str | None):
            raise Refused(f"{at}.{key}", f"{at}.{key} = {shown(value)} is not text; send a string")
        if value is not None:
            plain[key] = value
    calls = message.get("tool_calls")
    if not calls:
        return plain
    if role != "assistant" or not isinstance(calls, list):
        why = f"{at}.tool_calls must be a list, of an assistant's message"
        raise Refused(f"{at}.tool_calls", why)
    plain["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _call(call: Any, at: str) -> dict[str, Any]:
    """A call with an object as arguments, as templates want them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        why = f"{at} = {shown(call)}: send id, type and function with name and arguments"
        raise Refused(at, why)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) or {}
    if not isinstance(arguments, dict):  # some model wrote it so; templates want an object
        arguments = {"arguments": arguments}
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _texts(content: Any, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        why = f"{at} = {shown(content)} is not text; send a string or a list of text parts"
        raise Refused(at, why)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            why = "this server reads text only: send {'type': 'text', 'text': ...}"
            raise Refused(f"{at}[{i}]", f"{at}[{i}] = {shown(part)}: {why}")
        texts.append(part[kind])
    return texts


def clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode()


def check_tools(tools: Any) -> Tools:
    """A list of functions to call; none where `tools` is None. Raises Refused."""
    if not isinstance(tools, list | None):
        raise Refused("tools", f"tools = {shown(tools)} is not a list; send one")
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise Refused(at, f"{at} = {shown(tool)}: send type 'function' and function")
        name, at = function.get("name"), f"{at}.function"
        if not isinstance(name, str) or not name or name in names:
            why = f"{at}.name = {shown(name)} is no name, or there twice; send one of its own"
            raise Refused(f"{at}.name", why)
        names.add(name)
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            why = f"{at}.parameters = {shown(parameters)} is not a JSON schema; send an object"
            raise Refused(f"{at}.parameters", why)
    return tools or ()


def types_of(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema names, itself or in its alternatives; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    types = {name for name in listed(schema.get("type")) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for each in listed(schema.get(key)):
            types |= types_of(each)
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    if isinstance(values, list):
        types |= {TYPE_NAMES.get(type(value), "object") for value in values}
    return types


def listed(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return value if isinstance(value, list) else [value]


# Rewriting, for templates that refuse the messages as they came.


def system_as_user(messages: Messages) -> Messages:
    """System text that does not come first becomes user text."""
    turns: Messages = []
    for message in messages:
        late = message["role"] == "system" and any(turn["role"] != "system" for turn in turns)
        said = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        turns.append({**message, **said} if late else message)
    return turns


def merged(messages: Messages) -> Messages:
    """Like `system_as_user`, and neighbours of one role are joined, except tool results."""
    turns: Messages = []
    for message in system_as_user(messages):
        if turns and turns[-1]["role"] == message["role"] != "tool":
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**other, **one}
    for key in ("content", "reasoning_content"):
        if key in both:
            both[key] = "\n\n".join(filter(None, (one.get(key), other.get(key))))
    if "tool_calls" in both:
        both["tool_calls"] = one.get("tool_calls", []) + other.get("tool_calls", [])
    return both


def without_system(messages: Messages) -> Messages:
    """Merged, for a template that knows no system role: its text opens the first user message."""
    turns = merged(messages)
    if turns[0]["role"] != "system":
        return turns
    return merged([{**turns[0], "role": "user"}, *turns[1:]])


REWRITES: tuple[Callable[[Messages], Messages], ...] = (
    list,
    system_as_user,
    merged,
    without_system,
)


def spelled_out(messages: Messages, tools: Tools) -> Messages:
    """For a template that knows no tools: tools, calls and results as plain text."""
    turns: Messages = []
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        first = {"role": "system", "content": "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL])}
        if messages[0]["role"] == "system":
            first, messages = _joined(messages[0], first), messages[1:]
        turns.append(first)
    for message in messages:
        turn = {key: message[key] for key in message if key not in ("tool_calls", "tool_call_id")}
        if turn["role"] == "tool":
            said = f"<tool_response>\n{turn['content']}\n</tool_response>"
            turn |= {"role": "user", "content": said}
        texts = [turn["content"]]
        for call in message.get("tool_calls", ()):
            said = json.dumps(call["function"], ensure_ascii=False)
            texts.append(f"<tool_call>\n{said}\n</tool_call>")
        turn["content"] = "\n".join(filter(None, texts))
        turns.append(turn)
    return turns
