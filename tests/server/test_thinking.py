"""Thinking budgets through all three APIs: on the real engine, whose tiny model never ends its
reasoning by itself, and what each field asks for."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import UNLIMITED
from tests.support.live import live, tiny_worker
from tests.support.parameter_rows import only
from tests.support.scripted import INFO, MESSAGES, Server, server
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

CLOSED = "{{- '<think>\n\n</think>\n\n' }}{% endif %}"
OPENS = AGENT.replace(
    CLOSED, CLOSED.replace("{% endif %}", "{% else %}{{- '<think>\n' }}{% endif %}")
)
LEVELS = AGENT + "{# reasoning_effort #}"
INPUT = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
}
CHAT, ANTHROPIC, RESPONSES = INPUT


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"), template=OPENS, extra=THINK + CALLS)


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[httpx.Client]:
    with (
        tiny_worker("llama", 1024, "lookup", max_sequences=8, max_queue=16) as worker,
        live(create_app(worker, load_tokenizer(path), path, Config())) as base,
        httpx.Client(base_url=base, timeout=60) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def ask(client: httpx.Client, path: Path) -> Callable[..., Any]:
    t = load_tokenizer(path)
    never = {str(token): -100 for token in (*t.eos_token_ids, *t.think_end_tokens)}

    def asked(path: str = CHAT, **body: Any) -> Any:
        fixed = {"max_tokens": 40, "temperature": 0.8, "seed": 5, "logit_bias": never}
        answer = client.post(path, json=INPUT[path] | fixed | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return asked


def spelled(choice: Any) -> list[str]:
    return [each["token"] for each in choice["logprobs"]["content"]]


@pytest.mark.parametrize("most", only([0, 1, 9], 0, 2))
def test_the_reasoning_ends_after_its_budget(ask: Callable[..., Any], most: int) -> None:
    """And up to there it is as without one, and alike in all APIs."""
    free = ask(logprobs=True)["choices"][0]
    assert "</think>" not in spelled(free)
    chat = ask(logprobs=True, reasoning={"max_tokens": most})["choices"][0]
    assert spelled(chat)[:most] == spelled(free)[:most]
    assert spelled(chat).index("</think>") == most
    message = chat["message"]
    assert bool(message.get("reasoning_content", "")) == (most > 0) and message["content"]
    blocks = ask(ANTHROPIC, thinking={"type": "enabled", "budget_tokens": most})["content"]
    assert blocks[-1]["text"] == message["content"]
    items = ask(RESPONSES, reasoning={"max_tokens": most})["output"]
    assert items[-1]["content"][0]["text"] == message["content"]
    thoughts = [each["thinking"] for each in blocks[:-1]]
    assert thoughts == [item["summary"][0]["text"] for item in items[:-1]]
    assert "".join(thoughts) == message.get("reasoning_content", "")


def test_choices_and_stop_strings(ask: Callable[..., Any]) -> None:
    both = ask(logprobs=True, n=2, reasoning={"max_tokens": 5})["choices"]
    assert [spelled(choice).index("</think>") for choice in both] == [5, 5]
    assert both[0]["message"] != both[1]["message"]
    stop = both[0]["message"]["content"].strip()[4:7]
    cut = ask(n=2, reasoning={"max_tokens": 5}, stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop" and stop not in cut["message"]["content"]
    assert cut["message"]["reasoning_content"] == both[0]["message"]["reasoning_content"]


def test_a_call_that_is_asked_for_follows(ask: Callable[..., Any]) -> None:
    kind = {"enum": ["/a", "/b"]}
    parameters = {"type": "object", "properties": {"at": kind}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    asked = dict(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    [choice] = ask(logprobs=True, reasoning={"max_tokens": 6}, max_tokens=200, **asked)["choices"]
    assert spelled(choice).index("</think>") == 6 and choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["at"] in kind["enum"]


def test_a_stream_says_the_same(ask: Callable[..., Any], client: httpx.Client, path: Path) -> None:
    whole = ask(reasoning={"max_tokens": 9})["choices"][0]["message"]
    t = load_tokenizer(path)
    never = {str(token): -100 for token in (*t.eos_token_ids, *t.think_end_tokens)}
    body = dict(max_tokens=40, temperature=0.8, seed=5, logit_bias=never, stream=True)
    text = client.post(CHAT, json=INPUT[CHAT] | body | {"reasoning": {"max_tokens": 9}}).text
    deltas = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for name in ("reasoning_content", "content"):
        parts = [event["choices"][0]["delta"].get(name) or "" for event in deltas]
        assert "".join(parts) == whole[name]


# ---- what is asked for
# ---------------------------------------------------------------------------------------

Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(template: str = AGENT, config: Config | None = None) -> Server:
        where = save_tokenizer(tmp_path / "m", template=template, extra=THINK + CALLS)
        return server(load_tokenizer(where), where, config, info=replace(INFO, context=2048))

    return made


async def left(s: Server, path: str, **body: Any) -> int | None:
    """How many tokens of reasoning the engine allows."""
    answer = await s.post(path, INPUT[path] | {"max_tokens": 9} | body)
    assert answer.status == 200 and "x-mlxspec-ignored" not in answer.headers, answer.body
    make = s.engine.submitted[-1].grammar
    if make is None:
        return None
    remaining: int = make().inner.remaining
    return None if remaining == UNLIMITED else remaining


EFFORTS = [("none", 0), ("low", 1024), ("medium", 8192), ("high", 24576), ("max", None)]


@pytest.mark.anyio
@pytest.mark.parametrize(("word", "most"), only(EFFORTS, 0, 2))
async def test_a_word_of_effort(make: Make, word: str, most: int | None) -> None:
    """Tokens, unless the template has levels; the setting allows no more."""
    for path, body in (
        (CHAT, {"reasoning_effort": word}),
        (CHAT, {"reasoning": {"effort": word}}),
        (CHAT, {"chat_template_kwargs": {"reasoning_effort": word}}),
        (RESPONSES, {"reasoning": {"effort": word}}),
    ):
        assert await left(make(), path, **body) == most
        assert await left(make(LEVELS), path, **body) is None
        capped = make(config=Config(thinking_budget=2000))
        assert await left(capped, path, **body) == min(most or 2000, 2000) * (most != 0)


@pytest.mark.anyio
async def test_the_least_of_all_counts(make: Make) -> None:
    s = make(LEVELS, Config(thinking_budget=300))
    for path in INPUT:
        assert await left(s, path) == 300
    assert await left(s, CHAT, reasoning={"max_tokens": 20, "effort": "low"}) == 20
    assert await left(s, CHAT, reasoning={"max_tokens": 4000}) == 300
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert await left(s, ANTHROPIC, thinking=enabled) == 300
    assert await left(make(), ANTHROPIC, thinking=enabled) == 1024
    assert await left(make(), RESPONSES, reasoning={"max_tokens": 7}) == 7


@pytest.mark.anyio
async def test_a_model_that_does_not_reason_has_no_budget(tokenizer: Any, model_dir: Path) -> None:
    s = server(tokenizer, model_dir, Config(thinking_budget=0))
    await s.chat(reasoning_effort="low", reasoning={"max_tokens": 5}, loop_guard=False)
    assert s.engine.submitted[0].grammar is None


@pytest.mark.anyio
@pytest.mark.parametrize("value", [-1, 1.5, "9", True, [], {}])
async def test_a_budget_that_is_none_is_refused(make: Make, value: Any) -> None:
    s = make()
    for path, name, field in (
        (CHAT, "reasoning", "max_tokens"),
        (RESPONSES, "reasoning", "max_tokens"),
        (ANTHROPIC, "thinking", "budget_tokens"),
    ):
        given = {name: {field: value} | ({"type": "enabled"} if name == "thinking" else {})}
        answer = await s.post(path, INPUT[path] | {"max_tokens": 9} | given)
        error = answer.json["error"]
        assert answer.status == 400 and error["message"].startswith(f"{name}.{field} = ")
        assert error["type"] == "invalid_request_error"
    assert s.engine.submitted == []
