"""What others wrote and nobody checked: bodies, grammars, answers of a model, files. Nothing raises
what its reader does not promise, or takes time that grows faster than it. The wire is in
server/test_wire.py."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mlxspec.cache import disk
from mlxspec.client import ClientError
from mlxspec.commands import chat, models
from mlxspec.config import ConfigError, load
from mlxspec.kernels.verify import VerdictFile
from mlxspec.load.warmup import WarmupCache
from mlxspec.model.layout import CacheBytes, LayoutChoice
from mlxspec.server import anthropic, app, ollama
from mlxspec.server.body import MAX_ITEMS, MAX_OBJECTS, MAX_VALUES, Strict, parse
from mlxspec.server.embeddings import _pooling
from mlxspec.server.errors import ApiError
from mlxspec.server.openai import schema as openai_schema
from mlxspec.server.responses import schema as responses_schema
from mlxspec.service import crashes, status
from mlxspec.speculate.controller import GRID
from mlxspec.speculate.heads import load_head
from mlxspec.speculate.heads.files import find_head
from mlxspec.text.chat import FIRST_CHARS, check_length, load_tokenizer
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.messages import RejectedRequest, TooLong
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.json_schema import checked_lark, checked_schema
from mlxspec.training.run import resume
from mlxspec.training.samples import SampleFile
from tests.heads import kinds
from tests.schemas import schemas
from tests.server.scripted import Server, server
from tests.server.test_fim import PSM
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

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
DEEP = 100_000
VALUES = {  # JSON texts, as they stand in a body or a file
    "deep list": "[" * DEEP + "]" * DEEP,
    "10k deep": "[" * 10_000 + "]" * 10_000,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "190 deep": "[" * 190 + "]" * 190,
    "unclosed": "[" * DEEP,
    "1e999": "1e999",
    "-1e999": "-1e999",
    "NaN": "NaN",
    "Infinity inside": '{"a": [Infinity]}',
    "int of 5000": "9" * 5000,
    "int of 4000": "9" * 4000,
    "float of 400": "9" * 400 + ".5",
    "250 digits and e99": "9" * 250 + "e99",
    "true": "true",
    "0.5": "0.5",
    "-1": "-1",
    "text": '"x"',
    "nothing": "[]",
    "empty": "{}",
    "nulls": "[null]",
    "lists": "[[]]",
    "surrogate": '{"\\udc00": "\\ud800"}',
    "nul": '{"\\u0000": "\\u0000"}',
    "twice": '{"a": 1, "a": "b"}',
    "many": json.dumps({f"k{i}": i for i in range(3000)}),
    "deep in text": json.dumps("[" * DEEP + "]" * DEEP),
    "900 deep in text": json.dumps('{"a":' * 900 + "1" + "}" * 900),
    "int of 5000 in text": json.dumps('{"a": ' + "9" * 5000 + "}"),
    "infinite in text": json.dumps('{"a": 1e999, "b": "\\ud800"}'),
}
SAID = '"messages": [{"role": "user", "content": "a"}]'
CALL = '{"id": "1", "type": "function", "function": {"name": "f", "arguments": %s}}'
PARAMETERS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
BODIES = [  # path, and a body with a hole
    *(
        ("/v1/chat/completions", f"{{{body}}}")
        for body in (
            '"messages": %s',
            '"messages": [{"role": "user", "content": %s}]',
            '"messages": [{"role": %s, "content": "a"}]',
            f'"messages": [{{"role": "assistant", "tool_calls": [{CALL}]}}]',
            *(f'{SAID}, "{name}": %s' for name in ("max_tokens", "temperature", "seed", "stop", "metadata")),
            *(f'{SAID}, "{name}": %s' for name in ("logit_bias", "grammar", "tool_choice", "zzz")),
            f"{SAID}, {PARAMETERS}",
            f'{SAID}, "tool_choice": "required", {PARAMETERS}',
            f'{SAID}, "tool_choice": "required", {PARAMETERS}'.replace("%s", '{"required": %s}'),
            f'{SAID}, "chat_template_kwargs": {{"a": %s}}',
            *(
                f'{SAID}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {each}}}}}'
                for each in ("%s", *(f'{{"{k}": %s}}' for k in ("enum", "multipleOf", "minimum", "allOf")))
            ),
        )
    ),
    ("/v1/completions", '{"prompt": %s}'),
    ("/v1/completions", '{"prompt": "a", "best_of": %s}'),
    ("/v1/messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": %s}]}'),
    ("/v1/messages", f'{{"max_tokens": 5, {SAID}, "tools": [{{"name": "f", "input_schema": %s}}]}}'),
    (
        "/v1/messages",
        '{"max_tokens": 5, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":'
        ' [{"type": "tool_use", "id": "1", "name": "f", "input": %s}]}, {"role": "user", "content": "b"}]}',
    ),
    ("/v1/messages/count_tokens", f'{{{SAID}, "system": %s}}'),
    ("/api/chat", f'{{{SAID}, "options": %s}}'),
    ("/api/chat", f'{{{SAID}, "options": {{"num_predict": %s}}}}'),
    ("/api/chat", f'{{{SAID}, "format": %s}}'),
    ("/api/chat", f'{{{SAID}, "think": %s}}'),
    ("/api/chat", '{"messages": [%s]}'),
    ("/api/chat", '{"messages": [{"role": "user", "images": %s}]}'),
    ("/api/chat", '{"messages": [{"role": "assistant", "thinking": %s}]}'),
    ("/api/generate", '{"keep_alive": %s}'),
    ("/api/generate", '{"prompt": %s, "raw": true}'),
    ("/api/generate", '{"prompt": "a", "system": %s}'),
    ("/api/generate", '{"prompt": "a", "suffix": %s}'),
    ("/api/embed", '{"input": %s}'),
    ("/api/embed", '{"input": "a", "dimensions": %s}'),
    ("/api/embeddings", '{"prompt": %s}'),
    ("/api/show", '{"model": %s}'),
    ("/v1/embeddings", '{"input": %s}'),
    ("/v1/embeddings", '{"input": [%s]}'),
    ("/v1/embeddings", '{"input": "a", "dimensions": %s}'),
    ("/v1/embeddings", '{"input": "a", "encoding_format": %s}'),
    ("/v1/completions", '{"prompt": "a", "suffix": %s}'),
    ("/v1/fim/completions", '{"prompt": %s, "suffix": "b"}'),
    ("/v1/fim/completions", '{"prompt": "a", "suffix": %s}'),
    ("/infill", '{"input_prefix": %s}'),
    ("/infill", '{"input_suffix": "b", "n_predict": %s}'),
    ("/infill", '{"input_extra": %s}'),
    ("/infill", '{"input_extra": [{"filename": %s, "text": "a"}]}'),
    ("/v1/responses", '{"input": %s}'),
    ("/v1/responses", '{"input": "a", "metadata": %s}'),
    ("/v1/responses", '{"input": "a", "user": %s}'),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %s}]}'),
    ("/v1/models/load", '{"model": %s}'),
    ("/v1/models/unload", '{"model": "tiny", "force": %s}'),
    ("/v1/tokenize", '{"prompt": %s}'),
    ("/v1/detokenize", '{"tokens": %s}'),
]  # fmt: skip
RAW = [
    *(
        b"",
        b" ",
        b"\0",
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b"{}{}",
        b'{"a":1,}',
        b"{'a': 1}",
        b"{" * DEEP,
    ),
    *(b"\xef\xbb\xbf{}", "{}".encode("utf-16"), "{}".encode("utf-16-le"), "{}".encode("utf-32")),
    *(
        b'{"a": "\xff\xfe"}',
        b'{"a": "\xc0\xaf"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\0"}',
        b'{"a": 1',
    ),
]
MANY = b'{"k": 1' + b"".join(b', "k%d": 1' % i for i in range(200_000)) + b"}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("agent")
    return save_tokenizer(place, template=AGENT, extra=THINK + CALLS + PSM)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return load_tokenizer(path)


# ---- bodies
# ---------------------------------------------------------------------------------------------


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


# ---- grammars and schemas
# -------------------------------------------------------------------------------

CHAIN = 5000
LARKS = {  # a grammar, and whether it is taken
    "chain of rules": (
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(CHAIN)) + f'\nr{CHAIN}: "a"'
    ),
    "chain of terminals": "start: T0\n"
    + "\n".join(f"T{i}: T{i + 1}" for i in range(CHAIN))
    + f'\nT{CHAIN}: "a"',
    "groups": "start: " + "(" * DEEP + '"a"' + ")" * DEEP,
    "options": "start: " + "[" * DEEP,
    "groups of a pattern": "start: /" + "(" * DEEP + ")" * DEEP + "/",
    "loop": "start: a\na: b\nb: a",
    "many": "start: " + "|".join(f'"a{i}"' for i in range(2000)),
    "catastrophe": "start: /(a*)*(a|aa)+(a+)+b/",
    "repeated": "start: /((a{0,1000}){0,1000}){0,1000}/",
    "doubling": "start: T0\n"
    + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60))
    + '\nT60: "a"',
    "half a literal": 'start: "' + '\\"' * DEEP,
    "half a pattern": "start: /" + "\\/" * DEEP,
    "nothing": "",
    "nul": "\0",
    "a token": "start: <[999999999999]>",
}


def chained(links: int, step: Callable[[int], Any]) -> dict[str, Any]:
    """Definitions each of which names the next, told last to first."""
    names: dict[str, Any] = {f"a{links}": {"type": "integer"}}
    names |= {f"a{i}": step(i + 1) for i in reversed(range(links))}
    return {"$defs": names, "$ref": "#/$defs/a0"}


def named(i: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{i}"}


SCHEMAS = {
    "chain": chained(CHAIN, named),
    "chain of objects": chained(1500, lambda i: {"type": "object", "properties": {"x": named(i)}}),
    "loop": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "enum": {"enum": [f"v{i}" for i in range(10_000)]},
    "names": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
    "pattern": {"type": "string", "pattern": "^(a*)*(a|aa)+$"},
    "patterns": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "length": {"type": "string", "minLength": 10**9},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "required": {"type": "object", "required": [{}]},
    "required is none": {"type": "object", "required": 1},
    "number": {"multipleOf": 10**400},
}

CHILD = """
import json, sys, threading
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import checked_lark, json_rule
from mlxspec.text.messages import RejectedRequest
from mlxspec.text.chat import load_tokenizer

