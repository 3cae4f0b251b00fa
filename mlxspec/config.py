"""The settings: one table, the fields of `Config`, makes the file, the variables, the flags and the
docs.

File < `MLXSPEC_*` < flags. Values of variables and flags are text and are parsed here, so that a
wrong one reads the same wherever it was set: source, field, value, mend.
"""

import difflib
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", str, int, float, tuple[str, ...])

FILE = Path("~/.config/mlxspec/config.toml")
PREFIX = "MLXSPEC_"
ARGUMENTS = {"model": "MODEL", "others": "OTHERS"}
KINDS = {str: "text", int: "a whole number", float: "a number", tuple: "a list of texts"}


class ConfigError(ValueError):
    """A setting that cannot be used. The message names its source, field and value, and the
    mend."""


def option(
    default: T,
    help: str,
    *,
    unit: str = "",
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[T, ...] = (),
    secret: bool = False,
) -> T:
    """One row of the table. `low` and `high` are inclusive; a `secret` value is never printed."""
    meta = {
        "help": help,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "secret": secret,
    }
    value: T = field(default=default, metadata=meta, repr=not secret)
    return value


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting. The defaults serve the embedded model; 0 and "" mean: derived when the server
    starts."""

    model: str = option("", "Directory in mlx-lm's format, or hub id; empty: the embedded model.")
    others: tuple[str, ...] = option(
        (), "More models, each loaded when it is first asked for by name; NAME=MODEL names one."
    )
    name: str = option("", "Name under which the (first) model is served; empty: the model's own.")
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "Port to listen on; 0: any free one.", low=0, high=65535)
    api_key: str = option("", "Key that clients must send; empty: none is asked for.", secret=True)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names that a `Host` or `Origin` header may carry, besides those of this machine's loopback.",
    )
    pin: tuple[str, ...] = option((), "Names of models that, once loaded, make room for no other.")
    idle_ttl: float = option(
        1800.0,
        "Idle time after which a model that is not pinned is unloaded; 0: never.",
        unit="s",
        low=0,
        high=10**7,
    )
    max_sequences: int = option(16, "Sequences that share a step.", low=1, high=256)
    max_queue: int = option(
        64, "Requests that may wait; more are refused with 429.", low=1, high=4096
    )
    context: int = option(
        0, "Longest prompt and output; 0: the model's.", unit="tokens", low=0, high=2**24
    )
    block_size: int = option(32, "Size of a KV block.", unit="tokens", low=1, high=512)
    kv_blocks: int = option(
        0, "KV blocks; 0: from the free memory.", unit="blocks", low=0, high=2**24
    )
    memory_gb: float = option(
        0.0,
        "Memory for weights, caches and headroom; 0: what is free.",
        unit="GiB",
        low=0,
        high=2**16,
    )
    kv_bits: int = option(
        0,
        "Bits of each value in the KV blocks; 0: as the model computes it.",
        low=0,
        high=8,
        choices=(0, 4, 8),
    )
    layout: str = option(
        "auto",
        "How a step is laid out; auto: found at warm-up.",
        choices=("auto", "rows", "rect", "gather", "solo"),
    )
    prefill_budget: int = option(
        0, "Prompt tokens computed in one step; 0: by time.", unit="rows", low=0, high=2**16
    )
    decode_gap_ms: int = option(
        250,
        "Longest wait of a running answer for another's prompt to aim at.",
        unit="ms",
        low=1,
        high=60_000,
    )
    strict_model_names: str = option(
        "off",
        "Whether claude-* and gpt-* are refused; else: the first model.",
        choices=("on", "off"),
    )
    speculate: str = option("on", "Whether to draft, where it pays.", choices=("on", "off"))
    kernels: str = option(
        "auto",
        "Whether own Metal kernels run, each where it was proven on this machine; off: MLX's alone.",
        choices=("auto", "off"),
    )
    draft: str = option(
        "", "Small model that drafts for the (first) model; empty: the card's, or none."
    )
    max_body_mb: int = option(32, "Largest request body.", unit="MB", low=1, high=1024)
    keepalive_s: float = option(
        5.0, "Pause after which a silent stream gets a keep-alive line.", unit="s", low=0.1, high=60
    )
    drain_s: float = option(
        30.0, "Time that running answers get at shutdown.", unit="s", low=0, high=3600
    )
    cache_dir: str = option(
        "",
        "Directory for converted models and, in `prompts`, the prompt cache; empty: the platform's own.",
    )
    cache_gb: float = option(
        10.0, "Disk space for the prompt cache; 0: none.", unit="GB", low=0, high=2**20
    )
    log_level: str = option(
        "info", "What is logged.", choices=("debug", "info", "warning", "error")
    )

    @property
    def disk_bytes(self) -> int:
        """`cache_gb` in bytes."""
        return int(self.cache_gb * 2**30)

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * 2**30)


TABLE: dict[str, Field[Any]] = {f.name: f for f in fields(Config)}


def load(
    flags: Mapping[str, str | Sequence[str] | None],
    env: Mapping[str, str],
    path: Path | None = None,
) -> Config:
    """The settings from file, variables and flags. A flag that is None or [], an empty variable:
    unset.

    `path` or `$MLXSPEC_CONFIG` names a file that must exist; the default file need not. Raises
    ConfigError.
    """
    values = _from_file(path, env)
    for key, text in env.items():
        name = key.removeprefix(PREFIX).lower()
        if key.startswith(PREFIX) and text and name != "config":
            values[name] = _parse(_known(name, key), text, key)
    for name, given in flags.items():
        if isinstance(given, str):
            values[name] = _parse(_known(name, flag(name)), given, flag(name))
        elif given:
            values[name] = tuple(given)
    return Config(**values)


def flag(name: str) -> str:
    """How the command line spells a setting: the models are its arguments, all else are flags."""
    return ARGUMENTS.get(name) or "--" + name.replace("_", "-")


def kind(row: Field[Any]) -> type:
    return type(row.default)


def as_flags(config: Config, base: Config | None = None) -> str:
    """The settings that differ from those of `base`, the defaults, as the flags that would set
    them. Secrets are left out."""
    base = base or Config()
    words = []
    for name, row in TABLE.items():
        value = getattr(config, name)
        if value != getattr(base, name) and not row.metadata["secret"]:
            words += [] if name in ARGUMENTS else [flag(name)]
            if name == "others":
                words += value
            else:
                words.append(",".join(value) if kind(row) is tuple else str(value))
    return shlex.join(words)


def data_dir(name: str) -> Path:
    """`models`, `metal` or `launchd`: in the installed wheel, or else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name


