"""The metrics: every counter of the engine is shown, as of the moment of the look."""

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from mlxspec.metrics import Metrics
from mlxspec.types import Stats


def page(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {s.name + "".join(s.labels.values()): s.value for f in families for s in f.samples}


def test_the_engines_numbers() -> None:
    now = Stats(**{row.name: i + 1 for i, row in enumerate(fields(Stats))})
    metrics = Metrics(lambda: now)
    shown = page(metrics)
    for row in fields(Stats):
        if row.name != "progress":  # a clock's reading; /health judges it
            name = f"mlxspec_{row.name}"
            block = f"mlxspec_kv_blocks{row.name.removeprefix('blocks_')}"
            found = shown.get(f"{name}_total", shown.get(name, shown.get(block)))
            assert found == getattr(now, row.name), row.name
    now = Stats(generated_tokens=100)
    assert page(metrics)["mlxspec_generated_tokens_total"] == 100


def test_histograms_and_refusals() -> None:
    metrics = Metrics(Stats)
    metrics.first_token.observe(0.2)
    metrics.between(0.3, 3)
    metrics.duration.labels("stop").observe(1.5)
    metrics.refused.labels("429").inc()
    shown = page(metrics)
    assert shown["mlxspec_first_token_seconds_count"] == 1
    assert shown["mlxspec_between_tokens_seconds_count"] == 3
    assert abs(shown["mlxspec_between_tokens_seconds_sum"] - 0.3) < 1e-9
    assert shown["mlxspec_request_seconds_sumstop"] == 1.5
    assert shown["mlxspec_refused_total429"] == 1


def test_two_servers_do_not_share_their_numbers() -> None:
    one, other = Metrics(Stats), Metrics(Stats)
    one.first_token.observe(1)
    assert page(other)["mlxspec_first_token_seconds_count"] == 0