g = Grammars(load_tokenizer(Path(sys.argv[1])), 320)

def work(kind, given):
    try:
        rule = checked_lark(given, "it") if kind == "lark" else g.rules([json_rule(given, "it")])
        g.compile(rule, None, "it").result()().masks([])
        print("taken", flush=True)
    except RejectedRequest as error:
        assert error.field == "it" and str(error).startswith("it")
        print(str(error)[:300].replace(chr(10), " "), flush=True)

for line in sys.stdin:
    thread = threading.Thread(target=work, args=json.loads(line))
    thread.start()
    thread.join()
"""


def test_no_grammar_ends_the_process_or_takes_long(path: Path) -> None:
    """On a thread, as in the server, in a process of its own: too deep a recursion in Rust is a
    SIGSEGV."""
    asked = [("lark", text) for text in LARKS.values()] + [
        ("json", schema) for schema in SCHEMAS.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        input="".join(json.dumps(one) + "\n" for one in asked),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    names = [*LARKS, *SCHEMAS]
    assert done.returncode == 0 and len(said) == len(names), (
        names[len(said) : len(said) + 1],
        done.stderr[-2000:],
    )
    found = dict(zip(names[: len(LARKS)], said, strict=False))
    assert found["many"] == found["catastrophe"] == "taken"
    assert "too deep a stack" in found["chain of rules"] and "too deeply" in found["groups"]
    found = dict(zip(SCHEMAS, said[len(LARKS) :], strict=True))
    assert found["itself"] == found["names"] == "taken"
    print(found["chain"], found["chain of objects"])
    assert "required" in found["required"]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_spoiled_schema_is_taken_or_refused(data: st.DataObject) -> None:
    """A schema with one of its values replaced by any JSON."""
    schema = json.loads(json.dumps(data.draw(schemas())))
    places = list(_places(schema))
    if places:
        holder, key = data.draw(st.sampled_from(places))
        holder[key] = data.draw(ANY)
    try:
        checked_schema(schema, "it")
    except RejectedRequest as error:
        assert error.field == "it"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(value[key])


# ---- a model's answer
# -----------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
UNITS = [
    *(
        "{",
        "[",
        "<",
        "\\",
        '"',
        " ",
        "\n",
        "a ",
        "`",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    ),
    *(
        "<tool_call>{",
        '{"name":',
        "<function=",
        "<tool_call></tool_call>",
        "\ufffd",
        "</",
        "<tool_cal",
    ),
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
]


def parts_of(
    tokenizer: Any, text: str, cuts: list[int], thinking: bool = False
) -> list[tuple[str, str]]:
    """Kinds and texts, neighbours of one kind joined."""
    reader, made = OutputParser(tokenizer, TOOLS, thinking), []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        made += reader.feed(text[a:b])
    found: list[tuple[str, str]] = []
    for part in [*made, *reader.finish()]:
        said = part.text if part.call is None else f"{part.call.name} {part.call.arguments}"
        if found and part.call is None and found[-1][0] == part.kind:
            said = found.pop()[1] + said
        if part.call is None or part.opens:
            found.append((part.kind, said))
    return found


SPLIT = settings(deadline=None, derandomize=True, database=None)


def same_however_split(tokenizer: Any, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(UNITS) | st.text(max_size=4), max_size=30)))
    text += data.draw(st.sampled_from(UNITS)) * data.draw(st.integers(0, 60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    thinking = data.draw(st.booleans())
    whole = parts_of(tokenizer, text, [], thinking)
    assert parts_of(tokenizer, text, cuts, thinking) == whole
    assert parts_of(tokenizer, text, [*range(1, len(text))], thinking) == whole


@settings(SPLIT, max_examples=150)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_split(tokenizer: Any, data: st.DataObject) -> None:
    same_however_split(tokenizer, data)


@pytest.mark.slow
@settings(SPLIT, max_examples=8000)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_split_at_length(
    tokenizer: Any, data: st.DataObject
) -> None:
    same_however_split(tokenizer, data)


@settings(SPLIT, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 400), max_size=60),
    cut=st.integers(0, 60),
    stop=st.text("aé<\ufffd ", max_size=3),
)
def test_any_ids_are_read_the_same_however_they_come(
    tokenizer: Any, ids: list[int], cut: int, stop: str
) -> None:
    stops = [stop] if stop else []
    one, other = (Detokenizer(tokenizer, stops) for _ in range(2))
    whole = one.feed(ids) + one.finish()
    assert other.feed(ids[:cut]) + other.feed(ids[cut:]) + other.finish() == whole
    assert one.count == other.count and one.released == other.released


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def grows(work: Callable[[int], object], small: int) -> float:
    """How much longer 8 times as much takes, per piece: 1 is linear, 8 is quadratic. The best of
    three."""
    return min(
        seconds(lambda: work(8 * small)) / max(seconds(lambda: work(small)), 1e-4) / 8
        for _ in range(3)
    )


@pytest.mark.parametrize("unit", ["<", "{", "\\", " ", "</", "<tool_call>", "<tool_call>{"])
def test_reading_an_answer_takes_linear_time(tokenizer: Any, unit: str) -> None:
    def work(n: int) -> None:
        reader = OutputParser(tokenizer, TOOLS, False)
        for _ in range(n // 8):
            reader.feed(unit * 8)
        reader.finish()

    assert grows(work, 2000 // len(unit)) < 3


@pytest.mark.parametrize("unit", ["[", '"\\', "\\/", "[stop ", "~ ", "(", "//", "stop "])
def test_checking_a_grammar_takes_linear_time(unit: str) -> None:
    def work(n: int) -> None:
        try:
            checked_lark("/" * (unit == "\\/") + unit * n, "grammar")
        except RejectedRequest:
            pass

    assert grows(work, 2000) < 3


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_an_answer_of_400_kb(tokenizer: Any, unit: str) -> None:
    assert (
        seconds(lambda: parts_of(tokenizer, (unit * 400_000)[:400_000], [*range(7, 400_000, 7)]))
        < 30
    )


# ---- files
# ----------------------------------------------------------------------------------------------

HOLES = ["%s", '{"a": %s}']
VERDICT = {
    "variant": "a",
    "reason": "",
    "parked": False,
    "least": 1,
    "most": 2,
    "error": 0.1,
    "gains": {},
}
COSTS = {"rows": GRID, "measured": [[1] * len(GRID)] * 2, "contexts": [1, 2], "sampling": {"a": 0}}
FIT = asdict(LayoutChoice("rows", True, False, CacheBytes(1, ((1, 1),), 0), 1))
KNOWN = {"layout": FIT, "costs": COSTS, "kernels": ""}


def holes(whole: dict[str, Any], around: str = "%s") -> list[str]:
    """The object with a hole in the place of each of its values."""
    return [around % json.dumps({**whole, key: "@"}).replace('"@"', "%s") for key in whole]


def told_by_flaws(file: Path) -> None:
    data = file.read_bytes()
    weights = file.parent / "model.safetensors"
    weights.write_bytes(len(data).to_bytes(8, "little") + data)
    models.damage(file.parent)
    weights.unlink()


def label_of(file: Path) -> None:
    data = file.read_bytes()
    for content in (data, len(data).to_bytes(8, "little") + data):
        with contextlib.suppress(ValueError):
            disk.read_label(BytesIO(content))
        assert disk.decode(content, "0" * 32) is None


def settings_of(file: Path) -> None:
    load({}, {"MLXSPEC_CONFIG": str(file)})


def crashes_of(file: Path) -> None:
    assert len(crashes.read(file, 1e9)) <= crashes.SAFE_CRASHES


def verdicts_of(file: Path) -> None:
    found = VerdictFile(file.parent, {})
    found.path.write_bytes(file.read_bytes())
    found.load()


def samples_of(file: Path) -> None:
    for sample in SampleFile(file, 320).read().values():
        assert 0 < sample.first <= len(sample.tokens) and max(sample.tokens) < 320


def state_of(file: Path) -> None:
    """Of a training, and as a header of safetensors."""
    data = file.read_bytes()
    trainer: Any = SimpleNamespace(resume=lambda tensors: None)
    for content in (data, len(data).to_bytes(8, "little") + data):
        file.with_name("state.safetensors").write_bytes(content)
        resume(trainer, file.with_name("state.safetensors"), "")


def head_of(file: Path) -> None:
    """As a head's config.json, and as its tensors."""
    data = file.read_bytes()
    place = file.parent / "head"
    place.mkdir(exist_ok=True)
    for content in (data, len(data).to_bytes(8, "little") + data):
        (place / "config.json").write_bytes(data)
        (place / "model.safetensors").write_bytes(content)
        assert load_head(find_head(place), kinds.plain_target()) is None


