"""Grammars and schemas that nobody checked: each is taken or refused, and none ends the process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.messages import RejectedRequest
from mlxspec.text.structured.json_schema import checked_schema
from tests.support.bad_values import DEEP, save_agent
from tests.support.schemas import schemas


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_agent(tmp_path_factory.mktemp("agent"))


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
