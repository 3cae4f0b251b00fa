"""Parses request bodies: JSON into a pydantic model, every problem as an ApiError 400.

Rule: an unsupported field that would change the answer is refused by name; any other unknown field
is ignored and reported in the response header `x-mlxspec-ignored`.
"""

import asyncio
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import quote

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from zstandard import ZstdDecompressor, ZstdError

from mlxspec import log
from mlxspec.engine.worker import RETRY_S
from mlxspec.server.content import Content
from mlxspec.server.errors import ApiError, HttpRequest, Json, invalid
from mlxspec.server.images import read_images
from mlxspec.server.state import ServerState, TextModel, while_connected
from mlxspec.text.images import Images, marker_of
from mlxspec.text.messages import in_json_words
from mlxspec.types import BACKGROUND, MAX_PRIORITY, Busy, shown

MAX_VALUES = 1_000_000  # in a body, counted by commas and brackets: no context has more tokens
MAX_OBJECTS = 100_000  # at 10 µs each, and as many lists: each garbage collection visits all
VALUE_BYTES, OBJECT_BYTES = 64, 256  # memory of a value and an object or list, beside their text
LARGE = 1 << 18  # bytes; larger bodies are parsed on the text thread
MAX_BODIES = 8  # of the largest size whose prompts are not ready, or smaller ones of as many bytes
BODY_S = 60.0  # to receive a body
COMPRESSED = 256  # bytes that are decompressed at a time, to 8 MB at most
MAX_ITEMS = 10_000  # messages, input items or tools
MAX_STOPS = 16
MAX_STOP_CHARS = 1000


def _text_part(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value


# Half a surrogate pair (group 1), left by a program that cut a text; other escapes are skipped.
HALVES = re.compile(
    rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)",
    re.DOTALL,
)
T = TypeVar("T")
Data = bytes | bytearray  # JSON
FIRST = Field(fail_fast=True)  # do not describe a million errors in one list
TEXT_PART = BeforeValidator(_text_part)  # a string becomes a list of one text part
Parts = Annotated[list[T], FIRST, TEXT_PART]
Many = Annotated[list[T], FIRST, Field(max_length=MAX_ITEMS)]
Items = Many[Any]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]


class Strict(BaseModel):
    """A body, or an object in one, validated without type conversion; null fields count as missing.
    `unsupported` fields are refused unless they are empty or have the value here, which has no
    effect."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)

    unsupported: ClassVar[Json] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


PRIORITY = "x-mlxspec-priority"
IGNORED = "mlxspec.ignored"  # in a request's scope: unknown fields, and content left out
SCALED = "mlxspec.scaled"  # in a request's scope: how images were scaled down
MAX_NAMED = 32  # names in the header, and in a line of the log


class Body(Strict):
    """The body of a request to a model, the default one if `model` is missing. `content` has the
    parts of its messages other than text; `seen_images` are its images once they are read."""

    model: str | None = None
    _content: Content = PrivateAttr(default_factory=Content)
    _images: Images = PrivateAttr(default_factory=dict)

    @property
    def content(self) -> Content:
        return self._content

    @property
    def seen_images(self) -> Images:
        return self._images


class Queued(Body):
    """The body of a request that waits for the engine, the lowest `priority` first; None: the
    endpoint's own."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    service_tier: str | None = None

    def read_priority(self, header: str | None) -> None:
        """Take from `service_tier`, or the header PRIORITY, what `priority` does not say. Raises
        ApiError."""
        if self.priority is not None:
            return
        if self.service_tier == "flex":
            self.priority = BACKGROUND
        elif header is not None:
            if not re.fullmatch(r"-?\d{1,4}", header) or abs(int(header)) > MAX_PRIORITY:
                why = f"send a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
                raise invalid_value(PRIORITY, header, why)
            self.priority = int(header)


StrictT = TypeVar("StrictT", bound=Strict)


def report_ignored(app: ASGIApp) -> ASGIApp:
    """`app` with response headers that list what `endpoint` ignored, percent-encoded, and how it
    scaled images down; a 500 has none, as it is made outside."""

    async def reporting(scope: Scope, receive: Receive, send: Send) -> None:
        async def reply(message: Message) -> None:
            if "headers" in message and (ignored := scope.get(IGNORED)):
                names = [quote(name, safe="[]") or "%00" for name in _reported(ignored)]
                MutableHeaders(scope=message)["x-mlxspec-ignored"] = ", ".join(names)
            if "headers" in message and (scaled := scope.get(SCALED)):
                MutableHeaders(scope=message)["x-mlxspec-scaled"] = ", ".join(scaled)
            await send(message)

        await app(scope, receive, reply)

    return reporting


