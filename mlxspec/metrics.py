"""The /metrics endpoint: the engine's counters as of its last snapshot, and request timings.

Rule: our own registry, not the global one; reading costs the engine nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric

from mlxspec.types import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MODEL = ("model",)

# Per model: names in `Stats`, and others that `_samples` adds.
COUNTERS = {
    "steps": "Steps of the engine.",
    "rounds": "Rounds, one per sequence and step that produced tokens.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Preempted sequences.",
    "loops": "Answers, or their reasoning, that repeated themselves and were ended.",
    "disk_read_bytes": "Bytes of the prefix cache read from disk.",
    "disk_written_bytes": "Bytes of the prefix cache written to disk.",
    "disk_runs_found": "Files of the prefix cache that were loaded.",
    "disk_runs_damaged": "Files of the prefix cache that did not pass their check.",
    "speculation_parked_seconds": "Time in which tokens were decoded and none were drafted.",
    "model_loads": "How often the model was loaded.",
    "drafted_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "refused": "Requests answered with an error, by status.",
}
GAUGES = {
    "running": "Running sequences.",
    "waiting": "Waiting sequences.",
    "prompt_left": "Prompt tokens of running and waiting requests that are still to be computed.",
    "states": "Snapshots of recurrent layers kept for later prompts.",
    "step_seconds": "Duration of the last step.",
    "model_loaded": "1: the model is in memory.",
    "kv_blocks": "KV blocks by state.",
    "exact_rows": "Rows of one sequence in a step up to which a row's logits depend on no other.",
}
# Of the process, independent of the models: names in `Stats`.
PROCESS = {
    "memory_pressure": "How short memory is: 0 normal, 1 short, 2 very short.",
    "footprint_bytes": "Memory of the process, as the system counts it.",
    "mlx_active_bytes": "Memory in MLX's arrays.",
    "mlx_cache_bytes": "Memory of freed buffers that MLX keeps.",
    "live_arrays": "Arrays that Python holds; buffers are more.",
    "ranks": "Processes that hold a part of the model.",
    "disk_bytes": "Size of the prefix cache on disk.",
}


class Metrics:
    """Counters and histograms of one server, by model. `models` returns the newest snapshot."""

    def __init__(self, models: Callable[[], Mapping[str, Served]]) -> None:
        self.models, self.registry = models, CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        self.first_token = histogram(
            "mlxspec_first_token_seconds",
            "From arrival to the first token.",
            MODEL,
            buckets=SECONDS,
        )
        self.between_tokens = histogram(
            "mlxspec_between_tokens_seconds",
            "From token to token.",
            MODEL,
            buckets=GAPS,
        )
        self.duration = histogram(
            "mlxspec_request_seconds",
            "From arrival to the end, by how the request ended.",
            ("model", "finish"),
            buckets=SECONDS,
        )
        self.refused = Counter[str]()  # requests answered with an error, by status
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics; the registry calls it."""
        served = self.models()
        for kind, suffix, table in (("counter", "_total", COUNTERS), ("gauge", "", GAUGES)):
            families = {name: Metric(f"mlxspec_{name}", text, kind) for name, text in table.items()}
            for name, value, labels in self._samples(served):
                if name in families:
                    families[name].add_sample(f"mlxspec_{name}{suffix}", labels, value)
            yield from families.values()
        for name, text in PROCESS.items():
            value = max((getattr(one.stats, name) for one in served.values()), default=0)
            yield GaugeMetricFamily(f"mlxspec_{name}", text, value=value)
        depths = HistogramMetricFamily(
            "mlxspec_draft_depth",
            "Tokens drafted per round; 0 where none were.",
            labels=MODEL,
        )
        for model, one in served.items():
            reached = Counter[int]()  # rounds whose drafts have a token at this position
            for _, position, tried, _ in one.stats.drafts:
                reached[position] += tried
            rounds = one.stats.rounds
            buckets = [(str(float(most)), rounds - reached[most + 1]) for most in DEPTHS]
            buckets.append(("+Inf", rounds))
            depths.add_metric((model,), buckets, reached.total())
        yield depths

    def _samples(self, served: Mapping[str, Served]) -> Iterator[tuple[str, Any, dict[str, str]]]:
        """(name, value, labels) of COUNTERS and GAUGES, among others."""
        for status, count in self.refused.items():
            yield "refused", count, {"status": status}
        for model, one in served.items():
            labels, stats = {"model": model}, one.stats
            for name, value in asdict(stats).items():
                yield name, value, labels
            yield "speculation_parked_seconds", stats.parked_seconds, labels
            yield "exact_rows", one.info.exact_rows, labels
            yield "model_loads", one.loads, labels
            yield "model_loaded", one.status == "loaded", labels
            for state in ("used", "cached", "free"):
                yield "kv_blocks", getattr(stats, f"blocks_{state}"), labels | {"state": state}
            for source, position, drafted, accepted in stats.drafts:
                place = labels | {"source": source, "position": str(position)}
                yield "drafted_tokens", drafted, place
                yield "accepted_tokens", accepted, place

    def render(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)
