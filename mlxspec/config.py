"""The settings. One table, the fields of `Config`, defines the file, the variables, the flags and
the docs.

Precedence: file < `MLXSPEC_*` variables < flags. Each value may be text; it is checked, and an
error names the source, the setting, the value and the allowed values.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from mlxspec.profiles import OF_THE_MODEL, Profile, read_profiles
from mlxspec.settings import ConfigError as ConfigError
from mlxspec.settings import checked, format_value, option

FILE = Path("~/.config/mlxspec/config.toml")
PREFIX = "MLXSPEC_"
ARGUMENTS = {"model": "MODEL", "others": "OTHERS"}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}  # names of this machine
BUILT_IN = "smollm2-135m-instruct"  # the model if the settings name none


def check_host(host: str, source: str) -> str:
    """`host`, which must be an address or a host name: for a socket, "" would be any address.
    Raises ConfigError."""
    if re.fullmatch(r"[\w.-]+", host):
        return host
    try:
        ip_address(host)
    except ValueError as error:
        fix = "give an address, such as 127.0.0.1, or a host name"
        raise ConfigError(f"{source}: host = {host!r} is not allowed; {fix}") from error
    return host


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. With the defaults the built-in model is served; 0 and "" mean that the value is
    derived at start."""

    model: str = option(
        "",
        "Model directory in mlx-lm's format, or Hugging Face id; empty: the built-in model,"
        " SmolLM2-135M-Instruct, which is too small for real use.",
        kind="model",
    )
    others: tuple[str, ...] = option(
        (),
        "More models, each loaded on its first request; NAME=MODEL sets the name.",
        kind="model",
    )
    name: str = option(
        "", "Name of the (first) model in the API; empty: the model's own name.", kind="name"
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0: all networks, then set api_key too.",
        kind="address",
    )
    port: int = option(8080, "Port to listen on; 0: any free port.", 65535)
    api_key: str = option(
        "",
        "API key that clients must send; empty: no key.",
        secret=True,
        kind="key",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names allowed in `Host` and `Origin` headers, in addition to the loopback names.",
        kind="name,...",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages and apps that may use the server, such as `app://obsidian.md`, in"
        " addition to pages of allowed hosts.",
        kind="origin,...",
    )
    pin: tuple[str, ...] = option(
        (),
        "Names of models that stay in memory: never unloaded to make room or when idle.",
        kind="name,...",
    )
    idle_ttl: float = option(
        1800.0,
        "Idle seconds after which a model that is not pinned is unloaded; 0: never.",
        10_000_000,
        kind="seconds",
    )
    ranks: int = option(
        1,
        "Processes on this machine that split the model, for tests; for several Macs see"
        " docs/ranks.md.",
        16,
        low=1,
    )
    max_sequences: int = option(16, "Maximum number of sequences in a batch.", 256, low=1)
    max_queue: int = option(
        64, "Maximum number of waiting requests; more get status 429.", 4096, low=1
    )
    context: int = option(
        0,
        "Context length (prompt and output) in tokens; 0: the model's.",
        2**24,
        kind="tokens",
    )
    block_size: int = option(32, "Tokens in a KV block.", 512, low=1, kind="tokens")
    kv_blocks: int = option(0, "Number of KV blocks; 0: by free memory.", 2**24, kind="blocks")
    memory_gb: float = option(
        0.0,
        "Memory limit in GiB for weights, caches and headroom; 0: all free memory.",
        65_536,
        kind="GiB",
    )
    wired: bool = option(
        False,
        "Wire the first model's weights and caches, so that macOS never pages them out; may cause a"
        " kernel panic.",
    )
    kv_bits: int = option(
        0,
        "Bits per value of the KV cache; 0: unquantized, in the model's own precision.",
        choices=(0, 4, 8),
    )
    layout: str = option(
        "auto",
        "Batch layout; auto picks the fastest one that matches mlx-lm.",
        choices=("auto", "rows", "rect", "gather", "solo"),
        kind="layout",
    )
    prefill_budget: int = option(
        0,
        "Prompt tokens computed in one step; 0: chosen by measured time.",
        65_536,
        kind="tokens",
    )
    decode_gap_ms: int = option(
        250,
        "How long, in ms, a prompt may delay running answers; exceeded where keeping it would cost"
        " over 40 % of prefill speed; unused if prefill_budget is set.",
        60_000,
        low=1,
        kind="ms",
    )
    strict_model_names: bool = option(
        False,
        "Refuse the model names claude-*, gpt-* and text-embedding-*; off: the first model answers"
        " for them.",
    )
    strict_content: bool = option(
        False,
        "Refuse files, and images that the model cannot see; off: text files are read, other"
        " content is replaced by a note.",
    )
    vision: bool = option(
        True,
        "Let models see images; auto: those with a vision tower that can be read; off: saves its"
        " memory.",
        choices=("auto", "off"),
    )
    max_image_pixels: int = option(
        2_100_000,
        "Most pixels of an image that the model gets; larger ones are scaled down.",
        2**26,
        low=4096,
        kind="pixels",
    )
    fetch_images: bool = option(
        False,
        "Fetch images that requests name by http(s) URLs, from public addresses alone.",
    )
    loop_guard: bool = option(
        True,
        "End an answer that repeats itself exactly, and reasoning that does. A request may turn it"
        " off.",
    )
    speculate: bool = option(True, "Speculative decoding, where it pays.")
    exact: str = option(
        "auto",
        "Batch invariance: a token's logits are bit-identical whatever else is in the batch. auto:"
        " if it costs at most 5 %, as the first start measures; on: at any cost; off: not.",
        choices=("auto", "on", "off"),
    )
    kernels: bool = option(
        True,
        "Custom Metal kernels; auto: those that are correct and faster on this machine.",
        choices=("auto", "off"),
    )
    draft: str = option(
        "",
        "Head or small model that drafts for the (first) model, a directory or Hugging Face id;"
        " empty: the model's own head, if it has one; off: neither.",
        kind="model",
    )
    draft_depth: int = option(
        0,
        "Fixed draft length of the head or small model; disables other drafters. 0: chosen by"
        " measured speed.",
        8,
        kind="tokens",
    )
    thinking_budget: int | None = option(
        None,
        "Maximum reasoning tokens before the end marker is forced; empty: no limit. A request may"
        " ask for fewer.",
        2**24,
        kind="tokens",
    )
    max_body_mb: int = option(32, "Largest request body, in MiB.", 1024, low=1, kind="MiB")
    keepalive_s: float = option(
        5.0,
        "Seconds of silence after which a stream sends a keep-alive.",
        15,
        low=0.1,
        kind="seconds",
    )
    drain_s: float = option(
        30.0, "Seconds for running requests to finish at shutdown.", 3600, kind="seconds"
    )
    cache_dir: str = option(
        "",
        "Directory for models, measurements and the prefix cache; empty: the platform's default.",
        kind="dir",
    )
    cache_gb: float = option(
        10.0,
        "Disk space for the prefix cache in GiB; 0: in memory only.",
        2**20,
        kind="GiB",
    )
    record: bool = option(
        False,
        "Keep the token ids of finished answers in the cache directory, as training data for"
        " `mlxspec train`.",
    )
    log_level: str = option(
        "info", "Log level.", choices=("debug", "info", "warning", "error"), kind="level"
    )

    profiles: tuple[Profile, ...] = ()  # the file's tables of models

    @property
    def disk_bytes(self) -> int:
        """`cache_gb` in bytes."""
        return int(self.cache_gb * 2**30)

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * 2**30)


