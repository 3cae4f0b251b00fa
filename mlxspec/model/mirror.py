"""Plans for the other ranks: rank 0's runner tells each step to theirs, which run it as well.

Rule: a follower decides nothing. It has a copy of each sequence as far as a forward needs it, under
the same block ids, and samples the same tokens, since noise is keyed by seed and position.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from mlxspec.model.batch import Step
from mlxspec.model.parallel import Ranks
from mlxspec.model.recurrent import own
from mlxspec.model.runner import Runner
from mlxspec.types import Draft, Entry, Json, Plan, Request, Sampling, Seq, Tap

STEPS = 3  # whose states may still be kept or cut: in flight, being read, and one to spare
GOES_ON, FRESH = 0, -1  # where a sequence's recurrent state comes from, else a snapshot's number


class Snapshot(list[mx.array]):
    """A recurrent state that the prefix cache keeps, under a number that all ranks know."""

    number: int


class Mirror:
    """Rank 0's part, for the `model` of that name. What happens between two plans is told with the
    next one."""

    def __init__(self, ranks: Ranks, model: str) -> None:
        self.ranks = ranks
        self.model = model
        self.copies: list[tuple[int, int, int]] = []
        self._events: list[Sequence[Any]] = []
        # Number, tokens and tables of each sequence that the followers know.
        self._told = WeakKeyDictionary[Seq, tuple[int, int, list[list[int]]]]()
        self._steps = deque[Plan](maxlen=STEPS)
        self._numbers = count(1)

    def tell(self, plan: Plan, overlaps: bool, highest: Sequence[int], taps: Sequence[Tap]) -> None:
        """Let the followers run a plan, `overlaps`: after the step in flight. What a drafter left
        on the device follows on the device."""
        entries = list(map(self._entry, plan))
        message = {"step": self.model, "plan": [overlaps, highest, taps, self.copies, entries]}
        events = self._events[:]
        del self._events[: len(events)]  # what is dropped while this is sent is told next time
        self.ranks.send(message | {"events": events})
        self.copies = []
        self._steps.append(plan)
        for e in plan:
            if isinstance(e.draft.tokens, mx.array):
                self.ranks.share(e.draft.tokens)

    def _entry(self, e: Entry) -> list[Any]:
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
        changed = tables if tables != before else None
        state = FRESH
        if seq.state is not None:
            state = getattr(seq.state, "number", GOES_ON)
        rows = e.start, e.count, e.samples, e.depth, e.pending, e.inflight_drafts
        draft = e.draft.tokens
        draft = len(draft) if isinstance(draft, mx.array) else [*draft]
        masks = [mask.hex() for mask in e.masks]
        return [number, new, seq.tokens[known:], changed, state, rows, draft, masks]

    def keep(self, state: Any) -> Snapshot:
        """A copy of an entry's recurrent state for the prefix cache, kept by all ranks."""
        kept = Snapshot(own(state))
        kept.number = next(self._numbers)
        self._note("keep", kept.number, lambda e: e.state is state)
        finalize(kept, self._events.append, ("drop", kept.number))
        return kept

    def cut(self, entry: Entry, rows: int) -> None:
        """An entry's state is brought to that after its first `rows` rows."""
        self._note("cut", rows, lambda e: e is entry)

    def _note(self, event: str, number: int, is_entry: Callable[[Entry], bool]) -> None:
        """Tell what happened to an entry of the last steps."""
        for n, plan in enumerate(self._steps, -len(self._steps)):
            for i, e in enumerate(plan):
                if is_entry(e):
                    self._events.append((event, number, n, i))


@dataclass(slots=True, eq=False)
class Follower:
    """Another rank's part: a runner that does what rank 0's does."""

    runner: Runner
    ranks: Ranks
    _highest: list[int] = field(default_factory=list)
    _held: dict[int, Any] = field(default_factory=dict)  # sequences and snapshots by number
    _steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS))

    def __post_init__(self) -> None:
        self.runner.grow_on_demand(lambda: self._highest)

    def step(self, message: Json) -> None:
        """Run one plan; its samples stay on the device."""
        for event in message["events"]:
            self._do(*event)
        overlaps, self._highest, taps, copies, entries = message["plan"]
        if list(self.runner.view.taps) != taps:
            self.runner.tap(taps)  # else a step without samples would compute less than rank 0's
        self.runner.copy_blocks(copies)
        plan = list(map(self._entry, entries))
        step = self.runner.forward(plan, self._steps[-1] if overlaps else None)
        self.runner.submit(step, self.runner.sample(step))
        if step.sampled:
            self.ranks.samples.append(step.sampled.tokens)
        for e in plan:
            e.state = e.seq.state
        self._steps.append(step)

    def _entry(self, told: list[Any]) -> Entry:
        number, new, tokens, tables, state, rows, draft, masks = told
        if new:
            length, index, pooling, sampling = new
            prompt = tuple(tokens[:length])
            request = Request("", prompt, 1, Sampling(**sampling), pooling=pooling)
            self._held[number] = Seq(request, index)
        seq = self._held[number]
        seq.tokens += tokens
        if tables:
            seq.table, *seq.windows = tables
        if state != GOES_ON:
            seq.state = self._held.get(state)
            seq.batch = None
        if isinstance(draft, int):
            draft = self.ranks.share(mx.zeros(draft, mx.int32))
        e = Entry(seq, *rows)
        e.draft = Draft(draft)
        e.masks = list(map(bytes.fromhex, masks))
        return e

    def _do(self, event: str, number: int, step: int = 0, entry: int = 0) -> None:
        if event == "drop":
            del self._held[number]
            return
        made = self._steps[step]
        e = made.plan[entry]
        if event == "keep":
            self._held[number] = own(e.state)
        else:
            self.runner.states.cut(made.recordings, e, number)
