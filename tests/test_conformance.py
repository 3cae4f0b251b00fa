"""Every architecture of mlx-lm runs in the layout that docs/models.md names, and says what mlx-lm
says.

Rule: an exception is written down with its reason, and the reason is tested too.
"""

import functools
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.prefix import KVCacheManager, StateCache, Window
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.scheduler import Scheduler
from mlxspec.model.layout import LayoutChoice, find_layout
from mlxspec.model.recurrent import copied
from mlxspec.types import UserError
from tests.support import tiny
from tests.support.architectures import (
    LAYOUTS,
    SPECIAL,
    UNSTEADY,
    UNTESTABLE,
    WHOLE_HEAD,
    build,
    known,
    label,
    read,
)
from tests.support.noisy_oracle import NoisyOracle

BLOCK = 8
N = 8
SHARED = 18  # tokens of the prefix: two blocks and a bit
LATE = 8  # the step at which the third prompt arrives; the first one's is known by then


@functools.cache
def prompts() -> dict[str, list[int]]:
    """Longer than the windows, shorter than the windows, and one that starts like the first."""
    rng = random.Random(0)
    long, short, fork = ([rng.randrange(tiny.VOCAB) for _ in range(n)] for n in (25, 5, 3))
    return {"long": long, "short": short, "fork": long[:SHARED] + fork}


def engine(m: object, found: LayoutChoice) -> Engine:
    """As mlxspec.engine.start puts it together, with a small pool and steps of 7 prompt tokens."""
    windows = {window: 64 for window, _ in found.cache_bytes.windows}
    groups = KVCacheManager(
        BlockPool(64, BLOCK),
        [Window(w, BlockPool(n, BLOCK)) for w, n in windows.items()],
        StateCache(16, 1, copied) if found.cache_bytes.state else None,
    )
    scheduler = Scheduler(
        groups,
        context=512,
        prefill_budget=PrefillBudget(fixed=7),
        sharing=found.sharing,
        can_draft=found.can_draft,
    )
    return Engine(found.runner(m, BLOCK, 64, windows=windows), scheduler)


def test_the_page_and_the_list_agree() -> None:
    assert read() == {name: (layout, name in WHOLE_HEAD) for name, layout in LAYOUTS.items()}


def test_every_architecture_has_a_tiny_config() -> None:
    assert sorted(known() - LAYOUTS.keys()) == [], (
        "no tiny config; add it to tests/architectures.py"
    )
    assert sorted(LAYOUTS.keys() - known()) == [], "mlx-lm has these no longer"


def test_exceptions_are_listed() -> None:
    assert UNTESTABLE.keys() == {name for name, layout in LAYOUTS.items() if layout == "untestable"}
    assert {name for name, layout in LAYOUTS.items() if layout == "refused"} <= UNSTEADY.keys()
    assert WHOLE_HEAD | UNSTEADY.keys() <= LAYOUTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - UNTESTABLE.keys() - UNSTEADY.keys()))
def test_conforms(name: str) -> None:
    m = build(name)
    truth = tiny.Plain(m)
    want = {key: truth(prompt, N) for key, prompt in prompts().items()}
    first, *rest, last = prompts()["long"]
    assert want["long"] != truth([first, *reversed(rest), last], N), (
        "the context makes no difference"
    )

    found = find_layout(m)
    assert (label(found), not found.trunk) == (LAYOUTS[name], name in WHOLE_HEAD), found.refused
    e = engine(m, found)
    requests = {key: tiny.request(key, prompt, N) for key, prompt in prompts().items()}
    e.add(requests["long"])
    e.add(requests["short"])
    outputs = tiny.run(e, lambda i: e.add(requests["fork"]) if i == LATE else None, last=LATE)
    assert {key: tiny.tokens(outputs, key) for key in requests} == want
    # A step submits its samples alone: what they did not need would stay behind as a graph that
    # grows.
    assert tiny.settled(e)
    shared = (
        SHARED // BLOCK * BLOCK if found.cache_bytes.state else SHARED
    )  # a state behind every block
    assert e.counters["cached_tokens"] == (shared if found.sharing else 0)
    if found.cache_bytes.state and found.rollback:
        e = engine(m, found)
        e.proposer = NoisyOracle({(r.prompt, 0): want[key] for key, r in requests.items()})
        for r in requests.values():
            e.add(r)
        outputs = tiny.run(e)
        assert {key: tiny.tokens(outputs, key) for key in requests} == want
        assert 0 < e.proposer.kept < e.proposer.drafted


def test_a_window_that_no_cache_keeps_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is shorter than the window, so only the mask's request can show it."""
    monkeypatch.setitem(SPECIAL, "pixtral", {})  # windows inside a wrapper that makes plain caches
    found = find_layout(build("pixtral"))
    assert found.layout == "solo" and "masks 12 tokens, but its cache keeps all" in found.refused[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSTEADY)
def test_mlx_lm_itself_depends_on_where_a_prompt_is_cut(name: str) -> None:
    m, prompt = build(name), mx.array([prompts()["long"]])
    ends = []
    for cut in (0, 15):
        cache = make_prompt_cache(m)
        if cut:
            m(prompt[:, :cut], cache=cache)
        logits = np.array(m(prompt[:, cut:], cache=cache)[0, -1])
        ends.append(logits[np.isfinite(logits)])
    assert np.abs(ends[0] - ends[1]).max() > 0.01 * ends[0].std()
    if LAYOUTS[name] == "refused":
        with pytest.raises(UserError, match="no layout reproduces"):
            find_layout(m)
    else:
        assert label(find_layout(m)) == LAYOUTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTESTABLE)
def test_mlx_lm_itself_cannot_run_it_here(name: str) -> None:
    error = UNTESTABLE[name][1]
    if "Metal" in error and mx.metal.is_available():
        pytest.skip("there is Metal here; the table was made without")
    with pytest.raises((RuntimeError, ValueError), match=error):
        tiny.Plain(build(name))(prompts()["short"], 1)
