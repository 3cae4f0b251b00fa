"""Ollama's API over ASGI with a scripted engine: lines, tools, thinking, options, models, refusals."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode, render_chat
from mlxspec.types import Served
from tests.support import tiny
from tests.support.scripted import INFO, MESSAGES, Answer, Connection, Server, server

pytestmark = pytest.mark.anyio

ROOMY = replace(INFO, context=8192)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nI look.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "/é"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

Make = Callable[..., Server]


@pytest.fixture
def make(agent: tuple[Any, Path]) -> Make:
    return lambda config=None, **kw: server(*agent, config, **{"info": ROOMY, **kw})


async def ask(s: Server, path: str = "/api/chat", **body: Any) -> Answer:
    given = {"model": "tiny", "messages": MESSAGES}
    if path == "/api/generate":
        given = {"model": "tiny", "prompt": "hello"}
    return await s.post(path, {**given, **body})


def lines(answer: Answer) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.decode().split("\n")[:-1]]


def said(found: list[Any], key: str, message: bool = True) -> str:
    """A text of all lines together."""
    return "".join((line["message"] if message else line).get(key, "") for line in found)


async def test_a_chat_is_streamed_unless_it_is_not_wanted(make: Make) -> None:
    s = make(says=(THOUGHT + "hello é🦊",), cached=4)
    *parts, last = found = lines(await ask(s))
    assert {line["model"] for line in found} == {"tiny"}
    assert not any(line["done"] for line in parts) and last["done"]
    assert said(found, "thinking") == "I look." and said(found, "content") == "hello é🦊"
    assert {line["message"]["role"] for line in found} == {"assistant"}
    whole = (await ask(s, stream=False)).json
    assert whole["message"] == {
        "role": "assistant",
        "content": "hello é🦊",
        "thinking": "I look.",
    }
    for end in (last, whole):
        assert end["done"] and end["done_reason"] == "stop"
        assert end["prompt_eval_count"] == len(s.engine.submitted[0].prompt)
        assert end["eval_count"] == len(encode(s.engine.tokenizer, s.engine.says[0], False)) + 1
        assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] - 1
        assert 0 < end["prompt_eval_duration"] < 60e9 and end["eval_duration"] > 0


async def test_a_prompt_is_answered_by_the_template_or_raw(make: Make) -> None:
    s = make()
    found = lines(await ask(s, "/api/generate", system="be kind"))
    assert said(found, "response", False) == "hello world" and "message" not in found[0]
    assert found[-1]["eval_count"] == 3
    assert (await ask(s, "/api/generate", raw=True, stream=False)).json["response"] == "hello world"
    prompts = [request.prompt for request in s.engine.submitted]
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert prompts[0] == tuple(render_chat(s.engine.tokenizer, turns))
    assert prompts[1] == tuple(encode(s.engine.tokenizer, "hello"))


async def test_reasoning_of_a_prompt(make: Make) -> None:
    s = make(says=(THOUGHT + "hello",))
    whole = (await ask(s, "/api/generate", stream=False)).json
    assert (whole["thinking"], whole["response"]) == ("I look.", "hello")
    raw = lines(await ask(s, "/api/generate", raw=True))
    assert said(raw, "response", False) == THOUGHT + "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_answers(make: Make, stream: bool) -> None:
    """The arguments are an object, and the next prompt repeats the answer token for token."""
    s = make(says=("I look." + CALL,))
    answer = await ask(s, tools=[LOOK], stream=stream)
    found = lines(answer) if stream else [answer.json]
    [call] = [c for line in found for c in line["message"].get("tool_calls", ())]
    assert call["function"] == {"name": "look", "arguments": {"at": "/é"}}
    assert call["id"] and found[-1]["done_reason"] == "stop"
    sent = {"function": call["function"]}  # the SDK sends no id
    more = [
        {"role": "assistant", "content": said(found, "content"), "tool_calls": [sent]},
        {"role": "tool", "tool_name": "look", "content": "a door"},
    ]
    assert (await ask(s, messages=[*MESSAGES, *more], tools=[LOOK])).status == 200
    first, second = (request.prompt for request in s.engine.submitted)
    whole = (*first, *encode(s.engine.tokenizer, s.engine.says[0], special=False))
    assert second[: len(whole)] == whole
    assert "a door" in s.engine.tokenizer.decode(second)


async def test_the_template_is_told_whether_to_think(make: Make) -> None:
    s = make()
    for think in (None, True, False, "high"):
        await ask(s, think=think)
    texts = [s.engine.tokenizer.decode(request.prompt) for request in s.engine.submitted]
    assert [text.endswith("</think>\n\n") for text in texts] == [False, False, True, False]


async def test_thinking_that_is_sent_back_is_reasoning(make: Make) -> None:
    s = make()
    turns = [
        *MESSAGES,
        {"role": "assistant", "thinking": "I look.", "tool_calls": [LOOK]},
        {"role": "tool", "content": "a door"},
    ]
    await ask(s, messages=turns)
    text = s.engine.tokenizer.decode(s.engine.submitted[0].prompt)
    assert "<think>\nI look.\n</think>" in text


@pytest.mark.parametrize("form", ["json", SCHEMA])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_format_is_enforced(make: Make, path: str, form: Any) -> None:
    s = make()
    assert (await ask(s, path, format=form, loop_guard=False)).status == 200
    assert (await ask(s, path, format="", loop_guard=False)).status == 200
    assert [request.grammar is not None for request in s.engine.submitted] == [True, False]


async def test_options_are_sampling_parameters(make: Make) -> None:
    s = make()
    options = {
        "num_predict": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 9,
        "repeat_penalty": 1.25,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "num_ctx": 4096,
        "num_gpu": 1,
    }
    answer = await ask(s, options=options)
    [request] = s.engine.submitted
    assert request.max_tokens == 2 and lines(answer)[-1]["done_reason"] == "length"
    given = request.sampling
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.5, 7, 0.5, 0.25)
    assert (given.seed, given.repetition_penalty) == (9, 1.25)
    assert (given.presence_penalty, given.frequency_penalty) == (1, 0.5)
    assert answer.headers["x-mlxspec-ignored"] == "num_ctx, num_gpu"


@pytest.mark.parametrize("limit", [-2, -1, 0])
async def test_no_limit(make: Make, limit: int) -> None:
    s = make()
    await ask(s, options={"num_predict": limit, "stop": ["wor"], "top_k": -1})
    [request] = s.engine.submitted
    assert request.max_tokens == ROOMY.context - len(request.prompt)


async def test_a_stop_string(make: Make) -> None:
    found = lines(await ask(make(), options={"stop": ["wor"]}))
    assert said(found, "content").strip() == "hello" and found[-1]["done_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/api/chat", {"model": "other"}, 404, "no model 'other' here"),
        ("/api/show", {"model": "other"}, 404, "no model 'other' here"),
        ("/api/chat", {"options": {"temperature": -9}}, 400, "temperature = -9"),
        ("/api/chat", {"options": {"num_predict": "x"}}, 400, 'num_predict = "x"'),
        ("/api/chat", {"options": []}, 400, "options = []"),
        ("/api/chat", {"options": {"mirostat": 1}}, 400, "mirostat = 1 is not supported"),
        ("/api/chat", {"messages": "hello"}, 400, 'messages = "hello"'),
        ("/api/chat", {"messages": ["hello"]}, 400, 'messages[0] = "hello"'),
        ("/api/chat", {"messages": [{"role": "boss", "content": "a"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ("/api/chat", {"format": "yaml"}, 400, 'format = "yaml"'),
        ("/api/chat", {"logprobs": True}, 400, "logprobs"),
        ("/api/generate", {"prompt": 5}, 400, "prompt = 5"),
        ("/api/generate", {"context": [1, 2]}, 400, "context"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"prompt": "a " * 9999}, 400, "shorten prompt"),
        ("/api/generate", {"raw": True, "format": "json"}, 400, "format with raw"),
        ("/api/generate", {"raw": True, "system": "be kind"}, 400, "system with raw"),
        ("/api/generate", {"suffix": "a", "tools": [LOOK]}, 400, "tools with raw"),
        ("/api/pull", {"model": "llama3.2"}, 400, "such as 'mlx-community/llama3.2'"),
        ("/api/create", {}, 400, "create is not supported; send system"),
        ("/api/nothing", {}, 404, "/api/nothing: Not Found"),
        ("/api/chat", b"{", 400, "not a JSON object"),
    ],
)
async def test_errors(make: Make, path: str, body: Any, status: int, why: str) -> None:
    s = make()
    if isinstance(body, bytes):
        answer = await s.post(path, body)
    else:
        answer = await ask(s, path, **body)
    assert answer.status == status and s.engine.submitted == []
    assert list(answer.json) == ["error"] and why in answer.json["error"]


async def test_a_full_queue_and_a_missing_key(make: Make) -> None:
    answer = await ask(make(busy=7))
    assert (answer.status, answer.headers["retry-after"]) == (503, "7")
    assert "try again in 7 s" in answer.json["error"]
    s = make(Config(api_key="sesame"))
    assert "API key" in (await ask(s)).json["error"]
    for headers, status in (
        ({"authorization": "Bearer sesame"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"authorization": "Bearer wrong"}, 401),
    ):
        answer = await s.get("/api/tags", headers=headers)
        assert answer.status == status and (status == 200 or list(answer.json) == ["error"])


async def test_an_error_in_a_stream_is_a_line(make: Make) -> None:
    s = make(holds=True)
    connection = Connection(s.app, "/api/chat", {"messages": MESSAGES})
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.push("hello")
    s.engine.push(finish="error", error="out of memory")
    first, last = lines(await connection.answer())
    assert first["message"]["content"] == "hello"
    assert list(last) == ["error"] and "out of memory" in last["error"]


async def test_a_silent_stream_is_kept_alive_by_whole_lines(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prompt is read, too: a comment would be an error in these streams."""
    monkeypatch.setattr("mlxspec.server.generate.PROGRESS_S", 0.005)
    s = make(Config(keepalive_s=0.05), holds=True)
    body = {"prompt": "hello", "return_progress": True}
    connection = Connection(s.app, "/api/generate", body)
    await s.engine.until(lambda: s.engine.submitted)
    s.engine.running_requests = ((s.engine.submitted[0].id, 1, 3),)
    await connection.until(b'"response":""')
    s.engine.push("hello", finish="stop")
    assert said(lines(await connection.answer()), "response", False) == "hello"


