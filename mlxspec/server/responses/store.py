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
        size = len(json.dumps([response, items]))
        self._stored[response["id"]] = response, items, size
        while sum(size for *_, size in self._stored.values()) > self.max_bytes:
            self._stored.popitem(last=False)

    def get(self, id: str) -> tuple[Json, list[Json]]:
        """A response, and all items of its conversation. Raises ApiError 404."""
        if id not in self._stored:
            raise _missing(id)
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
            error = _missing(id, "previous_response_id")
            error.status, error.code = 400, "previous_response_not_found"
            raise error
        _, items = self.get(id)
        return items

    def resolve(self, items: list[Json]) -> list[Json]:
        """The items, each item_reference replaced by the item it names. Raises ApiError 404."""
        stored = {each["id"]: each for _, kept, _ in self._stored.values() for each in kept}
        resolved = []
        for i, item in enumerate(items):
            if item.get("type") == "item_reference":
                id = str(item.get("id"))
                if id not in stored:
                    raise _missing(id, f"input[{i}].id")
                item = stored[id]
            resolved.append(item)
        return resolved


def _missing(id: str, param: str | None = None) -> ApiError:
    why = f"{id[:200]!r} is not stored, or no longer; send the conversation as input"
    return ApiError(404, why, param, "not_found")
