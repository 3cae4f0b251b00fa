"""The loop guard through the APIs: on the real engine, whose tiny model repeats the token that a
request prefers."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.server.stream import Choice
from mlxspec.text.chat import load_tokenizer
from mlxspec.text.structured.loop_guard import LEAST
from tests.server.test_thinking import OPENS
from tests.support.live import live, tiny_worker
from tests.support.scripted import MESSAGES
from tests.support.scripted import server as scripted
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
INPUT: dict[str, Any] = {
    CHAT: {"messages": MESSAGES},
    TEXT: {"prompt": "hello"},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
}
MOST = 600


def served(path: Path, config: Config) -> Iterator[Callable[..., Any]]:
    """Asks a server of the tokenizer in `path` for an answer of the token "h"."""

    tokenizer = load_tokenizer(path)
    [token] = tokenizer.encode("h", add_special_tokens=False)
    with (
        tiny_worker("llama", 1024, "lookup", max_sequences=8, max_queue=16) as worker,
        live(create_app(worker, tokenizer, path, config)) as base,
        httpx.Client(base_url=base, timeout=60) as client,
    ):

        def asked(path: str = CHAT, **body: Any) -> Any:
            ollama = path == "/api/chat"
            limit = {"options": {"num_predict": MOST}} if ollama else {"max_tokens": MOST}
            fixed = {"temperature": 0.8, "logit_bias": {str(token): 100}}
            answer = client.post(path, json=INPUT[path] | limit | fixed | body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        ask: Any = asked
        ask.metrics = lambda: client.get("/metrics").text
        yield ask


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    path = save_tokenizer(tmp_path_factory.mktemp("model"), template=AGENT, extra=THINK + CALLS)
    yield from served(path, Config())


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    path = save_tokenizer(tmp_path_factory.mktemp("model"), template=OPENS, extra=THINK + CALLS)
    yield from served(path, Config())


@pytest.mark.parametrize("path", INPUT)
def test_a_loop_ends_as_an_answer_does(ask: Any, path: str) -> None:
    answer = ask(path)
    count, reason = {
        CHAT: lambda: (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]),
        TEXT: lambda: (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]),
        "/v1/messages": lambda: (answer["usage"]["output_tokens"], answer["stop_reason"]),
        "/v1/responses": lambda: (answer["usage"]["output_tokens"], answer["status"]),
        "/api/chat": lambda: (answer["eval_count"], answer["done_reason"]),
    }[path]()
    assert count == LEAST + 1 and reason in ("stop", "end_turn", "completed")
    longer = ask(path, loop_guard=False)
    assert "h" * (LEAST + 1) in json.dumps(longer)


def test_it_is_told(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        usage = ask()["usage"]
    assert usage["completion_tokens_details"]["loops_ended"] == 1
    assert "1 ended by the loop guard" in caplog.text
    [line] = [one for one in ask.metrics().splitlines() if one.startswith("mlxspec_loops_total")]
    assert float(line.split()[-1]) > 0
    assert "loops_ended" not in ask(max_tokens=50)["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("path", INPUT)
def test_each_api_tells_it(ask: Any, path: str) -> None:
    answer = ask(path)
    usage = answer.get("usage", answer)
    for details in ("completion_tokens_details", "output_tokens_details"):
        usage = usage.get(details, usage)
    assert usage["loops_ended"] == 1
    assert "loops_ended" not in json.dumps(ask(path, loop_guard=False))


def test_the_loop_of_an_earlier_turn_allows_no_longer_one(ask: Any) -> None:
    """But what the user sent may be copied."""
    loop, again = "h" * 2 * LEAST, {"role": "user", "content": "and then"}
    turns = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": loop}, again]
    assert ask(messages=turns)["usage"]["completion_tokens"] == LEAST + 1
    copied = ask(messages=[{"role": "user", "content": loop}], max_tokens=900)
    assert copied["usage"]["completion_tokens"] == 3 * LEAST + 1
    raw = ask(TEXT, prompt=loop, max_tokens=900)
    assert raw["usage"]["completion_tokens"] == 3 * LEAST + 1


def test_what_is_asked_for_goes_on(ask: Any) -> None:
    asked = [{"role": "user", "content": f"Write the letter {MOST} times."}]
    assert ask(messages=asked)["choices"][0]["finish_reason"] == "length"
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    turns = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]
    assert ask(messages=turns)["choices"][0]["finish_reason"] == "length"
    answered = [*asked, {"role": "assistant", "content": "done"}, {"role": "user", "content": "go"}]
    assert ask(messages=answered)["choices"][0]["finish_reason"] == "stop"
    assert ask(prompt=f"{MOST} times:", path=TEXT)["choices"][0]["finish_reason"] == "length"
    assert ask(ignore_eos=True)["choices"][0]["finish_reason"] == "length"


def test_reasoning_is_closed_and_the_answer_follows(thinks: Any) -> None:
    answer = thinks()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"].count("h") == LEAST and "h" in message["content"]
    assert answer["usage"]["completion_tokens_details"]["loops_ended"] == 2


def test_a_structured_answer_still_conforms(ask: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = ask(response_format=form, seed=0)  # it opens no reasoning
    text = json.loads(answer["choices"][0]["message"]["content"])["a"]
    assert set(text) == {"h"} and len(text) < LEAST + 100
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_call_that_is_cut_is_not_to_be_run(
    path: str, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's end inside of a call is no end of the call."""
    take = Choice.take
    monkeypatch.setattr(Choice, "take", lambda self, out: take(self, replace(out, loops=1)))
    cut = '<tool_call>\n{"name": "f", "arguments": {"a": "hhhhhhhh'
    s = scripted(*agent, says=(cut,))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {
        CHAT: {"type": "function", "function": {"name": "f", "parameters": schema}},
        "/v1/messages": {"name": "f", "input_schema": schema},
        "/v1/responses": {"type": "function", "name": "f", "parameters": schema},
    }[path]
    answer = (await s.post(path, INPUT[path] | {"tools": [tool], "max_tokens": 90})).json
    if path == CHAT:
        assert answer["choices"][0]["finish_reason"] == "stop"
    elif path == "/v1/messages":
        assert answer["stop_reason"] == "end_turn"
    else:
        assert [item["status"] for item in answer["output"]] == ["incomplete"]


def test_the_setting(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "m", template=AGENT, extra=THINK + CALLS)
    for asked in served(path, Config(loop_guard=False)):
        assert asked()["choices"][0]["finish_reason"] == "length"
        assert asked(loop_guard=True)["choices"][0]["finish_reason"] == "stop"
