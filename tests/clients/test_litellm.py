"""litellm, which many agents are built on: a tool's round by two of its providers."""

import pytest

from tests.clients import install
from tests.clients.conftest import KEY, World
from tests.clients.script import call, steps, think

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import litellm

url, key, model, stream = sys.argv[1:]
number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
add = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}
messages = [{"role": "user", "content": "What is 2 + 3?"}]


def ask():
    wanted = dict(model=model, api_base=url, api_key=key, messages=messages, tools=[add])
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


@pytest.mark.parametrize("stream", ["whole", "stream"])
@pytest.mark.parametrize(
    ("model", "base", "path"),
    [
        ("openai/gpt-4o", "/v1", "/v1/chat/completions"),
        ("anthropic/claude-sonnet-4-5", "", "/v1/messages"),
    ],
)
def test_calls_a_tool(model: str, base: str, path: str, stream: str, world: World) -> None:
    python = install.pip("litellm", "1.106.2", "[mcp]") / "python"  # without it no tools
    world.player.play = steps(think("I add.") + call("add", {"a": 2, "b": 3}), "It is 5.")
    words = [str(python), "-c", PROGRAM, world.url + base, KEY, model, stream]
    assert world.run([], *words, LITELLM_LOCAL_MODEL_COST_MAP="True") == "It is 5.\n"
    assert len(world.asked(path)) == 2
    assert "the sum: 5" in world.player.prompts[-1]
