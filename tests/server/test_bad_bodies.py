"""Bodies that nobody checked, to every API: none raises what its reader does not promise, or takes
time that grows faster than it. The wire is in test_malformed_requests.py."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlxspec.server import anthropic, app, ollama
from mlxspec.server.body import MAX_ITEMS, MAX_OBJECTS, MAX_VALUES, Strict, parse
from mlxspec.server.errors import ApiError
from mlxspec.server.openai import schema as openai_schema
from mlxspec.server.responses import schema as responses_schema
from mlxspec.text.chat import FIRST_CHARS, check_length, load_tokenizer
from mlxspec.text.messages import TooLong
from tests.support.bad_values import BODIES, MANY, RAW, VALUES, save_agent
from tests.support.scripted import Server, server
from tests.tiny_tokenizer import save_tokenizer

KINDS: dict[type[Strict], dict[str, Any]] = {
    openai_schema.Chat: {"messages": [{"role": "user", "content": "a"}]},
    openai_schema.Completion: {"prompt": "a"},
    app.Tokenize: {"prompt": "a"},
    app.Detokenize: {},
    app.Load: {"model": "a"},
    anthropic.Messages: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    anthropic.Prompt: {"messages": [{"role": "user", "content": "a"}]},
    responses_schema.Create: {"input": "a"},
    openai_schema.Fill: {"prompt": "a"},
    openai_schema.Infill: {},
    openai_schema.Embeddings: {"input": "a"},
    ollama.Chat: {},
    ollama.Generate: {},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def refused_well(s: Server, path: str, body: bytes) -> int:
    """The status; a refusal is short, in the API's shape, and names a field or says that there is
    no JSON."""
    answer = await s.post(path, body)
    assert answer.status in (200, 400, 404, 409), (path, body[:200], answer.body[:300])
    if answer.status != 200:
        told = answer.json
        if path.startswith("/api/"):
            assert list(told) == ["error"] and 0 < len(told["error"]) < 600
            return answer.status
        assert len(told["error"]["message"]) < 600
        if path.startswith("/v1/messages"):
            assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
        else:
            assert answer.error["param"] or answer.error["code"] == "invalid_json", (
                path,
                body[:200],
                told,
            )
    return answer.status


@pytest.mark.anyio
@pytest.mark.parametrize("spelled_out", [False, True])
async def test_every_value_at_every_place_of_a_body(
    path: Path, tokenizer: Any, tmp_path: Path, spelled_out: bool
) -> None:
    """A template that knows no tools has them spelled out, which is other code."""
    if spelled_out:
        path = save_tokenizer(tmp_path)
        tokenizer = load_tokenizer(path)
    s = server(tokenizer, path)
    seen = set()
    for at, body in BODIES[3:14:5] if spelled_out else BODIES:
        for value in VALUES.values():
            seen.add(await refused_well(s, at, body.replace("%s", value).encode()))
    assert seen >= {200, 400}
    assert (await s.chat(max_tokens=2)).status == 200


@pytest.mark.anyio
async def test_what_is_no_object_of_json(path: Path, tokenizer: Any) -> None:
    s = server(tokenizer, path)
    for at in sorted({at for at, _ in BODIES}):
        for body in RAW:
            assert await refused_well(s, at, body) == 400


@pytest.mark.anyio
async def test_a_byte_order_mark_is_ignored(path: Path, tokenizer: Any) -> None:
    """As a parser may, by RFC 8259; one of them, and not in a text."""
    s, mark = server(tokenizer, path), b"\xef\xbb\xbf"
    for at, body in BODIES:
        data = body.replace("%s", "null").encode()
        plain, marked, twice = [await s.post(at, mark * n + data) for n in range(3)]
        assert plain.status == marked.status, (at, body, marked.body)
        assert twice.status == 400
    texts = "a", "\ufeffa"
    ids = [(await s.post("/v1/tokenize", {"prompt": text})).json["tokens"] for text in texts]
    assert ids[0] != ids[1]


@pytest.mark.anyio
async def test_hundreds_of_thousands_of_fields_do_not_hold_up_the_loop(
    path: Path, tokenizer: Any
) -> None:
    s = server(tokenizer, path)
    began = time.process_time()
    answer = await s.post("/v1/completions", MANY)
    assert answer.status == 400
    json.loads(MANY)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(("kind", "rest"), KINDS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_few_errors_are_collected(kind: type[Strict], rest: dict[str, Any]) -> None:
    """In any list or object: pydantic could describe each of a million, a gigabyte for a few MB."""
    counts: list[int] = []
    for name in kind.model_fields:
        for value in (-1, "x", {}, [], True):
            for many in ([value] * 3_000, dict.fromkeys(map(str, range(3_000)), value)):
                try:
                    kind.model_validate(rest | {name: many})
                except ValidationError as error:
                    counts.append(error.error_count())
    assert counts and max(counts) < 100


def test_a_body_has_no_more_values_than_a_context_tokens() -> None:
    many = b'{"tokens": [%s65]}' % (b"65," * (MAX_VALUES + 1))
    messages = b'{"messages": [%s]}' % b",".join([b'{"role": "user"}'] * (MAX_ITEMS + 1))
    brackets = b'{"tokens": [65], "x": %s%s}' % (b"[" * MAX_VALUES, b"]" * MAX_VALUES)
    objects = b'{"tokens": [65], "x": [%s{}]}' % (b"{}," * MAX_OBJECTS)
    lists = b'{"tokens": [65], "x": [%s[]]}' % (b"[]," * MAX_OBJECTS)
    for kind, data, param in (
        (app.Detokenize, objects, "body"),
        (app.Detokenize, lists, "body"),
        (app.Detokenize, many, "body"),
        (app.Detokenize, brackets, "body"),
        (openai_schema.Chat, messages, "messages"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(kind, data)
        assert caught.value.param == param


@pytest.mark.anyio
async def test_a_text_far_beyond_the_context_is_not_read(
    path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused in the words by which agents know to compact, with the tokens that it may
    have."""
    s, read = server(tokenizer, path), list[int]()
    context = s.app.state.server.worker.info.context
    own = type(tokenizer._tokenizer)
    encode = own.encode

    def watched(self: Any, text: str, **kw: Any) -> Any:
        read.append(len(text))
        return encode(self, text, **kw)

    monkeypatch.setattr(own, "encode", watched)
    text = "hello world " * 400_000
    said = {"role": "user", "content": text}
    for at, body in (
        ("/v1/chat/completions", {"messages": [said]}),
        ("/v1/messages", {"messages": [said], "max_tokens": 2}),
        ("/v1/responses", {"input": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/tokenize", {"prompt": text}),
        ("/v1/tokenize", {"messages": [said]}),
        ("/v1/fim/completions", {"prompt": "a", "suffix": text}),
        ("/infill", {"input_extra": [{"text": text}]}),
        ("/v1/embeddings", {"input": ["a", text]}),
        ("/api/chat", {"messages": [said]}),
        ("/api/generate", {"prompt": text, "raw": True}),
        ("/api/embed", {"input": text}),
    ):
        answer = await s.post(at, json.dumps(body).encode())
        assert answer.status == 400, at
        found = re.search(
            r"prompt is too long: (\d+) tokens > (\d+) maximum", json.dumps(answer.json)
        )
        assert found and int(found[2]) == context and 10**5 < int(found[1]) < 10**7, answer.json
    counted = await s.post("/v1/messages/count_tokens", json.dumps({"messages": [said]}).encode())
    assert counted.status == 200 and 10**5 < counted.json["input_tokens"] < 10**7
    assert sum(read) < 14 * 20 * context
    sparse: Any = Sparse()
    check_length(sparse, "a" * 20 * context, context, "prompt")
    assert sparse.read == FIRST_CHARS * context, "it may be of long tokens"
    with pytest.raises(TooLong, match="prompt is too long"):
        check_length(sparse, "a" * 10_000 * context, context, "prompt")
    assert sparse.read < 2000 * context


class Sparse:
    """A tokenizer with a token for 100 letters."""

    read = 0

    def encode(self, text: str, **kw: Any) -> list[int]:
        self.read += len(text)
        return [0] * (len(text) // 100)


@pytest.mark.anyio
async def test_an_infinite_number_is_not_repeated(path: Path, tokenizer: Any) -> None:
    """In a response, JSON has no way to write it."""
    s = server(tokenizer, path)
    for value in ("1e999", "NaN", "[-Infinity]", "9" * 400 + ".0", "-" + "9" * 299 + ".0E+10"):
        answer = await s.post(
            "/v1/responses", b'{"input": "a", "metadata": {"a": %s}}' % value.encode()
        )
        assert answer.status in (200, 400) and b"Infinity" not in answer.body
        if answer.status == 200:
            assert (await s.get(f"/v1/responses/{answer.json['id']}")).status == 200
