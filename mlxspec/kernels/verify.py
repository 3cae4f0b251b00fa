"""Decides per (kernel, shape) whether a Metal kernel runs on this machine.

Rule: a kernel runs only after it matched its reference and beat MLX's own op here. A kernel whose
trial ended the process stays off until the chip, macOS, MLX or the kernels' code changes.
"""

import logging
import math
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx
from pydantic import TypeAdapter

from mlxspec.config import data_dir
from mlxspec.files import lock, write_atomic
from mlxspec.types import line_of

log = logging.getLogger("mlxspec")

WIN = 1.15  # the speedup that a kernel must bring
LEVEL = 0.97  # fewer rows join a winning range at this speedup, so that drafts change no kernel
SEEDS = 3  # inputs compared for each count of rows
TURNS = 5  # of a race; the best counts
RACE_S = 0.008  # a measurement takes at least this long, or MAX_CALLS calls
ROTATED_BYTES = 192 << 20  # of inputs in a race: twice the largest cache of an M1 to M5
MIN_CALLS = 4  # of a measurement
MAX_CALLS = 32
MAX_SETS = 32  # of inputs
ROUNDING = {mx.float16: 2**-11, mx.bfloat16: 2**-8}  # relative error of rounding once
CALL_LIMIT_S = 10.0
HANG_FACTOR = 10  # times the median of steps with as many rows, and at least HANG_S:
HANG_S = 1.0  # other programs on the GPU delay a step by tenths of a second
FIRST_HANG_S = 60.0  # before MIN_STEPS steps are known; the first of a row count compiles
MIN_STEPS = 16
MAX_STEPS = 64  # remembered for a row count
AT_START_S = 20.0  # for all cases
SHARE = 0.2  # of this time, for one case
UNTRIED = "no time was left, or another process tries kernels; the next start goes on"
OUT_OF_MEMORY = ("malloc", "Insufficient Memory")  # in what MLX and Metal raise
CRASHED = "its trial ended the process or still runs; delete the cache directory to try it again"

Call = Callable[..., mx.array]
Inputs = tuple[mx.array, ...]


class Rejected(Exception):
    """Why a variant is not used."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape; `name` says which.

    `inputs(rows, seed)` makes the arguments of `stock` (MLX's own op), `reference` and each of
    `variants`. `rows`, rising, are compared; `raced` (empty: all) are timed. `tolerance` bounds the
    largest difference relative to the largest value, after one rounding to the inputs' dtype.
    `nested`: inputs of fewer rows are the first rows of more; then a result's row must not depend
    on the number of rows, to the bit.
    """

    name: str
    rows: tuple[int, ...]
    inputs: Callable[[int, int], Inputs]
    stock: Call
    reference: Call
    variants: Mapping[str, Call]
    tolerance: float
    nested: bool = False
    raced: tuple[int, ...] = ()


@dataclass(slots=True)
class Verdict:
    """The result of a case: variant `way` runs for `least` to `most` rows ("": MLX's own op runs).

    `error`: relative to the largest value. `gains`: speedup over MLX's own op by rows. `why`: why
    variants were rejected. `parked`: it crashed or hung; delete the cache directory to
    try it again.
    """

    way: str = ""
    least: int = 0
    most: int = 0
    error: float = 0.0
    gains: dict[int, float] = field(default_factory=dict)
    why: str = ""
    parked: bool = False


