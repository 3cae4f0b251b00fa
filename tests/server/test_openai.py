"""Both endpoints over ASGI with a scripted engine: shapes, streams, parameters, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import Config
from mlxspec.server import chat_request as asking
from mlxspec.text.chat import encode, render_chat
from tests.support.scripted import END, INFO, MESSAGES, Answer, Server, server

pytestmark = pytest.mark.anyio


@pytest.fixture
def make(tokenizer: Any, model_dir: Any) -> Callable[..., Server]:
    return lambda **kw: server(tokenizer, model_dir, **kw)


def said(answer: Answer, index: int = 0) -> str:
    """The text of a streamed choice."""
    texts = []
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                texts.append(
                    choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                )
    return "".join(texts)


async def test_chat(make: Callable[..., Server], tokenizer: Any) -> None:
    s = make(cached=3)
    answer = await s.chat()
    [request] = s.engine.submitted
    body = answer.json
    assert answer.status == 200 and answer.headers["x-request-id"] == body["id"] == request.id
    assert (
        body["id"].startswith("chatcmpl-")
        and body["object"] == "chat.completion"
        and body["model"] == "tiny"
    )
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = render_chat(tokenizer, MESSAGES)
    assert request.prompt == tuple(prompt) and request.stop_tokens == {END}
    assert request.max_tokens == INFO.context - len(prompt) and request.n == 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 3,
        "total_tokens": len(prompt) + 3,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert s.engine.aborted == []


async def test_chat_streamed(make: Callable[..., Server]) -> None:
    s = make()
    answer = await s.chat(stream=True)
    events = answer.events
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events[-1] == "[DONE]" and {e["id"] for e in events[:-1]} == {s.engine.submitted[0].id}
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " world"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, None, None, "stop"]
    assert all("usage" not in e for e in events[:-1])


async def test_usage_at_the_end_of_a_stream(make: Callable[..., Server]) -> None:
    answer = await make().chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = answer.events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_of_drafts(make: Callable[..., Server], stream: bool) -> None:
    """Over all choices, in a body and in a stream, at either endpoint, also behind a stop
    string."""
    options = {"stream": stream, "stream_options": {"include_usage": True}, "n": 2}

    async def told(ask: str, **kw: Any) -> tuple[int, int, int]:
        s = make(says=("hello world hello world",), group=4, drafted=5)
        answer = await getattr(s, ask)(**options, **kw)
        found = (answer.events[-2] if stream else answer.json)["usage"]
        details = found["completion_tokens_details"]
        return found["completion_tokens"], *details.values()

    for ask in ("chat", "complete"):
        assert await told(ask) == (2 * 6, 2 * 5, 2 * 5)  # two rounds each: 4 tokens, then 2
        assert await told(ask, stop=["world"]) == (2 * 2, 2 * 2, 2 * 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_with_and_without_v1(make: Callable[..., Server], path: str) -> None:
    assert (await make().post(path, {"messages": MESSAGES})).status == 200


@pytest.mark.parametrize("model", ["tiny", "default", "local", None])
async def test_names_of_the_model(make: Callable[..., Server], model: str | None) -> None:
    answer = await make().chat(model=model)
    assert answer.status == 200 and answer.json["model"] == "tiny"


async def test_a_model_answers_to_its_directory_and_its_hub_id(
    tokenizer: Any, model_dir: Path
) -> None:
    s = server(tokenizer, model_dir)
    hub = model_dir / "hub/models--org--some--model-4bit/snapshots/abc"
    s.app.state.server.paths["tiny"] = hub
    for name in (str(hub), "org/some--model-4bit"):
        assert (await s.chat(model=name)).json["model"] == "tiny"
        assert (await s.get(f"/v1/models/{name}")).json["id"] == "tiny"
    for name in ("", "org", "org/some", "some--model-4bit", "snapshots"):
        assert (await s.chat(model=name)).status == 404


async def test_another_model_is_not_found(make: Callable[..., Server]) -> None:
    s = make()
    for answer in (await s.chat(model="llama-9"), await s.complete(model="llama-9")):
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found" and answer.error["param"] == "model"
        assert "'llama-9'" in answer.error["message"] and "'tiny'" in answer.error["message"]
    assert s.engine.submitted == []


@pytest.mark.parametrize("name", ["gpt-9", "claude-haiku-4-5", "default", None])
async def test_names_that_agents_have_built_in_mean_this_model(
    make: Callable[..., Server], name: str | None
) -> None:
    assert (await make().chat(model=name)).json["model"] == "tiny"
    strict = make(config=Config(strict_model_names=True))
    assert (await strict.chat(model=name)).status == (200 if name in ("default", None) else 404)


async def test_several_choices(make: Callable[..., Server]) -> None:
    says = ("hello", "world and system", "you")
    whole = (await make(says=says, cached=5).chat(n=3)).json
    assert [(c["index"], c["message"]["content"]) for c in whole["choices"]] == list(
        enumerate(says)
    )
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    s = make(says=says)
    streamed = await s.chat(n=3, stream=True)
    assert [said(streamed, i) for i in range(3)] == list(says)
    assert len(s.engine.submitted) == 1 and s.engine.submitted[0].n == 3
    finishes = [
        c["index"] for e in streamed.events[:-1] for c in e["choices"] if c["finish_reason"]
    ]
    assert sorted(finishes) == [0, 1, 2]
    roles = [c["index"] for e in streamed.events[:-1] for c in e["choices"] if "role" in c["delta"]]
    assert roles == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("lo wor", "hel"),
        ([" the", "and"], "hello world "),
        (["zzz"], "hello world and on with you"),
    ],
)
async def test_stop_strings(
    make: Callable[..., Server], stop: Any, text: str, group: int, stream: bool
) -> None:
    """Also where they straddle tokens, and where drafts bring several tokens at once."""
    s = make(says=("hello world and on with you",), group=group)
    answer = await s.chat(stop=stop, stream=stream, stream_options={"include_usage": True})
    if stream:
        assert said(answer) == text
        *_, finish, usage, done = answer.events
        assert finish["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"
        count = usage["usage"]["completion_tokens"]
    else:
        assert answer.json["choices"][0]["message"]["content"] == text
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        count = answer.json["usage"]["completion_tokens"]
    [request] = s.engine.submitted
    assert s.engine.aborted == ([(request.id, 0)] if "zzz" not in stop else [])
    ids, read = encode(s.engine.tokenizer, s.engine.says[0]), ""
    reached = next(
        (
            i
            for i, t in enumerate(ids, 1)
            if _ends(read := read + s.engine.tokenizer.decode([t]), stop)
        ),
        0,
    )
    assert count == (reached or len(ids) + 1)  # whatever the grouping


def _ends(text: str, stop: Any) -> bool:
    return any(s in text for s in ([stop] if isinstance(stop, str) else stop))


async def test_one_choice_may_stop_before_the_others(make: Callable[..., Server]) -> None:
    s = make(says=("hello world", "you and the system and more"))
    answer = await s.chat(n=2, stop=["world"])
    assert [c["message"]["content"] for c in answer.json["choices"]] == [
        "hello ",
        "you and the system and more",
    ]
    assert s.engine.aborted == [(s.engine.submitted[0].id, 0)]


async def test_max_tokens(make: Callable[..., Server]) -> None:
    s = make()
    answer = await s.chat(max_tokens=1)
    assert answer.json["choices"][0]["finish_reason"] == "length"
    await s.chat(max_completion_tokens=5)
    await s.chat(max_tokens=9, max_completion_tokens=7)
    await s.chat(max_tokens=100_000)
    assert [r.max_tokens for r in s.engine.submitted] == [
        1,
        5,
        7,
        INFO.context - len(s.engine.submitted[0].prompt),
    ]


async def test_sampling_reaches_the_engine(make: Callable[..., Server]) -> None:
    s = make()
    given = dict(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1, frequency_penalty=-1
    )
    given |= dict(repetition_penalty=1.1, seed=-7)
    await s.chat(**given, logit_bias={"5": -100, "7": 1.5})
    sampling = s.engine.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == ((5, -100.0), (7, 1.5)) and sampling.logprobs is None


async def test_a_silent_request_follows_the_models_defaults(tokenizer: Any, tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "min_p": 0.05}'
    )
    s = server(tokenizer, tmp_path)
    await s.chat()
    await s.chat(temperature=0, top_k=-1, min_p=0)
    await s.chat(temperature=None)
    picked = [
        (r.sampling.temperature, r.sampling.top_k, r.sampling.min_p) for r in s.engine.submitted
    ]
    assert picked == [(0.6, 20, 0.05), (0.0, 0, 0.0), (0.6, 20, 0.05)]


@pytest.mark.parametrize(
    "content",
    ["hello world", [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]],
)
async def test_predictions_reach_the_engine(
    make: Callable[..., Server], tokenizer: Any, content: Any
) -> None:
    """As ids without special tokens, for each prompt; the answer does not change."""
    s = make()
    prediction = {"type": "content", "content": content}
    with_it, without = await s.chat(prediction=prediction), await s.chat(prediction=None)
    assert with_it.json["choices"] == without.json["choices"]
    assert with_it.json["usage"] == without.json["usage"]
    await s.complete(prompt=["hello", "you"], prediction=prediction)
    ids = tuple(encode(tokenizer, "hello world", special=False))
    assert [r.prediction for r in s.engine.submitted] == [ids, (), ids, ids]
    assert s.engine.submitted[0].prompt == s.engine.submitted[1].prompt


async def test_a_prediction_is_cut_not_refused(
    make: Callable[..., Server], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the window, and to the ids that the model has. Text beyond all windows is not even
    encoded."""
    s, encoded = make(), list[Any]()

    def counted(tokenizer: Any, text: str, **kw: Any) -> list[int]:
        encoded.append((len(text), kw))
        return encode(tokenizer, text, **kw)

    monkeypatch.setattr(asking, "encode", counted)
    await s.chat(prediction={"type": "content", "content": "hello " * 4000})
    assert encoded == [(INFO.context * asking.CHARS_PER_TOKEN, {"special": False})]
    assert (
        s.engine.submitted[-1].prediction
        == tuple(encode(tokenizer, "hello " * 4000))[: INFO.context]
    )
    known = max(encode(tokenizer, "hello you"))
    s.engine.info = replace(INFO, vocab=known)
    for content in ("", []):
        assert (
            await s.complete(prompt=[1], prediction={"type": "content", "content": content})
        ).status == 200
        assert s.engine.submitted[-1].prediction == ()
    await s.complete(prompt=[1], prediction={"type": "content", "content": "hello you"})
    ids = tuple(t for t in encode(tokenizer, "hello you", special=False) if t != known)
    assert s.engine.submitted[-1].prediction == ids != ()


