"""Images and files in the three APIs: none of them ends a session."""

import base64
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.config import Config
from mlxspec.server.anthropic import Messages
from mlxspec.server.body import parse
from mlxspec.server.errors import ApiError
from mlxspec.server.openai.schema import Chat
from mlxspec.server.responses.schema import Create, chat_messages
from tests.support.scripted import INFO, Server, server

pytestmark = pytest.mark.anyio

WIDE = replace(INFO, context=8192)
LINE = "left out: this model reads text only]"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNiAAAABgADNjd8qAAAAABJRU5ErkJggg=="
NOTE = "The tide turns at noon: é."
FILE = base64.b64encode(NOTE.encode()).decode()
PDF = base64.b64encode(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj").decode()

Make = Callable[..., Server]


@pytest.fixture
def make(agent: tuple[Any, Path]) -> Make:
    return lambda config=None, **kw: server(*agent, config, **{"info": WIDE, **kw})


def chat(*parts: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}]}


def chat_result(*parts: Any) -> tuple[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": list(parts)},
    ]
    return "/v1/chat/completions", {"messages": turns}


def messages(*parts: Any) -> tuple[str, Any]:
    turns = [{"role": "user", "content": list(parts)}]
    return "/v1/messages", {"max_tokens": 9, "messages": turns}


def messages_result(*parts: Any) -> tuple[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return "/v1/messages", {"max_tokens": 9, "messages": turns}


def responses(*parts: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}]}


def responses_result(*parts: Any) -> tuple[str, Any]:
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": list(parts)},
    ]
    return "/v1/responses", {"input": items}


TEXT = {
    chat: "text",
    chat_result: "text",
    messages: "text",
    messages_result: "text",
    responses: "input_text",
    responses_result: "input_text",
}
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SHOT = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
VIEW = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
IMAGES: dict[Any, Any] = {
    chat: PICTURE,
    chat_result: PICTURE,
    messages: SHOT,
    messages_result: SHOT,
    responses: VIEW,
    responses_result: VIEW,
}


def prompt(s: Server) -> str:
    return str(s.engine.tokenizer.decode(s.engine.submitted[-1].prompt))


@pytest.mark.parametrize("place", list(IMAGES))
async def test_an_image_becomes_a_line(
    make: Make, place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    s, image = make(), IMAGES[place]
    said = [{"type": TEXT[place], "text": text} for text in ("one ", "two ")]
    path, body = place(said[0], image, said[1], image)
    with caplog.at_level(logging.INFO, "mlxspec"):
        answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    kind = f"content[].{image['type']}"
    assert answer.headers["x-mlxspec-ignored"] == kind
    lines = [line for line in caplog.messages if kind in line]
    assert len(lines) == 1 and lines[0].count(kind) == 1
    text = prompt(s)
    assert text.count(LINE) == 2 and PNG not in text
    line = f"[{image['type']} {LINE}\n"
    assert f"one {line}two {line}" in text


@pytest.mark.parametrize("place", list(IMAGES))
async def test_strict_content_refuses_it_by_name(make: Make, place: Any) -> None:
    s = make(Config(strict_content=True))
    path, body = place(IMAGES[place])
    answer = await s.post(path, body)
    assert answer.status == 400 and s.engine.submitted == []
    error = answer.json["error"]
    assert any(where in error["message"] for where in ("].content[0]", "].output[0]"))


FILES: list[Any] = [
    (chat, {"type": "file", "file": {"filename": "n.txt", "file_data": FILE}}),
    (
        chat,
        {
            "type": "file",
            "file": {"filename": "n.txt", "file_data": f"data:text/plain;base64,{FILE}"},
        },
    ),
    (
        messages,
        {
            "type": "document",
            "title": "n.txt",
            "source": {"type": "text", "media_type": "text/plain", "data": NOTE},
        },
    ),
    (
        messages_result,
        {
            "type": "document",
            "title": "n.txt",
            "source": {"type": "content", "content": [{"type": "text", "text": NOTE}]},
        },
    ),
    (
        messages,
        {"type": "document", "title": "n.txt", "source": {"type": "content", "content": NOTE}},
    ),
    (
        messages,
        {
            "type": "search_result",
            "title": "n.txt",
            "source": "https://a.b",
            "content": [{"type": "text", "text": NOTE}],
        },
    ),
    (responses, {"type": "input_file", "filename": "n.txt", "file_data": FILE}),
    (
        responses_result,
        {
            "type": "input_file",
            "filename": "n.txt",
            "file_data": f"data:text/plain;base64,{FILE}",
        },
    ),
]


@pytest.mark.parametrize(("place", "part"), FILES)
async def test_a_text_file_becomes_its_text(make: Make, place: Any, part: Any) -> None:
    s = make()
    path, body = place(part)
    answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    assert "x-mlxspec-ignored" not in answer.headers
    assert f"n.txt:\n{NOTE}\n" in prompt(s) and LINE not in prompt(s)


@pytest.mark.parametrize(
    ("place", "part"),
    [
        (chat, {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}}),
        (chat, {"type": "file", "file": {"file_id": "file-1"}}),
        (chat, {"type": "input_audio", "input_audio": {"data": PDF, "format": "wav"}}),
        (messages, {"type": "document", "source": {"type": "base64", "data": PDF}}),
        (messages, {"type": "document", "source": {"type": "url", "url": "https://a.b"}}),
        (messages, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
        (
            messages,
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"type": "web_search_result", "encrypted_content": "x"}],
            },
        ),
        (responses, {"type": "input_file", "filename": "a.pdf", "file_data": PDF}),
        (responses, {"type": "input_file", "file_url": "https://a.b"}),
    ],
)
async def test_any_other_file_becomes_a_line(make: Make, place: Any, part: Any) -> None:
    s = make()
    path, body = place(part)
    answer = await s.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-mlxspec-ignored"] == f"content[].{part['type']}"
    assert f"[{part['type']} {LINE}" in prompt(s)


