"""Tries kernels on the machine that they are to run on: each must equal its reference, then win a
race.

Rule: whatever a kernel does, a verdict comes of it, never an error. Where there is no time left, it
is not used. What may end the process leaves a mark on the disk first, so that it happens once.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlxspec.kernels.kept import BUSY, Shelf, orderly
from mlxspec.kernels.proven import VERDICTS, Case, Verdict

log = logging.getLogger("mlxspec")

WIN = 1.15  # of stock's seconds: what a kernel must be worth
LEVEL = (
    0.97  # not slower: fewer rows join, so that a row is computed alike with a draft and without
)
SEEDS = 3  # inputs that are compared, for each count of rows
TURNS = (
    5  # of a race, the best counts; two go before them: one compiles, one tells how long calls take
)
CHAIN_S = 0.008  # of dependent calls, that a clock can tell
CALLS = (4, 32)  # in a chain, at least and at most
ROTATED = 192 << 20  # bytes that calls walk through: twice the largest cache of an M1 to M5
SETS = 32  # of inputs, at most
TAKES, COPIES = (
    2,
    8,
)  # times the larger of these bytes and a case's inputs, and times the first of these
ROUNDED = {mx.float16: 2**-11, mx.bfloat16: 2**-8}  # of a value: what rounding it may change
STALLED = "took"
STALL_S = 10.0  # that one call may take; it compiles in a part of a second
AT_START = (20.0, 4.0)  # seconds of all cases, and of each
TUNING = (600.0, 60.0)
POLL_S = 0.1  # between two looks whether another process is done
SHORT = ("malloc", "Insufficient Memory")  # how MLX and Metal say that memory is short

Call = Callable[..., mx.array]
Clock = Callable[[], float]


class Out(Exception):
    """A version that is not used, and why."""


class Late(Exception):
    """There is no time for more."""


def missing() -> str:
    """Why no kernel can run here; "": they can."""
    there = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return "" if there else "no Metal here"


@dataclass(slots=True)
class Trial:
    """What is being tried in this process, if anything, for a thread that must end it at once."""

    shelf: Shelf | None = None
    name: str = ""
    until: float = 0.0
    lock: threading.RLock = field(default_factory=threading.RLock)  # held while a mark is made

    def give_up(self) -> None:
        """The process ends now, because somebody wants it to: no other mark is made. What takes
        much longer than it may keeps its own: most likely they wait for nothing else."""
        self.lock.acquire(timeout=1.0)  # for good
        if self.shelf and time.perf_counter() < self.until:
            self.shelf.unmark(self.name)


TRIAL = Trial()


@dataclass(slots=True)
class Prover:
    """`seconds` are for all cases together and for each; `again`: also for what is known. `tell`
    gets how many are done, out of how many. `room` are the bytes that a proof may take."""

    shelf: Shelf
    seconds: tuple[float, float] = AT_START
    again: bool = False
    clock: Clock = time.perf_counter
    rest: Callable[[float], None] = time.sleep
    tell: Callable[[int, int], None] = lambda done, of: None
    room: float = math.inf
    found: dict[str, Verdict] = field(default_factory=dict)

    def prove(self, cases: Iterable[Case]) -> dict[str, Verdict]:
        """Fill VERDICTS for these cases; returns theirs. Leaves MLX's spare buffers freed."""
        todo = list({case.name: case for case in cases}.values())
        if why := missing():
            self.found = {case.name: Verdict(why=why) for case in todo}
        else:
            with suppress(OSError):  # the first mark says it
                if self.shelf.folder:
                    self.shelf.folder.mkdir(parents=True, exist_ok=True)
            end = self.clock() + self.seconds[0]
            if self._unknown(todo, False):
                looks = iter(range(int(self.seconds[0] / POLL_S)))
                with orderly(), self.shelf.alone(lambda: self._waits(looks)) as alone:
                    self._all(self._unknown(todo, alone), alone, end)
        VERDICTS.update(self.found)
        return self.found

    def _waits(self, looks: Iterator[int]) -> bool:
        """Another process tries kernels, maybe the same: wait for what it finds, as long as it may
        take."""
        if (look := next(looks, None)) == 0:
            log.info("another process is trying kernels; waiting %.0f s at most", self.seconds[0])
        self.rest(POLL_S)
        return look is not None

    def _unknown(self, cases: Sequence[Case], alone: bool) -> list[Case]:
        """What is to be tried; the rest is found."""
        for case in cases:
            if not self.again and (known := self._known(case.name, alone)):
                self.found[case.name] = known
        return [case for case in cases if case.name not in self.found]

    def _all(self, todo: Sequence[Case], alone: bool, end: float) -> None:
        for n, case in enumerate(todo):
            left = end - self.clock()
            if not alone:
                self.found[case.name] = Verdict(why=BUSY)
            elif left <= 0:
                why = f"no time was left of {self.seconds[0]:.0f} s; the next start goes on"
                self.found[case.name] = Verdict(why=why)
            else:
                self.found[case.name] = self._one(case, min(left, self.seconds[1]))
                mx.clear_cache()
            self.tell(n + 1, len(todo))

    def _known(self, name: str, alone: bool) -> Verdict | None:
        """A kernel that was parked in this process stays so, whatever could be written."""
        held = VERDICTS.get(name)
        return held if held and held.parked else self.shelf.load(name, alone)

    def _one(self, case: Case, seconds: float) -> Verdict:
        """Try one case, between a mark and what replaces it."""
        TRIAL.name, TRIAL.until = case.name, time.perf_counter() + seconds + 2 * STALL_S
        TRIAL.shelf, over = self.shelf, False
        try:
            with TRIAL.lock:
                self.shelf.mark(case.name)
            verdict, passing = self._tried(case, seconds)
            if passing is not None:
                self.shelf.save(case.name, verdict, passing)
                over = True
            return verdict
        except OSError as error:  # of the mark
            over = True
            return Verdict(
                why=f"{self.shelf.folder}: {error.strerror}; what may crash is not tried unmarked"
            )
        finally:
            TRIAL.shelf = None
            if not over:
                self.shelf.unmark(case.name)

    def _tried(self, case: Case, seconds: float) -> tuple[Verdict, bool | None]:
        """And whether what was in the way may pass; None: time or memory did not allow a real
        trial."""
        try:
            if (takes := _takes(case)) > self.room:
                why = f"its proof takes {takes >> 20} MiB, and {int(self.room) >> 20} are free"
                log.info("%s is not tried: %s", case.name, why)
                return Verdict(why=why), None
            verdict = judge(case, self.clock() + seconds, self.clock)
        except Late:
            late = Verdict(why=f"{seconds:.1f} s were not enough; `mlxspec tune` takes more")
            return late, True if seconds >= self.seconds[1] else None
        except (
            Exception
        ) as error:  # of inputs, reference or stock: nothing can be said of the kernel
            log.debug("%s cannot be tried", case.name, exc_info=True)
            return Verdict(why=f"it cannot be tried: {_said(error)}"), True
        return verdict, not verdict.way and any(word in verdict.why for word in SHORT)


