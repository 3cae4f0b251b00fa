"""What the endpoints share: the engine, tokenizers on their own thread, and how a client's leaving
is seen.

Rule: tokenizing never runs on the event loop, and no more of it waits than the queue may hold.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from mlxspec.config import Config
from mlxspec.metrics import Metrics
from mlxspec.server import Engine
from mlxspec.server.errors import ApiError, busy, dead, unavailable, unfit
from mlxspec.server.journal import Journal
from mlxspec.server.serial import Serial
from mlxspec.text.chat import Defaults, Tokenizer, generation_defaults, load_tokenizer
from mlxspec.text.history import History
from mlxspec.text.messages import Refused
from mlxspec.text.structured.grammar import Grammars
from mlxspec.types import Busy, ModelInfo, UserError

log = logging.getLogger("mlxspec")

T = TypeVar("T")

STALLED_S = 60.0  # without progress while there is work: longer than any step that is well
LOADING_S = 600.0  # the same while a model is loaded, which is one step for all the others
LOOK_S = 0.5  # between looks whether anybody could still use a text
BODY_S = 60.0  # time that a client has to send its request
KNOWN_NAMES = 1000  # unknown fields that are remembered as logged
ALIASES = ("default", "local")
FAMILIES = ("claude-", "gpt-")  # names that agents have built in: the default model stands for them


class Gone(Exception):
    """The client has left; there is nobody to answer."""


@dataclass(slots=True)
class Model:
    """What speaks one model's tokens, whether or not its weights are loaded. `defaults` are its own
    sampling settings."""

    front: "ServerState"
    name: str
    tokenizer: Tokenizer
    defaults: Defaults
    history: History = field(default_factory=History)  # the text thread's
    _grammars: Grammars | None = None

    @property
    def info(self) -> ModelInfo:
        return self.front.engine.models()[self.name].info

    @property
    def grammars(self) -> Grammars:
        """The text thread's; made anew where loading showed that the vocabulary is another."""
        if self._grammars is None or self._grammars.vocab != self.info.vocab:
            self._grammars = Grammars(self.tokenizer, self.info.vocab)
        return self._grammars


@dataclass(slots=True)
class ServerState:
    """One server's state. `paths` are the directories of the models by name, `verdicts` those of
    `mlxspec.kernels.verify` by kernel and shape."""

    engine: Engine
    config: Config
    metrics: Metrics
    paths: Mapping[str, Path]
    verdicts: Mapping[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    listeners: int = 0  # to the page's snapshots
    note: str = ""  # set in safe mode
    models: dict[str, Model] = field(default_factory=dict)  # those that somebody has asked for
    text: Serial = field(default_factory=lambda: Serial("text"))
    _opening: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def unwell(self) -> str:
        """Why the server does not get on with its work; empty where it does."""
        if not self.engine.alive():
            return "the engine has stopped"
        if self.engine.draining():
            return "the server is stopping"
        if (seconds := self.engine.stalled()) > (LOADING_S if self.engine.loading() else STALLED_S):
            return f"the engine has made no progress for {seconds:.0f} s"
        return ""

    async def on_text_thread(self, work: Callable[..., T], /, *args: Any, **kw: Any) -> T:
        """Run `work` on the one thread for text. Raises ApiError 429 when too many wait for it, 400
        for a prompt that cannot be rendered, 503 as soon as the engine takes no more."""
        if (
            len(self.text.waiting) + self.text.at_work
            >= self.config.max_queue + self.config.max_sequences
        ):
            raise busy(Busy(1))
        job = asyncio.wrap_future(self.text.submit(lambda: work(*args, **kw)))
        try:
            while not (await asyncio.wait((job,), timeout=LOOK_S))[0]:
                if self.engine.draining() or not self.engine.alive():
                    raise dead(self.engine)
            return job.result()
        except Refused as error:
            raise unfit(error.field, str(error), error.code) from error
        finally:
            job.cancel()
            del job  # or an error in it would hold it, by its traceback, and it the error

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the text thread, after what waits there, before what comes. A failure is
        logged."""

        def told() -> None:
            try:
                work()
            except Exception:
                log.exception("an answer was given, but will not be remembered")

        self.text.submit(told)

    def named(self, name: str | None, *, exact: bool = False) -> str:
        """The served model that `name` means; not `exact`: also by names that agents have built in.
        Raises ApiError 404 for one that is not served here."""
        served = self.engine.models()
        if name in served:
            return str(name)
        known = self.config.strict_model_names == "off" and not exact
        if name is None or name in ALIASES or (known and name.startswith(FAMILIES)):
            return self.engine.info.name
        raise ApiError(
            404,
            f"model = {name[:200]!r} is not served here; send {', '.join(map(repr, served))} or 'default'",
            param="model",
            code="model_not_found",
        )

    async def model(self, name: str | None) -> Model:
        """The model that `name` means. Raises ApiError 404 where none is, 503 for one without a
        tokenizer."""
        own = self.named(name)
        if own not in self.models:
            opening = self._opening.get(own) or asyncio.ensure_future(
                asyncio.to_thread(self.open, own)
            )
            self._opening[own] = opening
            try:
                await asyncio.shield(opening)
            except UserError as error:
                raise unavailable(str(error)) from error
            finally:
                if opening.done():
                    self._opening.pop(own, None)
        return self.models[own]

    def open(self, name: str, tokenizer: Tokenizer | None = None) -> None:
        """On a thread of its own, which may take seconds: load the model's tokenizer, unless that
        is there. Raises InvalidRequest."""
        if name not in self.models:
            path = self.paths[name]
            tokenizer = tokenizer or load_tokenizer(path)
            self.models[name] = Model(self, name, tokenizer, generation_defaults(path))

    def report(self, ignored: list[str]) -> dict[str, str]:
        """The response header that lists unknown fields, percent-encoded; each is logged once."""
        names = [quote(name[:64], safe="[]") or "%00" for name in ignored[:32]]
        for name in names:
            if name not in self._named and len(self._named) < KNOWN_NAMES:
                self._named.add(name)
                log.warning("requests carry the unknown field %s; it is ignored", name)
        return {"x-mlxspec-ignored": ", ".join(names)} if names else {}


async def read_body(http: HttpRequest) -> bytes:
    """The request's body. Raises ApiError 408 when it does not arrive in time, Gone when nobody
    sends it."""
    try:
        async with asyncio.timeout(BODY_S):
            return await http.body()
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not arrive within {BODY_S:.0f} s; send it at once"
        ) from error
    except ClientDisconnect as error:
        raise Gone from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it the moment the client leaves; then raises Gone. The body must be
    read."""
    job = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((job, left), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise Gone
        return job.result()
    finally:
        for task in (job, left):
            task.cancel()
        await asyncio.gather(job, left, return_exceptions=True)
        del job, left, task  # as above


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def on_gone(http: HttpRequest, error: Exception) -> Response:
    """For the log of whoever stands in front; the client is not there to read it."""
    return Response(status_code=499)
