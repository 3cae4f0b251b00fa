"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: vectors of texts, from the
model's hidden states after its final norm.

Rule: one request's inputs take half of the sequence slots, so that answers can start beside them.
"""

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from mlxspec import log
from mlxspec.files import read_json
from mlxspec.server.body import endpoint, invalid_value
from mlxspec.server.chat_request import encode_prompt, room_for
from mlxspec.server.errors import HttpRequest, Json, invalid
from mlxspec.server.openai.schema import Embeddings, OneEmbedding
from mlxspec.server.state import TextModel
from mlxspec.server.stream import failure
from mlxspec.text.messages import as_list
from mlxspec.types import BACKGROUND, Busy, Output, Pooling, Request

POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


async def create(http: HttpRequest, body: Embeddings, model: TextModel) -> Response:
    vectors, tokens = await embed(model, body)

    def response() -> Response:
        """Thousands of vectors take a second to write."""
        if body.encoding_format == "base64":
            values = [base64.b64encode(vector.astype("<f4")).decode() for vector in vectors]
        else:
            values = [vector.tolist() for vector in vectors]
        if isinstance(body, OneEmbedding):
            return JSONResponse({"embedding": values[0]})
        if http.url.path == "/api/embed":
            name, counts = body.model or model.name, {"prompt_eval_count": tokens}
            return JSONResponse({"model": name, "embeddings": values, **counts})
        data = [
            {"object": "embedding", "index": i, "embedding": value}
            for i, value in enumerate(values)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    return await model.server.on_text_thread(response)


async def embed(model: TextModel, body: Embeddings) -> tuple[list[Any], int]:
    """The embeddings of the body's inputs, each a numpy float32 [D] of length 1, and the number of
    tokens read. `dimensions` truncates them before they are normalized. Raises ApiError,
    RejectedRequest, Busy and Dead."""
    server, dimensions = model.server, body.dimensions
    requests = []
    for i, prompt in enumerate(as_list(body.input)):
        field = body.place.format(i)
        requests.append(await server.on_text_thread(_request, model, prompt, field))
    vectors: dict[str, Any] = {}  # by request
    async with aclosing(run_in_groups(model, requests, body.priority)) as outputs:
        async for output in outputs:
            width = len(output.embedding)
            if dimensions and dimensions > width:
                why = f"an embedding of {model.name} has {width}; send fewer"
                raise invalid_value("dimensions", dimensions, why)
            vector = output.embedding[:dimensions]
            length = np.linalg.norm(vector.astype(float))  # float32 overflows
            vectors[output.request] = vector / np.float32(length or 1)
    tokens = sum(len(request.prompt) for request in requests)
    log.info("%s: %d embeddings of %d tokens", model.name, len(vectors), tokens)
    return [vectors[request.id] for request in requests], tokens


async def run_in_groups(
    model: TextModel,
    requests: Sequence[Request],
    priority: int | None,
) -> AsyncGenerator[Output]:
    """The one output of each request, which is for one token. Requests have the given `priority`,
    else that of background work or a profile's lower one. If the queue is full, a group waits,
    unless it is the first. Raises ApiError, Busy and Dead."""
    server = model.server
    worker, size = server.worker, max(1, server.config.max_sequences // 2)
    if priority is None:
        priority = max(BACKGROUND, model.profile.priority or 0)
    requests = [replace(request, priority=priority) for request in requests]
    done = 0
    while batch := requests[done : done + size]:
        try:
            outputs = worker.submit(*batch)
        except Busy as error:
            if not done:
                raise
            await asyncio.sleep(error.retry_after)  # keep what came so far
            continue
        try:
            async for output in outputs:
                if output.finish != "length":
                    raise failure(output)
                yield output
        finally:
            for request in batch:  # after an error, or when the client has left
                worker.abort(request.id)
        done += len(batch)


def _request(model: TextModel, prompt: str | list[int], field: str) -> Request:
    """The engine request for the input `field`. Raises RejectedRequest and ApiError."""
    ids = encode_prompt(model, prompt, field=field) if isinstance(prompt, str) else prompt
    room_for(model, ids, field)
    id, pooling = f"embd-{secrets.token_hex(12)}", _pooling(model)
    return Request(id, tuple(ids), 1, model=model.base, pooling=pooling)


def _pooling(model: TextModel) -> Pooling:
    """The pooling in the model's sentence-transformers files, its last token without them. Raises
    ApiError for a pooling that is not supported."""
    path = model.server.paths[model.base]
    config = read_json(path / "1_Pooling" / "config.json")
    if not config:
        return "last"
    for mode, pooling in POOLINGS.items():
        if config.get("pooling_mode") == mode or config.get(f"pooling_mode_{mode}"):
            if not any(path.glob("*_Dense")):
                return pooling
    why = f"the pooling of {model.name}'s embeddings is not supported; serve another model"
    raise invalid("model", why)


ENDPOINTS: Json = {
    "POST /v1/embeddings": endpoint(Embeddings, create),
    "POST /api/embed": endpoint(Embeddings, create),
    "POST /api/embeddings": endpoint(OneEmbedding, create),
}
