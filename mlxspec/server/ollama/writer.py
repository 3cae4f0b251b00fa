"""Writes the answers of Ollama's /api/chat and /api/generate, as one body or as lines of JSON.

Rule: each line has the fields of the whole body; the last one has its counts.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxspec.server.errors import ApiError, Json
from mlxspec.server.stream import Choice, Choices, Piece, ResponseWriter, Usage, texts
from mlxspec.text.tool_calls import as_object

ASCII = json.JSONEncoder(separators=(",", ":"))  # some clients end lines at U+2028 too


@dataclass(slots=True)
class LineWriter(ResponseWriter):
    """The ResponseWriter of both. `model` is the name that the client sent."""

    id: str
    model: str
    chat: bool  # not /api/generate

    media = "application/x-ndjson"

    def opening(self, usage: Usage) -> bytes:
        return b""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not any(part.ends or not part.call for part in piece.parts):
            return b""
        return _encoded(self.line(piece))

    def progress(self, usage: Usage, asked: bool) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return _encoded(self.line(Piece()))

    def closing(self, choices: Choices, usage: Usage) -> bytes:
        return _encoded(self.line(Piece()) | _end(choices[0], usage))

    def failed(self, error: ApiError) -> bytes:
        return _encoded({"error": error.message})

    def body(self, choices: Choices, usage: Usage) -> Json:
        return self.line(choices[0].whole) | _end(choices[0], usage)

    def line(self, piece: Piece) -> Json:
        """What a piece adds to the answer."""
        text, parts = texts(piece), piece.parts
        said: Json = {"content" if self.chat else "response": text["content"]}
        if text["reasoning"]:
            said["thinking"] = text["reasoning"]
        calls = []
        for call in [part.call for part in parts if part.call and part.ends]:
            function = {"name": call.name, "arguments": as_object(call.arguments)}
            calls.append({"id": call.id, "function": function})
        if calls:
            said["tool_calls"] = calls
        if self.chat:
            said = {"message": {"role": "assistant", **said}}
        return {
            "model": self.model,
            "created_at": datetime.now(UTC).isoformat(),
            **said,
            "done": False,
        }


def _encoded(line: Json) -> bytes:
    return ASCII.encode(line).encode() + b"\n"


def _end(choice: Choice, usage: Usage) -> Json:
    """The fields of the last line. Durations are in nanoseconds; what the request waited for, also
    for the model's load, counts as part of reading the prompt."""
    first = usage.first or usage.seconds
    return {
        "done": True,
        "done_reason": "length" if choice.finish == "length" else "stop",
        "total_duration": int(usage.seconds * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(first * 1e9),
        "eval_count": usage.generated,
        "eval_duration": int((usage.seconds - first) * 1e9),
    }
