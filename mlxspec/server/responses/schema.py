"""What POST /v1/responses takes: its fields, its input items as chat messages, its tools as chat
tools.

Rule: as for chat, a field or an item is used, or harmless for the reason given here, or refused.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mlxspec.server import fields
from mlxspec.server.chat_request import Format
from mlxspec.server.errors import ApiError, unfit
from mlxspec.server.fields import Refusals
from mlxspec.server.openai.schema import FIRST, Common, Items, Strict, parse
from mlxspec.types import shown

Json = dict[str, Any]

# Accepted without effect, besides chat's own; most are told back in the response.
HARMLESS = {
    "include": "nothing is encrypted, and no other extra is ever made",
    "max_tool_calls": "it counts calls of hosted tools, and there are none",
    "client_metadata": "who asks makes no difference here",
}
REFUSED: Refusals = {
    **fields.REFUSED,
    "background": ((False,), "an answer comes while the client waits; set stream to true"),
    "conversation": ((), "send previous_response_id, or the conversation as input"),
    "prompt": ((), "no templates are kept here; send instructions and input"),
    "truncation": (("disabled",), "a prompt that is too long is refused; shorten input"),
    "top_logprobs": ((0,), "ask /v1/chat/completions for log-probabilities"),
    "messages": ((), "send it as input"),
    "response_format": (({"type": "text"},), "send it as text.format"),
    "reasoning_effort": ((), "send reasoning: {'effort': ...}"),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), ((), "send max_output_tokens")),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tool_choice"),
}
ITEM_FIELDS = frozenset(
    "type id role content status phase summary encrypted_content call_id name namespace arguments input"
    " output".split()
)
# Left out of the prompt: what hosted tools of another server did, of which the messages around them
# speak.
FOREIGN = frozenset(
    "web_search_call file_search_call image_generation_call code_interpreter_call mcp_list_tools mcp_call"
    " mcp_approval_request mcp_approval_response tool_search_call tool_search_output".split()
)
# tools that cannot be missed without notice; others that this server lacks are reported only
HOSTED = {
    "file_search": "put the files' text into the input",
    "mcp": "connect to that server yourself and send its tools as functions",
    **dict.fromkeys(
        (
            "code_interpreter",
            "computer",
            "computer_use_preview",
            "local_shell",
            "shell",
            "apply_patch",
        ),
        "run it yourself and send it as a function",
    ),
}
EMPTY = {"type": "object", "properties": {}}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
GAP = "\n\n"  # between two texts of one kind that were apart


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Strict):
    """As chat's response_format, with what that has in json_schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    shape: Any = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if self.type == "json_schema" and not isinstance(self.shape, dict | bool):
            raise ValueError("has no schema; send a JSON schema as schema")
        return self


class Text(Strict):
    format: TextFormat | None = None


