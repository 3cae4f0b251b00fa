"""The socket that launchd or systemd listens on and hands over.

Rule: it is taken once, before anything can fail; whoever was started by hand gets none, and binds
its own.
"""

import ctypes
import errno
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from mlxspec.types import UserError

NAME = "http"  # of the socket, in the property list
FIRST = 3  # descriptor that systemd passes


def inherited(env: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """The sockets that this process was given. Raises UserError where launchd refuses."""
    found: list[int] = []
    if env.get("LISTEN_PID") == str(os.getpid()):
        found = [FIRST + n for n in range(int(env.get("LISTEN_FDS", "0")))]
        for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            env.pop(name, None)  # not for our children
    elif sys.platform == "darwin":
        found = activated(NAME, ctypes.CDLL(None))
    for number in found:
        os.set_inheritable(number, False)
    return [socket.socket(fileno=number) for number in found]


def one_of(given: Sequence[socket.socket]) -> socket.socket:
    """The listening TCP socket. Raises UserError for anything else than one."""
    if len(given) > 1:
        raise UserError(
            f"{len(given)} sockets were handed over; the service takes one: give one address"
        )
    taken = given[0]
    tcp = taken.type == socket.SOCK_STREAM and taken.family in (socket.AF_INET, socket.AF_INET6)
    if not tcp or not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise UserError(
            "the socket that was handed over does not listen for TCP; mend the service's definition"
        )
    return taken


def activated(name: str, library: Any) -> list[int]:
    """launch_activate_socket(3): the descriptors of a socket by its name in the property list;
    empty for a process that launchd did not start, or without such a socket. Raises UserError, also
    the second time."""
    numbers, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    ask = library.launch_activate_socket
    ask.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_int)), ctypes.c_void_p]
    ask.restype = ctypes.c_int
    wrong = ask(name.encode(), ctypes.byref(numbers), ctypes.byref(count))
    if wrong in (errno.ESRCH, errno.ENOENT):
        return []
    if wrong:
        raise UserError(f"launchd does not hand over the socket {name!r}: {os.strerror(wrong)}")
    found = numbers[: count.value]
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.free(numbers)
    return found
