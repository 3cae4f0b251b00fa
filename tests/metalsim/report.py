"""What a launch says: findings with file, line, threadgroup and thread, and the bytes each buffer
moved.

Rule: a finding names the object and the place; whether it is an error is the settings' to say.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.metalsim import abi
from tests.metalsim.build import Compiled
from tests.metalsim.elf import plain

KINDS = {
    1: "oob-read",
    2: "oob-write",
    3: "write-to-const",
    4: "uninitialised-read",
    5: "race",
    6: "benign-race",
    7: "barrier-divergence",
    9: "simd-divergence",
    10: "shuffle-from-inactive-lane",
    11: "wild-pointer",
    12: "array-index",
    13: "misaligned",
    14: "shift",
    15: "integer-division",
    16: "float-to-int-overflow",
    17: "timeout",
    18: "other-thread's-private-memory",
    19: "barrier-after-exit",
    20: "undefined-behaviour",
    21: "threadgroup-oob",
    22: "tensor-lanes-missing",
    23: "tensor-invalid-element",
    24: "tensor-unwritten",
}
# What may be meant; every other kind is an error.
WARNINGS = {
    "benign-race",
    "simd-divergence",
    "shift",
    "float-to-int-overflow",
    "output-not-written",
}
SEVERITY = dict.fromkeys([*WARNINGS, "compiler-warning"], "warn")
BFLOAT = re.compile(r"to '[^']*(bfloat|__bf16)")


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    severity: str
    where: str
    text: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.severity}: {self.where}: [{self.kind}] {self.text}{times}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one buffer. read, written: as the lanes asked for them, so 32 lanes reading one
    float are 128 bytes; an atomic that changes a value is both. flags: uint8 [size], of abi."""

    size: int
    read: int
    written: int
    flags: np.ndarray

    @property
    def was_read(self) -> np.ndarray:
        """bool [size]: which bytes were."""
        return np.not_equal(self.flags & abi.READ, 0)

    @property
    def was_written(self) -> np.ndarray:
        return np.not_equal(self.flags & abi.WRITTEN, 0)

    @property
    def read_unique(self) -> int:
        return int(np.count_nonzero(self.was_read))

    @property
    def written_unique(self) -> int:
        return int(np.count_nonzero(self.was_written))


@dataclass(slots=True)
class Report:
    """traffic: by the buffer's name, inputs, their _shape and _strides, and outputs; empty when
    unchecked. counts: accesses, switches between lanes, SIMD operations, barriers, threadgroups."""

    kernel: str
    findings: list[Finding] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    threadgroup_bytes: int = 0
    severity: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, where: str, text: str, count: int = 1) -> None:
        severity = self.severity.get(kind, SEVERITY.get(kind, "error"))
        if severity != "ignore":
            self.findings.append(Finding(kind, severity, where, text, count))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    def __str__(self) -> str:
        return "\n  ".join(
            [f"{self.kernel}: {len(self.findings)} finding(s)", *map(str, self.findings)]
        )


class MetalSimError(Exception):
    """A launch with errors; `report` has them."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Name(NamedTuple):
    """Of a buffer: what it is called, bytes of an element and of all."""

    text: str
    item: int
    size: int


def of_compiler(warnings: str) -> Iterator[tuple[str, str, str]]:
    """(kind, where, text) of what the compiler said about the kernel's own lines."""
    for file, line, column, text in re.findall(
        r"^(\S+\.metal):(\d+):(\d+): warning: (.*)$", warnings, re.M
    ):
        where = f"{file}:{line}:{column}"
        if "uninitialized]" in text:
            yield "uninitialised-variable", where, text
        elif "implicit-float-conversion" not in text:
            yield "compiler-warning", where, text
        elif BFLOAT.search(text):
            yield (
                "bfloat-implicit-conversion",
                where,
                f"Metal converts to bfloat explicitly only: {text}",
            )


def of_launch(
    errors: Sequence[abi.Err], code: Compiled, names: Sequence[Name], kernel: str
) -> Iterator[tuple[str, str, str, int]]:
    """(kind, where, text, count) of what the runtime found."""
    for error in errors:
        if error.file:
            where = f"{error.file.decode()}:{error.site >> 10}:{error.site & 1023}"
        else:
            where = code.elf.where(error.pc) if error.pc else kernel
        yield KINDS[error.kind], where, told(error, code, names), error.count


def told(error: abi.Err, code: Compiled, names: Sequence[Name]) -> str:
    who = "" if error.lane == abi.NO_LANE else f"threadgroup {error.tg} thread {error.lane}"
    kind, what = KINDS[error.kind], place(error, code, names)
    if kind in ("race", "benign-race"):
        now, was = ("write" if flag else "read" for flag in (error.now_write, error.was_write))
        return (
            f"{now} by {who} of {what} races with the {was} by threadgroup {error.tg2} thread {error.lane2}"
            f" at {code.elf.where(error.pc2)}"
        )
    if kind == "tensor-invalid-element":
        return f"{who}: element {error.a} of {error.b}"
    if kind == "tensor-unwritten":
        return f"{who}: nobody has written column {error.a} of row {error.b}"
    if kind in ("simd-divergence", "tensor-lanes-missing"):
        return (
            f"{who}: only lanes {error.a & 0xFFFFFFFF:#010x} of the SIMD-group reach this together"
        )
    if kind == "shuffle-from-inactive-lane":
        return f"{who}: source lane {error.a}, active lanes {error.b & 0xFFFFFFFF:#010x}"
    if kind == "barrier-divergence":
        return "threads of one threadgroup wait at different barriers"
    if kind == "barrier-after-exit":
        return f"{error.a} of {error.b} threads have returned before this barrier"
    if kind == "misaligned":
        return f"{who}: address off by {error.b} from the required {error.a}-byte alignment"
    if kind == "array-index":
        return f"{who}: index {error.a}"
    if kind in ("shift", "integer-division", "float-to-int-overflow", "undefined-behaviour"):
        return f"{who}: operands {error.a} {error.b}"
    if kind == "timeout":
        return f"{who}: still running at the time limit".lstrip(": ")
    return f"{who}: {error.size} bytes at {what}"


def place(error: abi.Err, code: Compiled, names: Sequence[Name]) -> str:
    if error.buf < 0:
        return (
            f"address {error.off:#x}"
            if KINDS[error.kind] == "wild-pointer"
            else "memory of no buffer"
        )
    if error.buf < abi.THREADGROUP_BUFFERS:
        name, item, size = names[error.buf]
        return f"`{name}` byte {error.off} (element {error.off / item:g} of {size // item})"
    address, size, symbol = code.elf.threadgroup[error.buf - abi.THREADGROUP_BUFFERS]
    inside = (
        KINDS[error.kind] == "threadgroup-oob"
    )  # there the offset is the variable's own already
    offset = error.off if inside else error.off + code.elf.base - address
    return f"threadgroup `{plain(symbol)}` byte {offset} of {size}"
