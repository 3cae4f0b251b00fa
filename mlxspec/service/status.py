"""The state of the server and the service: for `mlxspec status` and the menu bar.

Rule: a query starts nothing, so a service that waits for its first request is not queried.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxspec.files import format_size
from mlxspec.service import crashes, launchd
from mlxspec.service.client import ClientError, NotRunning, request
from mlxspec.types import LOADING, printable

TIMEOUT_S = 5.0

Service = Literal["elsewhere", "not installed", "stopped", "waiting", "running"]
State = Literal["stopped", "unwell", "loading", "short of memory", "asleep", "busy", "idle"]
DOWN: frozenset[State] = frozenset({"stopped", "unwell"})


@dataclass(frozen=True)
class Status:
    """The server at `url`, and the service if it listens there. Without a version, the server was
    not queried or did not answer."""

    url: str
    state: State
    service: Service = "elsewhere"
    why: str = ""  # what is wrong, and the fix
    note: str = ""  # set in safe mode
    version: str = ""
    pid: int = 0
    models: Mapping[str, str] = field(default_factory=dict)  # name: loaded, loading, unloaded
    running: int = 0
    waiting: int = 0
    speed: float = 0.0  # tokens/s of running answers, or of the last one
    tokens_per_round: float = 0.0  # in the last answers
    accepted: float = 0.0  # share of their drafted tokens
    footprint: int = 0  # bytes of the process, 0 before it has worked
    ranks: int = 1


def get_status(url: str, api_key: str = "") -> Status:
    """Query the server at `url`."""
    service: Service = "running"
    installed = launchd.installed_url()
    if installed != url:
        service = "elsewhere" if installed else "not installed"
    elif not launchd.is_loaded():
        service = "stopped"
    elif not crashes.is_running():
        return Status(url, "asleep", "waiting")
    try:
        with request(url, api_key, "GET", path="/page/now", timeout=TIMEOUT_S) as response:
            return parse(url, service, json.load(response))
    except NotRunning as error:
        why = str(error)
        if service == "stopped":
            why = "the service is stopped; run: mlxspec service start"
        return Status(url, "stopped", service, why=why)
    except ClientError as error:
        state: State = "loading" if error.code == LOADING else "unwell"
        return Status(url, state, service, why=str(error))


def parse(url: str, service: Service, page: Mapping[str, Any]) -> Status:
    """The status from the server's /page/now."""
    rows, models, process = page["requests"], page["models"], page["process"]
    live = [row for row in rows if not row["outcome"]]
    states = {model["info"]["name"]: model["status"] for model in models}
    state: State = "asleep"
    if page["unwell"]:
        state = "unwell"
    elif page["loading"] or "loading" in states.values():
        state = "loading"
    elif process["memory_pressure"]:
        state = "short of memory"
    elif live:
        state = "busy"
    elif "loaded" in states.values():
        state = "idle"

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    return Status(
        url,
        state,
        service,
        why=page["unwell"],
        note=page["note"],
        version=page["version"],
        pid=page["pid"],
        models=states,
        running=sum(one["stats"]["running"] for one in models),
        waiting=sum(one["stats"]["waiting"] for one in models),
        speed=sum(row["rate"] for row in live or rows[:1]),
        tokens_per_round=total("generated") / max(total("rounds"), 1),
        accepted=total("kept") / max(total("drafted"), 1),
        footprint=process["footprint_bytes"],
        ranks=process["ranks"],
    )


def facts(now: Status) -> dict[str, str]:
    """The status as lines of name and text, without those that are empty."""
    lines = {
        "server": now.url,
        "state": now.state,
        "service": now.service,
        "why": now.why,
        "note": now.note,
    }
    if now.version:
        lines["models"] = "; ".join(f"{name} ({state})" for name, state in now.models.items())
        lines["load"] = f"{now.running} running, {now.waiting} waiting"
        lines["speed"] = f"{now.speed:.1f} tokens/s, {now.tokens_per_round:.1f} per round"
        lines["drafts"] = f"{now.accepted:.0%} accepted"
        lines["memory"] = format_size(now.footprint)
        lines["ranks"] = str(now.ranks) if now.ranks > 1 else ""
        lines["version"] = f"{now.version}, process {now.pid}"
    return {name: printable(text) for name, text in lines.items() if text}


def print_status(now: Status) -> None:
    for name, text in facts(now).items():
        print(f"{name:9} {text}")
