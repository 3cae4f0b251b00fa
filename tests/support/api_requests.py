"""Requests of every kind that the server answers, and what an answer says, however it was cut into
pieces."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.heads import kinds, runs
from tests.heads.language import Language

Json = dict[str, Any]
Place = tuple[Any, ...]

LANGUAGE = Language(1)
STREAMS = (True, False)
TOOL: Json = {
    "name": "look",
    "description": "See a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string", "maxLength": 9}}},
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}


@dataclass(frozen=True, eq=False)
class Ask:
    """A request. `refused`: the status that it is to be refused with, 0: it is to be answered."""

    path: str
    body: Json
    refused: int = 0

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()


def asks(models: Mapping[str, list[list[int]]]) -> list[Ask]:
    """For each model, with the prompts that its head knows. Each has the same answer every time."""
    rng = random.Random(7)
    found = []
    for model, prompts in models.items():
        made = [*_chats(rng), *_tools(rng), *_gaps(rng), *_texts(prompts), *_vectors(rng)]
        found += [Ask(a.path, {"model": model, **a.body}, a.refused) for a in made]
    return [*found, *_bad()]


def _said(rng: random.Random) -> str:
    return LANGUAGE.text(rng, rng.randint(1, 6))


def _sampled(seed: int) -> Json:
    return {"temperature": 0.8, "seed": seed} if seed % 2 else {"temperature": 0.0}


def _chats(rng: random.Random) -> Iterator[Ask]:
    for seed in range(4):
        stream, most = STREAMS[seed // 2], rng.choice([1, 12, 40])
        messages = [{"role": "user", "content": _said(rng)}]
        drawn = _sampled(seed) | {"stream": stream}
        chat = {"messages": messages, "max_tokens": most}
        yield Ask("/v1/chat/completions", chat | drawn | {"ignore_eos": True, "n": 1 + seed % 2})
        yield Ask("/v1/messages", chat | {"temperature": 0.0, "stream": stream})
        created = {"input": _said(rng), "max_output_tokens": most, "store": False}
        yield Ask("/v1/responses", created | drawn)
        options = _sampled(seed) | {"num_predict": most}
        yield Ask("/api/chat", {"messages": messages, "options": options, "stream": stream})
    options = {"temperature": 0.0, "num_predict": 20}
    yield Ask("/v1/chat/completions", chat | {"response_format": FORMAT, "temperature": 0.0})
    yield Ask("/api/chat", {"messages": messages, "options": options, "format": NUMBERS})


def _tools(rng: random.Random) -> Iterator[Ask]:
    for stream in STREAMS:
        messages = [{"role": "user", "content": _said(rng)}]
        chat = {"messages": messages, "max_tokens": 40, "temperature": 0.0, "stream": stream}
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        yield Ask("/v1/chat/completions", chat | {"tools": tools, "tool_choice": "required"})
        options = {"temperature": 0.0, "num_predict": 20}
        told = {"messages": messages, "tools": tools, "options": options, "stream": stream}
        yield Ask("/api/chat", told)
        tools = [{"type": "function", **TOOL}]
        created = {"input": _said(rng), "max_output_tokens": 40, "temperature": 0.0}
        created |= {"stream": stream, "store": False}
        yield Ask("/v1/responses", created | {"tools": tools, "tool_choice": "required"})
        named = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
        yield Ask("/v1/messages", chat | {"tools": [named], "tool_choice": {"type": "any"}})


def _gaps(rng: random.Random) -> Iterator[Ask]:
    """Somebody types before a suffix: a request for each key."""
    before, suffix = _said(rng), _said(rng)
    for keys in range(0, 12, 2):
        prefix = before + " " + before[:keys]
        gap = {"prompt": prefix, "suffix": suffix, "max_tokens": 8, "temperature": 0.0}
        stream = STREAMS[keys % 4 // 2]
        yield Ask("/v1/completions", gap | {"stream": stream})
        yield Ask("/v1/fim/completions", gap | {"stream": stream})
        other = [{"filename": "a.py", "text": before}]
        files = {"input_prefix": prefix, "input_suffix": suffix, "input_extra": other}
        yield Ask("/infill", files | {"n_predict": 8, "temperature": 0.0})
    options = {"temperature": 0.0, "num_predict": 8}
    filled = {"prompt": before, "suffix": suffix, "options": options}
    yield Ask("/api/generate", filled | {"stream": False})


def _texts(prompts: list[list[int]]) -> Iterator[Ask]:
    for i, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": i % 3 == 0}
        yield Ask("/v1/completions", body | _sampled(i))


def _vectors(rng: random.Random) -> Iterator[Ask]:
    yield Ask("/v1/embeddings", {"input": [_said(rng) for _ in range(5)]})
    yield Ask("/api/embed", {"input": _said(rng), "dimensions": 16})


def _bad() -> Iterator[Ask]:
    messages = [{"role": "user", "content": "hello"}]
    yield Ask("/v1/chat/completions", {"messages": messages, "temperature": 9}, 400)
    yield Ask("/v1/chat/completions", {"messages": messages, "model": "other"}, 404)
    yield Ask("/v1/messages", {"messages": messages}, 400)
    yield Ask("/v1/responses", {"input": 5}, 400)
    yield Ask("/api/chat", {"messages": "hello"}, 400)
    yield Ask("/v1/fim/completions", {"prompt": [1, 2], "suffix": "b"}, 400)
    yield Ask("/v1/embeddings", {"input": []}, 400)
    yield Ask("/v1/embeddings", {"input": "a", "dimensions": 10_000}, 400)


def known_prompts() -> dict[str, list[list[int]]]:
    """Of the two trained pairs, by the names that they are served under."""
    return {
        "chained": kinds.reference("eagle3")["prompts"][:6],
        "hybrid": runs.reference()["prompts"][:6],
    }


# ---- answers

TEXTS = frozenset(
    "text content reasoning_content thinking response delta arguments partial_json name input"
    " finish_reason stop_reason done_reason reason completion_tokens output_tokens eval_count"
    " tokens_predicted".split()
)
PLACES = ("index", "output_index", "content_index")
STILL_HERE = "response.in_progress"  # repeats the request, as often as an answer is slow
ENDS = ("message_stop", "response.completed", "response.incomplete")


class Unfinished(Exception):
    """An answer that has no end, or an error for its end."""


@dataclass
class Said:
    """Texts, calls, counts and reasons, each by its place in the answer; and embeddings."""

    texts: dict[Place, str] = field(default_factory=lambda: defaultdict(str))
    vectors: list[Any] = field(default_factory=list)

    def unlike(self, other: "Said") -> list[Any]:
        """Where they differ, but for the last digits of embeddings, which are summed in another
        order."""
        places = self.texts.keys() | other.texts.keys()
        pairs = {place: (self.texts.get(place), other.texts.get(place)) for place in places}
        found: list[Any] = [(place, *both) for place, both in pairs.items() if both[0] != both[1]]
        if len(self.vectors) != len(other.vectors):
            found.append("another number of embeddings")
        for a, b in zip(self.vectors, other.vectors, strict=False):
            if not np.allclose(a, b, atol=2e-3):
                found.append(f"an embedding is off by {np.abs(a - b).max()}")
        return found

    def add(self, value: Any, place: Place) -> None:
        if isinstance(value, dict):
            place += tuple(value[name] for name in PLACES if name in value)
            for name, inner in value.items():
                if name in ("embedding", "embeddings"):
                    self.vectors.append(np.array(inner))
                elif name in ("arguments", "input") and isinstance(inner, dict):
                    self.texts[*place, name] += json.dumps(inner, sort_keys=True)
                else:
                    self.add(inner, (*place, name))
        elif isinstance(value, list):
            for inner in value:
                self.add(inner, place)
        elif value not in (None, "") and place and place[-1] in TEXTS:
            self.texts[place] += str(value)


def said(media: str, data: bytes) -> Said:
    """What an answer of any API says. Raises Unfinished."""
    lines = data.decode().splitlines()
    whole, found = media == "application/json", Said()
    if media.startswith("text/event-stream"):
        lines = [line[6:] for line in lines if line.startswith("data: ")]
    elif whole:
        lines = [data.decode()]
    events = [json.loads(line) for line in lines if line and line != "[DONE]"]
    for event in events:
        failed = event.get("type") == "response.failed"
        if error := event["response"]["error"] if failed else event.get("error"):
            raise Unfinished(str(error))
        if event.get("type") != STILL_HERE:
            found.add(event, ())
    last = events[-1] if events else {}
    if not (whole or lines[-1] == "[DONE]" or last.get("type") in ENDS or last.get("done")):
        raise Unfinished(data[-200:].decode(errors="replace"))
    return found