def judge(case: Case, until: float = math.inf, clock: Clock = time.perf_counter) -> Verdict:
    """Compare and race a case's versions. Raises Late at `until`, and what the case itself
    raises."""
    out: dict[str, str] = {}
    errors = _match(case, out, until, clock)
    gains = _race(case, list(errors), out, until, clock) if errors else {}
    ranges = {way: wins(by_rows) for way, by_rows in gains.items()}
    for way, (_, most) in ranges.items():
        if not most:
            top = max(gains[way].values())
            out[way] = (
                f"right, and {top:.2f} times as fast as MLX's own at best; {WIN} is asked for"
            )
    won = [way for way, (_, most) in ranges.items() if most]
    why = "; ".join(f"{way}: {reason}" for way, reason in out.items())
    stalled = any(f" {STALLED} " in reason for reason in out.values())
    if not won:
        best = max(gains, key=lambda way: _worth(gains[way], (0, 1 << 31)), default="")
        return Verdict(
            error=errors.get(best, 0.0), gains=gains.get(best, {}), why=why, parked=stalled
        )
    way = max(won, key=lambda way: _worth(gains[way], ranges[way]))
    return Verdict(way, *ranges[way], errors[way], gains[way], why)


def wins(gains: Mapping[int, float]) -> tuple[int, int]:
    """The longest run of row counts at which the kernel wins, and all counts below it, down to one
    row, if it is slower at none of these: then a row is computed by the same kernel with a draft
    and without."""
    counts = sorted(gains)
    runs: list[list[int]] = []
    for before, count in pairwise([0, *counts]):
        if gains[count] >= WIN:
            if runs and runs[-1][-1] == before:
                runs[-1].append(count)
            else:
                runs.append([count])
    if not runs:
        return 0, 0
    run = max(runs, key=lambda run: (run[-1] - run[0], len(run), sum(gains[c] for c in run)))
    level = counts[0] == 1 and all(gains[count] >= LEVEL for count in counts if count < run[0])
    return 1 if level else run[0], run[-1]