async def test_seeds(make: Callable[..., Server]) -> None:
    s = make()
    await s.chat(seed=3)
    await s.chat()
    await s.chat()
    seeds = [r.sampling.seed for r in s.engine.submitted]
    assert seeds[0] == 3 and seeds[1] != seeds[2]


async def test_a_vanishing_temperature_is_greedy(make: Callable[..., Server]) -> None:
    s = make()
    await s.chat(temperature=1e-300)
    assert s.engine.submitted[0].sampling.temperature == 0.0


async def test_end_tokens(make: Callable[..., Server]) -> None:
    s = make()
    await s.chat(stop_token_ids=[5])
    await s.chat(ignore_eos=True)
    assert [r.stop_tokens for r in s.engine.submitted] == [{END, 5}, set()]


async def test_log_probabilities_of_chat(make: Callable[..., Server]) -> None:
    s = make(says=("hello é🦊",))
    body = (await s.chat(logprobs=True, top_logprobs=2)).json
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hello é🦊"
    assert content[0]["token"] == "hello" and content[0]["logprob"] == -0.5
    assert content[-1]["token"] == "\\x8a"
    assert [(t["token"], t["bytes"]) for t in content[0]["top_logprobs"]] == [
        ("a", [97]),
        ("b", [98]),
    ]
    streamed = (await s.chat(logprobs=True, top_logprobs=2, stream=True)).events
    entries = [
        entry
        for e in streamed[:-1]
        for c in e["choices"]
        for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert entries == content
    bare = (await s.chat(logprobs=True)).json
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_log_probabilities_end_with_the_text(make: Callable[..., Server]) -> None:
    body = (await make(says=("hello world and on",)).chat(logprobs=True, stop="world")).json
    choice = body["choices"][0]
    assert choice["message"]["content"] == "hello "
    assert [e["token"] for e in choice["logprobs"]["content"]] == ["hello", " world"]


async def test_completions(make: Callable[..., Server], tokenizer: Any) -> None:
    s = make(says=(" world",))
    body = (await s.complete(prompt="hello")).json
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    expected = {"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [expected]  # the space that continues the prompt is kept
    assert s.engine.submitted[0].prompt == tuple(encode(tokenizer, "hello"))
    streamed = await s.complete(stream=True)
    assert (
        said(streamed) == " world" and streamed.events[-2]["choices"][0]["finish_reason"] == "stop"
    )
    assert all("delta" not in e["choices"][0] for e in streamed.events[:-1])


async def test_many_prompts(make: Callable[..., Server], tokenizer: Any) -> None:
    s = make(says=(" a", " b"), cached=1)
    ids = encode(tokenizer, "system")
    for prompt in (["hello", "system"], [encode(tokenizer, "hello"), ids], ["hello", ids]):
        body = (await s.complete(prompt=prompt, n=2)).json
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, " a"),
            (1, " b"),
            (2, " a"),
            (3, " b"),
        ]
        first, second = s.engine.submitted[-2:]
        assert first.id != second.id and second.prompt == tuple(ids)
        assert body["usage"]["prompt_tokens"] == len(first.prompt) + len(second.prompt)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert body["usage"]["completion_tokens"] == 2 * (2 + 1 + len(encode(tokenizer, " b")))
    streamed = await s.complete(prompt=["hello", "system"], n=2, stream=True)
    assert [said(streamed, i) for i in range(4)] == [" a", " b", " a", " b"]
    await s.complete(prompt=ids)
    assert s.engine.submitted[-1].prompt == tuple(ids)


