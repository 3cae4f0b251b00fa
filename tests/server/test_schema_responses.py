"""The body of /v1/responses: items become messages, tools functions; what is refused."""

import json
from typing import Any

import pytest

from mlxspec.server.body import parse
from mlxspec.server.chat_request import AnswerFormat
from mlxspec.server.errors import ApiError
from mlxspec.server.openai.schema import UNSUPPORTED
from mlxspec.server.responses.schema import (
    HOSTED_ITEMS,
    Create,
    Tool,
    chat_messages,
    parse_tools,
)


def body(**fields: Any) -> tuple[Create, list[str]]:
    return parse(Create, json.dumps({"input": "hello", **fields}).encode())


def tools(*some: Any) -> tuple[dict[str, Tool], list[str]]:
    """The known tools, and the types of the others."""
    ignored: list[str] = []
    return parse_tools(body(tools=list(some))[0].tools, ignored), ignored


def messages(*items: Any) -> list[dict[str, Any]]:
    return chat_messages([], items, [])


def refuse(does: Any, *args: Any, **kw: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        does(*args, **kw)
    assert caught.value.status == 400 and caught.value.param
    assert caught.value.param in caught.value.message
    return caught.value


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "refusal" if kind == "refusal" else "text": text}


def call(id: str, name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, **more}


def chat_call(id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **more}


# ---- fields
# ---------------------------------------------------------------------------------------------

WRONG = [
    ("input", 5),
    ("input", []),
    ("input", ["hello"]),
    ("n", 2),
    ("store", "yes"),
    ("instructions", ["hello"]),
    ("max_output_tokens", 0),
    ("previous_response_id", 5),
    ("metadata", "x"),
    ("tools", {}),
    ("temperature", 3),
    ("text.format.type", {"format": {"type": "xml"}}),
    ("reasoning.effort", {"effort": 5}),
]


@pytest.mark.parametrize(("param", "value"), WRONG)
def test_wrong_values(param: str, value: Any) -> None:
    error = refuse(body, **{param.partition(".")[0]: value})
    assert error.param in (param, f"{param}[0]")


def test_input_must_be_there() -> None:
    assert refuse(parse, Create, b"{}").param == "input"


@pytest.mark.parametrize(
    ("name", "neutral"),
    [item for item in UNSUPPORTED.items() if item[0] not in Create.model_fields],
)
def test_fields_that_would_change_the_answer_are_refused(name: str, neutral: Any) -> None:
    if name not in Create.model_fields:
        error = refuse(body, **{name: {"some": "thing"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        body(**{name: neutral})


def test_unknown_fields_are_reported() -> None:
    _, ignored = body(
        reasoning={"effort": "low", "mode": 1},
        text={"verbosity": "low", "format": {"type": "text"}},
        client_metadata={"a": "b"},
        include=["x"],
        stream_options={"include_obfuscation": True},
    )
    assert ignored == ["client_metadata", "include", "reasoning.mode", "text.verbosity"]


@pytest.mark.parametrize(
    ("given", "format"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat("text.format", {"type": "object"})),
        (
            {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}},
            AnswerFormat("text.format.schema", {"type": "object"}),
        ),
    ],
)
def test_format(given: Any, format: AnswerFormat | None) -> None:
    assert body(text={"format": given})[0].format == format


def test_an_effort_has_two_names() -> None:
    want = {"reasoning_effort": "low"}
    assert body(reasoning_effort="low")[0].options == want
    assert body(reasoning={"effort": "low"})[0].options == want


def test_limits() -> None:
    assert body(max_output_tokens=5)[0].limit == 5
    assert body(max_output_tokens=5, max_tokens=3)[0].limit == 5


# ---- items
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (said("user", "hello"), {"role": "user", "content": "hello"}),
        ({"role": "developer", "content": "hello"}, {"role": "developer", "content": "hello"}),
        ({"type": None, "role": "system", "content": ""}, {"role": "system", "content": ""}),
        (
            said("user", [part("input_text", "a"), part("text", "b")]),
            {"role": "user", "content": "ab"},
        ),
        (
            said("assistant", [part("output_text", "a"), part("refusal", "b")]),
            {"role": "assistant", "content": "ab"},
        ),
        (call("c"), {"role": "assistant", "tool_calls": [chat_call("c")]}),
        (
            call("c", namespace="mcp__git__"),
            {"role": "assistant", "tool_calls": [chat_call("c", "mcp__git__f")]},
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"\n'},
            {
                "role": "assistant",
                "tool_calls": [chat_call("c", "patch", '{"input": "a \\"b\\"\\n"}')],
            },
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ),
        (
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [part("input_text", "ok")],
            },
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ),
    ],
)
def test_items(item: Any, message: Any) -> None:
    assert messages(item) == [message]