def _worth(gains: Mapping[int, float], rows: tuple[int, int]) -> float:
    return sum(math.log(gain) for count, gain in gains.items() if rows[0] <= count <= rows[1])


def _match(case: Case, out: dict[str, str], until: float, clock: Clock) -> dict[str, float]:
    """The largest error of each version that equals the reference for all rows; `out` gets the
    others."""
    errors = dict.fromkeys(case.ways, 0.0)
    for seed in range(SEEDS):
        _compare(case, seed, errors, out, until, clock)
    return errors


def _compare(
    case: Case, seed: int, errors: dict[str, float], out: dict[str, str], until: float, clock: Clock
) -> None:
    """With the inputs of one seed, which go before the next are made: they may be large."""
    most = case.rows[-1]
    first: dict[str, mx.array] = {}
    for rows in reversed(case.rows):
        if rows == most or not case.nested:
            whole = case.inputs(rows, seed)
            mx.eval(whole)  # before the reference takes memory too
            exact = case.reference(*whole)
            mx.eval(exact)  # what it raises is not the kernel's
        inputs, want = (
            _cut(case, whole, rows),
            exact[: len(exact) * rows // most] if case.nested else exact,
        )
        for way in list(errors):
            try:
                got = _timed(case.ways[way], inputs, clock)
                errors[way] = max(errors[way], differ(got, want, case.tolerance, inputs[0].dtype))
                same = first.setdefault(way, got)[: len(got)]
                if case.nested and not mx.array_equal(got, same, equal_nan=True):
                    raise Out("a row depends on how many there are")
            except Exception as error:  # refused at the launch, not compiled, not right
                del errors[way]
                out[way] = f"{_said(error)} ({rows} row{'s' * (rows > 1)})"
        if clock() > until:
            raise Late


def _cut(case: Case, inputs: tuple[mx.array, ...], rows: int) -> tuple[mx.array, ...]:
    """Of the most rows' inputs, those of fewer, where the case promises that they are a part."""
    return (*(array[:rows] for array in inputs[: case.nested]), *inputs[case.nested :])


def _takes(case: Case) -> int:
    """Bytes that a proof takes at most, by the shapes of what is never computed: most inputs are
    there twice while they are drawn, and of the first, on which results depend, there are some
    copies."""
    inputs = case.inputs(case.rows[-1], 0)
    return TAKES * max(ROTATED, sum(array.nbytes for array in inputs)) + COPIES * inputs[0].nbytes


def _timed(call: Call, inputs: tuple[mx.array, ...], clock: Clock) -> mx.array:
    began = clock()
    got = call(*inputs)
    mx.eval(got)
    if (took := clock() - began) > STALL_S:
        raise Out(f"a call {STALLED} {took:.0f} s")
    return got


def differ(got: mx.array, want: mx.array, tolerance: float, dtype: mx.Dtype = mx.float32) -> float:
    """The largest difference, as part of the largest value. Floats must be of `dtype`; where `want`
    has them in fp32, what rounding them once may change does not count. Raises Out where that is
    too much."""
    numbers = mx.issubdtype(want.dtype, mx.floating)
    due = dtype if numbers else want.dtype
    if got.shape != want.shape or got.dtype != due:
        raise Out(f"{got.dtype} {got.shape} instead of {due} {want.shape}")
    if not numbers:
        if wrong := int(_number(mx.sum(got != want))):
            raise Out(f"{wrong} of {want.size} values differ")
        return 0.0
    step = ROUNDED.get(dtype, 0.0) if want.dtype == mx.float32 else 0.0
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    fine = mx.isfinite(want)
    if not mx.all(mx.isfinite(got) | ~fine).item():
        raise Out("not finite where the reference is")
    off = _number(
        mx.max(mx.where(fine, mx.maximum(mx.abs(got - want) - step * mx.abs(want), 0), 0))
    )
    top = _number(mx.max(mx.where(fine, mx.abs(want), 0)))
    error = off / top if top else math.inf if off else 0.0
    if error > tolerance:
        raise Out(f"off by {error:.2g} of the largest value, and {tolerance:.2g} is allowed")
    return error


def _number(x: mx.array) -> float:
    return float(np.array(x))


def _race(
    case: Case, ways: Sequence[str], out: dict[str, str], until: float, clock: Clock
) -> dict[str, dict[int, float]]:
    """How many times as fast as stock each version is, by rows; `out` gets those that fail on the
    way."""
    gains: dict[str, dict[int, float]] = {way: {} for way in ways}
    whole = _sets(case, case.rows[-1]) if case.nested else []
    for rows in case.raced or case.rows:
        sets = [_cut(case, inputs, rows) for inputs in whole] or _sets(case, rows)
        mx.eval(sets)
        sides: dict[str, Call] = {"": case.stock, **{way: case.ways[way] for way in gains}}
        best, calls, at = dict.fromkeys(sides, math.inf), CALLS[0], 0
        for turn in range(-2, TURNS):
            for side in list(sides) if turn % 2 else list(reversed(sides)):
                began = clock()
                try:
                    mx.eval(chain(sides[side], sets, calls, at, case.linked))
                    if (took := clock() - began) > STALL_S:
                        raise Out(f"{calls} calls {STALLED} {took:.0f} s")
                    best[side] = min(best[side], took / calls)
                except Exception as error:
                    if not side:
                        raise
                    del sides[side], gains[side]
                    out[side] = f"{_said(error)} (racing with {rows} row{'s' * (rows > 1)})"
                at += calls  # so that each finds what was not touched for longest
                if clock() > until:
                    raise Late
            if turn == -1:
                longest = max(best[side] for side in sides)
                calls = min(CALLS[1], max(CALLS[0], math.ceil(CHAIN_S / max(longest, 1e-9))))
            if turn < 0:
                best = dict.fromkeys(sides, math.inf)
        for way in gains:
            gains[way][rows] = best[""] / max(best[way], 1e-12)
        del sets  # before the next are made
    return gains


def _sets(case: Case, rows: int) -> list[tuple[mx.array, ...]]:
    """Inputs enough that no cache holds what the next call reads."""
    sets = [case.inputs(rows, 0)]
    each = sum(array.nbytes for array in sets[0])
    more = min(SETS, -(-ROTATED // max(1, each)))
    return sets + [case.inputs(rows, seed) for seed in range(1, more)]


def chain(
    call: Call, sets: Sequence[tuple[mx.array, ...]], calls: int, at: int = 0, linked: int = 0
) -> mx.array:
    """So many calls, each of which needs the one before: one of its inputs is given 0 times a
    result, which changes no finite value. Queued calls that do not depend on each other would hide
    what each waits for, and `mx.depends` orders the graph only, not the GPU."""
    link: mx.array | float = 0.0
    for i in range(at, at + calls):
        given = list(sets[i % len(sets)])
        given[linked] = given[linked] + link
        y = call(*given)
        link = (y.reshape(-1)[:1] * 0).astype(given[linked].dtype)
    return y


def _said(error: Exception) -> str:
    text = str(error).partition("\n")[0][:200]
    return text if isinstance(error, Out) else f"{type(error).__name__}: {text}"
