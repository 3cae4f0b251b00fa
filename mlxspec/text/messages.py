"""The canonical form of conversations: OpenAI's chat messages, each with a known role and a string.

However a client writes a conversation, its canonical form is the same.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from mlxspec.types import InvalidRequest, Json, shown

Types = dict[str, dict[str, set[str]]]  # of parameters, by tool and name
Messages = list[Json]
Tools = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
KEPT = ("name", "reasoning_content", "tool_call_id")  # fields that are kept, with role and content

# Claude Code's first system text, for Anthropic's billing: a hash of the first user message. It
# changes with every conversation, so nothing after it could be in the prefix cache.
BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")

TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
}
# Words of Python and pydantic in errors, and what a client is told instead.
JSON_WORDS = {
    r"List should have (at \w+ \d+ items?) after validation, not \w+": r"send \1",
    r"\bstr\b": "string",
    r"\b(int|float)\b": "number",
    r"\bbool\b": "boolean",
    r"\b[Ll]ist\b": "array",
    r"\b[Dd]ict(ionary)?\b( or instance of \w+)?": "object",
    r"\bNone(Type)?\b": "null",
    r"Input tag .* tags: ": "its type should be one of ",
    r"Unable to extract tag.*": "its type is missing; send it",
}


class RejectedRequest(InvalidRequest):
    """A request that cannot be answered because of `field`, a path in it: "messages[2].role".
    `code` is for programs."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class TooLong(RejectedRequest):
    """A text that is far longer than the context: `tokens` is an estimate."""

    tokens = 0


def rejected(field: str, why: str) -> RejectedRequest:
    """The error for a field; `why` continues its name: "has a cycle; send none"."""
    return RejectedRequest(field, f"{field} {why}")


def rejected_value(field: str, value: Any, why: str) -> RejectedRequest:
    """The error for a field, with its value."""
    return rejected(field, f"= {shown(value)} {why}")


def in_json_words(error: str) -> str:
    """Another library's error, with types called by their names in JSON."""
    for pattern, word in JSON_WORDS.items():
        error = re.sub(pattern, word, error)
    return error


def canonical(messages: Sequence[Any]) -> Messages:
    """Messages with a known role and a string as content. Raises RejectedRequest for what cannot
    be read."""
    if not messages:
        raise rejected("messages", "= []: send at least one message")
    turns: Messages = []
    for i, message in enumerate(messages):
        turn = _message(message, f"messages[{i}]")
        last = turns[-1] if turns else {}
        split = turn.get("tool_calls") and not turn["content"] and not last.get("tool_calls")
        if split and last.get("role") == "assistant":
            turns[-1] = join_turns(last, turn)  # goose sends one reply as two messages
        else:
            turns.append(turn)
    return turns


