"""Bodies, schemas and grammars that cost as much as their senders can make them, at a real server,
beside a stream: it goes on, a health check is answered at once, and each sender gets an answer that
names the field.

`FUZZ_SECONDS=300 scripts/test -s -m slow tests/test_fuzz_bodies.py` does so for longer than the
usual seconds a kind; figures are printed.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxspec.text.structured import trial
from tests.support.bad_values import BODIES, VALUES
from tests.support.processes import Server
from tests.support.served_model import save
from tests.test_fuzz_wire import EXTRA_S, TRIES, Client, Noise, Place, beside

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "a"}]
GROWTH = 700 << 20  # bytes of the process: eight bodies of 16 MB, parsed
ANSWER_S = 4 * trial.MAX_S  # for any of these, with others before it


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("fuzz")
    words = [str(save(root / "m")), "--cache-dir", str(root / "cache"), "--speculate", "off"]
    words += ["--kv-blocks", "300", "--cache-gb", "0", "--max-body-mb", "16"]
    with Server(words, HOME=str(root)) as server:
        yield Place(server, "")
        assert server.stop() == 0
    assert "Traceback" not in server.said and "ERROR" not in server.said, server.said[-3000:]


Made = tuple[str, bytes]  # a path and a body


def strange(rng: random.Random) -> Made:
    """What is wrong somewhere, small."""
    path, body = rng.choice(BODIES)
    return path, body.replace("%s", rng.choice(list(VALUES.values()))).encode()


def large(rng: random.Random) -> Made:
    """Nothing is wrong but the size."""
    many, text = rng.choice([(1000, "x" * 15_000), (9999, "x" * 1500), (200_000, "x"), (300, "x")])
    turns = [{"role": rng.choice(["user", "assistant", "system"]), "content": text}] * many
    tool = {"name": "f", "input_schema": {"description": text * 50}, "defer_loading": True}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "tool_reference", "tool_name": "f"}] * many,
    }
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(many)
    ]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    made: list[tuple[str, Any]] = [
        (CHAT, {"messages": turns}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}] * many}]}),
        (CHAT, {"messages": [{"role": "user", "content": text * many}]}),
        (CHAT, {"messages": SAID, "tools": tools, "tool_choice": allowed}),
        (CHAT, {"messages": SAID, "model": "claude-" + text * many, "stream": True}),
        (CHAT, {"messages": SAID, "unknown": [[]] * many}),
        (CHAT, {"messages": SAID, "chat_template_kwargs": {"a": [[text]] * many}}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [result]}], "tools": [tool]}),
        ("/v1/responses", {"input": [{"type": "message", "role": "assistant", "content": text}] * many}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": f"{i}"} for i in range(many)]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [""] * many}]}),
        ("/v1/completions", {"prompt": [text] * many}),
        ("/v1/embeddings", {"input": [text] * many}),
        ("/detokenize", {"tokens": [2**31 + 5] * many}),
        ("/tokenize", {"prompt": text * many}),
    ]  # fmt: skip
    path, body = rng.choice(made)
    data = json.dumps(body).encode()
    if rng.random() < 0.2:
        data = data.replace(b"a", rng.choice([b"[" * 100_000, b"\\ud800" * 1000, b"\0"]), 1)
    return path, data


def costly(rng: random.Random) -> Made:
    """A schema or a grammar."""
    n = rng.choice([3, 30, 300, 3000, 30_000])
    few = min(n, 700)
    pattern = rng.choice(["a.{%d}b", "(a|b){%d}", "(abc){%d}", "[^x]{0,%d}y", "(a?){%d}"]) % n
    deep: Any = rng.choice([1, "x", {"a": 1}])
    for i in range(rng.randrange(100)):
        deep = [deep, deep] if i < 10 else {"a": deep} if i % 2 else [deep]
    schemas: list[Any] = [
        {"properties": {f"k{i}": {} for i in range(n)}},
        {"patternProperties": {f"^a{i}.*x{i}$": {"type": "null"} for i in range(few)}},
        {"enum": [f"v{i}" for i in range(n)]},
        {"const": deep},
        {"type": "string", "pattern": pattern},
        {"allOf": [{"type": "string", "pattern": f".*{pattern}{i}"} for i in range(few % 30)]},
        {"type": "integer", "multipleOf": rng.choice([7, 9973, 99_991, 9_999_991])},
        {"type": "array", "minItems": n, "maxItems": 2 * n, "items": {"anyOf": [{"const": i} for i in range(few)]}},
        {"$ref": "#/$defs/0", "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(few)} | {f"{few}": {}}},
        {"properties": {f"k{i}": {"$ref": "#/$defs/c"} for i in range(few)}, "$defs": {"c": {"const": {f"a{i}": "x" for i in range(few)}}}},
        {"type": "string", "minLength": n, "maxLength": n * 1000},
    ]  # fmt: skip
    larks = [
        f"start: /{pattern}/",
        f'start: "abc"{{{n}}}',
        "start: " + '("a"|"b")? ' * n,
        "start: " + "(" * n + '"a"' + ")" * n,
        "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(n)), f'r{n}: "a"']),
        'start: e\ne: e e | e e e | e e e e | "x" | f f\nf: "(" e ")"',
        f"start: A\nA: /{pattern}/ & ~/.*{pattern}.*/",
        f'start: %json {{"multipleOf": {n}}}',
    ]
    body: Any = {"messages": SAID, "max_tokens": 20}
    if rng.random() < 0.3:
        body["grammar"] = rng.choice(larks)
    elif rng.random() < 0.8:
        schema = {**rng.choice(schemas), "title": f"{rng.random()}"}  # none is known
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    else:
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": each}}
            for i, each in enumerate(schemas)
        ]
        body |= {"tools": rng.sample(tools, 4), "tool_choice": "required"}
    return CHAT, json.dumps(body).encode()


def senders(made: list[Made], number: int) -> Noise:
    """So many clients that send this, one after the other, and read the answers."""

    async def one(place: Place) -> None:
        while made:
            path, body = made.pop()
            began = time.monotonic()
            with await place.connect() as client:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                head += f"Content-Length: {len(body)}\r\n\r\n"
                try:
                    await client.send(head.encode() + body, 60)
                    place.statuses[int((await whole(client))[9:12])] += 1
                except ConnectionError:  # answered, and closed, before all was read
                    place.statuses[0] += 1
            assert time.monotonic() - began < ANSWER_S, body[:200]

    async def noise(place: Place) -> None:
        await asyncio.gather(*(one(place) for _ in range(number)))

    return noise


async def whole(client: Client) -> bytes:
    said = b""
    while piece := await client.read(ANSWER_S):
        said += piece
    assert said.startswith(b"HTTP/1.1 "), said[:100]
    return said


@pytest.mark.parametrize(("make", "number"), [(strange, 2000), (large, 40), (costly, 400)])
def test_nobody_else_notices(
    make: Callable[[random.Random], Made], number: int, place: Place
) -> None:
    for _ in range(TRIES):
        place.statuses.clear()
        made = [make(place.rng) for _ in range(number)]  # before, as it takes our own time
        quiet, seen = beside(place, None), beside(place, senders(made, 6))
        print(
            f"\n{make.__name__}: longest gap {seen.gap:.3f} s, quiet {quiet.gap:.3f}; longest health"
            f" check {seen.health:.3f} s, quiet {quiet.health:.3f}; our lag {seen.lag:.3f} s;"
            f" {seen.footprint >> 20} MiB, quiet {quiet.footprint >> 20}; {dict(place.statuses)}"
        )
        assert seen.pieces and seen.footprint <= quiet.footprint + GROWTH
        assert place.statuses[200] + place.statuses[400] and not [
            each for each in place.statuses if each >= 500 and each != 503
        ]
        slow = EXTRA_S + 4 * seen.lag  # a core that we wait for, the server waits for too
        if seen.gap <= slow + quiet.gap and seen.health <= slow:
            break
    else:
        pytest.fail("the stream stood still, or the health check did")
