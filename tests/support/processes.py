"""`mlxspec serve` and `mlxspec train` as processes, and what they hold."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

BLOCKS = 160  # of a model
END_S = 40  # for a process to end
GAUGES = ("footprint_bytes", "mlx_active_bytes", "live_arrays")
TOKENS = 8000  # to learn from; the next training has as many more
ANSWERING, TRAINING, TRAINED = "time: about", "training on", "held-out"  # lines of `mlxspec train`
STATUSES = {0, 1, 130}  # used, no better, interrupted


@dataclass(frozen=True)
class Held:
    """What a server holds so many seconds after the start: sizes by name, and what is not free."""

    at: float
    sizes: dict[str, int]
    busy: dict[str, float]


class Process:
    """A child process, whose output is kept."""

    def __init__(self, words: list[str], **variables: str) -> None:
        bare = {k: v for k, v in os.environ.items() if not k.startswith("MLXSPEC_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxspec", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=bare | variables | {"PYTHONUNBUFFERED": "1"},
        )
        self.said = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                self.said += line

    def end(self, how: int) -> int:
        """Its status after a signal; a process that ignores it is killed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.reader.join(END_S)
        return status

    def count(self, what: str) -> int:
        """Its threads ("task") or file descriptors ("fd")."""
        if Path("/proc/self").exists():
            return len(os.listdir(f"/proc/{self.process.pid}/{what}"))
        tool = ["ps", "-M"] if what == "task" else ["lsof", "-n", "-P"]
        words = [*tool, "-p", str(self.process.pid)]
        return len(subprocess.run(words, capture_output=True, text=True).stdout.splitlines()) - 1

    def cpu(self) -> float:
        """Seconds that it has computed; 0 once it has ended."""
        file = Path(f"/proc/{self.process.pid}/stat")
        try:
            ticks = file.read_text().rpartition(")")[2].split()[11:13]
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            words = ["ps", "-o", "time=", "-p", str(self.process.pid)]
            found = subprocess.run(words, capture_output=True, text=True).stdout.split(":")
            return sum(float(x) * 60**i for i, x in enumerate(reversed(found)) if x.strip())


class Server(Process):
    """`mlxspec serve` with these words, once it answers."""

    def __init__(self, words: list[str], **variables: str) -> None:
        super().__init__(["serve", *words, "--port", "0"], **variables)
        end = time.monotonic() + 60
        while not (found := re.search(r"served at (http://\S+)/v1", self.said)):
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.05)
        self.url = found[1]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        return self.end(signal.SIGTERM)

    async def held(self, http: httpx.AsyncClient, began: float) -> Held:
        sizes = {"threads": self.count("task"), "files": self.count("fd")}
        busy = {}
        for each in await self._samples(http):
            name = each.name.removeprefix("mlxspec_")
            if name in GAUGES:
                sizes[name] = int(each.value)
            model = each.labels.get("model", "")
            used = name == "kv_blocks" and each.labels["state"] == "used"
            if each.value and (used or name in ("running", "waiting")):
                busy[f"{model} {name}"] = each.value
        return Held(time.monotonic() - began, sizes, busy)

    async def drafts(self, http: httpx.AsyncClient) -> dict[str, float]:
        """The share of each head's drafts that were accepted."""
        drafted, right = Counter[str](), Counter[str]()
        for each in await self._samples(http):
            if each.name == "mlxspec_drafted_tokens_total":
                drafted[each.labels["source"]] += int(each.value)
            if each.name == "mlxspec_accepted_tokens_total":
                right[each.labels["source"]] += int(each.value)
        return {name: right[name] / n for name, n in drafted.items() if n}

    async def by_model(self, http: httpx.AsyncClient, name: str) -> dict[str, int]:
        """A metric of each model."""
        found = [each for each in await self._samples(http) if each.name == f"mlxspec_{name}"]
        return {each.labels["model"]: int(each.value) for each in found}

    async def _samples(self, http: httpx.AsyncClient) -> list[Any]:
        page = (await http.get("/metrics")).text
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples]


class Training:
    """`mlxspec train` again and again beside a server, each with more to learn from; every third
    one is interrupted, and goes on."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.model, self.cache = model, cache
        self.statuses = Counter[int]()
        self.wrong: list[str] = []
        self.url, self.last = "", False
        self.current: Process | None = None
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self.last = True
        if self.current:
            self.current.end(signal.SIGKILL)
        if self.thread.ident:
            self.thread.join(END_S)

    def start(self, url: str) -> None:
        self.url = url
        self.thread.start()

    def stop_after_this(self) -> None:
        self.last = True

    @property
    def runs(self) -> bool:
        return self.thread.is_alive()

    @property
    def gives_way(self) -> bool:
        """Whether it is at work that waits for the server, and no longer starts."""
        text = self.current.said if self.current else ""
        return ANSWERING in text and TRAINED not in text

    def _loop(self) -> None:
        number = 0
        while not self.last:
            status = self._run(number)
            self.statuses[status] += 1
            if status not in STATUSES:
                text = self.current.said if self.current else ""
                self.wrong.append(f"a training ended with {status}: {text[-500:]}")
                return
            number += status != 130

    def _run(self, number: int) -> int:
        words = ["train", str(self.model), "--url", self.url, "--draft-vocab-size", "512"]
        words += ["--tokens", str(TOKENS * (number + 1))]
        self.current = child = Process(
            words, HOME=str(self.cache), MLXSPEC_CACHE_DIR=str(self.cache)
        )
        interrupts = number % 3 == 1 and not self.statuses[130] > number // 3
        while child.process.poll() is None:
            if interrupts and TRAINING in child.said:
                return child.end(signal.SIGINT)
            time.sleep(0.1)
        child.reader.join(END_S)
        return child.process.returncode
