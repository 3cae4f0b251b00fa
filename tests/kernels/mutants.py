"""Kernels with one token changed, each run through the battery: what is not noticed there needs a
test.

Rule: seeded, so that a figure can be had again. What does not compile says nothing about tests: not
counted. Only a finding of the simulator or of a test is a catch; all else that ends a trial fails
the run. `python -m tests.kernels.mutants --count 150 --seed 0` prints the table.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

# of the simulator; what runs 3 times as long is a loop in which it never looks at the clock
LAUNCH_S = 20.0
LIMIT_S = 900  # of a process
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "metal").glob("*.metal"))
SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|^[ \t]*using\b[^;]*;", re.S | re.M)
SWAPS = {
    "+": "-*", "-": "+*", "*": "+/", "/": "*%", "%": "/*", "&": "|^", "|": "&^", "^": "&|",
    "<": "> <= >=", "<=": "< >=", ">": "< >=", ">=": "> <=", "==": "!=", "!=": "==", "&&": "||",
    "||": "&&", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=",
    "&=": "|=", "min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "simd_sum": "simd_max",
    "simd_max": "simd_sum simd_min", "simd_min": "simd_max", "exp": "exp2", "exp2": "exp",
    "log": "log2", "log2": "log", "true": "false", "false": "true", "break": "continue",
    "continue": "break", "mem_threadgroup": "mem_none", "mem_device": "mem_none",
}  # fmt: skip
OPERATOR = r"(?<=\s)(?:<<|>>|<=|>=|==|!=|&&|\|\||[-+*/|&]=|[-+*/%&|^<>])(?=\s)"
WORD = "|".join(name for name in SWAPS if name[0].isalpha())
BARRIER = r"\b(?:threadgroup|simdgroup)_barrier\([^()]*\)|\batomic_thread_fence\([^()]*\)"
TOKEN = re.compile(
    rf"(?P<barrier>{BARRIER})|(?P<swap>{OPERATOR}|(?<![\w.])(?:{WORD})\b)"
    r"|(?P<float>(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?[fh]?)"
    r"|(?P<int>(?<![\w.])\d+(?P<suffix>[uUlL]*)(?![\w.]))|(?P<name>(?<![\w.:])[A-Za-z_]\w*(?!\w*\s*::))"
)
DECLARED = re.compile(
    r"((?:(?:const|constexpr|device|thread|threadgroup|constant)\s+)*"
    r"(?:u?int|u?short|u?long|uint64_t|size_t|float|half|bool|[A-Z])\b\s*\*?)\s+([A-Za-z_]\w*)\s*(?=[=,;)\[>])"
)
FUNCTION = re.compile(r"^(?:template\b|[a-zA-Z][\w\s*&<>:]*\().*?^\}", re.S | re.M)


# Survivors that no test can catch, since nothing but speed or room changes: (file, line, old, new)
# and why.
EQUIVALENT = {
    (
        "paged_attention",
        "constexpr int WIDEST = DV <",
        "COLUMNS",
        "WINDOW",
    ): "room for columns that are none",
    (
        "paged_attention",
        "float2 out[CHUNKS][MINE]",
        "MINE",
        "BLOCK",
    ): "room for columns that are none",
    ("paged_attention", "constant constexpr int PAGED_PITCH", "4", "3"): "where rows of scores lie",
    ("paged_attention", "uint packed = 0;", "0", "1"): "the scale of a key that is none is 0",
    (
        "sample_accept",
        "const device uint8_t* mask = masks +",
        "0",
        "1",
    ): "a mask that is none is not read",
    ("sample_accept", "uint high = 0, at = 0;", "0", "1"): "every value's order is above it",
    ("sample_accept", "const uint first = simd_min", "0u", "1u"): "no token is as high as either",
}
EQUIVALENT |= {
    ("qmm_weights", "if (BITS == 4 ||", old, new): "codes of 4 and 8 bits may be read as bytes"
    for old, new in (("8", "0"), ("8", "7"), ("8", "9"), ("4", "0"), ("||", "&&"))
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """metal/<file>.metal with the text from `start` on replaced; outcome: "caught", "survived",
    "refused" (by the compiler), "equivalent", "error" (says nothing)."""

    file: str
    start: int
    old: str
    new: str
    outcome: str = ""
    why: str = ""
    seconds: float = 0.0

    def text(self) -> str:
        before = original(self.file)
        return before[: self.start] + self.new + before[self.start + len(self.old) :]

    @property
    def line(self) -> str:
        return (
            original(self.file).splitlines()[original(self.file).count("\n", 0, self.start)].strip()
        )

    def __str__(self) -> str:
        before = original(self.file)[: self.start]
        place = f"{before.count(chr(10)) + 1}:{self.start - before.rfind(chr(10))}"
        said = f"metal/{self.file}.metal:{place}: `{self.old}` -> `{self.new}`: {self.outcome}"
        return f"{said}, {self.why} [{self.seconds:.1f} s]\n    {self.line}"


def original(file: str) -> str:
    return (ROOT / f"metal/{file}.metal").read_text("utf-8")


def sites(file: str) -> list[list[Mutant]]:
    """Per token what it can become."""
    text = original(file)
    blank = SKIPPED.sub(lambda m: re.sub(r"\S", " ", m.group()), text)
    known = names(blank)
    found = []
    for m in TOKEN.finditer(blank):
        new = [x for x in changes(m, known) if x != m.group()]
        found += [[Mutant(file, m.start(), m.group(), x) for x in new]] * bool(new)
    return found


def changes(m: re.Match[str], known: dict[int, list[str]]) -> list[str]:
    token = m.group()
    match m.lastgroup:
        case "barrier":
            return [""]
        case "swap":
            to = SWAPS[token]
            return to.split() if " " in to or to in SWAPS else list(to)
        case "float":
            return ["0.0f", "1.0f", f"(-{token})"]
        case "name":
            return known.get(m.start(), [])
    digits = token.removesuffix(m["suffix"])
    return [
        f"{x}{m['suffix']}" for x in dict.fromkeys((int(digits) + 1, int(digits) - 1, 0)) if x >= 0
    ]


def names(text: str) -> dict[int, list[str]]:
    """By the place of a name inside a function, the others of its type that are declared before
    it."""
    found = {}
    for function in FUNCTION.finditer(text):
        declared: dict[str, list[tuple[str, int]]] = {}
        places = set()
        for d in DECLARED.finditer(text, function.start(), function.end()):
            kind = re.sub(r"\b(?:const|constexpr)\s+|\s", "", d[1])
            known = re.compile(r"[;,)>]").search(text, d.end())  # not yet in its own initializer
            declared.setdefault(kind, []).append((d[2], known.start() if known else len(text)))
            places.add(d.start(2))
        for group in declared.values():
            for name in {name for name, _ in group}:
                for m in re.compile(rf"(?<![\w.]){name}\b").finditer(
                    text, function.start(), function.end()
                ):
                    if m.start() not in places:
                        found[m.start()] = sorted(
                            {n for n, at in group if at <= m.start()} - {name}
                        )
    return found


def drawn(file: str, seed: int) -> Iterator[Mutant]:
    """Each token once, in a random order, as one of what it can become."""
    rng = random.Random(f"{seed} {file}")
    places = sites(file)
    rng.shuffle(places)
    for place in places:
        yield rng.choice(place)


def judged(mutant: Mutant) -> Mutant:
    """In a process of its own: a kernel gone astray may take its process with it."""
    start = time.monotonic()
    command = [sys.executable, "-m", "tests.kernels.mutants", "--judge"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            input=json.dumps(asdict(mutant)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        last = done.stdout.strip().rpartition("\n")[2]
        outcome, _, why = last.partition(" ")
        if done.returncode or outcome not in ("caught", "survived", "refused"):
            outcome, why = (
                "error",
                f"the process ended with {done.returncode}: {done.stderr[-300:]}",
            )
    except subprocess.TimeoutExpired:
        outcome, why = "error", f"no end after {LIMIT_S} s"
    for (file, line, *tokens), reason in EQUIVALENT.items():
        same = (
            mutant.file == file
            and mutant.line.startswith(line)
            and [mutant.old, mutant.new] == tokens
        )
        if same and outcome == "survived":
            outcome, why = "equivalent", reason
    return Mutant(
        mutant.file, mutant.start, mutant.old, mutant.new, outcome, why, time.monotonic() - start
    )


def judge(mutant: Mutant) -> str:
    """The battery of the mutant's file with the mutant in its place: an outcome and why."""
    from mlxspec import blas

    blas.load()
    from mlxspec.kernels.metal import source
    from tests import metalsim
    from tests.kernels.battery import BATTERY, STRICT

    metalsim.config.timeout, metalsim.config.severity = LAUNCH_S, STRICT
    make, launch = metalsim.Kernel.__init__, metalsim.Kernel.launch

    def made(self: metalsim.Kernel, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.header = self.header.replace(source(mutant.file), mutant.text())

    def endless() -> None:
        print("caught a launch without an end", flush=True)
        os._exit(0)

    def launched(self: metalsim.Kernel, *arguments: Any) -> metalsim.Report:
        watch = Timer(3 * LAUNCH_S, endless)
        watch.start()
        try:
            return launch(self, *arguments)
        finally:
            watch.cancel()

    metalsim.Kernel.__init__, metalsim.Kernel.launch = made, launched  # type: ignore[method-assign]
    for i, trial in enumerate(BATTERY[mutant.file]()):
        try:
            trial()
        except metalsim.MetalCompileError as error:
            return f"refused {str(error).splitlines()[0]}"
        except ValueError as error:
            if "Metal allows" not in str(error):
                raise
            return f"refused {error}"  # as a Mac does when it makes the pipeline
        except metalsim.MetalSimError as error:
            return f"caught trial {i}: {', '.join(sorted(error.report.kinds))}"
        except AssertionError as error:
            return f"caught trial {i}: {' '.join(str(error).split())[:100]}"
    return "survived all trials"


def sample(count: int, seed: int, files: list[str]) -> list[Mutant]:
    """`count` mutants that count, as many of each file as of the others, and those drawn that do
    not: they do not compile, or are known to be equivalent. Raises RuntimeError where a kernel as
    it is does not pass."""
    out: list[Mutant] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(judged, (Mutant(file, 0, "", "") for file in files)):
            if found.outcome != "survived":
                raise RuntimeError(f"{found.file}.metal as it is: {found.outcome}, {found.why}")
        for i, file in enumerate(files):
            due = count * (i + 1) // len(files) - count * i // len(files)
            supply = drawn(file, seed)
            while due:
                batch = [next(supply) for _ in range(due)]
                for mutant in pool.map(judged, batch):
                    out.append(mutant)
                    due -= mutant.outcome in ("caught", "survived", "error")
                    print(mutant, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument(
        "--judge", action="store_true", help="one mutant, as JSON from standard input"
    )
    args = parser.parse_args()
    if args.judge:
        print(judge(Mutant(**json.load(sys.stdin))))
        return
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["METALSIM_CACHE"] = (
            folder  # theirs would push out the kernels that are tested each day
        )
        found = sample(args.count, args.seed, args.files)
    print(summary(found), f"{time.monotonic() - start:.0f} s")
    sys.exit(any(m.outcome == "error" for m in found))


def summary(found: list[Mutant]) -> str:
    caught, survived, refused, same, errors = (
        [m for m in found if m.outcome == kind]
        for kind in ("caught", "survived", "refused", "equivalent", "error")
    )
    lines = [
        f"\n{len(survived)} survivors, {len(same)} equivalent, {len(errors)} errors:",
        *map(str, survived + same + errors),
    ]
    rate = f"{len(caught)} of {len(caught) + len(survived)} caught"
    strict = (
        f"{len(caught) / (len(caught) + len(survived) + len(same)):.1%} with the equivalent ones"
    )
    return "\n".join([*lines, f"{rate}, {strict}; {len(refused)} more did not compile"])


if __name__ == "__main__":
    main()
