"""The stored responses, in memory: the most recently used ones, within a bound of bytes.

Rule: a response that was evicted is missing for good, also as the beginning of a conversation.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, field

from mlxspec.server.errors import ApiError, invalid
from mlxspec.server.stream import Json

MAX_BYTES = 1 << 26  # of all stored responses, as JSON


@dataclass(slots=True)
class Store:
    """Responses by id, least recently used first, each with its own input items."""

    max_bytes: int = MAX_BYTES
    _stored: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _owners: dict[str, str] = field(default_factory=dict)  # by an item's id, its response's

    def add(self, response: Json, items: list[Json]) -> None:
        id = response["id"]
        pair = response, items
        self._stored[id] = json.dumps(pair).encode()
        for item in items + response["output"]:
            self._owners[item["id"]] = id
        while sum(map(len, self._stored.values())) > self.max_bytes:
            oldest = next(iter(self._stored))
            self.delete(oldest)

    def get(self, id: str, param: str | None = None) -> tuple[Json, list[Json]]:
        """A response, and its items: its own input, then its output. Raises ApiError if it is not
        stored."""
        if id not in self._stored:
            why = f"{id[:200]!r} is not stored, or no longer; send the conversation as input"
            if param == "previous_response_id":
                raise invalid(param, why, "previous_response_not_found")
            raise ApiError(404, why, param, "not_found")
        self._stored.move_to_end(id)
        response, items = json.loads(self._stored[id])
        items += response["output"]
        return response, items

    def delete(self, id: str) -> None:
        """Raises ApiError if it is not stored."""
        _, items = self.get(id)
        del self._stored[id]
        for item in items:
            own = item["id"]
            if self._owners.get(own) == id:
                del self._owners[own]

    def conversation(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, oldest first. Raises ApiError if some of them are
        not stored."""
        found: list[Json] = []
        while id is not None:
            response, items = self.get(id, "previous_response_id")
            found = items + found
            id = response["previous_response_id"]
        return found

    def resolve(self, item: Json, at: str) -> Json:
        """The item that an item_reference means; any other item itself. Raises ApiError if it is
        not stored."""
        if item.get("type") != "item_reference":
            return item
        id = str(item.get("id"))
        owner = self._owners.get(id, f"item {id}")
        _, items = self.get(owner, f"{at}.id")
        return next(one for one in items if one["id"] == id)
