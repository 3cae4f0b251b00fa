"""Plans for the other ranks: rank 0's runner tells each step to theirs, which run it as well.

Rule: a follower decides nothing. It has a copy of each sequence as far as a forward needs it, under
the same block ids, and samples the same tokens, since noise is keyed by seed and position.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from mlxspec.model.batch import Step
from mlxspec.model.parallel import TIMEOUT_S, Ranks
from mlxspec.model.recurrent import own
from mlxspec.model.runner import Runner
from mlxspec.types import STATE, Draft, Entry, Json, Plan, Request, Sampling, Seq, Tap

STEPS = 3  # whose states may still be kept or cut: in flight, being read, and one to spare
GOES_ON, FRESH = 0, -1  # where a sequence's recurrent state comes from, else a snapshot's number


class Told(NamedTuple):
    """An entry as the followers hear of it."""

    number: int  # of its sequence
    new: Any  # of a sequence that they do not know: prompt length, index, pooling, sampling
    tokens: list[int]  # that are new to them
    tables: list[list[int]]  # [] where they are as before
    state: int
    rows: Any  # Entry's fields from `start` to `inflight_drafts`
    draft: Any  # its tokens, or how many follow on the device
    masks: list[str]


class Snapshot(list[mx.array]):
    """A recurrent state that the prefix cache keeps, under a number that all ranks know."""

    number: int


class Mirror:
    """Rank 0's part, for the `model` of that name. What happens between two plans is told with the
    next one."""

    def __init__(self, ranks: Ranks, model: str) -> None:
        self.ranks = ranks
        self.model = model
        self._events: list[Sequence[Any]] = []
        # Number, tokens and tables of each sequence that the followers know.
        self._told = WeakKeyDictionary[Seq, tuple[int, int, list[list[int]]]]()
        self._steps = deque[Plan](maxlen=STEPS)
        self._numbers = count(1)

    def tell(self, plan: Plan, overlaps: bool, highest: Sequence[int], taps: Sequence[Tap]) -> None:
        """Let the followers run a plan, `overlaps`: after the step in flight. What a drafter left
        on the device follows on the device."""
        message: Json = {
            "step": self.model,
            "plan": list(map(self._entry, plan)),
            "overlaps": overlaps,
            "highest": highest,
            "taps": taps,
            "events": self._take_events(),
        }
        self.ranks.send(message)
        self._steps.append(plan)
        for e in plan:
            if isinstance(e.draft.tokens, mx.array):
                self.ranks.share(e.draft.tokens)

    def _take_events(self) -> list[Sequence[Any]]:
        """What happened since the last message; more may be dropped while this one is sent."""
        events = self._events[:]
        del self._events[: len(events)]
        return events

    def _entry(self, e: Entry) -> Told:
        seq, new = e.seq, None
        if seq not in self._told:
            number = next(self._numbers)
            self._told[seq] = number, 0, []
            finalize(seq, self._events.append, ("drop", number))
            request = seq.request
            new = seq.prompt_len, seq.index, request.pooling, asdict(request.sampling)
        number, known, before = self._told[seq]
        tables = [[*table] for table in seq.tables]
        self._told[seq] = number, len(seq.tokens), tables
        state = FRESH
        if seq.state is not None:
            state = getattr(seq.state, "number", GOES_ON)
        draft = e.draft.tokens
        return Told(
            number,
            new,
            seq.tokens[known:],
            tables if tables != before else [],
            state,
            (e.start, e.count, e.samples, e.depth, e.pending, e.inflight_drafts),
            len(draft) if isinstance(draft, mx.array) else [*draft],
            _in_hex(e.masks),
        )

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """All ranks copy these blocks, (group, source, target) each."""
        self._events.append(("copy", [*copies]))

    def keep(self, state: Any) -> Snapshot:
        """A copy of an entry's recurrent state for the prefix cache, kept by all ranks; a snapshot
        itself where the state is one."""
        if isinstance(state, Snapshot):
            return state
        kept = self._snapshot(own(state))
        self._note("keep", kept.number, lambda e: e.state is state)
        return kept

    def _snapshot(self, arrays: Sequence[mx.array]) -> Snapshot:
        made = Snapshot(arrays)
        made.number = next(self._numbers)
        finalize(made, self._events.append, ("drop", made.number))
        return made

    def cut(self, entry: Entry, rows: int) -> None:
        """An entry's state is brought to that after its first `rows` rows."""
        self._note("cut", rows, lambda e: e is entry)

    def _note(self, event: str, number: int, is_entry: Callable[[Entry], bool]) -> None:
        """Tell what happened to an entry of the last steps, which must be one of theirs."""
        found = [
            (event, number, n, i)
            for n, plan in enumerate(self._steps, -len(self._steps))
            for i, e in enumerate(plan)
            if is_entry(e)
        ]
        if not found:
            raise RuntimeError(f"no entry of the last steps is to {event}")
        self._events += found

    # ---- the prefix cache on disk: each rank's has its own part of the same blocks

    def save(self, group: int, contents: Mapping[bytes, Any]) -> None:
        """All ranks save these blocks, or the snapshot, by key on disk."""
        numbers = [getattr(each, "number", each) for each in contents.values()]
        self._events.append(("save", _in_hex(contents), group, numbers))
        self.flush()  # no plan may follow for long

    def read(self, key: bytes) -> None:
        """All ranks read their run with this last key."""
        self.flush(key.hex())

    def found(self, keys: Sequence[bytes]) -> bool:
        """Whether all ranks have read a run with these keys. Waits for them."""
        self.ranks.send({"found": self.model})
        found = self.ranks.gather(_in_hex(keys), TIMEOUT_S)
        return all(each == found[0] for each in found)

    def place(self, group: int, blocks: Sequence[int], which: Sequence[int]) -> None:
        """All ranks enter blocks number `which` of the run that was read."""
        self._events.append(("place", blocks, group, which))

    def place_state(self, state: Sequence[mx.array]) -> Snapshot:
        """All ranks keep the recurrent state that was read."""
        placed = self._snapshot(state)
        self._events.append(("place_state", placed.number))
        return placed

    def flush(self, read: str = "") -> None:
        """Tell what happened, if anything, now instead of with the next plan, and which run to
        read."""
        if self._events or read:
            self.ranks.send({"events": self._take_events(), "of": self.model, "read": read})