async def test_log_probabilities_of_completions(make: Callable[..., Server]) -> None:
    s = make(says=(" world é",))
    found = (await s.complete(logprobs=1)).json["choices"][0]["logprobs"]
    assert found["tokens"] == [" world", " ", "é"] and found["text_offset"] == [0, 6, 7]
    assert found["token_logprobs"] == [-0.5] * 3
    assert found["top_logprobs"][0] == {" world": -0.5, "a": -1.0}
    none = (await s.complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{" world": -0.5}, {" ": -0.5}, {"é": -0.5}]
    fox = (await make(says=("🦊",)).complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert fox["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\xa6", "bytes:\\x8a"] and fox[
        "text_offset"
    ] == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5 is not text"),
        ({"temperature": 2.1}, "temperature", "temperature = 2.1"),
        ({"logit_bias": {"320": 1}}, "logit_bias", "320; ids run from 0 to 319"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            "messages",
            "maximum context length is 512 tokens",
        ),
    ],
)
async def test_chat_refusals(
    make: Callable[..., Server], body: dict[str, Any], param: str, words: str
) -> None:
    s = make()
    for stream in (False, True):
        answer = await s.chat(**{"stream": stream, **body})
        assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == param and words in answer.error["message"]
    assert s.engine.submitted == []


