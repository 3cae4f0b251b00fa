"""Structured answers of a real model: all keep to their schemas, with speculation and without,
alike."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings

from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.load.loader import load_engine
from mlxspec.speculate import NoSpeculation
from mlxspec.text.chat import load_tokenizer, render_chat
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.types import Output, Request, Sampling
from tests.support.schemas import schemas

pytestmark = pytest.mark.slow

RUNS, BATCH, MOST = 200, 20, 400


def some(n: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=n, derandomize=True, database=None, phases=[Phase.generate])
    @given(schemas(endless=False))
    def take(schema: Any) -> None:
        found.append(schema)

    take()
    return (found * n)[:n]


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    cache = tmp_path_factory.mktemp("cache")
    config = Config(cache_dir=str(cache), cache_gb=0, kv_blocks=600)
    engine, _ = load_engine(smollm2, "smollm2", config)
    yield engine, Grammars(load_tokenizer(smollm2), engine.vocab)


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of each, which must end by itself."""
    engine.reset()
    outputs: list[Output] = []
    for request in requests:
        engine.add(request)
    while engine.busy:
        outputs += engine.step()
    ends = {o.request: (o.finish, o.error) for o in outputs if o.finish}
    assert set(ends.values()) == {("stop", "")}, ends
    return {r.id: [t for o in outputs if o.request == r.id for t in o.tokens] for r in requests}


@pytest.mark.parametrize("first", range(0, RUNS, BATCH))
def test_every_answer_keeps_to_its_schema(served: tuple[Engine, Any], first: int) -> None:
    engine, grammars = served
    t, wanted, requests = grammars.tokenizer, {}, []
    for i, schema in list(enumerate(some(RUNS)))[first : first + BATCH]:
        wanted[f"{i}"] = schema
        make = grammars.compile(grammars.rules([json_rule(schema, "f")]), False, "f").result()
        ask = f"Answer in JSON by this schema: {json.dumps(schema)[:600]}"
        prompt = tuple(render_chat(t, [{"role": "user", "content": ask}]))
        sampling, ends = Sampling(temperature=1.0, seed=i), frozenset(t.eos_token_ids)
        requests.append(Request(f"{i}", prompt, MOST, sampling, ends, grammar=make))
    with_it = answers(engine, requests)
    assert engine.spec_metrics.accepted.total() > 10, "nothing was drafted"
    drafter, engine.proposer = engine.proposer, NoSpeculation()
    try:
        assert answers(engine, requests) == with_it
    finally:
        engine.proposer = drafter
    for name, tokens in with_it.items():
        jsonschema.validate(json.loads(t.decode(tokens[:-1])), wanted[name])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 30},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_call_that_is_asked_for_is_made(served: tuple[Engine, Any]) -> None:
    """Of a model whose template knows no tools, at temperature 1."""
    engine, grammars = served
    t = grammars.tokenizer
    rules = grammars.rules([grammars.calls(TOOLS, "get_weather", True, "tool_choice").rule()])
    prompt = tuple(render_chat(t, [{"role": "user", "content": "What is the weather in Paris?"}]))
    ends = frozenset(t.eos_token_ids)
    requests = [
        Request(
            f"{i}",
            prompt,
            100,
            Sampling(seed=i),
            ends,
            grammar=grammars.compile(rules, False, "f").result(),
        )
        for i in range(8)
    ]
    for tokens in answers(engine, requests).values():
        reader = OutputParser(t, TOOLS, False)
        parts = reader.feed(t.decode(tokens[:-1])) + reader.finish()
        [call] = reader.calls
        assert parts[0].opens and parts[-1].ends and parts[0].call is parts[-1].call is call
        jsonschema.validate(json.loads(call.arguments), TOOLS[0]["function"]["parameters"])
