"""`mlxspec launch`: a coding agent on the running server, set up by variables and flags.

Rule: it writes no file of the agent's, and the agent gets the user's arguments unchanged.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxspec.client import ClientError, request

TIMEOUT_S = 10
COMPACT_AT = 0.8  # of the context window, for agents that reserve no room for the answer
MAX_OUTPUT = 32_000  # tokens


@dataclass(frozen=True, slots=True)
class Server:
    """The running server: its URL without /v1, a key (never empty), a model and its context."""

    url: str
    key: str
    model: str
    context: int  # tokens

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def compact_at(self) -> int:
        """Tokens after which an agent should shorten its conversation."""
        return int(self.context * COMPACT_AT)


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is installed and pointed at a server. An empty variable unsets a setting that
    would send it elsewhere."""

    install: str
    variables: Callable[[Server], dict[str, str]]
    flags: Callable[[Server], list[str]] = lambda _: []


def _claude(server: Server) -> dict[str, str]:
    models = ("DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_", "DEFAULT_FABLE_", "SMALL_FAST_")
    clouds = ("BEDROCK", "VERTEX", "FOUNDRY")
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_{name}MODEL": server.model for name in models},
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in clouds},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        # The agent keeps this much of the context free.
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(server.context // 8, MAX_OUTPUT)),
        # It differs between sessions, so no prompt behind it would be cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_flags(server: Server) -> list[str]:
    """The same variables, because those in the user's settings file would win; without the key,
    which `ps` would show."""
    env = _claude(server)
    del env["ANTHROPIC_AUTH_TOKEN"]
    return ["--settings", json.dumps({"env": env})]


def _codex(server: Server) -> list[str]:
    settings = {
        "model_provider": "mlxspec",
        "model": server.model,
        "model_context_window": server.context,
        "model_auto_compact_token_limit": server.compact_at,
        "model_providers.mlxspec.name": "mlxspec",
        "model_providers.mlxspec.base_url": server.v1,
        "model_providers.mlxspec.env_key": "MLXSPEC_API_KEY",
        "model_providers.mlxspec.wire_api": "responses",
    }
    flags = []
    for name, value in settings.items():
        flags += ["-c", f"{name}={json.dumps(value)}"]  # JSON is TOML too, for these values
    return flags


def _opencode(server: Server) -> dict[str, str]:
    limit = {"context": server.context, "output": min(server.context // 4, MAX_OUTPUT)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": server.v1, "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"mlxspec/{server.model}"
    config = {"model": name, "small_model": name, "provider": {"mlxspec": provider}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _openai(server: Server) -> dict[str, str]:
    """What OpenAI's own client reads."""
    return {"OPENAI_BASE_URL": server.v1, "OPENAI_API_KEY": server.key}


AGENTS = {
    "claude": Agent("npm install -g @anthropic-ai/claude-code", _claude, _claude_flags),
    "codex": Agent("npm install -g @openai/codex", lambda s: {"MLXSPEC_API_KEY": s.key}, _codex),
    "opencode": Agent("npm install -g opencode-ai", _opencode),
    "aider": Agent(
        "python -m pip install aider-chat",
        lambda s: {
            **_openai(s),
            "AIDER_OPENAI_API_BASE": s.v1,
            "AIDER_OPENAI_API_KEY": s.key,
            "AIDER_MODEL": f"openai/{s.model}",
            "AIDER_SHOW_MODEL_WARNINGS": "false",  # that it knows no price for the model
        },
    ),
    "qwen": Agent(
        "npm install -g @qwen-code/qwen-code",
        _openai,
        lambda s: ["--auth-type", "openai", "--model", s.model],
    ),
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
            "COPILOT_PROVIDER_BASE_URL": s.v1,
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": s.key,
            "COPILOT_MODEL": s.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(s.compact_at),
            "COPILOT_OFFLINE": "true",
        },
    ),
    # It accepts only names that it knows; the server answers any gpt-* with the served model.
    "llm": Agent("python -m pip install llm", lambda s: {**_openai(s), "LLM_MODEL": "gpt-4o-mini"}),
}


def launch(name: str, args: Sequence[str], url: str, api_key: str = "", show: bool = False) -> None:
    """Replace this process by the agent; with `show`, print the shell command instead.

    Raises ClientError.
    """
    if name not in AGENTS:
        raise ClientError(f"AGENT = {name!r} is not known; give one of {', '.join(AGENTS)}")
    agent = AGENTS[name]
    if not show and not shutil.which(name):
        raise ClientError(f"{name} is not installed; install it with: {agent.install}")
    server = find_server(url.rstrip("/"), api_key)
    variables = agent.variables(server)
    if args and args[0] == "--":
        args = args[1:]
    command = [name, *agent.flags(server), *args]
    if show:
        print(*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), end=" ")
        print(shlex.join(command))
    else:
        os.execvpe(name, command, {**os.environ, **variables})


def find_server(url: str, api_key: str) -> Server:
    """The server at `url` with its first model. Raises ClientError."""
    with request(url, api_key, "GET", "/v1/models", timeout=TIMEOUT_S) as response:
        model = json.load(response)["data"][0]
        return Server(url, api_key or "none", str(model["id"]), int(model["context_window"]))
