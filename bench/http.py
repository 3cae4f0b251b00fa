"""What a client sees of a server: tokens per second, a stream's longest gap, the time to a first token."""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field

import httpx

WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education
""".split()

STARTED = 5  # pieces after which a stream counts as running


@dataclass
class Answer:
    """When each piece came (seconds since the request), and how many tokens there were."""

    at: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def gap(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.at)), default=0.0)


def text(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def complete(url: str, prompt: str, tokens: int, answer: Answer | None = None) -> Answer:
    """One greedy streamed completion. `answer` is filled while it comes."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer, began = answer or Answer(), time.perf_counter()
    async with httpx.AsyncClient(timeout=600) as client:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{url}: {response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if usage := event.get("usage"):
                    answer.tokens = usage["completion_tokens"]
                    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if any(c.get("text") for c in event["choices"]):
                    answer.at.append(time.perf_counter() - began)
                    if len(answer.at) == STARTED:
                        answer.started.set()
    return answer


async def throughput(url: str, streams: int, seed: int, tokens: int = 48) -> float:
    """Aggregate tokens per second of `streams` concurrent completions with different prompts."""
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(complete(url, text(40, 1000 * seed + i), tokens) for i in range(streams))
    )
    return sum(a.tokens for a in answers) / (time.perf_counter() - began)


async def longest_gap(url: str, seed: int, words: int) -> tuple[float, float]:
    """Seconds: the longest gap of a running stream while a prompt of `words` words is computed beside it,
    and that prompt's time to first token."""
    answer = Answer()
    stream = asyncio.create_task(complete(url, text(30, seed), 400, answer))
    await answer.started.wait()
    other = await complete(url, text(words, seed + 1), 2)
    await asyncio.sleep(0.5)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return answer.gap, other.at[0]


async def first_tokens(url: str, seed: int, words: int) -> tuple[float, float]:
    """Seconds to the first token of a prompt that is new, and of the same prompt again."""
    prompt = text(words, seed)
    cold = await complete(url, prompt, 2)
    hot = await complete(url, prompt, 2)
    return cold.at[0], hot.at[0]