async def test_models(make: Make) -> None:
    other = Served(replace(INFO, name="org/other"), "unloaded")
    s = make(others=(other,))
    found = (await s.get("/api/tags")).json["models"]
    assert [model["name"] for model in found] == ["tiny:latest", "org/other:latest"]
    assert found[0]["model"] == "tiny:latest" and found[0]["size"] == INFO.weight_bytes
    assert len({model["digest"] for model in found}) == 2
    typed = {"format", "family", "parameter_size", "quantization_level"}  # clients in Rust need all
    assert all(typed <= set(model["details"]) for model in found)
    [loaded] = (await s.get("/api/ps")).json["models"]
    assert loaded["name"] == "tiny:latest" and loaded["context_length"] == ROOMY.context
    for asked in ({"model": "tiny"}, {"name": "tiny:latest"}):
        shown = (await s.post("/api/show", asked)).json
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == ROOMY.context
        assert shown["model_info"]["general.basename"] == "tiny"
    version = (await s.get("/api/version")).json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


async def test_a_name_may_have_a_tag(make: Make) -> None:
    s = make()
    for name in ("tiny", "tiny:latest", "local:latest"):
        assert (await ask(s, model=name, stream=False)).json["model"] == name
    assert (await ask(s, model="tiny:8b")).status == 404
    assert (await s.chat(model="tiny:latest")).json["model"] == "tiny"


