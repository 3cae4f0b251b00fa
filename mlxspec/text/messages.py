"""The canonical form of conversations: OpenAI's chat messages, each with a known role and a string.

A conversation has one form however it was spelled, and is rewritten only where the model's template
refuses it or knows no tools, always in the same way: a turn's tokens must not depend on later ones.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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
    if role == "function":
        raise Refused(f"{at}.role", f"{at}.role = 'function' is not supported; send the role tool")
    if role not in ROLES:
        raise Refused(
            f"{at}.role", f"{at}.role = {shown(role)} is not a role; send one of {', '.join(ROLES)}"
        )
    for key, fix in (
        ("function_call", "send tool_calls"),
        ("audio", "send what was said as content"),
    ):
        if message.get(key):
            raise Refused(f"{at}.{key}", f"{at}.{key} is not supported; {fix}")
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
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise Refused(
            at, f"{at} = {shown(call)}: send id, type and function with name and arguments"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):  # some model wrote it so; templates want an object
        arguments = {"arguments": arguments}
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


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
            what = f"a part of type {shown(kind)}" if kind else shown(part)
            raise Refused(
                f"{at}[{i}]",
                f"{at}[{i}] is {what}; this server reads text only: send"
                " {'type': 'text', 'text': ...}",
            )
        texts.append(text)
    return texts


def clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def check_tools(tools: Any, at: str = "tools") -> Tools:
    """A list of functions to call; none where `tools` is None. Raises Refused."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Refused(at, f"{at} = {shown(tools)} is not a list; send one")
    names = set()
    for i, tool in enumerate(tools):
        where = f"{at}[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise Refused(where, f"{where} = {shown(tool)}: send type 'function' and function")
        name, parameters = function.get("name"), function.get("parameters")
        where = f"{where}.function.name"
        if not isinstance(name, str) or not name:
            raise Refused(where, f"{where} is missing; send it")
        if name in names:
            raise Refused(where, f"{where} = {name!r} is there twice; send it once")
        names.add(name)
        where = f"{at}[{i}].function.parameters"
        if parameters is not None and not isinstance(parameters, Mapping):
            raise Refused(
                where, f"{where} = {shown(parameters)} is not a JSON schema; send an object"
            )
    return tools


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
        text = "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL])
        if messages[0]["role"] == "system":
            text = f"{messages[0]['content']}\n\n{text}"
            messages = messages[1:]
        turns.append({"role": "system", "content": text})
    for message in messages:
        turn = dict(message)
        calls = turn.pop("tool_calls", ())
        turn.pop("tool_call_id", None)
        texts = [turn["content"]] if turn["content"] else []
        if turn["role"] == "tool":
            turn["role"] = "user"
            texts = [f"<tool_response>\n{turn['content']}\n</tool_response>"]
        for call in calls:
            said = {key: call["function"][key] for key in ("name", "arguments")}
            texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
        turn["content"] = "\n".join(texts)
        turns.append(turn)
    return turns
