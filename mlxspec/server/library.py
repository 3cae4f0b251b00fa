"""The models on this disk: Ollama's pull and delete, and what the page shows of them.

Rule: the hub is asked only where a request wants it. One model at a time is downloaded, in a
process of its own, which ends when its client disconnects.
"""

import asyncio
import json
import os
import re
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from pydantic import AliasChoices, Field
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxspec.files import MODULE, weight_bytes
from mlxspec.load.drafting import NONE
from mlxspec.load.loader import room
from mlxspec.load.resolve import draft_of, resolve_another
from mlxspec.model.hub import bytes_here, download_bytes, folder_name, hub_folder, installed
from mlxspec.server.body import Body, endpoint
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.page import HEADERS
from mlxspec.server.state import ServerState, TextModel
from mlxspec.speculate.heads.files import find_head
from mlxspec.types import Dead, UnsupportedModel, UserError, shown

POLL_S = 0.5  # between two lines about a download
HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
LINES = "application/x-ndjson"
Lines = AsyncGenerator[Json, None]


class Named(Body):
    """The body of /api/pull and /api/delete."""

    model: str = Field(validation_alias=AliasChoices("model", "name"))
    stream: bool = True


@dataclass
class Pulled:
    """The response that streams the lines of a pull, the last one with the error if it fails."""

    lines: Lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._encoded()) as encoded:
            await StreamingResponse(encoded, media_type=LINES)(scope, receive, send)

    async def _encoded(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.lines) as lines:
            try:
                async for line in lines:
                    yield json.dumps(line).encode() + b"\n"
            except (ApiError, UserError, Dead) as error:
                why = error.message if isinstance(error, ApiError) else str(error)
                yield json.dumps({"error": why}).encode() + b"\n"


async def pull(http: HttpRequest, body: Named, _: TextModel) -> ASGIApp:
    """POST /api/pull: downloads a model if it is missing, and serves it from then on."""
    server: ServerState = http.app.state.server
    name = body.model.removesuffix(":latest")
    here = name in server.worker.models or name in await asyncio.to_thread(installed)
    size = 0 if here else await _size(name)
    _check_idle(server)
    lines = _pull(server, name, size)
    if body.stream:
        return Pulled(lines)
    async with aclosing(lines):
        whole = [line async for line in lines]
    return JSONResponse(whole[-1])


async def _size(name: str) -> int:
    """The bytes of a download. Raises ApiError."""
    if not HUB_ID.fullmatch(name) or os.path.exists(name):  # a directory here would win
        like = "Qwen3-4B-4bit" if "/" in name else name[:96]
        why = f"model = {shown(name)} is not the id of a model on the hub, such as"
        raise invalid("model", f"{why} 'mlx-community/{like}'; send one")
    try:
        return await asyncio.to_thread(download_bytes, name)
    except UnsupportedModel as error:
        raise ApiError(404, str(error), "model", code="model_not_found") from error


def _check_idle(server: ServerState) -> None:
    if server.pulling:
        raise ApiError(409, f"{server.pulling} is being downloaded; wait for its end, or stop it")


async def _pull(server: ServerState, name: str, size: int) -> Lines:
    """The lines of a pull, in Ollama's format. `size` is 0 where the model is on this disk, which
    is then only completed and served."""
    yield {"status": "pulling manifest"}
    _check_idle(server)  # another one may have begun meanwhile
    server.pulling = name
    try:
        if name not in server.worker.models:
            async with aclosing(_download(server, name)) as counts:
                async for count in counts:
                    line = {"status": f"pulling {name}", "digest": name, "total": size}
                    yield {**line, "completed": min(count, size)}
            model = await asyncio.to_thread(resolve_another, name, server.config)
            server.add_path(model.name, model.path)  # before a request can ask for it
            await server.worker.add(model.name, model)
    finally:
        server.pulling = ""
    yield {"status": "success"}


async def _download(server: ServerState, name: str) -> AsyncGenerator[int, None]:
    """Download a model and what drafts for it: the bytes that are here. Raises UnsupportedModel."""
    draft = server.config.draft
    own = replace(server.config, draft=draft if draft == NONE else "")  # as resolve_another has it
    words = filter(None, [name, draft_of(name, None, own)])
    process = await asyncio.create_subprocess_exec(
        *(*MODULE, "mlxspec.model.puller", *words),
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=PIPE,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert process.stdin and process.stderr
    said = asyncio.ensure_future(process.stderr.read())
    try:
        while not (await asyncio.wait((said,), timeout=POLL_S))[0]:
            yield await asyncio.to_thread(bytes_here, name)
        if await process.wait():
            last = said.result().decode(errors="replace").strip().rpartition("\n")[2]
            raise UnsupportedModel(last or f"the download of {name} ended early")
        yield await asyncio.to_thread(bytes_here, name)
    finally:
        said.cancel()
        process.stdin.close()  # ends it, if it has not ended


async def delete(http: HttpRequest, body: Named, _: TextModel) -> Response:
    """DELETE /api/delete: deletes a model of the hub's cache that is not loaded."""
    server: ServerState = http.app.state.server
    name = body.model.removesuffix(":latest")
    served, paths = server.worker.models, server.paths
    folder = (await asyncio.to_thread(installed)).get(name, paths.get(name))
    cached = hub_folder(name)
    if not folder:
        raise ApiError(404, f"model = {shown(name)} is not on this disk", "model")
    if cached.name not in folder.parts:
        why = f"{name} is in {folder}, not in the hub's cache; delete it there"
        raise ApiError(409, why, "model")
    users = [model for model, path in paths.items() if cached.name in path.parts]
    loaded = [name for name in users if name in served and served[name].status != "unloaded"]
    if loaded or server.pulling == name:
        why = f"unload {loaded[0]} first" if loaded else "it is being downloaded"
        raise ApiError(409, f"{name} cannot be deleted now: {why}", "model")
    try:
        for model in users:
            await server.worker.remove(model)
            server.remove_path(model)
    except UnsupportedModel as error:
        raise ApiError(409, f"{name} cannot be deleted: {error}", "model") from error
    await asyncio.to_thread(shutil.rmtree, cached)
    return Response()


async def disk(http: HttpRequest) -> Response:
    """GET /page/disk: the models on this disk, and bytes for the weights of a model. With `model`,
    also what a download of it would take."""
    server: ServerState = http.app.state.server
    body = await asyncio.to_thread(_on_disk, server)
    if name := http.query_params.get("model", ""):
        size, here = await _size(name), await asyncio.to_thread(bytes_here, name)
        body["hub"] = {"name": name, "bytes": size, "here": min(here, size)}
    return JSONResponse(body, headers=HEADERS)


def _on_disk(server: ServerState) -> Json:
    rows = []
    for name, path in installed().items():
        if find_head(path).standalone:
            continue
        deletable = folder_name(name) in path.parts
        rows.append(
            {
                "name": name,
                "bytes": weight_bytes(path),
                "deletable": deletable,
            },
        )
    return {"room": room(server.config), "pulling": server.pulling, "models": rows}


ENDPOINTS: Json = {
    "POST /api/pull": endpoint(Named, pull, served=False),
    "DELETE /api/delete": endpoint(Named, delete, served=False),
    "GET /page/disk": disk,
}
