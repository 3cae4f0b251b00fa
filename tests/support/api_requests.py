"""Requests of every kind that the server answers, and what an answer says, however it was cut into
pieces."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from mlxspec.server.body import PRIORITY
from tests.heads import kinds, packagings, runs
from tests.heads.language import Language
from tests.server.test_images import PLACES, b64, part_of, text_of
from tests.support import vision

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

SEEING = "seeing"  # the model that sees, whose calls are in a form that is made up
PROFILE = "chained:fast"
SYSTEM = "the system and the user"
PROFILES = f"""[models."{PROFILE}"]
temperature = 0.0
system = "{SYSTEM}"
priority = -5
"""
PAGE, FOREIGN = "app://obsidian.md", "https://evil.example"  # pages that may use it, and may not
ALLOWED = "access-control-allow-"
PREFLIGHT = {  # of a browser, before a page's request
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
IMAGES, LEARNED, BY_PROFILE = "images", "a learned form of calls", "a profile"
BY_PRIORITY, FROM_PAGE, LOOP = "a priority", "a page's origin", "a loop that the guard ended"
KINDS = (IMAGES, LEARNED, BY_PROFILE, BY_PRIORITY, FROM_PAGE, LOOP)
PNG, PIXEL, OTHER = vision.png(24, 16), vision.png(24, 16, change=9), vision.png(32, 40, seed=1)
BROKEN = (PNG[:60], b"hello")  # cut off, and none at all


@dataclass(frozen=True, eq=False)
class Ask:
    """A request. `refused`: the status that it is to be refused with, 0: it is to be answered.
    `kind`: one of KINDS, or "". `meaning`: the body of a plain request that has the same answer; by
    itself the body."""

    path: str
    body: Json
    refused: int = 0
    kind: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    meaning: Json = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()

    @property
    def plain(self) -> bytes:
        return json.dumps(self.meaning or self.body).encode()

    @property
    def images(self) -> int:
        return self.data.count(b64(PNG[:12]).encode())

    def of(self, model: str) -> "Ask":
        """The same for a model, if the request names none."""
        body = {"model": model, **self.body}
        return replace(self, body=body, meaning=self.meaning and {"model": model, **self.meaning})


def asks(models: Mapping[str, list[list[int]]]) -> list[Ask]:
    """For each model, with the prompts that its head knows. Each has the same answer every time."""
    rng = random.Random(7)
    found = []
    for model, prompts in models.items():
        made = [*_chats(rng), *_tools(rng), *_gaps(rng), *_texts(prompts), *_vectors(rng)]
        made += [*_priorities(rng), *_pages(rng), _loop()]
        found += [ask.of(model) for ask in made]
    calls = [replace(ask, kind=LEARNED) for ask in _tools(rng, 90) if "tool_choice" in ask.body]
    made = [*_chats(rng), *calls, *_sights(rng), *_bad_sights(), *_vectors(rng)]
    return [*found, *(ask.of(SEEING) for ask in made), *_profiled(rng), *_bad()]


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


def _tools(rng: random.Random, most: int = 40) -> Iterator[Ask]:
    for stream in STREAMS:
        messages = [{"role": "user", "content": _said(rng)}]
        chat = {"messages": messages, "max_tokens": most, "temperature": 0.0, "stream": stream}
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        yield Ask("/v1/chat/completions", chat | {"tools": tools, "tool_choice": "required"})
        options = {"temperature": 0.0, "num_predict": 20}
        told = {"messages": messages, "tools": tools, "options": options, "stream": stream}
        yield Ask("/api/chat", told)
        tools = [{"type": "function", **TOOL}]
        created = {"input": _said(rng), "max_output_tokens": most, "temperature": 0.0}
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


def _priorities(rng: random.Random) -> Iterator[Ask]:
    """Who goes first, in every way to say it, and a wrong one."""
    for number in (-5, 3, 200):
        options = {"temperature": 0.0, "num_predict": 12}
        turns = {"messages": [{"role": "user", "content": _said(rng)}], "stream": number < 0}
        chat = turns | {"max_tokens": 12, "temperature": 0.0}
        first = {"priority": number}
        path = "/v1/chat/completions"
        yield Ask(path, chat | first, kind=BY_PRIORITY, meaning=chat)
        yield Ask("/v1/messages", chat, kind=BY_PRIORITY, headers={PRIORITY: str(number)})
        yield Ask(path, chat | {"service_tier": "flex"}, kind=BY_PRIORITY, meaning=chat)
        told, plain = ({**turns, "options": options | each} for each in (first, {}))
        yield Ask("/api/chat", told, kind=BY_PRIORITY, meaning=plain)
    yield Ask(path, chat | {"priority": 1001}, 400)
    yield Ask(path, chat, 400, headers={PRIORITY: "high"})


def _pages(rng: random.Random) -> Iterator[Ask]:
    """What a web page may read, errors too, and what one may not."""
    messages = [{"role": "user", "content": _said(rng)}]
    for stream in STREAMS:
        chat = {"messages": messages, "max_tokens": 12, "temperature": 0.0, "stream": stream}
        for path in ("/v1/chat/completions", "/v1/messages"):
            yield Ask(path, chat, kind=FROM_PAGE, headers={"origin": PAGE})
            yield Ask(path, {"messages": 5}, 400, headers={"origin": PAGE})
            yield Ask(path, chat, 403, headers={"origin": FOREIGN})


def _loop() -> Ask:
    """The same letter for ever."""
    token = packagings.read_json(kinds.TARGET / "tokenizer.json")["model"]["vocab"]["h"]
    body = {"prompt": "hello", "max_tokens": 400, "logit_bias": {str(token): 100}}
    return Ask("/v1/completions", body | {"temperature": 0.0, "stream": True}, kind=LOOP)


def _profiled(rng: random.Random) -> Iterator[Ask]:
    """By the name of PROFILES' table, and what it stands for."""
    model = PROFILE.partition(":")[0]
    for stream in STREAMS:
        turn = {"role": "user", "content": _said(rng)}
        system = {"role": "system", "content": SYSTEM}
        plain: dict[str, tuple[Json, Json]] = {
            "/v1/chat/completions": (
                {"messages": [turn], "max_tokens": 20},
                {"messages": [system, turn], "temperature": 0.0},
            ),
            "/v1/messages": (
                {"messages": [turn], "max_tokens": 20},
                {"system": SYSTEM, "temperature": 0.0},
            ),
            "/v1/responses": (
                {"input": turn["content"], "max_output_tokens": 20, "store": False},
                {"instructions": SYSTEM, "temperature": 0.0},
            ),
            "/api/chat": (
                {"messages": [turn], "options": {"num_predict": 20}},
                {"messages": [system, turn], "options": {"num_predict": 20, "temperature": 0.0}},
            ),
        }
        for path, (short, more) in plain.items():
            short |= {"stream": stream, "model": PROFILE}
            meaning = short | more | {"model": model}
            yield Ask(path, short, kind=BY_PROFILE, meaning=meaning)


