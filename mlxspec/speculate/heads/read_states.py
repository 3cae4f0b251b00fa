"""How far a head has read each sequence, and the target's hidden states that it has yet to read.

Rule: what others may share or the disk may save is read as soon as it stands: prompts, full blocks,
what ends. A sequence whose blocks went to another starts again at what the prefix cache has of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.core import array as Array

from mlxspec.model.batch import Step, build_inputs, starts_of
from mlxspec.speculate.chain import MAX_LAG
from mlxspec.speculate.heads.model import Rows
from mlxspec.types import Accepted, Draft, Entry, Plan, Seq


@dataclass(slots=True)
class ReadState:
    """One sequence: its rows in the slots before `read` are right, and `hidden` are the hidden
    states [n, D] of the rows from there on."""

    read: int = 0
    hidden: list[Array] = field(default_factory=list)
    table: list[int] | None = None  # None: it has no blocks, or they may be another's
    step: Step | None = None  # in flight; its rows were read when the next step was drafted


@dataclass(slots=True)
class ReadStates:
    """The row that is made of the hidden state at position p lies in slot p + `slot_offset`, 0 or
    1. `before(entry)`: the hidden states before a sequence's first row, where these are known."""

    slot_offset: int
    block_size: int
    before: Callable[[Entry], list[Array]] = lambda entry: []
    live: dict[Seq, ReadState] = field(default_factory=dict)

    def place(self, plan: Plan) -> None:
        """Find the sequences that have new blocks. Before each step's drafts."""
        for seq, live in self.live.items():
            if live.table is not seq.table:  # its blocks may be another's now
                live.table = None
                live.hidden = []
        for e in plan:
            live = self.live[e.seq]
            if live.table is None:
                live.table = e.seq.table
                live.step = None
                live.hidden = self.before(e)
                live.read = e.start + self.slot_offset - len(live.hidden)

    def unread(
        self,
        drafting: Plan,
        previous: Step | None,
        hidden: Array,
    ) -> Rows:
        """The rows of these sequences that were not read, up to their newest tokens, which are read
        now. `hidden` [T, D] are those of a step in flight."""
        starts = starts_of(previous.plan if previous else ())
        flying = {e.seq: hidden[n : n + e.rows] for e, n in starts.items()}
        runs = []
        for e in drafting:
            live = self.live[e.seq]
            end = e.start + e.count - 1 + self.slot_offset
            pending = e.pending and self.slot_offset > 0
            run = Entry(e.seq, live.read, end - live.read, True, pending=pending)
            states = live.hidden
            if e.seq in flying:
                live.step = previous
                states = [*states, flying[e.seq]]
            else:
                live.read = end
                live.hidden = []
            if e.inflight_drafts and previous and previous.sampled:
                first = previous.first_row[e.seq] + self.slot_offset
                run.draft = Draft(previous.sampled.tokens[first : first + e.inflight_drafts])
            if states:
                runs.append((run, joined(states)))
        return _rows_of(runs, previous)

    def observe(
        self,
        step: Step,
        hidden: Array,
        accepted: Sequence[Accepted],
    ) -> Rows:
        """Keep those of a step's hidden states [T, D] that stand. Returns the rows to read now;
        others are read once there are MAX_LAG."""
        first = starts_of(step.plan)
        due = []
        for e, new in zip(step.plan, accepted, strict=True):
            live = self.live[e.seq]
            ends = new.finish is not None and e.seq.finish == new.finish
            if live.table is None or not (ends or live.table is e.seq.table):
                continue
            end = e.start + e.count + new.drafts
            if live.step is step:
                live.step = None
                live.hidden = []
                live.read = end + self.slot_offset
            else:
                rows = hidden[first[e] : first[e] + end - e.start]
                live.hidden.append(rows + 0 if len(hidden) > MAX_LAG else rows)  # a slice pins all
            lag = end - live.read
            fills = live.read // self.block_size < end // self.block_size
            shared = ends or e.start < e.seq.prompt_len or fills
            if lag > 0 and (shared or e.count > 1 or lag >= MAX_LAG):
                owner = Seq(e.seq.request, tokens=e.seq.tokens, table=live.table)
                rows = joined(live.hidden)
                due.append((Entry(owner, live.read, lag, False), rows[:lag]))
                live.read = end
                # A slice would pin the step.
                live.hidden = [rows[lag:] + 0] if self.slot_offset else []
                mx.async_eval(live.hidden)
            if ends:
                live.table = None  # its blocks may be another's from the next plan on
        return _rows_of(due, None)


def _rows_of(
    runs: Sequence[tuple[Entry, Array]],
    previous: Step | None,
) -> Rows:
    """Rows with their hidden states, and the tokens there; those in flight are taken lazily."""
    entries = [e for e, _ in runs]
    return Rows(entries, build_inputs(entries, previous, None), joined([rows for _, rows in runs]))


def joined(
    parts: Sequence[Array],
    axis: int = 0,
) -> Array:
    """The parts in one; [0, 0] of none."""
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(list(parts), axis) if parts else mx.zeros((0, 0))
