"""A value of the wrong type at every place of a body: what is refused is refused in JSON's words, not
in Python's."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.server import anthropic, app, ollama
from mlxspec.server.body import Strict
from mlxspec.server.openai import schema as openai
from mlxspec.server.rerank import Rerank
from mlxspec.server.responses import schema as responses
from mlxspec.text.chat import load_tokenizer
from tests.support.scripted import server
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.anyio

# Python's words for JSON's types, and how pydantic and re speak of its own.
PYTHON = re.compile(
    r"\b(str|int|dict|[Dd]ictionary|[Ll]ist|tuple|bool|float|None|NoneType|True|False|instance"
    r"|discriminator|tags?|validation|[A-Z]\w+Error)\b"
)
WRONG: list[Any] = [None, True, -3, float("inf"), "x", [], ["x"] * 33, [None], {"a": 1}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
SAID: list[Any] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
    {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "d"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
]
SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "stop": ["z"],
    "stop_token_ids": [3],
    "ignore_eos": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.5},
    "seed": 1,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    "loop_guard": True,
    "n": 1,
    "stream": False,
    "stream_options": {
        "include_usage": True,
        "include_progress": False,
        "include_obfuscation": False,
    },
    "return_progress": False,
    "priority": 1,
    "service_tier": "auto",
    "model": "tiny",
}
TEMPLATE: dict[str, Any] = {
    "reasoning_effort": "low",
    "reasoning": {"effort": "low", "max_tokens": 5},
    "chat_template_kwargs": {"a": 1},
}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "g", "parameters": SCHEMA, "strict": False},
}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
BODIES: list[tuple[str, type[Strict], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        openai.Chat,
        {
            **SAMPLING,
            **TEMPLATE,
            "messages": SAID,
            "tools": [OPENAI_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": True,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (
        "/v1/chat/completions",
        openai.Chat,
        {
            "messages": SAID[:2],
            "tool_choice": "none",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "description": "d", "strict": True, "schema": SCHEMA},
                "schema": SCHEMA,
            },
            "functions": [{"name": "f", "parameters": SCHEMA}],
            "function_call": {"name": "f"},
            "grammar": "start: /a/",
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/completions",
        openai.Completion,
        {"prompt": ["a", [3, 4]], "logprobs": 1, "suffix": ""},
    ),
    (
        "/v1/messages",
        anthropic.Messages,
        {
            "max_tokens": 2,
            "stop_sequences": ["z"],
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "is_error": False,
                            "content": [
                                {"type": "text", "text": "r"},
                                {"type": "tool_reference", "tool_name": "f"},
                            ],
                        },
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "a", "data": "x"},
                        },
                    ],
                },
            ],
            "tools": [
                {
                    "type": "custom",
                    "name": "f",
                    "description": "d",
                    "input_schema": SCHEMA,
                    "strict": False,
                    "defer_loading": False,
                }
            ],
            "tool_choice": {"type": "auto", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 3},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "thread": None,
        },
    ),
    (
        "/v1/responses",
        responses.Create,
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
                {
                    "type": "function_call",
                    "call_id": "1",
                    "name": "f",
                    "namespace": "n",
                    "arguments": '{"a": "b"}',
                },
                {"type": "function_call_output", "call_id": "1", "output": "o"},
                {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "i"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "2",
                    "output": [{"type": "input_text", "text": "o"}],
                },
            ],
            "instructions": "i",
            "previous_response_id": None,
            "store": True,
            "metadata": {"a": "b"},
            "tools": [
                {**FUNCTION, "strict": False},
                {"type": "custom", "name": "c", "description": "d", "format": GRAMMAR},
                {"type": "namespace", "name": "n", "tools": [FUNCTION]},
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": True,
            "reasoning": {"effort": "low", "summary": "auto", "max_tokens": 5},
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "s",
                    "description": "d",
                    "strict": True,
                    "schema": SCHEMA,
                }
            },
            "top_logprobs": None,
        },
    ),
    ("/v1/embeddings", openai.Embeddings, {"input": ["a", [3]], "encoding_format": "float"}),
    ("/v1/rerank", Rerank, {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/v1/tokenize", app.Tokenize, {"prompt": "a", "add_special_tokens": True}),
    ("/v1/detokenize", app.Detokenize, {"tokens": [3]}),
    ("/v1/models/load", app.Load, {"model": "tiny", "pin": True, "force": False}),
    ("/v1/fim/completions", openai.Fill, {"prompt": "a", "suffix": "b"}),
    ("/infill", openai.Infill, {"input_extra": [{"filename": "a", "text": "b"}], "n_predict": 2}),
    (
        "/api/chat",
        ollama.Chat,
        {
            "messages": [{"role": "user", "content": "a", "images": ["x"], "thinking": "t"}],
            "tools": [OPENAI_TOOL],
            "options": {"num_predict": 2, "temperature": 0.5},
            "format": "json",
            "think": True,
            "num_predict": 2,
        },
    ),
    (
        "/api/generate",
        ollama.Generate,
        {
            "prompt": "a",
            "suffix": "",
            "system": "s",
            "images": ["x"],
            "raw": False,
            "stream": False,
        },
    ),
]
WHOLE = {openai.Chat, openai.Completion, anthropic.Messages, responses.Create}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a body."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from places(item, (*at, key))


def changed(body: Any, at: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return body


def names_of(kind: type[Strict]) -> set[str]:
    """The fields of a body as clients write them."""
    return {
        field.alias if isinstance(field.alias, str) else name
        for name, field in kind.model_fields.items()
    }


def test_no_field_is_forgotten() -> None:
    """Those that the endpoints share are sent to one."""
    for kind in WHOLE:
        sent = set[str]().union(*(body for _, other, body in BODIES if other is kind))
        sent |= SAMPLING.keys() | TEMPLATE.keys()
        assert names_of(kind) <= sent, names_of(kind) - sent


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, body) for path, _, body in BODIES],
    ids=lambda x: x if isinstance(x, str) else "",
)
async def test_errors_speak_of_json(path: str, body: Any, agent: tuple[Any, Path]) -> None:
    s, refused = server(*agent), 0
    for at in places(body):
        for value in WRONG:
            answer = await s.post(path, changed(body, at, value))
            if answer.status == 200:
                continue
            refused += 1
            told = answer.json["error"]
            message = told if isinstance(told, str) else told["message"]
            # What stands in quotes is the client's own, or JSON to send.
            prose = re.sub(r"= .*: |\"[^\"]*\"|'[^']*'|\{.*\}", " ", message)
            assert not (found := PYTHON.search(prose)), (found[0], at, value, message)
    assert refused > 4


async def test_the_forms_that_a_field_may_have_are_all_named(agent: tuple[Any, Path]) -> None:
    s = server(*agent)
    answer = await s.post("/v1/completions", {"prompt": 5})
    assert answer.error["message"] == "prompt = 5: Input should be a valid array or a valid string"
    answer = await s.post("/v1/rerank", {"query": "a", "documents": [{"text": 5}]})
    assert answer.error["param"] == "documents[0].text"
    answer = await s.post("/api/chat", {"messages": [{"role": "user", "content": "a"}], "think": 5})
    assert answer.json["error"] == "think = 5: Input should be a valid boolean or a valid string"
    answer = await s.chat(tool_choice={"type": "function", "function": {"name": 5}})
    assert answer.error["param"] == "tool_choice.function.name"
    answer = await s.chat(logit_bias={"5": "a"})
    assert answer.error["param"] == "logit_bias.5"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/v1/completions", "prompt"),
        ("/v1/embeddings", "input"),
        ("/v1/rerank", "documents"),
        ("/v1/tokenize", "messages"),
    ],
)
async def test_empty_lists(path: str, field: str, agent: tuple[Any, Path]) -> None:
    body = {"query": "a", "max_tokens": 2, field: []}
    answer = await server(*agent).post(path, body)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(f"{field} = []: send at least ")


@pytest.mark.parametrize("sent", [None, 5, 0.5, True, [], {}])
async def test_a_template_that_python_fails_in(sent: Any, tmp_path: Path) -> None:
    template = "{{ 'a' + b }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path = save_tokenizer(tmp_path, template=template)
    s = server(load_tokenizer(path), path)
    assert (await s.chat(chat_template_kwargs={"b": "x"})).status == 200
    answer = await s.chat(chat_template_kwargs={"b": sent})
    message = answer.error["message"]
    assert answer.status == 400 and not PYTHON.search(message), message
