"""The `llm` command: a prompt, a conversation that goes on, and a tool."""

import pytest

from tests.clients import install
from tests.clients.conftest import World
from tests.clients.script import call, restricted, steps

pytestmark = pytest.mark.slow

PATH = ("llm", "0.36")


def test_asks(world: World) -> None:
    path = [install.pip(*PATH)]
    world.player.play = lambda prompt: f"{prompt.count('user')} asked"
    assert world.launch(path, "llm", "one") == "1 asked\n"
    assert world.launch(path, "llm", "--continue", "--no-stream", "two") == "2 asked\n"
    first, second = world.asked("/v1/chat/completions")
    assert first["stream"] and not second.get("stream")
    assert len(second["messages"]) == 3


def test_calls_a_tool(world: World) -> None:
    world.player.play = steps(call("llm_version", {}), "The version is known.")
    out = world.launch([install.pip(*PATH)], "llm", "--tool", "llm_version", "Which version?")
    assert "The version is known." in out
    assert PATH[1] in world.player.prompts[-1]
    assert len(world.asked("/v1/chat/completions")) == 2


def test_answers_by_a_schema(world: World) -> None:
    world.player.play = lambda prompt: '{"river": "Rhine"}'
    out = world.launch([install.pip(*PATH)], "llm", "--schema", "river str", "Name one")
    assert out == '{"river": "Rhine"}\n'
    (asked,) = world.asked("/v1/chat/completions")
    assert asked["response_format"]["type"] == "json_schema"
    assert restricted(world.player.submitted[-1])
