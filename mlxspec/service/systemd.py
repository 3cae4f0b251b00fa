"""The service on Linux: a socket and what it starts, as units of the user's own systemd.

Rule: backing off is ours, by the ledger, so systemd's own limit of starts is off: it would take the
socket down too.
"""

import re
from pathlib import Path

from mlxspec.service import Hands
from mlxspec.service.job import Job
from mlxspec.types import UserError

SOCKET, SERVICE = "mlxspec.socket", "mlxspec.service"
CONTROL = ("systemctl", "--user")


def paths() -> list[Path]:
    return [Path.home() / ".config/systemd/user" / name for name in (SOCKET, SERVICE)]


def leftovers() -> list[Path]:
    return []


def files(job: Job) -> dict[Path, bytes]:
    host = f"[{job.host}]" if ":" in job.host else job.host
    listen = f"""\
[Unit]
Description=mlxspec, a local server for language models: its socket

[Socket]
ListenStream={host}:{job.port}
NoDelay=yes

[Install]
WantedBy=sockets.target
"""
    variables = "".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in job.variables.items())
    folder = "WorkingDirectory=" + job.folder.replace("%", "%%") + "\n" if job.folder else ""
    serve = f"""\
[Unit]
Description=mlxspec, a local server for language models
Requires={SOCKET}
After={SOCKET}
StartLimitIntervalSec=0

[Service]
ExecStart={" ".join(_quoted(word.replace("$", "$$")) for word in job.command)}
{variables}{folder}Restart=on-failure
RestartSec=2
TimeoutStopSec={job.exit_s}
KillMode=mixed
UMask=0077
"""
    return dict(zip(paths(), (listen.encode(), serve.encode()), strict=True))


def _quoted(word: str) -> str:
    """By systemd.syntax(7)."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def address() -> tuple[str, int] | None:
    try:
        found = re.search(r"^ListenStream=(.*):(\d+)$", paths()[0].read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return (found[1].strip("[]"), int(found[2])) if found else None


def session(hands: Hands) -> None:
    done = hands.ask(*CONTROL, "show-environment")
    if done.returncode:
        raise UserError(
            f"systemd has no session of yours here ({done.stderr.strip()}); log in on this machine, or"
            " run `loginctl enable-linger` as root for you, or `mlxspec serve`"
        )


def loaded(hands: Hands) -> bool:
    return hands.ask(*CONTROL, "is-active", "--quiet", SOCKET).returncode == 0


def load(hands: Hands) -> None:
    settle(hands, True)
    hands.do(*CONTROL, "start", SOCKET)


def unload(hands: Hands) -> None:
    hands.do(*CONTROL, "stop", SOCKET, SERVICE)


def settle(hands: Hands, there: bool) -> None:
    if not there:  # the link that `enable` made does not go with its unit
        hands.sweep(paths()[0].parent / "sockets.target.wants" / SOCKET)
        if hands.ask(*CONTROL, "show-environment").returncode:
            return  # nobody has it loaded
    hands.do(*CONTROL, "daemon-reload")
    if there:
        hands.do(*CONTROL, "enable", SOCKET)


def wake(hands: Hands) -> None:
    hands.do(*CONTROL, "start", SERVICE)


def logs(lines: int, follow: bool) -> list[str]:
    return [
        "journalctl",
        "--user",
        "-u",
        SERVICE,
        "-n",
        str(lines),
        *(["-f"] if follow else ["--no-pager"]),
    ]
