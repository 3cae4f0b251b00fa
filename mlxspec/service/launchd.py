"""The service as a launch agent: its definition, launchctl, and the socket that launchd hands over.

Rule: end the service with `bootout`, never `stop`: KeepAlive would restart it. The definition holds
no secret, because other programs can read it.
"""

import ctypes
import errno
import os
import plistlib
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxspec.config import FILE, Config, ConfigError, as_flags, data_dir, load_config, url_of
from mlxspec.files import write_atomic
from mlxspec.service import crashes
from mlxspec.types import Json, UserError

LABEL, MENUBAR = "dev.mlxspec", "dev.mlxspec.menubar"
DOMAIN = f"gui/{os.getuid()}"
SOCKET = "http"  # its name in the definition
PROGRAM = (sys.executable, "-m", "mlxspec")
# Variables that the service keeps; none holds a secret.
VARIABLES = ("MLXSPEC_CONFIG", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME")
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
EXIT_S = 20  # to exit, in addition to `drain_s`
START_S = 15.0  # for the installed service's process to start
WAIT_S = 4000.0  # longer than the longest `drain_s`
BOOTOUT_OK = (3, 36, 113)  # statuses: the label is unknown, or its process is still ending
POLL_S = 0.1


def log_file() -> Path:
    """Where launchd sends the output."""
    return Path.home() / "Library/Logs/mlxspec/mlxspec.log"


def agent_file(label: str = LABEL) -> Path:
    return Path.home() / f"Library/LaunchAgents/{label}.plist"


# ---- definitions


def make_agent(label: str, words: Sequence[str], variables: Mapping[str, str]) -> Json:
    """The launch agent that runs `mlxspec` with these words: launchd/LABEL.plist, completed."""
    agent: Json = plistlib.loads((data_dir("launchd") / f"{label}.plist").read_bytes())
    agent["ProgramArguments"] = [*PROGRAM, *words]
    agent["EnvironmentVariables"] = variables
    # Where `python -m mlxspec` finds this package, installed or not.
    agent["WorkingDirectory"] = str(Path(__file__).resolve().parents[2])
    return agent


def definition(flags: Mapping[str, str | list[str] | None], env: Mapping[str, str]) -> Json:
    """The launch agent that runs `mlxspec serve` with these flags and variables.

    The settings file is left out, since the service reads it itself. Raises ConfigError.
    """
    variables = service_variables(env)
    config, base = load_config(flags, env), load_config({}, variables)
    if config.api_key != base.api_key:
        file = variables.get("MLXSPEC_CONFIG", FILE)
        why = "api_key: the service stores no secret"
        raise ConfigError(f"{why}; write it into {file} and run: chmod 600 {file}")
    if not config.port:
        raise ConfigError("port = 0: the service needs a fixed port; give another --port")
    config = replace(
        config,
        model=_absolute(config.model),
        others=tuple(map(_absolute, config.others)),
        draft=_absolute(config.draft),
        cache_dir=config.cache_dir and _full_path(config.cache_dir),
    )
    if config.others != base.others:  # they follow the model on the command line
        base = replace(base, model="")
    agent = make_agent(LABEL, ["serve", *shlex.split(as_flags(config, base))], variables)
    agent["ExitTimeOut"] = round(config.drain_s) + EXIT_S
    agent["StandardOutPath"] = agent["StandardErrorPath"] = str(log_file())
    agent["Sockets"][SOCKET] |= {
        "SockNodeName": config.host,
        "SockServiceName": str(config.port),
        "SockFamily": "IPv6" if ":" in config.host else "IPv4",  # or a name gives two sockets
    }
    return agent


def service_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launch agent. Raises ConfigError for one with a secret."""
    variables = {"PATH": PATH}
    for name in VARIABLES:
        if env.get(name):
            variables[name] = env[name]
    if "@" in variables.get("HF_ENDPOINT", ""):
        raise ConfigError("HF_ENDPOINT: give one without a password, which the service would store")
    if "MLXSPEC_CONFIG" in variables:
        variables["MLXSPEC_CONFIG"] = _full_path(variables["MLXSPEC_CONFIG"])
    return variables


def _full_path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _absolute(model: str) -> str:
    """A model, or NAME=MODEL, with an absolute path where it is a path."""
    name, equals, path = model.rpartition("=")
    if path and os.path.exists(_full_path(path)):
        return name + equals + _full_path(path)
    return model


def url_in(agent: Mapping[str, Any]) -> str:
    """Where the service listens."""
    listen = agent["Sockets"][SOCKET]
    return url_of(listen["SockNodeName"], listen["SockServiceName"])


def installed_url() -> str:
    """Where the installed service listens; "" if none is installed."""
    file = agent_file()
    return url_in(plistlib.loads(file.read_bytes())) if file.exists() else ""


# ---- commands; they raise UserError and OSError


def install(agent: Json) -> str:
    """Install or change the service, and wait until it runs. If it does not, undo the change: macOS
    may deny launchd's processes access to the program's folder. Raises ConfigError for a port in
    use."""
    from mlxspec.server.process import bind

    before = agent_file().read_bytes() if agent_file().exists() else b""
    listen = agent["Sockets"][SOCKET]
    unload()
    try:
        bind(Config(host=listen["SockNodeName"], port=int(listen["SockServiceName"]))).close()
        log_file().parent.mkdir(0o700, parents=True, exist_ok=True)  # or launchd starts nothing
        crashes.forget()
        log_file().touch(0o600)
        load_agent(agent)
        if not _until(crashes.is_running, START_S):
            raise UserError(
                "the service did not start, so the change is undone; macOS denies it access to"
                " ~/Desktop, ~/Documents and ~/Downloads: move mlxspec out of there, or run: pipx"
                " install . For other reasons see: mlxspec service logs",
            )
    except (UserError, OSError):
        remove_agent(LABEL)
        if before:
            load_agent(plistlib.loads(before))
        raise
    return f"the service listens at {url_in(agent)}/v1, now and after each login"


def uninstall() -> str:
    """Remove the service and its menu bar; settings, models and caches stay."""
    remove_agent(MENUBAR)
    if not remove_agent(LABEL):
        return "the service is not installed"
    for path in (log_file(), Path(f"{log_file()}.1"), *crashes.files()):
        path.unlink(missing_ok=True)
    return "the service is removed"


def start() -> str:
    if crashes.is_running():
        return "the service is running already"
    return restart()


def restart() -> str:
    """Restart the service, and end safe mode."""
    _require_installed()
    unload()
    crashes.forget()
    bootstrap(LABEL)
    return "the service is started"


def stop() -> str:
    _require_installed()
    unload()
    return "the service is stopped, until `mlxspec service start` or the next login"


def _require_installed() -> None:
    if not agent_file().exists():
        raise UserError("the service is not installed; run: mlxspec service install")


# ---- launchctl


def is_loaded(label: str = LABEL) -> bool:
    """Whether launchd listens for the service, or runs another agent."""
    return _launchctl("print", f"{DOMAIN}/{label}", ok=range(256)) == 0


def load_agent(agent: Json) -> None:
    """Write the definition, and start it now and after each login."""
    label = agent["Label"]
    write_atomic(agent_file(label), plistlib.dumps(agent))
    bootstrap(label)


def bootstrap(label: str) -> None:
    """Start an agent by its definition, now and after each login."""
    _launchctl("enable", f"{DOMAIN}/{label}")
    _launchctl("bootstrap", DOMAIN, str(agent_file(label)))


def unload(label: str = LABEL) -> None:
    """End the process, if it runs, and stop listening until the next login.

    Returns when launchd has forgotten the label, before which a bootstrap fails.
    """
    _launchctl("bootout", f"{DOMAIN}/{label}", ok=BOOTOUT_OK)
    if not _until(lambda: not is_loaded(label), WAIT_S):
        raise UserError(f"launchd has not ended {label}; try again in a minute")


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait for launchd to do something; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def remove_agent(label: str) -> bool:
    """End an agent and delete its definition; returns whether there was one."""
    unload(label)
    existed = agent_file(label).exists()
    agent_file(label).unlink(missing_ok=True)
    return existed


def _launchctl(*args: str, ok: Sequence[int] = ()) -> int:
    """The status: 0, or one of `ok`. Raises UserError for any other."""
    try:
        done = subprocess.run(("launchctl", *args), capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("the service needs macOS; elsewhere run: mlxspec serve") from error
    if done.returncode and done.returncode not in ok:
        raise UserError(
            f"launchctl {shlex.join(args)} failed with status {done.returncode}:"
            f" {done.stderr.strip()}; log in at this Mac's screen, then try again",
        )
    return done.returncode


# ---- the socket


def activated_socket() -> socket.socket | None:
    """The listening socket of the service, by launch_activate_socket(3); None for a process that
    launchd did not start.

    Can be called once. Raises UserError.
    """
    if sys.platform != "darwin":
        return None
    fds, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    status = ctypes.CDLL(None).launch_activate_socket(
        SOCKET.encode(),
        ctypes.byref(fds),
        ctypes.byref(count),
    )
    if status in (errno.ESRCH, errno.ENOENT):
        return None
    if status:
        raise UserError(f"launchd does not hand over the socket: {os.strerror(status)}")
    os.set_inheritable(fds[0], False)
    return socket.socket(fileno=fds[0])
