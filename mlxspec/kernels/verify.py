"""Decides per (kernel, shape) whether a Metal kernel runs on this machine.

Rule: a kernel runs only after it matched its reference and beat MLX's own op here. A kernel whose
trial ended the process stays off until the chip, macOS, MLX or the kernels' code changes.
"""

import logging
import math
import platform
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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

log = logging.getLogger("mlxspec")

WIN = 1.15  # the speedup that a kernel must bring
LEVEL = 0.97  # fewer rows join a winning range at this speedup, so that drafts change no kernel
SEEDS = 3  # inputs compared for each count of rows
WARMUPS, TURNS = 2, 5  # of a race; the first compiles, the best counts
RACE_S = 0.008  # a measurement takes at least this long, or MAX_CALLS calls
ROTATED_BYTES = 192 << 20  # of inputs in a race: twice the largest cache of an M1 to M5
MIN_CALLS, MAX_CALLS, MAX_SETS = 4, 32, 32  # calls and inputs of a measurement
ROUNDING = {mx.float16: 2**-11, mx.bfloat16: 2**-8}  # relative error of rounding once
CALL_LIMIT_S = 10.0
HANG_FACTOR = 10  # times the median of steps with as many rows, and at least HANG_S:
HANG_S = 1.0  # other programs on the GPU delay a step by tenths of a second
FIRST_HANG_S = 60.0  # before MIN_STEPS steps are known; the first of a row count compiles
MIN_STEPS, MAX_STEPS = 16, 64
AT_START_S, TUNING_S = 20.0, 600.0  # for all cases
SHARE = 0.2  # of this time, for one case
UNTRIED = "no time was left, or another process tries kernels; the next start goes on"
OUT_OF_MEMORY = ("malloc", "Insufficient Memory")  # in what MLX and Metal raise
CRASHED = "its trial ended the process or still runs; delete the cache directory to try it again"

Call = Callable[..., mx.array]


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
    inputs: Callable[[int, int], tuple[mx.array, ...]]
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
            verdict.way, verdict.parked = "", True
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
            verdicts[self.path("trying").read_text("utf-8")] = Verdict(why=CRASHED, parked=True)
        return verdicts

    def save(self, verdicts: Mapping[str, Verdict]) -> None:
        """Add to the file. Raises OSError."""
        write_atomic(self.path("json"), VERDICTS_JSON.dump_json({**self.load(), **verdicts}), True)


def missing() -> str:
    """Why no kernel can run here; "": they can."""
    usable = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return "" if usable else "no Metal here"


def verify(
    cases: Iterable[Case],
    file: VerdictFile,
    seconds: float = AT_START_S,
    again: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Verdict]:
    """Fill KERNELS for these cases and return their verdicts.

    `seconds` for all, of which a case gets a share; `again`: measure known cases too;
    `tell(done, of)`: progress.
    """
    todo = {case.name: case for case in cases}
    reason = missing()
    found = dict.fromkeys(todo, Verdict(why=reason or UNTRIED))
    if not reason:
        known = {}
        if not again:
            hung = {name: v for name, v in KERNELS.verdicts.items() if v.parked}
            known = file.load() | hung  # what hung in this process stays off
        found |= {name: known[name] for name in todo if name in known}
        unknown = [case for name, case in todo.items() if name not in known]
        try:
            if unknown:
                _try_all(unknown, found, file, seconds, tell)
        except OSError as error:
            log.warning("%s: %s; no kernel is tried without a crash marker", file.folder, error)
    KERNELS.verdicts.update(found)
    return found


def _try_all(
    cases: list[Case],
    found: dict[str, Verdict],
    file: VerdictFile,
    seconds: float,
    tell: Callable[[int, int], None],
) -> None:
    """Judge the cases into `found`, if no other process does. Raises OSError."""
    end = perf_counter() + seconds
    with lock(file.folder / "lock", wait=False) as held:
        if not held:
            return
        file.save({})  # with the crash that an old marker tells of
        for done, case in enumerate(cases, 1):
            until = perf_counter() + seconds * SHARE
            if until <= end:
                found[case.name] = _try(case, file, until)
            tell(done, len(cases))


def _try(case: Case, file: VerdictFile, until: float) -> Verdict:
    """Judge a case while the marker is on the disk. Raises OSError if it cannot be written."""
    marker = file.path("trying")
    write_atomic(marker, case.name.encode(), durable=True)
    KERNELS.marker, KERNELS.deadline = marker, until + 2 * CALL_LIMIT_S
    try:
        verdict = judge(case, until)
        if not any(word in verdict.why for word in OUT_OF_MEMORY):  # may fit at the next start
            file.save({case.name: verdict})
        return verdict
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
        verdict = Verdict(variant, least, most, errors[variant], gains)
        if not most:
            top = max(gains.values())
            rejected[variant] = f"right, but at most {top:.2f} times as fast; {WIN} is required"
            verdict.way = ""
        best = max(best, verdict, key=lambda v: (v.most > 0, sum(v.gains.values())))
    best.why = "; ".join(f"{variant}: {reason}" for variant, reason in rejected.items())
    return best


