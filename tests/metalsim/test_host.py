"""The pools are written in place on Metal too, though its host runs further ahead than a CPU's."""

from functools import cache

import pytest

from bench.dispatches import of_engine
from bench.graph import Launch, Work
from mlxspec.blas import BUFFER_LAUNCHES
from tests.bench.test_dispatches import plain_functions  # noqa: F401
from tests.metalsim.host import MAX_OPS, Host
from tests.support import tiny
from tests.support.drafters import attach_head
from tests.support.parameter_rows import only

STEPS = 6
OURS = int(BUFFER_LAUNCHES)


@cache
def step_of(layers: int, streams: int, kernels: bool) -> Work:
    model = tiny.model("llama", num_hidden_layers=layers)
    return of_engine(tiny.engine(model, block=64, budget=512, whole=True), streams, kernels)


def copies(work: Work, max_ops: int) -> int:
    """Of pools, a step."""
    host = Host(max_ops)
    host.steps(work.order, STEPS)
    return host.copies // (STEPS - 1)  # nothing holds them before the first step


def test_an_update_is_a_copy_while_a_buffer_holds_the_array() -> None:
    pool, other = 1, 2
    read, write = Launch(frozenset({pool})), Launch(frozenset({other}), pool)
    host = Host(max_ops=1)  # two launches a buffer
    host.launch(write)
    assert host.copies == 0
    host.launch(read)
    host.launch(write)
    assert host.copies == 1, "its buffer is committed and not done"
    host.launch(write)
    assert host.copies == 1, "what was copied is held, not its copy"
    host.launch(read)
    for _ in range(22):
        host.launch(Launch(frozenset({other})))
    assert host.waits
    host.launch(write)
    assert host.copies == 1, "ten later buffers were committed: the reader's is done"


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("chip", MAX_OPS)
def test_a_model_of_16_layers_copies_no_pool(chip: str, streams: int, kernels: bool) -> None:
    work = step_of(16, streams, kernels)
    assert sum(each.updates is not None for each in work.order) == 32  # K and V of each layer
    assert copies(work, MAX_OPS[chip]) > 16, "as MLX has it, most pools are copied"
    assert copies(work, OURS) == 0


def test_other_depths() -> None:
    """What the limit is for; deeper models are safe as MLX has them, shallower ones are not."""
    found = {
        layers: [copies(step_of(layers, 1, True), n) > 0 for n in (*MAX_OPS.values(), OURS)]
        for layers in (4, 12, 28, 40)
    }
    assert found == {
        4: [True, True, True],
        12: [True, True, False],
        28: [False, True, False],
        40: [False, False, False],
    }


@pytest.mark.parametrize("kind", only(["eagle3", "mtp"], 0))
def test_a_chained_head_copies_no_pool_at_any_depth(kind: str) -> None:
    """Its passes are short and each is submitted, so only the first of a draft may write a pool."""
    for depth in (1, 2, 3, 5, 8):
        model = tiny.model("qwen3", num_hidden_layers=16)
        engine = tiny.engine(model, block=64, budget=512, whole=True)
        attach_head(engine, depth=depth, kind=kind)
        work = of_engine(engine, 1, kernels=True)
        assert len(work.ends) > depth, "each pass is submitted"
        host = Host(OURS)
        host.steps(work.order, STEPS, work.ends)
        assert host.copies == 0, depth


def test_passes_that_write_a_pool_copy_it() -> None:
    """As without our kernel."""
    rows, pool = 1, 2
    one = [Launch(frozenset({rows}), pool), Launch(frozenset({pool}))]
    host = Host(OURS)
    host.steps(3 * one, STEPS, (2, 4))
    assert host.copies == STEPS * 3 - 1
