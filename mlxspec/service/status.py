"""How the server is: one plain value for `mlxspec status`, `ps` and the menu bar.

Rule: asking starts nothing, so a socket that the system holds for a process that sleeps is not
knocked at.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxspec.commands.chat import Absent, ChatError, Locked, call, clean
from mlxspec.config import url_of
from mlxspec.files import format_size
from mlxspec.service import Hands, System, here, ledger
from mlxspec.types import UserError

PATIENCE_S = 5.0
SEEN_S = 1.0  # between two looks at what was generated

Service = Literal["none", "not installed", "stopped", "held", "waiting", "running"]
State = Literal["not installed", "stopped", "unwell", "loading", "short", "asleep", "busy", "idle"]
UP: frozenset[State] = frozenset({"loading", "short", "asleep", "busy", "idle"})


@dataclass(frozen=True, slots=True)
class Model:
    """`bytes` are of weights and KV memory, of the weights' files before it was loaded; `idle` is
    in seconds, None before its first work."""

    name: str
    state: Literal["loaded", "loading", "unloaded"]
    bytes: int
    pinned: bool = False
    idle: float | None = None
    running: int = 0
    waiting: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """`service` is about the one at `url`. `why` is what is wrong, with the mend; `note` is set in
    safe mode. `speed` is in tokens/s, of the last answer where nothing runs, else of all together,
    0 where that was not looked at; `round` are tokens per round and `kept` the share of the drafts
    that were kept, in the last answers, 0 without any."""

    url: str
    state: State
    service: Service = "none"
    why: str = ""
    note: str = ""
    version: str = ""
    pid: int = 0
    models: tuple[Model, ...] = ()
    loading: str = ""
    running: int = 0
    waiting: int = 0
    speed: float = 0.0
    round: float = 0.0
    kept: float = 0.0
    footprint: int = 0
    pressure: int = 0
    ttl: float = 0.0
    locked: bool = False  # the API key is not the server's
    requests: tuple[Mapping[str, Any], ...] = ()  # those that run: rows of the server's journal

    @property
    def loaded(self) -> list[str]:
        return [model.name for model in self.models if model.state == "loaded"]


def look(url: str, api_key: str = "", over: float = 0.0) -> Status:
    """Of the server at `url`, and of the service if that is its. The speed of what runs is seen in
    `over` seconds."""
    service, why = service_at(url)
    if service == "waiting":
        return Status(url, "asleep", service)
    if service == "held":  # its process may be between two tries, and must not be woken for one
        return Status(url, "unwell", service, why)
    try:
        now, (clock, before) = _look(url, service, api_key)
        if not (now.running and over):
            return now
        time.sleep(over)
        now, (later, after) = _look(url, service, api_key)
        return replace(now, speed=max(0.0, after - before) / max(over, later - clock))
    except Absent as error:
        absent: State = "not installed" if service == "not installed" else "stopped"
        return Status(url, absent, service, why or str(error))
    except ChatError as error:
        return Status(url, "unwell", service, why or str(error), locked=isinstance(error, Locked))


def _look(url: str, service: Service, api_key: str) -> tuple[Status, tuple[float, int]]:
    """And the server's clock with what it has generated until then."""
    with call(url, api_key, "GET", "/page/now", patience=PATIENCE_S) as response:
        found = clean(json.load(response))
        generated = sum(one["stats"]["generated_tokens"] for one in found["models"])
        return read(url, service, found), (found["time"], generated)


def service_at(url: str) -> tuple[Service, str]:
    """The service, if it is the one that listens at `url`, and why it stays down; "not installed"
    for every URL if there is none, "none" where there can be none, or it listens elsewhere."""
    try:
        system = here()
    except UserError:
        return "none", ""
    if not (at := installed(system)):
        return "not installed", ""
    if at != url.rstrip("/"):
        return "none", ""
    if not system.loaded(Hands()):
        return "stopped", "the service is stopped; `mlxspec service start` starts it"
    now = ledger.read(ledger.file())
    if now.held:
        return "held", now.held
    return ("running" if ledger.running() else "waiting"), ""


def installed(system: System) -> str:
    """The URL of the service that is installed, or ""."""
    found = system.address() if all(path.exists() for path in system.paths()) else None
    return url_of(*found) if found else ""


def read(url: str, service: Service, found: Mapping[str, Any]) -> Status:
    """A snapshot of the server as a status."""
    models = tuple(_model(one) for one in found["models"])
    running, waiting = (
        sum(getattr(one, name) for one in models) for name in ("running", "waiting")
    )
    rows = found["requests"]
    live = tuple(row for row in rows if not row["outcome"])
    drafted, rounds = (sum(row[name] for row in rows) for name in ("drafted", "rounds"))
    pressure = int(found["process"]["memory_pressure"])
    state: State = "unwell" if found["unwell"] else "loading" if found["loading"] else "idle"
    if state == "idle" and pressure:
        state = "short"
    elif state == "idle" and (running or waiting):
        state = "busy"
    elif state == "idle" and not any(one.state == "loaded" for one in models):
        state = "loading" if any(one.state == "loading" for one in models) else "asleep"
    return Status(
        url=url,
        state=state,
        service=service,
        why=found["unwell"],
        note=found["note"],
        version=found["version"],
        pid=found["pid"],
        models=models,
        loading=found["loading"]
        or next((one.name for one in models if one.state == "loading"), ""),
        running=running,
        waiting=waiting,
        speed=rows[0]["rate"] if rows and not live else 0.0,
        round=sum(row["generated"] for row in rows) / rounds if rounds else 0.0,
        kept=sum(row["kept"] for row in rows) / drafted if drafted else 0.0,
        footprint=int(found["process"]["footprint_bytes"]),
        pressure=pressure,
        ttl=found["idle_ttl"],
        requests=live,
    )