async def test_an_image_in_a_document_is_left_out_of_its_text(make: Make) -> None:
    s = make()
    content = [{"type": "text", "text": "above "}, SHOT, {"type": "text", "text": " below"}]
    path, body = messages({"type": "document", "source": {"type": "content", "content": content}})
    answer = await s.post(path, body)
    assert answer.headers["x-mlxspec-ignored"] == "content[].image"
    assert f"document:\nabove [image {LINE}\n below\n" in prompt(s)


@pytest.mark.parametrize("place", [messages_result, chat_result, responses_result])
async def test_the_next_turn_begins_with_this_one(make: Make, place: Any) -> None:
    """As of a session that is resumed: the client sends the image again."""
    s = make(says=("I see.",))
    path, body = place(IMAGES[place])
    assert (await s.post(path, body)).status == 200
    turns = body["input" if "input" in body else "messages"]
    turns += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "and now"}]
    assert (await s.post(path, body)).status == 200
    one, two = (request.prompt for request in s.engine.submitted)
    assert two[: len(one)] == one and prompt(s).count(LINE) == 1


async def test_a_kept_response_keeps_no_image(make: Make) -> None:
    s = make()
    path, body = responses(VIEW)
    first = (await s.post(path, body)).json
    again = await s.post(path, {"input": "and now", "previous_response_id": first["id"]})
    assert again.status == 200 and LINE in prompt(s)
    kept = await s.get(f"/v1/responses/{first['id']}/input_items")
    assert LINE in kept.body.decode() and PNG not in kept.body.decode()
    assert [part["type"] for part in kept.json["data"][0]["content"]] == ["input_text"]
    path, body = responses_result(VIEW)
    first = (await s.post(path, body)).json
    kept = await s.get(f"/v1/responses/{first['id']}/input_items")
    assert [part["type"] for part in kept.json["data"][0]["output"]] == ["input_text"]


async def test_tokens_of_images_are_counted_as_the_prompt_has_them(make: Make) -> None:
    s = make()
    path, body = messages_result(SHOT)
    counted = await s.post("/v1/messages/count_tokens", body)
    await s.post(path, body)
    assert counted.json == {"input_tokens": len(s.engine.submitted[0].prompt)}
    tokenized = await s.post("/v1/tokenize", chat(PICTURE)[1])
    assert LINE in s.engine.tokenizer.decode(tokenized.json["tokens"])


WORDS = st.sampled_from(
    "role content type text user assistant image document file source data file_data title output"
    " tool_result server_tool_use search_result filename base64 input_image message".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)


@given(JSON)
def test_whatever_a_message_holds_is_taken_or_refused(value: Any) -> None:
    for kind, name in ((Chat, "messages"), (Messages, "messages"), (Create, "input")):
        data = json.dumps({"max_tokens": 9, name: [value]}).encode()
        try:
            body, _ = parse(kind, data)
            if isinstance(body, Create):
                chat_messages([], body.input, [])
        except ApiError as error:
            assert error.status == 400


async def test_a_type_that_is_no_name_is_refused_and_not_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = chat({"type": "x\n2026 forged line_tool_use"})
    with caplog.at_level(logging.INFO, "mlxspec"):
        answer = await make().post(path, body)
    assert answer.status == 400
    assert not any("left out" in record.getMessage() for record in caplog.records)
