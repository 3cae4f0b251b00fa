"""What the endpoints share: the engine, the tokenizers on the text thread, and the list of
generations for the page.

Rule: text work never runs on the event loop, and at most as many text jobs wait as the engine may
queue and run.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from mlxspec import log
from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.files import read_json, stamp
from mlxspec.metrics import Metrics
from mlxspec.model.hub import folder_name
from mlxspec.profiles import Profile, profiles_of
from mlxspec.server.errors import ApiError, HttpRequest, Json
from mlxspec.text.chat import Tokenizer, generation_defaults, load_tokenizer
from mlxspec.text.history import History
from mlxspec.text.images import ImageCache, image_reader, with_placeholder
from mlxspec.text.proof import call_support
from mlxspec.text.structured.grammar import Grammars
from mlxspec.training.recorder import Recorder
from mlxspec.types import Busy, Dead, ModelInfo, Sampling, Served

T = TypeVar("T")

STALLED_S = 60.0  # without progress while there is work: longer than any healthy step
LOADING_S = 600.0  # the same while a model is loading
POLL_S = 0.5  # between checks that the engine still accepts requests and the client is there
MAX_FINISHED = 24  # rows of finished generations
ALIASES = ("default", "local")
# Prefixes of names that are built into agents; they mean the default model.
FAMILIES = ("claude-", "gpt-", "text-embedding-")

MAX_NAME = 200  # characters
MAX_LISTED = 10  # names, where another is unknown

Figures = Json  # figures of one generation, made by an Observer


@dataclass
class TextModel:
    """The text side of one served model, whether or not its weights are loaded, or of a `profile`
    of it. `defaults` are its sampling settings. Only the text thread uses `history` and
    `grammars`."""

    server: "ServerState"
    name: str
    tokenizer: Tokenizer
    defaults: Sampling
    grammars: Grammars
    files: str  # the `stamp` of its files
    history: History = field(default_factory=History)
    image_cache: ImageCache | None = None  # of a model that may see
    profile: Profile = field(default_factory=Profile)

    @property
    def base(self) -> str:
        """The engine's name of the model."""
        return self.profile.base or self.name

    @property
    def served(self) -> Served:
        return self.server.worker.models[self.base]

    @property
    def info(self) -> ModelInfo:
        return self.served.info


