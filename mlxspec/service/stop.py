"""Stops the server, whoever started it.

Rule: a signal goes to a process only if it is this user's `mlxspec serve` on this machine, and has
the port: a number that an answer names may be anybody's.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mlxspec.service import Hands, here, verbs
from mlxspec.service.status import look
from mlxspec.types import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOK_S = 0.1
PATIENCE_S = 120.0
LISTEN = "0A"  # a state in /proc/net/tcp


def stop_server(url: str, api_key: str) -> str:
    """The service, if it is the one at `url`, else the server that was started by hand. Returns
    when it is over. Raises UserError with what to do instead."""
    now = look(url, api_key)
    if now.service in ("running", "waiting", "held") or (now.service == "stopped" and not now.pid):
        return verbs.stop(here(), Hands())
    if now.state in ("stopped", "not installed"):
        return f"no server runs at {url}"
    if not now.pid:
        raise UserError(now.why)
    at = urlsplit(url)
    if (
        at.hostname not in LOOPBACK
        or not _serves(_argv(now.pid))
        or not _listens(now.pid, at.port or 80)
    ):
        raise UserError(
            f"the server at {url} is not this machine's, or runs in a container; stop it there"
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(now.pid, signal.SIGTERM)
    end = time.monotonic() + PATIENCE_S
    while _serves(_argv(now.pid)):
        if time.monotonic() > end:
            raise UserError(
                f"the server lets answers end, as its --drain-s says; at once: kill {now.pid}"
            )
        time.sleep(LOOK_S)
    return f"the server at {url} has ended"


def _argv(pid: int) -> list[str]:
    """The command of a process of this user's; empty if it has ended, or is another's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
        return []
    said = Hands().ask("ps", "-ww", "-o", "uid=", "-o", "stat=", "-o", "command=", "-p", str(pid))
    found = said.stdout.split(None, 2)
    if len(found) < 3 or found[0] != str(os.getuid()) or found[1].startswith("Z"):
        return []
    cut = re.match(r"(/.*?/python[\d.]*) (.*)", found[2], re.IGNORECASE)  # its path may have blanks
    return [cut[1], *cut[2].split()] if cut else found[2].split()


def _serves(argv: Sequence[str]) -> bool:
    """`mlxspec serve`, by Python as a module or as a script, or by itself."""
    names = [os.path.basename(word) for word in argv]
    at = int(bool(names) and names[0].lower().startswith("python"))
    while at and argv[at : at + 1] and argv[at].startswith("-") and argv[at] != "-m":
        at += 1
    at += argv[at : at + 1] == ["-m"]
    return names[at : at + 2] == ["mlxspec", "serve"]


def _listens(pid: int, port: int) -> bool:
    if sys.platform != "linux":
        return (
            str(pid)
            in Hands().ask("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t").stdout.split()
        )
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in map(
                str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            ):
                if int(row[1].rpartition(":")[2], 16) == port and row[3] == LISTEN:
                    sockets.add(f"socket:[{row[9]}]")
    with contextlib.suppress(OSError):
        return any(
            os.readlink(f"/proc/{pid}/fd/{n}") in sockets for n in os.listdir(f"/proc/{pid}/fd")
        )
    return False
