"""The workloads: what is asked of a server, and which figures come of it.

Rule: in a round every server is asked the same, and no workload or round asks what another did, so
nobody gains by remembering an answer. Only the hot turns repeat, on purpose.
"""

import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from bench import http
from bench.http import Answer, Silent, ask, chat, plain
from bench.process import usage
from bench.servers import HEADS, OWN_HEAD, Running
from bench.setting import Setting
from bench.workloads import tasks
from mlxspec.commands.bench import Task
from mlxspec.text.chat import Tokenizer, encode, render_chat
from mlxspec.text.fim import fill_in_middle
from tests.heads.language import Language

TURNS = 10
AROUND = 40  # tokens that the template and the answer add to a turn
STREAMS = (1, 4, 8, 16)
ATTEMPTS = 4  # prompts, until the model has more to say than fits before a client leaves
LEAVE, AFTER = 1.5, 10.0  # seconds: when a client leaves, and how long the server is watched then
Figures = dict[str, float]
# The tasks that a round of a workload takes from each list.
DRAWN: dict[str, dict[str, int]] = {
    "chat": {"chat": 4},
    "edit": {"edits": 2},
    "humaneval": {"humaneval": 1},
    **{f"streams {n}": {"humaneval": n - n // 2, "chat": n // 2} for n in STREAMS},
    "head chat": {"chat": 3},
    "head code": {"humaneval": 3},
    "head T=0.7": {"chat": 3},
}
TOKENS = {
    "chat": 48,
    "edit": 128,
    "humaneval": 64,
    **{f"streams {n}": 32 for n in STREAMS},
    **dict.fromkeys(OWN_HEAD, 64),
    "pair": 64,
    "typing": 4,
}  # of an answer
PROMPTS, PHRASES = 8, 12  # that a pair is asked, and of which size
WARM = 0.8  # the temperature of a pair's second half
KEYS = 30  # that somebody types
BEFORE, BEHIND = 1200, 400  # tokens beside the cursor
FILLING = "filling"  # the model, with tokens to fill in the middle


Cell = Callable[[Running, Setting, int], Awaitable[Figures]]  # the round, from 0


async def _alone(server: Running, setting: Setting, bodies: Sequence[dict[str, Any]]) -> Figures:
    """One after the other."""
    before, answers = await http.metrics(server.url), []
    for body in bodies:
        answers.append(counted(await ask(server, body), setting.tokenizer))
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
        **per_round(before, after, answers),
    }
    if not any(body["temperature"] for body in bodies):  # else chance decides
        found["text_hash"] = float(hash_of("".join(a.text for a in answers)))
    return found


def per_round(before: Figures, after: Figures, answers: Sequence[Answer]) -> Figures:
    """Tokens per round, that of an answer's first token included: of mlxspec by its counters, of
    others by what they say of an answer."""
    rounds, made = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("mlxspec_rounds_total", "mlxspec_generated_tokens_total")
    )
    if not rounds and all(a.rounds for a in answers):
        rounds, made = sum(a.rounds + 1 for a in answers), sum(a.tokens for a in answers)
    return {"tokens_per_round": made / rounds} if rounds else {}


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


def _tasks(workload: str, corpus: str, temperature: float = 0) -> Cell:
    async def cell(server: Running, setting: Setting, round: int) -> Figures:
        asked = some(workload, corpus, setting, round)
        bodies = [body_of(t, setting, setting.tokens(TOKENS[workload])) for t in asked]
        return await _alone(
            server, setting, [warmed(b, temperature, i) for i, b in enumerate(bodies)]
        )

    return cell


def warmed(body: dict[str, Any], temperature: float, seed: int) -> dict[str, Any]:
    """A greedy body, drawn from all tokens where there is a temperature."""
    warm = {"temperature": temperature, "top_p": 1.0, "seed": seed}
    return body | warm if temperature else body


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
            return await ask(server, body_of(task, setting, tokens))

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
            await ask(server, plain(setting.long(40, seed + len(answers)), 400), answers[-1])
            answers.append(Answer())

    stream = asyncio.create_task(running())
    waiting = asyncio.create_task(answers[0].started.wait())
    try:
        await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
        other = await ask(server, plain(setting.long(setting.share(0.25), seed), 2))
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
    cold = await ask(server, plain(prompt, 2))
    hot = await ask(server, plain(prompt, 2))
    return {
        "cold_s": cold.first,
        "hot_s": hot.first,
        "hot_by_cold": hot.first / cold.first,
        "prompt_tokens": cold.prompt,
        "cached_tokens": hot.cached,
    }


