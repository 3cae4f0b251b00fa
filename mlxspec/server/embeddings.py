"""POST /v1/embeddings: texts to vectors, made of the model's hidden states after its final norm.

Rule: one request's inputs take half of the places for sequences, so that answers start beside
them.
"""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from mlxspec import log
from mlxspec.files import read_json
from mlxspec.server.body import receive
from mlxspec.server.chat_request import encode_prompt, engine_request
from mlxspec.server.errors import HttpRequest, invalid
from mlxspec.server.openai.schema import Completion, Embeddings
from mlxspec.server.state import Model, report, run_on_text_thread, while_connected
from mlxspec.server.stream import failure
from mlxspec.types import Pooling, Request

POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


async def create(http: HttpRequest) -> Response:
    body, ignored, model = await receive(http, Embeddings)
    work = embed(model, body.prompts, body.dimensions)
    vectors, tokens = await while_connected(http, work)

    def response() -> Response:
        data = []
        for i, vector in enumerate(vectors):
            written = vector.tolist()
            if body.encoding_format == "base64":
                written = base64.b64encode(vector.astype("<f4")).decode()
            data.append({"object": "embedding", "index": i, "embedding": written})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        made = {"object": "list", "data": data, "model": model.name, "usage": usage}
        return JSONResponse(made, headers=report(ignored))

    return await run_on_text_thread(http, response)


async def embed(
    model: Model, inputs: Sequence[str | list[int]], dimensions: int | None = None
) -> tuple[list[Any], int]:
    """The embeddings of texts or token ids, float32 [D] of length 1 each (numpy's), and how many
    tokens were read. With `dimensions` their first so many, of length 1 again. For any API. Raises
    ApiError, RejectedRequest, Busy and Dead."""
    worker, most = model.server.worker, max(1, model.server.config.max_sequences // 2)
    on_text_thread = model.server.on_text_thread
    requests = [
        await on_text_thread(_request, model, text, f"input[{i}]") for i, text in enumerate(inputs)
    ]
    vectors = []
    for first in range(0, len(requests), most):
        some = requests[first : first + most]
        try:
            for stream in [worker.submit(request) for request in some]:
                output = await anext(stream)
                if output.embedding is None:
                    raise failure(output)
                vectors.append(output.embedding[:dimensions])
        finally:
            for request in some:  # after an error, or when the client has left
                worker.abort(request.id)
    width = len(vectors[0])
    if dimensions and dimensions > width:
        why = f"dimensions = {dimensions}: an embedding of {model.name} has {width}; send fewer"
        raise invalid("dimensions", why)
    tokens = sum(len(request.prompt) for request in requests)
    log.info("%s: %d embeddings of %d tokens", model.name, len(vectors), tokens)
    return [vector / np.linalg.norm(vector) for vector in vectors], tokens


def _request(model: Model, given: str | list[int], field: str) -> Request:
    """For the embedding of the input `field`. Raises RejectedRequest and ApiError."""
    ids = encode_prompt(model, given, field=field) if isinstance(given, str) else given
    one_token = Completion.model_validate({"prompt": "", "max_tokens": 1})
    request = engine_request(model, one_token, f"embd-{secrets.token_hex(12)}", ids, field)
    return replace(request, pooling=_pooling(model))


def _pooling(model: Model) -> Pooling:
    """As the model's sentence-transformers files say; without them its last token. Raises ApiError
    for what cannot be done here."""
    path = model.server.paths[model.name]
    config = read_json(path / "1_Pooling" / "config.json")
    if not config:
        return "last"
    for mode, how in POOLINGS.items():
        if config.get("pooling_mode") == mode or config.get(f"pooling_mode_{mode}"):
            if not any(path.glob("*_Dense")):
                return how
    why = f"{model.name} makes its embeddings in a way that is not supported; serve another model"
    raise invalid("model", why)