def _message(message: Any, at: str) -> Json:
    if not isinstance(message, Mapping):
        raise rejected_value(at, message, "is not an object; send role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise rejected_value(f"{at}.role", role, f"is not a role; send one of {', '.join(ROLES)}")
    if message.get("audio"):
        raise rejected(f"{at}.audio", "is not supported; send content, tool_calls")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    texts = _texts(content, f"{at}.content")
    if role in ("system", "developer"):
        role, texts = "system", [BILLING.sub("", text) for text in texts]
    elif role == "function":
        role = "tool"
    turn = {"role": role, "content": "".join(texts)}
    reasoning = message.get("reasoning")  # vLLM's and OpenRouter's name
    for key in KEPT:
        value = message.get(key)
        if value is None and key == "reasoning_content" and isinstance(reasoning, str):
            value = reasoning
        if isinstance(value, str):
            turn[key] = value
        elif value is not None:
            raise rejected_value(f"{at}.{key}", value, "is not text; send a string")
    calls = message.get("tool_calls") or []
    if role == "assistant" and message.get("function_call"):  # the form before tools
        calls = [{"function": message["function_call"]}]
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise rejected(f"{at}.tool_calls", "must be an array, in an assistant's message")
    if calls:
        turn["tool_calls"] = [_call(c, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return turn


def _call(call: Any, at: str) -> Json:
    """A call with an object as arguments, as templates want them."""
    function = _function(call)
    if function is None or not isinstance(function.get("name"), str):
        raise rejected_value(
            at,
            call,
            "is not a tool call; send id, type and function with name and arguments",
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) or {}
    if not isinstance(arguments, dict):  # as a model wrote it; templates want an object
        arguments = {"arguments": arguments}
    canonical_call = {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if not isinstance(canonical_call["id"], str):
        del canonical_call["id"]
    return canonical_call


def _function(value: Any) -> Mapping[str, Any] | None:
    """The object `function` of a tool or a call; None if there is none."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) else None


def _texts(content: Any, at: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise rejected_value(at, content, "is not text; send a string or an array of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            why = 'is no text, nor an image that can be seen; send {"type": "text", "text": ...}'
            raise rejected_value(f"{at}[{i}]", part, why)
        texts.append(part[kind])
    return texts


def clean(text: str) -> str:
    """Text with U+FFFD for halves of surrogate pairs, which JSON can contain but no tokenizer
    reads."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_tools(tools: Sequence[Any] | None) -> Tools:
    """The tools of a request, after checks; empty for None. Raises RejectedRequest."""
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        at, function = f"tools[{i}]", _function(tool)
        if function is None or tool.get("type") != "function":
            raise rejected_value(at, tool, "is not a function; send type 'function' and function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name or name in names:
            why = "must be a unique, non-empty name"
            raise rejected_value(f"{at}.function.name", name, why)
        names.add(name)
        if not isinstance(parameters, Mapping | None):
            why = "is not a JSON schema; send an object"
            raise rejected_value(f"{at}.function.parameters", parameters, why)
    return tools or ()


def types_of(schema: Any, root: Any = None, seen: set[str] | None = None) -> set[str]:
    """The JSON types that a parameter's schema names directly, in its alternatives or by `$ref`s
    within `root`; empty: any. `seen` has the `$ref`s that were followed."""
    if not isinstance(schema, Mapping):
        return set()
    seen = set() if seen is None else seen
    types = {name.lower() for name in as_list(schema.get("type")) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for option in as_list(schema.get(key)):
            types |= types_of(option, root, seen)
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    if isinstance(values, list):
        types |= {TYPE_NAMES.get(type(value), "object") for value in values}
    further = as_list(schema.get("allOf"))
    if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        seen.add(ref)
        further.append(resolve_ref(ref, root))
    for part in further:
        allowed = types_of(part, root, seen)
        types = types & allowed or types or allowed
    if types and schema.get("nullable") is True:
        types.add("null")
    return types


def parameter_types(tools: Tools) -> Types:
    """The types of the parameters of tools, which is all that the parser needs of these."""
    types: Types = {}
    for function in (tool["function"] for tool in tools):
        root = function.get("parameters") or {}
        properties = properties_of(root).items()
        types[function["name"]] = {name: types_of(schema, root) for name, schema in properties}
    return types


def properties_of(schema: Json) -> Json:
    """The schemas of an object's properties."""
    if isinstance(ref := schema.get("$ref"), str):
        target = resolve_ref(ref, schema)
        schema = target if isinstance(target, dict) else schema
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def resolve_ref(ref: str, root: Any) -> Any:
    """The part of a schema that a `$ref` like `#/$defs/name` names; None if there is none."""
    for step in ref.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root if ref.startswith("#") else None


def as_list(value: Any) -> list[Any]:
    """A list unchanged; anything else in a list."""
    return value if isinstance(value, list) else [value]


def join_turns(*turns: Json) -> Json:
    """Neighbouring turns of one role, merged into one."""
    merged: Json = {}
    for turn in reversed(turns):
        merged |= turn
    for key in ("content", "reasoning_content"):
        if key in merged:
            merged[key] = "\n\n".join(turn[key] for turn in turns if turn.get(key))
    if "tool_calls" in merged:
        merged["tool_calls"] = [call for turn in turns for call in turn.get("tool_calls", ())]
    return merged
