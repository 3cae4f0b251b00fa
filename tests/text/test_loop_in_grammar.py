"""A loop under a grammar ends what it lies in, and the rest of the answer is the model's own."""

import json
from typing import Any

import pytest

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.text.structured.loop_guard import LoopGuard
from tests.tiny_tokenizer import save_tokenizer

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answer(tokenizer: Any, properties: dict[str, Any], wish: dict[str, Any]) -> tuple[Any, int]:
    """What a model that wishes to write this object writes, and the loops that were ended."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    grammars = Grammars(tokenizer, len(tokenizer))
    lark = grammars.rules([json_rule(schema, "response_format")])
    inner = grammars.compile(lark, False, "response_format").result()()
    end = min(tokenizer.eos_token_ids)
    made = LoopGuard(end, lambda: "", tokenizer.decode, inner=inner, grammar=inner)
    pieces = {tokenizer.decode([i]): i for i in range(len(tokenizer))}
    rest, ids = json.dumps(wish), []
    for _ in range(4000):
        allowed = int.from_bytes(made.masks(())[0], "little")
        known = [rest[:n] for n in range(16, 0, -1) if rest[:n] in pieces]
        if fits := [piece for piece in known if allowed >> pieces[piece] & 1]:
            token, rest = pieces[fits[0]], rest[len(fits[0]) :]
        elif allowed >> end & 1:
            break
        else:  # goes on behind what it was made to write
            token = (allowed & -allowed).bit_length() - 1
            _, found, behind = rest.partition(tokenizer.decode([token]))
            rest = behind if found else rest
        ids.append(token)
        made.take([token])
    return json.loads(tokenizer.decode(ids)), made.loops


DEMANDED: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "items": INTEGER, "minItems": 400, "maxItems": 400}, [0] * 400),
    (
        {"type": "array", "items": {"const": {"a": 0, "b": []}}, "minItems": 150, "maxItems": 150},
        [{"a": 0, "b": []}] * 150,
    ),
    ({"type": "string", "pattern": "^0{900}$"}, "0" * 900),
]


@pytest.mark.parametrize("schema, value", DEMANDED)
def test_what_a_grammar_demands_is_no_loop(tokenizer: Any, schema: Any, value: Any) -> None:
    """And what follows it is as it was meant."""
    wish = {"rows": value, "title": "An empty grid", "note": "to fill"}
    properties = {"rows": schema, "title": STRING, "note": STRING}
    assert answer(tokenizer, properties, wish) == (wish, 0)


def test_what_follows_a_loop_is_kept(tokenizer: Any) -> None:
    wish = {"content": "ha ho " * 400, "path": "notes.txt", "n": 42, "l": ["x", "y"]}
    properties = {
        "content": STRING,
        "path": STRING,
        "n": INTEGER,
        "l": {"type": "array", "items": STRING},
    }
    made, loops = answer(tokenizer, properties, wish)
    assert loops == 1 and made.pop("content").startswith("ha ho ha ho")
    assert made == {name: wish[name] for name in ("path", "n", "l")}


def test_an_answer_of_loops_ends(tokenizer: Any) -> None:
    """The fourth ends all that is open."""
    names = "abcdefgh"
    wish = {name: f"{name} " * 900 for name in names}
    made, loops = answer(tokenizer, dict.fromkeys(names, STRING), wish)
    assert loops == 4 and set(made) == set(names)
    assert [bool(made[name]) for name in names] == [True] * 4 + [False] * 4
