"""Rank 0's runner, which sends its calls to the other ranks, and the Follower that repeats them.

Rule: a follower decides nothing. It has a copy of what a forward needs of each sequence, under the
same block ids, and samples the same tokens, since noise is keyed by seed and position.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from mlxspec.model.batch import Forward, SpanT
from mlxspec.model.parallel import TIMEOUT_S, ProcessGroup
from mlxspec.model.runner import Runner
from mlxspec.model.sampler import Sampled
from mlxspec.sequences import Draft, LazyTokens, SeqState, Span, Spans
from mlxspec.types import STATE, Sampling, Tap

STEPS = 3  # whose states may still be kept or cut: in flight, being read, and one to spare
NUMBERS = count(1)  # of the objects that followers hold, for all models
CONTINUES = 0  # a sequence's recurrent state follows from its last step


def runner_type(group: ProcessGroup, model: str) -> Callable[..., Runner]:
    """The constructor of the runner for the model with this name."""
    if group.size == 1 or group.rank:
        return Runner
    return partial(MirroredRunner, group, model)


class Snapshot(list[mx.array]):
    """A recurrent state that the prefix cache keeps, under a number that all ranks know."""

    number: int


class MirroredRunner(Runner):
    """Rank 0's runner for the model called `name`. Calls between two steps are sent with the next
    step."""

    def __init__(self, group: ProcessGroup, name: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group, self._name = group, name
        # Number, tokens and tables of each sequence that the followers know.
        self._mirrored = WeakKeyDictionary[SeqState, tuple[int, int, list[list[int]]]]()
        self._plans = deque[Spans](maxlen=STEPS)

    def _call(self, what: str, *args: Any) -> None:
        self._group.call(self._name, what, self.highest(), *args)

    def _number(self, content: Any) -> int:
        """A number for an object that the followers hold as long as this rank does."""
        number = next(NUMBERS)
        finalize(content, self._group.call, self._name, "drop", [], number)
        return number

    def forward(self, plan: Sequence[SpanT], previous: Forward[SpanT] | None) -> Forward[SpanT]:
        """Drafts that are on the device are sent from there."""
        messages = [self._message(e) for e in plan]
        self._call("step", messages, previous is not None, list(self.view.taps))
        self._group.flush()
        for e in plan:
            if isinstance(tokens := e.draft.tokens, LazyTokens):
                self._group.share(tokens.array[mx.array(tokens.places)])
        step = super().forward(plan, previous)
        self._plans.append(step.plan)
        return step

    def _message(self, e: Span) -> Sequence[Any]:
        """A span for the followers: the number of its sequence; its index, prompt's length, pooling
        and sampling if it is new to them, else None; the tokens that they lack; its tables, [] if
        unchanged; the state it starts from, None: fresh, CONTINUES or a snapshot's number; Span's
        fields from `start` to `inflight_drafts`; its draft, or the length of one on the device;
        masks."""
        state, new = e.state, None
        if state not in self._mirrored:
            new = state.index, state.prompt_len, state.pooling, asdict(state.sampling)
            self._mirrored[state] = self._number(state), 0, []
        number, length, before = self._mirrored[state]
        tables = [[*table] for table in e.tables]
        self._mirrored[state] = number, len(e.tokens), tables
        draft = e.draft.tokens
        return (
            number,
            new,
            e.tokens[length:],
            tables if tables != before else [],
            None if state.recurrent is None else getattr(state.recurrent, "number", CONTINUES),
            (e.start, e.count, e.samples, e.pending, e.inflight_drafts),
            len(draft) if isinstance(draft, LazyTokens) else [*draft],
            _in_hex(e.masks),
        )

    def sample(self, step: Forward[Any]) -> Sampled | None:
        sampled = super().sample(step)
        if sampled:
            self._group.samples.append(sampled.tokens)
        return sampled

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if copies:
            self._call("copy", [*copies])
        super().copy_blocks(copies)

    # ---- recurrent states: a span is identified by its index among those of the last steps

    def _recent(self) -> list[Span]:
        return [e for plan in self._plans for e in plan]

    def keep(self, state: Any) -> Snapshot:
        if isinstance(state, Snapshot):
            return state
        index = [id(e.recurrent) for e in self._recent()].index(id(state))
        snapshot = self._snapshot(super().keep(state))
        self._call("keep", index, snapshot.number)
        return snapshot

    def _snapshot(self, arrays: Iterable[mx.array]) -> Snapshot:
        snapshot = Snapshot(arrays)
        snapshot.number = self._number(snapshot)
        return snapshot

    def cut(self, step: Forward[SpanT], span: SpanT, rows: int) -> None:
        if step.recordings:
            self._call("cut", self._recent().index(span), rows)
        super().cut(step, span, rows)

    # ---- the prefix cache on disk: each rank saves its own part of the same blocks

    def export(self, pool: int, contents: Mapping[bytes, Any]) -> Sequence[mx.array]:
        numbers = [getattr(content, "number", content) for content in contents.values()]
        self._call("save", pool, _in_hex(contents), numbers)
        self._group.flush()  # no step may follow for long
        return super().export(pool, contents)

    def host(self, exported: Sequence[mx.array]) -> dict[str, Any]:
        with self._group.together():
            mx.eval(exported)
        return super().host(exported)

    def start_read(self, key: bytes) -> None:
        self._call("read", key.hex())
        self._group.flush()

    def all_read(self, keys: Sequence[bytes], seconds: float) -> bool:
        self._call("finish_read", seconds)
        self._group.flush()
        by_rank = self._group.gather(_in_hex(keys), TIMEOUT_S)
        return all(rank_keys == by_rank[0] for rank_keys in by_rank)

    def place(self, pool: int, blocks: Sequence[int], arrays: Any, which: Sequence[int]) -> Any:
        number = 0
        with self._group.together():
            placed = super().place(pool, blocks, arrays, which=which)
        if pool == STATE:
            placed = self._snapshot(placed)
            number = placed.number
        self._call("place", number, pool, blocks, which)
        return placed

    def close(self, seconds: float) -> None:
        self._call("unload", seconds)
        self._group.flush()


def _in_hex(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


@dataclass(slots=True, eq=False)
class Follower:
    """Another rank's counterpart of MirroredRunner: repeats the calls of rank 0's runner with this
    rank's `engine`. Rank 0 decides by its own index of the prefix cache on disk; it is told if a
    run is missing here."""

    engine: Any  # an engine.engine.Engine
    group: ProcessGroup
    _held: dict[int, Any] = field(default_factory=dict)  # sequences and snapshots by number
    _steps: deque[Forward[Span]] = field(default_factory=lambda: deque(maxlen=STEPS))
    _read: "Future[Any] | None" = None  # a run from disk
    _arrays: Any = None  # of the run that was read

    def call(self, what: str, highest: Sequence[int], *args: Any) -> None:
        """Repeat a call, with memory up to the `highest` block of each pool."""
        runner: Runner = self.engine.runner
        runner.highest = lambda: highest
        match what, *args:
            case "step", messages, overlaps, taps:
                self._step(messages, overlaps, taps)
            case "drop", number:
                self._held.pop(number, None)  # missing if the model was loaded again
            case "copy", copies:
                runner.copy_blocks(copies)
            case "keep", index, number:
                self._held[number] = runner.keep(self._recent(index)[1].recurrent)
            case "cut", index, rows:
                runner.cut(*self._recent(index), rows)
            case "save", pool, keys, contents:
                if pool == STATE:
                    contents = [self._held[number] for number in contents]
                by_key = dict(zip(map(bytes.fromhex, keys), contents, strict=True))
                self.engine.offloader.write(by_key, runner.export(pool, by_key))
            case "read", key:
                disk = self.engine.offloader.disk
                files = disk.touch([bytes.fromhex(key)])
                self._read = disk.read(files[0]) if files else None
            case "finish_read", seconds:
                self.group.gather(_in_hex(self._finish_read(seconds)), TIMEOUT_S)
            case "place", number, pool, blocks, which:
                self._held[number] = runner.place(pool, blocks, self._arrays, which=which)
            case "unload", seconds:
                self.engine.close(seconds)

    def _finish_read(self, seconds: float) -> Sequence[bytes]:
        """The keys of the run that was read; none if it was a miss or takes longer than that."""
        if self._read and wait([self._read], seconds).done and (run := self._read.result()):
            self._arrays = run.arrays
            return tuple(run.keys)
        return ()

    def _recent(self, index: int) -> tuple[Forward[Span], Span]:
        return [(step, e) for step in self._steps for e in step.plan][index]

    def _step(self, messages: Sequence[Any], overlaps: bool, taps: Sequence[Tap]) -> None:
        """Run one plan; its samples stay on the device."""
        runner: Runner = self.engine.runner
        if list(runner.view.taps) != taps:
            # Else a step without samples would compute less than rank 0's.
            runner.tap(taps)
        plan = list(map(self._span, messages))
        step = runner.forward(plan, self._steps[-1] if overlaps else None)
        runner.submit(step, runner.sample(step))
        if step.sampled:
            self.group.samples.append(step.sampled.tokens)
        for e in plan:
            e.recurrent = e.state.recurrent
        self._steps.append(step)

    def _span(self, message: Sequence[Any]) -> Span:
        number, new, tokens, tables, begins, rows, draft, masks = message
        if new:
            index, length, pooling, sampling = new
            self._held[number] = (
                SeqState(Sampling(**sampling), index, length, pooling=pooling),
                [],
                [],
            )
        state, all_tokens, all_tables = self._held[number]
        all_tokens += tokens
        if tables:
            all_tables[:] = tables
        if begins != CONTINUES:
            state.recurrent = begins and self._held[begins]
            state.batch = None
        if isinstance(draft, int):
            drafted = self.group.share(mx.zeros(draft, mx.int32))
            draft = LazyTokens(drafted, [*range(draft)])
        e = Span(state, all_tables, all_tokens, *rows)
        e.draft = Draft(draft)
        e.masks = list(map(bytes.fromhex, masks))
        return e
