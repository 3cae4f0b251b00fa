"""Starts a coding agent on the running server, by variables and flags that hold for this one run.

Rule: no file of the agent's is written, and what the user adds behind its name reaches it
unchanged.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxspec.commands.chat import ChatError, call

TIMEOUT_S = 10
COMPACTS = 0.8  # of the window: where an agent is to, that reserves no room for its answer
QWEN = ("--auth-type", "openai", "--model")


@dataclass(frozen=True, slots=True)
class Server:
    """What an agent has to know. `url` is without /v1, `context` in tokens. There is always some
    key."""

    url: str
    key: str
    model: str
    context: int


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is told. An empty variable is one that would send it elsewhere."""

    install: str
    variables: Callable[[Server], dict[str, str]]
    flags: Callable[[Server], list[str]] = lambda _: []


def _claude(server: Server) -> dict[str, str]:
    tiers = (
        "DEFAULT_OPUS_",
        "DEFAULT_SONNET_",
        "DEFAULT_HAIKU_",
        "DEFAULT_FABLE_",
        "SMALL_FAST_",
        "",
    )
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in ("BEDROCK", "VERTEX", "FOUNDRY")},
        **{f"ANTHROPIC_{tier}MODEL": server.model for tier in tiers},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(
            min(server.context // 8, 32_000)
        ),  # it keeps so many free
        # differs between sessions: nothing behind it would be cached
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_flags(server: Server) -> list[str]:
    """The variables once more, as a settings file's come before them; but the key, which `ps` would
    show."""
    env = {name: value for name, value in _claude(server).items() if name != "ANTHROPIC_AUTH_TOKEN"}
    return ["--settings", json.dumps({"env": env})]


def _codex(server: Server) -> list[str]:
    ours = "model_providers.mlxspec."
    settings = {
        "model_provider": "mlxspec",
        "model": server.model,
        "model_context_window": server.context,
        "model_auto_compact_token_limit": int(server.context * COMPACTS),
        ours + "name": "mlxspec",
        ours + "base_url": f"{server.url}/v1",
        ours + "env_key": "MLXSPEC_API_KEY",
        ours + "wire_api": "responses",
    }
    # JSON is TOML too, for these values.
    return [
        word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")
    ]


def _opencode(server: Server) -> dict[str, str]:
    limit = {"context": server.context, "output": min(server.context // 4, 32_000)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"mlxspec/{server.model}"
    config = {"model": name, "small_model": name, "provider": {"mlxspec": provider}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _openai(server: Server) -> dict[str, str]:
    """What OpenAI's own client reads."""
    return {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}


AGENTS = {
    "claude": Agent("npm install -g @anthropic-ai/claude-code", _claude, _claude_flags),
    "codex": Agent("npm install -g @openai/codex", lambda s: {"MLXSPEC_API_KEY": s.key}, _codex),
    "opencode": Agent("npm install -g opencode-ai", _opencode),
    "aider": Agent(
        "python -m pip install aider-chat",
        lambda s: {
            **_openai(s),
            "AIDER_OPENAI_API_BASE": f"{s.url}/v1",
            "AIDER_OPENAI_API_KEY": s.key,
            "AIDER_MODEL": f"openai/{s.model}",
            "AIDER_SHOW_MODEL_WARNINGS": "false",  # that it knows no price for it
        },
    ),
    "qwen": Agent("npm install -g @qwen-code/qwen-code", _openai, lambda s: [*QWEN, s.model]),
    "goose": Agent(
        "brew install block-goose-cli",
        lambda s: {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": s.model,
            "GOOSE_CONTEXT_LIMIT": str(s.context),
            "OPENAI_HOST": s.url,
            "OPENAI_API_KEY": s.key,
        },
    ),
    "copilot": Agent(
        "npm install -g @github/copilot",
        lambda s: {
            "COPILOT_PROVIDER_BASE_URL": f"{s.url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": s.key,
            "COPILOT_MODEL": s.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(int(s.context * COMPACTS)),
            "COPILOT_OFFLINE": "true",
        },
    ),
    # It takes no name that it does not know; any gpt-* is the served model.
    "llm": Agent("python -m pip install llm", lambda s: {**_openai(s), "LLM_MODEL": "gpt-4o-mini"}),
}


def launch(name: str, words: Sequence[str], url: str, key: str = "", show: bool = False) -> None:
    """Becomes the agent, so that its exit status is ours; with `show` prints the shell line that
    starts it. Raises ChatError."""
    if name not in AGENTS:
        raise ChatError(f"there is no agent {name!r}; give one of {', '.join(AGENTS)}")
    agent = AGENTS[name]
    if not show and not shutil.which(name):
        raise ChatError(f"{name} is not installed; install it with: {agent.install}")
    server = find(url.rstrip("/"), key)
    variables = agent.variables(server)
    command = [name, *agent.flags(server), *(words[1:] if words[:1] == ["--"] else words)]
    if show:
        return print(*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(command))
    os.execvpe(name, command, {**os.environ, **variables})


def find(url: str, key: str) -> Server:
    """What the server at `url` serves. Raises ChatError."""
    with call(url, key, "GET", "/v1/models", patience=TIMEOUT_S) as response:
        model = json.load(response)["data"][0]
        return Server(url, key or "none", str(model["id"]), int(model["context_window"]))