def pooling_of(file: Path) -> None:
    place = file.parent / "1_Pooling"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(file.read_bytes())
    model: Any = SimpleNamespace(name="m", server=SimpleNamespace(paths={"m": file.parent}))
    with contextlib.suppress(ApiError):
        assert _pooling(model) in ("last", "mean")


SAMPLE = {"tokens": [1, 2], "first": 1}
READERS: dict[str, tuple[Callable[[Path], object], tuple[type[Exception], ...], list[str]]] = {
    "verdicts": (verdicts_of, (), holes(VERDICT, '{"a 1": %s}')),
    "known": (WarmupCache.load, (), holes(KNOWN)),
    "fit": (WarmupCache.load, (), holes(FIT, json.dumps({**KNOWN, "layout": "@"}).replace('"@"', "%s"))),
    "costs": (WarmupCache.load, (), holes(COSTS, json.dumps({**KNOWN, "costs": "@"}).replace('"@"', "%s"))),
    "crashes": (crashes_of, (), ["[%s]", "[1, %s]"]),
    "weights": (told_by_flaws, (), ['{"w": %s}', '{"w": {"data_offsets": [0, %s]}}']),
    "run": (label_of, (), ['{"__metadata__":%s}', '{"__metadata__":{"keys":%s}}']),
    "samples": (samples_of, (), ['["k", %s]', '[%s, {"tokens": [1], "first": 1}]', *holes(SAMPLE, '["k", %s]')]),
    "state": (state_of, (), ['{"w": %s}', '{"__metadata__": {"samples": %s}}']),
    "head": (head_of, (), ['{"hidden_norm.weight": %s, "fc.weight": {}}', '{"mlx_lm_extra_tensors": %s}', '{"mlx_lm_extra_tensors": {"mtp_file": %s}}', '{"text_config": {"mtp_num_hidden_layers": %s}}']),
    "pooling": (pooling_of, (), ['{"pooling_mode": %s}', '{"pooling_mode_lasttoken": %s}']),
    "settings": (settings_of, (ConfigError,), ["port = %s", "zzz = %s", "[%s]", "%s.a = 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_holds_anything(tmp_path: Path, name: str) -> None:
    read, errors, shapes = READERS[name]
    file = tmp_path / "file"
    for data in RAW + [
        (h.replace("%s", v)).encode() for h in HOLES + shapes for v in VALUES.values()
    ]:
        file.write_bytes(data)
        try:
            read(file)
        except errors as error:
            assert str(file) in str(error)


def test_weights_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "none")
    assert models.weight_bytes(tmp_path) == 0 and len(models.damage(tmp_path)) == 1


# ---- servers
# --------------------------------------------------------------------------------------------


class Said:
    """A response of a server that is none."""

    def __init__(self, data: bytes) -> None:
        self.lines = data.splitlines(keepends=True)

    def readline(self, most: int) -> bytes:
        return self.lines.pop(0) if self.lines else b""


@pytest.mark.parametrize("value", VALUES)
def test_a_server_that_answers_anything(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat and `mlxspec status` say so, whatever it is."""
    body = VALUES[value].encode()

    class Connection:
        def __init__(self, *_: object, **__: object) -> None: ...
        def request(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def getresponse(self) -> Any:
            return type("Response", (Said,), {"status": 200, "read": lambda self, *_: body})(
                b"data: " + body
            )

    monkeypatch.setattr("http.client.HTTPConnection", Connection)
    with pytest.raises(ClientError):
        chat.answer("http://localhost:1", "", {"messages": []}, "hello")
    assert status.get_status("http://localhost:1").state in ("unwell", "stopped")
    for around in (
        b'{"models": %s}',
        b'{"models": [{"stats": {"generated_tokens": 1}}], "requests": %s, "time": 1}',
    ):
        body = around % VALUES[value].encode()
        assert status.get_status("http://localhost:1").state in ("unwell", "stopped")
