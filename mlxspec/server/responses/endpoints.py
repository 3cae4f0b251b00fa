"""POST /v1/responses, the stored responses and their endpoints.

Rule: a response is stored with its whole conversation, so no other one is needed to continue it.
"""

import json
import secrets
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from mlxspec.server.body import IGNORED, endpoint
from mlxspec.server.chat_request import (
    ChatRequest,
    prepare_chat,
    prompt_length,
)
from mlxspec.server.content import File
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.generate import Generation, respond
from mlxspec.server.images import read_images
from mlxspec.server.responses.schema import (
    Create,
    Tool,
    chat_messages,
    parse_tools,
)
from mlxspec.server.responses.writer import ResponsesWriter, new_id
from mlxspec.server.state import TextModel
from mlxspec.text.images import MARKER, Images, put_texts
from mlxspec.text.messages import as_list

MAX_BYTES = 1 << 26  # of all stored responses, as JSON
# Fields of the request that the response repeats, with their defaults.
DEFAULTS: Json = {
    **dict.fromkeys(
        "instructions max_output_tokens max_tool_calls previous_response_id prompt_cache_key"
        " safety_identifier user".split(),
    ),
    "background": False,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


@dataclass
class Stored:
    """A response, the items of the conversation before it, their size as JSON, and the digests of
    the images in these."""

    response: Json
    items: list[Json]
    size: int
    digests: set[str]


@dataclass
class Store:
    """Responses by id, least recently used first, and their images by digest."""

    max_bytes: int = MAX_BYTES
    files: dict[str, File] = field(default_factory=dict)
    _stored: OrderedDict[str, Stored] = field(default_factory=OrderedDict)

    def add(
        self,
        response: Json,
        items: list[Json],
        files: Mapping[str, File] = {},
    ) -> None:
        """Store a response, and drop the least recently used ones beyond `max_bytes`."""
        text = json.dumps([response, items], ensure_ascii=False)
        digests = set(MARKER.findall(text)) & files.keys()
        self._stored[response["id"]] = Stored(response, items, len(text), digests)
        self.files |= {digest: files[digest] for digest in digests}
        while self._bytes() > self.max_bytes:
            self._stored.popitem(last=False)
            self._drop_files()

    def _bytes(self) -> int:
        images = sum(len(file.data) for file in self.files.values())
        return images + sum(each.size for each in self._stored.values())

    def _drop_files(self) -> None:
        """Forget the images of responses that are gone."""
        used = set[str]().union(*(each.digests for each in self._stored.values()))
        self.files = {digest: self.files[digest] for digest in used}

    def images_in(self, items: list[Json]) -> dict[str, File]:
        """The stored images of some items."""
        if not self.files:
            return {}
        digests = set(MARKER.findall(json.dumps(items, ensure_ascii=False))) & self.files.keys()
        return {digest: self.files[digest] for digest in digests}

    def get(self, id: str) -> tuple[Json, list[Json]]:
        """A response, and the items before it. Raises ApiError 404."""
        if id not in self._stored:
            raise _missing(id)
        self._stored.move_to_end(id)
        return self._stored[id].response, self._stored[id].items

    def delete(self, id: str) -> None:
        """Raises ApiError 404."""
        self.get(id)
        del self._stored[id]
        self._drop_files()

    def conversation(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, oldest first. Raises ApiError 400."""
        if id is None:
            return []
        try:
            response, items = self.get(id)
        except ApiError as error:
            code = "previous_response_not_found"
            raise invalid("previous_response_id", error.message, code) from error
        return [*items, *response["output"]]

    def resolve(self, items: list[Json]) -> None:
        """Replace each item_reference by the item it names. Raises ApiError 404."""
        stored: Json = {}
        for i, item in enumerate(items):
            if item.get("type") != "item_reference":
                continue
            if not stored:
                for kept in self._stored.values():
                    known = (*kept.items, *kept.response["output"])
                    stored |= {item["id"]: item for item in known}
            id = str(item.get("id"))
            if id not in stored:
                raise _missing(id, f"input[{i}].id")
            items[i] = stored[id]


def _missing(id: str, param: str | None = None) -> ApiError:
    why = f"{id[:200]!r} is not stored, or no longer; send the conversation as input"
    return ApiError(404, why, param, code="not_found")


async def create(http: HttpRequest, body: Create, model: TextModel) -> Response | Generation:
    """A response; for /v1/responses/input_tokens only the length of its prompt."""
    store: Store = http.app.state.responses
    before = store.conversation(body.previous_response_id)
    items, on_text_thread = body.input, model.server.on_text_thread
    store.resolve(items)
    tools, chat_request = await on_text_thread(_chat_request, body, before, http.scope[IGNORED])
    files = store.images_in([*before, *items])
    if files:
        earlier = await read_images(model, files, http.scope[IGNORED])
        chat_request = replace(chat_request, images={**earlier, **body.seen_images})
    files |= body.content.files
    if http.url.path.endswith("/input_tokens"):
        count = await on_text_thread(prompt_length, model, chat_request)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})
    response = await on_text_thread(_response, model, body)
    kept = {name: tool.heading for name, tool in tools.items()}
    by_name = {tool.name: tool for tool in kept.values()} | kept
    writer = ResponsesWriter(response["id"], response, by_name, model.tokenizer)
    chat_request = replace(chat_request, held=response)
    if body.store:
        writer.store = lambda final: store.add(
            final,
            before + [_stored(item, chat_request.images) for item in items],
            files,
        )
        chat_request = replace(chat_request, held={**response, "input": [before, items]})
    return await respond(model, body, writer, prepare_chat, chat_request)


def _chat_request(
    body: Create,
    before: list[Json],
    ignored: list[str],
) -> tuple[dict[str, Tool], ChatRequest]:
    """The tools by name, and the conversation; what is left out goes to `ignored`. On the text
    thread, as bodies may be large. Raises ApiError."""
    tools = parse_tools(body.tools, ignored)
    messages = chat_messages(before, body.input, ignored)
    if not messages:
        raise invalid("input", "input has no message that can be read; send one")
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat_request = ChatRequest(
        messages,
        [tool.definition for tool in tools.values()],
        body.tool_choice,
        options=body.options,
        source="input",
        budget=body.reasoning.max_tokens,
        images=body.seen_images,
    )
    return tools, chat_request


def _response(model: TextModel, body: Create) -> Json:
    """The response before it has an answer; on the text thread."""
    names = {*DEFAULTS, "temperature", "top_p"}
    # As JSON: an infinite number becomes null.
    settings = body.model_dump_json(include=names, exclude_unset=True, by_alias=True)
    return {
        **DEFAULTS,
        "temperature": model.defaults.temperature,
        "top_p": model.defaults.top_p,
        **json.loads(settings),
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


async def stored(http: HttpRequest) -> Response:
    """GET and DELETE of one response."""
    store: Store = http.app.state.responses
    id = http.path_params["id"]
    if http.method == "DELETE":
        store.delete(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})
    return JSONResponse(store.get(id)[0])


async def input_items(http: HttpRequest) -> Response:
    """The items that a response answered, with those of the responses before it, newest first."""
    store: Store = http.app.state.responses
    items = [_shown(item, store.files) for item in store.get(http.path_params["id"])[1]]
    if http.query_params.get("order") != "asc":
        items = items[::-1]
    ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return JSONResponse({"object": "list", "data": items, "has_more": False, **ids})


def _stored(item: Json, images: Images) -> Json:
    """An input item with a type and an id, its texts as parts of the types that belong to it, and
    the lines of images that were not seen."""
    kind = item.get("type") or "message"
    item = {**item, "type": kind}
    if not isinstance(item.get("id"), str):
        item["id"] = new_id(kind)
    text = "output_text" if item.get("role") == "assistant" else "input_text"
    if kind == "message" and isinstance(item["content"], str):
        item["content"] = [{"type": "text", "text": item["content"]}]
    for part in [
        *as_list(item.get("content")),
        *as_list(item.get("output")),
    ]:
        match part:
            case {"type": "text"}:  # also what content.py has put in place of an image
                part["type"] = text
                part["text"] = put_texts(str(part.get("text", "")), images)
    return item


def _shown(item: Json, files: Mapping[str, File]) -> Json:
    """A stored item with its images as parts again."""
    item = dict(item)
    for key in item.keys() & {"content", "output"}:
        if isinstance(item[key], list):
            item[key] = [_shown_part(part, files) for part in item[key]]
    return item


def _shown_part(part: Any, files: Mapping[str, File]) -> Any:
    text = part.get("text") if isinstance(part, dict) else None
    match = MARKER.fullmatch(text) if isinstance(text, str) else None
    file = files.get(match[1]) if match else None
    if not file:
        return part
    url = file.url or f"data:;base64,{b64encode(file.data).decode()}"
    return {"type": "input_image", "detail": "auto", "image_url": url}


ENDPOINTS: Json = {
    "POST /v1/responses": endpoint(Create, create),
    "POST /v1/responses/input_tokens": endpoint(Create, create),
    "GET,DELETE /v1/responses/{id}": stored,
    "GET /v1/responses/{id}/input_items": input_items,
}
