"""`mlxspec doctor`: checks of the machine, the installation, the server, the model and the kernels.

Rule: it starts, downloads and writes nothing, and reads no weights except their headers.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from mlxspec import __version__, blas
from mlxspec.commands.models import damage, tools_of
from mlxspec.commands.options import AsJson, Model, log_to_stderr
from mlxspec.config import Config, ConfigError, as_flags, load_config, url_of
from mlxspec.files import format_size, weight_bytes
from mlxspec.profiles import profiles_of
from mlxspec.service.launchd import installed_url
from mlxspec.service.status import get_status
from mlxspec.types import UserError, printable


@dataclass(frozen=True)
class Check:
    """One line of the report; if it is broken, the text ends with the fix."""

    name: str
    text: str
    broken: bool = False


def doctor(model: Model = None, as_json: AsJson = False) -> None:
    """Check the machine, the installation, the model and the service, and say what to fix.

    Exits with 1 if something is broken.
    """
    log_to_stderr("error")
    checks = list(examine(model))
    broken = any(check.broken for check in checks)
    if as_json:
        report = [asdict(check) for check in checks]
        print(json.dumps({"broken": broken, "checks": report}, indent=2))
        sys.exit(broken)
    for check in checks:
        mark = "broken" if check.broken else "ok"
        # The report may be sent to others.
        text = printable(check.text).replace(str(Path.home()), "~")
        print(f"{mark:6} {check.name:9} {text}")
    sys.exit(broken)


def examine(model: str | None) -> Iterator[Check]:
    """All checks, in the order in which they are shown."""
    try:
        config = load_config({"model": model})
        yield Check("settings", as_flags(config) or "defaults")
    except ConfigError as error:
        yield Check("settings", str(error), broken=True)
        config = Config(model=model or "")
    yield Check("system", f"{platform.platform()}, Python {platform.python_version()}")
    yield _server(config)
    try:
        yield from _installation(config)
        yield from _profiles(config)
        yield from _models(config)
        yield from _kernels(config)
    except ImportError as error:
        yield Check("install", f"{error}; install mlxspec again", broken=True)
    except UserError as error:
        yield Check("system", str(error), broken=True)


def _server(config: Config) -> Check:
    """The service, where one is installed, else the server at the settings' address."""
    url = installed_url() or url_of(config.host, config.port)
    now = get_status(url, config.api_key)
    if now.note:
        text = f"{url}: {now.note}; see mlxspec service logs, then run: mlxspec service restart"
        return Check("server", text, broken=True)
    return Check("server", now.why or f"{url}: {now.state}", broken=now.state == "unwell")


def _installation(config: Config) -> Iterator[Check]:
    """Checks that need mlx: versions, memory, Metal or BLAS, and the cache."""
    library = blas.load()
    from mlxspec.engine import memory
    from mlxspec.kernels.verify import machine, unavailable
    from mlxspec.model.hub import cache_of

    packages = f"mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
    yield Check("versions", f"mlxspec {__version__} {packages}")
    yield Check("machine", f"{machine()['chip']}, {format_size(memory.total())} memory")
    if sys.platform != "darwin":
        slow = "MLX's own: 10 to 30 times slower; the log line above says why"
        yield Check("blas", library.name if library else slow, broken=not library)
    elif reason := unavailable():
        yield Check("metal", f"{reason}; unset MLX_ variables that hide the GPU", broken=True)
    folder = cache_of(config).absolute()
    while not os.path.exists(folder):  # Path.exists raises where a folder may not be searched
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        yield Check("cache", str(cache_of(config)))
    else:
        yield Check("cache", f"{folder} is not writable; set cache_dir to another", broken=True)


def _profiles(config: Config) -> Iterator[Check]:
    """The tables of models in the settings file."""
    from mlxspec.load.resolve import served_names

    try:
        found = profiles_of(config.profiles, served_names(config))
    except ConfigError as error:
        yield Check("profile", str(error), broken=True)
        return
    for table in config.profiles:
        text = f"{table.source} is of no model of these settings"
        if table.name in found:
            text = f"{table.name}: {found[table.name]}"
        yield Check("profile", text)


def _models(config: Config) -> Iterator[Check]:
    """Each model that `serve` would load, with its draft model."""
    from mlxspec.load.loader import room
    from mlxspec.load.resolve import models_of, on_disk

    limit = room(config)
    for name in models_of(config):
        try:
            path = on_disk(name, config)
        except UserError as error:
            yield Check("model", str(error), broken=True)
            continue
        if not path:
            yield Check("model", f"{name}: not downloaded; run: mlxspec pull")
            continue
        size = weight_bytes(path)
        text = f"{name}: {format_size(size)} in {path}"
        flaws, large = damage(path), size > limit
        if flaws:
            text = f"{name}: {'; '.join(flaws)}; remove the directory and run: mlxspec pull"
        elif large:
            text += f" do not fit into {format_size(limit)} of memory; give a smaller model"
        yield Check("model", text, broken=large or bool(flaws))
        if not flaws:
            for check, found in _found_earlier(path, config).items():
                yield Check(check, f"{name}: {found}")
        if not flaws and any(path.glob("tokenizer*")):  # a head has none
            yield Check("tools", f"{name}: {tools_of(path)}")


def _found_earlier(path: Path, config: Config) -> dict[str, str]:
    """What earlier starts of a model found, by check."""
    from mlxspec.load.vision import open_tower, tower_bytes
    from mlxspec.load.warmup import WarmupCache, cache_file
    from mlxspec.model.parallel import ALONE

    known = WarmupCache.load(cache_file(path, config, ALONE))
    found = {}
    if known and known.exact:
        found["exact"] = known.exact.describe(config.exact)
    if tower := open_tower(path, config, ALONE):
        sees = f"seen by a tower of {format_size(tower_bytes(tower))} with its cache"
        if known is None or known.blind is None:
            sees += ", not tried yet"
        found["images"] = f"not seen: {known.blind}" if known and known.blind else sees
    return found


def _kernels(config: Config) -> Iterator[Check]:
    """The verdicts on our kernels on this machine."""
    from mlxspec.kernels.verify import VerdictFile
    from mlxspec.load.loader import KERNELS_DIR
    from mlxspec.model.hub import cache_of

    if not config.kernels:
        yield Check("kernels", "off by your settings")
        return
    verdicts = VerdictFile(cache_of(config) / KERNELS_DIR).load()
    if not verdicts:
        yield Check("kernels", "not tested on this machine yet; serve does that on a Mac")
    for name, verdict in verdicts.items():
        state = f"not used: {verdict.reason}"
        if verdict.variant:
            state = f"used for {verdict.least} to {verdict.most} rows"
        yield Check("kernels", f"{name}: {state}")
