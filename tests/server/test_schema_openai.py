"""The bodies of OpenAI's endpoints: types, ranges, refused fields, and that every field is used."""

import json
import re
from typing import Any

import pytest

from mlxspec.server.app import Detokenize, Tokenize
from mlxspec.server.body import parse
from mlxspec.server.errors import ApiError
from mlxspec.server.openai.schema import UNSUPPORTED, Chat, Completion, Embeddings, OneEmbedding
from tests.support.scripted import MESSAGES, Server, server

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
        b"[" * 100_000,
        b'{"n": 01}',
        b"{'n': 1}",
    ],
)
def test_not_a_json_object(data: bytes) -> None:
    assert refuse(Chat, data).code == "invalid_json"


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
    ("max_tokens", -2),
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
    ("priority", 1001),
    ("priority", -1001),
    ("priority", "5"),
    ("priority", 1.5),
    ("priority", True),
    ("service_tier", 5),
    ("prediction", "text"),
    ("prediction", {}),
    ("prediction", []),
    ("prediction.type", {"content": "x"}),
    ("prediction.type", {"type": "x", "content": ""}),
    ("prediction.content", {"type": "content"}),
    ("prediction.content", {"type": "content", "content": {"text": "x"}}),
    ("prediction.content[0]", {"type": "content", "content": ["x"]}),
    (
        "prediction.content[0].type",
        {"type": "content", "content": [{"type": "image_url", "text": ""}]},
    ),
    ("prediction.content[0].text", {"type": "content", "content": [{"type": "text"}]}),
    ("prediction.content", {"type": "content", "content": [{"type": "text", "text": ""}] * 1025}),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {}),
    ("max_completion_tokens", "9"),
    ("tool_choice", "any"),
    ("tool_choice", {"type": "function"}),
    ("response_format", "json"),
    ("response_format.type", {"type": "xml"}),
    ("logprobs", 1),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("reasoning_effort", 1),
    ("reasoning", "low"),
    ("reasoning.effort", {"effort": 5}),
    ("reasoning.max_tokens", {"max_tokens": -1}),
    ("return_progress", "yes"),
    ("stream_options", {"include_progress": 1}),
    ("chat_template_kwargs", []),
]


def chat(**fields: Any) -> Chat:
    return parse(Chat, json.dumps(CHAT | fields).encode())[0]


def test_minus_one_is_no_value() -> None:
    """As programs of Ollama, llama.cpp and LM Studio send it."""
    body = chat(seed=-1, max_tokens=-1, max_completion_tokens=-1)
    assert body.seed is None and body.limit is None


def test_logprobs_that_are_turned_off() -> None:
    assert chat(logprobs=False, top_logprobs=0).alternatives is None
    assert chat(logprobs=True, top_logprobs=0).alternatives == 0
    assert chat(logprobs=True).alternatives == 0
    assert chat(top_logprobs=3).alternatives == 3


def test_a_schema_may_stand_where_llama_cpp_has_it() -> None:
    schema = {"type": "object", "required": ["a"]}
    for kind in ("json_object", "json_schema"):
        found = chat(response_format={"type": kind, "schema": schema}).format
        assert found and found.value == schema


@pytest.mark.parametrize(("param", "value"), WRONG)
def test_wrong_values_are_refused_by_name(param: str, value: Any) -> None:
    name = param.partition(".")[0]
    error = refuse(Chat, CHAT | {name: value})
    assert error.param is not None and error.param.startswith(param)
    assert error.message.startswith(name) and len(error.message) < 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "logit_bias"])
