"""The workloads: what is asked of a server, and which figures come of it.

Rule: in a round every server is asked the same, and no workload or round asks what another did, so
nobody gains by remembering an answer. Only the hot turns repeat, on purpose.
"""

import asyncio
import hashlib
import random
import statistics
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench import http
from bench.http import Answer, Silent, ask, chat, plain, words
from bench.process import usage
from bench.servers import Running
from bench.workloads import tasks
from mlxspec.commands.bench import Task
from mlxspec.text.chat import Tokenizer, encode, render_chat

MOST_CONTEXT = 16_384  # tokens of the last turn of a session, where the window allows it
TURNS = 10
AROUND = 40  # tokens that the template and the answer add to a turn
STREAMS = (1, 4, 8, 16)
LIBRARY = ("argparse.py", "ast.py", "asyncio/tasks.py", "bdb.py", "calendar.py", "cmd.py", "csv.py")
ATTEMPTS = 4  # prompts, until the model has more to say than fits before a client leaves
LEAVE, AFTER = 1.5, 10.0  # seconds: when a client leaves, and how long the server is watched then
Figures = dict[str, float]
# The tasks that a round of a workload takes from each list.
DRAWN: dict[str, dict[str, int]] = {
    "chat": {"chat": 4},
    "edit": {"edits": 2},
    "humaneval": {"humaneval": 1},
    **{f"streams {n}": {"humaneval": n - n // 2, "chat": n // 2} for n in STREAMS},
}
TOKENS = {
    "chat": 48,
    "edit": 128,
    "humaneval": 64,
    **{f"streams {n}": 32 for n in STREAMS},
}  # of an answer


@dataclass(slots=True)
class Setting:
    """What the workloads need to know. `seed` is of the run: prompts that no cache has seen.
    `scale` shortens everything for a quick look; `window` is the model's, in tokens."""

    tokenizer: Tokenizer
    window: int
    cache_dir: Path
    seed: int
    scale: float = 1.0

    def tokens(self, count: int) -> int:
        return max(8, int(count * self.scale))

    def share(self, part: float) -> int:
        """Tokens: a part of the window that is used, which has room for answers too."""
        return int(
            part * min(MOST_CONTEXT, self.window * 15 // 16) * (self.scale if self.scale < 1 else 1)
        )

    def long(self, count: int, seed: int) -> str:
        """Text of about `count` tokens; its words are one token each in most tokenizers."""
        per_word = len(encode(self.tokenizer, words(200, 1), special=False)) / 200
        return words(int(count / per_word), seed)

    def library(self) -> list[int]:
        """Tokens of the standard library's sources, enough for a session."""
        ids: list[int] = []
        for name in LIBRARY:
            source = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text("utf-8")
            ids += encode(self.tokenizer, source, special=False)
            if len(ids) > MOST_CONTEXT:
                break
        return ids


Cell = Callable[[Running, Setting, int], Awaitable[Figures]]  # the round, from 0


async def _alone(server: Running, setting: Setting, bodies: Sequence[dict[str, Any]]) -> Figures:
    """One after the other."""
    before, answers = await http.metrics(server.url), []
    for body in bodies:
        answers.append(counted(await ask(server.url, body), setting.tokenizer))
    after = await http.metrics(server.url)
    gaps = [gap for a in answers for gap in a.gaps]
    tokens = sum(a.tokens for a in answers)
    texts = (encode(setting.tokenizer, a.text, special=False) for a in answers)
    found = {
        "tokens_per_s": statistics.median(a.rate for a in answers),
        "whole_tokens_per_s": tokens / sum(a.at[-1] - a.began for a in answers),
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "tokens": tokens,
        "text_tokens": sum(map(len, texts)),
        "prompt_tokens": sum(a.prompt for a in answers),
        "text_hash": float(hash_of("".join(a.text for a in answers))),
    }
    rounds = after.get("mlxspec_rounds_total", 0) - before.get("mlxspec_rounds_total", 0)
    if rounds:
        made = after["mlxspec_generated_tokens_total"] - before["mlxspec_generated_tokens_total"]
        found["tokens_per_round"] = made / rounds
    return found


def some(workload: str, corpus: str, setting: Setting, round: int) -> list[Task]:
    """The tasks of a list that this round of a workload takes; none is taken twice before all
    were."""
    found, each = (
        tasks(corpus, setting.cache_dir),
        [drawn.get(corpus, 0) for drawn in DRAWN.values()],
    )
    first = round * sum(each) + sum(each[: list(DRAWN).index(workload)])
    return [found[(first + i) % len(found)] for i in range(DRAWN[workload].get(corpus, 0))]


def body_of(task: Task, setting: Setting, tokens: int) -> dict[str, Any]:
    """As a chat; where the answer's beginning is given, as the text that the chat's template makes
    of it."""
    messages = [{"role": "user", "content": task.text}]
    if not task.opening or not setting.tokenizer.has_chat_template:
        return (
            chat(messages, tokens)
            if setting.tokenizer.has_chat_template
            else plain(task.text, tokens)
        )
    ids = render_chat(setting.tokenizer, messages)
    return plain(setting.tokenizer.decode(ids) + task.opening, tokens)


def _tasks(workload: str, corpus: str) -> Cell:
    async def cell(server: Running, setting: Setting, round: int) -> Figures:
        asked = some(workload, corpus, setting, round)
        return await _alone(
            server, setting, [body_of(t, setting, setting.tokens(TOKENS[workload])) for t in asked]
        )

    return cell


def arrivals(count: int, mean: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests comes, a Poisson process; the first
    at 0."""
    rng, at = random.Random(seed), [0.0]
    while len(at) < count:
        at.append(at[-1] + rng.expovariate(1 / mean))
    return at[:count]


def _streams(count: int) -> Cell:
    async def cell(server: Running, setting: Setting, round: int) -> Figures:
        code, talk = (
            some(f"streams {count}", corpus, setting, round) for corpus in ("humaneval", "chat")
        )
        asked = [t for pair in zip_longest(code, talk) for t in pair if t]
        tokens = setting.tokens(TOKENS[f"streams {count}"])
        waits = arrivals(count, 2 / count, setting.seed + round)

        async def one(task: Task, wait: float) -> Answer:
            await asyncio.sleep(wait)
            return await ask(server.url, body_of(task, setting, tokens))

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(t, w) for t, w in zip(asked, waits, strict=True)))
        took = time.perf_counter() - began
        gaps = [gap for a in answers for gap in a.gaps]
        return {
            "tokens_per_s": sum(counted(a, setting.tokenizer).tokens for a in answers) / took,
            "ttft_s": statistics.median(a.first for a in answers),
            "gap_p50_s": quantile(gaps, 0.5),
            "gap_p99_s": quantile(gaps, 0.99),
            "gap_longest_s": max(gaps, default=0.0),
        }

    return cell


async def _prefill(server: Running, setting: Setting, round: int) -> Figures:
    """A running answer, and a long prompt that comes beside it. An answer that ends is followed by
    another: a server that does not stall may well be through with one."""
    seed, answers = setting.seed + 1000 * round, [Answer()]

    async def running() -> None:
        while True:
            await ask(server.url, plain(setting.long(40, seed + len(answers)), 400), answers[-1])
            answers.append(Answer())

    stream = asyncio.create_task(running())
    waiting = asyncio.create_task(answers[0].started.wait())
    try:
        await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
        other = await ask(server.url, plain(setting.long(setting.share(0.25), seed), 2))
        seen = len(answers[-1].at), len(answers)
        while (len(answers[-1].at), len(answers)) == seen and not stream.done():
            await asyncio.sleep(0.02)  # until the gap is over that the prompt's end closes
        if stream.done():
            await stream  # raises what it raised
    finally:
        waiting.cancel()
        stream.cancel()
        await asyncio.gather(stream, waiting, return_exceptions=True)
    # Who follows waits too: a server could be smooth by letting nobody in.
    gaps = [gap for a in answers for gap in a.gaps] + [a.first for a in answers[1:] if a.at]
    found = {f"gap_{i}": gap for i, gap in enumerate(gaps)} if round == 0 else {}
    return {
        "gap_longest_s": max(gaps),
        "gap_p50_s": quantile(gaps, 0.5),
        "ttft_s": other.first,
        **found,
    }


async def _first(server: Running, setting: Setting, round: int) -> Figures:
    """A prompt of half the window, new and then again."""
    prompt = setting.long(setting.share(0.5), setting.seed + 10 * round + 5)
    cold = await ask(server.url, plain(prompt, 2))
    hot = await ask(server.url, plain(prompt, 2))
    return {
        "cold_s": cold.first,
        "hot_s": hot.first,
        "hot_by_cold": hot.first / cold.first,
        "prompt_tokens": cold.prompt,
        "cached_tokens": hot.cached,
    }


def turns(setting: Setting, round: int) -> Iterator[str]:
    """What the user says in each turn: an eighth of the session, then equal parts of the rest."""
    last, ids = setting.share(1.0) - TURNS * AROUND, setting.library()
    last = max(last, TURNS * 16)
    first = last // 8
    step, at = (last - first) // (TURNS - 1), (setting.seed + 997 * round) % 900
    for turn in range(TURNS):
        size = first if turn == 0 else step
        yield f"File {turn}, look at it:\n{setting.tokenizer.decode(ids[at : at + size])}"
        at += size


async def _session(server: Running, setting: Setting, round: int) -> Figures:
    """A conversation as a coding agent has it: every turn sends all that was said, and a file more.
    A turn to which the model says nothing has no time of its first token, with no server."""
    messages: list[dict[str, str]] = []
    found: Figures = {}
    for turn, text in enumerate(turns(setting, round), 1):
        messages.append({"role": "user", "content": text})
        try:
            answer = await ask(server.url, chat(messages, 12))
        except Silent:
            messages.append({"role": "assistant", "content": "I see."})
            continue
        messages.append({"role": "assistant", "content": answer.text})
        found[f"ttft_turn_{turn}_s"] = answer.first
        found[f"prompt_turn_{turn}"] = answer.prompt
    if later := [found[key] for t in range(2, TURNS + 1) if (key := f"ttft_turn_{t}_s") in found]:
        found["ttft_later_s"] = statistics.median(later)
    return found


async def _disconnect(server: Running, setting: Setting, round: int) -> Figures:
    """CPU that goes on being used after the client of a whole answer has hung up. The model may end
    one of them before that."""
    for attempt in range(ATTEMPTS):
        prompt = setting.long(40, setting.seed + 10 * round + 7 + 100 * attempt)
        try:
            await http.leave(server.url, plain(prompt, min(1000, setting.window // 2)), LEAVE)
            break
        except http.Early:
            if attempt == ATTEMPTS - 1:
                raise
    await asyncio.sleep(0.5)
    before = usage(server.process.pid).cpu
    await asyncio.sleep(AFTER)
    return {"cpu_after_leaving_s": usage(server.process.pid).cpu - before}


@dataclass(frozen=True, slots=True)
class Workload:
    """`weight` is about how long it takes, for the progress bar; `every`: of how many rounds it has
    one."""

    cell: Cell
    weight: float
    every: int = 1
    settle: bool = False  # a server may be busy afterwards with what nobody waits for


WORKLOADS = {
    "chat": Workload(_tasks("chat", "chat"), 20),
    "edit": Workload(_tasks("edit", "edits"), 25),
    "humaneval": Workload(_tasks("humaneval", "humaneval"), 9),
    **{f"streams {n}": Workload(_streams(n), 4 + n) for n in STREAMS},
    "prefill": Workload(_prefill, 15, settle=True),
    "first token": Workload(_first, 25, settle=True),
    "session": Workload(_session, 40, every=3, settle=True),
    "disconnect": Workload(_disconnect, 14, every=1_000, settle=True),
}


def counted(answer: Answer, tokenizer: Tokenizer) -> Answer:
    """With our own count of its tokens where the server gave none."""
    answer.tokens = answer.tokens or len(encode(tokenizer, answer.text, special=False))
    return answer


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of them do not exceed; 0 of none."""
    found = sorted(values)
    return found[min(len(found) - 1, int(part * len(found)))] if found else 0.0


def hash_of(text: str) -> int:
    """The same for the same text, in every process; small enough to be a float exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
