"""Clients of Ollama's API: its own SDK and LangChain's ChatOllama (litellm: test_litellm)."""

import json

import pytest

from tests.clients import install
from tests.clients.conftest import KEY, World
from tests.clients.script import call, restricted, steps, think

pytestmark = pytest.mark.slow

SDK = """
import sys
import ollama

names = [model.model for model in ollama.list().models]
model = names[0].removesuffix(":latest")
assert ollama.show(model).capabilities == ["completion", "tools", "thinking"]
assert ollama.ps().models[0].context_length == 200_000


def add(a: int, b: int) -> int:
    '''Adds.'''
    return a + b


def ask(stream):
    if not stream:
        return ollama.chat(model, messages, tools=[add], think=True).message
    said = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in ollama.chat(model, messages, tools=[add], think=True, stream=True):
        said.content += part.message.content
        said.thinking += part.message.thinking or ""
        said.tool_calls = [*said.tool_calls, *(part.message.tool_calls or [])]
    assert part.done and part.eval_count > 0 and part.total_duration > 0, part
    return said


stream = sys.argv[1] == "stream"
messages = [{"role": "user", "content": "What is 2 + 3?"}]
said = ask(stream)
assert said.thinking == "I add.", said
messages.append(said)
for made in said.tool_calls:
    total = add(**made.function.arguments)
    messages.append({"role": "tool", "tool_name": "add", "content": f"the sum: {total}"})
print(ask(stream).content)
image = {"role": "user", "content": "Count", "images": [b"no image"]}
print(ollama.chat(model, [image]).message.content)
print(ollama.generate(model, "Count", options={"num_predict": 50}).response)
try:
    ollama.pull("llama3.2")
except ollama.ResponseError as error:
    print(error.status_code, error.error[:25])
"""

LANGCHAIN = """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama


@tool
def add(a: int, b: int) -> int:
    '''Adds.'''
    return a + b


import ollama

name = ollama.list().models[0].model.removesuffix(":latest")
model = ChatOllama(
    model=name, validate_model_on_init=True, reasoning=True, temperature=0, num_ctx=4096
)
messages = [HumanMessage("What is 2 + 3?")]
said = None
for chunk in model.bind_tools([add]).stream(messages):
    said = chunk if said is None else said + chunk
assert said.additional_kwargs["reasoning_content"] == "I add.", said
assert said.usage_metadata["output_tokens"] > 0, said
messages.append(said)
for call in said.tool_calls:
    messages.append(add.invoke(call))
messages[-1].content = f"the sum: {messages[-1].content}"
print(model.bind_tools([add]).invoke(messages).content)
schema = {"title": "River", "type": "object", "properties": {"river": {"type": "string"}}}
print(model.with_structured_output(schema, method="json_schema").invoke("Name one"))
"""


@pytest.mark.parametrize("stream", ["whole", "stream"])
def test_the_sdk(stream: str, world: World) -> None:
    python = install.pip("ollama", "0.6.3") / "python"
    play = steps(think("I add.") + call("add", {"a": 2, "b": 3}), "It is 5.")
    world.player.play = lambda prompt: "1, 2, 3" if "Count" in prompt else play(prompt)
    words = [str(python), "-c", SDK, stream]
    out = world.run([], *words, OLLAMA_HOST=world.url, OLLAMA_API_KEY=KEY)
    assert out == 'It is 5.\n1, 2, 3\n1, 2, 3\n400 model = "llama3.2" is not\n'
    assert world.player.forks() == []


def test_langchain(world: World) -> None:
    python = install.pip("langchain-ollama", "1.1.0") / "python"
    play = steps(think("I add.") + call("add", {"a": 2, "b": 3}), "It is 5.")
    river = json.dumps({"river": "Rhine"})
    world.player.play = lambda prompt: river if "Name one" in prompt else play(prompt)
    out = world.run([], str(python), "-c", LANGCHAIN, OLLAMA_HOST=world.url, OLLAMA_API_KEY=KEY)
    assert out == "It is 5.\n{'river': 'Rhine'}\n"
    assert len(world.asked("/api/chat")) == 3
    assert "the sum: 5" in world.player.prompts[1]
    assert restricted(world.player.submitted[-1])