def test_what_an_assistant_did_in_a_row_is_one_message() -> None:
    thought = {
        "type": "reasoning",
        "summary": [part("summary_text", "hm"), part("summary_text", "so")],
    }
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    raw = {"type": "reasoning", "summary": [], "content": [part("reasoning_text", "raw")]}
    assert messages(
        said("user", "hello"),
        {**thought, "encrypted_content": "gAAA"},
        said("assistant", "I look."),
        call("c"),
        call("d"),
        output,
        raw,
        said("assistant", "It"),
        said("assistant", "is."),
        call("e"),
        said("assistant", "So."),
    ) == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "reasoning_content": "hm\n\nso",
            "content": "I look.",
            "tool_calls": [chat_call("c"), chat_call("d")],
        },
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {
            "role": "assistant",
            "reasoning_content": "raw",
            "content": "It\n\nis.So.",  # what a call parts was said in one answer
            "tool_calls": [chat_call("e")],
        },
    ]


def test_reasoning_that_led_to_nothing_is_left_out() -> None:
    thought = {"type": "reasoning", "summary": [part("summary_text", "hm")]}
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    assert messages(thought, said("user", "hello"), empty) == [{"role": "user", "content": "hello"}]


def test_what_hosted_tools_did_is_left_out_and_reported() -> None:
    items = [{"type": kind, "id": "x"} for kind in sorted(HOSTED_ITEMS)]
    ignored: list[str] = []
    made = chat_messages([], [*items, said("user", "hello")], ignored)
    assert made == [{"role": "user", "content": "hello"}]
    assert ignored == [f"input[].{kind}" for kind in sorted(HOSTED_ITEMS)]


@pytest.mark.parametrize(
    ("item", "at"),
    [
        (said("user", 5), "input[1].content"),
        (said("user", [{"type": "input_image", "image_url": "data:"}]), "input[1].content[0].type"),
        (
            said("user", [part("input_text", "a"), {"type": "input_file", "file_id": "x"}]),
            "input[1].content[1].type",
        ),
        (said("user", ["hello"]), "input[1].content[0]"),
        (said("tool", "hello"), "input[1].role"),
        ({"type": "message"}, "input[1].role"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name"),
        (call("c", arguments={"a": 1}), "input[1].arguments"),  # type: ignore[arg-type]
        (call("c", namespace=5), "input[1].namespace"),
        ({"type": "function_call_output", "output": "ok"}, "input[1].call_id"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input[1].output[0].type",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": None}, "input[1].output"),
        ({"type": "reasoning", "summary": [5]}, "input[1].summary[0]"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1]"),
        ({"type": {"a": 1}}, "input[1]"),
    ],
)
def test_items_that_cannot_be_read(item: Any, at: str) -> None:
    items = [said("user", "hello"), item]
    assert refuse(chat_messages, [said("user", "earlier")], items, []).param == at


# ---- tools
# ----------------------------------------------------------------------------------------------


def test_tools() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    found, ignored = tools(
        function("f", description="does", strict=False),
        {"type": "custom", "name": "patch", "description": "edits", "format": grammar},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "agents",
            "tools": [function("spawn", strict=True), function("f"), {"type": "new"}],
        },
        {"type": "namespace", "name": "mcp__git__", "tools": [{"type": "custom", "name": "say"}]},
    )
    assert list(found) == ["f", "patch", "agents__spawn", "agents__f", "mcp__git__say"]
    assert {tool.definition["type"] for tool in found.values()} == {"function"}
    told = {name: tool.definition["function"] for name, tool in found.items()}
    assert all(name == function["name"] for name, function in told.items())
    assert told["f"] == {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert {name for name, function in told.items() if "strict" in function} == {"agents__spawn"}
    text = told["patch"]["parameters"]["properties"]["input"]
    assert text["type"] == "string" and text["description"].endswith('lark grammar:\nstart: "x"')
    assert "grammar" not in json.dumps(told["mcp__git__say"])
    assert ignored == ["tools[].web_search", "tools[].new"]
    known = {name: (t.type, t.name, t.namespace) for name, t in found.items()}
    assert known["f"] == ("function", "f", None)
    assert known["agents__spawn"] == ("function", "spawn", "agents")
    assert known["mcp__git__say"] == ("custom", "say", "mcp__git__")


def test_no_tools() -> None:
    assert body()[0].tools == [] and body()[0].tool_choice == "auto"


@pytest.mark.parametrize(
    ("tool", "at"),
    [
        (5, "tools[0]"),
        ({"name": "f"}, "tools[0]"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        (
            {"type": "namespace", "name": "n", "tools": [{"type": "custom"}]},
            "tools[0].tools[0].name",
        ),
    ],
)
def test_wrong_tools(tool: Any, at: str) -> None:
    assert refuse(tools, tool).param == at


PATCH = {"type": "custom", "name": "patch"}


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "n"}, "n__f"),
        (PATCH, "patch"),
    ],
)
def test_tool_choice(value: Any, choice: Any) -> None:
    chosen = body(tool_choice=value)[0].tool_choice
    assert choice == (chosen if isinstance(chosen, str) else chosen.full_name)


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ("any", "tool_choice"),
        (5, "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [PATCH]}, "tool_choice.type"),
    ],
)
def test_wrong_choices(value: Any, at: str) -> None:
    assert refuse(body, tool_choice=value).param == at