class Create(Common):
    """The body. `input` is always a list of items."""

    refuses: ClassVar[Refusals] = REFUSED
    prefix: ClassVar[str] = "resp"
    source: ClassVar[str] = "input"
    alternatives: ClassVar[None] = None

    n: Annotated[int, Field(ge=1, le=1)] | None = None
    input: Annotated[list[Json], FIRST, Field(min_length=1, max_length=fields.MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: Json | None = None
    tools: Items | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: Annotated[list[str], FIRST] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "message", "role": "user", "content": value}]
        if not isinstance(value, list):
            raise ValueError("is neither a string nor a list of items; send one of these")
        return value

    @field_validator("include")
    @classmethod
    def _included(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError("asks for log-probabilities; ask /v1/chat/completions for them")
        return value

    @property
    def format(self) -> Format | None:
        given = self.text and self.text.format
        if not given or given.type == "text":
            return None
        if given.type == "json_object":
            return Format("object", "text.format")
        return Format("schema", "text.format.schema", given.shape)

    @property
    def limit(self) -> int | None:
        given = [x for x in (self.max_output_tokens, self.max_tokens) if x is not None]
        return min(given, default=None)


def parsed(data: bytes) -> tuple[Create, list[str]]:
    """The checked body, and the names of the fields that nobody knows. Raises ApiError 400."""
    body, unknown = parse(Create, data)
    inner = ((body.reasoning, "reasoning"), (body.text, "text"))
    unknown += [f"{at}.{name}" for some, at in inner if some for name in some.model_extra or ()]
    unknown += [
        f"input[].{name}" for item in body.input for name in item if name not in ITEM_FIELDS
    ]
    return body, list(dict.fromkeys(name for name in unknown if name not in HARMLESS))


# ---- tools
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the client knows it; `flat` is its name in the prompt, which has no namespaces."""

    name: str
    namespace: str | None
    custom: bool  # takes plain text, not JSON

    @property
    def flat(self) -> str:
        return f"{self.namespace.rstrip('_')}__{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`told` are the tools in chat form, `named` those that a call may mean by a name, `choice` is
    the `ChatRequest`'s. `ignored` names the tools that are not here."""

    told: list[Json]
    named: Mapping[str, Tool]
    choice: str | Mapping[str, str]
    ignored: list[str]


def toolbox(body: Create) -> Toolbox:
    """Raises ApiError."""
    ignored: list[str] = []
    pairs = list(_tools(body.tools or [], "tools", None, ignored))
    choice, only = _choice(body.tool_choice, [tool for tool, _ in pairs])
    plain = Counter(tool.name for tool, _ in pairs)
    named = {
        tool.name: tool for tool, _ in pairs if plain[tool.name] == 1
    }  # a model may leave out the rest
    named |= {tool.flat: tool for tool, _ in pairs}
    return Toolbox(
        [told for tool, told in pairs if only is None or tool in only], named, choice, ignored
    )


def _tools(
    tools: Sequence[Any], at: str, namespace: str | None, ignored: list[str]
) -> Iterator[tuple[Tool, Json]]:
    for i, tool in enumerate(tools):
        here = f"{at}[{i}]"
        kind = _string(tool, "type", here)
        if kind == "namespace" and namespace is None:
            inside = tool.get("tools")
            if not isinstance(inside, list):
                raise unfit(
                    f"{here}.tools", f"{here}.tools = {shown(inside)} is not a list; send one"
                )
            yield from _tools(inside, f"{here}.tools", _string(tool, "name", here), ignored)
        elif kind in ("function", "custom"):
            made = Tool(_string(tool, "name", here), namespace, kind == "custom")
            function = {"name": made.flat, "description": tool.get("description") or ""}
            function["parameters"] = (
                _freeform(tool) if made.custom else tool.get("parameters") or EMPTY
            )
            yield made, {"type": "function", "function": function}
        elif kind in HOSTED:
            raise unfit(here, f"{here}.type = {shown(kind)} is not here: {HOSTED[kind]}")
        else:
            ignored.append(f"tools[].{kind}")


def _freeform(tool: Json) -> Json:
    """Parameters that stand for plain text, with the grammar that it must follow, if it has one."""
    told = "All of the tool's input, as plain text."
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        told += f" It must follow this {form.get('syntax', '')} grammar:\n{form['definition']}"
    text = {"type": "string", "description": told}
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


def _choice(
    value: Any, tools: Sequence[Tool]
) -> tuple[str | dict[str, str], Sequence[Tool] | None]:
    """The choice, and the tools that it allows; None: all."""
    if value in (None, "auto", "none", "required"):
        return value or "auto", None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return {"name": _meant(value, tools, "tool_choice").flat}, None
    if kind == "allowed_tools" and isinstance(value.get("tools"), list):
        mode = value.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise unfit(
                "tool_choice.mode", f"tool_choice.mode = {shown(mode)}; send auto or required"
            )
        some = enumerate(value["tools"])
        return mode, [_meant(one, tools, f"tool_choice.tools[{i}]") for i, one in some]
    raise unfit(
        "tool_choice",
        f"tool_choice = {shown(value)} is not a choice here; send auto, none, required, or one of the type"
        " function, custom or allowed_tools",
    )


def _meant(value: Any, tools: Sequence[Tool], at: str) -> Tool:
    name, namespace = _string(value, "name", at), value.get("namespace")
    for tool in tools:
        if tool.name == name and namespace in (None, tool.namespace):
            return tool
    raise unfit(
        at, f"{at} = {shown(value)} is none of the tools; send it with them, or choose another"
    )


# ---- input
# ----------------------------------------------------------------------------------------------


def chat_messages(before: Sequence[Json], items: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """The items of earlier turns and of this one as chat messages, and what of them is left out.
    What the assistant said and did in a row is one message. Raises ApiError."""
    turns: list[Json] = []
    ignored, last = [], ""
    for i, item in enumerate([*before, *items]):
        turn = _turn(item, f"input[{i - len(before)}]")
        if turn is None:
            ignored.append(f"input[].{item['type']}")
            continue
        kind = next(key for key in turn if key != "role")
        if not turns or not turns[-1]["role"] == turn["role"] == "assistant":
            turns.append(turn)
        elif kind == "tool_calls":
            turns[-1][kind] = [*turns[-1].get(kind, ()), *turn[kind]]
        else:
            gap = GAP if kind == last and turns[-1][kind] else ""
            turns[-1][kind] = turns[-1].get(kind, "") + gap + turn[kind]
        last = kind
    return [turn for turn in turns if set(turn) != {"role", "reasoning_content"}], ignored


def _turn(item: Json, at: str) -> Json | None:
    """One item as a chat message; None where it is left out. The first key besides the role is its
    kind."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise unfit(
                f"{at}.role", f"{at}.role = {shown(role)} is not a role; send user or another"
            )
        return {"content": _text(item.get("content"), f"{at}.content"), "role": role}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"reasoning_content": _text(parts, f"{at}.summary", GAP), "role": "assistant"}
    if kind in ("function_call", "custom_tool_call"):
        space = _string(item, "namespace", at) if item.get("namespace") else None
        tool = Tool(_string(item, "name", at), space, kind == "custom_tool_call")
        if tool.custom:
            arguments = json.dumps({"input": _string(item, "input", at)}, ensure_ascii=False)
        else:
            arguments = _string(item, "arguments", at)
        call: Json = {"id": _string(item, "call_id", at), "type": "function"}
        call["function"] = {"name": tool.flat, "arguments": arguments}
        return {"tool_calls": [call], "role": "assistant"}
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.get("output"), f"{at}.output")
        return {"content": text, "role": "tool", "tool_call_id": _string(item, "call_id", at)}
    if isinstance(kind, str) and kind in FOREIGN:
        return None
    raise unfit(
        at, f"{at}.type = {shown(kind)} cannot be read here; send messages, calls and their outputs"
    )


def _text(content: Any, at: str, gap: str = "") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unfit(
            at, f"{at} = {shown(content)} is not text; send a string or a list of text parts"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            what = f"a part of type {shown(kind)}" if kind else shown(part)
            raise unfit(
                f"{at}[{i}]", f"{at}[{i}] is {what}; this server reads text only: send input_text"
            )
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{at}[{i}]"))
    return gap.join(texts)


def _string(value: Any, key: str, at: str) -> str:
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, str):
        raise unfit(f"{at}.{key}", f"{at}.{key} = {shown(found)} is not a string; send one")
    return found


def missing(id: str, param: str | None = None) -> ApiError:
    """For a response, or an item of one, that is not stored."""
    message = (
        f"{param or 'id'} = {id[:200]!r} is not stored here: it was made with store false, deleted, or left"
        " out for newer ones; send the conversation as input"
    )
    if param == "previous_response_id":
        return unfit(param, message, "previous_response_not_found")
    return ApiError(404, message, param=param, code="not_found")
