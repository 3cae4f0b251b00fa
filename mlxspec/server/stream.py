"""From the engine's outputs to OpenAI's chunks, bodies and usage. Pure: no connection, no clock.

Rule: a stream and a whole body say the same, because both are made of the same pieces.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxspec.text.prompt import Tokenizer
from mlxspec.text.reader import Reader, token_bytes
from mlxspec.types import Finish, Logprob, Output, Request

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
MODEL = "model"  # the one source of drafts that does not copy
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Json = dict[str, Any]
Api = Literal["chat", "completions"]


class Failed(Exception):
    """The engine ended a choice without an answer: it broke (500), or the server is stopping (503)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output adds to a choice. `starts` says where each token's text begins in the choice's text."""

    text: str
    logprobs: tuple[Logprob, ...] = ()
    starts: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Choice:
    """One answer on its way. `index` is the one that the client sees."""

    index: int
    reader: Reader
    finish: Finish | None = None
    cached: int = 0  # prompt tokens that were not computed
    rounds: int = 0
    drafted: int = 0
    accepted: dict[str, int] = field(default_factory=dict)  # by source; the engine's count
    _waiting: deque[Logprob] = field(default_factory=deque)  # until their text is shown

    def take(self, output: Output) -> Piece:
        """Read an output. Raises Failed where there is none to read."""
        if output.finish == "error":
            raise Failed(500, f"the engine failed: {output.error}")
        if output.finish == "abort":
            raise Failed(503, "the server is stopping; send the request again")
        self.cached, self.rounds = output.cached, output.rounds
        self.drafted, self.accepted = output.drafted, dict(output.accepted)
        text = self.reader.feed(output.tokens)
        if output.finish is not None:
            text += self.reader.finish()
        self.finish = "stop" if self.reader.stopped is not None else output.finish
        self._waiting.extend(output.logprobs)
        starts = tuple(self.reader.released)
        self.reader.released.clear()
        logprobs = tuple(self._waiting.popleft() for _ in starts) if self._waiting else ()
        return Piece(text, logprobs, starts, self.finish)

    @property
    def kept(self) -> int:
        """Drafted tokens that are part of the answer. A round brings those it accepted and one more; where
        the answer ended among them, the engine's count goes beyond that end."""
        return min(sum(self.accepted.values()), max(0, self.reader.count - self.rounds + 1))


@dataclass(frozen=True, slots=True)
class Shape:
    """How a response looks: which API, its id, and what the request asked to see."""

    api: Api
    id: str
    model: str
    created: int  # unix seconds
    tokenizer: Tokenizer
    logprobs: bool = False
    include_usage: bool = False
    echoes: tuple[str, ...] = ()  # per choice, the prompt to repeat; empty: none

    def head(self, streamed: bool) -> Json:
        kind = "text_completion"
        if self.api == "chat":
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def opening(shape: Shape, indexes: Iterable[int]) -> list[bytes]:
    """What a stream begins with: the role of each choice, or the prompt that is to be repeated."""
    if shape.api == "chat":
        return [_chunk(shape, i, {"role": "assistant", "content": ""}, None, None) for i in indexes]
    return [_chunk(shape, i, shape.echoes[i], None, None) for i in indexes if shape.echoes]


def chunks(shape: Shape, index: int, piece: Piece) -> list[bytes]:
    """The events of one piece: its text, then its end; none where there is nothing to say."""
    made = []
    if piece.text or piece.logprobs:
        logprobs = _logprobs(shape, index, [piece]) if shape.logprobs else None
        made.append(_chunk(shape, index, _said(shape, piece.text), logprobs, None))
    if piece.finish is not None:
        made.append(_chunk(shape, index, {} if shape.api == "chat" else "", None, piece.finish))
    return made


def still_here(shape: Shape) -> bytes:
    """A chunk that says nothing: some clients count comments as silence."""
    return _chunk(shape, 0, _said(shape, ""), None, None)


def closing(shape: Shape, usage: Json) -> bytes:
    """What a stream ends with."""
    if not shape.include_usage:
        return DONE
    return event({**shape.head(True), "choices": [], "usage": usage}) + DONE


