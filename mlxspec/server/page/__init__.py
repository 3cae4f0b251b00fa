"""The status page for a browser: its files, and the snapshot that it polls once a second.

Rule: the files hold no data and load without a key; snapshots require the key and hold no text of
prompts or answers. They read what the engine has published, so watching costs it nothing.
"""

import os
import time
from dataclasses import asdict
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from mlxspec import __version__
from mlxspec.kernels.verify import KERNELS
from mlxspec.metrics import PROCESS
from mlxspec.server.errors import HttpRequest
from mlxspec.server.state import ServerState

SCRIPTS = "page api dom numbers charts figures models pictures chat turns markdown conversations"
SCRIPTS += " settings vendor/marked.esm"
FILES = (
    "index.html",
    "page.css",
    "chat.css",
    "icon.svg",
    *(f"{name}.js" for name in SCRIPTS.split()),
)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "accept",
}


async def file(http: HttpRequest) -> Response:
    """A file of the page; index.html at /."""
    name = http.path_params.get("name", "index.html")
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(Path(__file__).parent / name, headers=HEADERS)


async def now(http: HttpRequest) -> Response:
    """Everything that the page, `mlxspec status` and the menu bar show: counters since the start,
    bytes, seconds of the monotonic clock. Running requests come first, the newest first."""
    server: ServerState = http.app.state.server
    worker, models = server.worker, list(server.worker.models.values())
    live = [row() for row in reversed(server.live.values())]
    process = {name: max(getattr(model.stats, name) for model in models) for name in PROCESS}
    body = {
        "version": __version__,
        "pid": os.getpid(),
        "time": round(time.monotonic(), 3),
        "loading": worker.loading(),
        "note": server.note,
        "unwell": server.unwell(),
        "models": [asdict(model) for model in models],
        "profiles": {name: profile.base for name, profile in server.profiles.items()},
        "process": process,
        "refused": server.metrics.refused,
        "requests": [*live, *server.finished],
        "kernels": {name: asdict(verdict) for name, verdict in list(KERNELS.verdicts.items())},
    }
    return JSONResponse(body, headers=HEADERS)
