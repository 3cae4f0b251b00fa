"""The stored responses, in memory: the most recently used ones, within bounds of count and bytes.

Rule: a response that was evicted is missing for good, also as the beginning of a conversation.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from mlxspec.server.errors import ApiError, invalid
from mlxspec.server.stream import Json

STORED = TypeAdapter(tuple[Json, list[Json]])  # writes an infinite number as null
MAX_RESPONSES = 1 << 12
MAX_BYTES = 1 << 26  # of all stored responses, as JSON


@dataclass(slots=True)
class Store:
    """Responses by id, least recently used first, each with its own input items."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _stored: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _owners: dict[str, str] = field(default_factory=dict)  # by an item's id, its response's
    _bytes: int = 0

    def add(self, response: Json, items: list[Json]) -> None:
        id = response["id"]
        data = STORED.dump_json((response, items))
        self._stored[id] = data
        self._bytes += len(data)
        for item in items + response["output"]:
            self._owners[item["id"]] = id
        while len(self._stored) > self.max_responses or self._bytes > self.max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, id: str, param: str | None = None) -> tuple[Json, list[Json]]:
        """A response and its own input items. Raises ApiError if it is not stored."""
        if id not in self._stored:
            raise missing(id, param)
        self._stored.move_to_end(id)
        return STORED.validate_json(self._stored[id])

    def delete(self, id: str) -> None:
        """Raises ApiError if it is not stored."""
        response, items = self.get(id)
        self._bytes -= len(self._stored.pop(id))
        for item in items + response["output"]:
            if self._owners.get(item["id"]) == id:
                del self._owners[item["id"]]

    def conversation(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, oldest first. Raises ApiError if some of them are
        not stored."""
        found: list[Json] = []
        while id is not None:
            response, items = self.get(id, "previous_response_id")
            found = items + response["output"] + found
            id = response["previous_response_id"]
        return found

    def resolve(self, item: Json, at: str) -> Json:
        """The item that an item_reference means; any other item itself. Raises ApiError if it is
        not stored."""
        if item.get("type") != "item_reference":
            return item
        id = str(item.get("id"))
        if id not in self._owners:
            raise missing(id, f"{at}.id")
        response, items = self.get(self._owners[id])
        return next(one for one in items + response["output"] if one["id"] == id)


def missing(id: str, param: str | None) -> ApiError:
    """For a response, or an item of one, that is not stored."""
    message = f"{id[:200]!r} is not stored, or no longer; send the conversation as input"
    if param == "previous_response_id":
        return invalid(param, message, "previous_response_not_found")
    return ApiError(404, message, param=param, code="not_found")