def _model(one: Mapping[str, Any]) -> Model:
    stats = one["stats"]
    return Model(
        name=one["name"],
        state=one["status"],
        bytes=one["weight_bytes"] + one["kv_bytes"] * (one["status"] == "loaded"),
        pinned=one["pinned"],
        idle=one["idle"],
        running=stats["running"],
        waiting=stats["waiting"],
        error=one["error"],
    )


def headline(now: Status) -> str:
    """The state in a few words."""
    match now.state:
        case "not installed":
            return "No service is installed, no server runs"
        case "stopped":
            return "Stopped"
        case "unwell":
            return f"Unwell: {now.why}"
        case "loading":
            return f"Loading {now.loading}"
        case "asleep":
            return "Asleep: the next request loads a model"
        case "short":
            return "Serving, but memory is short" + " (very)" * (now.pressure > 1)
    return f"Serving {', '.join(now.loaded)}"


def load_of(now: Status) -> str:
    """What is being done, and how fast."""
    speed = f"{now.speed:.1f} tokens/s" if now.speed else ""
    if not now.running and not now.waiting:
        rests = "loading" if now.loading else "idle"
        return f"{rests}, {speed} last" if speed else rests
    waits = f"{now.waiting} waiting" if now.waiting else ""
    return ", ".join(filter(None, (speed, f"{now.running} running", waits)))


def memory_of(now: Status) -> str:
    """Of the process, which is measured when it has worked."""
    short = ", the machine is short of it" * bool(now.pressure)
    return (format_size(now.footprint) if now.footprint else "not measured yet") + short


def speculation_of(now: Status) -> str:
    if not now.kept:
        return "off in safe mode" if now.note else "no draft was kept lately"
    return f"{now.round:.1f} tokens a round, {now.kept:.0%} of drafts kept"


def until(one: Model, ttl: float) -> str:
    """What keeps a model in memory, or when it goes."""
    if one.running or one.waiting or one.state == "loading":
        return "busy"
    idle = f"idle {_span(one.idle)}" if one.idle is not None else "idle"
    if one.pinned:
        return f"{idle}, pinned"
    if not ttl:
        return f"{idle}, stays"
    return f"{idle}, unloads in {_span(max(0.0, ttl - (one.idle or 0.0)))}"


def _span(seconds: float) -> str:
    for unit, each in (("h", 3600), ("min", 60)):
        if seconds >= each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:.0f} s"


def show(now: Status, as_json: bool) -> None:
    """On stdout."""
    if as_json:
        return print(json.dumps({"up": now.state in UP} | asdict(now), indent=2))
    up = {"server": now.url, "state": headline(now)}
    if now.service not in ("none", "not installed"):
        up["service"] = now.service
    if now.version:
        names = [f"{m.name}{', not loaded' * (m.state != 'loaded')}" for m in now.models]
        up |= {"note": now.note} if now.note else {}
        up |= {"models": "; ".join(names), "load": load_of(now), "memory": memory_of(now)}
        up |= {"drafts": speculation_of(now), "version": f"{now.version}, process {now.pid}"}
    elif now.state not in (*UP, "unwell"):  # whose headline has it
        up["mend"] = now.why
    for name, value in up.items():
        print(f"{name:9} {value}")


def show_ps(now: Status, as_json: bool) -> None:
    """Models in memory, then requests, on stdout."""
    there = [one for one in now.models if one.state != "unloaded"]
    if as_json:
        models = [asdict(one) | {"until": until(one, now.ttl)} for one in there]
        return print(json.dumps({"models": models, "requests": list(now.requests)}, indent=2))
    rows = [(m.name, format_size(m.bytes), m.state, until(m, now.ttl)) for m in there]
    table(
        ("name", "size", "state", "until"), rows, "no model is loaded; the next request loads one"
    )
    if now.requests:
        print()
        names = ("id", "model", "prompt", "cached", "generated", "rate", "seconds", "state")
        lines = [[_cell(row[name]) for name in names] for row in now.requests]
        table(("request", *names[1:5], "tokens/s", "seconds", "state"), lines)


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], none: str = "") -> None:
    """Columns on stdout; plain text, since names are others'."""
    if not rows:
        return print(none)
    lines = [[head.upper() for head in heads], *rows]
    wide = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, wide, strict=True))
        print("".join(c if c.isprintable() else "?" for c in "   ".join(cells).rstrip()))
