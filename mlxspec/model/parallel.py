"""Ranks: the processes among which a model is split, connected by MLX (mx.distributed).

Rule: all ranks exchange the same messages in the same order, on the stream that the model's
all-reduce uses. Rank 0 decides and tells the others; the samples of all are compared.
"""

import json
import os
import signal
import socket
import subprocess
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

from mlxspec import log
from mlxspec.files import MODULE
from mlxspec.types import UnsupportedModel, UserError, line_of

WORDS = 1024  # int32 of a message; a longer one follows its length
TIMEOUT_S = 60.0  # without a message
LOAD_S = 1800.0  # likewise between two steps of loading a model
WATCH_S = 1.0
EXIT_S = 0.5  # until a rank that broke a connection has ended
END_S = 5.0  # for the others to save their work and end
FAILED = "failed"
# Attributes of mlx-lm's modules that its shard() divides, rounding down.
HEADS = ["n_heads", "n_kv_heads", "num_heads", "num_attention_heads", "num_key_value_heads"]
HEADS += ["num_k_heads", "num_v_heads"]


def split(model: Module, group: mx.distributed.Group) -> None:
    """Keep this rank's part of a model's weights, by mlx-lm's own shard(); they are read when they
    are evaluated, which all ranks must do. Raises UnsupportedModel."""
    ranks = group.size()
    name = type(model).__module__
    if not hasattr(model, "shard"):
        raise UnsupportedModel(f"{name} cannot split a model among ranks; serve it with one")
    for module in model.modules():
        for heads in HEADS:
            number = getattr(module, heads, 0)
            if number % ranks:
                raise UnsupportedModel(f"{heads} = {number} cannot be split among {ranks} ranks")
    try:
        _read_in_turn(model, group)
        model.shard(group)
    except Exception as error:  # the model's own code
        why = f"{name} cannot split this model among {ranks} ranks: {line_of(error)}"
        raise UnsupportedModel(why) from error


def _read_in_turn(model: Module, group: mx.distributed.Group) -> None:
    """Let one rank read each array from disk and send it to the others, when it is evaluated; all
    ranks read about as many bytes. MLX reads a whole array from a file, however little is kept."""
    bytes_read = [0] * group.size()
    shared = []
    last: list[Array] = []
    arrays: Any = tree_flatten(model.parameters())
    for name, array in arrays:
        reader = bytes_read.index(min(bytes_read))
        bytes_read[reader] += array.nbytes
        part = array if reader == group.rank() else mx.zeros_like(array)
        # All ranks exchange in this order, whatever is evaluated first.
        ordered = mx.depends([part], last)
        last = [mx.distributed.all_sum(ordered[0], group=group, stream=mx.cpu)]
        shared.append((name, last[0]))
    model.update(tree_unflatten(shared))


class RankLost(BaseException):
    """Another rank is gone, or computes something else. Not an Exception, as no handler of one
    could go on: the ranks wait for each other in the model's sums."""


class RankFailed(UnsupportedModel):
    """A model cannot be loaded, as all ranks know."""


