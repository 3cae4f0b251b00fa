"""Decides per (kernel, shape) whether a Metal kernel runs on this machine.

Rule: a kernel runs only after it matched its reference and beat MLX's own op here. A kernel whose
trial ended the process stays off until the chip, macOS, MLX or the kernels' code changes.
"""

import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import mlx.core as mx
from pydantic import TypeAdapter

from mlxspec import log
from mlxspec.config import data_dir
from mlxspec.files import flush_file, lock, write_atomic
from mlxspec.kernels.trial import CALL_LIMIT_S, Case, Verdict, judge
from mlxspec.progress import Report
from mlxspec.types import Check

Verdicts = dict[str, Verdict]  # by Case.name

AT_START_S = 20.0  # for all cases
CASE_S = 4.0  # for one case, beside compiling it
COMPILE_S = 60.0  # after which a trial that still runs may hang
UNTRIED = "no time was left, or another process tries kernels; the next start continues"
OUT_OF_MEMORY = ("malloc", "Insufficient Memory")  # in errors of MLX and Metal
CRASHED = "its trial ended the process or still runs; delete the cache directory to try it again"


@dataclass(slots=True)
class KernelRegistry:
    """The verdicts that the kernels' wrappers look up at each call, by `Case.name`.

    mlx-lm's layers call the wrappers without a context, so there is one registry per process,
    `KERNELS`. `recorded`, if not None, collects the cases of all calls.
    """

    verdicts: Verdicts = field(default_factory=dict)
    recorded: list[Case] | None = None
    forget: Callable[[], None] | None = None  # takes back that the running trial counts as a crash
    deadline: float = 0.0  # of that trial

    def variant(self, name: str, rows: int) -> str:
        """The variant that runs for `rows` rows; "": MLX's own op."""
        verdict = self.verdicts.get(name)
        return verdict.variant if verdict and verdict.least <= rows <= verdict.most else ""

    def is_correct(self, name: str) -> bool:
        """Whether a variant gives the right values at all row counts, whatever its speed."""
        verdict = self.verdicts.get(name)
        return bool(verdict and verdict.right)

    def abandon_trial(self) -> None:
        """The process exits on purpose: the running trial is no crash, unless it hangs."""
        if self.forget and perf_counter() < self.deadline:
            with suppress(OSError):
                self.forget()


KERNELS = KernelRegistry()


@cache
def machine() -> dict[str, str]:
    """What a verdict depends on: chip, operating system, MLX and the kernels' code."""
    files = [*data_dir("metal").glob("*.metal"), *Path(__file__).parent.glob("*.py")]
    code = sha256(b"".join(file.read_bytes() for file in sorted(files)))
    return {
        "chip": str(mx.device_info().get("device_name", "unknown")),
        "system": platform.mac_ver()[0] or platform.release(),
        "mlx": version("mlx"),
        "code": code.hexdigest(),
    }


VERDICTS_JSON = TypeAdapter(Verdicts)


@dataclass(frozen=True, slots=True)
class VerdictFile:
    """The verdicts of one machine and version of everything: a JSON file in `folder`, named by the
    hash of `facts`."""

    folder: Path
    facts: dict[str, str] = field(default_factory=machine)

    @property
    def path(self) -> Path:
        digest = sha256(repr(self.facts).encode())
        return self.folder / f"{digest.hexdigest()[:24]}.json"

    def load(self) -> Verdicts:
        """All verdicts by name; a missing or broken file has none."""
        try:
            return VERDICTS_JSON.validate_json(self.path.read_bytes())
        except (OSError, ValueError):
            return {}

    def save(self, verdicts: Verdicts) -> None:
        """Replace the file, also for a trial that ends the system. Raises OSError."""
        write_atomic(self.path, VERDICTS_JSON.dump_json(verdicts))
        flush_file(self.path)


def unavailable() -> str:
    """Why no kernel can run here; "": they can."""
    usable = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return "" if usable else "no Metal here"


def recall(cases: Iterable[Case], file: VerdictFile) -> Verdicts:
    """Load the verdicts of these cases from `file` into KERNELS, and return them."""
    reason = unavailable()
    stored = {} if reason else file.load()
    default = Verdict(reason=reason or UNTRIED)
    verdicts = {case.name: stored.get(case.name, default) for case in cases}
    KERNELS.verdicts.update(verdicts)
    return verdicts


def untried(cases: Iterable[Case]) -> list[Case]:
    """The recalled cases that were never judged on this machine."""
    return [case for case in cases if KERNELS.verdicts[case.name].reason == UNTRIED]


def verify(
    cases: Iterable[Case],
    file: VerdictFile,
    report: Report = lambda done, total: None,
    check: Check = lambda: None,
) -> Verdicts:
    """Judge the cases without a verdict, fill KERNELS and return the verdicts of all, within about
    AT_START_S seconds. Calls `check` between launches and passes on what it raises; KERNELS is then
    as before, and the verdicts so far are in the file."""
    cases = list({case.name: case for case in cases}.values())
    stored = {} if unavailable() else file.load()
    remaining = [case for case in cases if case.name not in stored]
    try:
        if remaining and not unavailable():
            _try_all(remaining, file, report, check)
    except OSError as error:
        log.warning(
            "%s: %s; no kernel is tried, because a crash could not be recorded",
            file.folder,
            error,
        )
    return recall(cases, file)


def _try_all(cases: list[Case], file: VerdictFile, report: Report, check: Check) -> None:
    """Judge as many cases as time allows, none if another process tries kernels. Raises OSError
    if a trial cannot be recorded."""
    end = perf_counter() + AT_START_S
    with lock(file.folder / "lock", wait=False) as held:
        if not held:
            return
        for done, case in enumerate(cases, 1):
            if perf_counter() + CASE_S <= end:
                _try(case, file, check)
            report(done, len(cases))


def _try(case: Case, file: VerdictFile, check: Check) -> None:
    """Judge a case. Until then the file says that it crashed, in case it ends the process. What was
    too late is tried again at the next start, for which macOS keeps what was compiled."""
    verdicts = file.load()
    KERNELS.deadline = perf_counter() + COMPILE_S + CASE_S + 2 * CALL_LIMIT_S
    KERNELS.forget = partial(file.save, verdicts)
    try:
        file.save({**verdicts, case.name: Verdict(reason=CRASHED)})
        with suppress(TimeoutError):
            verdict = judge(case, CASE_S, check)
            if not any(word in verdict.reason for word in OUT_OF_MEMORY):
                verdicts[case.name] = verdict  # else it may fit at the next start
    finally:
        KERNELS.forget = None
        file.save(verdicts)
        mx.clear_cache()
