"""`mlxspec doctor`: checks of the machine, the installation, the server, the model and the kernels.

Rule: it only looks. It starts, downloads and writes nothing, and reads no weights beyond headers.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mlxspec import __version__, blas
from mlxspec.commands.models import damage, weight_bytes
from mlxspec.config import FILE, Config, ConfigError, data_dir, load, url_of
from mlxspec.files import format_size
from mlxspec.service.launchd import installed_url
from mlxspec.service.status import get_status, headline
from mlxspec.types import UserError

MACOS = 14  # the first that MLX's wheels run on


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; the text of a broken one ends with the fix."""

    name: str
    text: str
    broken: bool = False


def doctor(flags: Mapping[str, str | None], env: Mapping[str, str], as_json: bool) -> int:
    """Print the report. Exit status: 0, or 1 if something is broken."""
    checks = list(examine(flags, env))
    broken = any(check.broken for check in checks)
    if as_json:
        report = {"broken": broken, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        console, home = Console(markup=False, highlight=False), str(Path.home())
        for check in checks:
            mark = ("broken ", "bold red") if check.broken else ("ok     ", "green")
            text = check.text.replace(home, "~")  # the report may be sent to others
            console.print(Text.assemble(mark, f"{check.name:9} {text}"), soft_wrap=True)
    return int(broken)


def examine(flags: Mapping[str, str | None], env: Mapping[str, str]) -> Iterator[Check]:
    """All checks, in the order in which they are shown."""
    file = Path(env.get("MLXSPEC_CONFIG") or FILE).expanduser()
    try:
        config = load(flags, env)
        yield Check("settings", f"{file}" if file.is_file() else f"{file} (missing: defaults)")
    except ConfigError as error:
        yield Check("settings", str(error), broken=True)
        config = Config(model=flags["model"] or "", cache_dir=flags["cache_dir"] or "")
    yield from _system()
    yield from _servers(config)
    try:
        yield from _installation(config)
    except ImportError as error:
        yield Check("install", f"{error}; install mlxspec again", broken=True)


def _system() -> Iterator[Check]:
    mac, arch = platform.mac_ver()[0], platform.machine()
    text = f"macOS {mac} {arch}" if mac else f"{platform.system()} {arch}"
    if mac and int(mac.partition(".")[0]) < MACOS:
        yield Check("system", f"{text}: MLX needs macOS {MACOS}; update macOS", broken=True)
    elif sys.platform == "darwin" and arch != "arm64":
        yield Check("system", f"{text}: install a Python for arm64", broken=True)
    else:
        yield Check("system", text)


def _installation(config: Config) -> Iterator[Check]:
    """What needs mlx: versions, memory, Metal, the cache, models and kernels."""
    library = blas.load()
    from mlxspec.engine import memory
    from mlxspec.kernels.verify import machine, missing
    from mlxspec.model.hub import cache_of

    packages = " ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    yield Check("versions", f"mlxspec {__version__} {packages} Python {platform.python_version()}")
    yield Check("chip", machine()["chip"])
    yield Check("memory", format_size(memory.total()))
    if sys.platform == "darwin":
        text = "; unset MLX_ variables that hide the GPU" if missing() else "available"
        yield Check("metal", missing() + text, broken=bool(missing()))
    else:
        yield Check("blas", library or f"MLX's own, which is slow; {blas.INSTALL}")
    if not any(data_dir("metal").glob("*.metal")):
        text = f"no kernels in {data_dir('metal')}; install mlxspec again"
        yield Check("kernels", text, broken=True)
    cache = cache_of(config)
    folder = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        yield Check("cache", str(cache))
    else:
        yield Check("cache", f"{folder} is not writable; give another --cache-dir", broken=True)
    yield from _models(config)
    yield from _kernels(config, cache)


def _models(config: Config) -> Iterator[Check]:
    """Each model that `serve` would load, with its draft model."""
    from mlxspec.engine import memory
    from mlxspec.model.hub import DEFAULT
    from mlxspec.resolve import models_of, on_disk

    room = config.memory_bytes or memory.total()
    for model, _ in models_of(config):
        name = model or DEFAULT
        try:
            path = on_disk(model, config)
        except UserError as error:
            yield Check("model", str(error), broken=True)
            continue
        if not path:
            yield Check("model", f"{name}: not downloaded; mlxspec pull does that")
            continue
        size = weight_bytes(path)
        text, flaws = f"{name}: {format_size(size)} in {path}", damage(path)
        need = size + memory.headroom()
        if flaws:
            text += f": {'; '.join(flaws)}; remove the directory and run: mlxspec pull"
        elif need > room:
            text += (
                f": needs {format_size(need)} of {format_size(room)} memory; give a smaller model"
            )
        yield Check("model", text, broken=bool(flaws) or need > room)


def _kernels(config: Config, cache: Path) -> Iterator[Check]:
    """What is known of our kernels on this machine."""
    from mlxspec.engine.loader import KERNELS_DIR
    from mlxspec.kernels.verify import VerdictFile

    if config.kernels == "off":
        yield Check("kernels", "off by your settings")
    known = VerdictFile(cache / KERNELS_DIR).load()
    if not known:
        yield Check("kernels", "not tested on this machine yet; serve does that on a Mac")
    for name, verdict in known.items():
        state = f"not used: {verdict.why}"
        if verdict.way:
            gain = max(verdict.gains.values(), default=1.0)
            state = f"used for {verdict.least} to {verdict.most} rows, up to {gain:.2f}x as fast"
        yield Check("kernel", f"{name}: {state}")


def _servers(config: Config) -> Iterator[Check]:
    """The server at the settings' address, and the service."""
    url = url_of(config.host, config.port)
    if config.port:
        yield _port(url, config)
    installed = installed_url()
    if installed and installed != url:
        now = get_status(installed, config.api_key)
        text = f"{now.service} at {installed}: {headline(now)}"
        yield Check("service", text, broken=now.state == "unwell")


def _port(url: str, config: Config) -> Check:
    now = get_status(url, config.api_key)
    if now.note:
        text = f"{url}: {now.note}; see mlxspec service logs, then run: mlxspec service restart"
        return Check("server", text, broken=True)
    if now.state != "stopped":
        return Check("server", f"{url}: {headline(now)}", broken=now.state == "unwell")
    if now.service == "stopped":
        return Check("server", f"{url}: {now.why}")
    from mlxspec.server.process import bind

    try:
        bind(config).close()
    except ConfigError as error:
        return Check("server", f"{error}; lsof -i :{config.port} shows what has it", broken=True)
    return Check("server", f"none; the port of {url} is free")
