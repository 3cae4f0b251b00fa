"""Images from real agents and SDKs, each started on a model that sees and plays its part: what they
look at reaches the engine as pixels, and again, the same ids, when the session is resumed."""

import base64
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients import install
from tests.clients.conftest import KEY, World
from tests.clients.script import DONE, INFO, NAME, save_model, steps
from tests.clients.test_agents import AGAIN, AGENTS, SEES
from tests.support import vision

pytestmark = pytest.mark.slow
PICTURE = vision.png(64, 40)

# The call by which an agent looks at a picture, and how its session goes on.
LOOKS = {
    **SEES,
    "opencode": (AGENTS["opencode"].reads, ["run", "--continue", "--auto", AGAIN]),
    "qwen": (AGENTS["qwen"].reads, ["--yolo", "--continue", AGAIN]),
}
MOVES = {"qwen"}  # the date, in a session that is resumed, to its last message


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("model"))
    (path / "config.json").write_text(json.dumps(vision.config("mistral3")))
    return path


@pytest.fixture
def seeing(world: World) -> World:
    world.player.info = replace(INFO, sees=True)
    return world


def rows_of(world: World) -> list[tuple[int, ...]]:
    """The ids of the last prompt's images."""
    request = world.player.submitted[-1]
    return [request.prompt[span.start : span.stop] for span in request.images]


@pytest.mark.parametrize("name", list(LOOKS))
def test_an_agent_shows_a_picture(name: str, seeing: World) -> None:
    agent, (looks, again) = AGENTS[name], LOOKS[name]
    file = seeing.project / "dot.png"
    file.write_bytes(PICTURE)
    seeing.player.play = steps(looks(str(file)), DONE)
    assert DONE in agent.start(seeing, name)
    seen = rows_of(seeing)
    assert len(seen) == 1 and min(seen[0]) < 0
    assert DONE in seeing.launch(agent.path(), name, *again, **agent.env)
    seeing.asked(agent.asks)
    assert AGAIN in seeing.player.prompts[-1] and rows_of(seeing) == seen
    assert seeing.player.forks() == [] or name in MOVES


def test_the_users_own_settings_for_qwen_come_first(seeing: World) -> None:
    own = {"model": {"generationConfig": {"modalities": {"image": False}}}}
    (seeing.home / ".qwen").mkdir()
    (seeing.home / ".qwen/settings.json").write_text(json.dumps(own))
    (seeing.project / "dot.png").write_bytes(PICTURE)
    looks = AGENTS["qwen"].reads(str(seeing.project / "dot.png"))
    seeing.player.play = steps(looks, DONE)
    assert DONE in AGENTS["qwen"].start(seeing, "qwen")
    assert len(seeing.player.submitted) > 1 and rows_of(seeing) == []


def sdk(world: World, python: str, program: str) -> str:
    """What a program prints that uses an SDK. Its variables are `url`, `key`, `model` and `picture`,
    in base64."""
    head = f"""
        import base64
        url, key, model = {world.url!r}, {KEY!r}, {NAME!r}
        picture = base64.b64encode(open({str(world.project / "dot.png")!r}, "rb").read()).decode()
    """
    (world.project / "dot.png").write_bytes(PICTURE)
    file = world.project / "program.py"
    file.write_text(textwrap.dedent(head) + textwrap.dedent(program))
    return world.run([], python, str(file))


OPENAI = """
    from openai import OpenAI
    client = OpenAI(base_url=url + "/v1", api_key=key)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture}}
    turns = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    for text in ("And now?", None):
        answer = client.chat.completions.create(model=model, messages=turns)
        print(answer.choices[0].message.content)
        turns += [{"role": "assistant", "content": answer.choices[0].message.content},
                  {"role": "user", "content": text}]
"""
RESPONSES = """
    from openai import OpenAI
    client = OpenAI(base_url=url + "/v1", api_key=key)
    image = {"type": "input_image", "image_url": "data:image/png;base64," + picture}
    parts = [{"type": "input_text", "text": "What is it?"}, image]
    first = client.responses.create(model=model, input=[{"role": "user", "content": parts}])
    again = client.responses.create(model=model, input="And now?", previous_response_id=first.id)
    print(first.output_text, again.output_text)
"""
ANTHROPIC = """
    from anthropic import Anthropic
    client = Anthropic(base_url=url, api_key=key)
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": parts}]
    for text in ("And now?", None):
        answer = client.messages.create(model=model, max_tokens=99, messages=turns)
        said = [block.text for block in answer.content if block.type == "text"]
        print(*said)
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": text}]
"""
OLLAMA = """
    import ollama
    client = ollama.Client(host=url, headers={"authorization": "Bearer " + key})
    assert "vision" in client.show(model).capabilities
    turns = [{"role": "user", "content": "What is it?", "images": [picture]}]
    for text in ("And now?", None):
        answer = client.chat(model=model, messages=turns)
        print(answer.message.content)
        turns += [{"role": "assistant", "content": answer.message.content},
                  {"role": "user", "content": text}]
"""
SDKS: dict[str, tuple[Callable[[], str], str]] = {
    "openai": (lambda: sys.executable, OPENAI),
    "responses": (lambda: sys.executable, RESPONSES),
    "anthropic": (lambda: sys.executable, ANTHROPIC),
    "ollama": (lambda: str(install.pip("ollama", "0.6.3") / "python"), OLLAMA),
}


@pytest.mark.parametrize("name", list(SDKS))
def test_an_sdk_sends_a_picture_in_two_turns(name: str, seeing: World) -> None:
    python, program = SDKS[name]
    out = sdk(seeing, python(), program)
    assert out.count(DONE) == 2
    first, last = seeing.player.submitted[0], seeing.player.submitted[-1]
    assert len(first.images) == len(last.images) == 1
    stop = first.images[0].stop
    assert last.prompt[:stop] == first.prompt[:stop]
    assert base64.b64encode(PICTURE).decode() not in seeing.player.prompts[-1]
