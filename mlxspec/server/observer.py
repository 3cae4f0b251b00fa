"""What is told of an answer: its clock, the metrics, the page's row, the log line, the record.

Rule: each answer is counted and logged once, however it ends. No text of it is kept here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from starlette.requests import ClientDisconnect

from mlxspec import log
from mlxspec.server import stream
from mlxspec.server.state import Row, TextModel
from mlxspec.server.stream import Choice, Choices, Usage
from mlxspec.types import Output


@dataclass(slots=True)
class Observer:
    """Watches the choices of one response, grouped by request. Times are seconds since the request
    `arrived`."""

    model: TextModel
    id: str
    choices: Choices
    arrived: float
    first: float = 0.0  # time of the first token
    last: dict[int, float] = field(default_factory=dict)  # time of the last token, by choice

    @contextmanager
    def watch(self) -> Iterator[None]:
        """List the answer while it is made, then count and log it. A client's leaving ends it."""
        server = self.model.server
        server.live[self.id] = self.row
        outcomes: list[str] = []
        try:
            yield
        except ClientDisconnect:
            pass
        except Exception:  # it could not be written
            outcomes = ["error"]
            raise
        finally:
            del server.live[self.id]
            # By the alphabet, so that failures come first.
            self._ended(outcomes or sorted({each.finish or "gone" for each in self.choices}))

    def saw(self, choice: Choice, output: Output) -> None:
        """Note the time of an output's tokens, which came together."""
        metrics, name = self.model.server.metrics, self.model.name
        if not output.tokens:
            return
        now = time.monotonic() - self.arrived
        if not self.first:
            self.first = now
            metrics.first_token.labels(name).observe(now)
        elif choice.index in self.last:
            gap = (now - self.last[choice.index]) / len(output.tokens)
            for _ in output.tokens:
                metrics.between_tokens.labels(name).observe(gap)
        self.last[choice.index] = now

    def usage(self) -> Usage:
        """The figures of this moment. The engine's are of its last step, and only needed until the
        first token."""
        usage = stream.usage(self.choices)
        usage.first, usage.seconds = self.first, time.monotonic() - self.arrived
        if self.first:
            if (seconds := max(self.last.values()) - self.first) > 0:
                usage.rate = (usage.generated - len(self.last)) / seconds
            return usage
        requests = {choice.request.id for choice in self.choices}
        # The engine lists each running choice in order; the first one has the prefix match.
        running = reversed(self.model.served.stats.running_requests)
        prompts = {id: counts for id, *counts in running if id in requests}
        if prompts:
            usage.cached, usage.read = map(sum, zip(*prompts.values(), strict=True))
        return usage

    def row(self, outcome: str = "") -> Row:
        """The figures for the page; `outcome` is "" until the end."""
        head = {"id": self.id, "model": self.model.name, "outcome": outcome}
        return head | asdict(self.usage())

    def _ended(self, outcomes: list[str]) -> None:
        server, name = self.model.server, self.model.name
        for choice in self.choices:
            if server.recorder and choice.finish in ("stop", "length"):
                server.recorder.add(name, choice.request.prompt, choice.ids)
        usage, outcome = self.usage(), ",".join(outcomes)
        server.finished.appendleft(self.row(outcome))
        server.metrics.duration.labels(name, outcomes[0]).observe(usage.seconds)
        log.info("%s: %s, %s", self.id, _summary(usage), outcome)


def _summary(usage: Usage) -> str:
    """The figures of a finished answer, for the log."""
    text = f"{usage.prompt} in, {usage.cached} cached, {usage.generated} out"
    when = f"{usage.first or usage.seconds:.2f} s"
    text += f", {'first' if usage.first else 'none'} after {when}"
    text += f", {usage.rate:.1f} tokens/s, {usage.rounds} rounds"
    if usage.drafted:
        text += f", {usage.generated / usage.rounds:.1f} tok/round"
        text += f", {usage.kept / usage.drafted:.0%} of drafts kept"
    return text