@dataclass(slots=True, eq=False)
class ProcessGroup:
    """The ranks, processes that hold the parts of a model, as this one sees them; without MLX's
    `group` it is the only one. `children` are the others if this one started them. For the thread
    that owns MLX."""

    group: Any = None
    children: Sequence[subprocess.Popen[bytes]] = ()
    hosts: Any = None  # the file of addresses, deleted at the end: the last rank reads it late
    rank: int = 0
    size: int = 1
    level: int = 0  # the worst memory pressure of the others
    ended: bool = False  # rank 0 has called "end"
    # Samples of each step, until they are in the checksum.
    samples: deque[Array] = field(default_factory=deque)
    _checksum: int = 0
    # Time of the last message, and seconds after which the next one is missed.
    _last_message: tuple[float, float] = (0.0, inf)
    _replies: Array | None = None  # to the last message, with the message itself
    _calls: list[Sequence[Any]] = field(default_factory=list)  # for the next message

    def __post_init__(self) -> None:
        if self.group:
            self.rank, self.size = self.group.rank(), self.group.size()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # ---- all ranks ---------------------------------------------------------------------------

    def gather(self, value: Any, seconds: float = 0.0) -> list[Any]:
        """Every rank's value, JSON of at most 4 * WORDS bytes, by rank; `seconds` as for `expect`.
        Raises RankFailed if a rank has called `failed`."""
        if not self.group:
            return [value]
        values = self._exchange(value)
        self.expect(seconds)
        for rank, other in enumerate(values):
            if isinstance(other, dict):
                raise RankFailed(f"rank {rank}: {other[FAILED]}")
        return values

    def failed(self, error: Exception) -> None:
        """Tell the others, which wait in `gather`, that loading failed here, unless all know."""
        if not isinstance(error, RankFailed):
            with suppress(RankFailed):
                self.gather({FAILED: line_of(error)[:WORDS]})

    def same(self, facts: str, what: str) -> None:
        """Check that all ranks have the same facts. Raises UnsupportedModel."""
        checksums = self.gather(crc32(facts.encode()))
        for rank, checksum in enumerate(checksums):
            if checksum != checksums[0]:
                raise UnsupportedModel(f"rank {rank} has another {what} than rank 0")

    def enough(self, blocks: Sequence[int]) -> None:
        """Check that no rank's pools have fewer blocks than rank 0's. Raises UnsupportedModel."""
        first, *others = self.gather(list(blocks))
        for rank, counts in enumerate(others, 1):
            if np.less(counts, first).any():
                why = "give all ranks the same settings"
                raise UnsupportedModel(f"rank {rank} has {counts} blocks, rank 0 {first}: {why}")

    def share(self, tokens: Array) -> Array:
        """Rank 0's tokens, int32 [n], lazily; the others pass zeros."""
        shared = mx.distributed.all_sum(tokens, group=self.group, stream=mx.cpu)
        mx.async_eval(shared)
        return shared

    def expect(self, seconds: float = 0.0) -> None:
        """Expect another message within so many seconds; 0: all ranks have finished a step of
        loading, and the next one may take LOAD_S."""
        self._last_message = time.monotonic(), seconds or LOAD_S

    @contextmanager
    def together(self) -> Iterator[None]:
        """For code in which all ranks compute. MLX has no type of error for a rank that is gone;
        but after any of its errors here, the others wait in their sums for this rank. Raises
        RankLost for it."""
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, RuntimeError):
                cause = cause.__cause__ or cause.__context__
            if self.group and cause:
                raise self._lost(error) from error
            raise

    def _check(self) -> int:
        """The checksum of all samples except the last step's, which may be in flight."""
        while len(self.samples) > 1:
            tokens = self._read(self.samples.popleft())
            self._checksum = crc32(tokens.tobytes(), self._checksum)
        return self._checksum

    def _exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self._decode(self._post(json.dumps(value).encode()))

    def _post(self, data: bytes, words: int = WORDS) -> Array:
        """Exchange a row of `words` int32, without waiting: [ranks, words]."""
        row = np.frombuffer(data.ljust(4 * words), np.int32).reshape(1, words)
        rows = mx.distributed.all_gather(mx.array(row), group=self.group, stream=mx.cpu)
        mx.async_eval(rows)
        return rows

    def _decode(self, rows: Array) -> list[Any]:
        return [json.loads(row.tobytes()) for row in self._read(rows)]

    def _read(self, array: Array) -> Any:
        """Exchanged values as a numpy array. Raises RankLost."""
        with self.together():
            mx.eval(array)  # without this, numpy swallows MLX's error
        return np.array(array)

    # ---- rank 0 ------------------------------------------------------------------------------

    def call(self, *call: Any) -> None:
        """Send a call to the others with the next message: the model's name, what, arguments."""
        if self.group:
            self._calls.append(call)

    def flush(self, seconds: float = TIMEOUT_S) -> None:
        """Send the calls to the others, without waiting for them; another message follows within so
        many seconds. Raises RankLost if their samples differ."""
        if not self.group:
            return
        if self._replies is not None:
            _, *statuses = self._decode(self._replies)
            self.level = max(level for _, level in statuses)
            for rank, (checksum, _) in enumerate(statuses, 1):
                if checksum != self._checksum:
                    why = "all ranks need the same chip, macOS and mlx"
                    raise RankLost(f"rank {rank} sampled other tokens than rank 0: {why}")
        self._check()
        calls, self._calls = self._calls, []
        data = json.dumps([seconds, calls]).encode()
        words = -(-len(data) // 4)
        self._replies = self._post(data if words <= WORDS else b"%d" % words)
        if words > WORDS:
            self._post(data, words)
        self.expect(seconds)

    def poll(self) -> None:
        """After a moment without a message, send the calls, which shows the others that this rank
        is alive."""
        if time.monotonic() - self._last_message[0] > WATCH_S:
            self.flush()

    def end(self) -> None:
        """Let the others end, unless they have failed too."""
        children, self.children = self.children, ()  # whose end is expected now
        if self.group:
            with suppress(RuntimeError, RankLost):
                self.call("", "end")
                self.flush()
                mx.synchronize(mx.default_stream(mx.cpu))
        if self.hosts:
            self.hosts.close()
        until = time.monotonic() + END_S
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))

    # ---- the others --------------------------------------------------------------------------

    def receive(self, level: int) -> list[list[Any]]:
        """Wait for rank 0's next calls, and tell it this process's memory pressure."""
        message = self._exchange([self._check(), level])[0]
        if isinstance(message, int):
            message = self._decode(self._post(b"0", message))[0]
        seconds, calls = message
        self.expect(seconds)
        self.ended = ["", "end"] in calls
        return list(calls)

    # ---- when one is lost --------------------------------------------------------------------

    def watch(self, lost: Callable[[RankLost], object]) -> None:
        """From now on call `lost`, on a thread of its own, when a message is overdue, or the parent
        or a child process has ended: not every broken connection raises an error, and MLX may wait
        for ever."""
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
            lost(self._lost(f"no message for {silent:.0f} s"))

        if self.group:
            threading.Thread(target=loop, name="ranks", daemon=True).start()

    def _lost(self, why: str | Exception) -> RankLost:
        """The rank that is gone, as far as this process can know; an error may be its own."""
        time.sleep(EXIT_S)
        if ended := _why_ended(self.children):
            return RankLost(ended)
        neighbours = {(self.rank + step) % self.size for step in (1, -1)}
        gone = f"rank {' or '.join(map(str, neighbours))} is gone"
        if isinstance(why, Exception):
            log.error("this rank has failed, or another one", exc_info=why)
            gone += f", or rank {self.rank} has failed"
            why = line_of(why)
        return RankLost(f"{gone}: {why}")