def url_of(host: str, port: int) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def limits(row: Field[Any]) -> str:
    """What a row admits beyond its type: its choices or its range, in its unit. Empty where
    anything goes."""
    meta = row.metadata
    if meta["choices"]:
        return "one of " + ", ".join(map(str, meta["choices"]))
    if meta["high"] == math.inf:
        return ""
    return f"{meta['low']} to {meta['high']} {meta['unit']}".strip()


def _known(name: str, source: str) -> Field[Any]:
    if name in TABLE:
        return TABLE[name]
    near = difflib.get_close_matches(name, list(TABLE), n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all"
    raise ConfigError(f"{source}: there is no setting {name!r}; {hint}")


def _from_file(path: Path | None, env: Mapping[str, str]) -> dict[str, Any]:
    named = path or (Path(env["MLXSPEC_CONFIG"]) if env.get("MLXSPEC_CONFIG") else None)
    file = (named or FILE).expanduser()
    try:
        text = file.read_text("utf-8")
        found = tomllib.loads(text)
    except FileNotFoundError as error:
        if named is None:
            return {}
        raise ConfigError(
            f"{file}: there is no such file; make it or unset MLXSPEC_CONFIG"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; make it a file that you may read") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, or not TOML: tomllib's message has the line
        raise ConfigError(f"{file}: not TOML: {error}; mend that line") from error
    values = {}
    for name, value in found.items():
        source = f"{file}:{_line(text, name)}"
        row = _known(name, source)
        if kind(row) is float and type(value) is int:
            value = float(value)
        if (
            kind(row) is tuple
            and isinstance(value, list)
            and all(isinstance(x, str) for x in value)
        ):
            value = tuple(value)
        if type(value) is not kind(row):
            raise _refusal(row, value, source, f"is not {KINDS[kind(row)]}")
        values[name] = _checked(row, value, source)
    return values


def _line(text: str, name: str) -> int:
    """The line of the file where a key or a table of this name stands, for messages."""
    at = re.search(
        rf"""^[ \t]*\[*[ \t]*["']?{re.escape(name)}["']?[ \t]*[.=\]]""", text, re.MULTILINE
    )
    return text.count("\n", 0, at.start()) + 1 if at else 1


def _parse(row: Field[Any], text: str, source: str) -> Any:
    try:
        if kind(row) is tuple:
            value: Any = tuple(part.strip() for part in text.split(",") if part.strip())
        else:
            value = kind(row)(text)
    except ValueError:
        raise _refusal(row, text, source, f"is not {KINDS[kind(row)]}") from None
    return _checked(row, value, source)


def _checked(row: Field[Any], value: Any, source: str) -> Any:
    meta = row.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise _refusal(row, value, source, "is not a choice")
    if kind(row) in (int, float) and not meta["low"] <= value <= meta["high"]:  # nan fails too
        raise _refusal(row, value, source, "is out of range")
    return value


def _refusal(row: Field[Any], value: Any, source: str, why: str) -> ConfigError:
    shown = "the value" if row.metadata["secret"] else repr(value)
    mend = limits(row) or KINDS[kind(row)]
    return ConfigError(f"{source}: {row.name} = {shown} {why}; give {mend}")
