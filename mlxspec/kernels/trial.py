"""Compares a kernel's variants with its reference and times them beside MLX's own op.

Rule: a variant whose result is wrong anywhere is rejected with the reason, whatever its speed.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.types import Check, Interrupted, line_of

WIN = 1.15  # the speedup that a kernel must bring
LEVEL = 0.97  # fewer rows join a winning range at this speedup, so that drafts change no kernel
SEEDS = 3  # inputs compared for each count of rows
TURNS = 7  # of a race; the best counts, the first compiles
RACE_S = 0.008  # a measurement takes at least this long, or MAX_CALLS calls
ROTATED_BYTES = 96 << 20  # of inputs in a race, at least: the largest cache of an M1 to M5
MIN_CALLS = 4  # of a measurement
MAX_CALLS = 32
MAX_SETS = 32  # of inputs
ROUNDING = {mx.float16: 2**-11, mx.bfloat16: 2**-8}  # relative error of rounding once
CALL_LIMIT_S = 10.0

Call = Callable[..., Array]
Inputs = tuple[Array, ...]


class Rejected(Exception):
    """Why a variant is not used."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape; `name` says which.

    `inputs(seed)` makes the arguments of `stock` (MLX's own op), `reference` and each of `variants`
    for the largest row count; the first `by_row` of them are sliced for fewer rows. `rows`, rising,
    are the counts compared: a result's row must not depend on the count, to the bit, nor on its
    place, if rows are `exchangeable`. `raced` (empty: all) are timed. `tolerance` bounds the
    largest difference relative to the largest value, after one rounding to the inputs' dtype. At
    most about 256 MB of arrays are alive at once.
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
    exchangeable: bool = False

    def cut(self, inputs: Inputs, rows: int) -> Inputs:
        """The arguments for `rows` rows."""
        return self._each(inputs, slice(rows))

    def turned(self, inputs: Inputs) -> Inputs:
        """The arguments with the last row first."""
        return self._each(inputs, slice(None, None, -1))

    def _each(self, inputs: Inputs, rows: slice) -> Inputs:
        return *(x[rows] for x in inputs[: self.by_row]), *inputs[self.by_row :]


@dataclass(slots=True)
class Verdict:
    """The result of a case: `variant` runs for `least` to `most` rows ("": MLX's own op runs).

    `gains`: speedup over MLX's own op by rows. `reason`: why variants were rejected. `right`: those
    that give the right values, whatever their speed.
    """

    variant: str = ""
    least: int = 0
    most: int = 0
    gains: dict[int, float] = field(default_factory=dict)
    reason: str = ""
    right: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timer:
    """Launches calls until the time `until`; `check` is called before each launch."""

    until: float
    check: Check

    def run(
        self,
        call: Call,
        sets: list[Inputs],
        in_turn: bool = False,
    ) -> tuple[list[Array], float]:
        """Call with each of `sets` in one graph: the results, and seconds per call. `in_turn`: each
        call reads what the one before it has made, as in a step, where launches cannot overlap.
        Raises TimeoutError after `until`, Rejected for calls that hang, and what `check` raises."""
        self.check()
        began = perf_counter()
        results: list[Array] = []
        for first, *others in sets:
            x = _after(first, results[-1]) if in_turn and results else first
            results.append(call(x, *others))
        mx.eval(results)
        now = perf_counter()
        if now - began > CALL_LIMIT_S:
            raise Rejected(f"{len(sets)} calls took {now - began:.0f} s")
        if now > self.until:
            raise TimeoutError("the time was too short")
        return results, max(now - began, 1e-9) / max(1, len(sets))


def _after(x: Array, made: Array) -> Array:
    """x, which can only be read once `made` is there."""
    return x + (made.flatten()[:1] * 0).astype(x.dtype)


def judge(case: Case, seconds: float = math.inf, check: Check = lambda: None) -> Verdict:
    """Compare and race a case's variants: the fastest of those that win. Whatever a variant raises,
    or MLX's own op, is why it is not used. Calls `check` before each launch, and raises an
    Interrupted that it raises, and TimeoutError after `seconds`, which begin when all instances of
    a variant are compiled."""
    best = Verdict()
    rejected = []
    right: list[str] = []
    for variant, call in case.variants.items():
        try:
            _compile(case, call, check)
            timer = Timer(perf_counter() + seconds, check)
            compare(case, call, timer)
            right.append(variant)
            gains = race(case, call, timer)
        except (Interrupted, TimeoutError):
            raise
        except Exception as error:  # a kernel may not compile or launch
            rejected.append(f"{variant}: {line_of(error)}")
            continue
        least, most = winning_rows(gains)
        if not most:
            top = max(gains.values())
            rejected.append(
                f"{variant}: correct, but at most {top:.2f} times as fast; {WIN} is required",
            )
            best.gains = best.gains or gains
        elif not best.variant or sum(gains.values()) > sum(best.gains.values()):
            best = Verdict(variant, least, most, gains)
    best.reason = "; ".join(rejected)
    best.right = tuple(right)
    return best


def _compile(case: Case, call: Call, check: Check) -> None:
    """Compile the instances of a variant, which may take longer than a launch ever should."""
    inputs = case.inputs(0)
    timer = Timer(math.inf, check)
    for rows in case.rows:
        cut = case.cut(inputs, rows)
        with suppress(Rejected):
            timer.run(call, [cut])
            continue
        timer.run(call, [cut])


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


def compare(case: Case, call: Call, timer: Timer) -> None:
    """Raise Rejected for a variant that differs from the reference at any row count. Launches with
    fewer rows run in one graph, as those of a step's layers do. Raises TimeoutError."""
    for seed in range(SEEDS):
        arrays = case.inputs(seed)
        *fewer, inputs = [case.cut(arrays, rows) for rows in case.rows]
        want = case.reference(*inputs)
        mx.eval(inputs, want)
        (whole,), _ = timer.run(call, [inputs])
        relative_error(whole, want, case.tolerance, dtype=inputs[0].dtype)
        if case.exchangeable:
            (turned,), _ = timer.run(call, [case.turned(inputs)])
            if not mx.array_equal(turned[::-1], whole):
                raise Rejected("a row depends on its place")
        results, _ = timer.run(call, fewer)
        for rows in results:
            if not mx.array_equal(rows, whole[: len(rows)]):
                raise Rejected(f"one of {len(rows)} rows depends on their number")


def relative_error(
    got: Array,
    want: Array,
    tolerance: float,
    dtype: mx.Dtype = mx.float32,
) -> float:
    """The largest difference relative to the largest value; `want` is finite.

    Floats must be `dtype`, and rounding once to it is free. Raises Rejected above `tolerance`.
    """
    if not mx.issubdtype(want.dtype, mx.floating):
        dtype = want.dtype
    if got.shape != want.shape or got.dtype != dtype:
        raise Rejected(f"{got.dtype} {got.shape} instead of {dtype} {want.shape}")
    got = got.astype(mx.float32)
    want = want.astype(mx.float32)
    size = mx.abs(want)
    off = mx.abs(got - want) - ROUNDING.get(dtype, 0.0) * size
    error = max(0.0, float(off.max() / size.max()))
    if not mx.all(off <= tolerance * size.max()):  # nor for a NaN
        raise Rejected(f"off by {error:.2g} of the largest value, {tolerance:.2g} is allowed")
    return error


def race(case: Case, call: Call, timer: Timer) -> dict[int, float]:
    """A variant's speedup over MLX's own op by rows, timed in turn. Raises TimeoutError."""
    gains = {}
    sets = [case.inputs(0)]
    count = ROTATED_BYTES // sum(x.nbytes for x in sets[0])
    for seed in range(1, 1 + min(MAX_SETS, count)):
        sets.append(case.inputs(seed))
    for rows in case.raced or case.rows:
        cut = [case.cut(inputs, rows) for inputs in sets]
        mx.eval(cut)
        inputs = cycle(cut)  # each call reads the least recently read
        stock = ours = math.inf
        repeats = MIN_CALLS
        for _ in range(TURNS):
            _, stock_s = timer.run(case.stock, list(islice(inputs, repeats)), in_turn=True)
            _, ours_s = timer.run(call, list(islice(inputs, repeats)), in_turn=True)
            stock = min(stock, stock_s)
            ours = min(ours, ours_s)
            repeats = min(MAX_CALLS, max(MIN_CALLS, int(RACE_S / max(stock_s, ours_s))))
        gains[rows] = stock / ours
    return gains
