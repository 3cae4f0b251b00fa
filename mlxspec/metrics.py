"""What /metrics shows: the engine's counters as of its last snapshot, and the requests' times.

Rule: a registry of our own, no global one; reading costs the engine nothing.
"""

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

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
POSITIONS = 16  # positions in a draft with a label of their own
MODEL = ("model",)
DRAFTS = {"drafted": "Tokens drafted.", "accepted": "Drafted tokens that were accepted."}

# Of each model: names in `Stats`.
COUNTERS = {
    "steps": "Steps of the engine.",
    "rounds": "Rounds, one per sequence and step that brought it tokens.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Sequences that had to give up their KV blocks.",
    "disk_read_bytes": "Bytes of the prompt cache read from disk.",
    "disk_written_bytes": "Bytes of the prompt cache written to disk.",
    "disk_runs_found": "Files of the prompt cache that were loaded.",
    "disk_runs_damaged": "Files of the prompt cache that did not pass their check.",
}
GAUGES = {
    "running": "Sequences that share the steps now.",
    "waiting": "Sequences that wait to run.",
    "prompt_left": "Prompt tokens of running and waiting requests that are still to be computed.",
    "states": "Snapshots of recurrent layers kept for later prompts.",
    "step_seconds": "Duration of the last step.",
}
# Of the process, whichever models are loaded: names in `Stats`.
PROCESS = {
    "memory_pressure": "How short memory is: 0 normal, 1 short, 2 very short.",
    "footprint_bytes": "Memory of the process, as the system counts it.",
    "mlx_active_bytes": "Memory in MLX's arrays.",
    "mlx_cache_bytes": "Memory of freed buffers that MLX keeps.",
    "live_arrays": "Arrays that Python holds; buffers are more.",
    "disk_bytes": "Size of the prompt cache on disk.",
}


@dataclass(slots=True, eq=False)
class Metrics:
    """Counters and histograms of one server, by model. `models` returns the newest snapshot."""

    models: Callable[[], Mapping[str, Served]]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    first_token: Histogram = field(init=False)
    between_tokens: Histogram = field(init=False)
    duration: Histogram = field(init=False)
    refused: Counter = field(init=False)

    def __post_init__(self) -> None:
        histogram = partial(Histogram, registry=self.registry)
        self.first_token = histogram(
            "mlxspec_first_token_seconds",
            "From arrival to the first token.",
            MODEL,
            buckets=SECONDS,
        )
        self.between_tokens = histogram(
            "mlxspec_between_tokens_seconds", "From token to token.", MODEL, buckets=GAPS
        )
        self.duration = histogram(
            "mlxspec_request_seconds",
            "From arrival to the end, by how the request ended.",
            ("model", "finish"),
            buckets=SECONDS,
        )
        text = "Requests answered with an error, by status."
        self.refused = Counter("mlxspec_refused", text, ("status",), registry=self.registry)
        self.registry.register(self)

    def between(self, model: str, seconds: float, tokens: int) -> None:
        """Record `tokens` that came together, `seconds` after those before them."""
        for _ in range(tokens):
            self.between_tokens.labels(model).observe(seconds / tokens)

    def refusals(self) -> dict[str, int]:
        """Requests answered with an error, by status."""
        [family] = self.refused.collect()
        totals = [sample for sample in family.samples if sample.name.endswith("_total")]
        return {sample.labels["status"]: int(sample.value) for sample in totals}

    def collect(self) -> Iterator[Metric]:
        """The engine's part; the registry calls it."""
        served = self.models()
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in table.items():
                family = kind(f"mlxspec_{name}", text, labels=MODEL)
                for model, one in served.items():
                    family.add_metric((model,), getattr(one.stats, name))
                yield family
        for name, text in PROCESS.items():
            value = max((getattr(one.stats, name) for one in served.values()), default=0)
            yield GaugeMetricFamily(f"mlxspec_{name}", text, value=value)
        text = "KV blocks by state."
        blocks = GaugeMetricFamily("mlxspec_kv_blocks", text, labels=("model", "state"))
        text = "1: the model is in memory."
        loaded = GaugeMetricFamily("mlxspec_model_loaded", text, labels=MODEL)
        text = "How often the model was loaded."
        loads = CounterMetricFamily("mlxspec_model_loads", text, labels=MODEL)
        text = "Time in which tokens were decoded and none were drafted."
        parked = CounterMetricFamily("mlxspec_speculation_parked_seconds", text, labels=MODEL)
        for model, one in served.items():
            for state in ("used", "cached", "free"):
                blocks.add_metric((model, state), getattr(one.stats, f"blocks_{state}"))
            loaded.add_metric((model,), one.status == "loaded")
            loads.add_metric((model,), one.loads)
            parked.add_metric((model,), one.stats.parked_seconds)
        yield from (blocks, loaded, loads, parked, *_drafts(served), _depths(served))

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)


def _drafts(served: Mapping[str, Served]) -> Iterator[Metric]:
    """Drafted and accepted tokens by source and position in the draft."""
    counts = Count[tuple[str, str, str, str]]()
    for model, one in served.items():
        for source, position, drafted, accepted in one.stats.drafts:
            label = str(position) if position <= POSITIONS else f"{POSITIONS + 1}+"
            counts["drafted", model, source, label] += drafted
            counts["accepted", model, source, label] += accepted
    for name, text in DRAFTS.items():
        labels = ("model", "source", "position")
        family = CounterMetricFamily(f"mlxspec_{name}_tokens", text, labels=labels)
        for (which, *key), count in counts.items():
            if which == name:
                family.add_metric(key, count)
        yield family


def _depths(served: Mapping[str, Served]) -> Metric:
    """Rounds by the number of tokens drafted for them."""
    text = "Tokens drafted per round; 0 where none were."
    family = HistogramMetricFamily("mlxspec_draft_depth", text, labels=("model",))
    for model, one in served.items():
        rounds = one.stats.depths
        buckets = [(str(float(le)), sum(n for depth, n in rounds if depth <= le)) for le in DEPTHS]
        buckets.append(("+Inf", sum(n for _, n in rounds)))
        family.add_metric((model,), buckets, sum(depth * n for depth, n in rounds))
    return family