@dataclass(slots=True)
class KernelRegistry:
    """The verdicts that the kernels' wrappers look up at each call, by `Case.name`.

    mlx-lm's layers call the wrappers without a context, so there is one registry per process,
    `KERNELS`. `recorded`, if not None, collects the cases of the calls, for kernels that are used
    or not.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    recorded: list[Case] | None = None
    marker: Path | None = None  # of the trial that runs now
    deadline: float = 0.0  # of that trial

    def variant(self, name: str, rows: int) -> str:
        """The variant that runs for so many rows; "": MLX's own op."""
        verdict = self.verdicts.get(name)
        return verdict.way if verdict and verdict.least <= rows <= verdict.most else ""

    def abandon_trial(self) -> None:
        """Remove the crash marker because the process exits on purpose; a hung trial keeps it."""
        if self.marker and perf_counter() < self.deadline:
            self.marker.unlink(missing_ok=True)

    def park(self, reason: str) -> None:
        """Turn off the kernels in use until the process ends."""
        used = [verdict for verdict in self.verdicts.values() if verdict.way]
        for verdict in used:
            verdict.why = f"{reason}, while {verdict.way} was in use"
            verdict.way = ""
            verdict.parked = True
        if used:
            mx.disable_compile()  # compiled functions contain a kernel and do not look it up
            log.warning("%s: %d kernels are off until this process ends", reason, len(used))

    def reset(self) -> None:
        self.verdicts.clear()
        self.recorded = self.marker = None


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


VERDICTS_JSON = TypeAdapter(dict[str, Verdict])


@dataclass(frozen=True, slots=True)
class VerdictFile:
    """The verdicts of one machine and version of everything: a JSON file in `folder`, named by the
    hash of `facts`, and a marker file with the name of the case that is being tried."""

    folder: Path
    facts: dict[str, str] = field(default_factory=machine)

    def path(self, suffix: str) -> Path:
        digest = sha256(repr(self.facts).encode())
        return self.folder / f"{digest.hexdigest()[:24]}.{suffix}"

    def load(self) -> dict[str, Verdict]:
        """All verdicts by name; a missing or broken file has none."""
        verdicts: dict[str, Verdict] = {}
        with suppress(OSError, ValueError):
            verdicts = VERDICTS_JSON.validate_json(self.path("json").read_bytes())
        with suppress(OSError, ValueError):
            name = self.path("trying").read_text("utf-8")
            verdicts[name] = Verdict(why=CRASHED, parked=True)
        return verdicts

    def save(self, verdicts: Mapping[str, Verdict]) -> None:
        """Add to the file. Raises OSError."""
        data = VERDICTS_JSON.dump_json({**self.load(), **verdicts})
        write_atomic(self.path("json"), data, durable=True)


def missing() -> str:
    """Why no kernel can run here; "": they can."""
    usable = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return "" if usable else "no Metal here"


def verify(
    cases: Iterable[Case],
    file: VerdictFile,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Verdict]:
    """Fill KERNELS for these cases and return their verdicts, within about AT_START_S seconds."""
    todo = {case.name: case for case in cases}
    reason = missing()
    found = dict.fromkeys(todo, Verdict(why=reason or UNTRIED))
    if not reason:
        known = file.load()
        known |= {name: v for name, v in KERNELS.verdicts.items() if v.parked}
        unknown = []
        for name, case in todo.items():
            if name in known:
                found[name] = known[name]
            else:
                unknown.append(case)
        try:
            if unknown:
                found |= _try_all(unknown, file, report)
        except OSError as error:
            log.warning("%s: %s; no kernel is tried without a crash marker", file.folder, error)
    KERNELS.verdicts.update(found)
    return found


def _try_all(
    cases: list[Case],
    file: VerdictFile,
    report: Callable[[int, int], None],
) -> dict[str, Verdict]:
    """The verdicts of the cases that there is time for, none if another process tries kernels.

    A marker is on the disk while a case is tried. Raises OSError if it cannot be written.
    """
    end = perf_counter() + AT_START_S
    found: dict[str, Verdict] = {}
    with lock(file.folder / "lock", wait=False) as held:
        if not held:
            return found
        file.save({})  # with the crash that an old marker tells of
        for done, case in enumerate(cases, 1):
            until = perf_counter() + AT_START_S * SHARE
            if until <= end:
                with _marked(case, file, until):
                    found[case.name] = verdict = judge(case, until)
                    if not any(word in verdict.why for word in OUT_OF_MEMORY):
                        file.save({case.name: verdict})  # else it may fit at the next start
            report(done, len(cases))
    return found