@pytest.mark.parametrize(
    ("path", "empty"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})]
)
@pytest.mark.parametrize(
    ("keep", "ordered", "reason"),
    [
        (None, ("tiny", None), "load"),
        ("5m", ("tiny", None), "load"),
        (-1, ("tiny", True), "load"),
        ("-1m", ("tiny", True), "load"),
        (0, ("tiny", "unload"), "unload"),
        ("0s", ("tiny", "unload"), "unload"),
    ],
)
async def test_without_a_message_a_model_is_loaded_or_unloaded(
    make: Make, path: str, empty: Any, keep: Any, ordered: Any, reason: str
) -> None:
    s = make()
    answer = (await ask(s, path, keep_alive=keep, **empty)).json
    assert answer["done"] and answer["done_reason"] == reason and answer["model"] == "tiny"
    assert s.engine.ordered == [ordered] and s.engine.submitted == []


async def test_a_result_names_its_tool_as_ollama_does(make: Make) -> None:
    s = make()
    body = {"tool_name": "look", "role": "tool", "content": "x"}
    s.engine.tokenizer._chat_template = lambda messages, **_: f"<{messages[-1].get('name')}>"
    try:
        await ask(s, messages=[*MESSAGES, body])
    finally:
        s.engine.tokenizer._chat_template = None
    ids = list(s.engine.submitted[-1].prompt)
    assert s.engine.tokenizer.decode(ids) == "<look>"


