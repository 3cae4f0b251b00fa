"""Message parts other than text, in any API: a text file becomes its text, an image a marker,
anything else a line that says that it was left out.

Rule: a part becomes the same text in every turn, so that the next prompt begins with this one.
"""

import re
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from mlxspec.server.errors import Json
from mlxspec.text.images import marker_of

# The types of these parts in all APIs.
UNREADABLE = (
    "image image_url input_image document file input_file search_result audio input_audio audio_url"
    " video video_url input_video container_upload browser_state computer_screenshot"
).split()
# The types of calls and results of another server's tools, shown in the log and the prompt.
HOSTED = re.compile(r"\w{1,48}_tool_(use|result)")
IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
KEY = token_bytes(32)  # so that no text of a client's or a tool's names an image
READS_TEXT = "this model reads text only"
LEFT_OUT = f" left out: {READS_TEXT}]\n"  # ends the line for a part
PART_FIELDS = ("content", "output")  # of messages, items and parts


@dataclass(frozen=True, slots=True)
class File:
    """An image as a request has it: its bytes, its URL, or why it has neither. `kind`: the type of
    its part."""

    kind: str
    data: bytes = b""
    url: str = ""
    why: str = ""


@dataclass
class Content:
    """The parts of a body other than text: images by their digests, and the types of what was
    `left_out`. `strict`: what would be left out is refused, images too unless it `takes_images`."""

    strict: bool = False
    takes_images: bool = True
    left_out: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)

    def add(self, file: File) -> str:
        """What stands for an image in the text."""
        content = file.data or f"{file.url} {file.why}".encode()
        digest = blake2b(content, digest_size=16, key=KEY).hexdigest()
        self.files.setdefault(digest, file)
        return marker_of(digest)


def readable(value: Any, info: ValidationInfo) -> Any:
    """Messages or input items with text in place of their other parts, which are added to the
    validation's context, a Content; if that is None, nothing changes."""
    return value if info.context is None else _read(value, info.context)


READABLE = BeforeValidator(readable)


def line_for(kind: str, why: str) -> str:
    """What stands in the place of a part that is left out."""
    return f"[{kind} left out: {why}]\n"


def _read(value: Any, content: Content) -> Any:
    match value:
        case list():
            return [_read(item, content) for item in value]
        case {"type": str(kind)} if kind in UNREADABLE or HOSTED.fullmatch(kind):
            if content.takes_images and (file := _image(value, kind)):
                return {"type": "text", "text": content.add(file)}
            if content.strict:
                return value
            return {"type": "text", "text": _text(value, kind, content)}
        case dict():
            return {
                key: _read(item, content) if key in PART_FIELDS else item
                for key, item in value.items()
            }
    return value


def _image(part: Json, kind: str) -> File | None:
    """The image in a part of any API, Ollama's and MCP's too; None for other parts."""
    data = url = ""
    if kind not in IMAGES:
        return None
    match part:
        case {"image_url": {"url": str(url)} | str(url)} | {"source": {"url": str(url)}}:
            pass
        case {"source": {"data": str(data)}} | {"data": str(data)}:
            pass
        case _:
            return File(kind, why="it has neither data nor a URL")
    scheme = url[:8].lower()
    if scheme.startswith(("http://", "https://")):
        return File(kind, url=url)
    if scheme.startswith("data:"):
        data = url.partition(",")[2]
    elif url:
        return File(kind, why="its URL is not one of http, https or data")
    try:
        return File(kind, b64decode("".join(data.split()), validate=True))
    except ValueError:
        return File(kind, why="its data is not in base64")


def _text(part: Json, kind: str, content: Content) -> str:
    """The text of a file, a document or a search result below its name, else a line for the part
    that is left out."""
    text: Any = None
    match part:
        case {"file": dict(file)}:  # of chat
            return _text(file, kind, content)
        case {"source": {"type": "text", "data": text} | {"content": text}} | {"content": text}:
            pass
        case {"file_data": str(data)}:
            with suppress(ValueError):
                text = b64decode(data.rpartition(";base64,")[2], validate=True).decode()
    if isinstance(text, list):
        parts = _read(text, content)
        text = "".join(str(each.get("text", "")) for each in parts if isinstance(each, dict))
    if text and isinstance(text, str):
        name = part.get("title") or part.get("filename") or kind
        return f"{name}:\n{text}\n"
    content.left_out.append(f"content[].{kind}")
    return line_for(kind, READS_TEXT)
