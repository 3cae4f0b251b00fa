"""How far a head has read each sequence, and the target's hidden states that it has yet to read.

Rule: what others may share or the disk may save is read as soon as it stands: prompts, full blocks,
what ends. A sequence whose blocks went to another starts again at what the prefix cache has of it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxspec.model.batch import Step, starts_of
from mlxspec.speculate import Proposals
from mlxspec.speculate.chain import MAX_LAG, plain_sampling, sampling_of
from mlxspec.speculate.controller import Proposal
from mlxspec.types import Accepted, Entry, Plan, Request, Sampling, Seq, Tap


@dataclass(slots=True)
class Follower:
    """One sequence: its rows in the slots before `read` are right, and `hidden` are the hidden
    states [n, D] of the rows from there on."""

    sampling: Sampling
    read: int = 0
    hidden: list[mx.array] = field(default_factory=list)
    table: list[int] | None = None  # None: it has no blocks, or they may be another's
    step: Step | None = None  # in flight; its rows were read when the next step was drafted


@dataclass(slots=True)
class Followers:
    """The row that is made of the hidden state at position p lies in slot p + `lead`, 0 or 1.
    `before(entry)`: the hidden states before a sequence's first row, where these are known."""

    lead: int
    block_size: int
    before: Callable[[Entry], list[mx.array]] = lambda entry: []
    live: dict[Seq, Follower] = field(default_factory=dict)

    def begin(self, seq: Seq) -> None:
        self.live[seq] = Follower(plain_sampling(seq))

    def end(self, seq: Seq) -> None:
        del self.live[seq]

    def place(self, plan: Plan) -> None:
        """Find the sequences that have new blocks. Before each step's drafts."""
        for seq, live in self.live.items():
            if live.table is not seq.table:  # its blocks may be another's now
                live.table, live.hidden = None, []
        for e in plan:
            live = self.live[e.seq]
            if live.table is None:
                live.table, live.step = e.seq.table, None
                live.hidden = self.before(e)
                live.read = e.start + self.lead - len(live.hidden)

    def samplings(self, drafting: Plan, chosen: Proposals) -> dict[Seq, Sampling]:
        """How the drafts of these entries are drawn."""
        return {e.seq: sampling_of(self.live[e.seq].sampling, chosen[e.seq]) for e in drafting}

    def take(self, e: Entry, flying: "Flying") -> tuple[int, list[mx.array]]:
        """The first slot that a sequence has not read, and the hidden states from there on to its
        newest token, which are read now."""
        live = self.live[e.seq]
        start, hidden = live.read, live.hidden
        if e.seq in flying.entries:
            live.step = flying.step
            hidden = [*hidden, flying.hidden_of(e.seq)]
        else:
            live.read, live.hidden = e.start + e.count - 1 + self.lead, []
        return start, hidden

    def observe(
        self, step: Step, hidden: mx.array, accepted: Sequence[Accepted]
    ) -> list[tuple[Entry, mx.array]]:
        """Keep those of a step's hidden states [T, D] that stand. Returns the rows to read now,
        with their hidden states; others are read once there are MAX_LAG."""
        first = starts_of(step.plan)
        due = []
        for e, new in zip(step.plan, accepted, strict=True):
            live = self.live.get(e.seq)
            ends = new.finish is not None and e.seq.finish == new.finish
            if live is None or live.table is None or not (ends or live.table is e.seq.table):
                continue
            end = e.start + e.count + new.drafts
            if live.step is step:
                live.step, live.hidden, live.read = None, [], end + self.lead
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
                live.hidden = [rows[lag:] + 0] if self.lead else []  # a slice would pin the step
                mx.async_eval(live.hidden)
            if ends:
                live.table = None  # its blocks may be another's from the next plan on
        return due


class Flying:
    """The step in flight, if there is one: what it brings for each of its sequences. `hidden`
    [T, D] are its hidden states. Gathers the tokens of a pass, those that it samples among them."""

    def __init__(self, step: Step | None, hidden: mx.array) -> None:
        self.step = step
        self._hidden = hidden
        self._first = {} if step is None else starts_of(step.plan)
        self.entries = {e.seq: e for e in self._first}
        self._host: list[int] = []
        self._places: list[int] = []  # of each token: among the host's, or -1 - its sampled row

    def hidden_of(self, seq: Seq) -> mx.array:
        e = self.entries[seq]
        row = self._first[e]
        return self._hidden[row : row + e.rows]

    def add_tokens(self, seq: Seq, start: int) -> None:
        """A sequence's tokens from position `start` on, with all that the step samples."""
        tokens = seq.tokens[start:]
        self._places += range(len(self._host), len(self._host) + len(tokens))
        self._host += tokens
        e = self.entries.get(seq)
        if e is not None and e.samples and self.step is not None:
            first = self.step.first_row[seq]
            self._places += [-1 - (first + i) for i in range(e.sampled)]

    def tokens(self) -> mx.array:
        """int32 [T], all that were added."""
        known = mx.array(self._host, mx.int32)
        if min(self._places) >= 0:
            return known
        assert self.step is not None and self.step.sampled is not None
        sampled = self.step.sampled.tokens
        at = [p + sampled.size if p >= 0 else -1 - p for p in self._places]
        if at == list(range(sampled.size)):
            return sampled
        return mx.concatenate([sampled, known])[mx.array(at)]


def joined(hidden: Sequence[mx.array]) -> mx.array:
    """[T, D] of several."""
    return hidden[0] if len(hidden) == 1 else mx.concatenate(list(hidden))


def taps_of(step: Step | None, taps: Sequence[Tap]) -> mx.array:
    """A step's hidden states side by side, [T, taps * D]; without a step [0, 0]."""
    if step is None:
        return mx.zeros((0, 0))
    parts = [step.taps[tap] for tap in taps]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def time_draft(
    drafter: Any,
    followers: Followers,
    table: list[int],
    depth: int,
    hidden: mx.array,
) -> float:
    """Seconds that a draft of so many tokens takes, in unused blocks, behind a row of `hidden`
    [1, D]."""
    seq = Seq(Request("measure", (0,), 1), table=table)
    context = min(64, len(table) * followers.block_size - depth - 1)
    seq.tokens = [0 for _ in range(context + 1)]
    followers.begin(seq)
    live = followers.live[seq]
    live.read, live.hidden, live.table = context - 1 + followers.lead, [hidden], table
    entry = Entry(seq, context, 1, True, depth=depth)
    began = time.perf_counter()
    drafter.draft([entry], None, {seq: Proposal(drafter.name)})
    mx.eval(entry.draft.tokens)
    followers.end(seq)
    return time.perf_counter() - began
