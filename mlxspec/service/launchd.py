"""The service as a launch agent: its definition, launchctl, and the socket that launchd hands over.

Rule: `bootout` ends the service, never `stop`, which KeepAlive answers with a restart. The
definition holds no secret, because other programs can read it.
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
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxspec.config import FILE, Config, ConfigError, as_flags, data_dir, load, url_of
from mlxspec.files import write_atomic
from mlxspec.service import crashes
from mlxspec.types import UserError

LABEL, MENUBAR = "dev.mlxspec", "dev.mlxspec.menubar"
SOCKET = "http"  # its name in the definition
PROGRAM = (sys.executable, "-m", "mlxspec")
# Variables that the service keeps; none holds a secret.
VARIABLES = ("MLXSPEC_CONFIG", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME")
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
EXIT_S = 20  # to exit, in addition to `drain_s`
SLACK_S = 10.0  # that launchd may take longer than the definition says
UNKNOWN_LABEL = (3, 113)  # statuses of launchctl
BOOTOUT_RUNNING = 36
NOT_GONE_YET = (5, 37)  # a bootstrap soon after a bootout
BOOTSTRAP_S = 5.0
POLL_S = 0.1


def log_file() -> Path:
    return Path.home() / "Library/Logs/mlxspec/mlxspec.log"


def agent_file(label: str = LABEL) -> Path:
    return Path.home() / f"Library/LaunchAgents/{label}.plist"


def definition(
    flags: Mapping[str, str | list[str] | None], env: Mapping[str, str]
) -> dict[str, Any]:
    """The launch agent that runs `mlxspec serve` with these flags and variables.

    The settings file is left out, since the service reads it itself. Raises ConfigError.
    """
    variables = service_variables(env)
    config, base = load(flags, env), load({}, variables)
    if config.api_key != base.api_key:
        file = variables.get("MLXSPEC_CONFIG", FILE)
        raise ConfigError(
            f"api_key: the service does not get flags or variables that are secret; write api_key"
            f" into {file} and run: chmod 600 {file}"
        )
    if not config.port:
        raise ConfigError("port = 0: the service needs a fixed port; give another --port")
    config = replace(
        config,
        model=_absolute(config.model),
        others=tuple(map(_absolute, config.others)),
        draft=_absolute(config.draft),
        cache_dir=config.cache_dir and os.path.abspath(os.path.expanduser(config.cache_dir)),
    )
    if config.others != base.others:  # they follow the model on the command line
        base = replace(base, model="")
    agent: dict[str, Any] = plistlib.loads((data_dir("launchd") / f"{LABEL}.plist").read_bytes())
    agent["ProgramArguments"] = [*PROGRAM, "serve", *shlex.split(as_flags(config, base))]
    agent["EnvironmentVariables"] = variables
    agent["WorkingDirectory"] = package_parent()
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
    variables = {name: env[name] for name in VARIABLES if env.get(name)}
    if "@" in variables.get("HF_ENDPOINT", ""):
        raise ConfigError(
            "HF_ENDPOINT: it contains a user name or password, which the service must not store;"
            " run mlxspec pull with it, then install the service without it"
        )
    if file := variables.get("MLXSPEC_CONFIG"):
        variables["MLXSPEC_CONFIG"] = os.path.abspath(os.path.expanduser(file))
    return {"PATH": PATH, **variables}


def package_parent() -> str:
    """The directory in which `python -m mlxspec` finds this package, installed or not."""
    return str(Path(__file__).resolve().parents[2])


def _absolute(model: str) -> str:
    """A model, or NAME=MODEL, with an absolute path where it is a path."""
    name, equals, path = model.rpartition("=")
    if path and Path(path).expanduser().exists():
        return name + equals + os.path.abspath(os.path.expanduser(path))
    return model


def install(agent: Mapping[str, Any], dry_run: bool = False) -> str:
    """Install or change the service, and listen. With `dry_run`, only print what would be done.

    Raises UserError and ConfigError.
    """
    from mlxspec.server.process import bind

    data, file = plistlib.dumps(dict(agent)), agent_file()
    if dry_run:
        load_command = shlex.join(["launchctl", "bootstrap", _domain(), str(file)])
        return f"would write {file}:\n{data.decode()}would run: {load_command}"
    host, port = _address(agent)
    url = url_of(host, port)
    if is_loaded():
        if file.exists() and file.read_bytes() == data:
            return f"the service is installed already and listens at {url}/v1"
        unload()
    bind(Config(host=host, port=port)).close()  # a port in use fails here, with its name
    write_agent(data)
    log_file().parent.mkdir(0o700, parents=True, exist_ok=True)  # or launchd starts nothing
    crashes.forget()
    load_agent()
    return f"the service listens at {url}/v1, now and after each login"


def uninstall() -> str:
    """Remove the service and its menu bar; settings, models and caches stay."""
    remove_agent(MENUBAR)
    if not remove_agent(LABEL):
        return "the service is not installed"
    for path in (log_file(), Path(f"{log_file()}.1"), *crashes.files()):
        path.unlink(missing_ok=True)
    return "the service is removed"


def remove_agent(label: str) -> bool:
    """End an agent and delete its definition; whether there was one."""
    found = agent_file(label).exists()
    if is_loaded(label):
        found = True
        unload(label)
    agent_file(label).unlink(missing_ok=True)
    return found


def start() -> str:
    _require_installed()
    if is_loaded() and crashes.is_running():
        return "the service is running already"
    return restart()


def restart() -> str:
    """Also ends safe mode."""
    _require_installed()
    if is_loaded():
        unload()
    crashes.forget()
    load_agent()
    _launchctl("kickstart", _target(LABEL))
    return "the service is started"


def stop() -> str:
    _require_installed()
    if not is_loaded():
        return "the service is stopped already"
    unload()
    return "the service is stopped, until `mlxspec service start` or the next login"


def installed_url() -> str:
    """Where the installed service listens; "" if none is installed."""
    try:
        return url_of(*_address(_read_agent(LABEL)))
    except (KeyError, TypeError, ValueError):
        return ""


def log_command(lines: int, follow: bool) -> list[str]:
    """The command that shows the log, by name (-F), since the log is rotated."""
    _require_installed()
    command = ["tail", "-n", str(lines)]
    if follow:
        command.append("-F")
    return [*command, str(log_file())]


def write_agent(data: bytes, label: str = LABEL) -> None:
    """Raises UserError."""
    try:
        write_atomic(agent_file(label), data)
    except OSError as error:
        raise UserError(
            f"{error.filename or agent_file(label)}: {error.strerror}; make it writable"
        ) from error


def is_loaded(label: str = LABEL) -> bool:
    """Whether launchd listens for the service, or runs another agent."""
    return _run("print", _target(label)).returncode == 0


def load_agent(label: str = LABEL) -> None:
    """Start now and after each login. Raises UserError."""
    _launchctl("enable", _target(label))
    command = ("bootstrap", _domain(), str(agent_file(label)))
    deadline = time.monotonic() + BOOTSTRAP_S
    while time.monotonic() < deadline:
        if not _launchctl(*command, ok=NOT_GONE_YET):
            return
        time.sleep(POLL_S)
    _launchctl(*command)


def unload(label: str = LABEL) -> None:
    """End the process and stop listening until the next login.

    Returns when launchd has forgotten the label, before which a bootstrap fails. Raises UserError.
    """
    _launchctl("bootout", _target(label), ok=(*UNKNOWN_LABEL, BOOTOUT_RUNNING))
    deadline = time.monotonic() + _read_agent(label).get("ExitTimeOut", EXIT_S) + SLACK_S
    while is_loaded(label):
        if time.monotonic() > deadline:
            raise UserError(f"launchd has not ended {label}; try again in a minute")
        time.sleep(POLL_S)


def activated_socket() -> socket.socket | None:
    """The listening socket of the service; None for a process that launchd did not start.

    Can be called once. Raises UserError.
    """
    if sys.platform != "darwin":
        return None
    fds = activate(SOCKET, ctypes.CDLL(None))
    if not fds:
        return None
    os.set_inheritable(fds[0], False)
    return socket.socket(fileno=fds[0])


def activate(name: str, library: Any) -> list[int]:
    """launch_activate_socket(3): the file descriptors of a socket in the definition; none for a
    process that launchd did not start. Raises UserError, also the second time."""
    fds, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    function = library.launch_activate_socket
    pointer = ctypes.POINTER(ctypes.POINTER(ctypes.c_int))
    function.argtypes, function.restype = [ctypes.c_char_p, pointer, ctypes.c_void_p], ctypes.c_int
    status = function(name.encode(), ctypes.byref(fds), ctypes.byref(count))
    if status in (errno.ESRCH, errno.ENOENT):
        return []
    if status:
        raise UserError(f"launchd does not hand over the socket {name!r}: {os.strerror(status)}")
    found = fds[: count.value]
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.free(fds)
    return found


def _require_installed() -> None:
    if not agent_file().exists():
        raise UserError("the service is not installed; run: mlxspec service install")


def _read_agent(label: str) -> dict[str, Any]:
    """The installed definition; {} where there is none that can be read."""
    try:
        agent: dict[str, Any] = plistlib.loads(agent_file(label).read_bytes())
        return agent
    except (OSError, ValueError):
        return {}


def _address(agent: Mapping[str, Any]) -> tuple[str, int]:
    listen = agent["Sockets"][SOCKET]
    return str(listen["SockNodeName"]), int(listen["SockServiceName"])


def _launchctl(*args: str, ok: Collection[int] = ()) -> int:
    """The status: 0, or one of `ok`. Raises UserError for any other."""
    done = _run(*args)
    if done.returncode and done.returncode not in ok:
        raise UserError(
            f"launchctl {shlex.join(args)} failed with status {done.returncode}:"
            f" {done.stderr.strip()}; log in at this Mac's screen, then try again"
        )
    return done.returncode


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    command = ("launchctl", *args)
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise UserError(
            "launchctl is missing: the service needs macOS; elsewhere run: mlxspec serve"
        ) from error


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target(label: str) -> str:
    return f"{_domain()}/{label}"
