"""The whole server with everything on, for as long as one likes: two models with a head each and
one that sees, every API, images, tools, gaps to fill, embeddings, profiles, priorities, web pages,
loops, clients that leave, models that are unloaded, and a training that gives way; each row exact.

Rule: every request ends in an answer or an error that says why; an answer is that of a quiet
server without drafts; after each storm nothing is left of it. `python -m tests.support.soak --minutes 20`
prints a report and exits with 1 if something is wrong.
"""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import httpx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from mlxspec.progress import Report, progress  # noqa: E402
from tests.heads import kinds, packagings  # noqa: E402
from tests.support import api_requests as api  # noqa: E402
from tests.support import vision  # noqa: E402
from tests.support.api_requests import PAGE, SEEING, Ask, Said, known_prompts, said  # noqa: E402
from tests.support.processes import BLOCKS, Held, Server, Training  # noqa: E402
from tests.text.call_formats import TEMPLATES  # noqa: E402
from tests.tiny_tokenizer import AGENT, CALLS, PSM, THINK, save_tokenizer  # noqa: E402

STORM_S, REST_S = 10.0, 5.0
WIDTH = 10  # most requests at once, but for bursts
BURST = 30  # more than the server takes
LIMIT_S = 60.0  # for any answer
GRACE_S = 3.0  # in which a training notices that the server is busy, and ends its step
WAIT_S = 900.0  # for a training that is left alone
GAVE_WAY = 0.2  # of a core, at most, while the server is busy
CALM = 0.25  # part of the time after which nothing may grow
SLACK = 1.1  # of what was held before, and
SPARE = {"footprint_bytes": 16 << 20, "mlx_active_bytes": 1 << 20, "live_arrays": 0}
HEADS = ("eagle3", "mtp")
NAMES = ("chained", "hybrid", SEEING)
# With their first work start each model's reader and writer of the disk, and its grammars' trials.
LAZY = {"threads": 2 * len(NAMES), "files": len(NAMES)}
FORM = "attributes with types"  # of calls; no model is known to write it
NEW = 0.3  # part of the requests that are of one of the kinds, whichever


@dataclass
class Seen:
    """`sizes`: while requests ran; `rests`: after each storm; `storms`: seconds of each in which
    the training had noticed it, and seconds that this computed in them."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sizes: list[Held] = field(default_factory=list)
    rests: list[Held] = field(default_factory=list)
    storms: list[tuple[float, float]] = field(default_factory=list)
    trainings: Counter[int] = field(default_factory=Counter)
    kept: dict[str, float] = field(default_factory=dict)  # shares of each head's drafts
    exact: dict[str, int] = field(default_factory=dict)  # rows of each model
    cached: dict[str, int] = field(default_factory=dict)  # tokens of each model's prompts

    def growth(self, name: str) -> tuple[int, int]:
        """The most that was held in the second quarter of the time, and in the last."""
        end = self.sizes[-1].at
        early, late = ((CALM, 0.5), (0.75, 1.0))
        most = [
            max((s.sizes[name] for s in self.sizes if a * end <= s.at <= b * end), default=0)
            for a, b in (early, late)
        ]
        return most[0], most[1]

    @property
    def disturbed(self) -> float:
        """Of a core, what the training took while the server was busy."""
        return sum(cpu for _, cpu in self.storms) / max(sum(s for s, _ in self.storms), 1e-9)

    @property
    def answered(self) -> int:
        return sum(n for what, n in self.counts.items() if what.startswith("answered"))

    def faults(self) -> list[str]:
        """All that is wrong, in a line each."""
        found = self.wrong[:5]
        if not self.answered:
            found.append("nothing was answered")
        for name, spare in SPARE.items():
            early, late = self.growth(name)
            if late > early * SLACK + spare:
                found.append(f"{name} grew from {early} to {late}")
        first, last = self.rests[0], self.rests[-1]
        for name, spare in LAZY.items():
            if last.sizes[name] > first.sizes[name] + spare:
                found.append(f"{name}: {first.sizes[name]} before, {last.sizes[name]} after")
        if not self.storms:
            found.append("no storm met a training")
        if self.disturbed > GAVE_WAY:
            found.append(f"the training took {self.disturbed:.0%} of a core from requests")
        if not self.trainings[0] + self.trainings[1]:
            found.append("no training ended")
        found += [f"{head} drafted nothing right" for head in HEADS if not self.kept.get(head)]
        found += [f"no answer with {kind}" for kind in api.KINDS if not self.counts[f"with {kind}"]]
        found += [f"{name} is not exact" for name in NAMES if not self.exact.get(name)]
        found += [f"{name} found no prompt again" for name in NAMES if not self.cached.get(name)]
        return found


# ---- the server


def models(root: Path) -> dict[str, Path]:
    """The trained pairs' directories, of which the second holds its head, and one that sees. The
    pairs' tokenizers know tools, reasoning and gaps."""
    made = {name: root / name for name in NAMES}
    shutil.copytree(kinds.TARGET, made["chained"])
    packagings.write("embedded", made["hybrid"])
    for name in ("chained", "hybrid"):
        with_tokens(made[name])
    made[SEEING].mkdir()
    vision.save(made[SEEING], "qwen3_vl")
    save_tokenizer(made[SEEING], template=TEMPLATES[FORM])
    return made


