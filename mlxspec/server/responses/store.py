"""The stored responses, in memory: the most recently used ones, within a bound of bytes.

Rule: a response is stored with its whole conversation, so no other one is needed to continue it.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, field

from mlxspec.server.errors import ApiError, Json

MAX_BYTES = 1 << 26  # of all stored responses, as JSON


@dataclass(slots=True)
class Store:
    """Responses by id, least recently used first, each with all items of its conversation, its own
    output last, and their size."""

    max_bytes: int = MAX_BYTES
    _stored: OrderedDict[str, tuple[Json, list[Json], int]] = field(default_factory=OrderedDict)

    def add(self, response: Json, items: list[Json]) -> None:
        """`items` are those before the response's output."""
        items = items + response["output"]
        self._stored[response["id"]] = response, items, len(json.dumps([response, items]))
        while sum(size for *_, size in self._stored.values()) > self.max_bytes:
            self._stored.popitem(last=False)

    def get(self, id: str) -> tuple[Json, list[Json]]:
        """A response, and all items of its conversation. Raises ApiError 404."""
        if id not in self._stored:
            raise _missing(id, 404, None, "not_found")
        self._stored.move_to_end(id)
        response, items, _ = self._stored[id]
        return response, items

    def delete(self, id: str) -> None:
        """Raises ApiError 404."""
        self.get(id)
        del self._stored[id]

    def conversation(self, id: str | None) -> list[Json]:
        """All items up to the end of a response, oldest first. Raises ApiError 400."""
        if id is None:
            return []
        if id not in self._stored:
            raise _missing(id, 400, "previous_response_id", "previous_response_not_found")
        return self.get(id)[1]

    def resolve(self, items: list[Json]) -> list[Json]:
        """The items, with those that an item_reference means in its place. Raises ApiError 404."""
        stored: dict[str, Json] = {}
        resolved = []
        for i, item in enumerate(items):
            if item.get("type") == "item_reference":
                if not stored:
                    for _, all_items, _ in self._stored.values():
                        stored |= {one["id"]: one for one in all_items}
                id = str(item.get("id"))
                if id not in stored:
                    raise _missing(id, 404, f"input[{i}].id", "not_found")
                item = stored[id]
            resolved.append(item)
        return resolved


def _missing(id: str, status: int, param: str | None, code: str) -> ApiError:
    why = f"{id[:200]!r} is not stored, or no longer; send the conversation as input"
    return ApiError(status, why, param, code)
