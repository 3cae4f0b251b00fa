"""One run: every server is started, asked the same in turn, probed and ended; one that fails stops
no other.

Rule: the servers run side by side and one is asked at a time; the order alternates. One that dies
or hangs is named with the reason, and is asked nothing more.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress, TaskID

from bench import probes, tiny, venvs
from bench.cells import FILLING, WORKLOADS
from bench.folders import filling
from bench.http import Answer, Early, Refused, ask, plain
from bench.process import usage
from bench.rows import ABOUT, Rows, write
from bench.servers import HEADS, Ended, Running, Server, environment, start
from bench.setting import Setting, window_of
from mlxspec.text.chat import load_tokenizer
from mlxspec.text.fim import fill_in_middle

IDLE = 3  # seconds over which idle servers are watched
REST = 10.0  # seconds in which a server that was just asked may give memory back
SETTLED = 0.2  # CPU seconds in a second: less is idle
PAUSE = 1.0  # seconds between two looks
SETTLE_LIMIT = 180  # seconds; some go on with an answer that nobody waits for
BROKEN = (Refused, httpx.HTTPError, KeyError, ValueError, ZeroDivisionError)


@dataclass(slots=True)
class Run:
    """`limit`: seconds that one server may take for one workload. `starts`: how often each is
    started, the first time uncounted where there are more."""

    servers: dict[str, tuple[Server, str]]  # and its interpreter
    model: Path
    scratch: Path
    setting: Setting
    rows: Rows
    bar: Progress
    rounds: int
    workloads: Sequence[str]
    starts: int = 3
    probes: int = 2
    limit: float = 600
    env: dict[str, str] = field(default_factory=dict)
    up: dict[str, Running] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)  # the last time
    task: TaskID = field(init=False)

    def __post_init__(self) -> None:
        self.env = environment(self.scratch / "home") | self.env
        self.task = self.bar.add_task("", total=self.weight())

    def weight(self) -> float:
        """Of everything that is to be done, for the bar."""
        total = len(self.asked("")) * self.starts * 8.0
        for name, (server, _) in self.servers.items():
            for _, workload in self.plan():
                total += WORKLOADS[workload].weight * wanted(server, workload)
            total += len(list(self.variants(name))) * PROBE_WEIGHT * bool(self.probes)
        return total

    def plan(self, model: str | None = None) -> Iterator[tuple[int, str]]:
        """All rounds of the workloads, or of those with this model."""
        asked = [w for w in self.workloads if model in (None, WORKLOADS[w].model)]
        for round in range(self.rounds):
            yield from ((round, w) for w in asked if round % WORKLOADS[w].every == 0)

    def models(self) -> list[str]:
        return list(dict.fromkeys(WORKLOADS[w].model for w in self.workloads))

    def asked(self, model: str) -> list[str]:
        """The servers that any workload with this model is asked of."""
        planned = {w for _, w in self.plan(model)}
        return [n for n, (s, _) in self.servers.items() if any(wanted(s, w) for w in planned)]

    def variants(self, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """How a server is probed: a name, and what turns its drafting on or off."""
        server, _ = self.servers[name]
        if not server.only:
            yield "no draft", server.plain
        if server.drafted is not None:
            yield "draft", server.drafted
        if probes.PAIR in server.heads:
            yield "head", server.headed

    def say(self, what: str, advance: float = 0) -> None:
        self.bar.update(self.task, description=what, advance=advance)
        if what and not advance and not self.bar.console.is_terminal:
            self.bar.console.print(what, highlight=False)


PROBE_WEIGHT = 60.0


def wanted(server: Server, workload: str) -> bool:
    if (kind := WORKLOADS[workload].model) in HEADS:
        return kind in server.heads
    return not server.only or workload in server.only


async def measure(run: Run, keep: Path | None = None) -> None:
    """Fills run.rows; after each turn they are written to `keep` too, in case the rest is never
    measured."""
    try:
        for model in run.models():
            await (_others(run, model) if model else _own(run))
            await _rounds(run, model, keep)
            if not model:
                await asyncio.sleep(REST)
                _memory(run)
            _end(run)
    finally:
        _end(run)
    if not run.probes:
        return
    probed = probes.probed(run.scratch, run.probes)
    for name in run.servers:
        await _probe(run, name, probed)
        if keep:
            write(keep, run.rows)


def _end(run: Run) -> None:
    for server in run.up.values():
        server.end()
    run.up.clear()


async def _rounds(run: Run, model: str, keep: Path | None) -> None:
    """The workloads with this model, of the servers that are up."""
    folder, own = place(run, model)[0], run.setting
    if model:
        own = replace(own, tokenizer=load_tokenizer(folder), window=window_of(folder))
    for turn, (round, workload) in enumerate(run.plan(model)):
        names = [n for n in run.servers if wanted(run.servers[n][0], workload)]
        for name in names if turn % 2 == 0 else names[::-1]:
            run.say(f"round {round + 1}: {workload}, {name}")
            await _cell(run, name, workload, round, own)
            run.say("", WORKLOADS[workload].weight)
        if keep:
            write(keep, run.rows)


def place(run: Run, model: str) -> tuple[Path, Path | None]:
    """Folders of what a workload names as its model, and of the head that drafts for it."""
    if model in HEADS:
        return tiny.pair(model)
    if model == FILLING and not fill_in_middle(run.setting.tokenizer)[0]:
        return filling(run.model, run.scratch / "filling"), None
    return run.model, None


async def _own(run: Run) -> None:
    """Starts the servers with the model that all is measured with."""
    names = run.asked("")
    for n in range(run.starts):
        for name in names if n % 2 == 0 else names[::-1]:
            await _start(run, name, n)
    if run.up:
        await _idle(run)


async def _others(run: Run, model: str) -> None:
    """Starts the servers that are measured with another one."""
    folder, head = place(run, model)
    for name in run.asked(model):
        run.say(f"start with {model}: {name}")
        headed = run.servers[name][0].headed if head else None
        if await _up(run, name, (model, 0), folder, headed, head):
            await settle(run.up[name])


async def _start(run: Run, name: str, n: int) -> None:
    """Start it, the last time for good; the first time it may have to calibrate or to fill
    caches. What it does in idle moments then is over before another one is measured."""
    if n and name not in run.started:
        return  # it was said why when it did not
    run.say(f"start {n + 1}: {name}")
    run.started.discard(name)
    answer = await _up(run, name, ("start", n), run.model)
    if answer is None:
        return
    run.started.add(name)
    took, again = answer.at[0] - run.up[name].began, n - (run.starts > 1)
    run.rows.add(
        name, "start", "first_ever_s" if again < 0 else "first_token_s", max(0, again), took
    )
    run.say("", 8)
    if n < run.starts - 1:
        run.up.pop(name).end()
    else:
        await settle(run.up[name])


async def _up(
    run: Run,
    name: str,
    row: tuple[str, int],
    model: Path,
    setting: Sequence[str] | None = None,
    head: Path | None = None,
) -> Answer | None:
    """Its first answer, when it is up; None where there is none, which the row of this workload and
    round says."""
    server, python = run.servers[name]
    log = run.scratch / f"{name} {row[0]}.log"
    try:
        run.up[name] = start(server, python, model, run.env, log, setting, head)
        async with asyncio.timeout(run.limit):
            return await ask(run.up[name], plain("Once upon a time", 2))
    except (Ended, TimeoutError, *BROKEN) as error:
        why = str(error) if isinstance(error, Ended) else f"{type(error).__name__}: {error}"
        run.rows.failed(name, *row, why)
        if name in run.up:
            _drop(run, name)
        return None


async def _idle(run: Run) -> None:
    """CPU that servers use which nobody asks anything."""
    await asyncio.sleep(PAUSE)
    before = {name: usage(r.process.pid).cpu for name, r in run.up.items()}
    await asyncio.sleep(IDLE)
    for name, r in run.up.items():
        run.rows.add(name, "idle", "cpu_per_s", 0, (usage(r.process.pid).cpu - before[name]) / IDLE)


async def _cell(run: Run, name: str, workload: str, round: int, setting: Setting) -> None:
    """One workload of one server; what goes wrong becomes a row."""
    if (running := run.up.get(name)) is None:
        return  # it was said why when it went
    with _beside(run, name, workload, round):
        try:
            async with asyncio.timeout(run.limit):
                found = await WORKLOADS[workload].cell(running, setting, round)
        except TimeoutError:
            run.rows.failed(name, workload, round, f"no end within {run.limit:.0f} s; it was ended")
            _drop(run, name)
            return
        except BROKEN as error:
            why = f"{type(error).__name__}: {error}"
            try:
                await _check(running)
            except Ended as ended:
                why = str(ended)
                _drop(run, name)
            run.rows.failed(name, workload, round, why)
            return
    for metric, value in found.items():
        run.rows.add(name, workload, metric, round, value)
    if WORKLOADS[workload].settle and not await settle(running):
        run.rows.failed(
            name, workload, round, f"still busy {SETTLE_LIMIT} s later, beside the next server"
        )


@contextmanager
def _beside(run: Run, name: str, workload: str, round: int) -> Iterator[None]:
    """Notes what the other servers used meanwhile, which nobody asked anything."""
    others = [r.process.pid for n, r in run.up.items() if n != name]
    began, before = time.perf_counter(), sum(usage(pid).cpu for pid in others)
    yield
    used = sum(usage(pid).cpu for pid in others) - before
    run.rows.add(
        name, workload, "others_cpu_per_s", round, max(0.0, used) / (time.perf_counter() - began)
    )


async def _check(running: Running) -> None:
    """Raises Ended; a process may take a moment longer to end than its connections do."""
    for _ in range(10):
        running.check()
        await asyncio.sleep(0.1)


async def settle(running: Running) -> bool:
    """Wait until the server is idle, at most SETTLE_LIMIT. Whether it is."""
    until, before = time.perf_counter() + SETTLE_LIMIT, usage(running.process.pid).cpu
    while time.perf_counter() < until:
        await asyncio.sleep(PAUSE)
        now = usage(running.process.pid).cpu
        if now - before < SETTLED * PAUSE:
            return True
        before = now
    return False


def _memory(run: Run) -> None:
    for name, running in run.up.items():
        used = usage(running.process.pid)
        run.rows.add(name, "memory", "rss_mb", 0, used.rss / 1e6)
        if used.peak:
            run.rows.add(name, "memory", "peak_mb", 0, used.peak / 1e6)


def _drop(run: Run, name: str) -> None:
    run.up.pop(name).end()


async def _probe(run: Run, name: str, probed: dict[str, probes.Probed]) -> None:
    """Every cell of the probes, on the tiny models, without drafts and with."""
    server, python = run.servers[name]
    for variant, setting in run.variants(name):
        run.say(f"probes: {name}, {variant}")
        on, log = probed[variant], run.scratch / f"{name} {variant}.log"
        try:
            running = start(server, python, on.model, run.env, log, setting, on.draft)
        except Ended as error:
            run.rows.failed(name, f"probes, {variant}", 0, str(error))
            continue
        try:
            for cell in on.cells:
                await _judge(run, name, running, cell, f"{cell.name}/{variant}")
                run.say(f"probes: {name}, {variant}", PROBE_WEIGHT / len(on.cells))
                if cell.batch == "joining":
                    await settle(
                        running
                    )  # a neighbour that goes on would be in the next cell's batch
        except Ended as error:
            run.rows.failed(name, f"probes, {variant}", 0, str(error))
        finally:
            running.end()


async def _judge(run: Run, name: str, running: Running, cell: probes.Cell, workload: str) -> None:
    """Right answers of a cell; where one does not come, none of it is, unless it could not be asked
    for. Raises Ended."""
    right, failed = 0, None
    try:
        right = await probes.matches(running, cell)
    except (TimeoutError, *BROKEN) as error:
        failed = error
        run.rows.failed(name, workload, 0, f"{type(error).__name__}: {error}")
    if not isinstance(failed, Early):
        run.rows.add(name, workload, "right", 0, right)
        run.rows.add(name, workload, "asked", 0, len(cell.probes))
    if failed:
        await _check(running)


def installed(
    servers: Sequence[Server], folder: Path, rows: Rows, console: Console
) -> dict[str, tuple[Server, str]]:
    """Those whose environment is there or could be made, by name; sizes and reasons become rows."""
    found: dict[str, tuple[Server, str]] = {}
    for server in servers:
        try:
            python = venvs.ready(folder, server, console)
        except (Ended, OSError) as error:
            rows.failed(server.name, "install", 0, str(error))
            continue
        if not server.only:
            rows.add(server.name, "install", "size_mb", 0, venvs.megabytes(python))
            rows.add(server.name, "install", "torch", 0, venvs.has(python, "torch"))
            rows.add(server.name, ABOUT, f"{server.name} runs on", 0, 0, venvs.versions(python))
        found[server.name] = server, os.fspath(python)
    return found
