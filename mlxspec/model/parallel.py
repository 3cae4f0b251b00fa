"""Ranks: the processes among which a model is split, connected by MLX (mx.distributed).

Rule: all ranks exchange the same messages in the same order, on the stream of the model's own sums.
Rank 0 decides; the others hear of it, and the samples of all are compared.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from mlx.core import array as Array
from mlx.nn import Module
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.types import Json, RankLost, UnsupportedModel, UserError, line_of

WORDS = 1024  # int32 of a message; where that is too few, another follows
TIMEOUT_S = 60.0  # without a message
LOAD_S = 1800.0  # likewise between two steps of loading a model
WATCH_S = 1.0
EXIT_S = 0.5  # in which a rank that broke a connection has ended
END_S = 5.0  # in which the others write what is left and end
FAILED = "failed"
# Attributes of mlx-lm's modules that its shard() divides, rounding down.
HEADS = ["n_heads", "n_kv_heads", "num_heads", "num_attention_heads", "num_key_value_heads"]
HEADS += ["num_k_heads", "num_v_heads"]


def split(model: Module, group: mx.distributed.Group) -> None:
    """Keep this rank's part of a model's weights, by mlx-lm's own shard(); they are read once they
    are evaluated, which all ranks have to do. Raises UnsupportedModel and RankLost."""
    ranks = group.size()
    name = type(model).__module__
    if not hasattr(model, "shard"):
        raise UnsupportedModel(f"{name} cannot split a model among ranks; serve it with one")
    for module in model.modules():
        for heads in HEADS:
            count = getattr(module, heads, 0)
            if count % ranks:
                raise UnsupportedModel(f"{heads} = {count} cannot be split among {ranks} ranks")
    try:
        _read_in_turn(model, group)
        model.shard(group)
    except RuntimeError as error:  # it reads weights, and the others wait for them
        raise RankLost(f"rank {group.rank()} cannot read its part: {line_of(error)}") from error
    except Exception as error:  # the model's own code
        why = f"{name} cannot split this model among {ranks} ranks: {line_of(error)}"
        raise UnsupportedModel(why) from error


def _read_in_turn(model: Module, group: mx.distributed.Group) -> None:
    """Let one rank read each array from disk and send it to the others, once it is evaluated; all
    ranks read about as many bytes. MLX reads an array of a file whole, however little is kept."""
    read = [0] * group.size()
    shared = []
    last: list[Array] = []
    arrays: Any = tree_flatten(model.parameters())
    for name, array in arrays:
        reader = read.index(min(read))
        read[reader] += array.nbytes
        own = array if reader == group.rank() else mx.zeros_like(array)
        # All ranks exchange in this order, whatever is evaluated first.
        given = mx.depends([own], last)
        last = [mx.distributed.all_sum(given[0], group=group, stream=mx.cpu)]
        shared.append((name, last[0]))
    model.update(tree_unflatten(shared))


class RankFailed(UnsupportedModel):
    """A model cannot be loaded, as all ranks know."""


@dataclass(slots=True, eq=False)
class Ranks:
    """This process among all ranks; alone without a `group`. `children` are the others if this one
    started them. Messages are for the thread that owns MLX."""

    group: Any = None
    children: Sequence[subprocess.Popen[bytes]] = ()
    hosts: Any = None  # the file of addresses, deleted at the end: the last rank reads it late
    rank: int = 0
    size: int = 1
    level: int = 0  # the worst memory pressure of the others
    ended: bool = False  # rank 0 has said so
    # Samples of each step, until they are in the checksum.
    samples: deque[Array] = field(default_factory=deque)
    _checksum: int = 0
    # Time of the last message, and seconds after which the next one is missed.
    _last_message: tuple[float, float] = (0.0, inf)
    _sent: Array | None = None  # the last message, with what the others gave

    def __post_init__(self) -> None:
        if self.group:
            self.rank, self.size = self.group.rank(), self.group.size()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # ---- all ranks ---------------------------------------------------------------------------

    def gather(self, value: Any, seconds: float = 0.0) -> list[Any]:
        """Every rank's value, JSON of at most 4 * WORDS bytes, by rank; the next message follows in
        so many seconds; 0: in those of loading. Raises RankFailed where one has told `failed`."""
        if not self.group:
            return [value]
        found = self._exchange(value)
        self._expect({}, seconds or LOAD_S)
        for rank, each in enumerate(found):
            if isinstance(each, dict) and FAILED in each:
                raise RankFailed(f"rank {rank}: {each[FAILED]}")
        return found

    def failed(self, error: Exception) -> None:
        """Tell the others, which wait in `gather`, that loading failed here; not where all know.
        Raises RankLost where that is why."""
        why = self.explain(error)
        if isinstance(why, RankLost):
            raise why
        if not isinstance(error, RankFailed):
            with suppress(RankFailed):
                self.gather({FAILED: line_of(error)[:WORDS]})

    def same(self, facts: str, what: str) -> None:
        """Check that all ranks have the same facts. Raises UnsupportedModel."""
        found = self.gather(crc32(facts.encode()))
        for rank, each in enumerate(found):
            if each != found[0]:
                raise UnsupportedModel(f"rank {rank} has another {what} than rank 0")

    def enough(self, blocks: Sequence[int]) -> None:
        """Check that no rank's pools have fewer blocks than rank 0's. Raises UnsupportedModel."""
        first, *others = self.gather(list(blocks))
        for rank, each in enumerate(others, 1):
            if np.less(each, first).any():
                why = "give all ranks the same settings"
                raise UnsupportedModel(f"rank {rank} has {each} blocks, rank 0 {first}: {why}")

    def share(self, tokens: Array) -> Array:
        """Rank 0's tokens, int32 [n], lazily; the others give zeros."""
        shared = mx.distributed.all_sum(tokens, group=self.group, stream=mx.cpu)
        mx.async_eval(shared)
        return shared

    def _check(self) -> int:
        """The checksum of all samples but those of the last step, which may be in flight."""
        while len(self.samples) > 1:
            tokens = _read(self.samples.popleft())
            self._checksum = crc32(tokens.tobytes(), self._checksum)
        return self._checksum

    def _exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return _decode(self._post(json.dumps(value).encode()))

    def _post(self, data: bytes, words: int = WORDS) -> Array:
        """Exchange a row of so many int32, without waiting: [ranks, words]."""
        row = np.frombuffer(data.ljust(4 * words), np.int32).reshape(1, words)
        rows = mx.distributed.all_gather(mx.array(row), group=self.group, stream=mx.cpu)
        mx.async_eval(rows)
        return rows

    def heard(self) -> None:
        """A step of loading is done, as all ranks know: the next one may take as long."""
        self._expect({}, LOAD_S)

    def _expect(self, message: Json, seconds: float = TIMEOUT_S) -> None:
        """Expect another message in so many seconds. A model that is to be loaded may have to be
        downloaded on another rank before."""
        self._last_message = time.monotonic(), inf if "load" in message else seconds

    # ---- rank 0 ------------------------------------------------------------------------------

    def send(self, message: Json) -> None:
        """Tell the others, without waiting for them. Raises RankLost if their samples differ."""
        if not self.group:
            return
        if self._sent is not None:
            _, *statuses = _decode(self._sent)
            self.level = max(level for _, level in statuses)
            for rank, (checksum, _) in enumerate(statuses, 1):
                if checksum != self._checksum:
                    why = "all ranks need the same chip, macOS and mlx"
                    raise RankLost(f"rank {rank} sampled other tokens than rank 0: {why}")
        self._check()
        data = json.dumps(message).encode()
        words = -(-len(data) // 4)
        self._sent = self._post(data if words <= WORDS else b"%d" % words)
        if words > WORDS:
            self._post(data, words)
        self._expect(message)

    def remind(self) -> None:
        """Tell the others that this rank is alive, if it has said nothing for long."""
        if time.monotonic() - self._last_message[0] > TIMEOUT_S / 4:
            self.send({})

    def end(self) -> None:
        """Let the others end, unless they have failed as well."""
        children, self.children = self.children, ()  # which are expected to end
        if self.group:
            with suppress(RuntimeError, ValueError):  # where a rank is lost or has failed
                self.send({"end": True})
                mx.synchronize(mx.default_stream(mx.cpu))
        if self.hosts:
            self.hosts.close()
        until = time.monotonic() + END_S
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))

    # ---- the others --------------------------------------------------------------------------

    def receive(self, level: int) -> Json:
        """Wait for what rank 0 says next, and tell it this process's memory pressure."""
        message = self._exchange([self._check(), level])[0]
        if isinstance(message, int):
            message = _decode(self._post(b"0", message))[0]
        self._expect(message)
        self.ended = "end" in message
        return dict(message)

    # ---- when one is lost --------------------------------------------------------------------

    def watch(self, lost: Callable[[str], object]) -> None:
        """From now on call `lost`, on a thread of its own, when a message is missed or a process
        that started this one, or was started by it, has ended: not every connection that breaks
        tells so, and MLX may wait for ever."""
        parent = os.getppid()

        def loop() -> None:
            silent = 0.0
            limit = inf
            while silent < limit and not _why_ended(self.children):
                if self.ended:
                    return
                if self.rank and os.getppid() != parent:
                    break
                time.sleep(WATCH_S)
                heard, limit = self._last_message
                silent = time.monotonic() - heard
            lost(self._suspect(f"no message for {silent:.0f} s"))

        if self.group:
            threading.Thread(target=loop, name="ranks", daemon=True).start()

    def explain(self, error: BaseException) -> BaseException:
        """What an error of MLX's connections means, or one that it caused. Further messages would
        never come back."""
        cause: BaseException | None = error
        while self.group and cause:
            if connection_lost(cause):
                return RankLost(self._suspect(line_of(cause)))
            cause = cause.__cause__ or cause.__context__
        return error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While weights are read: an error here ends all ranks, as the others wait for the arrays
        that this one reads. Raises RankLost, or with one rank what was raised."""
        try:
            yield
        except UnsupportedModel as error:
            if not self.group:
                raise
            told = self.explain(error)
            if not isinstance(told, RankLost):
                told = RankLost(f"rank {self.rank}: {error}")
            raise told from error

    def _suspect(self, why: str) -> str:
        """Which rank is gone, as far as this process can know."""
        time.sleep(EXIT_S)
        beside = {(self.rank + step) % self.size for step in (1, -1)}
        return _why_ended(self.children) or f"rank {' or '.join(map(str, beside))} is gone: {why}"


def connection_lost(error: BaseException) -> bool:
    """Whether MLX says that another rank is gone."""
    return isinstance(error, RuntimeError) and "connection" in str(error)


def _why_ended(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """Which of the other ranks has ended, of all that this process started; "": none. Those that
    lost another one end with 1, so one that did not was the first."""
    ended = [(child.poll(), rank) for rank, child in enumerate(children, 1)]
    found = sorted((s == 1, rank, s) for s, rank in ended if s is not None)
    return f"rank {found[0][1]} has ended with status {found[0][2]}" if found else ""


def _read(array: Array) -> Any:
    """The numpy array of what was exchanged: without this eval, numpy swallows MLX's error."""
    mx.eval(array)
    return np.array(array)


