"""What was proven on this machine, kernel by kernel and shape by shape.

Rule: a kernel runs only where a verdict made here says so; where there is none, what MLX brings
runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel and one shape, as prove.py needs it. All callables take what `inputs` makes;
    chains of calls go through the float array `linked` of that, a small one. The kernel must match
    with all counts of `rows`, rising, and is raced with those in `raced`, some of them; (): all. A
    verdict takes all that lies between two counts, so `rows` has each that another instance of the
    kernel is launched for. `tolerance` bounds the largest difference to the reference, as part of
    its largest value, besides one rounding where the reference is in fp32 and the kernel is not.
    `nested` n promises that `inputs` of fewer rows are those of more with the same seed, the first
    n arrays cut; then results must have the same first rows, to the bit. 0: it promises nothing."""

    kernel: str
    shape: str
    rows: tuple[int, ...]
    inputs: Callable[[int, int], tuple[mx.array, ...]]  # of a count of rows and a seed
    stock: Callable[..., mx.array]  # what runs without the kernel
    reference: Callable[..., mx.array]
    ways: Mapping[str, Callable[..., mx.array]]  # the kernel's versions
    tolerance: float
    nested: int = 0
    raced: tuple[int, ...] = ()
    linked: int = 0

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


@dataclass(slots=True)
class Verdict:
    """What came of a case. `way` is the version in use, for `least` to `most` rows; "": none is.
    `why` says it, and what other versions lack. `gains` are stock's seconds over the kernel's, by
    rows. `parked`: it has stalled or ended a process here, and is not tried again but by `mlxspec
    tune`."""

    way: str = ""
    least: int = 0
    most: int = 0
    error: float = 0.0
    gains: dict[int, float] = field(default_factory=dict)
    why: str = ""
    parked: bool = False

    def takes(self, rows: int) -> bool:
        """Whether the kernel is used for so many rows. Asked at each call: a kernel may be parked,
        and then nothing is left compiled (stall.py), since what mx.compile has traced asks no
        more."""
        return bool(self.way) and self.least <= rows <= self.most


VERDICTS: dict[
    str, Verdict
] = {}  # by Case.name; a fact of the machine, so one table for all models
