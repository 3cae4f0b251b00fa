"""The bodies of Anthropic's endpoints: the conversation in OpenAI's form, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.server.anthropic import Messages, Prompt, chat_messages
from mlxspec.server.body import MAX_STOPS, parse
from mlxspec.server.errors import ApiError
from mlxspec.server.openai.schema import UNSUPPORTED

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def take(**body: Any) -> tuple[Messages, list[Any], list[str]]:
    given = {"max_tokens": 9, "messages": HELLO} | body
    data = json.dumps({k: v for k, v in given.items() if v is not ...}).encode()
    body, ignored = parse(Messages, data)
    return body, chat_messages(body), ignored


def chat(*messages: Any, **body: Any) -> list[Any]:
    return take(messages=list(messages), **body)[1]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_a_conversation() -> None:
    said = chat(
        user(text("what is "), text("there?")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "abc"},
                text("Let me see."),
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "/", "é": 1}},
                {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
            ],
        },
        user(
            {"type": "tool_result", "tool_use_id": "c1", "content": "a"},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [text("b"), text("c")],
                "is_error": True,
            },
            {"type": "tool_result", "tool_use_id": "c3"},
            text("go on"),
        ),
        {"role": "system", "content": "be quick"},
        system=[text("be "), text("kind")],
        tools=[LOOK],
    )
    assert said == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is there?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"at": "/", "é": 1}},
                },
                {"id": "c2", "type": "function", "function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: bc"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "be quick"},
    ]


def test_a_list_of_one_block_is_its_string() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1"}
    spelled = [
        chat(
            *({"role": role, "content": some("x")} for role in ("user", "assistant", "system")),
            user({**result, "content": some("x")}),
            system=some("y"),
        )
        for some in (lambda t: t, lambda t: [text(t, cache_control={"type": "ephemeral"})])
    ]
    assert spelled[0] == spelled[1] and len(spelled[0]) == 5


def test_results_come_before_the_text_beside_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
    both = [[text("a"), result], [result, text("a")]]
    assert chat(user(*both[0])) == chat(user(*both[1]))
    assert [m["role"] for m in chat(user(result))] == ["tool"]
    assert chat(user()) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    "header", ["x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=0a1b2;"]
)
def test_a_nonce_leaves_no_trace(header: str) -> None:
    for system in ([text(header)], header, header + "\n", ""):
        assert chat(*HELLO, system=system) == HELLO
    plain = chat(*HELLO, system="You help.")
    assert plain == [{"role": "system", "content": "You help."}, *HELLO]
    for system in (
        [text(header), text("You help.")],
        f"{header}\nYou help.",
        [text(f"{header}\nYou help.")],
    ):
        assert chat(*HELLO, system=system) == plain
    late = {"role": "system", "content": [text(header)]}
    assert chat(*HELLO, late) == HELLO


def test_tools() -> None:
    bare = {"type": "custom", "name": "wait", "input_schema": {}, "strict": False}
    body, _, ignored = take(tools=[{**LOOK, "cache_control": {}, "strict": True}, bare])
    assert body.functions(deferred=False) == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "strict": True,
                "parameters": {"type": "object"},
            },
        },
        {"type": "function", "function": {"name": "wait", "parameters": {}}},
    ]
    assert ignored == [] and take()[0].functions(deferred=False) == []


@pytest.mark.parametrize(
    ("sent", "choice", "single"),
    [
        (..., "auto", False),
        ({"type": "auto"}, "auto", False),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", True),
        ({"type": "any"}, "required", False),
        ({"type": "none"}, "none", False),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            "look",
            True,
        ),
    ],
)
def test_the_choice_of_tools(sent: Any, choice: Any, single: bool) -> None:
    body, _, _ = take(tools=[LOOK], tool_choice=sent)
    assert choice == (body.choice if isinstance(body.choice, str) else body.choice.full_name)
    assert body.tool_choice.disable_parallel_tool_use == single


def test_a_deferred_tool_is_told_where_it_is_referred_to() -> None:
    late = {
        "name": "fly",
        "description": "Flies.",
        "input_schema": {"type": "object"},
        "defer_loading": True,
    }
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("fly", "gone")]
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {}}],
        },
        user({"type": "tool_result", "tool_use_id": "c1", "content": found}),
    ]
    before, after = take(tools=[search])[0], take(tools=[late, search], messages=turns)
    assert after[0].functions(deferred=False) == before.functions(deferred=False)
    assert [f["function"]["name"] for f in after[0].functions(deferred=True)] == ["fly"]
    assert after[1][2]["content"] == (
        "You can call this tool from now on:\n"
        '{"name": "fly", "description": "Flies.", "parameters": {"type": "object"}}\n'
        "The tool gone is not available.\n"
    )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


CALL = {"type": "tool_use", "id": "a", "name": "b"}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user("hi")]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "sound"})]}, "messages[0].content[0]"),
        (
            {"messages": [user({**RESULT, "content": 7})]},
            "messages[0].content[0].tool_result.content",
        ),
        (
            {"messages": [user({"type": "tool_result"})]},
            "messages[0].content[0].tool_result.tool_use_id",
        ),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text.text"),
        (
            {"messages": [{"role": "assistant", "content": [CALL]}, *HELLO]},
            "messages[0].content[0].tool_use.input",
        ),
        ({"system": 7}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [LOOK, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * (MAX_STOPS + 1)}, "stop_sequences"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_refusals(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        take(**body)
    assert caught.value.status == 400 and caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1]"),
        ({"messages": [user({**IMAGE, "type": "document"})]}, "messages[0].content[0]"),
        (
            {"messages": [user({**RESULT, "content": [IMAGE]})]},
            "messages[0].content[0].tool_result.content[0].type",
        ),
        ({"messages": HELLO, "tools": [WEB_SEARCH]}, "tools[0].type"),
    ],
)
def test_strictly_nothing_is_left_out(body: Any, param: str) -> None:
    data = json.dumps({"max_tokens": 9} | body).encode()
    parse(Messages, data)
    with pytest.raises(ApiError) as caught:
        parse(Messages, data, strict=True)
    assert caught.value.status == 400 and caught.value.param == param


def test_tools_of_anthropics_servers_are_left_out_and_named() -> None:
    fetch = {"type": "web_fetch_20260318", "name": "web_fetch"}
    body, _, ignored = take(tools=[WEB_SEARCH, LOOK, fetch, {"type": "mcp_toolset"}])
    assert [f["function"]["name"] for f in body.functions(deferred=False)] == ["look"]
    assert ignored == [
        "tools[].web_search_20250305",
        "tools[].web_fetch_20260318",
        "tools[].mcp_toolset",
    ]


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "computer_20250124"])
def test_tools_that_the_client_runs_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        take(tools=[WEB_SEARCH, {"type": kind, "name": "x"}])
    assert caught.value.param == "tools[1].type"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - Messages.model_fields.keys()))
def test_fields_of_other_apis_are_refused(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        take(**{name: {"some": "thing"}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    take(**{name: UNSUPPORTED[name]})


def test_claude_codes_fields_are_accepted() -> None:
    mark = {"type": "ephemeral"}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    call = {**CALL, "input": {}, "caller": {"type": "direct"}}
    result = {**RESULT, "content": [text("r", cache_control=mark)]}
    _, _, ignored = take(
        system=[text("s", cache_control=mark)],
        messages=[
            user(text("u", cache_control=mark, citations=None)),
            {
                "role": "assistant",
                "content": [thought, {"type": "redacted_thinking", "data": "d"}, call],
            },
            user(result),
        ],
        tools=[{**LOOK, "cache_control": mark, "eager_input_streaming": True, "strict": False}],
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "{}"},
    )
    assert ignored == ["context_management", "metadata", "thinking.display", "output_config.effort"]


def test_counting_takes_an_answer_at_the_end() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "I"}]
    body, ignored = parse(Prompt, json.dumps({"messages": turns}).encode())
    assert chat_messages(body) == turns and ignored == []


WORDS = st.sampled_from(
    "role content type text user assistant system tool_use tool_result tool_reference thinking id name input"
    " tool_use_id tool_name is_error redacted_thinking".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(sorted(Messages.model_fields)), JSON))
def test_whatever_comes_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        _, said, _ = take(**body)
    except ApiError as error:
        assert error.status == 400 and error.param
    else:
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in said)
