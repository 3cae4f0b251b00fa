"""What /metrics shows: the engine's counters from its last snapshot, and the requests' times.

Rule: a registry of our own, nothing global; reading costs the engine nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlxspec.types import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)

COUNTERS = {
    "steps": "Steps of the engine.",
    "rounds": "Sampled rounds, one per sequence and step.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "drafted_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "preemptions": "Sequences that had to give up their KV blocks.",
}
GAUGES = {
    "running": "Sequences that share the steps now.",
    "waiting": "Sequences that wait to run.",
    "step_seconds": "Duration of the last step.",
}


@dataclass(slots=True, eq=False)
class Metrics:
    """Counters and histograms of one server. `stats` gives the engine's snapshot when somebody looks."""

    stats: Callable[[], Stats]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    first_token: Histogram = field(init=False)
    between_tokens: Histogram = field(init=False)
    duration: Histogram = field(init=False)
    refused: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.first_token = Histogram(
            "mlxspec_first_token_seconds",
            "From arrival to the first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "mlxspec_between_tokens_seconds", "From token to token.", buckets=GAPS, registry=self.registry
        )
        self.duration = Histogram(
            "mlxspec_request_seconds",
            "From arrival to the end, by how the request ended.",
            ("finish",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "mlxspec_refused",
            "Requests answered with an error, by status.",
            ("status",),
            registry=self.registry,
        )
        self.registry.register(self)

    def between(self, seconds: float, tokens: int) -> None:
        """`tokens` came together, `seconds` after those before them."""
        for _ in range(tokens):
            self.between_tokens.observe(seconds / tokens)

    def collect(self) -> Iterator[Metric]:
        """The engine's part; called by the registry."""
        now = self.stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"mlxspec_{name}", text, value=getattr(now, name))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"mlxspec_{name}", text, value=getattr(now, name))
        blocks = GaugeMetricFamily("mlxspec_kv_blocks", "KV blocks by state.", labels=("state",))
        for state in ("used", "cached", "free"):
            blocks.add_metric((state,), getattr(now, f"blocks_{state}"))
        yield blocks

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)
