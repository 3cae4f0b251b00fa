"""Stops the server, whoever started it.

Rule: a signal goes to a process only if that is on this machine and its command is ours.
"""

import os
import signal
import subprocess
import time
from urllib.parse import urlsplit

from mlxspec.service import Hands, here, verbs
from mlxspec.service.status import look
from mlxspec.types import Unfit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOK_S = 0.1


def stop_server(url: str, api_key: str) -> str:
    """The service, if it is the one at `url`, else the server that was started by hand. Returns when it is
    over. Raises Unfit with what to do instead."""
    now = look(url, api_key)
    if now.service not in ("none", "not installed"):
        return verbs.stop(here(), Hands())
    if now.state in ("stopped", "not installed"):
        return f"no server runs at {url}"
    if not now.pid:
        raise Unfit(now.why)
    if urlsplit(url).hostname not in LOOPBACK or not _ours(now.pid):
        raise Unfit(f"the server at {url} is not this machine's, or runs in a container; stop it there")
    os.kill(now.pid, signal.SIGTERM)
    while _ours(now.pid):  # it drains, at most for its --drain-s
        time.sleep(LOOK_S)
    return f"the server at {url} has ended"


def _ours(pid: int) -> bool:
    words = ["ps", "-ww", "-o", "stat=", "-o", "command=", "-p", str(pid)]
    done = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return not done.startswith("Z") and "mlxspec" in done and " serve" in done
