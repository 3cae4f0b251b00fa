"""kill -9 while the prompt cache is being written: never a wrong token, never a start that
fails."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.checkpoints import save

ROUNDS = 200
KINDS = ["qwen3", "gemma3_text", "qwen3_next"]  # everything, windows, states


@pytest.mark.slow
def test_200_kills(tmp_path: Path) -> None:
    truth = {kind: tiny.Plain(tiny.model(kind)) for kind in KINDS}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        save(tmp_path / kind, kind)
    rng = random.Random(5)
    zygotes = {
        kind: subprocess.Popen(
            [sys.executable, "-m", "tests.support.process_to_kill", tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in KINDS
    }
    answers = hits = read = torn = 0
    for n in range(ROUNDS):
        kind = KINDS[n % len(KINDS)]
        process = zygotes[kind]
        process.stdin.write(f"{kind} {rng.randrange(1 << 30)}\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "dead\n")
        pid = int(next(lines))
        lives = rng.uniform(0.0, 0.6)  # seconds after its first answer
        timer = None
        for line in lines:
            assert line, "the engine could not start"
            timer = timer or threading.Timer(lives, os.kill, (pid, signal.SIGKILL))
            if not timer.is_alive() and not timer.finished.is_set():
                timer.start()
            if not line.endswith("}\n"):
                continue
            told = json.loads(line)
            assert told["tokens"] == truth[kind](told["prompt"], 10), (kind, n)
            answers, hits = answers + 1, hits + bool(told["cached"])
            read = max(read, told["read"])
        assert timer is not None, "it never answered"
        torn += len(list((tmp_path / "prompts").rglob("*.safetensors.*")))
    for process in zygotes.values():
        process.communicate(timeout=10)
    print(f"\n{ROUNDS} kills, {answers} answers, {hits} with a hit, {torn} files left half written")
    assert answers > ROUNDS and hits > ROUNDS and read > 0 and torn > ROUNDS / 20
