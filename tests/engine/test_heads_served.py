"""The trained MTP pair, loaded as the program does: beside other models, with K/V in 8 bits, while
memory is short, and on the page of metrics."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.engine.manager import ModelManager, ModelSlot
from mlxspec.engine.memory import CRITICAL, NORMAL, WARN
from mlxspec.load.loader import load_engine
from mlxspec.metrics import Metrics
from mlxspec.types import ModelInfo, Output, Served
from tests.heads import kinds, runs
from tests.heads.packagings import SIDECAR, TARGET
from tests.support import tiny
from tests.support.engine_with_head import head_of
from tests.support.machines import FixedMonitor

PROMPTS = runs.reference()["prompts"]
GREEDY = runs.reference()["greedy"]
DEPTH = 3
N = 24


def pair(root: Path, head: bool = True, **change: Any) -> tuple[Engine, ModelInfo]:
    config = Config(
        cache_dir=str(root),
        cache_gb=0,
        block_size=8,
        kv_blocks=200,
        context=256,
        draft="" if head else "off",
        draft_depth=DEPTH if head else 0,
        **change,
    )
    return load_engine(TARGET, "mtp", config, SIDECAR if head else None)


def accepted(drafts: Any, source: str) -> dict[int, tuple[int, int]]:
    """By position: how many tokens the source drafted, and how many of them were accepted."""
    return {at: (tried, kept) for name, at, tried, kept in drafts if name == source}


@pytest.mark.slow
def test_tokens_with_quantized_keys_and_values(tmp_path: Path) -> None:
    """At a temperature they are those without a head."""
    found = []
    for head in (True, False):
        e, _ = pair(tmp_path, head, kv_bits=8)
        for i, prompt in enumerate(PROMPTS[:4]):
            e.add(tiny.request(str(i), prompt, 40, temperature=0.8, seed=i))
        outputs = tiny.run(e)
        found.append([tiny.tokens(outputs, str(i)) for i in range(4)])
        tried, kept = accepted(e.stats().drafts, "mtp").get(1, (0, 0))
        assert (tried > 30 and kept > tried / 5) if head else tried == 0
    assert found[0] == found[1]


@pytest.mark.slow
def test_several_models_have_heads_of_their_own(tmp_path: Path) -> None:
    """One is loaded at a time, so that they take turns."""

    def other() -> tuple[Engine, ModelInfo]:
        config = Config(
            cache_dir=str(tmp_path), cache_gb=0, block_size=8, kv_blocks=200, draft_depth=DEPTH
        )
        return load_engine(kinds.TARGET, "eagle3", config, kinds.DATA / "eagle3")

    starts: dict[str, Callable[[], Any]] = {"mtp": partial(pair, tmp_path), "eagle3": other}
    unknown = ModelInfo("", 0, 0, "", 0, 0, 0, created=1_700_000_000)
    slots = [ModelSlot(start, replace(unknown, name=name)) for name, start in starts.items()]
    manager = ModelManager(slots, lambda slot, staying: "full" if staying else "")
    manager.launch()
    expected = {"mtp": GREEDY, "eagle3": kinds.reference("eagle3")["greedy"]}
    prompts = {"mtp": PROMPTS, "eagle3": kinds.reference("eagle3")["prompts"]}
    for turn, name in enumerate(("mtp", "eagle3", "mtp")):
        manager.submit(replace(tiny.request(name, prompts[name][turn], N), model=name))
        outputs: list[Output] = []
        while manager.busy:
            outputs += manager.step()
        assert tiny.tokens(outputs, name) == expected[name][turn][:N]
        (slot,) = (each for each in manager.slots if each.engine)
        assert slot.engine and head_of(slot.engine).name == name
        sources = {source for source, *_ in slot.engine.stats().drafts}
        assert sources == {name}, "no other model's head drafted"


@pytest.mark.slow
def test_memory_pressure(tmp_path: Path) -> None:
    """Where it is critical, cached blocks go, with the head's rows in them; answers and drafts go on."""
    e, _ = pair(tmp_path)
    e.monitor = FixedMonitor()
    asked = [tiny.request(str(i), PROMPTS[i], N) for i in range(4)]
    rates, cached = [], []
    for level in (NORMAL, NORMAL, WARN, CRITICAL):
        before = e.stats().drafts
        e.monitor.level = level
        e.housekeep()
        for r in asked:
            e.add(r)
        outputs = tiny.run(e)
        cached.append(max(o.cached for o in outputs if o.request == "0"))
        for i, r in enumerate(asked):
            assert tiny.tokens(outputs, r.id) == GREEDY[i][:N]
        old, new = (accepted(drafts, "mtp").get(1, (0, 0)) for drafts in (before, e.stats().drafts))
        rates.append((new[1] - old[1]) / (new[0] - old[0]))
    assert [tokens > 0 for tokens in cached] == [False, True, True, False]
    assert head_of(e) and min(rates) > 0.8 * max(rates) > 0.3


def test_the_page_of_metrics_shows_a_heads_drafts(tmp_path: Path) -> None:
    e, info = pair(tmp_path)
    e.add(tiny.request("r", PROMPTS[0], N))
    tiny.run(e)
    page = Metrics(lambda: {"tiny": Served(info, stats=e.stats())}).render().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("source") == "mtp":
                found.setdefault(sample.name, {})[sample.labels["position"]] = sample.value
    tried = found["mlxspec_drafted_tokens_total"]
    kept = found["mlxspec_accepted_tokens_total"]
    counted = accepted(e.stats().drafts, "mtp")
    assert set(tried) == {"1", "2", "3"}
    assert {at: (tried[str(at)], kept[str(at)]) for at in counted} == counted
    assert tried["1"] >= tried["2"] >= tried["3"] > 0 < kept["3"] <= kept["2"] <= kept["1"]