def _in_hex(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


@dataclass(slots=True, eq=False)
class Follower:
    """Another rank's part: a runner that does what rank 0's does. `disk` is its prefix cache on
    disk, a cache.follower.DiskFollower."""

    runner: Runner
    ranks: Ranks
    disk: Any = None
    _highest: list[int] = field(default_factory=list)
    _held: dict[int, Any] = field(default_factory=dict)  # sequences and snapshots by number
    _steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS))

    def __post_init__(self) -> None:
        self.runner.grow_on_demand(lambda: self._highest)

    def step(self, message: Json) -> None:
        """Run one plan; its samples stay on the device."""
        self._highest = message["highest"]
        self.apply(message["events"])
        if list(self.runner.view.taps) != message["taps"]:
            # Else a step without samples would compute less than rank 0's.
            self.runner.tap(message["taps"])
        plan = [self._entry(Told(*fields)) for fields in message["plan"]]
        step = self.runner.forward(plan, self._steps[-1] if message["overlaps"] else None)
        self.runner.submit(step, self.runner.sample(step))
        if step.sampled:
            self.ranks.samples.append(step.sampled.tokens)
        for e in plan:
            e.state = e.seq.state
        self._steps.append(step)

    def found(self) -> None:
        """Tell which run was read."""
        self.ranks.gather(_in_hex(self.disk.keys()), TIMEOUT_S)

    def close(self, seconds: float) -> None:
        if self.disk:
            self.disk.close(seconds)

    def apply(self, events: Sequence[Sequence[Any]], read: str = "") -> None:
        """Do what rank 0 did between two plans, then start to read a run from disk, if any."""
        for event, what, *more in events:
            match event:
                case "drop":
                    del self._held[what]
                case "copy":
                    for group, _, target in what:
                        self._highest[group] = max(self._highest[group], target)
                    self.runner.copy_blocks(what)
                case "save":
                    self._save(what, *more)
                case "place":
                    self._place(what, *more)
                case "place_state":
                    self._held[what] = self.disk.state()
                case _:
                    self._change_state(event, what, *more)
        if read:
            self.disk.read(bytes.fromhex(read))

    def _save(self, keys: Sequence[str], group: int, numbers: Sequence[int]) -> None:
        contents: Sequence[Any] = numbers
        if group == STATE:
            contents = [self._held[number] for number in numbers]
        self.disk.save(group, dict(zip(map(bytes.fromhex, keys), contents, strict=True)))

    def _place(self, blocks: Sequence[int], group: int, which: Sequence[int]) -> None:
        self._highest[group] = max(self._highest[group], *blocks)  # no plan has told of them
        self.disk.place(blocks, group, which)

    def _change_state(self, event: str, number: int, step: int, index: int) -> None:
        """Keep or cut the recurrent state of an entry of the last steps."""
        made = self._steps[step]
        e = made.plan[index]
        if event == "keep":
            self._held[number] = own(e.state)
        else:
            self.runner.states.cut(made.recordings, e, number)

    def _entry(self, told: Told) -> Entry:
        if told.new:
            length, index, pooling, sampling = told.new
            prompt = tuple(told.tokens[:length])
            request = Request("", prompt, 1, Sampling(**sampling), pooling=pooling)
            self._held[told.number] = Seq(request, index)
        seq = self._held[told.number]
        seq.tokens += told.tokens
        if told.tables:
            seq.table, *seq.windows = told.tables
        if told.state != GOES_ON:
            seq.state = None if told.state == FRESH else self._held[told.state]
            seq.batch = None
        draft = told.draft
        if isinstance(draft, int):
            draft = self.ranks.share(mx.zeros(draft, mx.int32))
        e = Entry(seq, *told.rows)
        e.draft = Draft(draft)
        e.masks = list(map(bytes.fromhex, told.masks))
        return e