@contextmanager
def _marked(case: Case, file: VerdictFile, until: float) -> Iterator[None]:
    """While this is open, the end of the process counts as a crash of the case."""
    marker = file.path("trying")
    write_atomic(marker, case.name.encode(), durable=True)
    KERNELS.deadline = until + 2 * CALL_LIMIT_S
    KERNELS.marker = marker
    try:
        yield
    finally:
        KERNELS.marker = None
        marker.unlink(missing_ok=True)
        mx.clear_cache()


def judge(case: Case, until: float = math.inf) -> Verdict:
    """Compare and race a case's variants."""
    rejected: dict[str, str] = {}
    try:
        errors = compare(case, rejected, until)
        speedups = race(case, list(errors), until)
    except Exception as error:  # out of time, or raised by the case's inputs or MLX's own op
        log.debug("%s cannot be tried", case.name, exc_info=True)
        return Verdict(why=f"it cannot be tried: {_text(error)}")
    best = Verdict()
    for variant, gains in speedups.items():
        least, most = winning_rows(gains)
        if not most:
            top = max(gains.values())
            rejected[variant] = f"right, but at most {top:.2f} times as fast; {WIN} is required"
            best.gains = best.gains or gains
        elif not best.way or sum(gains.values()) > sum(best.gains.values()):
            best = Verdict(variant, least, most, errors[variant], gains)
    best.why = "; ".join(f"{variant}: {reason}" for variant, reason in rejected.items())
    return best


def winning_rows(gains: Mapping[int, float]) -> tuple[int, int]:
    """The widest range of row counts at which the kernel wins, from one row on if it is slower at
    none below; (0, 0): it never wins. From one row on, drafts do not change the kernel of a row."""
    least = most = start = 0
    for rows in sorted(gains):
        if gains[rows] < WIN:
            start = 0
            continue
        start = start or rows
        if rows - start >= most - least:
            least = start
            most = rows
    if most and all(gain >= LEVEL for rows, gain in gains.items() if rows < least):
        least = 1
    return least, most


