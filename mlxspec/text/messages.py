"""One form for every conversation: OpenAI's chat messages, each with a known role and a string as
content.

Rule: one conversation has one form however it was spelled, and it is rewritten only where the
model's template refuses it or knows no tools, always in the same way: a turn's tokens must not
depend on later ones.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxspec.types import InvalidRequest, shown

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = (
    "name",
    "reasoning_content",
)  # besides role and content, what a template may read of a message

# Text that changes with every request and means nothing to the model: what is in front of it would
# be all
# that a prefix cache could ever share. (pattern of a system text's beginning, why)
NONCES = (
    (
        re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?"),
        "Claude Code: a hash of the first user message, for the bill of a server that is not this one",
    ),
)

# For models whose template says nothing of tools: the format of Hermes and Qwen, which many have
# seen.
TOOLS_FOLLOW = "You can call these tools, each a JSON object on its line:"
HOW_TO_CALL = (
    "To call one, write its name and arguments as JSON between tags, and nothing after the last call:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)


NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
}


class Refused(InvalidRequest):
    """A prompt that cannot be rendered. `field` names what of the request is at fault:
    "messages[2].role"; `code` is for programs."""

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
        calls_only = turn["role"] == "assistant" and turn.get("tool_calls") and not turn["content"]
        if (
            calls_only
            and made
            and made[-1]["role"] == "assistant"
            and not made[-1].get("tool_calls")
        ):
            made[-1] = _joined(made[-1], turn)  # goose sends one reply as two messages
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
    for key, mend in (
        ("function_call", "send tool_calls"),
        ("audio", "send what was said as content"),
    ):
        if message.get(key):
            raise Refused(f"{at}.{key}", f"{at}.{key} is not supported; {mend}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    text = _text(content, f"{at}.content", role in ("system", "developer"))
    plain = {"role": "system" if role == "developer" else role, "content": text}
    for key in (*KEPT, "tool_call_id"):
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
    """A call whose arguments are an object, as templates want them; where they are none, their
    text."""
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


def _text(content: Any, at: str, system: bool) -> str:
    if isinstance(content, str):
        return _stable(content) if system else content
    if not isinstance(content, list):
        raise Refused(
            at, f"{at} = {shown(content)} is not text; send a string or a list of text parts"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            what = f"a part of type {shown(kind)}" if kind else f"{shown(part)}"
            raise Refused(
                f"{at}[{i}]",
                f"{at}[{i}] is {what}; this server reads text only: send {{'type': 'text', 'text': ...}}",
            )
        texts.append(_stable(text) if system else text)
    return "".join(texts)


def clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def _stable(text: str) -> str:
    for pattern, _ in NONCES:
        text = pattern.sub("", text, count=1) if pattern.match(text) else text
    return text


def check_tools(tools: Any, at: str = "tools") -> Tools:
    """A list of functions to call, or nothing. Raises Refused."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Refused(at, f"{at} = {shown(tools)} is not a list; send one")
    names = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise Refused(
                f"{at}[{i}]", f"{at}[{i}] = {shown(tool)}: send type 'function' and function"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise Refused(
                f"{at}[{i}].function.name", f"{at}[{i}].function.name is missing; send it"
            )
        if name in names:
            raise Refused(
                f"{at}[{i}].function.name", f"{at}[{i}].function.name = {name!r} is there twice"
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise Refused(
                f"{at}[{i}].function.parameters",
                f"{at}[{i}].function.parameters = {shown(parameters)} is not a JSON schema; send an object",
            )
        names.add(name)
    return tools


def types_of(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema names, by itself or in its alternatives; none:
    any."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    made = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    for key in ("anyOf", "oneOf"):
        some = schema.get(key)
        made |= set().union(*(types_of(each) for each in some)) if isinstance(some, list) else set()
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]:
        made.add(NAMES.get(type(value), "object"))
    return {name for name in made if isinstance(name, str)}


# ---- rewriting, for templates that refuse what came
# -----------------------------------------------------


def as_they_are(messages: Messages) -> Messages:
    return messages


def told_by_user(messages: Messages) -> Messages:
    """System text behind the beginning is user text."""
    turns: Messages = []
    for message in messages:
        late = message["role"] == "system" and any(turn["role"] != "system" for turn in turns)
        said = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        turns.append({**message, **said} if late else message)
    return turns


def merged(messages: Messages) -> Messages:
    """So, and no role speaks twice in a row, but tools."""
    turns: Messages = []
    for message in told_by_user(messages):
        role, content = message["role"], message["content"]
        if turns and turns[-1]["role"] == role != "tool":
            turns[-1] = _joined(turns[-1], {**message, "content": content})
        else:
            turns.append({**message, "role": role, "content": content})
    return turns


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {
        **other,
        **one,
        "content": "\n\n".join(m["content"] for m in (one, other) if m["content"]),
    }
    thoughts = [m["reasoning_content"] for m in (one, other) if m.get("reasoning_content")]
    if thoughts:
        both["reasoning_content"] = "\n\n".join(thoughts)
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
    as_they_are,
    told_by_user,
    merged,
    without_system,
)


def spelled_out(messages: Messages, tools: Tools) -> Messages:
    """For a template that knows no tools: they, the calls and their results as plain text."""
    turns: Messages = []
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        told = "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL])
        first = messages[0] if messages[0]["role"] == "system" else None
        turns.append(
            {"role": "system", "content": f"{first['content']}\n\n{told}" if first else told}
        )
        messages = messages[1:] if first else messages
    for message in messages:
        turn = {
            key: value
            for key, value in message.items()
            if key not in ("tool_calls", "tool_call_id")
        }
        if message["role"] == "tool":
            turn["role"] = "user"
            turn["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            said = {key: call["function"][key] for key in ("name", "arguments")}
            text = f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
        turns.append(turn)
    return turns