ALONE = ProcessGroup()  # one process holds all of a model


def _why_ended(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """Which rank that this process started has ended first; "": none. Ranks that lost another one
    end with 1, so one with another status was the first."""
    statuses = [(child.poll(), rank) for rank, child in enumerate(children, 1)]
    ended = sorted((s == 1, rank, s) for s, rank in statuses if s is not None)
    return f"rank {ended[0][1]} has ended with status {ended[0][2]}" if ended else ""


def join(size: int, flags: Sequence[str] = ()) -> ProcessGroup:
    """The ranks that mlx.launch started; else `size` on this machine, of which this process starts
    the others as `mlxspec serve` with `flags`. Raises UserError."""
    if "MLX_RANK" in os.environ:
        return _connect([])
    if size == 1:
        return ALONE
    command = [*MODULE, "mlxspec", "serve", *flags]
    children = []
    hosts = tempfile.NamedTemporaryFile("w", suffix=".json")
    json.dump(_free_ports(size), hosts)
    hosts.flush()
    os.environ["MLX_HOSTFILE"] = hosts.name
    for rank in range(1, size):
        os.environ["MLX_RANK"] = str(rank)
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    os.environ["MLX_RANK"] = "0"
    return _connect(children, hosts)


def _connect(children: Sequence[subprocess.Popen[bytes]], hosts: Any = None) -> ProcessGroup:
    # A rank that ends before it has connected interrupts MLX, which would wait for it for ever.
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        why = _why_ended(children)
        if not why:
            return ProcessGroup(mx.distributed.init(strict=True), children, hosts)
    except RuntimeError as error:
        why = _why_ended(children) or line_of(error)
    finally:
        signal.signal(signal.SIGCHLD, before)
    for child in children:
        child.kill()
        child.wait()
    raise UserError(f"the ranks cannot be connected: {why}")


def _free_ports(size: int) -> list[list[str]]:
    """An address of this machine for each rank, as MLX's ring expects it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    hosts = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in sockets]
    for server in sockets:
        server.close()
    return hosts
