"""What Anthropic's endpoints take: the conversation in OpenAI's form, refusals at the client's
path."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.server.anthropic.schema import AT_CHAT, HARMLESS, REFUSED, Messages, Prompt, parsed
from mlxspec.server.errors import ApiError
from mlxspec.server.fields import MAX_STOPS

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def take(**body: Any) -> tuple[Messages, list[Any], list[str]]:
    given = {"max_tokens": 9, "messages": HELLO} | body
    return parsed(Messages, json.dumps({k: v for k, v in given.items() if v is not ...}).encode())


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
    bare = {"type": "custom", "name": "wait", "input_schema": {}}
    body, _, ignored = take(tools=[{**LOOK, "cache_control": {}, "strict": True}, bare])
    assert body.functions == [
        {
            "type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "wait", "parameters": {}}},
    ]
    assert ignored == [] and take()[0].functions == []


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
            {"name": "look"},
            True,
        ),
    ],
)
def test_the_choice_of_tools(sent: Any, choice: Any, single: bool) -> None:
    body, _, _ = take(tools=[LOOK], tool_choice=sent)
    assert (body.choice, body.single) == (choice, single)


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
    assert after[0].functions == before.functions and len(before.functions) == 1
    assert after[1][2]["content"] == (
        "You can call this tool from now on:\n"
        '{"name": "fly", "description": "Flies.", "parameters": {"type": "object"}}\n'
        "The tool gone is not available.\n"
    )
    for choice in ({"type": "tool", "name": "fly"}, {"type": "any"}):
        with pytest.raises(ApiError, match="or is deferred"):
            take(tools=[late], tool_choice=choice)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"max_tokens": ...}, "max_tokens", "max_tokens is missing; send it"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0 is too small; send 1 or more"),
        ({"max_tokens": "9"}, "max_tokens", "is not a whole number; send one"),
        ({"messages": ...}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": ["hi"]}, "messages[0].role", "is no role; send user, assistant or system"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role", '= ["user"] is no role'),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role",
            '= "tool" is no role',
        ),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content",
            "null is neither a string nor a list",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
            "messages",
            "cannot be begun here",
        ),
        ({"messages": [user("hi")]}, "messages[0].content[0].type", "= null is not supported here"),
        (
            {"messages": [user(text("a"), IMAGE)]},
            "messages[0].content[1].type",
            '"image" is not supported',
        ),
        (
            {"messages": [user({**IMAGE, "type": "document"})]},
            "messages[0].content[0].type",
            "reads text only",
        ),
        (
            {"messages": [user({**RESULT, "content": [IMAGE]})]},
            "messages[0].content[0].content[0].type",
            "image",
        ),
        (
            {"messages": [user({**RESULT, "content": 7})]},
            "messages[0].content[0].content",
            "= 7 is neither",
        ),
        (
            {"messages": [user({"type": "tool_result"})]},
            "messages[0].content[0].tool_use_id",
            "send a string",
        ),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "send a string"),
        (
            {"messages": [user({"type": "tool_use"})]},
            "messages[0].content[0].type",
            "send text or tool_result",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b"}],
                    },
                    *HELLO,
                ]
            },
            "messages[0].content[0].input",
            "send an object",
        ),
        ({"system": 7}, "system", "= 7 is neither a string nor a list of blocks"),
        ({"system": [IMAGE]}, "system[0].type", "send text"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "is missing"),
        (
            {"tools": [LOOK, {"type": "bash_20250124", "name": "bash"}]},
            "tools[1].type",
            "send a custom tool",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "a"}]},
            "tools[0].type",
            '"web_search_20250305"',
        ),
        ({"tools": [LOOK, LOOK]}, "tools", "holds a name twice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "asks for a tool that is not in tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [LOOK]}, "tool_choice", "not in tools"),
        ({"tool_choice": "auto"}, "tool_choice", "is not an object"),
        (
            {"tool_choice": {"type": "required"}},
            "tool_choice.type",
            "send 'auto', 'any', 'tool' or 'none'",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type", "is not supported"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            "is missing",
        ),
        (
            {"output_config": {"format": {"type": "json_object"}}},
            "output_config.format.type",
            "'json_schema'",
        ),
        ({"stop_sequences": "x"}, "stop_sequences", "is not a list"),
        ({"stop_sequences": [""]}, "stop_sequences", "holds an empty or overlong string"),
        (
            {"stop_sequences": ["x"] * (MAX_STOPS + 1)},
            "stop_sequences",
            f"holds more than {MAX_STOPS}",
        ),
        ({"temperature": 2.1}, "temperature", "send 2.0 or less"),
        ({"top_k": -1}, "top_k", "send 0 or more"),
        ({"top_p": 1.5}, "top_p", "send 1.0 or less"),
    ],
)
def test_refusals(body: Any, param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        take(**body)
    assert caught.value.status == 400 and caught.value.param == param
    assert caught.value.message.startswith(param) and said in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("stop", ["x"], "send stop_sequences instead"),
        ("max_completion_tokens", 9, "send max_tokens instead"),
        ("response_format", {"type": "json_object"}, "send output_config.format instead"),
        ("parallel_tool_calls", False, "send tool_choice.disable_parallel_tool_use instead"),
        ("reasoning_effort", "high", "send thinking instead"),
        ("seed", 1, AT_CHAT),
        ("n", 2, AT_CHAT),
        ("logit_bias", {"1": 2}, AT_CHAT),
        ("chat_template_kwargs", {}, AT_CHAT),
        ("mcp_servers", [{"url": "x"}], "connect the client to them and send their tools"),
        ("prompt", "x", "send it to /v1/completions"),
    ],
)
def test_fields_of_other_apis(name: str, value: Any, mend: str) -> None:
    with pytest.raises(ApiError) as caught:
        take(**{name: value})
    assert caught.value.param == name and caught.value.message.endswith(f"is not supported: {mend}")


def test_values_that_ask_for_nothing_pass() -> None:
    assert (
        take(n=1, presence_penalty=0.0, parallel_tool_calls=True, mcp_servers=[], stop=None)[2]
        == []
    )


def test_harmless_fields_are_not_reported() -> None:
    """As Claude Code sends them."""
    mark = {"type": "ephemeral"}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    call = {
        "type": "tool_use",
        "id": "c",
        "name": "look",
        "input": {},
        "caller": {"type": "direct"},
    }
    _, _, ignored = take(
        system=[text("s", cache_control=mark)],
        messages=[
            user(text("u", cache_control=mark, citations=None)),
            {
                "role": "assistant",
                "content": [thought, {"type": "redacted_thinking", "data": "d"}, call],
            },
            user(
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [text("r", cache_control=mark)],
                }
            ),
        ],
        tools=[{**LOOK, "cache_control": mark, "eager_input_streaming": True, "strict": False}],
        thinking={"type": "adaptive", "display": "omitted", "budget_tokens": 2048},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "{}"},
        service_tier="auto",
        cache_control=mark,
    )
    assert ignored == []


def test_what_nobody_knows_is_reported() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("r", odd=1)], "weight": 2}
    _, _, ignored = take(
        messages=[
            {"role": "user", "content": [text("a", odd=1), text("b", odd=1), result], "name": "me"}
        ],
        system=[text("s", rank=1)],
        tools=[{**LOOK, "input_examples": []}],
        thinking={"type": "enabled", "depth": 3},
        tool_choice={"type": "auto", "taste": 1},
        output_config={"style": "x"},
        wish="x",
        signature="s",
    )
    assert sorted(ignored) == sorted(
        "wish signature system[].rank messages[].name messages[].content[].odd messages[].content[].weight"
        " messages[].content[].content[].odd tools[].input_examples thinking.depth tool_choice.taste"
        " output_config.style".split()
    )


def test_counting_takes_an_answer_at_the_end() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "I"}]
    _, said, ignored = parsed(Prompt, json.dumps({"messages": turns}).encode())
    assert said == turns and ignored == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": [}'])
def test_no_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(Messages, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


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


def test_the_page_tells_what_has_no_effect() -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8")
    for name, why in HARMLESS.items():
        assert f"`{name}`" in page and why[1:] in page, name
    own = {name for name in REFUSED if name not in Messages.model_fields}
    assert [name for name in own if f"`{name}`" not in page] == []