async def test_more_answers_than_may_ever_wait(make: Callable[..., Server]) -> None:
    """A 429 would be for ever."""
    s = make(config=Config(max_sequences=1, max_queue=2))
    for answer in (
        await s.chat(n=4),
        await s.complete(n=4),
        await s.complete(prompt=["a", "b"], n=2),
    ):
        assert (answer.status, answer.error["param"]) == (400, "n")
    assert (await s.chat(n=3)).status == 200


async def test_a_prompt_that_does_not_fit(make: Callable[..., Server]) -> None:
    s = make()
    for n, status in ((511, 200), (512, 400)):
        answer = await s.complete(prompt=[64] * n)
        assert answer.status == status
    assert answer.error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in answer.error["message"] and answer.error[
        "message"
    ].startswith("prompt is too long: 512 tokens > 512 maximum")
    assert s.engine.submitted[0].max_tokens == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [5, 320]}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": ["a"] * 11, "n": 8}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_completion_refusals(
    make: Callable[..., Server], body: dict[str, Any], param: str
) -> None:
    s = make()
    answer = await s.complete(**body)
    assert answer.status == 400 and answer.error["param"].startswith(param)
    assert s.engine.submitted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_reported(make: Callable[..., Server], stream: bool) -> None:
    s = make()
    strange = {"zeta": 1, "x y\r\nset-cookie: ä": 2}
    for _ in range(2):
        answer = await s.chat(**strange, stream=stream, stream_options={"colour": 1})
        assert answer.status == 200
        assert (
            answer.headers["x-mlxspec-ignored"]
            == "zeta, x%20y%0D%0Aset-cookie%3A%20%C3%A4, stream_options.colour"
        )
    assert "x-mlxspec-ignored" not in (await s.chat()).headers
    unnamed = await s.chat(zeta=1, **{"": 2})
    assert unnamed.headers["x-mlxspec-ignored"] == "zeta, %00"  # no header may end in a space
    many = await s.chat(**{f"field{i}": i for i in range(100)})
    assert many.headers["x-mlxspec-ignored"].count(",") == 31


async def test_reasoning_effort_and_template_variables(make: Callable[..., Server]) -> None:
    """They go to the chat template; those that the server sets are refused."""
    answer = await make().chat(
        reasoning_effort="low", chat_template_kwargs={"colour": 1, "messages": 1}
    )
    assert answer.status == 400 and answer.error["param"] == "chat_template_kwargs"
    answer = await make().chat(reasoning_effort="low", chat_template_kwargs={"colour": 1})
    assert answer.status == 200 and "x-mlxspec-ignored" not in answer.headers
