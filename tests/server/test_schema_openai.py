"""The schema: types are strict, ranges hold, and no field is silently ignored."""

import json
import re
from typing import Any

import pytest

from mlxspec.server.errors import ApiError
from mlxspec.server.fields import HARMLESS, REFUSED
from mlxspec.server.openai.schema import (
    Chat,
    Completion,
    Detokenize,
    Tokenize,
    parse,
)
from tests.server.scripted import MESSAGES, Server, server

CHAT: dict[str, Any] = {"messages": MESSAGES}
COMPLETION: dict[str, Any] = {"prompt": "hello"}


def refuse(kind: Any, body: Any) -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(kind, data)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": 01}',
        b"{'n': 1}",
    ],
)
def test_what_is_not_a_json_object(data: bytes) -> None:
    error = refuse(Chat, data)
    assert error.code == "invalid_json" and "no JSON object" in error.message


WRONG = [
    ("model", 5),
    ("n", 0),
    ("n", 9),
    ("n", "2"),
    ("n", True),
    ("n", 1.0),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", True),
    ("stream_options", {"include_usage": 1}),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 5.5),
    ("stop", 5),
    ("stop", [5]),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 1001]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["5"]),
    ("ignore_eos", "yes"),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "5"}),
    ("logit_bias", {"1": True}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", 2**63),
    ("prediction", "text"),
    ("prediction", {}),
    ("prediction", []),
    ("messages", {}),
    ("max_completion_tokens", "9"),
    ("logprobs", 1),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("reasoning_effort", 1),
    ("chat_template_kwargs", []),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    error = refuse(Chat, CHAT | {name: value})
    assert error.param is not None and error.param.startswith(name)
    assert error.message.startswith(name)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "logit_bias"])
def test_only_finite_numbers(name: str, value: str) -> None:
    shown = f'{{"5": {value}}}' if name == "logit_bias" else value
    error = refuse(Chat, f'{{"messages": [1], "{name}": {shown}}}'.encode())
    assert (
        error.param is not None
        and error.param.startswith(name)
        and "finite number" in error.message
    )


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_null_is_as_if_it_were_not_there(kind: Any) -> None:
    needed = CHAT if kind is Chat else COMPLETION
    nulls = dict.fromkeys([*kind.model_fields, *REFUSED, *HARMLESS])
    assert parse(kind, json.dumps(nulls | needed).encode()) == parse(
        kind, json.dumps(needed).encode()
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    neutral, mend = REFUSED[name]
    kinds = [kind for kind in (Chat, Completion) if name not in kind.model_fields]
    assert kinds
    for kind in kinds:
        body = CHAT if kind is Chat else COMPLETION
        error = refuse(kind, body | {name: {"some": "thing"}})
        assert error.param == name and error.code == "unsupported_parameter"
        assert mend in error.message and '{"some": "thing"}' in error.message
        for value in neutral:
            assert parse(kind, json.dumps(body | {name: value}).encode())[1] == []


# What other servers take and what would change an answer; none of it may pass with a mere mention.
FOREIGN = {
    "chat": {"echo": True, "best_of": 2, "prompt": "x"},
    "completions": {
        "max_completion_tokens": 5,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "messages": [],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "both": {
        "max_new_tokens": 5,
        "repeat_penalty": 1.1,
        "typical_p": 0.9,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template": "{{ messages }}",
        "documents": [{"text": "x"}],
        "truncate_prompt_tokens": 100,
        "thinking": {"type": "enabled"},
        "enable_thinking": False,
        "system": "be kind",
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind in (Chat, Completion)
        for name, value in (FOREIGN[kind.api] | FOREIGN["both"]).items()
    ],
)
def test_what_another_endpoint_has_is_refused_here(kind: Any, name: str, value: Any) -> None:
    error = refuse(kind, (CHAT if kind is Chat else COMPLETION) | {name: value})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("n", "5", 'n = "5" is not a whole number; send one'),
        ("n", 1.5, "n = 1.5 is not a whole number; send one"),
        ("n", 0, "n = 0 is too small; send 1 or more"),
        ("n", 9, "n = 9 is too large; send 8 or less"),
        ("seed", 2**63, "is too large; send less than 9223372036854775808"),
        ("temperature", "hot", 'temperature = "hot" is not a number; send one'),
        ("stream", "yes", 'stream = "yes" is neither true nor false; send one of them'),
        ("messages", [], "messages = [] is empty; send 1 at least"),
        ("messages", "hi", 'messages = "hi" is not a list; send one'),
        (
            "stop",
            [""],
            'stop = [""] holds an empty or overlong string; send 1 to 1000 characters each',
        ),
        ("stop", ["a"] * 17, "holds 17 strings; send 16 at most"),
        ("stop_token_ids", [1] * 17, "holds more than 16; leave some out"),
        ("logit_bias", [1], "logit_bias = [1] is not an object; send one"),
        ("stream_options", 5, "stream_options = 5 is not an object; send one"),
        ("reasoning_effort", 1, "reasoning_effort = 1 is not a string; send one"),
    ],
)
def test_every_refusal_has_a_mend(name: str, value: Any, why: str) -> None:
    assert why in refuse(Chat, CHAT | {name: value}).message


