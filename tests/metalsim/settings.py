"""How kernels are run: what is checked, in which order lanes go, what counts as an error.

Rule: one object, changed only through configure() and the pytest option --metal-order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Config:
    """checked=False runs many times faster and finds nothing: for wide tests of values alone.

    order: of lanes, SIMD-groups and threadgroups; 0 ascending, 1 descending, above that a seed to
    shuffle by. timeout: seconds a launch may take; the unchecked mode looks at the clock between
    threadgroups only. stack: bytes of private memory per lane. severity: "error", "warn" or
    "ignore" by kind of finding, over report.SEVERITY.
    """

    checked: bool = True
    races: bool = True
    order: int = 0
    timeout: float = 120.0
    stack: int = 1 << 16
    severity: dict[str, str] = field(default_factory=dict)


config = Config()


@contextmanager
def configure(**changes: Any) -> Iterator[Config]:
    """Settings for the kernels called inside."""
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield config
    finally:
        for name, value in before.items():
            setattr(config, name, value)
