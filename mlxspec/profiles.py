"""The tables `[models."NAME"]` of the settings file: what a request to a model gets where it says
nothing itself, and settings of the model.

Rule: NAME is a served model, or NAME:PROFILE, which is a model of its own in the API: it has what
its model's table says, unless its own says otherwise, and shares the weights and the cache.
"""

import json
from collections.abc import Container, Iterable
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from typing import Any

from mlxspec.settings import ON_OFF, ConfigError, checked, format_value, limits, option
from mlxspec.types import MAX_PRIORITY, UNLIMITED, Sampling

OF_THE_MODEL = ("context", "draft")
unset = partial(option, None)


@dataclass(frozen=True, slots=True)
class Profile:
    """One table, and the name of the served model (`base`) once that is known. None: not set."""

    name: str = ""
    source: str = field(default="", compare=False)
    base: str = ""
    temperature: float | None = unset(
        "0: greedy.",
        2,
        type=float,
    )
    top_p: float | None = unset(
        "1: off.",
        1,
        type=float,
    )
    top_k: int | None = unset(
        "-1 and 0: off.",
        2**31 - 1,
        low=-1,
    )
    min_p: float | None = unset(
        "0: off.",
        1,
        type=float,
    )
    repetition_penalty: float | None = unset(
        "Counts the prompt too; 1: off.",
        10,
        low=0.01,
        type=float,
    )
    presence_penalty: float | None = unset(
        "0: off.",
        2,
        low=-2,
        type=float,
    )
    frequency_penalty: float | None = unset(
        "0: off.",
        2,
        low=-2,
        type=float,
    )
    seed: int | None = unset("For the same answer every time.", 2**63 - 1)
    max_tokens: int | None = unset(
        "Most tokens of an answer.",
        UNLIMITED,
        low=1,
        kind="tokens",
    )
    thinking: bool | None = unset(
        "Reasoning: by the template's `enable_thinking`; where it has none, off ends it where it"
        " begins.",
        choices=ON_OFF,
        type=bool,
    )
    effort: str | None = unset(
        "The template's `reasoning_effort`; where it has none, a thinking budget.",
        kind="word",
        type=str,
    )
    system: str | None = unset(
        "System text of a conversation that has none.",
        kind="text",
        type=str,
    )
    priority: int | None = unset(
        "Who goes first: the lowest.",
        MAX_PRIORITY,
        low=-MAX_PRIORITY,
    )
    context: int | None = unset("As the setting.", UNLIMITED, kind="tokens")
    draft: str | None = unset(
        "As the setting, for any model.",
        kind="model",
        type=str,
    )

    @property
    def values(self) -> dict[str, Any]:
        """What is set."""
        found = {name: getattr(self, name) for name in ROWS}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        """What is set, for people; of the system text only its length."""
        shown = {name: format_value(ROWS[name], value) for name, value in self.values.items()}
        if self.system:
            shown["system"] = f"of {len(self.system)} characters"
        return ", ".join(f"{name} {text}" for name, text in shown.items()) or "nothing of its own"

    def over(self, defaults: Sampling) -> Sampling:
        """A model's sampling defaults with what is set here."""
        names = {each.name for each in fields(Sampling)}
        return replace(defaults, **{name: v for name, v in self.values.items() if name in names})


ROWS: dict[str, Field[Any]] = {f.name: f for f in fields(Profile) if f.metadata}


def read_profiles(tables: Any, file: str) -> tuple[Profile, ...]:
    """The tables under `models` of a settings file. Raises ConfigError."""
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        fix = 'give tables such as [models."NAME"]'
        raise ConfigError(f"{file}: models = {tables!r} is not allowed; {fix}")
    profiles = []
    for name, table in tables.items():
        source = f'{file}: [models."{name}"]'
        if not name or name != name.strip() or not name.isprintable():
            fix = "give the name of a served model, or NAME:PROFILE"
            raise ConfigError(f"{file}: [models.{json.dumps(name)}] is not allowed; {fix}")
        values = {key: _value(key, value, source) for key, value in table.items()}
        profiles.append(Profile(name, source, **values))
    return tuple(profiles)


def _value(key: str, value: Any, source: str) -> Any:
    text = key in ROWS and not limits(ROWS[key])
    fix = "give text in quotes" if text and not isinstance(value, str) else ""
    if isinstance(value, dict):  # of [models.A.B]
        fix = "a name with a dot is in quotes"
    if fix:
        raise ConfigError(f"{source}: {key} = {value!r} is not allowed; {fix}")
    return checked(ROWS, key, value, source)


def profiles_of(tables: Iterable[Profile], models: Container[str]) -> dict[str, Profile]:
    """By name, with what its model's table adds; those of other models are left out. Raises
    ConfigError for what a named one cannot have."""
    known = {table.name: table for table in tables}
    found = {}
    for name, table in known.items():
        base = name.rpartition(":")[0]
        if name in models:
            found[name] = replace(table, base=name)
        elif base in models:
            profile = name.removeprefix(f"{base}:")
            if profile in ("", "latest") or "/" in profile:
                fix = f'the API does not tell it from {base}; give another, as in "{base}:code"'
                raise ConfigError(f"{table.source}: {profile!r} is no name of a profile: {fix}")
            for key in OF_THE_MODEL:
                if (value := getattr(table, key)) is not None:
                    why = f'{base} shares its weights and cache; set it in [models."{base}"]'
                    raise ConfigError(f"{table.source}: {key} = {value!r} is not allowed: {why}")
            inherited = known[base].values if base in known else {}
            found[name] = replace(table, base=base, **{**inherited, **table.values})
    return found