@pytest.mark.parametrize("kind", [Chat, Completion])
@pytest.mark.parametrize(
    ("value", "param", "why"),
    [
        ("text", "prediction", 'prediction = "text" is not an object; send one'),
        ({"content": "x"}, "prediction.type", "prediction.type is missing; send it"),
        ({"type": "content"}, "prediction.content", "prediction.content is missing; send it"),
        (
            {"type": "x", "content": ""},
            "prediction.type",
            "type = \"x\" is not supported; send 'content'",
        ),
        ({"type": None, "content": ""}, "prediction.type", "type = null is not supported"),
        (
            {"content": None},
            "prediction.content",
            "null is neither a string nor a list of text parts; send",
        ),
        (
            {"content": {"text": "x"}},
            "prediction.content",
            "is neither a string nor a list of text parts",
        ),
        ({"content": ["x"]}, "prediction.content[0]", '"x" is not an object; send one'),
        (
            {"content": [{"type": "image_url", "text": ""}]},
            "prediction.content[0].type",
            "prediction.content[0].type = \"image_url\" is not supported; send 'text'",
        ),
        ({"content": [{"type": "text"}]}, "prediction.content[0].text", "is missing; send it"),
        (
            {"content": [{"type": "text", "text": 5}]},
            "prediction.content[0].text",
            "5 is not a string",
        ),
        (
            {"content": [{"type": "text", "text": ""}] * 1025},
            "prediction.content",
            "holds more than 1024",
        ),
    ],
)
def test_wrong_predictions(kind: Any, value: Any, param: str, why: str) -> None:
    if isinstance(value, dict) and param.startswith("prediction.content") and "content" in value:
        value = {"type": "content"} | value
    error = refuse(kind, (CHAT if kind is Chat else COMPLETION) | {"prediction": value})
    assert error.param == param and why in error.message


def test_a_neutral_value_is_not_mistaken_for_another_type() -> None:
    for name, value in (
        ("min_tokens", False),
        ("use_beam_search", 0),
        ("bad_words", {}),
        ("functions", [{}]),
    ):
        assert refuse(Chat, CHAT | {name: value}).param == name


@pytest.mark.parametrize(
    "key", ["{x}", "{error!s:>100000000}", "{error.__traceback__.tb_frame}", "{"]
)
def test_a_clients_braces_are_only_text(key: str) -> None:
    error = refuse(Chat, CHAT | {"logit_bias": {key: 1}})
    assert repr(key) in error.message and len(error.message) < 300


def test_counting_tokens_takes_a_whole_chat_body() -> None:
    """What cannot change the tokens is reported, what can is refused."""
    body = CHAT | {
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "echo": True,
        "user": "me",
    }
    assert parse(Tokenize, json.dumps(body).encode())[1] == [
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "echo",
    ]
    assert refuse(Tokenize, CHAT | {"documents": [1]}).param == "documents"
    assert parse(Detokenize, b'{"tokens": [1], "prompt": "x"}')[1] == ["prompt"]


@pytest.mark.parametrize(("name", "value"), [("chat_template_kwargs", {}), ("top_logprobs", 0)])
def test_what_asks_for_nothing_passes(name: str, value: Any) -> None:
    assert parse(Completion, json.dumps(COMPLETION | {name: value}).encode())[1] == []


def test_the_tables_do_not_overlap() -> None:
    chat, completion = set(Chat.model_fields), set(Completion.model_fields)
    assert not HARMLESS.keys() & REFUSED.keys()
    assert not (chat | completion) & HARMLESS.keys()
    assert (chat ^ completion) <= REFUSED.keys() and not chat & completion & REFUSED.keys()


def test_long_values_are_shortened() -> None:
    error = refuse(Chat, CHAT | {"temperature": "x" * 100_000})
    assert len(error.message) < 200


