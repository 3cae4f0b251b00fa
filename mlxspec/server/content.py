"""Parts of messages that a text model cannot read, in any API: a text file becomes its text, an
image becomes a line that says that it was left out.

Rule: a part becomes the same text in every turn, so that the next prompt begins with this one.
"""

import re
from base64 import b64decode
from contextlib import suppress
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from mlxspec.server.errors import Json

# The types of these parts in all APIs.
UNREADABLE = (
    "image image_url input_image document file input_file search_result audio input_audio audio_url"
    " video video_url input_video container_upload browser_state computer_screenshot"
).split()
# The types of calls and results of another server's tools, shown in the log and the prompt.
HOSTED = re.compile(r"\w{1,48}_tool_(use|result)")
LEFT_OUT = " left out: this model reads text only]\n"  # ends the line for a part
PART_FIELDS = ("content", "output")  # of messages, items and parts


def readable(value: Any, info: ValidationInfo) -> Any:
    """Messages or input items, with text in place of what cannot be read. The types of parts left
    out are added to the validation's context; if that is None, nothing changes."""
    return value if info.context is None else _read(value, info.context)


READABLE = BeforeValidator(readable)


def _read(value: Any, left_out: list[str]) -> Any:
    match value:
        case list():
            return [_read(item, left_out) for item in value]
        case {"type": str(kind)} if kind in UNREADABLE or HOSTED.fullmatch(kind):
            return {"type": "text", "text": _text(value, kind, left_out)}
        case dict():
            return {
                key: _read(item, left_out) if key in PART_FIELDS else item
                for key, item in value.items()
            }
    return value


def _text(part: Json, kind: str, left_out: list[str]) -> str:
    """The text of a file, a document or a search result below its name, else a line for the part
    that is left out."""
    text: Any = None
    match part:
        case {"file": dict(file)}:  # of chat
            return _text(file, kind, left_out)
        case {"source": {"type": "text", "data": text} | {"content": text}} | {"content": text}:
            pass
        case {"file_data": str(data)}:
            with suppress(ValueError):
                text = b64decode(data.rpartition(";base64,")[2], validate=True).decode()
    if isinstance(text, list):
        parts = _read(text, left_out)
        text = "".join(str(each.get("text", "")) for each in parts if isinstance(each, dict))
    if text and isinstance(text, str):
        name = part.get("title") or part.get("filename") or kind
        return f"{name}:\n{text}\n"
    left_out.append(f"content[].{kind}")
    return f"[{kind}{LEFT_OUT}"
