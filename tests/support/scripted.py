"""An engine that says what a test tells it to, and an ASGI connection that a test can cut.

No sleeps: a test waits for what it wants to see.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message

from mlxspec.config import Config
from mlxspec.engine.worker import Mailbox
from mlxspec.server.app import create_app
from mlxspec.text.chat import encode
from mlxspec.types import (
    Busy,
    Dead,
    Finish,
    Logprob,
    ModelInfo,
    Output,
    Request,
    Served,
    Stats,
    UserError,
)

INFO = ModelInfo("tiny", 512, 320, "rows", 16, 1 << 20, 1 << 20, 1_700_000_000)
END = 299


@dataclass
class Scripted:
    """`says` are the texts of the choices in turn. With `holds` nothing comes until `push`."""

    tokenizer: Any
    says: tuple[str, ...] = ("hello world",)
    holds: bool = False
    busy: int = 0  # seconds of Retry-After
    info: ModelInfo = INFO
    others: tuple[Served, ...] = ()
    loads: str = ""  # the name of what is being loaded
    wrong: str = ""  # why nothing can be loaded
    ordered: list[tuple[str, Any]] = field(default_factory=list)  # loads with their pins, unloads
    lives: bool = True
    ending: bool = False
    silent: float = 0.0
    running_requests: tuple[tuple[str, int, int], ...] = ()
    group: int = 1  # tokens per output, as accepted drafts come
    drafted: int = 0  # per output; all of its tokens but one are kept
    cached: int = 0
    submitted: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    mailboxes: dict[str, Mailbox] = field(default_factory=dict)  # by request
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    drained: list[float] = field(default_factory=list)
    stopped: int = 0

    def submit(self, *requests: Request) -> Mailbox:
        if not self.lives or self.ending:
            raise Dead("the engine has stopped")
        if self.busy:
            raise Busy(self.busy)
        mailbox = Mailbox(sum(request.n for request in requests))
        for request in requests:
            self.submitted.append(request)
            self.mailboxes[request.id] = mailbox
            for output in () if self.holds else self.reply(request):
                mailbox.put(output)
        self.changed.set()
        return mailbox

    def reply(self, request: Request) -> Iterator[Output]:
        """All outputs of a request, its choices in turn, cut at max_tokens."""
        each = [list(self.choice(request, i)) for i in range(request.n)]
        for step in zip_longest(*each):
            yield from (output for output in step if output is not None)

    def choice(self, request: Request, index: int) -> Iterator[Output]:
        ids = [*encode(self.tokenizer, self.says[index % len(self.says)], special=False), END]
        finish: Finish = "stop" if END in request.stop_tokens else "length"
        ids = ids if finish == "stop" else ids[:-1]
        if len(ids) > request.max_tokens:
            ids, finish = ids[: request.max_tokens], "length"
        for at in range(0, len(ids), self.group):
            some = tuple(ids[at : at + self.group])
            last = at + self.group >= len(ids)
            made = self.output(request, index, some, finish if last else None, at // self.group + 1)
            yield self.speculated(made) if self.drafted else made

    def speculated(self, output: Output) -> Output:
        """Counted as the engine does it, which looks at whole drafts: also where the answer ends in
        one."""
        accepted = (self.group - 1) * output.rounds
        return replace(output, drafted=self.drafted * output.rounds, accepted=accepted)

    def output(
        self,
        request: Request,
        index: int,
        tokens: tuple[int, ...],
        finish: Finish | None,
        rounds: int = 1,
    ) -> Output:
        n = request.sampling.logprobs
        logprobs = (
            ()
            if n is None
            else tuple(
                Logprob(t, -0.5, tuple((o, -1.0 - i) for i, o in enumerate((64, 65, 66)[:n])))
                for t in tokens
            )
        )
        vector = np.ones(4, np.float32) if request.pooling else None
        return Output(
            request.id, index, tokens, logprobs, finish, self.cached, rounds, embedding=vector
        )

    def push(
        self, text: str = "", finish: Finish | None = None, index: int = 0, error: str = ""
    ) -> None:
        """One output of the newest request."""
        request = self.submitted[-1]
        tokens = tuple(encode(self.tokenizer, text, special=False)) + (
            (END,) if finish == "stop" else ()
        )
        self.mailboxes[request.id].put(
            Output(request.id, index, tokens, (), finish, self.cached, 1, error)
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))
        self.changed.set()

    @property
    def models(self) -> dict[str, Served]:
        return {s.info.name: s for s in (Served(self.info, stats=self.stats()), *self.others)}

    async def load(self, name: str, pin: bool | None = None) -> None:
        if not self.lives or self.ending:
            raise Dead("the engine has stopped")
        self.ordered.append((name, pin))
        self.changed.set()
        await self.carry_out(name, "loaded", pin)

    async def unload(self, name: str) -> None:
        self.ordered.append((name, "unload"))
        self.changed.set()
        await self.carry_out(name, "unloaded")

    async def carry_out(self, name: str, status: Any, pin: bool | None = None) -> None:
        """With `holds`, only when it is cancelled."""
        if self.holds:
            await asyncio.Event().wait()
        if self.wrong:
            raise UserError(self.wrong)
        change = {"status": status} | ({} if pin is None else {"pinned": pin})
        self.others = tuple(replace(s, **change) if s.info.name == name else s for s in self.others)

    def loading(self) -> str:
        return self.loads

    def stats(self) -> Stats:
        now = Stats(
            running=1, waiting=2, blocks_used=3, blocks_cached=4, blocks_free=5, generated_tokens=6
        )
        return replace(now, running_requests=self.running_requests)

    def alive(self) -> bool:
        return self.lives

    def stalled(self) -> float:
        return self.silent

    @property
    def draining(self) -> bool:
        return self.ending

    async def drain(self, timeout: float) -> None:
        self.drained.append(timeout)
        self.ending = True

    def stop(self, seconds: float) -> bool:
        self.stopped += 1
        return True

    async def until(self, seen: Callable[[], object]) -> None:
        """Wait for something that a call to this engine makes true."""
        async with asyncio.timeout(10):
            while not seen():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; comments are left out."""
        blocks = [b for b in self.body.decode().split("\n\n") if b.startswith("data: ")]
        return [json.loads(b[6:]) if b != "data: [DONE]" else "[DONE]" for b in blocks]

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return dict(found)