def endpoint(
    kind: type[Body],
    answer: Callable[[HttpRequest, Any, TextModel], Awaitable[ASGIApp]],
    served: bool = True,
) -> Callable[[HttpRequest], Awaitable[ASGIApp]]:
    """The endpoint for bodies of this kind: it returns what `answer` returns, cancels that when the
    client disconnects, and keeps no body. It raises ApiError, ClientDisconnect, and Busy if all
    bodies that are not answered yet are too large together. `answer` gets the default model where
    the body's is not `served`."""

    async def respond(http: HttpRequest) -> ASGIApp:
        state, size = http.app.state.server, Size(http.app.state.server)
        try:
            body, http.scope[IGNORED] = await _parsed(http, kind, size)
            model = await state.model(body.model if served else None)
            if files := body.content.files:
                where = "input" if "input" in kind.model_fields else "messages"
                reading = read_images(model, files, http.scope[IGNORED], where)
                body._images = await while_connected(http, reading)
                changes = [getattr(image, "scaled", "") for image in body._images.values()]
                http.scope[SCALED] = list(filter(None, changes))[:MAX_NAMED]
                rendered = not getattr(body, "raw", False)  # else its endpoint refuses all images
                if state.config.strict_content and rendered and not getattr(body, "suffix", ""):
                    _refuse_unseen(body)
            response = await while_connected(http, answer(http, body, model))
        finally:
            state.unread -= size.bytes
        http.scope[IGNORED] = _reported(http.scope[IGNORED])
        return response

    return respond


def _refuse_unseen(body: Body) -> None:
    """Raises ApiError that names the first image which the model does not see."""
    for digest, image in body.seen_images.items():
        if isinstance(image, str):
            where = _path_to(marker_of(digest), body) or "messages"
            raise invalid(where, f"{where}: {image.strip()[1:-1]}; leave it out")


def _path_to(text: str, value: Any, at: str = "") -> str:
    """Where an object whose text this is stands in a body; "": nowhere."""
    items: Iterable[tuple[str, Any]] = ()
    match value:
        case {"text": str(found)} if text in found:
            return at
        case BaseModel() if text in str(getattr(value, "text", "")):
            return at
        case dict():
            items = ((f"{at}.{key}", item) for key, item in value.items())
        case list():
            items = ((f"{at}[{n}]", item) for n, item in enumerate(value))
        case BaseModel():
            items = ((f"{at}.{key}", item) for key, item in value)
    paths = (_path_to(text, item, where) for where, item in items)
    return next(filter(None, paths), "").removeprefix(".")


@dataclass
class Size:
    """The memory that a body takes, which is also counted in `state.unread`."""

    state: ServerState
    bytes: int = 0

    def add(self, more: int) -> None:
        """Raises Busy if all bodies together are too large, unless this one is small."""
        self.bytes += more
        self.state.unread += more
        limit = MAX_BODIES * (self.state.config.max_body_mb << 20)
        if self.bytes > LARGE and self.state.unread > limit:
            raise Busy(RETRY_S, "other requests have large bodies")


async def _parsed(http: HttpRequest, kind: type[Body], size: Size) -> tuple[Body, list[str]]:
    """The body of a request, and the names for IGNORED. Raises what `endpoint` says."""
    state = http.app.state.server
    data = bytearray()
    await _read(http, data, size)
    if encoding := http.headers.get("content-encoding"):
        limit = state.config.max_body_mb << 20
        data = await state.on_text_thread(_decompressed, data, encoding.lower(), limit)
        size.add(len(data))
    work = partial(parse, kind, data, state.config.strict_content, size, takes_images=True)
    body, ignored = work() if len(data) < LARGE else await state.on_text_thread(work)
    if isinstance(body, Queued):
        body.read_priority(http.headers.get(PRIORITY))
    return body, ignored


def _reported(ignored: list[str]) -> list[str]:
    """The names that are reported, shortened."""
    return [name[:96] for name in [*dict.fromkeys(ignored)][:MAX_NAMED]]


async def _read(http: HttpRequest, data: bytearray, size: Size) -> None:
    """Read a request's body into `data`. Raises ApiError 413 if its length, announced or received,
    is more than `max_body_mb`, 408 after BODY_S, ClientDisconnect and Busy."""
    state = http.app.state.server
    limit = state.config.max_body_mb << 20
    why = f"larger than {limit >> 20} MiB: send a smaller body, or raise max_body_mb"
    if int(http.headers.get("content-length", 0)) > limit:
        raise ApiError(413, why)
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                if len(data) + len(part) > limit:
                    raise ApiError(413, why)
                data += part
                size.add(len(part))
    except TimeoutError as error:
        why = f"the body did not arrive within {BODY_S:.0f} s; send it at once"
        raise ApiError(408, why) from error