def compare(case: Case, rejected: dict[str, str], until: float) -> dict[str, float]:
    """The largest error of each variant that matches the reference at all rows; fills `rejected`
    with the others. Raises TimeoutError."""
    errors = dict.fromkeys(case.variants, 0.0)
    most = case.rows[-1]
    for seed in range(SEEDS):
        results: dict[str, mx.array] = {}  # with the most rows
        for rows in reversed(case.rows):
            inputs = case.inputs(rows, seed)
            if rows == most or not case.nested:
                exact = case.reference(*inputs)
            mx.eval(inputs, exact)
            want = exact[: len(exact) * rows // most] if case.nested else exact
            for variant in list(errors):
                try:
                    got, _ = _run(case.variants[variant], [inputs], until)
                    error = relative_error(got, want, case.tolerance, inputs[0].dtype)
                    whole = results.setdefault(variant, got)
                    if case.nested and not mx.array_equal(got, whole[: len(got)], equal_nan=True):
                        raise Rejected("a row depends on the number of rows")
                    errors[variant] = max(errors[variant], error)
                except TimeoutError:
                    raise
                except Exception as failed:  # a kernel may not compile or launch
                    del errors[variant]
                    rejected[variant] = f"{_text(failed)} ({rows} rows)"
    return errors


def relative_error(
    got: mx.array,
    want: mx.array,
    tolerance: float,
    dtype: mx.Dtype = mx.float32,
) -> float:
    """The largest difference relative to the largest value; integers must be equal.

    Floats must be `dtype`; against a fp32 `want` rounding once to it is free. Raises Rejected above
    `tolerance`.
    """
    rounding = 0.0
    if not mx.issubdtype(want.dtype, mx.floating):
        dtype = want.dtype
        tolerance = 0.0
    elif want.dtype == mx.float32:
        rounding = ROUNDING.get(dtype, 0.0)
    if got.shape != want.shape or got.dtype != dtype:
        raise Rejected(f"{got.dtype} {got.shape} instead of {dtype} {want.shape}")
    got = got.astype(mx.float32)
    want = want.astype(mx.float32)
    finite = mx.isfinite(want)
    if mx.any(finite & ~mx.isfinite(got)).item():
        raise Rejected("not finite where the reference is")
    size = mx.where(finite, mx.abs(want), 0)
    off = mx.where(finite, mx.abs(got - want), 0) - rounding * size
    error = max(0.0, float(off.max())) / max(float(size.max()), 1e-30)
    if error > tolerance:
        raise Rejected(f"off by {error:.2g} of the largest value, {tolerance:.2g} is allowed")
    return error


def race(case: Case, variants: list[str], until: float) -> dict[str, dict[int, float]]:
    """Each variant's speedup over MLX's own op by rows. Raises TimeoutError."""
    speedups: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    if not variants:
        return speedups
    sides = {variant: case.variants[variant] for variant in variants}
    sides[""] = case.stock
    for rows in case.raced or case.rows:
        sets = [case.inputs(rows, 0)]
        count = ROTATED_BYTES // sum(x.nbytes for x in sets[0])
        for seed in range(1, min(MAX_SETS, count)):
            sets.append(case.inputs(rows, seed))
        mx.eval(sets)
        inputs = cycle(sets)  # each call reads what was not read for longest
        _measure(sides, inputs, MIN_CALLS, until)  # compiles
        slowest = max(_measure(sides, inputs, MIN_CALLS, until).values())
        calls = min(MAX_CALLS, max(MIN_CALLS, int(RACE_S / slowest)))
        turns = [_measure(sides, inputs, calls, until) for _ in range(TURNS)]
        stock = min(turn[""] for turn in turns)
        for variant in variants:
            speedups[variant][rows] = stock / min(turn[variant] for turn in turns)
    return speedups


def _measure(
    sides: Mapping[str, Call],
    inputs: Iterator[Inputs],
    calls: int,
    until: float,
) -> dict[str, float]:
    """Seconds per call of each side."""
    seconds = {}
    for side, call in sides.items():
        _, seconds[side] = _run(call, list(islice(inputs, calls)), until)
    return seconds


def _run(call: Call, sets: list[Inputs], until: float) -> tuple[mx.array, float]:
    """Call with each of `sets`: the last result, and seconds per call. Raises TimeoutError after
    `until`, Rejected for a call that hangs."""
    began = perf_counter()
    results = [call(*inputs) for inputs in sets]
    mx.eval(results)
    now = perf_counter()
    if now - began > CALL_LIMIT_S:
        raise Rejected(f"{len(sets)} calls took {now - began:.0f} s")
    if now > until:
        raise TimeoutError("the time was too short")
    return results[-1], max(now - began, 1e-9) / len(sets)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, Rejected) else line_of(error)


@dataclass(slots=True)
class HangDetector:
    """Parks the kernels in use when a step hangs; which one hung cannot be told."""

    _steps: dict[int, deque[float]] = field(default_factory=dict)  # seconds by rows

    def took(self, rows: int, seconds: float, waited: float, meanwhile: int = 0) -> None:
        """Record a step of `rows` rows that lasted `seconds`, of which the host waited `waited` for
        the GPU. `meanwhile`: rows of the step that was built while it ran, 0: none."""
        past = self._steps.setdefault(rows, deque(maxlen=MAX_STEPS))
        beside = self._steps.get(meanwhile, ()) if meanwhile else past
        limit = FIRST_HANG_S
        if min(len(past), len(beside)) >= MIN_STEPS:
            limit = max(HANG_S, HANG_FACTOR * median(past))
        if waited < limit:
            past.append(seconds)
        else:
            KERNELS.park(f"a step of {rows} rows waited {waited:.1f} s for the GPU")