class Connection:
    """One request to an ASGI application, held open until it is answered or the test leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        chunks: list[bytes] | None = None,
    ) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self._parts = [data] if chunks is None else list(chunks)
        self._gone, self._changed = asyncio.Event(), asyncio.Event()
        self.sent: list[Message] = []
        named = {"host": "localhost", **(headers or {})}
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8080),
            "state": {},
        }
        self.task = asyncio.ensure_future(self._run(app))

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self._receive, self._send)
        finally:
            self._changed.set()

    async def _receive(self) -> Message:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._changed.set()

    def leave(self) -> None:
        self._gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    async def until(self, text: bytes) -> None:
        """Wait until `text` was sent."""
        async with asyncio.timeout(10):
            while text not in self.body:
                assert not self.task.done(), self.body
                self._changed.clear()
                await self._changed.wait()

    async def answer(self) -> Answer:
        async with asyncio.timeout(20):
            await self.task
        start = self.sent[0]
        assert start["type"] == "http.response.start" and not self.sent[-1].get("more_body")
        headers = {k.decode().lower(): v.decode() for k, v in start["headers"]}
        return Answer(start["status"], headers, self.body)


@dataclass
class Server:
    """An application round a scripted engine."""

    engine: Scripted
    app: Any

    async def post(self, path: str, body: Any = None, **kw: Any) -> Answer:
        return await Connection(self.app, path, body, **kw).answer()

    async def get(self, path: str, **kw: Any) -> Answer:
        return await Connection(self.app, path, method="GET", **kw).answer()

    async def chat(self, **body: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": MESSAGES, **body})

    async def complete(self, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "hello", **body})


MESSAGES = [{"role": "user", "content": "hello"}]


def server(
    tokenizer: Any, path: Path, config: Config | None = None, paths: Any = None, **script: Any
) -> Server:
    engine = Scripted(tokenizer, **script)
    return Server(engine, create_app(engine, tokenizer, path, config or Config(), paths))
