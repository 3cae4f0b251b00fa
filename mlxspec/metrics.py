"""What /metrics shows: the engine's counters from its last snapshot, and the requests' times.

Rule: a registry of our own, nothing global; reading costs the engine nothing.
"""

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mlxspec.types import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
POSITIONS = 16  # in a draft that are told apart

COUNTERS = {
    "steps": "Steps of the engine.",
    "rounds": "Rounds, one per sequence and step that brought it tokens.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Sequences that had to give up their KV blocks.",
    "disk_read_bytes": "Bytes of the prompt cache read back from disk.",
    "disk_written_bytes": "Bytes of the prompt cache written to disk.",
    "disk_runs_found": "Files of the prompt cache that were brought back.",
    "disk_runs_damaged": "Files of the prompt cache that did not pass their check.",
}
GAUGES = {
    "running": "Sequences that share the steps now.",
    "waiting": "Sequences that wait to run.",
    "prompt_left": "Prompt tokens of running and waiting requests that are still to be computed.",
    "states": "States of recurrent layers that are kept for later prompts.",
    "step_seconds": "Duration of the last step.",
}
OWN = {  # of the process, whichever models are loaded
    "memory_pressure": "How short memory is: 0 normal, 1 short, 2 very short.",
    "footprint_bytes": "Memory that the process makes the machine hold.",
    "mlx_active_bytes": "Memory in MLX's arrays.",
    "mlx_cache_bytes": "Memory of freed buffers that MLX keeps.",
    "live_arrays": "Arrays that Python holds; buffers are more.",
    "disk_bytes": "Size of the prompt cache on disk.",
}


@dataclass(slots=True, eq=False)
class Metrics:
    """Counters and histograms of one server, by model. `models` gives the engine's snapshot when
    somebody looks."""

    models: Callable[[], Mapping[str, Served]]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    first_token: Histogram = field(init=False)
    between_tokens: Histogram = field(init=False)
    duration: Histogram = field(init=False)
    refused: Counter = field(init=False)

    def __post_init__(self) -> None:
        def times(name: str, text: str, buckets: Sequence[float], *more: str) -> Histogram:
            labels = ("model", *more)
            return Histogram(
                f"mlxspec_{name}", text, labels, buckets=buckets, registry=self.registry
            )

        self.first_token = times("first_token_seconds", "From arrival to the first token.", SECONDS)
        self.between_tokens = times("between_tokens_seconds", "From token to token.", GAPS)
        ended = "From arrival to the end, by how the request ended."
        self.duration = times("request_seconds", ended, SECONDS, "finish")
        told = "Requests answered with an error, by status."
        self.refused = Counter("mlxspec_refused", told, ("status",), registry=self.registry)
        self.registry.register(self)

    def between(self, model: str, seconds: float, tokens: int) -> None:
        """`tokens` came together, `seconds` after those before them."""
        for _ in range(tokens):
            self.between_tokens.labels(model).observe(seconds / tokens)

    def refusals(self) -> dict[str, int]:
        """Requests answered with an error, by status."""
        [family] = self.refused.collect()
        return {
            s.labels["status"]: int(s.value) for s in family.samples if s.name.endswith("_total")
        }

    def collect(self) -> Iterator[Metric]:
        """The engine's part; called by the registry."""
        now = self.models()
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in table.items():
                family = kind(f"mlxspec_{name}", text, labels=("model",))
                for model, served in now.items():
                    family.add_metric((model,), getattr(served.stats, name))
                yield family
        for name, text in OWN.items():
            most = max((getattr(served.stats, name) for served in now.values()), default=0)
            yield GaugeMetricFamily(f"mlxspec_{name}", text, value=most)
        blocks = GaugeMetricFamily(
            "mlxspec_kv_blocks", "KV blocks by state.", labels=("model", "state")
        )
        loaded = GaugeMetricFamily("mlxspec_model_loaded", "1: it is in memory.", labels=("model",))
        parked = CounterMetricFamily(
            "mlxspec_speculation_parked_seconds",
            "Time in which something was decoded and nothing was drafted.",
            labels=("model",),
        )
        loads = CounterMetricFamily(
            "mlxspec_model_loads", "How often it was loaded.", labels=("model",)
        )
        for model, served in now.items():
            for state in ("used", "cached", "free"):
                blocks.add_metric((model, state), getattr(served.stats, f"blocks_{state}"))
            parked.add_metric((model,), served.stats.parked_seconds)
            loaded.add_metric((model,), served.status == "loaded")
            loads.add_metric((model,), served.loads)
        yield from (blocks, loaded, loads, parked, *_drafts(now), _depths(now))

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)


def _drafts(now: Mapping[str, Served]) -> Iterator[Metric]:
    """Drafted and accepted tokens by source and position in the draft."""
    drafted, accepted = Count[tuple[str, str, str]](), Count[tuple[str, str, str]]()
    for model, served in now.items():
        for source, position, tried, kept in served.stats.drafts:
            key = model, source, str(position) if position <= POSITIONS else f"{POSITIONS + 1}+"
            drafted[key] += tried
            accepted[key] += kept
    for name, text, counts in (
        ("drafted", "Tokens drafted.", drafted),
        ("accepted", "Drafted tokens that were accepted.", accepted),
    ):
        family = CounterMetricFamily(
            f"mlxspec_{name}_tokens", text, labels=("model", "source", "position")
        )
        for key, count in counts.items():
            family.add_metric(key, count)
        yield family


def _depths(now: Mapping[str, Served]) -> Metric:
    """Rounds by how many tokens were drafted for them."""
    text = "Tokens drafted per round; 0 where none were."
    family = HistogramMetricFamily("mlxspec_draft_depth", text, labels=("model",))
    for model, served in now.items():
        rounds = served.stats.depths
        buckets = [(str(float(le)), sum(n for depth, n in rounds if depth <= le)) for le in DEPTHS]
        buckets.append(("+Inf", sum(n for _, n in rounds)))
        family.add_metric((model,), buckets, sum(depth * n for depth, n in rounds))
    return family