def test_only_finite_numbers(name: str, value: str) -> None:
    shown = f'{{"5": {value}}}' if name == "logit_bias" else value
    error = refuse(Chat, f'{{"messages": [1], "{name}": {shown}}}'.encode())
    assert error.code == "invalid_json" or error.param in (name, f"{name}.5")


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_null_is_like_a_missing_field(kind: Any) -> None:
    needed = CHAT if kind is Chat else COMPLETION
    nulls = dict.fromkeys([*kind.model_fields, *UNSUPPORTED])
    assert parse(kind, json.dumps(nulls | needed).encode()) == parse(
        kind, json.dumps(needed).encode()
    )


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("kind", [Chat, Completion])
def test_fields_that_would_change_the_answer_are_refused(kind: Any, name: str) -> None:
    body = CHAT if kind is Chat else COMPLETION
    if name in kind.model_fields:
        return
    error = refuse(kind, body | {name: {"some": "thing"}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    parse(kind, json.dumps(body | {name: UNSUPPORTED[name]}).encode())


def test_counting_tokens_takes_a_whole_chat_body() -> None:
    body = CHAT | {"max_completion_tokens": 5, "logprobs": True, "echo": True, "user": "me"}
    unknown = parse(Tokenize, json.dumps(body).encode())[1]
    assert unknown == ["max_completion_tokens", "logprobs", "echo", "user"]
    assert refuse(Tokenize, CHAT | {"documents": [1]}).param == "documents"


def test_unknown_fields_are_reported() -> None:
    body = CHAT | {
        "stream_options": {"include_usage": True, "include_obfuscation": False, "speed": 1},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}], "sure": 1},
        "colour": 1,
        "verbosity": "low",
        "user": "me",
    }
    assert parse(Chat, json.dumps(body).encode())[1] == [
        "colour",
        "verbosity",
        "user",
        "stream_options.speed",
        "prediction.sure",
    ]


API = {Chat: "chat", Completion: "completions"}
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
    "max_output_tokens": 1,
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
    "loop_guard": False,
    "priority": -3,
    "service_tier": "flex",
    "messages": [{"role": "user", "content": "you"}],
    "prompt": "you",
    "logprobs": {"chat": True, "completions": 1},
    "top_logprobs": 3,  # beside logprobs
    "reasoning_effort": "low",
    "reasoning": {"max_tokens": 5},
    "return_progress": True,
    "chat_template_kwargs": {"colour": "red"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},  # beside functions
    "tool_choice": "required",  # beside tools
    "parallel_tool_calls": False,  # beside tools, for an answer of two calls
    "response_format": {"type": "json_object"},
    "grammar": 'start: "x"',
    "suffix": "x",  # which the tokenizer here cannot take
}
# Used by some templates and models, not by this one, or with a prompt that takes long.
ELSEWHERE = {"reasoning_effort", "reasoning", "chat_template_kwargs", "return_progress"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in (Chat, Completion)
        for name in kind.model_fields
        if name not in ELSEWHERE
    ],
)
async def test_every_field_is_used(kind: Any, name: str, tokenizer: Any, model_dir: Any) -> None:
    telling = (
        TELLING[name][API[kind]]
        if isinstance(TELLING[name], dict) and API[kind] in TELLING[name]
        else TELLING[name]
    )
    basis: dict[str, Any] = {**(CHAT if kind is Chat else COMPLETION), "seed": 1}
    if name == "top_logprobs":
        basis["logprobs"] = True
    if name == "function_call":
        basis["functions"] = TELLING["functions"]
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
        (
            r.prompt,
            r.max_tokens,
            r.sampling,
            r.stop_tokens,
            r.n,
            r.prediction,
            r.priority,
            forced(r),
        )
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
def test_bodies_of_token_counting(kind: Any, body: Any, param: str) -> None:
    assert refuse(kind, body).param == param


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (Completion, {"prompt": [1, 2, -3]}, "prompt[2]"),
        (Completion, {"prompt": [1, "2"]}, "prompt[1]"),
        (Completion, {"prompt": [[1, 2], [3, -3]]}, "prompt[1][1]"),
        (Embeddings, {"input": [1, 2, -3]}, "input[2]"),
        (Embeddings, {"input": [[1, 2.5]]}, "input[0][1]"),
        (OneEmbedding, {"prompt": 5}, "prompt"),
        (OneEmbedding, {}, "prompt"),
    ],
)
def test_wrong_prompts_are_named_as_the_client_sent_them(kind: Any, body: Any, param: str) -> None:
    assert refuse(kind, body).param == param


def test_token_ids_are_one_prompt() -> None:
    assert parse(Completion, b'{"prompt": [1, 2]}')[0].prompt == [[1, 2]]
    assert parse(Embeddings, b'{"input": [[1], [2]]}')[0].input == [[1], [2]]


def test_a_summary_of_the_reasoning_is_reported_as_ignored() -> None:
    body, ignored = parse(Chat, json.dumps(CHAT | {"reasoning": {"summary": "auto"}}).encode())
    assert ignored == ["reasoning.summary"] and body.reasoning.effort is None
