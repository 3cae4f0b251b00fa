"""litellm, which many agents are built on: a tool's round by three of its providers."""

import json
from typing import Any

import pytest

from tests.clients import install
from tests.clients.conftest import KEY, World
from tests.clients.script import call, steps, think

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import litellm

url, key, model, stream, more = sys.argv[1:]
number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
add = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}
messages = [{"role": "user", "content": "What is 2 + 3?"}]


def ask():
    wanted = dict(model=model, api_base=url, api_key=key, messages=messages, tools=[add])
    wanted |= json.loads(more)
    if stream == "whole":
        return litellm.completion(**wanted).choices[0].message
    chunks = list(litellm.completion(**wanted, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


said = ask()
messages.append(said.model_dump())
for call in said.tool_calls:
    total = sum(json.loads(call.function.arguments).values())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"the sum: {total}"})
print(ask().content)
"""


def play(world: World, model: str, base: str, stream: str, **more: Any) -> str:
    """What the program prints at the end of a tool's round."""
    python = install.pip("litellm", "1.106.2", "[mcp]") / "python"  # without [mcp] no tools
    world.player.play = steps(think("I add.") + call("add", {"a": 2, "b": 3}), "It is 5.")
    words = [str(python), "-c", PROGRAM, world.url + base, KEY, model, stream, json.dumps(more)]
    out = world.run([], *words, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert "the sum: 5" in world.player.prompts[-1]
    return out


@pytest.mark.parametrize("stream", ["whole", "stream"])
@pytest.mark.parametrize(
    ("model", "base", "path"),
    [
        ("openai/gpt-4o", "/v1", "/v1/chat/completions"),
        ("anthropic/claude-sonnet-4-5", "", "/v1/messages"),
    ],
)
def test_calls_a_tool(model: str, base: str, path: str, stream: str, world: World) -> None:
    assert play(world, model, base, stream) == "It is 5.\n"
    assert len(world.asked(path)) == 2


@pytest.mark.parametrize("stream", ["whole", "stream"])
def test_calls_a_tool_by_ollamas_api(stream: str, world: World) -> None:
    out = play(world, "ollama_chat/local", "", stream, temperature=0, max_tokens=99)
    assert out.endswith("It is 5.\n")  # it prints advice first where it streams
    # It also asks /api/show for a model's price, without the key, and goes on without an answer.
    assert [e.status for e in world.exchanges if e.path == "/api/chat"] == [200, 200]
