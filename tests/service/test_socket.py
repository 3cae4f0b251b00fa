"""The descriptor that is handed over, by systemd's variables and by a library with
launch_activate_socket."""

import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.service import socket as ours
from mlxspec.service.socket import activated, inherited, one_of
from mlxspec.types import UserError
from tests.metalsim.toolchain import find

SOURCE = f"""
static int given[4]; static unsigned long number; static int taken, freed;
void give(int fd) {{ given[number++] = fd; }}
int count_freed(void) {{ return freed; }}
void free(void *p) {{ freed += p == given; }}
static int same(const char *a, const char *b) {{ while (*a && *a == *b) a++, b++; return *a == *b; }}
int launch_activate_socket(const char *name, int **fds, unsigned long *count) {{
    if (!number) return {errno.ESRCH};
    if (!same(name, "http")) return {errno.ENOENT};
    if (taken++) return {errno.EALREADY};
    *fds = given; *count = number;
    return 0;
}}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "launch.c").write_text(SOURCE)
    made = folder / "launch.so"
    command = [
        *find().compile,
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-fno-builtin",
        "-o",
        made,
        folder / "launch.c",
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=100)
    return made


@pytest.fixture
def library(compiled: Path, tmp_path: Path) -> Any:
    """A copy each: one that is loaded twice would remember."""
    own = tmp_path / "launch.so"
    own.write_bytes(compiled.read_bytes())
    return ctypes.CDLL(str(own))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_launchd_hands_over_a_socket(
    library: Any, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.give(os.dup(listener.fileno()))
    monkeypatch.setattr(ours.sys, "platform", "darwin")
    monkeypatch.setattr(ours.ctypes, "CDLL", lambda name: library)
    with socket.create_connection(
        listener.getsockname()
    ) as client:  # it waits, as for a real launchd
        taken = one_of(inherited({}))
        assert not taken.get_inheritable() and library.count_freed() == 1
        with taken, taken.accept()[0] as mine:
            mine.sendall(b"hello")
            assert client.recv(5) == b"hello"
    with pytest.raises(
        UserError, match="does not hand over the socket 'http': Operation already in progress"
    ):
        inherited({})


def test_no_socket_is_not_wrong(library: Any, listener: socket.socket) -> None:
    assert activated("http", library) == []  # ESRCH: started by hand
    library.give(listener.fileno())
    assert activated("other", library) == []  # ENOENT
    assert activated("http", library) == [listener.fileno()]


def test_two_sockets_are_refused(
    library: Any, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours.sys, "platform", "darwin")
    monkeypatch.setattr(ours.ctypes, "CDLL", lambda name: library)
    library.give(os.dup(listener.fileno()))
    library.give(os.dup(listener.fileno()))
    first, second = inherited({})
    with (
        first,
        second,
        pytest.raises(UserError, match="2 sockets were handed over; the service takes one"),
    ):
        one_of([first, second])


def test_systemd_hands_over_a_socket(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "FIRST", os.dup(listener.fileno()))
    env = {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "mlxspec.socket",
        "X": "y",
    }
    taken = one_of(inherited(env))
    assert env == {"X": "y"}
    with taken:
        assert taken.getsockname() == listener.getsockname()


def test_variables_for_another_process_are_not_for_us() -> None:
    env = {"LISTEN_PID": str(os.getppid()), "LISTEN_FDS": "1"}
    assert sys.platform == "darwin" or inherited(env) == []
    assert sys.platform == "darwin" or inherited({}) == []


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_what_does_not_listen_for_tcp_is_refused(
    family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as wrong:
        if family == socket.AF_UNIX:
            wrong.bind("\0mlxspec test")
            wrong.listen()
        monkeypatch.setattr(ours, "FIRST", os.dup(wrong.fileno()))
        (given,) = inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
        with given, pytest.raises(UserError, match="does not listen for TCP"):
            one_of([given])
