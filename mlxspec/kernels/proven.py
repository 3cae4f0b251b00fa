"""What was proven on this machine, kernel by kernel and shape by shape.

Rule: a kernel runs only where a verdict made here says so; where there is none, what MLX brings runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel and one shape, as prove.py needs it. All callables take what `inputs` makes; the first of
    that is the float array that a chain of calls is threaded through. The kernel is tried with the counts of
    `rows`, rising; `tolerance` bounds the largest difference to the reference, as part of its largest value.
    `nested` promises that `inputs` of fewer rows are a part of those of more with the same seed, so that
    results must have the same first rows, to the bit."""

    kernel: str
    shape: str
    rows: tuple[int, ...]
    inputs: Callable[[int, int], tuple[mx.array, ...]]  # of a count of rows and a seed
    stock: Callable[..., mx.array]  # what runs without the kernel
    reference: Callable[..., mx.array]
    ways: Mapping[str, Callable[..., mx.array]]  # the kernel's versions
    tolerance: float
    nested: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


@dataclass(slots=True)
class Verdict:
    """What came of a case. `way` is the version in use, for `least` to `most` rows; "": none is. `why` says
    it, and what other versions lack. `gains` are stock's seconds over the kernel's, by rows. `parked`: it has
    stalled or ended a process here, and is not tried again but by `mlxspec tune`."""

    way: str = ""
    least: int = 0
    most: int = 0
    error: float = 0.0
    gains: dict[int, float] = field(default_factory=dict)
    why: str = ""
    parked: bool = False

    def takes(self, rows: int) -> bool:
        """Whether the kernel is used for so many rows. Asked at each call: a kernel may be parked."""
        return bool(self.way) and self.least <= rows <= self.most


VERDICTS: dict[str, Verdict] = {}  # by Case.name; a fact of the machine, so one table for all models
