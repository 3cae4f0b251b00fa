"""Coding agents, each started by `mlxspec launch` on a model that plays its part.

What is tested is the exchange: that nothing is refused, that calls and results arrive, that no turn
forks.
"""

import json
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mlxspec.commands.launch import settings_of
from tests.clients import install
from tests.clients.conftest import BROKEN, KEY, MENDED, World
from tests.clients.script import (
    DONE,
    INFO,
    NAME,
    SUMMARY,
    Play,
    call,
    reading,
    restricted,
    steps,
    think,
)

pytestmark = pytest.mark.slow

ASKED = "Fix the greeting in hello.py"
TASKS = ("Count the first half.", "Count the second half.")
COUNTED = "Counted."
GREETING = {
    "type": "object",
    "properties": {"greeting": {"type": "string"}},
    "required": ["greeting"],
}
SCHEMA = json.dumps(GREETING | {"additionalProperties": False})


@dataclass
class Agent:
    """`words` come behind its name. `looks`, `reads` and `edits` are the model's calls, of a file;
    `asks` is the endpoint."""

    path: Callable[[], list[Path]]
    words: list[str]
    asks: str
    looks: Callable[[str], str]
    reads: Callable[[str], str]
    edits: Callable[[str], str]
    env: dict[str, str] = field(default_factory=dict)

    def start(self, world: World, name: str) -> str:
        return world.launch(self.path(), name, *self.words, **self.env)


def shell(name: str, key: str, **more: str) -> Callable[[str], str]:
    return lambda file: call(name, {key: f"wc {file}", **more})


AGENTS = {
    "claude": Agent(
        lambda: [install.npm("@anthropic-ai/claude-code", "2.1.330")],
        ["-p", ASKED, "--allowedTools", "Read,Edit,Bash,Agent"],
        "/v1/messages",
        shell("Bash", "command", description="Count"),
        lambda file: call("Read", {"file_path": file}),
        lambda file: call("Edit", {"file_path": file, "old_string": "helo", "new_string": "hello"}),
        {"DISABLE_AUTOUPDATER": "1"},
    ),
    "codex": Agent(
        lambda: [install.npm("@openai/codex", "0.169.0")],
        [
            "-c",
            "analytics.enabled=false",
            "exec",
            "--dangerously-bypass-approvals-and-sandbox",
            ASKED,
        ],
        "/v1/responses",
        shell("exec_command", "cmd"),
        lambda file: call("exec_command", {"cmd": f"cat {file}"}),
        lambda file: call("exec_command", {"cmd": f"sed -i s/helo/hello/ {file}"}),
    ),
    "opencode": Agent(
        lambda: [install.npm("opencode-ai", "1.18.33")],
        ["run", "--auto", ASKED],
        "/v1/chat/completions",
        shell("bash", "command"),
        lambda file: call("read", {"filePath": file}),
        lambda file: call("edit", {"filePath": file, "oldString": "helo", "newString": "hello"}),
        {
            f"OPENCODE_DISABLE_{what}": "1"
            for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
        },
    ),
    "qwen": Agent(
        lambda: [install.npm("@qwen-code/qwen-code", "0.24.4"), install.node("22")],
        ["--yolo", ASKED],
        "/v1/chat/completions",
        shell("run_shell_command", "command"),
        lambda file: call("read_file", {"file_path": file}),
        lambda file: call("edit", {"file_path": file, "old_string": "helo", "new_string": "hello"}),
        {"QWEN_USAGE_STATISTICS_ENABLED": "false"},
    ),
    "copilot": Agent(
        lambda: [install.npm("@github/copilot", "1.0.102")],
        ["-p", ASKED, "--allow-all-tools"],
        "/v1/chat/completions",
        shell("bash", "command", description="Count"),
        lambda file: call("view", {"path": file}),
        lambda file: call("edit", {"path": file, "old_str": "helo", "new_str": "hello"}),
    ),
    "goose": Agent(
        lambda: [
            install.npm("@aaif/goose-binary-linux-x64", "1.52.0").parent
            / "@aaif/goose-binary-linux-x64/bin"
        ],
        ["run", "--no-session", "-t", ASKED],
        "/v1/chat/completions",
        shell("shell", "command"),
        lambda file: call("shell", {"command": f"cat {file}"}),
        lambda file: call("shell", {"command": f"sed -i s/helo/hello/ {file}"}),
        {"GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1", "GOOSE_TELEMETRY_OFF": "1"},
    ),
}


