"""POST /v1/rerank, in the form of Jina and Cohere: how well documents answer a query, by a model
that was trained to say so, as Qwen3-Reranker was: the chance of "yes" against "no" as its next
token (arXiv 2506.05176).
"""

import math
import secrets
from contextlib import aclosing
from typing import Annotated

from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlxspec import log
from mlxspec.server.body import FIRST, IGNORED, Count, Queued, Strict, endpoint
from mlxspec.server.chat_request import encode_prompt, room_for
from mlxspec.server.embeddings import run_in_groups
from mlxspec.server.errors import HttpRequest, Json, invalid
from mlxspec.server.state import TextModel
from mlxspec.text.chat import encode
from mlxspec.types import MAX_TOP_LOGPROBS, Logprob, Request, Sampling

MAX_DOCUMENTS = 2048
MAX_TOKENS = 1 << 20  # of all documents, each with the query
NAMED_IN = 3  # last parts of a model's path: the hub's cache has the name above the snapshot
TASK = "Given a web search query, retrieve relevant passages that answer the query"
# What the model was trained on: before, between and after what the client sends.
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
PAIR = "<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Document(Strict):
    text: str


class Rerank(Queued):
    query: str
    documents: Annotated[
        list[str | Document],
        FIRST,
        Field(min_length=1, max_length=MAX_DOCUMENTS),
    ]
    top_n: Count | None = None
    return_documents: bool = False
    instruction: str = TASK


async def rerank(http: HttpRequest, body: Rerank, model: TextModel) -> Response:
    """The documents, the most relevant first, with a score from 0 to 1. Raises ApiError,
    RejectedRequest, Busy and Dead."""
    names = (model.base, *model.server.paths[model.base].parts[-NAMED_IN:])
    if not any("rerank" in name.lower() for name in names):
        why = f"{model.name} is no reranker by its name; serve one, such as Qwen3-Reranker"
        raise invalid("model", why)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    head, tail, yes, no = await model.server.on_text_thread(_fixed, model)
    requests = []
    tokens = 0
    for i, text in enumerate(texts):
        # What the client sent has no control tokens.
        pair = PAIR.format(task=body.instruction, query=body.query, text=text)
        field = f"documents[{i}]"
        ids = await model.server.on_text_thread(encode_prompt, model, pair, False, field)
        made = _request(model, [*head, *ids, *tail], field)
        requests.append(made)
        tokens += len(made.prompt)
        if tokens > MAX_TOKENS:
            why = f"documents have more than {MAX_TOKENS} tokens with the query; send fewer"
            raise invalid(field, why)
    scores: dict[str, float | None] = {}
    async with aclosing(run_in_groups(model, requests, body.priority)) as outputs:
        async for output in outputs:
            scores[output.request] = _score(output.logprobs[0], yes, no)
    if {*scores.values()} == {None}:
        why = f"{model.name} answers neither yes nor no; serve a reranker, such as Qwen3-Reranker"
        raise invalid("model", why)
    results: list[Json] = []
    for i, (request, text) in enumerate(zip(requests, texts, strict=True)):
        if (score := scores[request.id]) is None:
            http.scope[IGNORED].append(f"documents[{i}]")
        shown = {"document": {"text": text}} if body.return_documents else {}
        results.append({"index": i, "relevance_score": score or 0.0, **shown})
    results.sort(key=lambda each: -each["relevance_score"])
    log.info("%s: %d documents of %d tokens", model.name, len(texts), tokens)
    return JSONResponse(
        {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": model.name,
            "results": results[: body.top_n],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        },
    )


def _fixed(model: TextModel) -> tuple[list[int], list[int], int, int]:
    """The tokens of HEAD and TAIL, and of both answers."""
    head, tail = (encode(model.tokenizer, text) for text in (HEAD, TAIL))
    yes, no = (encode(model.tokenizer, word, special=False)[-1] for word in ("yes", "no"))
    return head, tail, yes, no


def _request(model: TextModel, ids: list[int], field: str) -> Request:
    """For the alternatives of one token. Raises ApiError."""
    room_for(model, ids, field)
    sampling = Sampling(temperature=0.0, logprobs=MAX_TOP_LOGPROBS)
    id = f"rank-{secrets.token_hex(12)}"
    return Request(id, tuple(ids), 1, sampling=sampling, model=model.base)


def _score(found: Logprob, yes: int, no: int) -> float | None:
    """The chance of `yes` where it is that or `no`; None where neither is an alternative. If only
    one is, the other counts as being as likely as the last alternative."""
    chances = dict(found.top)
    if not {yes, no} & chances.keys():
        return None
    last = min(chances.values())
    return 1 / (1 + math.exp(min(700.0, chances.get(no, last) - chances.get(yes, last))))


ENDPOINTS: Json = {
    "POST /v1/rerank": endpoint(Rerank, rerank),
    "POST /v2/rerank": endpoint(Rerank, rerank),
}
