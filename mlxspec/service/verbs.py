"""install, uninstall, start, stop, restart, status: the same for launchd and systemd.

Rule: doing one twice is fine, and one that fails leaves things as they were.
"""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from mlxspec.config import Config, url_of
from mlxspec.service import Hands, System, ledger
from mlxspec.service.job import PATH, Job
from mlxspec.types import Unfit

HEALTH_S = 5.0


def install(system: System, job: Job, hands: Hands) -> str:
    """Raises Unfit and ConfigError, with all taken back."""
    files, url = system.files(job), url_of(job.host, job.port)
    before = _now(files)
    was = system.loaded(hands)
    if was and before == files:
        return f"the service is installed already, and listens at {url}/v1"
    _runnable(job, hands)
    try:
        if was:
            system.unload(hands)
        if not (was and hands.dry):  # which leaves the port to the one that is there
            _bindable(job)
        for path, data in files.items():
            hands.write(path, data)
        if not hands.dry:
            hands.folder(ledger.file().parent)
            ledger.forgive(ledger.file())
        system.load(hands)
    except BaseException as error:
        if left := _undo(system, hands, before, was):
            raise Unfit(f"{error}; and to take it back failed too: {left}") from error
        raise
    return f"{url}/v1 is there now, and after each login" if not hands.dry else "nothing was changed"


def _now(files: Iterable[Path]) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.exists() else None for path in files}


def _runnable(job: Job, hands: Hands) -> None:
    program = ("env", "-i", f"PATH={PATH}", *job.command[:3], "--version")
    done = hands.ask("sh", "-c", 'cd "$0" && exec "$@"', job.folder or "/", *program)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise Unfit(f"{job.command[0]} cannot run mlxspec outside this shell: {why}; install mlxspec for it")


def _bindable(job: Job) -> None:
    from mlxspec.server.run import bind

    bind(Config(host=job.host, port=job.port)).close()


def _undo(system: System, hands: Hands, before: Mapping[Path, bytes | None], was: bool) -> str:
    """What could not be taken back, for the message."""
    wrong: list[str] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, Unfit) as error:
            wrong.append(str(error))

    if system.loaded(hands):
        attempt(partial(system.unload, hands))
    old = {path: data for path, data in before.items() if data is not None}
    if before != _now(before):
        for path, data in before.items():
            attempt(partial(hands.remove, path) if data is None else partial(hands.write, path, data))
        attempt(partial(system.settle, hands, bool(old)))
    if was:
        attempt(partial(system.load, hands))
    if not old:
        for path in (ledger.file(), ledger.file().parent, *reversed(hands.made)):
            attempt(partial(hands.remove, path))
    return "; ".join(wrong)


def uninstall(system: System, hands: Hands) -> str:
    there = [path for path in system.paths() if path.exists()]
    loaded = system.loaded(hands)
    if loaded:
        system.unload(hands)
    for path in there:
        hands.remove(path)
    if there:
        system.settle(hands, False)
    for path in (*system.leftovers(), ledger.file(), ledger.file().parent):
        hands.remove(path)
    return "nothing of the service is left" if there or loaded else "the service is not installed"


def start(system: System, hands: Hands) -> str:
    """Also what stays down after a panic or crashes."""
    _installed(system)
    now = ledger.read(ledger.file())
    if system.loaded(hands) and now.running and not now.held:
        return "the service runs already"
    return restart(system, hands)


def restart(system: System, hands: Hands) -> str:
    _installed(system)
    if system.loaded(hands):
        system.unload(hands)
    if not hands.dry:
        ledger.forgive(ledger.file())
    system.load(hands)
    system.wake(hands)
    return "started"


def stop(system: System, hands: Hands) -> str:
    _installed(system)
    if not system.loaded(hands):
        return "the service is stopped already"
    system.unload(hands)
    return "stopped, until `mlxspec service start` or the next login"


def _installed(system: System) -> None:
    if not all(path.exists() for path in system.paths()):
        raise Unfit("the service is not installed; `mlxspec service install` does that")


def status(system: System, hands: Hands) -> tuple[str, int]:
    """What there is to say, and an exit status: 0 it runs or waits, 3 it does not, 4 it is not installed.
    Nothing is started by asking."""
    if not all(path.exists() for path in system.paths()):
        return "not installed; `mlxspec service install` does that", 4
    if not system.loaded(hands):
        return "stopped; `mlxspec service start` starts it", 3
    now, (host, port) = ledger.read(ledger.file()), system.address() or ("?", 0)
    at = url_of(host, port)
    if now.held:
        return f"stays down at {at}: {now.held}", 3
    if not now.running:
        return f"waits for a connection at {at}", 0
    return f"runs at {at}, process {now.pid}: {_health(at)}", 0


def _health(at: str) -> str:
    try:
        with urllib.request.urlopen(f"{at}/health", timeout=HEALTH_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(ValueError):
            return str(json.load(error).get("reason", error))
        return str(error)
    except (OSError, ValueError) as error:
        return f"it does not answer ({error})"
    loaded = ", ".join(found.get("loaded", [])) or "asleep, no model is loaded"
    return "; ".join([loaded, *([found["note"]] if found.get("note") else [])])