def settings(root: Path) -> None:
    """The file of a server at home in `root`."""
    file = root / ".config/mlxspec/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(api.PROFILES)


def with_tokens(path: Path) -> None:
    """Give a model control tokens in the place of bytes that no text has."""
    written = packagings.read_json(path / "tokenizer.json")
    vocab, example = written["model"]["vocab"], written["added_tokens"][-1]
    for byte, token in enumerate((*THINK, *CALLS, *PSM)):
        vocab[token] = vocab.pop(chr(256 + byte))
        written["added_tokens"].append(example | {"id": vocab[token], "content": token})
    packagings.write_json(path / "tokenizer.json", written)
    config = packagings.read_json(path / "tokenizer_config.json")
    packagings.write_json(path / "tokenizer_config.json", config | {"chat_template": AGENT})


@contextmanager
def served(root: Path, paths: dict[str, Path], *flags: str) -> Iterator[Server]:
    words = [f"{name}={path}" for name, path in paths.items()]
    words += ["--cache-dir", str(root / "cache"), "--max-sequences", "6", "--max-queue", "16"]
    words += ["--block-size", "16", "--kv-blocks", str(BLOCKS), "--context", "1024"]
    words += ["--exact", "on", "--strict-content", "on", "--allowed-origins", PAGE, *flags]
    with Server(words, HOME=str(root)) as server:
        yield server


# ---- the clients


