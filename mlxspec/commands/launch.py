"""`mlxspec launch`: starts a coding agent on the running server, with the variables and flags of
agents.toml.

Rule: it writes none of the agent's files, and the agent gets the user's arguments unchanged.
"""

import json
import os
import shlex
import shutil
import tomllib
from pathlib import Path
from string import Template
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxspec.commands.options import Key, KnownName, Url, server_of
from mlxspec.commands.plain_output import note, waiting
from mlxspec.service.client import ClientError, request

COMPACT_AT = 0.8  # of the context window, for agents that reserve no room for the answer
MAX_OUTPUT = 32_000  # tokens

AGENTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("agents.toml").read_text("utf-8"))


def settings_of(
    name: str,
    url: str,
    key: str,
    model: str,
    context: int,
    sees: bool = False,
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
        "sees": json.dumps(sees),
        "modalities": '["text", "image"]' if sees else '["text"]',
        "qwen_defaults": str(Path(__file__).with_name("qwen_sees.json")) if sees else "",
        "compact_at": int(context * COMPACT_AT),
        "eighth": min(context // 8, MAX_OUTPUT),
        "quarter": min(context // 4, MAX_OUTPUT),
    }
    variables, public = {}, {}
    for variable, text in agent["variables"].items():
        value = Template(text).substitute(values)
        if text and not value:
            continue  # nothing to say; where the table has none, the agent must not have any either
        variables[variable] = value
        if text != "$key":
            public[variable] = value
    values["variables"] = json.dumps({"env": public}, indent=2)
    return variables, [Template(text).substitute(values) for text in agent.get("flags", ())]


def launch(
    agent: Annotated[
        KnownName,
        typer.Argument(
            parser=KnownName,
            metavar="AGENT",
            help=f"One of {', '.join(AGENTS)}.",
            autocompletion=lambda: list(AGENTS),
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments for the agent."),
    ] = None,
    show: Annotated[
        bool,
        typer.Option("--print", metavar="", help="Print the variables and the command instead."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="<name>",
            help="A served model; default: the first.",
            show_default=False,
        ),
    ] = "default",
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Start a coding agent on the running server. It changes none of the agent's files."""
    entry = AGENTS.get(agent)
    if not entry:
        raise ClientError(f"AGENT = {agent!r} is not known; give one of {', '.join(AGENTS)}")
    if not show and not shutil.which(agent):
        raise ClientError(f"{agent} is not installed; install it with: {entry['install']}")
    server, key = server_of(url, api_key)
    with waiting(server), request(server, key, "GET", f"/v1/models/{quote(model)}") as response:
        info = json.load(response)
        context = int(info["context_window"])
        sees = "image" in info.get("input_modalities", ())
        variables, flags = settings_of(agent, server, key or "none", info["id"], context, sees)
    words = args or []
    if words[:1] == ["--"]:
        del words[0]
    prompt = entry.get("prompt", 0)
    why = f"{agent}'s own prompt takes about {prompt:,} of the context's {context:,} tokens"
    fix = "serve a model with a longer context"
    if prompt >= context and not show:
        raise ClientError(f"{why}; {fix}")
    if prompt * 2 > context:
        note(f"warning: {why}, which leaves little for its work; {fix}")
    if show:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        lines = [agent, *(shlex.join(flags[at : at + 2]) for at in range(0, len(flags), 2))]
        print(" \\\n  ".join(lines), *map(shlex.quote, words))
    else:
        os.execvpe(agent, [agent, *flags, *words], {**os.environ, **variables})
