"""The page for a browser: its files, and one stream of snapshots that feeds it.

Rule: the files hold no data and load without a key; the snapshots hold no text of anybody and need
it. They are made of what the engine has published, so watching costs it nothing.
"""

import asyncio
import time
from dataclasses import asdict, fields
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxspec import __version__
from mlxspec.server.errors import ApiError
from mlxspec.server.state import Gone, ServerState, while_connected
from mlxspec.server.stream import event
from mlxspec.types import PROCESS, Served, Stats

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept",
}
DATA = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "frame-ancestors 'none'",
}
STREAM = DATA | {"content-type": "text/event-stream; charset=utf-8"}
LISTENERS = 8  # pages that may be open at once
TICKS, TICK_S = (
    4,
    0.25,
)  # looks at whether the server stops between two snapshots, and the pause before each
SHOWN = [row.name for row in fields(Stats) if row.name not in PROCESS | {"progress", "seated"}]
OF_INFO = ("name", "layout", "context", "block_size", "kv_blocks", "kv_bytes", "weight_bytes")

Json = dict[str, Any]


async def file(http: HttpRequest) -> Response:
    """A file of the page; at / its first one."""
    name = http.path_params.get("name", "index.html")
    if name not in FILES:
        raise HTTPException(404)
    return Response(_read(name), media_type=FILES[name], headers=HEADERS)


@cache
def _read(name: str) -> bytes:
    return files(__name__).joinpath(name).read_bytes()


async def events(http: HttpRequest) -> ASGIApp:
    """A snapshot now and one a second, as server-sent events, until the client leaves or the server
    stops. 429 where LISTENERS listen already."""
    front: ServerState = http.app.state.front

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if front.listeners >= LISTENERS:
            why = f"{LISTENERS} pages are open already; close one, or try again in 5 s"
            raise ApiError(429, why, headers={"Retry-After": "5"})
        front.listeners += 1
        try:
            await while_connected(receive, _feed(front, send, once=http.method == "HEAD"))
        except Gone:
            pass
        finally:
            front.listeners -= 1

    return respond


async def _feed(front: ServerState, send: Send, once: bool) -> None:
    headers = [(name.encode(), value.encode()) for name, value in STREAM.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        last = once or _ending(front)
        body = event(snapshot(front))
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        if last:
            return
        for _ in range(TICKS):
            await asyncio.sleep(TICK_S)
            if _ending(front):
                break


def _ending(front: ServerState) -> bool:
    return front.engine.draining() or not front.engine.alive()


def snapshot(front: ServerState) -> Json:
    """All that the page shows, as plain data: counters since the start, bytes, seconds by our
    clock."""
    engine, served = front.engine, list(front.engine.models().values())
    most = {name: max(getattr(one.stats, name) for one in served) for name in sorted(PROCESS)}
    return {
        "version": __version__,
        "time": round(time.monotonic(), 3),
        "alive": engine.alive(),
        "stopping": engine.draining(),
        "stalled": round(engine.stalled(), 1),
        "loading": engine.loading(),
        "note": front.note,
        "unwell": front.unwell(),
        "models": [_model(one) for one in served],
        "process": most,
        "refused": front.metrics.refusals(),
        "requests": [asdict(row) for row in front.journal.rows()],
        "kernels": [_verdict(name, one) for name, one in list(front.verdicts.items())],
    }


def _model(served: Served) -> Json:
    return {
        **{name: getattr(served.info, name) for name in OF_INFO},
        "status": served.status,
        "pinned": served.pinned,
        "loads": served.loads,
        "idle": round(max(0.0, time.monotonic() - served.used), 1) if served.used else None,
        "error": served.error,
        "stats": {name: getattr(served.stats, name) for name in SHOWN},
    }


def _verdict(name: str, verdict: Any) -> Json:
    """A `mlxspec.kernels.verify.Verdict`, or whatever has its fields."""
    told = {each: getattr(verdict, each) for each in ("way", "least", "most", "error", "why")}
    return {"name": name, **told, "gains": sorted(verdict.gains.items())}
