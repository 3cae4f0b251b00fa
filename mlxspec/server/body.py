"""Parses request bodies: JSON into a pydantic model, every problem as an ApiError 400.

Rule: an unsupported field that would change the answer is refused by name; any other unknown field
is ignored and reported in the response header `x-mlxspec-ignored`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from mlxspec.server.errors import ApiError, unfit
from mlxspec.types import shown

MAX_FIELDS = 1000  # at the top level of a body
MAX_VALUES = 1_000_000  # in a body, by its commas: no context has more tokens than that
MAX_ITEMS = 10_000  # messages, input items or tools
MAX_STOPS = 16
MAX_STOP_CHARS = 1000

FIRST = Field(fail_fast=True)  # do not describe a million errors in one list
Items = Annotated[list[Any], Field(max_length=MAX_ITEMS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
]
Refused = Mapping[str, tuple[Any, str]]


class Strict(BaseModel):
    """A body, or an object in one, without type conversion; a field that is null counts as missing.
    `refused` maps the name of each unsupported field to the value that has no effect, which is
    accepted, and to what to do instead."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: one for name, one in value.items() if one is not None}
        return value


Body = TypeVar("Body", bound=Strict)


def parse(kind: type[Body], data: bytes) -> tuple[Body, list[str]]:
    """The validated body and the names of its unknown fields. Raises ApiError 400."""
    if data.count(b",") > MAX_VALUES:
        raise unfit("body", f"the body holds more than {MAX_VALUES} values; send fewer")
    try:
        raw = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(raw, dict) or len(raw) > MAX_FIELDS:
        message = f"the body is not a JSON object; send one with at most {MAX_FIELDS} fields"
        raise ApiError(400, message, code="invalid_json")
    for name, (default, hint) in kind.refused.items():
        value = raw.get(name)
        if value not in (None, default) and name not in kind.model_fields:
            message = f"{name} = {shown(value)} is not supported: {hint}"
            raise unfit(name, message, "unsupported_parameter")
    return validate(kind, raw)


def validate(kind: type[Body], given: Mapping[str, Any]) -> tuple[Body, list[str]]:
    """As `parse`, for an object that was read already."""
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        where = path[1:200]
        if first["type"] == "missing":
            raise unfit(where, f"{where} is missing; send it") from error
        problem = first["msg"].removeprefix("Value error, ")
        raise unfit(where, f"{where} = {shown(first['input'])}: {problem}") from error
    return body, [name for name in _unknown(body) if name not in kind.refused]


def _unknown(body: Strict, prefix: str = "") -> list[str]:
    names = [prefix + name for name in body.model_extra or ()]
    for name, value in body:
        if isinstance(value, Strict):
            names += _unknown(value, f"{prefix}{name}.")
    return names
