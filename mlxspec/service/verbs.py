"""install, uninstall, start, stop, restart: the same for launchd and systemd.

Rule: doing one twice is fine, and one that fails leaves things as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mlxspec.config import Config, url_of
from mlxspec.service import Hands, System, launchd, ledger, menubar, named
from mlxspec.service.job import PATH, Job
from mlxspec.types import UserError


def install(system: System, job: Job, hands: Hands) -> str:
    """Raises UserError and ConfigError, with all taken back."""
    from mlxspec.server.process import bind

    files, url = system.files(job), url_of(job.host, job.port)
    was = system.loaded(hands)
    if was and _now(files) == files:
        return f"the service is installed already, and listens at {url}/v1"
    system.session(hands)
    _runnable(job, hands)
    with _taken_back(system, hands, was):
        if was:
            system.unload(hands)
        if not (was and hands.dry):  # which leaves the port to the one that is there
            bind(Config(host=job.host, port=job.port)).close()
        for path, data in files.items():
            hands.write(path, data)
        if not hands.dry:
            hands.folder(ledger.file().parent)
            ledger.forgive(ledger.file())
        system.load(hands)
    return (
        f"{url}/v1 is there now, and after each login" if not hands.dry else "nothing was changed"
    )


def _now(files: Iterable[Path]) -> dict[Path, bytes | None]:
    with named("its definition"):
        return {path: path.read_bytes() if path.exists() else None for path in files}


@contextmanager
def _taken_back(system: System, hands: Hands, was: bool) -> Iterator[None]:
    before = _now(system.paths())
    try:
        yield
    except BaseException as error:
        if left := _undo(system, hands, before, was):
            raise UserError(f"{error}; and to take it back failed too: {left}") from error
        raise


def _runnable(job: Job, hands: Hands) -> None:
    program = ("env", "-i", f"PATH={PATH}", *job.command[:3], "--version")
    done = hands.ask("sh", "-c", 'cd "$0" && exec "$@"', job.folder or "/", *program)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise UserError(
            f"{job.command[0]} cannot run mlxspec outside this shell: {why}; install mlxspec for it"
        )


def _undo(system: System, hands: Hands, before: Mapping[Path, bytes | None], was: bool) -> str:
    """What could not be taken back, for the message."""
    wrong: list[str] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, UserError) as error:
            wrong.append(str(error))

    if system.loaded(hands):
        attempt(partial(system.unload, hands))
    old = {path: data for path, data in before.items() if data is not None}
    if before != _now(before):
        for path, data in before.items():
            attempt(
                partial(hands.remove, path) if data is None else partial(hands.write, path, data)
            )
        attempt(partial(system.settle, hands, bool(old)))
    if was:
        attempt(partial(system.load, hands))
    if not old:
        for path in (*ledger.traces(), *reversed(hands.made)):
            attempt(partial(hands.remove, path))
    return "; ".join(wrong)


def uninstall(system: System, hands: Hands) -> str:
    if system is launchd:
        menubar.uninstall(hands)
    there = [path for path in system.paths() if path.exists()]
    loaded = system.loaded(hands)
    if loaded:
        system.unload(hands)
    for path in there:
        hands.remove(path)
    if there:
        system.settle(hands, False)
    for path in (*system.paths(), *system.leftovers(), *ledger.traces()):
        hands.sweep(path)
    return "nothing of the service is left" if there or loaded else "the service is not installed"


def start(system: System, hands: Hands) -> str:
    """Also what stays down after a panic or crashes."""
    _installed(system)
    if system.loaded(hands) and ledger.running() and not ledger.read(ledger.file()).held:
        return "the service runs already"
    return restart(system, hands)


def restart(system: System, hands: Hands) -> str:
    _installed(system)
    system.session(hands)
    was, past = system.loaded(hands), ledger.read(ledger.file())
    with _taken_back(system, hands, was):
        if was:
            system.unload(hands)
        if not hands.dry:
            ledger.forgive(ledger.file())
        try:
            system.load(hands)
            system.wake(hands)
        except BaseException:
            ledger.write(ledger.file(), past)
            raise
    return "started"


def stop(system: System, hands: Hands) -> str:
    _installed(system)
    if not system.loaded(hands):
        return "the service is stopped already"
    system.unload(hands)
    return "stopped, until `mlxspec service start` or the next login"


def _installed(system: System) -> None:
    if not all(path.exists() for path in system.paths()):
        raise UserError("the service is not installed; `mlxspec service install` does that")