FORGETS = {
    "goose"
}  # sends no reasoning back, and calls of one turn as several: no prompt can repeat that


@pytest.mark.parametrize("name", list(AGENTS))
def test_mends_a_file(name: str, world: World) -> None:
    agent, file = AGENTS[name], str(world.file)
    first = "I read it.\n" + agent.reads(file)
    if name not in FORGETS:
        first = think("I look.") + first + "\n" + agent.looks(file)
    world.player.play = steps(first, agent.edits(file), DONE)
    out = agent.start(world, name)
    assert DONE in out
    assert world.file.read_text() == MENDED
    assert len(world.asked(agent.asks)) >= 3
    assert any(BROKEN.strip() in prompt for prompt in world.player.prompts)
    assert world.player.forks() == []


AGAIN = "And what is in it?"
LEFT_OUT = "left out: this model reads text only]"
# For each agent that sends images: the call by which it looks at one, and how its session goes on.
SEES = {
    "claude": (
        lambda file: call("Read", {"file_path": file}),
        ["-p", AGAIN, "--continue", *AGENTS["claude"].words[2:]],
    ),
    "codex": (
        lambda file: call("view_image", {"path": file}),
        [*AGENTS["codex"].words[:-1], "resume", "--last", AGAIN],
    ),
}


def png() -> bytes:
    """A grey picture of 16 by 16."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress((b"\0" + b"\x80" * 16) * 16)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


@pytest.mark.parametrize("name", list(SEES))
def test_an_image_does_not_end_a_session(name: str, world: World) -> None:
    """Nor when it is resumed, and sends the image again."""
    agent, (looks, again) = AGENTS[name], SEES[name]
    image = world.project / "dot.png"
    image.write_bytes(png())
    world.player.play = steps(looks(str(image)), DONE)
    assert DONE in agent.start(world, name)
    assert LEFT_OUT in world.player.prompts[-1] and AGAIN not in world.player.prompts[-1]
    assert DONE in world.launch(agent.path(), name, *again, **agent.env)
    world.asked(agent.asks)
    assert LEFT_OUT in world.player.prompts[-1] and AGAIN in world.player.prompts[-1]


ELSEWHERE = "http://127.0.0.1:9"
TOML = f"""
model = "other"
model_provider = "other"
[model_providers.other]
name = "other"
base_url = "{ELSEWHERE}/v1"
wire_api = "responses"
"""

# Files of the user's that would send the agent to another server, and another model.
OWN = {
    "claude": (
        ".claude/settings.json",
        f'{{"model": "opus", "env": {{"ANTHROPIC_BASE_URL": "{ELSEWHERE}"}}}}',
    ),
    "codex": (".codex/config.toml", TOML),
    "opencode": (".config/opencode/opencode.json", '{"model": "openai/gpt-5"}'),
    "qwen": (
        ".qwen/settings.json",
        f'{{"model": {{"name": "other"}}, "security": {{"auth": {{"baseUrl": "{ELSEWHERE}/v1"}}}}}}',
    ),
    "goose": (
        ".config/goose/config.yaml",
        f"GOOSE_PROVIDER: anthropic\nOPENAI_HOST: {ELSEWHERE}\n",
    ),
}


@pytest.mark.parametrize("name", list(OWN))
def test_the_users_own_settings_do_not_lead_elsewhere(name: str, world: World) -> None:
    agent, (path, text) = AGENTS[name], OWN[name]
    (world.home / path).parent.mkdir(parents=True)
    (world.home / path).write_text(text)
    variables = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_HOST", "ANTHROPIC_BASE_URL")
    other = {variable: ELSEWHERE for variable in variables}
    assert DONE in world.launch(agent.path(), name, *agent.words, **agent.env, **other)
    assert {body["model"] for body in world.asked(agent.asks)} == {NAME}


def reader(world: World, agent: Agent) -> Play:
    """What reads files of 8 KB, each another."""

    def read(n: int) -> str:
        file = world.project / f"{n}.txt"
        file.write_text(
            f"{n} and so on and so forth, for a line that is as long as many are.\n" * 120
        )
        return agent.reads(str(file))

    return reading(read)


WINDOWS = {"claude": 100_000, "codex": 60_000, "opencode": 60_000, "copilot": 100_000}


@pytest.mark.parametrize(("name", "window"), list(WINDOWS.items()))
def test_knows_the_window(name: str, window: int, world: World) -> None:
    """It summarizes before a prompt is refused, because `mlxspec launch` has told it the window."""
    agent = AGENTS[name]
    world.player.info = replace(INFO, context=window)
    world.player.play = reader(world, agent)
    assert DONE in agent.start(world, name)
    assert len(world.asked(agent.asks)) > 3
    assert SUMMARY in world.player.prompts[-1]


REFUSED = {"claude": 70_000, "opencode": 45_000, "qwen": 95_000, "goose": 50_000}


@pytest.mark.parametrize(("name", "window"), list(REFUSED.items()))
def test_summarizes_when_a_prompt_is_too_long(name: str, window: int, world: World) -> None:
    """It believes in a larger window, is refused, and understands why."""
    agent = AGENTS[name]
    world.player.info = replace(INFO, context=window)
    world.player.play = reader(world, agent)
    variables, flags = settings_of(name, world.url, KEY, NAME, INFO.context)
    words = [name, *flags, *agent.words]
    assert DONE in world.run(agent.path(), *words, status=(0, 1), **(variables | agent.env))
    refused = [e for e in world.exchanges if e.status != 200]
    assert refused and all(e.status == 400 and b"prompt is too long" in e.answer for e in refused)
    assert SUMMARY in world.player.prompts[-1]


def calls_of(name: str, tasks: tuple[str, ...]) -> str:
    """Calls that start an agent for each task."""
    if name == "codex":
        return "\n".join(call("multi_agent_v1__spawn_agent", {"message": task}) for task in tasks)
    tool, kind = {"claude": ("Agent", "general-purpose"), "opencode": ("task", "general")}[name]
    return "\n".join(
        call(tool, {"description": "Count", "prompt": task, "subagent_type": kind})
        for task in tasks
    )


@pytest.mark.parametrize("name", ["claude", "codex", "opencode"])
def test_agents_of_an_agent(name: str, world: World) -> None:
    agent = AGENTS[name]

    def play(prompt: str) -> str:
        if ASKED not in prompt:
            return COUNTED
        if "<tool_response>" not in prompt:
            return calls_of(name, TASKS)
        ids = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
        if name == "codex" and COUNTED not in prompt:
            return call("multi_agent_v1__wait_agent", {"targets": ids})
        return DONE

    world.player.play = play
    assert DONE in agent.start(world, name)
    world.asked(agent.asks)
    alone = [p for p in world.player.prompts if ASKED not in p]
    assert all(any(task in prompt for prompt in alone) for task in TASKS)
    # Whichever agent asks last: they run beside each other.
    assert any(ASKED in prompt and COUNTED in prompt for prompt in world.player.prompts)


@pytest.mark.parametrize(
    ("name", "words", "answer"),
    [
        (
            "claude",
            ["-p", "Greet", "--json-schema", SCHEMA, "--output-format", "json"],
            "StructuredOutput",
        ),
        ("codex", [*AGENTS["codex"].words[:-1], "--output-schema", "schema.json", "Greet"], ""),
        ("qwen", ["--yolo", "--json-schema", SCHEMA, "Greet"], "structured_output"),
    ],
)
def test_answers_by_a_schema(name: str, words: list[str], answer: str, world: World) -> None:
    """Two agents make a tool of it, whose name is `answer`; codex sends it as the format of the
    text."""
    agent, said = AGENTS[name], {"greeting": "hello"}
    (world.project / "schema.json").write_text(SCHEMA)
    world.player.play = steps(call(answer, said) if answer else json.dumps(said), DONE)
    out = world.launch(agent.path(), name, *words, **agent.env)
    assert re.search(r'\{\\?"greeting\\?":\s*\\?"hello\\?"\}', out)
    world.asked(agent.asks)
    assert [restricted(r) for r in world.player.submitted][:1] == [not answer]


def test_claude_counts_tokens(world: World) -> None:
    agent = AGENTS["claude"]
    out = world.launch(agent.path(), "claude", "-p", "/context", **agent.env)
    assert NAME in out and "200k" in out
    assert world.asked("/v1/messages/count_tokens")
