"""Compares a kernel's variants with its reference and races them with MLX's own op.

Rule: a variant whose result is wrong anywhere is rejected with the reason, whatever its speed.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter

import mlx.core as mx

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

Call = Callable[..., mx.array]
Inputs = tuple[mx.array, ...]


class Rejected(Exception):
    """Why a variant is not used."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape; `name` says which.

    `inputs(seed)` makes the arguments of `stock` (MLX's own op), `reference` and each of `variants`
    for the most rows; the first `by_row` of them are cut to call with fewer. `rows`, rising, are
    compared: a result's row must not depend on their number, to the bit. `raced` (empty: all) are
    timed. `tolerance` bounds the largest difference relative to the largest value, after one
    rounding to the inputs' dtype.
    """

    name: str
    rows: tuple[int, ...]
    inputs: Callable[[int], Inputs]
    stock: Call
    reference: Call
    variants: Mapping[str, Call]
    tolerance: float
    by_row: int = 1
    raced: tuple[int, ...] = ()

    def cut(self, inputs: Inputs, rows: int) -> Inputs:
        """The arguments for so many rows."""
        cut = [x[:rows] for x in inputs[: self.by_row]]
        return *cut, *inputs[self.by_row :]


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


def judge(case: Case, until: float = math.inf) -> Verdict:
    """Compare and race a case's variants."""
    rejected: dict[str, str] = {}
    try:
        errors = compare(case, rejected, until)
        speedups = race(case, list(errors), until)
    except Exception as error:  # out of time, or raised by the case's inputs or MLX's own op
        log.debug("%s cannot be tried", case.name, exc_info=True)
        return Verdict(why=f"it cannot be tried: {line_of(error)}")
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


def compare(
    case: Case,
    rejected: dict[str, str],
    until: float,
) -> dict[str, float]:
    """The largest error of each variant that matches the reference at all rows; fills `rejected`
    with the others. Raises TimeoutError."""
    errors = dict.fromkeys(case.variants, 0.0)
    for seed in range(SEEDS):
        inputs = case.cut(case.inputs(seed), case.rows[-1])
        want = case.reference(*inputs)
        mx.eval(inputs, want)
        for variant in list(errors):
            call = case.variants[variant]
            try:
                whole, _ = _run(call, [inputs], until)
                error = relative_error(whole, want, case.tolerance, inputs[0].dtype)
                errors[variant] = max(errors[variant], error)
                for rows in case.rows[:-1]:
                    got, _ = _run(call, [case.cut(inputs, rows)], until)
                    first = whole[: len(whole) * rows // case.rows[-1]]
                    if not mx.array_equal(got, first, equal_nan=True):
                        raise Rejected(f"with {rows} rows, a row differs")
            except TimeoutError:
                raise
            except Exception as failed:  # a kernel may not compile or launch
                del errors[variant]
                rejected[variant] = line_of(failed)
    return errors


def relative_error(
    got: mx.array,
    want: mx.array,
    tolerance: float,
    dtype: mx.Dtype = mx.float32,
) -> float:
    """The largest difference relative to the largest value.

    Floats must be `dtype`, and rounding once to it is free. Raises Rejected above `tolerance`.
    """
    if not mx.issubdtype(want.dtype, mx.floating):
        dtype = want.dtype
    if got.shape != want.shape or got.dtype != dtype:
        raise Rejected(f"{got.dtype} {got.shape} instead of {dtype} {want.shape}")
    got = got.astype(mx.float32)
    want = want.astype(mx.float32)
    finite = mx.isfinite(want)
    if mx.any(finite & ~mx.isfinite(got)).item():
        raise Rejected("not finite where the reference is")
    size = mx.where(finite, mx.abs(want), 0)
    off = mx.where(finite, mx.abs(got - want), 0) - ROUNDING.get(dtype, 0.0) * size
    error = max(0.0, float(off.max())) / max(float(size.max()), 1e-30)
    if error > tolerance:
        raise Rejected(f"off by {error:.2g} of the largest value, {tolerance:.2g} is allowed")
    return error


def race(
    case: Case,
    variants: list[str],
    until: float,
) -> dict[str, dict[int, float]]:
    """Each variant's speedup over MLX's own op by rows. Raises TimeoutError."""
    speedups: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    if not variants:
        return speedups
    sides = {variant: case.variants[variant] for variant in variants}
    sides[""] = case.stock
    sets = [case.inputs(0)]
    count = ROTATED_BYTES // sum(x.nbytes for x in sets[0])
    for seed in range(1, min(MAX_SETS, count)):
        sets.append(case.inputs(seed))
    for rows in case.raced or case.rows:
        cut = [case.cut(inputs, rows) for inputs in sets]
        mx.eval(cut)
        inputs = cycle(cut)  # each call reads what was not read for longest
        _measure(sides, inputs, MIN_CALLS, until)  # compiles
        slowest = max(_measure(sides, inputs, MIN_CALLS, until).values())
        calls = min(MAX_CALLS, max(MIN_CALLS, int(RACE_S / slowest)))
        turns = [_measure(sides, inputs, calls, until) for _ in range(TURNS)]
        best = {side: min(turn[side] for turn in turns) for side in sides}
        for variant in variants:
            speedups[variant][rows] = best[""] / best[variant]
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


def _run(
    call: Call,
    sets: list[Inputs],
    until: float,
) -> tuple[mx.array, float]:
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
