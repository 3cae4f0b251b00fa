"""What a client sees of a server: the pieces of a streamed answer and when they came, text and
token counts.

Rule: greedy unless said otherwise; every wait has a limit. Times are time.perf_counter().
"""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.folders import RAW
from bench.servers import Running

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
TIMEOUT = 600  # seconds of silence
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Refused(Exception):
    """An answer that is not one: a status, or a stream that breaks off."""


class Silent(Refused):
    """An answer without text: the model ended at once."""


class Early(Refused):
    """An answer that was whole before it was wanted to be."""


@dataclass(slots=True)
class Answer:
    """What came: `at` is the time of each piece that holds text. `tokens` and `prompt` are as the
    server counts them, 0 where it does not; so are `rounds`, steps that verified drafts, of all
    answers in its batch."""

    began: float = 0.0
    at: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    rounds: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.at[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.at)]

    @property
    def rate(self) -> float:
        """Tokens per second after the first piece; a piece may hold several."""
        return (self.tokens - self.tokens / len(self.at)) / (self.at[-1] - self.at[0])


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def chat(messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": tokens, "temperature": 0}


def plain(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0}


def asked(server: Running, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where a body is sent, and as what."""
    if server.line.chats and "prompt" in body:
        raw = {"role": "user", "content": RAW + body["prompt"]}
        body = {name: x for name, x in body.items() if name != "prompt"} | {"messages": [raw]}
    return server.url + (CHAT if "messages" in body else TEXT), {"model": server.model, **body}


async def ask(server: Running, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """The streamed answer to a body, which `answer` gets while it comes. Raises Refused."""
    answer = answer or Answer()
    path, sent = asked(server, body)
    sent |= {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        answer.began = time.perf_counter()
        async with client.stream("POST", path, json=sent) as response:
            if response.status_code != 200:
                raise Refused(f"{path}: {response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line.removeprefix("data: ")), answer)
    if not answer.at:
        raise Silent(f"{path}: an answer without text")
    return answer


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise Refused(f"an error in the stream: {event['error']}")
    if usage := event.get("usage"):
        answer.tokens, answer.prompt = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if rounds := (event.get("timings") or {}).get("draft_rounds"):
        answer.rounds = rounds
    for choice in event.get("choices", ()):
        if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
            answer.at.append(time.perf_counter())
            answer.text += piece
            if len(answer.at) == STARTED:
                answer.started.set()


async def leave(server: Running, body: dict[str, Any], after: float) -> None:
    """Ask for a whole answer, and hang up after `after` seconds. Raises Early where it is there by
    then."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        path, sent = asked(server, body)
        request = asyncio.create_task(client.post(path, json=sent))
        await asyncio.wait((request,), timeout=after)
        if request.done():
            raise Early(
                f"{path}: answered before the client could leave: {request.result().text[:200]}"
            )
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def metrics(url: str) -> dict[str, float]:
    """The counters of mlxspec's /metrics, summed over models; empty where a server has none of that
    name."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"{url}/metrics")).text
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("mlxspec_"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0) + float(value)
    return found