def test_unknown_fields_at_every_depth() -> None:
    part = {"type": "text", "text": "x", "cache_control": {}, "blink": 1}
    body = {
        "messages": [
            {"role": "user", "content": [part], "mood": 1, "name": "Ann"},
            {"role": "user", "mood": 2},
        ],
        "stream_options": {"include_usage": True, "include_obfuscation": False, "speed": 1},
        "prediction": {
            "type": "content",
            "content": [{"type": "text", "text": "x", "tint": 1}],
            "sure": 1,
        },
        "colour": 1,
        "user": "me",
    }
    assert parse(Chat, json.dumps(body).encode())[1] == [
        "colour",
        "stream_options.speed",
        "prediction.sure",
        "prediction.content[].tint",
        "messages[].mood",
        "messages[].content[].blink",
    ]


TWO_CALLS = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
# For each field of the two endpoints a value that must show: in what reaches the engine, or in the
# answer.
TELLING: dict[str, Any] = {
    "model": "another",
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "stop": "world",
    "stop_token_ids": [64],
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "seed": 5,
    "prediction": {"type": "content", "content": "you"},
    "messages": [{"role": "user", "content": "you"}],
    "prompt": "you",
    "logprobs": {"chat": True, "completions": 1},
    "top_logprobs": 3,  # beside logprobs
    "reasoning_effort": "low",
    "chat_template_kwargs": {"colour": "red"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",  # beside tools
    "parallel_tool_calls": False,  # beside tools, for an answer of two calls
    "response_format": {"type": "json_object"},
    "grammar": 'start: "x"',
    "echo": True,
    "best_of": 2,  # is not n
}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (Chat, Completion) for name in kind.model_fields]
)
async def test_no_field_is_silently_ignored(
    kind: Any, name: str, tokenizer: Any, model_dir: Any
) -> None:
    telling = (
        TELLING[name][kind.api]
        if isinstance(TELLING[name], dict) and kind.api in TELLING[name]
        else TELLING[name]
    )
    basis: dict[str, Any] = {**(CHAT if kind is Chat else COMPLETION), "seed": 1}
    if name == "top_logprobs":
        basis["logprobs"] = True
    if name in ("tool_choice", "parallel_tool_calls"):
        basis |= {"tools": TELLING["tools"]}
    says = TWO_CALLS if name == "parallel_tool_calls" else "hello world"
    if name == "stream_options":
        basis["stream"] = True
    one, other = [
        await seen(tokenizer, model_dir, kind, body, says)
        for body in (basis, basis | {name: telling})
    ]
    assert one[0] == 200 and one != other


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Chat, Completion])
async def test_harmless_fields_change_nothing(kind: Any, tokenizer: Any, model_dir: Any) -> None:
    basis: dict[str, Any] = {**(CHAT if kind is Chat else COMPLETION), "seed": 1}
    body = basis | dict.fromkeys(HARMLESS, "something")
    assert await seen(tokenizer, model_dir, kind, body) == await seen(
        tokenizer, model_dir, kind, basis
    )


def forced(request: Any) -> Any:
    """What a grammar wants of an answer's beginning."""
    return request.grammar and (request.grammar().forced(9), request.grammar().masks([]))


async def seen(
    tokenizer: Any, model_dir: Any, kind: Any, body: Any, says: str = "hello world"
) -> tuple[Any, ...]:
    """Status, what reached the engine, and the answer, without what differs every time."""
    s: Server = server(tokenizer, model_dir, says=(says,))
    answer = await s.post("/v1/chat/completions" if kind is Chat else "/v1/completions", body)
    engine = [
        (r.prompt, r.max_tokens, r.sampling, r.stop_tokens, r.n, r.prediction, forced(r))
        for r in s.engine.submitted
    ]
    text = re.sub(r'"created":\d+', "", answer.body.decode())
    for request in s.engine.submitted:
        text = text.replace(request.id, "ID")
    return answer.status, engine, answer.headers.get("x-mlxspec-ignored"), text


def test_every_field_has_a_telling_value() -> None:
    assert TELLING.keys() == {*Chat.model_fields, *Completion.model_fields}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (Tokenize, {"prompt": 5}, "prompt"),
        (Tokenize, {"messages": []}, "messages"),
        (Tokenize, {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        (Detokenize, {}, "tokens"),
        (Detokenize, {"tokens": "x"}, "tokens"),
        (Detokenize, {"tokens": [1, "2"]}, "tokens[1]"),
        (Detokenize, {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_the_other_bodies(kind: Any, body: Any, param: str) -> None:
    assert refuse(kind, body).param == param
