"""Plans for the other ranks: rank 0's runner tells each step to theirs, which run it as well.

Rule: a follower decides nothing. It has a copy of each sequence as far as a forward needs it, under
the same block ids, and samples the same tokens, since noise is keyed by seed and position.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from mlxspec.model.batch import Step
from mlxspec.model.parallel import Ranks
from mlxspec.model.recurrent import own
from mlxspec.model.runner import Runner
from mlxspec.types import Draft, Entry, Json, Plan, Request, Sampling, Seq, Tap

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
        self.copies: list[tuple[int, int, int]] = []
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
            "copies": self.copies,
            "events": self._events[:],
        }
        del self._events[: len(message["events"])]  # others may be dropped while this is sent
        self.ranks.send(message)
        self.copies = []
        self._steps.append(plan)
        for e in plan:
            if isinstance(e.draft.tokens, mx.array):
                self.ranks.share(e.draft.tokens)

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
            [mask.hex() for mask in e.masks],
        )

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
        for event, number, *at in message["events"]:
            if event == "drop":
                del self._held[number]
                continue
            made = self._steps[at[0]]
            e = made.plan[at[1]]
            if event == "keep":
                self._held[number] = own(e.state)
            else:
                self.runner.states.cut(made.recordings, e, number)
        self._highest = message["highest"]
        if list(self.runner.view.taps) != message["taps"]:
            # Else a step without samples would compute less than rank 0's.
            self.runner.tap(message["taps"])
        self.runner.copy_blocks(message["copies"])
        plan = [self._entry(Told(*fields)) for fields in message["plan"]]
        step = self.runner.forward(plan, self._steps[-1] if message["overlaps"] else None)
        self.runner.submit(step, self.runner.sample(step))
        if step.sampled:
            self.ranks.samples.append(step.sampled.tokens)
        for e in plan:
            e.state = e.seq.state
        self._steps.append(step)

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
            seq.state = self._held.get(told.state)
            seq.batch = None
        draft = told.draft
        if isinstance(draft, int):
            draft = self.ranks.share(mx.zeros(draft, mx.int32))
        e = Entry(seq, *told.rows)
        e.draft = Draft(draft)
        e.masks = list(map(bytes.fromhex, told.masks))
        return e
