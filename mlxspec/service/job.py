"""What the service runs: command, environment, address, made from the settings at hand.

Rule: no secret, for other programs can read a definition. What the settings' file says is not
repeated, so editing the file and `mlxspec service restart` is enough, but for the address, which
the system listens on.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlxspec.config import FILE, ConfigError, as_flags, data_dir, load

KEPT = (
    "MLXSPEC_CONFIG",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "XDG_CACHE_HOME",
)  # none holds a secret
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
GRACE_S = 20  # beyond `drain_s`: the last bytes, the step under way, the ledger


@dataclass(frozen=True, slots=True)
class Job:
    """`command` is absolute; `folder` is where it must run, "" where that does not matter; `exit_s`
    is how long it may take to end."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    host: str
    port: int
    exit_s: int
    folder: str = ""


def job_of(flags: Mapping[str, str | list[str] | None], env: Mapping[str, str]) -> Job:
    """The service for what `mlxspec serve` would heed here. Raises ConfigError."""
    kept = {name: env[name] for name in KEPT if env.get(name)}
    if file := kept.get("MLXSPEC_CONFIG"):
        kept["MLXSPEC_CONFIG"] = str(Path(file).expanduser().absolute())
    if "@" in kept.get("HF_ENDPOINT", ""):
        raise ConfigError(
            "HF_ENDPOINT: it names a user, and a definition is no place for a secret; fetch the model by"
            " mlxspec pull, and install without the variable"
        )
    config, base = load(flags, env), load({}, kept)
    if config.api_key != base.api_key:
        raise ConfigError(
            "api_key: a flag or variable does not reach the service, and its definition is no place for a"
            f" secret; write api_key into {kept.get('MLXSPEC_CONFIG', FILE)}, chmod 600"
        )
    if not config.port:
        raise ConfigError("port = 0: a service listens on one port; give another --port")
    config = replace(
        config,
        model=_rooted(config.model),
        others=tuple(map(_rooted, config.others)),
        draft=_rooted(config.draft),
        cache_dir=config.cache_dir and str(Path(config.cache_dir).expanduser().absolute()),
    )
    if config.others != base.others:  # they stand behind the model
        base = replace(base, model="")
    words = shlex.split(as_flags(config, base))
    return Job(
        (sys.executable, "-m", "mlxspec", "serve", *words),
        {"PATH": PATH, **kept},
        config.host,
        config.port,
        round(config.drain_s) + GRACE_S,
        checkout(),
    )


def checkout() -> str:
    """The folder in which Python finds a package that is not installed; else ""."""
    folder = data_dir("launchd").parent
    return "" if folder.name == "_data" else str(folder)


def _rooted(model: str) -> str:
    """A path, or the one in NAME=MODEL, made absolute: the service runs elsewhere."""
    name, sign, rest = model.partition("=")
    for before, path in (("", model), (name + sign, rest)):
        if path and Path(path).expanduser().exists():
            return before + str(Path(path).expanduser().absolute())
    return model
