"""Claude Code, Codex and opencode on models that write their calls in other formats than Hermes':
whole loops, in which nothing is refused, no turn forks and what the model writes is done to the
letter."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.formats import KNOWN, format_of, template_calls
from tests.clients.conftest import BROKEN, MENDED, World
from tests.clients.script import DONE, MARKS, TEMPLATE, Play, steps, think
from tests.clients.test_agents import AGENTS
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

SEED = """<seed:tool_call>
<function={{ c.name }}>
{% for k, v in c.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>
{% endfor %}</function>
</seed:tool_call>"""
DSML = """

<|DSML|function_calls>
{% for c in calls %}<|DSML|invoke name="{{ c.name }}">
{% for k, v in c.arguments.items() %}<|DSML|parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">{{ v if v is string else v | tojson }}</|DSML|parameter>
{% endfor %}</|DSML|invoke>
{% endfor %}</|DSML|function_calls>"""
ONE_BY_ONE = """{% if calls | length > 1 or message.content %}{{ raise_exception('one call alone') }}{% endif %}"""
FORMATS = {
    "like GLM's": KNOWN["glm47"].read_text("utf-8"),
    "like MiniMax'": KNOWN["minimax_m2"].read_text("utf-8"),
    "like Seed-OSS'": "{% for c in calls %}" + SEED + "{% endfor %}",
    "like DeepSeek V3.2's": DSML,
    "like Devstral's, which takes no text beside": ONE_BY_ONE + KNOWN["mistral"].read_text("utf-8"),
}
# As Mistral's: turns of user and assistant alternate, but for calls and results.
ALTERNATE = """{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}\
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{%- set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"""


def template(name: str) -> str:
    head, _, rest = TEMPLATE.partition("{% for tool_call in message.tool_calls")
    _, _, tail = rest.partition("</tool_call>{% endfor %}")
    calls = "{% set calls = message.tool_calls | map(attribute='function') | list %}"
    body = "{% if message.tool_calls %}" + calls + FORMATS[name] + "{% endif %}"
    return (ALTERNATE if "Devstral" in name else "") + head + body + tail


@pytest.fixture(scope="module", params=list(FORMATS))
def model_dir(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of that format, which reasons too."""
    path = tmp_path_factory.mktemp("model")
    return save_tokenizer(path, template=template(request.param), extra=tuple(MARKS[2:]))


def in_its_format(tokenizer: Any, play: Play) -> Play:
    """What a model of Hermes' format would say, in that of the tokenizer's."""

    def spoken(prompt: str) -> str:
        text, *calls = re.split(r"\s*<tool_call>\n(.*?)\n</tool_call>", play(prompt), flags=re.S)
        named = [(each["name"], each["arguments"]) for each in map(json.loads, calls[::2])]
        return text + ("\n" + template_calls(tokenizer, named) if named else "")

    return spoken


@pytest.mark.parametrize("name", ["claude", "codex", "opencode"])
def test_mends_a_file(name: str, world: World) -> None:
    agent, file, tokenizer = AGENTS[name], str(world.file), world.player.tokenizer
    assert format_of(tokenizer).learned
    first = think("I look.") + "I read it.\n" + agent.reads(file)
    play = steps(first, agent.looks(file), agent.edits(file), DONE)
    world.player.play = in_its_format(tokenizer, play)
    out = agent.start(world, name)
    assert DONE in out
    assert world.file.read_text() == MENDED
    assert len(world.asked(agent.asks)) >= 4
    assert any(BROKEN.strip() in prompt for prompt in world.player.prompts)
