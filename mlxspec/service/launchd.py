"""The service on macOS: a launch agent in the user's domain, driven by launchctl.

Rule: `bootout` ends it, never `stop`, which KeepAlive answers with a restart; what follows waits
until launchd no longer knows the label, or `bootstrap` fails with 5. launchctl's statuses count,
its output only to spare an `enable`, which leaves a trace: launchctl(1) says that it is no
interface.
"""

import ipaddress
import os
import plistlib
import re
import socket
import time
from pathlib import Path

from mlxspec.config import ConfigError, data_dir
from mlxspec.service import Hands
from mlxspec.service.job import Job
from mlxspec.service.socket import NAME
from mlxspec.types import UserError

LABEL = "dev.mlxspec"
ABSENT = (3, 113)  # launchctl's statuses for a label that launchd does not know
UNDER_WAY = 36  # of a bootout: it goes on
PASSING = (5, 37)  # of a bootstrap: what was there is not quite gone
LOOK_S = 0.1
SLACK_S = 10  # beyond ExitTimeOut


def log_file() -> Path:
    return Path.home() / "Library/Logs/mlxspec/mlxspec.log"


def agent(label: str) -> Path:
    return Path.home() / f"Library/LaunchAgents/{label}.plist"


def paths() -> list[Path]:
    return [agent(LABEL)]


def leftovers() -> list[Path]:
    return [log_file(), Path(f"{log_file()}.1"), log_file().parent]


def files(job: Job) -> dict[Path, bytes]:
    """Raises ConfigError for a host that has no address."""
    made = plistlib.loads((data_dir("launchd") / f"{LABEL}.plist").read_bytes())
    family, host = _numeric(job.host)
    made["ProgramArguments"] = list(job.command)
    made["EnvironmentVariables"] = dict(job.variables)
    made["ExitTimeOut"] = job.exit_s
    made["StandardOutPath"] = made["StandardErrorPath"] = str(log_file())
    made["Sockets"][NAME] |= {
        "SockNodeName": host,
        "SockServiceName": str(job.port),
        "SockFamily": family,
    }
    if job.folder:
        made["WorkingDirectory"] = job.folder
    return {paths()[0]: plistlib.dumps(made)}


def _numeric(host: str) -> tuple[str, str]:
    """A name may have several addresses, and launchd would listen on each; the server takes the
    first."""
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"host = {host!r}: {error.strerror}; give an address of this machine"
        ) from error
    return f"IPv{ipaddress.ip_address(found.partition('%')[0]).version}", found


def address() -> tuple[str, int] | None:
    try:
        found = plistlib.loads(paths()[0].read_bytes())["Sockets"][NAME]
        return str(found["SockNodeName"]), int(found["SockServiceName"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def session(hands: Hands) -> None:
    if hands.ask("launchctl", "print", _domain()).returncode:
        raise UserError(
            "nobody is logged in at this Mac's screen, so it has no launch agents; log in there, or run"
            " `mlxspec serve` here"
        )


def loaded(hands: Hands, label: str = LABEL) -> bool:
    return hands.ask("launchctl", "print", _target(label)).returncode == 0


def load(hands: Hands, label: str = LABEL) -> None:
    if not hands.dry and label == LABEL:  # launchd starts nothing whose log has no folder
        hands.folder(log_file().parent)
    said = hands.ask("launchctl", "print-disabled", _domain()).stdout
    if re.search(rf'"{re.escape(label)}" => (disabled|true)', said):
        hands.do("launchctl", "enable", _target(label))
    try:
        hands.do("launchctl", "bootstrap", _domain(), str(agent(label)), again=PASSING)
    except UserError as error:
        raise UserError(f"{error}; try again in a minute, or after the next login") from error


def unload(hands: Hands, label: str = LABEL) -> None:
    target = _target(label)
    hands.do("launchctl", "bootout", target, fine=(*ABSENT, UNDER_WAY))
    end = time.monotonic() + _patience(label)
    while (
        not hands.dry
        and (status := hands.ask("launchctl", "print", target).returncode) not in ABSENT
    ):
        if time.monotonic() > end:
            raise UserError(
                f"launchd has not let go of {label} (launchctl print: {status}); try again later"
            )
        time.sleep(LOOK_S)


def _patience(label: str) -> float:
    try:
        return float(plistlib.loads(agent(label).read_bytes())["ExitTimeOut"]) + SLACK_S
    except (OSError, ValueError, KeyError, TypeError):
        return 60.0


def settle(hands: Hands, there: bool) -> None:
    pass  # launchd reads the folder at login


def wake(hands: Hands) -> None:
    hands.do("launchctl", "kickstart", _target(LABEL))


def logs(lines: int, follow: bool) -> list[str]:
    return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log_file())]


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target(label: str) -> str:
    return f"{_domain()}/{label}"
