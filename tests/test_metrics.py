"""The metrics: every counter of the engine is shown, as of the moment of the look."""

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from mlxspec.metrics import Metrics
from mlxspec.types import MAX_DEPTH, ModelInfo, Served, Stats

INFO = ModelInfo("tiny", 512, 320, "rows", 16, 1 << 20, 1 << 20, 1_700_000_000)
SPECULATION = ("drafts", "parked_seconds")
NONE = ("running_requests",)  # requests, which the page shows


def page(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        s.name + "".join(s.labels[k] for k in sorted(s.labels) if k != "model"): s.value
        for f in families
        for s in f.samples
    }


def of(now: Stats) -> dict[str, Served]:
    return {"tiny": Served(INFO, stats=now)}


def test_the_engines_numbers() -> None:
    now = Stats(
        **{
            row.name: i + 1
            for i, row in enumerate(fields(Stats))
            if row.name not in SPECULATION + NONE
        }
    )
    metrics = Metrics(lambda: of(now))
    shown = page(metrics)
    for row in fields(Stats):
        if row.name not in SPECULATION + NONE:
            name = f"mlxspec_{row.name}"
            block = f"mlxspec_kv_blocks{row.name.removeprefix('blocks_')}"
            found = shown.get(f"{name}_total", shown.get(name, shown.get(block)))
            assert found == getattr(now, row.name), row.name
    now = Stats(generated_tokens=100)
    assert page(metrics)["mlxspec_generated_tokens_total"] == 100


def test_drafts_by_source_and_position() -> None:
    drafts = (("lookup", 1, 9, 8), ("lookup", 16, 7, 5), ("lookup", 17, 4, 3), ("lookup", 32, 2, 0))
    now = Stats(drafts=(*drafts, ("model", 1, 6, 1)), parked_seconds=2.5)
    metrics = Metrics(lambda: of(now))
    shown = page(metrics)
    tried = {
        k.removeprefix("mlxspec_drafted_tokens_total"): v
        for k, v in shown.items()
        if "drafted" in k
    }
    kept = {
        k.removeprefix("mlxspec_accepted_tokens_total"): v
        for k, v in shown.items()
        if "accepted" in k
    }
    assert tried == {"1lookup": 9, "16lookup": 7, "17lookup": 4, "32lookup": 2, "1model": 6}
    assert kept == {"1lookup": 8, "16lookup": 5, "17lookup": 3, "32lookup": 0, "1model": 1}
    assert shown["mlxspec_speculation_parked_seconds_total"] == 2.5
    assert (
        'mlxspec_drafted_tokens_total{model="tiny",position="17",source="lookup"} 4.0'
        in metrics.render().decode()
    )


def test_rounds_by_draft_length() -> None:
    drafted = {("lookup", 1): 3, ("model", 1): 2, ("lookup", 5): 2, ("model", 32): 4}  # rounds
    drafts = []
    for source in ("lookup", "model"):
        for position in range(1, MAX_DEPTH + 1):
            rounds = [n for (s, length), n in drafted.items() if s == source and length >= position]
            drafts.append((source, position, sum(rounds), 0))
    shown = page(Metrics(lambda: of(Stats(rounds=21, drafts=tuple(drafts)))))
    buckets = {
        float(name.removeprefix("mlxspec_draft_depth_bucket")): value
        for name, value in shown.items()
        if name.startswith("mlxspec_draft_depth_bucket")
    }
    assert buckets == {
        0: 10, 1: 15, 2: 15, 3: 15, 4: 15, 6: 17, 8: 17, 12: 17, 16: 17, 24: 17, 32: 21, float("inf"): 21
    }  # fmt: skip
    assert shown["mlxspec_draft_depth_count"] == 21
    assert shown["mlxspec_draft_depth_sum"] == 5 + 2 * 5 + 4 * 32


def test_without_speculation() -> None:
    shown = page(Metrics(lambda: of(Stats())))
    assert not [name for name in shown if "drafted" in name or "accepted" in name]
    assert (
        shown["mlxspec_draft_depth_count"] == shown["mlxspec_speculation_parked_seconds_total"] == 0
    )


def test_histograms_and_refusals() -> None:
    metrics = Metrics(lambda: of(Stats()))
    metrics.first_token.labels("tiny").observe(0.2)
    for _ in range(3):
        metrics.between_tokens.labels("tiny").observe(0.1)
    metrics.duration.labels("tiny", "stop").observe(1.5)
    metrics.refused["429"] += 1
    shown = page(metrics)
    assert shown["mlxspec_first_token_seconds_count"] == 1
    assert shown["mlxspec_between_tokens_seconds_count"] == 3
    assert abs(shown["mlxspec_between_tokens_seconds_sum"] - 0.3) < 1e-9
    assert shown["mlxspec_request_seconds_sumstop"] == 1.5
    assert shown["mlxspec_refused_total429"] == 1


def test_two_servers_do_not_share_their_numbers() -> None:
    one, other = Metrics(lambda: of(Stats())), Metrics(lambda: of(Stats()))
    one.first_token.labels("tiny").observe(1)
    assert "mlxspec_first_token_seconds_count" not in page(other)
