"""`mlxspec launch`: a coding agent on the running server, set up by the variables and flags of
agents.toml.

Rule: it writes no file of the agent's, and the agent gets the user's arguments unchanged.
"""

import json
import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from mlxspec.client import ClientError, request

COMPACT_AT = 0.8  # of the context window, for agents that reserve no room for the answer
MAX_OUTPUT = 32_000  # tokens

AGENTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("agents.toml").read_text("utf-8"),
)


def settings_of(
    name: str, url: str, key: str, model: str, context: int
) -> tuple[dict[str, str], list[str]]:
    """The variables and the flags that point an agent at the server, whose `url` is without /v1."""
    agent = AGENTS[name]
    values = {
        "url": url,
        "key": key,
        "model": model,
        "json_key": json.dumps(key)[1:-1],
        "json_model": json.dumps(model)[1:-1],
        "context": context,
        "compact_at": int(context * COMPACT_AT),
        "eighth": min(context // 8, MAX_OUTPUT),
        "quarter": min(context // 4, MAX_OUTPUT),
    }
    variables, public = {}, {}
    for variable, text in agent["variables"].items():
        variables[variable] = Template(text).substitute(values)
        if text != "$key":
            public[variable] = variables[variable]
    values["variables"] = json.dumps({"env": public})
    return variables, [Template(text).substitute(values) for text in agent.get("flags", ())]


def launch(
    name: str, args: Sequence[str], url: str, api_key: str, show: bool, model: str = "default"
) -> None:
    """Replace this process by the agent on a served model; with `show`, print the shell command
    instead.

    Raises ClientError.
    """
    if name not in AGENTS:
        raise ClientError(f"AGENT = {name!r} is not known; give one of {', '.join(AGENTS)}")
    if not show and not shutil.which(name):
        install = AGENTS[name]["install"]
        raise ClientError(f"{name} is not installed; install it with: {install}")
    with request(url, api_key, "GET", f"/v1/models/{quote(model)}") as response:
        found = json.load(response)
        context = int(found["context_window"])
        variables, flags = settings_of(name, url, api_key or "none", found["id"], context)
    prompt = AGENTS[name].get("prompt", 0)
    if prompt * 2 > context:
        print(
            f"warning: {name}'s own prompt takes about {prompt:,} of the context's {context:,}"
            " tokens; serve a model with a longer context, or raise --context",
            file=sys.stderr,
        )
    own = args[1:] if args[:1] == ["--"] else args
    command = [name, *flags, *own]
    if show:
        print(*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), end=" ")
        print(shlex.join(command))
    else:
        os.execvpe(name, command, {**os.environ, **variables})