def _pair(streams: int) -> Cell:
    """A trained pair, greedily and then warm; every server drafts DEPTH tokens in each round."""

    async def cell(server: Running, setting: Setting, round: int) -> Figures:
        found: Figures = {}
        language = Language(0)
        for name, temperature in (("", 0.0), ("_warm", WARM)):
            rng = random.Random(f"{setting.seed} {round} {streams}{name}")
            texts = [language.text(rng, PHRASES) for _ in range(PROMPTS)]
            bodies = [plain(text, setting.tokens(TOKENS["pair"])) for text in texts]
            before, began = await http.metrics(server.url), time.perf_counter()
            answers = []
            for first in range(0, PROMPTS, streams):
                together = enumerate(bodies[first : first + streams])
                answers += await asyncio.gather(
                    *(ask(server, warmed(body, temperature, i)) for i, body in together)
                )
            took, after = time.perf_counter() - began, await http.metrics(server.url)
            tokens = sum(counted(a, setting.tokenizer).tokens for a in answers)
            found[f"whole_tokens_per_s{name}"] = tokens / took
            if streams == 1 or after:  # a peer's rounds are those of its whole batch
                rate = per_round(before, after, answers)
                found |= {f"{metric}{name}": value for metric, value in rate.items()}
        return found

    return cell


async def _typing(server: Running, setting: Setting, round: int) -> Figures:
    """Somebody types in the middle of a file, and every key asks for what may come. Who knows no
    suffix is asked with the prompt that mlxspec makes of it. A key to which the model says nothing
    has no time, and is counted."""
    form, _, _ = fill_in_middle(setting.tokenizer)
    if not form:
        raise ValueError("the model has no tokens to fill in the middle")
    keys, ids = setting.tokens(KEYS), setting.library()[2000 * round :]
    prefix, written, suffix = (
        setting.tokenizer.decode(part)
        for part in (ids[:BEFORE], ids[BEFORE : BEFORE + keys], ids[BEFORE + keys :][:BEHIND])
    )
    waits, prompt, cached = dict[int, float](), 0, 0  # seconds by key
    for typed in range(keys):
        text = prefix + written[:typed]
        body = plain(form.format(prefix=text, suffix=suffix), TOKENS["typing"])
        if server.line.fills:
            body |= {"prompt": text, "suffix": suffix}
        with suppress(Silent):
            answer = await ask(server, body)
            waits[typed] = answer.first
            if typed:
                prompt, cached = prompt + answer.prompt, cached + answer.cached
    found: Figures = {"silent_keys": keys - len(waits)}
    if 0 in waits:
        found["first_key_s"] = waits.pop(0)
    if waits:
        found["ttft_s"] = statistics.median(waits.values())
    return found | ({"cached_share": cached / prompt} if prompt else {})


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
            answer = await ask(server, chat(messages, 12))
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
            await http.leave(server, plain(prompt, min(1000, setting.window // 2)), LEAVE)
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
    model: str = ""  # that it is asked of: a pair's kind of head, FILLING, else the run's


WORKLOADS = {
    "chat": Workload(_tasks("chat", "chat"), 20),
    "edit": Workload(_tasks("edit", "edits"), 25),
    "humaneval": Workload(_tasks("humaneval", "humaneval"), 9),
    **{f"streams {n}": Workload(_streams(n), 4 + n) for n in STREAMS},
    "prefill": Workload(_prefill, 15, settle=True),
    "first token": Workload(_first, 25, settle=True),
    "session": Workload(_session, 40, every=3, settle=True),
    "disconnect": Workload(_disconnect, 14, every=1_000, settle=True),
    "head chat": Workload(_tasks("head chat", "chat"), 15),
    "head code": Workload(_tasks("head code", "humaneval"), 15),
    "head T=0.7": Workload(_tasks("head T=0.7", "chat", 0.7), 15),
    "typing": Workload(_typing, 20, model=FILLING),
    **{f"{kind} {n}": Workload(_pair(n), 6, model=kind) for kind in HEADS for n in (1, PROMPTS)},
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