@dataclass
class Clients:
    server: Server
    http: httpx.AsyncClient
    seen: Seen
    truth: dict[Ask, Said] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    async def quiet(self, ask: Ask) -> Said:
        """What is said to somebody who is alone."""
        answer = await self.http.post(ask.path, content=ask.plain)
        assert answer.status_code == 200, (ask, answer.text)
        found = said(answer.headers["content-type"], answer.content)
        assert found.calls or ask.kind != api.LEARNED, (ask, answer.text)
        return found

    async def one(self, ask: Ask) -> None:
        """Ask, perhaps leave, and compare."""
        how = self.rng.random()
        leaves = self.rng.choice([0.0, 0.002, 0.02, 0.1]) if how < 0.08 else None
        pieces = self.rng.randint(0, 8) if 0.08 <= how < 0.2 else None
        data = b""
        try:
            async with asyncio.timeout(LIMIT_S if leaves is None else leaves):
                sent: Any = {"content": ask.data, "headers": ask.headers}
                async with self.http.stream("POST", ask.path, **sent) as answer:
                    async for piece in answer.aiter_raw():
                        data += piece
                        if pieces is not None and (pieces := pieces - 1) < 0:
                            self.seen.counts["left in the middle"] += 1
                            return
                    self.judge(ask, answer, data)
        except TimeoutError:
            if leaves is None:
                self.seen.wrong.append(f"{ask}: no end after {LIMIT_S:.0f} s")
            self.seen.counts["left early"] += 1
        except (httpx.HTTPError, api.Unfinished, ValueError, LookupError) as error:
            self.seen.wrong.append(f"{ask}: {error!r}")

    def judge(self, ask: Ask, answer: httpx.Response, data: bytes) -> None:
        status, counts = answer.status_code, self.seen.counts
        page, told = ask.headers.get("origin"), answer.headers.get(api.ALLOWED + "origin")
        if told != (None if page == api.FOREIGN else page):
            self.seen.wrong.append(f"{ask}: {status} for the page {told}")
        if status == 200 and not ask.refused:
            found = said(answer.headers["content-type"], data)
            counts[f"answered {ask.path}"] += 1
            counts["images read"] += ask.images
            if ask.kind:
                counts[f"with {ask.kind}"] += 1
            if unlike := found.unlike(self.truth[ask]):
                self.seen.wrong.append(f"{ask}: {unlike}, a quiet server's answer behind ours")
        elif status == ask.refused and b"error" in data:
            counts["refused"] += 1
        elif status in (429, 503) and "retry-after" in answer.headers and b"again" in data:
            counts["told to come again"] += 1
        else:
            self.seen.wrong.append(f"{ask}: {status} {data[:200]!r}")

    async def storm(self, seconds: float, began: float, training: Training) -> None:
        """Many requests at once, then none; the training's time once it could know."""
        running: set[asyncio.Task[None]] = set()
        start = time.monotonic()
        noticed, before, told = 0.0, 0.0, 0.0
        child = training.current
        while (now := time.monotonic() - start) < seconds:
            some = self.rng.randint(1, WIDTH) if self.rng.random() > 0.01 else BURST
            while len(running) < some:
                running.add(asyncio.ensure_future(self.one(self.choose())))
            for work, often in ((self.unload, 0.003), (self.preflight, 0.02)):
                if self.rng.random() < often:
                    running.add(asyncio.ensure_future(work()))
            done, running = await asyncio.wait(running, timeout=self.rng.choice([0.0, 0.02, 0.1]))
            self.ended(done)
            if now - told > 1:
                told = now
                self.seen.sizes.append(await self.server.held(self.http, began))
            if now > GRACE_S and not noticed and training.gives_way:
                noticed, child = now, training.current
                before = child.cpu() if child else 0.0
        if noticed and child and child is training.current and training.gives_way:
            self.seen.storms.append((now - noticed, child.cpu() - before))
        if running:
            done, late = await asyncio.wait(running, timeout=2 * LIMIT_S)
            self.ended(done)
            self.seen.wrong += [f"{task}: no end after {2 * LIMIT_S:.0f} s" for task in late]

    def ended(self, done: set[asyncio.Task[None]]) -> None:
        self.seen.wrong += [repr(error) for task in done if (error := task.exception())]

    def choose(self) -> Ask:
        kind = self.rng.choice(api.KINDS) if self.rng.random() < NEW else ""
        return self.rng.choice([ask for ask in self.truth if not kind or ask.kind == kind])

    async def preflight(self) -> None:
        """What a browser asks before a page's request, and is told."""
        page = self.rng.choice([PAGE, api.FOREIGN])
        headers = api.PREFLIGHT | {"origin": page}
        answer = await self.http.options("/v1/chat/completions", headers=headers)
        if not api.told_rightly(page, answer):
            self.seen.wrong.append(f"a preflight of {page}: {answer.status_code} {answer.headers}")
        self.seen.counts["preflights"] += 1

    async def unload(self) -> None:
        """Somebody else wants the memory."""
        named = {"model": self.rng.choice(NAMES[1:])}
        answer = await self.http.post("/v1/models/unload", json=named)
        self.seen.counts["unloads"] += answer.status_code == 200

    async def rest(self, began: float) -> None:
        """Nothing runs or waits, and every block is free or cached."""
        for model in NAMES:
            await self.http.post("/v1/models/load", json={"model": model})
        end, now = time.monotonic() + 20, await self.server.held(self.http, began)
        while (now.busy or self.more(now)) and time.monotonic() < end:
            await asyncio.sleep(0.1)
            now = await self.server.held(self.http, began)
        if now.busy:
            self.seen.wrong.append(f"left behind after a storm: {now.busy}")
        self.seen.rests.append(now)

    def more(self, now: Held) -> bool:
        """Whether connections of the storm are still open."""
        first = self.seen.rests[0].sizes if self.seen.rests else now.sizes
        return now.sizes["files"] > first["files"] + LAZY["files"]


def connected(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=WIDTH)
    return httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits)