@dataclass
class ServerState:
    """What the endpoints of one server share. `paths` are the model directories by name, `note` a
    remark for /health, such as safe mode. `live` has functions that make the rows of running
    generations, by id; `finished` has the rows of the last ones."""

    worker: EngineThread
    config: Config
    metrics: Metrics
    paths: dict[str, Path]
    live: dict[str, Callable[[], Figures]] = field(default_factory=dict)
    finished: deque[Figures] = field(default_factory=lambda: deque(maxlen=MAX_FINISHED))
    note: str = ""
    recorder: Recorder | None = None  # keeps answers for training, if set
    models: dict[str, TextModel] = field(default_factory=dict)  # those whose tokenizer is loaded
    text_jobs: int = 0  # those that requests wait for
    pulling: str = ""  # the model that is being downloaded
    unread: int = 0  # bytes of bodies that are not answered yet
    imaging: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "images"))
    fetching: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "fetch"))
    _text: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "text"))

    def __post_init__(self) -> None:
        self.profiles = profiles_of(self.config.profiles, self.paths)

    def add_path(self, name: str, path: Path) -> None:
        """Know the directory and the profiles of another model. Raises ConfigError."""
        self.profiles = profiles_of(self.config.profiles, {*self.paths, name})
        self.paths[name] = path

    def remove_path(self, name: str) -> None:
        """Forget a model."""
        del self.paths[name]
        self.models.pop(name, None)
        self.profiles = profiles_of(self.config.profiles, self.paths)

    @property
    def served(self) -> Mapping[str, Served]:
        """All models by name, the default first, each followed by its profiles."""
        found = {}
        for name, model in self.worker.models.items():
            found[name] = model
            for own, profile in self.profiles.items():
                if own != profile.base == name:
                    found[own] = replace(model, info=replace(model.info, name=own, parent=name))
        return found

    def unwell(self) -> str:
        """Why the server is unhealthy, "" if it is healthy."""
        if not self.worker.alive():
            return "the engine has stopped"
        if self.worker.draining:
            return "the server is stopping"
        limit = LOADING_S if self.worker.loading() else STALLED_S
        if (seconds := self.worker.stalled()) > limit:
            return f"the engine has made no progress for {seconds:.0f} s"
        return ""

    async def on_text_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` on the text thread, after all that was submitted before. Raises Busy when too
        many jobs wait, Dead when the engine stops accepting requests, and what `work` raises."""
        if self.text_jobs >= self.config.max_queue + self.config.max_sequences:
            raise Busy(1)
        calls = [partial(work, *args)]
        job = asyncio.wrap_future(self._text.submit(lambda: calls.pop()()))
        self.text_jobs += 1
        try:
            while not (await asyncio.wait((job,), timeout=POLL_S))[0]:
                if self.worker.draining or not self.worker.alive():
                    raise Dead
            return job.result()
        finally:
            self.text_jobs -= 1
            job.cancel()
            calls.clear()  # a cancelled job stays in the executor's queue; its body must not
            del job  # break the cycle error -> traceback -> frame -> future -> error

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the text thread; a failure is logged."""

        def logged() -> None:
            try:
                work()
            except Exception:
                log.exception("an answer was sent, but could not be kept for the next turn")

        self._text.submit(logged)

    async def unload(self, name: str, force: bool = False) -> None:
        """Unload a model. Raises ApiError 409 where it is pinned, unless by `force`, or stays
        busy."""
        if self.worker.models[name].pinned and not force:
            why = f"{name} is pinned; send force: true, or load it with pin: false"
            raise ApiError(409, why, "model")
        seconds = max(1.0, self.config.drain_s)
        try:
            async with asyncio.timeout(seconds):
                await self.worker.unload(name)
        except TimeoutError as error:
            why = f"{name} was still busy after {seconds:.0f} s and stays loaded; try again later"
            raise ApiError(409, why, "model") from error

    def resolve_name(self, name: str | None) -> str:
        """The name of the served model with this name, directory or hub id, in capitals or not.
        Names built into agents mean the default model. Raises ApiError 404."""
        served = self.served
        if name and name not in served:
            name = name.removesuffix(":latest")  # Ollama's clients add that
        if name in served:
            return str(name)
        lenient = not self.config.strict_model_names and len(name or "") <= MAX_NAME
        if name is None or name in ALIASES or (lenient and name.lower().startswith(FAMILIES)):
            return self.worker.info.name
        wanted = name.lower()
        folder = folder_name(wanted)
        for model, path in self.paths.items():
            if model in served and (name == str(path) or folder in map(str.lower, path.parts)):
                return model
        # Without the publisher's name too, as serve takes it.
        same = [each for each in served if wanted in (each.lower(), Path(each.lower()).name)]
        if len(same) == 1:
            return same[0]
        wanted = wanted[:MAX_NAME]
        near = sorted(served, key=lambda each: -SequenceMatcher(None, each.lower(), wanted).ratio())
        names = ", ".join(map(repr, near[:MAX_LISTED]))
        why = (
            f"no model {name[:MAX_NAME]!r} here; send {names} or 'default' (/v1/models lists all),"
            " or have another one served by POST /api/pull or on the page"
        )
        raise ApiError(404, why, param="model", code="model_not_found")

    async def model(self, name: str | None) -> TextModel:
        """The model that `name` means. Raises ApiError 404 for an unknown name, UserError when its
        tokenizer cannot be loaded."""
        own = self.resolve_name(name)
        profile = self.profiles.get(own)
        name = profile.base if profile else own
        model = self.models.get(name)
        # Another model may have been put into its directory since it was unloaded.
        if model and self.worker.models[name].status == "unloaded":
            if model.files != stamp(self.paths[name]):
                del self.models[name]
        if name not in self.models:
            await self.on_text_thread(self.open, name)
        model = self.models[name]
        if profile:
            defaults = profile.over(model.defaults)
            return replace(model, name=own, defaults=defaults, profile=profile)
        return model

    def open(self, name: str, tokenizer: Tokenizer | None = None) -> None:
        """Add the model, loading its tokenizer unless it is given. Raises UserError."""
        if name not in self.models:
            path = self.paths[name]
            files = stamp(path)  # before they are read
            tokenizer = tokenizer or load_tokenizer(path)
            # Loading the weights may change the vocabulary's size, and masks fit any.
            grammars = Grammars(tokenizer, self.worker.models[name].info.vocab)
            defaults = generation_defaults(path)
            self.models[name] = TextModel(
                self,
                name,
                tokenizer,
                defaults=defaults,
                grammars=grammars,
                files=files,
                image_cache=self._image_cache(path, tokenizer),
            )
            log.info("%s: tools: %s", name, call_support(tokenizer))

    def _image_cache(self, path: Path, tokenizer: Tokenizer) -> ImageCache | None:
        """What reads images for a model; None where it has no tower, or is not to see."""
        files = read_json(path / "config.json")
        reader = image_reader(path, files, self.config.max_image_pixels)
        if not (reader and self.config.vision):
            return None
        return ImageCache(with_placeholder(reader, tokenizer))


async def while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """Run `work`; cancel it and raise ClientDisconnect when the client disconnects. The body must
    have been read."""
    job = asyncio.ensure_future(work)
    try:
        while not job.done():
            if await http.is_disconnected():
                raise ClientDisconnect
            await asyncio.wait((job,), timeout=POLL_S)
        return job.result()
    finally:
        job.cancel()
        # Nobody waits for an error after the client has left.
        await asyncio.gather(job, return_exceptions=True)
        del job, work  # break the cycle error -> traceback -> frame -> task -> error