def winning_rows(gains: Mapping[int, float]) -> tuple[int, int]:
    """The widest range of row counts at which the kernel wins, from one row on if it is slower at
    none below; (0, 0): it never wins. From one row on, drafts do not change the kernel of a row."""
    best = run = (0, 0)
    for rows in sorted(gains):
        run = (run[0] or rows, rows) if gains[rows] >= WIN else (0, 0)
        best = max(best, run, key=lambda found: (found[1] - found[0], found[1]))
    below = [gain for rows, gain in gains.items() if rows < best[0]]
    return (1 if best[1] and min(below, default=1) >= LEVEL else best[0]), best[1]


def compare(case: Case, rejected: dict[str, str], until: float) -> dict[str, float]:
    """The largest error of each variant that matches the reference at all rows; fills `rejected`
    with the others. Raises TimeoutError."""
    errors = dict.fromkeys(case.variants, 0.0)
    most = case.rows[-1]
    for seed in range(SEEDS):
        full: dict[str, mx.array] = {}  # results with the most rows
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
                    errors[variant] = max(errors[variant], error)
                    same = full.setdefault(variant, got)[: len(got)]
                    if case.nested and not mx.array_equal(got, same, equal_nan=True):
                        raise Rejected("a row depends on the number of rows")
                except TimeoutError:
                    raise
                except Exception as failed:  # a kernel may not compile or launch
                    del errors[variant]
                    rejected[variant] = f"{_text(failed)} ({rows} rows)"
    return errors


def relative_error(
    got: mx.array, want: mx.array, tolerance: float, dtype: mx.Dtype = mx.float32
) -> float:
    """The largest difference relative to the largest value; integers must be equal.

    Floats must be `dtype`; against a fp32 `want` rounding once to it is free. Raises Rejected above
    `tolerance`.
    """
    numbers = mx.issubdtype(want.dtype, mx.floating)
    expected = dtype if numbers else want.dtype
    if got.shape != want.shape or got.dtype != expected:
        raise Rejected(f"{got.dtype} {got.shape} instead of {expected} {want.shape}")
    rounding = ROUNDING.get(dtype, 0.0) if numbers and want.dtype == mx.float32 else 0.0
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    finite = mx.isfinite(want)
    if mx.any(finite & ~mx.isfinite(got)).item():
        raise Rejected("not finite where the reference is")
    size = mx.where(finite, mx.abs(want), 0)
    off = mx.where(finite, mx.abs(got - want), 0) - rounding * size
    error = max(0.0, float(off.max())) / max(float(size.max()), 1e-30)
    if error > (tolerance if numbers else 0):
        raise Rejected(f"off by {error:.2g} of the largest value, {tolerance:.2g} is allowed")
    return error


def race(case: Case, variants: list[str], until: float) -> dict[str, dict[int, float]]:
    """Each variant's speedup over MLX's own op by rows. Raises TimeoutError."""
    speedups: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    sides = {"": case.stock, **{variant: case.variants[variant] for variant in variants}}
    for rows in (case.raced or case.rows) if variants else ():
        sets = [case.inputs(rows, 0)]
        count = ROTATED_BYTES // sum(x.nbytes for x in sets[0])
        sets += [case.inputs(rows, seed) for seed in range(1, min(MAX_SETS, count))]
        mx.eval(sets)
        inputs = cycle(sets)  # each call reads what was not read for longest
        calls, best = MIN_CALLS, {"": math.inf}
        for turn in range(WARMUPS + TURNS):
            if turn <= WARMUPS:
                calls = min(MAX_CALLS, max(calls, int(RACE_S / max(best.values()))))
                best = dict.fromkeys(sides, math.inf)
            for side, call in sides.items():
                _, seconds = _run(call, list(islice(inputs, calls)), until)
                best[side] = min(best[side], max(seconds, 1e-9))
        for variant, gains in speedups.items():
            gains[rows] = best[""] / best[variant]
    return speedups


def _run(call: Call, sets: list[tuple[mx.array, ...]], until: float) -> tuple[mx.array, float]:
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
    return results[-1], (now - began) / len(sets)


def _text(error: Exception) -> str:
    first_line = str(error).partition("\n")[0][:200]
    return first_line if isinstance(error, Rejected) else f"{type(error).__name__}: {first_line}"


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