async def drive(
    quiet: Server, server: Server, training: Training, seconds: float, seen: Seen, report: Report
) -> None:
    """Storms with rests between them, once one has let the pools grow and a training is at work."""
    clients = Clients(server, connected(quiet), seen)
    async with clients.http:
        for ask in api.asks(known_prompts()):
            clients.truth[ask] = Said() if ask.refused else await clients.quiet(ask)
    quiet.stop()
    training.start(server.url)
    async with connected(server) as clients.http:
        await clients.storm(STORM_S, time.monotonic(), training)
    seen.sizes.clear()
    end = time.monotonic() + LIMIT_S
    while training.runs and not training.gives_way and time.monotonic() < end:
        await asyncio.sleep(0.1)
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        report(now, seconds)
        async with connected(server) as clients.http:
            await clients.storm(min(STORM_S, seconds - now), began, training)
        async with connected(server) as clients.http:
            await clients.rest(began)
        await asyncio.sleep(min(REST_S, max(0.0, seconds - (time.monotonic() - began))))
    report(seconds, seconds)
    training.stop_after_this()
    end = time.monotonic() + WAIT_S
    while training.runs and time.monotonic() < end:
        await asyncio.sleep(0.2)
    if training.runs:
        seen.wrong.append(f"a training did not end in {WAIT_S:.0f} s without requests")
    async with connected(server) as clients.http:
        await clients.rest(began)
        seen.kept = await server.drafts(clients.http)
        seen.exact = await server.by_model(clients.http, "exact_rows")
        seen.cached = await server.by_model(clients.http, "cached_tokens_total")
        loops = await server.by_model(clients.http, "loops_total")
        seen.counts["loops ended"] = sum(loops.values())


def soak(seconds: float, report: Report = lambda done, total: None) -> Seen:
    """Storms for so many seconds."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        paths = models(root)
        settings(root)
        quiet = stack.enter_context(served(root, paths, "--speculate", "off", "--cache-gb", "0"))
        head = str(kinds.DATA / "eagle3")
        flags = ["--draft", head, "--draft-depth", "3", "--cache-gb", "0.02", "--record", "on"]
        server = stack.enter_context(served(root, paths, *flags))
        training = stack.enter_context(Training(paths["chained"], root / "cache"))
        asyncio.run(drive(quiet, server, training, seconds, seen, report))
        seen.trainings = training.statuses
        seen.wrong += training.wrong
        status = server.stop()
        bad = [
            line for line in server.said.splitlines() if "Traceback" in line or "CRITICAL" in line
        ]
        if status or bad:
            seen.wrong.append(f"the server ended with {status}: {bad[:1]}")
    return seen


def show(seen: Seen, seconds: float) -> None:
    """The report."""
    table = Table("What", "Seen", title=f"{seconds / 60:.1f} minutes with everything on")
    table.add_row("answered, as in a quiet run", str(seen.answered))
    for what, n in sorted(seen.counts.items()):
        table.add_row(what.replace("answered", " "), str(n))
    for name in SPARE:
        early, late = seen.growth(name)
        unit = 1 if name == "live_arrays" else 1 << 20
        table.add_row(f"{name}, second quarter, last", f"{early // unit}, {late // unit}")
    first, last = seen.rests[0].sizes, seen.rests[-1].sizes
    for name in LAZY:
        table.add_row(f"{name} at rest, first, last", f"{first[name]}, {last[name]}")
    for name in NAMES:
        found = f"{seen.exact.get(name)}, {seen.cached.get(name)}"
        table.add_row(f"{name}: exact rows, tokens from the cache", found)
    for head, kept in seen.kept.items():
        table.add_row(f"drafts of {head} that were right", f"{kept:.0%}")
    ended = ", ".join(f"{n} with status {status}" for status, n in seen.trainings.items())
    table.add_row("trainings", ended)
    table.add_row("of a core, while requests ran", f"{seen.disturbed:.1%}")
    console = Console()
    console.print(table)
    for fault in seen.faults():
        console.print(f"wrong: {fault[:600]}", style="red", markup=False)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    seconds = 60 * parser.parse_args().minutes
    with progress("Soaking") as bar:
        found = soak(seconds, bar)
    show(found, seconds)
    sys.exit(bool(found.faults()))