def event(data: Json) -> bytes:
    return b"data: " + ENCODER.encode(data).encode() + b"\n\n"


def body(shape: Shape, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
    """The whole response; `pieces[i]` are those of `choices[i]`."""
    made = []
    for choice, some in zip(choices, pieces, strict=True):
        text = "".join(piece.text for piece in some)
        said: Json = {"index": choice.index}
        if shape.api == "chat":
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = (shape.echoes[choice.index] if shape.echoes else "") + text
        said["logprobs"] = _logprobs(shape, choice.index, some) if shape.logprobs else None
        said["finish_reason"] = choice.finish
        made.append(said)
    return {**shape.head(False), "choices": made, "usage": usage}


def usage(requests: Sequence[Request], choices: Sequence[Choice]) -> Json:
    """Token counts. A prompt counts once, however many choices it has; `choices` are grouped by request."""
    prompt = sum(len(request.prompt) for request in requests)
    generated = sum(choice.reader.count for choice in choices)
    kept = sum(choice.kept for choice in choices)
    first, cached = 0, 0
    for request in requests:
        cached += choices[first].cached
        first += request.n
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": sum(choice.drafted for choice in choices) - kept,
        },
    }


def speculation(choices: Sequence[Choice]) -> str:
    """For the log: tokens per round, the share of drafted tokens that were kept, and of those the share that
    each kind of drafter brought; empty where nothing was drafted."""
    drafted = sum(choice.drafted for choice in choices)
    if not drafted:
        return ""
    kept = sum(choice.kept for choice in choices)
    rate = sum(choice.reader.count for choice in choices) / sum(choice.rounds for choice in choices)
    said = f"{rate:.1f} tok/round, {100 * kept / drafted:.0f} % of drafts kept"
    if not kept:
        return said
    by_model = sum(choice.accepted.get(MODEL, 0) for choice in choices)
    model = round(100 * by_model / sum(sum(choice.accepted.values()) for choice in choices))
    shares = (("copy", 100 - model), ("model", model))
    return f"{said}, " + " / ".join(f"{name} {share} %" for name, share in shares if share)


def _said(shape: Shape, text: str) -> Json | str:
    return {"content": text} if shape.api == "chat" else text


def _chunk(shape: Shape, index: int, said: Json | str, logprobs: Json | None, finish: Finish | None) -> bytes:
    choice: Json = {"index": index, "delta" if shape.api == "chat" else "text": said}
    choice |= {"logprobs": logprobs, "finish_reason": finish}
    data = {**shape.head(True), "choices": [choice]}
    return event(data | {"usage": None} if shape.include_usage else data)


def _logprobs(shape: Shape, index: int, pieces: Iterable[Piece]) -> Json:
    if shape.api == "chat":
        return {"content": [_entry(shape, lp) for p in pieces for lp in p.logprobs], "refusal": None}
    made: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        for lp, start in zip(piece.logprobs, piece.starts, strict=True):
            made["tokens"].append(_name(shape, lp.token, "bytes:"))
            made["token_logprobs"].append(_finite(lp.logprob))
            best = {_name(shape, token, "bytes:"): _finite(p) for token, p in lp.top}
            made["top_logprobs"].append({made["tokens"][-1]: _finite(lp.logprob)} | best)
            made["text_offset"].append(start + (len(shape.echoes[index]) if shape.echoes else 0))
    return made


def _entry(shape: Shape, lp: Logprob) -> Json:
    top = [_told(shape, token, p) for token, p in lp.top]
    return _told(shape, lp.token, lp.logprob) | {"top_logprobs": top}


def _told(shape: Shape, token: int, logprob: float) -> Json:
    raw = token_bytes(shape.tokenizer, token)
    return {"token": _name(shape, token, ""), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's floor stands for it."""
    return max(logprob, -9999.0)


def _name(shape: Shape, token: int, prefix: str) -> str:
    """A token as text; as OpenAI has it, a part of a character is spelled in hexadecimal bytes."""
    raw = token_bytes(shape.tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
