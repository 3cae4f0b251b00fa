"""The rows of a table of settings: what each may be, how it is written, and the check of a value.

Rule: a value may be text; an error names the source, the setting, the value and what is allowed.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, field
from typing import Any

from mlxspec.types import UserError

ON_OFF = ("on", "off")


class ConfigError(UserError):
    """A setting that cannot be used. The message names its source, name and value, and the fix."""


def option(
    default: Any,
    help: str,
    high: float = 0,
    *,
    low: float = 0,
    choices: tuple[Any, ...] = (),
    kind: str = "",
    secret: bool = False,
    type: type | None = None,
) -> Any:
    """One row of the table. `low` and `high` bound a number, inclusively; `choices` of a bool
    are the words for True and False; `kind` names a value, by its unit for example, if choices and
    type do not; a `secret` value is never printed. `type` is that of a value where the default is
    None, if not int."""
    if isinstance(default, bool):
        choices = choices or ON_OFF
    return field(
        default=default,
        repr=not secret,
        metadata=dict(
            help=help,
            low=low,
            high=high,
            choices=choices,
            kind=kind,
            secret=secret,
            type=type or (int if default is None else default.__class__),
        ),
    )


def kind_of(row: Field[Any]) -> str:
    """A word for a value of the setting: its choices, its unit or its type."""
    meta = row.metadata
    return meta["kind"] or "|".join(map(str, meta["choices"])) or str(meta["type"].__name__)


def format_value(row: Field[Any], value: Any) -> str:
    """A value of the setting as a user would write it; empty if it is not set."""
    match value:
        case None:
            return ""
        case bool():
            return str(row.metadata["choices"][not value])
        case tuple():
            return ",".join(value)
        case float():
            return str(value).removesuffix(".0")
    return str(value)


def limits(row: Field[Any]) -> str:
    """The choices or the range of a setting; empty if anything is allowed."""
    meta = row.metadata
    if meta["choices"]:
        return "one of " + ", ".join(map(str, meta["choices"]))
    return f"{meta['low']} to {meta['high']}" if meta["high"] else ""


def checked(table: Mapping[str, Field[Any]], name: str, value: Any, source: str) -> Any:
    """`value`, which may be text, in the type of the row `name`. Raises ConfigError."""
    if name not in table:
        raise ConfigError(
            f"{source}: there is no setting {name!r}; docs/configuration.md lists them all",
        )
    row = table[name]
    kind, choices, text = row.metadata["type"], row.metadata["choices"], str(value)
    if kind is tuple:
        parts = value if isinstance(value, list) else text.split(",")
        return tuple(filter(None, [str(part).strip() for part in parts]))
    if not limits(row):
        return text
    if row.default is None and not text:
        return None
    with suppress(ValueError):
        if kind is bool:
            return not choices.index(text)
        number = kind(text)  # "True" is none
        if number in choices:
            return number
        if not choices and row.metadata["low"] <= number <= row.metadata["high"]:  # nor is nan
            return number
    raise ConfigError(f"{source}: {name} = {value!r:.80} is not allowed; give {limits(row)}")