# ---- images


def _sights(rng: random.Random) -> Iterator[Ask]:
    """One image, the same with another pixel, two of which one was seen before: in messages and in
    tools' results of each API."""
    text = LANGUAGE.text(rng, 12)
    for i, pictures in enumerate(([PNG], [PIXEL], [PNG, OTHER], [OTHER, PIXEL])):
        for j, place in enumerate(PLACES):
            path, body = place(text_of(place, text), *(part_of(place, each) for each in pictures))
            most = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 16}
            drawn = {"temperature": 0.0, "stream": STREAMS[(i + j) % 2]}
            yield Ask(path, body | most | drawn, kind=IMAGES)
        body = {"messages": [{"role": "user", "content": text, "images": [*map(b64, pictures)]}]}
        body |= {"options": {"num_predict": 16, "temperature": 0.0}, "stream": STREAMS[i % 2]}
        yield Ask("/api/chat", body, kind=IMAGES)


def _bad_sights() -> Iterator[Ask]:
    """Files that are no images, and an image for a model that sees none."""
    for data in BROKEN:
        for place in PLACES:
            yield Ask(*place(part_of(place, PNG), part_of(place, data)), 400)
        turn = {"role": "user", "content": "see", "images": [b64(data)]}
        yield Ask("/api/chat", {"messages": [turn]}, 400)
    yield Ask(*PLACES[0](part_of(PLACES[0], PNG)), 400).of("chained")


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
    " tokens_predicted loops_ended".split()
)
KEYS = ("index", "output_index", "content_index")
STILL_HERE = "response.in_progress"  # repeats the request, as often as an answer is slow
ENDS = ("message_stop", "response.completed", "response.incomplete")


def told_rightly(page: str, answer: httpx.Response) -> bool:
    """Whether a preflight lets PAGE send its request, and no other page."""
    told = [answer.headers.get(ALLOWED + name, "") for name in ("origin", "headers", "methods")]
    if page != PAGE:
        return answer.status_code == 403 and not any(told)
    wanted = zip((PAGE, "authorization", "POST"), told, strict=True)
    return answer.status_code == 200 and all(each in words for each, words in wanted)


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

    @property
    def calls(self) -> bool:
        return any(place[-1] in ("arguments", "partial_json", "input") for place in self.texts)

    def add(self, value: Any, place: Place) -> None:
        if isinstance(value, dict):
            place += tuple(value[name] for name in KEYS if name in value)
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