async def test_lines_end_nowhere_else(make: Make) -> None:
    """Python's clients cut at these too."""
    text = "a\u2028b\u2029c\x85d"
    answer = await ask(make(says=(text,)))
    assert len(answer.body.decode().splitlines()) == len(lines(answer))
    assert said(lines(answer), "content") == text


async def test_an_answer_that_the_client_began_goes_on(make: Make) -> None:
    s = make()
    begun = [*MESSAGES, {"role": "assistant", "content": "hello"}]
    await ask(s, messages=begun)
    ids = list(s.engine.submitted[-1].prompt)
    assert s.engine.tokenizer.decode(ids).endswith("hello")
    assert (await ask(s, messages=begun, format="json")).status == 200


async def test_other_times_to_keep_a_model_are_ignored_and_named(make: Make) -> None:
    answer = await ask(make(), keep_alive="5m")
    assert answer.status == 200 and answer.headers["x-mlxspec-ignored"] == "keep_alive"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_is_ollama_running(make: Make, method: str) -> None:
    """The page is for browsers; clients compare the text."""
    answer = await Connection(make().app, "/", method=method).answer()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    if method == "GET":
        assert answer.body == b"Ollama is running"
    page = await make().get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")


async def test_an_image_becomes_a_line(make: Make) -> None:
    s = make()
    turn = {"role": "user", "content": "What is it?", "images": ["aGVsbG8=", "aGVsbG8="]}
    answers = [await ask(s, messages=[turn])]
    answers.append(await ask(s, "/api/generate", prompt="What is it?", images=["aGVsbG8="]))
    for answer in answers:
        assert answer.status == 200 and answer.headers["x-mlxspec-ignored"] == "content[].image"
    line = "[image left out: this model reads text only]\n"
    for count, request in zip((2, 1), s.engine.submitted, strict=True):
        assert line * count + "What is it?" in s.engine.tokenizer.decode(request.prompt)
    strict = await ask(make(Config(strict_content=True)), messages=[turn])
    assert strict.status == 400 and "messages[0].content[0]" in strict.json["error"]
    for plain in ({"raw": True}, {"suffix": "b"}):
        s = make(Config(strict_content=True))
        strict = await ask(s, "/api/generate", images=["aGVsbG8="], **plain)
        assert strict.status == 400 and "images with raw" in strict.json["error"]
        assert s.engine.submitted == []


async def test_a_call_that_is_cut_is_no_call(make: Make) -> None:
    s = make(says=(CALL,))
    found = lines(await ask(s, tools=[LOOK], options={"num_predict": 30}))
    assert found[-1]["done_reason"] == "length" and said(found, "content") == ""
    assert not any("tool_calls" in line["message"] for line in found)


async def test_the_real_engine_says_the_same_in_any_api(tokenizer: Any, model_dir: Path) -> None:
    """With drawn tokens and in a format; a client that leaves frees its blocks."""

    def start() -> Any:
        engine = tiny.engine(tiny.model("llama"), blocks=64, context=512, vocab=tiny.VOCAB)
        return engine, replace(INFO, vocab=tiny.VOCAB)

    worker = EngineThread(tiny.manager(start), max_sequences=4, max_queue=4)
    worker.launch()
    try:
        s = Server(None, create_app(worker, tokenizer, model_dir, Config()))  # type: ignore[arg-type]
        drawn = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "ignore_eos": True}
        found = lines(await ask(s, options={**drawn, "num_predict": 24}))
        whole = (await s.chat(max_tokens=24, **drawn)).json["choices"][0]
        assert said(found, "content") == whole["message"]["content"]
        assert (found[-1]["eval_count"], found[-1]["done_reason"]) == (24, "length")
        form = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        answer = lines(await ask(s, format=form, options={"seed": 1}))
        assert json.loads(said(answer, "content"))["n"] in (1, 2)
        connection = Connection(s.app, "/api/chat", {"messages": MESSAGES})
        await connection.until(b'"done":false')
        connection.leave()
        await connection.task
        async with asyncio.timeout(10):
            while tiny.stats(worker).blocks_used:
                await asyncio.sleep(0.01)
    finally:
        worker.stop()
