"""A service of the user's own: launchd or systemd listens, and hands `mlxspec serve` the socket.

Rule: whatever changes the machine goes through `Hands`, so that --dry-run shows all of it and a
failure takes all of it back.
"""

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mlxspec.files import write_atomic
from mlxspec.service.job import Job
from mlxspec.types import UserError

AGAIN_S, LOOK_S = 5.0, 0.2


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Raises UserError for what the system refuses."""
    try:
        yield
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        mend = (
            "it is needed for this"
            if missing
            else "make it one that you may write, or move it away"
        )
        raise UserError(f"{error.filename or path}: {error.strerror}; {mend}") from error


@dataclass(slots=True)
class Hands:
    """Runs and writes; `dry`: only says what it would do. `made` are the folders that it made."""

    dry: bool = False
    say: Callable[[str], None] = print
    made: list[Path] = field(default_factory=list)

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """For commands that change nothing."""
        with named(command[0]):
            return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def do(self, *command: str, fine: Collection[int] = (), again: Collection[int] = ()) -> None:
        """Raises UserError at a status that is neither 0 nor `fine`; one of `again` may pass in a
        while."""
        if self.dry:
            return self.say(f"would run: {shlex.join(command)}")
        end = time.monotonic() + AGAIN_S
        while (done := self.ask(*command)).returncode in again and time.monotonic() < end:
            time.sleep(LOOK_S)
        if done.returncode and done.returncode not in fine:
            said = (done.stderr or done.stdout).strip() or "no message"
            raise UserError(f"{shlex.join(command)} ended with status {done.returncode}: {said}")

    def folder(self, path: Path) -> None:
        missing = [one for one in (path, *path.parents) if not one.exists()]
        for one in reversed([] if self.dry else missing):
            with named(one):
                one.mkdir(0o700 if one == path else 0o755)
            self.made.append(one)

    def write(self, path: Path, data: bytes) -> None:
        """All of it or nothing."""
        if self.dry:
            return self.say(f"would write: {path}\n{data.decode()}")
        self.folder(path.parent)
        with named(path):
            write_atomic(path, data)

    def remove(self, path: Path) -> None:
        """A file, or a folder if it is empty; what is not there is fine."""
        with named(path):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    self.say(f"would remove: {path}") if self.dry else path.rmdir()
            elif path.exists() or path.is_symlink():
                self.say(f"would remove: {path}") if self.dry else path.unlink()

    def sweep(self, path: Path) -> None:
        """`path`, and the folders of the user's that it leaves empty."""
        self.remove(path)
        while (
            not self.dry and path.parent.is_relative_to(Path.home()) and path.parent != Path.home()
        ):
            path = path.parent
            self.remove(path)


class System(Protocol):
    """What launchd.py and systemd.py are."""

    def files(self, job: Job) -> dict[Path, bytes]:
        """The service's definition; its paths do not depend on `job`."""

    def paths(self) -> list[Path]: ...

    def address(self) -> tuple[str, int] | None:
        """Host and port of the definition that is installed."""

    def session(self, hands: Hands) -> None:
        """Raises UserError where nothing can be loaded, since the user has no session."""

    def loaded(self, hands: Hands) -> bool:
        """Whether it listens."""

    def load(self, hands: Hands) -> None:
        """Listen, now and after each login."""

    def unload(self, hands: Hands) -> None:
        """End the process and listen no more; the next login listens again. Returns when it is
        over."""

    def settle(self, hands: Hands, there: bool) -> None:
        """The files changed while nothing was loaded; whether they are `there`."""

    def wake(self, hands: Hands) -> None:
        """Start the process without a connection, unless it runs."""

    def logs(self, lines: int, follow: bool) -> list[str]:
        """The command that shows the log."""

    def leftovers(self) -> list[Path]:
        """What the service has written that is nobody else's."""


def here() -> System:
    """Raises UserError where there is neither."""
    from mlxspec.service import launchd, systemd

    if shutil.which("launchctl"):
        return launchd
    if shutil.which("systemctl"):
        return systemd
    raise UserError(
        "neither launchd nor systemd is here; let what starts programs here run `mlxspec serve`"
    )