def _decode(rows: Array) -> list[Any]:
    return [json.loads(row.tobytes()) for row in _read(rows)]


def join(count: int, flags: Sequence[str] = ()) -> Ranks:
    """This process's ranks: those that mlx.launch started; else `count` on this machine, the others
    started here as `mlxspec serve` with `flags`. Raises UserError."""
    if "MLX_RANK" in os.environ:
        return _connect([])
    if count == 1:
        return Ranks()
    command = [sys.executable, "-m", "mlxspec", "serve", *flags]
    children = []
    hosts = tempfile.NamedTemporaryFile("w", suffix=".json")
    json.dump(_free_ports(count), hosts)
    hosts.flush()
    os.environ["MLX_HOSTFILE"] = hosts.name
    for rank in range(1, count):
        os.environ["MLX_RANK"] = str(rank)
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    os.environ["MLX_RANK"] = "0"
    return _connect(children, hosts)


def _connect(children: Sequence[subprocess.Popen[bytes]], hosts: Any = None) -> Ranks:
    # A rank that ends before it has connected interrupts MLX, which would wait for it for ever.
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        why = _why_ended(children)
        if not why:
            return Ranks(mx.distributed.init(strict=True), children, hosts)
    except RuntimeError as error:
        why = _why_ended(children) or line_of(error)
    finally:
        signal.signal(signal.SIGCHLD, before)
    for child in children:
        child.kill()
        child.wait()
    raise UserError(f"the ranks cannot be connected: {why}")


def _free_ports(count: int) -> list[list[str]]:
    """An address of this machine for each rank, as the ring wants it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    return hosts