def _decompressed(data: bytearray, encoding: str, limit: int) -> bytearray:
    """A body that was sent compressed, in one or several parts. Raises ApiError."""
    new: Callable[[], Any]  # makes the decoder of one part
    match encoding:
        case "zstd":  # Codex' requests
            new = ZstdDecompressor().decompressobj
        case "gzip" | "x-gzip" | "deflate":
            new = partial(zlib.decompressobj, wbits=47)  # detects which
        case "identity":
            return data
        case _:
            why = f"content-encoding = {encoding[:64]!r}: send zstd, gzip or none"
            raise ApiError(415, why)
    text, decoder = bytearray(), new()
    try:
        for start in range(0, len(data), COMPRESSED):
            piece: Data = data[start : start + COMPRESSED]
            while piece:
                if decoder.eof:
                    decoder = new()
                text += decoder.decompress(piece)
                piece = decoder.unused_data
                if len(text) > limit:
                    why = f"larger than {limit >> 20} MiB when decompressed: send a smaller body"
                    raise ApiError(413, why)
        if not decoder.eof:
            raise zlib.error("it is cut off")
    except (zlib.error, ZstdError) as error:
        why = f"the body is not valid {encoding}: {error}; send it again"
        raise invalid("body", why) from error
    return text


def parse(
    kind: type[StrictT],
    data: Data,
    strict: bool = False,
    size: Size | None = None,
    takes_images: bool = False,
) -> tuple[StrictT, list[str]]:
    """The validated body, and the names of its unknown fields and of content that was left out;
    `strict`: such content is refused. Adds its values to `size`. Raises ApiError 400, and Busy."""
    objects, lists, commas = map(data.count, (b"{", b"[", b","))
    if max(objects, lists) > MAX_OBJECTS or objects + lists + commas > MAX_VALUES:
        most = f"{MAX_VALUES} values, {MAX_OBJECTS} objects or as many lists"
        raise invalid("body", f"the body holds more than {most}; send fewer")
    if size:
        size.add((objects + lists) * OBJECT_BYTES + commas * VALUE_BYTES)
    content = Content(strict, takes_images=takes_images or not strict)
    if data.startswith(BOM_UTF8):  # which RFC 8259 lets a parser ignore
        data = data[len(BOM_UTF8) :]
    if b"\\ud" in data or b"\\uD" in data:
        data = HALVES.sub(lambda match: b"\\ufffd" if match[1] else match[0], data)
    body = validate(kind, data, content=content)
    if isinstance(body, Body):
        body._content = content
    if size:
        size.add(sum(len(file.data) for file in content.files.values()))
    for name, value in (body.model_extra or {}).items():
        if name not in kind.unsupported:
            continue
        empty = not value and value is not False
        if not empty and value != kind.unsupported[name]:
            why = f"{name} = {shown(value)} is not supported; leave it out"
            raise invalid(name, why, "unsupported_parameter")
    left_out = [*dict.fromkeys(content.left_out)]
    if left_out:
        log.info("left out of the prompt: %s", ", ".join(left_out[:MAX_NAMED]))
    return body, _unknown(body) + left_out


def validate(
    kind: type[StrictT],
    raw: Any,
    at: str = "",
    content: Content | None = None,
) -> StrictT:
    """Validate a whole body as JSON, or an object of a body with the path `at`. Validators put
    parts other than text into `content`. Raises ApiError 400."""
    try:
        if isinstance(raw, Data):
            return kind.model_validate_json(raw, context=content)
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _fault(error, at) from error


def _fault(error: ValidationError, at: str) -> ApiError:
    """The error for a field that is wrong; of what it may be, for the form that fits best."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda each: (len(each["loc"]), each["type"] != "missing"))
    where = _place(at, first["loc"])
    if not where:
        why = f"the body is not a JSON object: {first['msg']}"
        return ApiError(400, why, code="invalid_json")
    if first["type"] == "missing":
        return invalid(where, f"{where} is missing; send it")
    forms = [each["msg"] for each in errors if _place(at, each["loc"]) == where]
    problem = " or ".join(dict.fromkeys(forms)).replace(" or Input should be ", " or ")
    problem = problem.removeprefix("Value error, ")
    if first["type"] != "literal_error":  # which lists what the API itself calls so
        problem = in_json_words(problem)
    return invalid_value(where, first["input"], problem)


def _place(at: str, parts: tuple[int | str, ...]) -> str:
    """The path of a part in a body, without pydantic's names of the alternatives."""
    for part in parts:
        if isinstance(part, int):
            at += f"[{part}]"
        elif re.fullmatch(r"[a-z0-9_]+", part) and part == in_json_words(part):
            at += f".{part}"
    return at.removeprefix(".")


def invalid_value(where: str, value: Any, problem: str) -> ApiError:
    return invalid(where, f"{where} = {shown(value)}: {problem}")


def _unknown(body: Strict, prefix: str = "") -> list[str]:
    names = [prefix + name for name in body.model_extra or ()]
    for name, value in body:
        if isinstance(value, Strict):
            names += _unknown(value, f"{prefix}{name}.")
    return names
