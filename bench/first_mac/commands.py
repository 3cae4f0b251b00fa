"""What the parts of the report have in common: their end, their time, the commands that they run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = "not on this machine"
ON_A_MAC = sys.platform == "darwin"  # elsewhere MLX has a CPU, and its time is not worth much
PART_S = 240.0  # a part's commands, each
DIFFER = "Answers that differ"  # in what bench prints
OPS = "MLX_MAX_OPS_PER_BUFFER"


class Elsewhere(Exception):
    """This part cannot run here; says why."""


class Failed(Exception):
    """This part found something wrong."""


class Late(Exception):
    """No time is left for this part; says what its command has printed."""


class Clock:
    """When this process has to end."""

    until = float("inf")

    def left(self) -> float:
        return self.until - time.monotonic()


CLOCK = Clock()


def run(
    *words: str,
    seconds: float = PART_S,
    env: dict[str, str] | None = None,
    without: tuple[str, ...] = (),
    fine: Callable[[str], bool] = lambda said: False,
) -> str:
    """The output of a command; `without` these variables. Raises Failed with its last lines, also
    where it takes too long, and Late where this process has no more time; not where the output of
    one that failed is `fine`."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    left = max(0.1, CLOCK.left())
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**inherited, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=min(seconds, left),
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        if left < seconds:
            raise Late(f"{' '.join(words)} did not end:\n{tail_of(text)}") from error
        why = f"{' '.join(words)} ran longer than {seconds:.0f} s:\n{tail_of(text)}"
        raise Failed(why) from error
    if done.returncode and not fine(done.stdout):
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{tail_of(done.stdout)}")
    return done.stdout.strip()


def tail_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-30:])


def bench(model: str, *words: str, env: dict[str, str] | None = None) -> str:
    """What `mlxspec bench` prints of a model, of the built-in one if it has no name. Answers may
    part at ties, which `lossless` judges."""
    words = ("mlxspec", "bench", *filter(None, [model]), *words)
    return run(
        sys.executable,
        "-m",
        *words,
        seconds=2 * PART_S,
        env=env,
        fine=lambda said: DIFFER in said,
    )


def only_on_a_mac() -> None:
    if not ON_A_MAC:
        raise Elsewhere("needs macOS")
