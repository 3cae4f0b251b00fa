"""`mlxspec launch`: a coding agent on the running server, set up by variables and flags.

Rule: it writes no file of the agent's, and the agent gets the user's arguments unchanged.
"""

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from mlxspec.client import ClientError, request

COMPACT_AT = 0.8  # of the context window, for agents that reserve no room for the answer
MAX_OUTPUT = 32_000  # tokens

# How each agent is installed.
AGENTS = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "python -m pip install aider-chat",
    "qwen": "npm install -g @qwen-code/qwen-code",
    "goose": "brew install block-goose-cli",
    "copilot": "npm install -g @github/copilot",
    "llm": "python -m pip install llm",
}
CLAUDE_MODELS = (
    "",
    "DEFAULT_OPUS_",
    "DEFAULT_SONNET_",
    "DEFAULT_HAIKU_",
    "DEFAULT_FABLE_",
    "SMALL_FAST_",
)


@dataclass(frozen=True, slots=True)
class Server:
    """The running server: its URL without /v1, a key (never empty), a model and its context."""

    url: str
    key: str
    model: str
    context: int  # tokens


def variables_of(name: str, server: Server) -> dict[str, str]:
    """The variables that point an agent at the server. An empty one unsets a setting that would
    send it elsewhere."""
    v1, key, model = f"{server.url}/v1", server.key, server.model
    openai = {"OPENAI_BASE_URL": v1, "OPENAI_API_KEY": key}  # what OpenAI's own client reads
    match name:
        case "claude":
            return _claude(server) | {"ANTHROPIC_AUTH_TOKEN": key}
        case "codex":
            return {"MLXSPEC_API_KEY": key}
        case "opencode":
            return {"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode(server))}
        case "aider":
            return openai | {
                "AIDER_OPENAI_API_BASE": v1,
                "AIDER_OPENAI_API_KEY": key,
                "AIDER_MODEL": f"openai/{model}",
                "AIDER_SHOW_MODEL_WARNINGS": "false",  # that it knows no price for the model
            }
        case "goose":
            return {
                "GOOSE_PROVIDER": "openai",
                "GOOSE_MODEL": model,
                "GOOSE_CONTEXT_LIMIT": str(server.context),
                "OPENAI_HOST": server.url,
                "OPENAI_API_KEY": key,
            }
        case "copilot":
            return {
                "COPILOT_PROVIDER_BASE_URL": v1,
                "COPILOT_PROVIDER_TYPE": "openai",
                "COPILOT_PROVIDER_API_KEY": key,
                "COPILOT_MODEL": model,
                "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(int(server.context * COMPACT_AT)),
                "COPILOT_OFFLINE": "true",
            }
        case "llm":
            # It accepts only names that it knows; the server answers any gpt-* with its model.
            return openai | {"LLM_MODEL": "gpt-4o-mini"}
    return openai


def flags_of(name: str, server: Server) -> list[str]:
    """The flags that point an agent at the server."""
    if name == "qwen":
        return ["--auth-type", "openai", "--model", server.model]
    if name == "claude":
        # The same variables, because those in the user's settings file would win; without the key,
        # which `ps` would show.
        return ["--settings", json.dumps({"env": _claude(server)})]
    if name != "codex":
        return []
    settings = {
        "model_provider": "mlxspec",
        "model": server.model,
        "model_context_window": server.context,
        "model_auto_compact_token_limit": int(server.context * COMPACT_AT),
        "model_providers.mlxspec.name": "mlxspec",
        "model_providers.mlxspec.base_url": f"{server.url}/v1",
        "model_providers.mlxspec.env_key": "MLXSPEC_API_KEY",
        "model_providers.mlxspec.wire_api": "responses",
    }
    flags = []
    for key, value in settings.items():
        flags += ["-c", f"{key}={json.dumps(value)}"]  # JSON is TOML too, for these values
    return flags


def _claude(server: Server) -> dict[str, str]:
    env = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "",
        "CLAUDE_CODE_USE_BEDROCK": "",
        "CLAUDE_CODE_USE_VERTEX": "",
        "CLAUDE_CODE_USE_FOUNDRY": "",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        # The agent keeps this much of the context free.
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(server.context // 8, MAX_OUTPUT)),
        # It differs between sessions, so no prompt after it would be cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    for kind in CLAUDE_MODELS:
        env[f"ANTHROPIC_{kind}MODEL"] = server.model
    return env


def _opencode(server: Server) -> dict[str, object]:
    limit = {"context": server.context, "output": min(server.context // 4, MAX_OUTPUT)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"limit": limit}},
    }
    name = f"mlxspec/{server.model}"
    return {"model": name, "small_model": name, "provider": {"mlxspec": provider}}


def launch(name: str, args: Sequence[str], url: str, api_key: str, show: bool) -> None:
    """Replace this process by the agent; with `show`, print the shell command instead.

    Raises ClientError.
    """
    if name not in AGENTS:
        raise ClientError(f"AGENT = {name!r} is not known; give one of {', '.join(AGENTS)}")
    if not show and not shutil.which(name):
        raise ClientError(f"{name} is not installed; install it with: {AGENTS[name]}")
    with request(url, api_key, "GET", "/v1/models") as response:
        model = json.load(response)["data"][0]
        server = Server(url, api_key or "none", model["id"], int(model["context_window"]))
    variables = variables_of(name, server)
    own = args[1:] if args[:1] == ["--"] else args
    command = [name, *flags_of(name, server), *own]
    if show:
        print(*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), end=" ")
        print(shlex.join(command))
    else:
        os.execvpe(name, command, {**os.environ, **variables})