DEFAULTS = Config()
TABLE: dict[str, Field[Any]] = {f.name: f for f in fields(Config) if f.metadata}


def load_config(
    flags: Mapping[str, str | Sequence[str] | None],
    env: Mapping[str, str] = os.environ,
) -> Config:
    """The settings from file, variables and flags. A flag of None or [] and an empty variable count
    as unset.

    A file named by `$MLXSPEC_CONFIG` must exist; the default file need not. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    profiles: tuple[Profile, ...] = ()
    custom = env.get("MLXSPEC_CONFIG")
    file = Path(custom or FILE).expanduser()
    if custom or file.exists():
        for name, value in _read(file).items():
            if name == "models":
                profiles = read_profiles(value, str(file))
            else:
                values[name] = _checked(name, value, str(file))
    later = {}
    for variable, text in env.items():
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and text and name != "config":
            later[name] = _checked(name, text, variable)
    for name, value in flags.items():
        if value not in (None, []):
            later[name] = _checked(name, value, flag(name))
    unset: dict[str, Any] = dict.fromkeys(later.keys() & OF_THE_MODEL)  # in the tables too
    profiles = tuple(replace(profile, **unset) for profile in profiles)
    return Config(**values | later, profiles=profiles)


def flag(name: str) -> str:
    """The setting on the command line: an argument for the models, a flag for all others."""
    return ARGUMENTS.get(name) or "--" + name.replace("_", "-")


def as_flags(config: Config, base: Config = DEFAULTS) -> str:
    """The command-line words for the settings that differ from `base`. Secrets are left out."""
    words: list[str] = []
    for name, row in TABLE.items():
        value = getattr(config, name)
        if row.metadata["secret"] or value == getattr(base, name):
            continue
        parts = value if isinstance(value, tuple) else [value]
        if name not in ARGUMENTS:
            parts = [flag(name), format_value(row, value)]
        elif name == "others" and not config.model:  # the first word would be the model
            parts = [BUILT_IN, *parts]
        words += parts
    return shlex.join(words)


def data_dir(name: str) -> Path:
    """The directory `models`, `metal` or `launchd` of the installed wheel or of the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name


def url_of(host: str, port: int) -> str:
    """The URL at which a client on this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def split_name(model: str) -> tuple[str, str]:
    """(NAME, MODEL) of NAME=MODEL; ("", model) of other text and of an existing path."""
    name, sign, rest = model.partition("=")
    if sign and name and "/" not in name and not os.path.exists(os.path.expanduser(model)):
        return name, rest
    return "", model


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # missing, not UTF-8, or not TOML
        fix = "correct the file or unset MLXSPEC_CONFIG"
        raise ConfigError(f"{file}: {error}; {fix}") from error


def _checked(name: str, value: Any, source: str) -> Any:
    """`value`, which may be text, in the type of the setting. Raises ConfigError."""
    if name == "host":  # empty where a shell's variable is not set
        return check_host(str(value) or DEFAULTS.host, source)
    return checked(TABLE, name, value, source)
