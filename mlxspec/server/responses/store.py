"""The stored responses, in memory: the most recently used ones, within bounds of count and bytes.

Rule: a response that was evicted is missing for good, also as the beginning of a conversation.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxspec.server.errors import unfit
from mlxspec.server.responses.schema import missing
from mlxspec.server.stream import ENCODER, Json

log = logging.getLogger("mlxspec")

MAX_RESPONSES = 1 << 12
MAX_BYTES = 1 << 26  # of all stored responses, as JSON
MAX_RESPONSE_BYTES = 1 << 22
MAX_CONVERSATION_BYTES = 1 << 24


@dataclass(slots=True)
class Store:
    """Responses by id, least recently used first, each with its own input items."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _stored: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _owners: dict[str, str] = field(default_factory=dict)  # by an item's id, its response's
    _bytes: int = 0

    def add(self, response: Json, items: Sequence[Json]) -> None:
        id = response["id"]
        data = ENCODER.encode({"response": response, "input": items}).encode()
        if len(data) > MAX_RESPONSE_BYTES:
            log.info(
                "response %s is not stored: it is larger than %d bytes", id, MAX_RESPONSE_BYTES
            )
            return
        self._stored[id] = data
        self._bytes += len(data)
        for item in [*items, *response["output"]]:
            self._owners[item["id"]] = id
        while len(self._stored) > self.max_responses or self._bytes > self.max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, id: str, param: str | None = None) -> tuple[Json, list[Json]]:
        """A response and its own input items. Raises ApiError if it is not stored."""
        if id not in self._stored:
            raise missing(id, param)
        self._stored.move_to_end(id)
        found = json.loads(self._stored[id])
        return found["response"], found["input"]

    def delete(self, id: str) -> None:
        """Raises ApiError if it is not stored."""
        items = self._items(id)
        self._bytes -= len(self._stored.pop(id))
        for item in items:
            if self._owners.get(item["id"]) == id:
                del self._owners[item["id"]]

    def conversation(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, oldest first. Raises ApiError if some of them are
        not stored."""
        param = "previous_response_id"
        turns, size = [], 0
        while id is not None:
            response, items = self.get(id, param)
            turns.append([*items, *response["output"]])
            size += len(self._stored[id])
            if size > MAX_CONVERSATION_BYTES:
                message = f"the conversation is larger than {MAX_CONVERSATION_BYTES} bytes"
                raise unfit(param, f"{param} = {id!r}: {message}; send what matters as input")
            id = response[param]
        return [item for turn in reversed(turns) for item in turn]

    def resolve(self, item: Json, at: str) -> Json:
        """The item that an item_reference means; any other item itself. Raises ApiError if it is
        not stored."""
        id = item.get("id")
        if item.get("type") != "item_reference":
            return item
        if not isinstance(id, str) or id not in self._owners:
            raise missing(str(id), f"{at}.id")
        return next(one for one in self._items(self._owners[id]) if one["id"] == id)

    def _items(self, id: str) -> list[Json]:
        response, items = self.get(id)
        return [*items, *response["output"]]
