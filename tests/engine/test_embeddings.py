"""Embeddings: mlx-lm's own hidden states, pooled, whatever else the engine does in the same steps;
answers beside them keep their tokens, conversations their place in the prefix cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.speculate.ngram import Corpus
from mlxspec.types import InvalidRequest, Output
from tests.support import tiny
from tests.support.drafters import attach, attach_head, copies
from tests.support.noisy_oracle import NoisyOracle
from tests.support.parameter_rows import diagonal

LAYOUTS = [
    ("qwen3", "rows"),
    ("gemma3_text", "rows"),
    ("qwen3_next", "rect"),
    ("llama", "gather"),
    ("deepseek_v3", "gather"),
    ("llama", "solo"),
]
PROMPTS = {
    "one": (7,),
    "short": tuple(range(40, 45)),
    "block": tuple(range(60, 76)),
    "long": tuple(range(100, 141)),
    "fork": (*range(100, 120), 3, 4),
}
CHAT = tuple(range(10, 30))
N = 12


def wanted(name: str, pooling: Any) -> Any:
    return replace(tiny.request(name, PROMPTS[name], 1), pooling=pooling)


def truth(kind: str, tokens: Sequence[int], pooling: str) -> np.ndarray:
    """Of length 1."""
    hidden = np.array(tiny.model(kind).model(mx.array([list(tokens)]))[0].astype(mx.float32))
    pooled = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def check(kind: str, outputs: Sequence[Output], pooling: str) -> None:
    """Each embedding came once, without a token, and has the direction of mlx-lm's."""
    made = [output for output in outputs if output.request in PROMPTS]
    assert sorted(output.request for output in made) == sorted(PROMPTS)
    for output in made:
        assert (output.finish, output.tokens, output.cached) == ("length", (), 0)
        own = output.embedding / np.linalg.norm(output.embedding)
        want = truth(kind, PROMPTS[output.request], pooling)
        assert own.dtype == np.float32 and own == pytest.approx(want, abs=2e-3), output.request


@pytest.mark.parametrize("kind, layout, pooling", diagonal(LAYOUTS, ["last", "mean"]))
def test_equal_to_mlx_lm_beside_an_answer(kind: str, layout: Any, pooling: str) -> None:
    """In chunks, of different lengths, while an answer runs that keeps its tokens."""
    e = tiny.engine(tiny.model(kind), layout=layout, budget=7, lone=layout == "solo")
    e.add(tiny.request("chat", CHAT, N))

    def more(i: int) -> None:
        if i == 4:
            for name in PROMPTS:
                e.add(wanted(name, pooling))

    outputs = tiny.run(e, more, last=4)
    assert tiny.tokens(outputs, "chat") == tiny.Plain(tiny.model(kind))(CHAT, N)
    check(kind, outputs, pooling)
    assert e.scheduler.pool.used == 0
    assert e.counters["generated_tokens"] == e.counters["rounds"] == N


def test_a_conversation_stays_in_the_prefix_cache() -> None:
    """More texts than the pool holds are embedded, and none is shared with another."""
    e = tiny.engine(tiny.model("qwen3"), blocks=16, max_sequences=2)
    e.add(tiny.request("chat", CHAT, 4))
    tiny.run(e)
    cached = e.stats().blocks_cached
    for _ in range(4):
        for name in PROMPTS:
            e.add(wanted(name, "last"))
        tiny.run(e)
    assert e.stats().blocks_cached == cached
    e.add(tiny.request("again", CHAT, 4))
    assert tiny.run(e)[-1].cached == len(CHAT) - 1


def test_a_preempted_text_begins_again() -> None:
    e = tiny.engine(tiny.model("qwen3"), blocks=9, budget=7)
    tiny.admit_blindly(e.scheduler)
    e.add(tiny.request("chat", CHAT, 30))
    for name in PROMPTS:
        e.add(wanted(name, "mean"))
    outputs = tiny.run(e)
    assert e.scheduler.preemptions > 0
    check("qwen3", outputs, "mean")
    assert tiny.tokens(outputs, "chat") == tiny.Plain(tiny.model("qwen3"))(CHAT, 30)


@pytest.mark.parametrize("drafter", ["liar", "head"])
def test_beside_drafts(drafter: str) -> None:
    kind = "qwen3"
    answer = tiny.Plain(tiny.model(kind))(CHAT, N)
    e = tiny.engine(tiny.model(kind), budget=7)
    if drafter == "liar":
        e.proposer = NoisyOracle({(CHAT, 0): answer})
    else:
        attach_head(e, depth=3)
    e.add(tiny.request("chat", CHAT, N))
    for name in PROMPTS:
        e.add(wanted(name, "last"))
    outputs = tiny.run(e)
    assert tiny.tokens(outputs, "chat") == answer and sum(e.spec_metrics.drafted.values()) > 0
    check(kind, outputs, "last")


def test_texts_do_not_crowd_answers_out_of_the_copies() -> None:
    """Of which there is room for two answers."""
    e = tiny.engine(tiny.model("qwen3"), blocks=128)
    proposer = attach(e, "suffix")
    copies(proposer).corpus = Corpus(2 * (len(CHAT) + 30))
    e.add(tiny.request("chat", CHAT, 30))
    tiny.run(e)
    for _ in range(8):
        for name in PROMPTS:
            e.add(wanted(name, "last"))
        tiny.run(e)
    e.add(tiny.request("again", CHAT, 30))
    [*_, last] = tiny.run(e)
    assert last.drafted > 0


def test_an_aborted_text_frees_its_blocks() -> None:
    e = tiny.engine(tiny.model("qwen3"), budget=7)
    e.add(wanted("long", "mean"))
    e.step()
    assert e.scheduler.pool.used > 0
    [output] = e.abort("long")
    tiny.run(e)
    assert output.finish == "abort" and e.scheduler.pool.used == 0


def test_a_model_whose_hidden_states_cannot_be_read_refuses() -> None:
    e = tiny.engine(tiny.model("qwen3"))
    e.runner.trunk = None
    with pytest.raises(InvalidRequest, match="hidden states"):
        e.add(wanted("one", "last"))
