"""THE test with quantized K/V: the tokens are those of plain decoding over caches with as few bits,
by ==."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlxspec.model.layout import find_layout
from mlxspec.sequences import Draft
from tests.support import tiny
from tests.support.parameter_rows import diagonal, fewer, in_turn
from tests.support.spans import span
from tests.test_lossless import (
    BLOCK,
    DRAFTERS,
    N,
    drafted,
    drive,
    equip,
    model,
    requests,
    same,
    truth,
)

BITS = [8, 4]
RUNS = [(kind, "rows", False, name) for kind in ("llama", "gemma3_text") for name in DRAFTERS]
RUNS += [
    (kind, "rows", False, name)
    for kind in ("qwen3", "gpt_oss")
    for name in ("plain", "liar", "chain")
]
RUNS += [("deepseek_v3", "gather", False, name) for name in ("plain", "liar", "suffix")]
RUNS += [("gemma2", "gather", True, "liar")]


@pytest.mark.parametrize("kind, layout, lone, name, bits", in_turn(RUNS, BITS, every=17))
def test_batch_then_hits(kind: str, layout: str, lone: bool, name: str, bits: int) -> None:
    """As in test_lossless; budgets and temperatures take turns. Then every prompt again, all of it
    cached."""
    kind = f"{kind}:{bits}"
    turn = RUNS.index((kind.partition(":")[0], layout, lone, name)) + bits // 8
    budget = (7, 64, 1)[turn % 3]
    all_of = requests(0.8 * (turn % 2))
    e = tiny.engine(model(kind), layout=layout, lone=lone, block=BLOCK, budget=budget, kv_bits=bits)
    all_of = equip(e, name, kind, all_of)
    late = 5 + 90 // budget
    same(
        kind,
        drive(e, all_of, {"fork": late, "exact": late + 5, "inside": late + 6, "one": 3}),
        all_of,
    )
    assert drafted(e, name)
    before = e.counters["prompt_tokens"]
    same(kind, drive(e, all_of), all_of)
    assert e.counters["prompt_tokens"] - before == len(all_of)


@pytest.mark.parametrize(
    "kind, name, bits", fewer(diagonal(["qwen3", "gemma3_text"], ["plain", "chain"], BITS), 2, 1)
)
def test_preemption(kind: str, name: str, bits: int) -> None:
    kind = f"{kind}:{bits}"
    all_of = requests(0.8)
    e = tiny.engine(model(kind), block=BLOCK, blocks=14, kv_bits=bits)
    all_of = equip(e, name, kind, all_of)
    tiny.admit_blindly(e.scheduler)
    same(kind, drive(e, all_of, {"fork": 6, "one": 4}), all_of)
    assert e.scheduler.preemptions > 0


@pytest.mark.parametrize("kind, bits", diagonal(["llama", "qwen3"], BITS))
def test_the_truth_is_that_of_mlx_lms_own_quantized_cache(kind: str, bits: int) -> None:
    """It multiplies without unpacking, where it can: no windows, no sinks."""
    group = 32 if tiny.WIDE[kind]["head_dim"] % 64 else 64
    kind = f"{kind}:{bits}"

    def caches(m: nn.Module) -> list[QuantizedKVCache]:
        return [QuantizedKVCache(group, bits) for _ in m.layers]

    own = tiny.Plain(tiny.model(kind), caches=caches)
    plain = tiny.Plain(tiny.model(kind))
    other = 0
    for i, r in enumerate(requests(0.8).values()):
        want = truth(kind, r)
        assert own(r.prompt, N, 0.8, i) == want
        other += plain(r.prompt, N, 0.8, i) != want
    assert other or bits == 8, "4 bits show"


TEXT = """\
The lighthouse had been dark for eleven years when the two sisters rowed out to it with a lamp, a ladder and
a sack of bread. Nobody in the village believed that the tower would stand another winter. The stairs were
rotten, the glass was gone, and gulls had built their nests where the great lens used to turn. But the
younger sister had found the keeper's notebook in a box at the market, and on its last page was a drawing of
a door that neither of them had ever seen. They tied the boat to the iron ring, waited for the tide to fall,
and walked once around the foot of the tower. On the north side, below the line of the weeds, there was a
slab of stone that was a little paler than the others. It took them most of the afternoon to move it. Behind
it a narrow passage went down, not up, and the air that came out of it was warm. "We should go back and tell
someone," said the older sister, who was a teacher and liked to be asked about things before they happened.
"We should," said the younger, and lit the lamp. The passage ended after forty steps in a round room. Along
its wall stood shelves, and on the shelves stood jars, and every jar held sand of a different colour, with a
date and the name of a ship written on a strip of paper. There were more than three hundred of them. The
oldest was from the year in which the tower had been built, and the newest was not yet a week old."""


@pytest.mark.slow
def test_perplexity_of_smollm2(smollm2: Path) -> None:
    """What the bits cost on a real text, each token predicted from K/V as they lie in the pool.
    Prints it."""
    from mlx_lm.utils import load_model

    from mlxspec.text.chat import encode, load_tokenizer

    m, tokens = load_model(smollm2)[0], encode(load_tokenizer(smollm2), TEXT)
    found = {}
    for bits in (0, 8, 4):
        fitted = find_layout(m, kv_bits=bits)
        runner = fitted.runner(m, 32, 16, kv_bits=bits)
        rows = span(range(1, 16), tokens[:1], 0, 1, draft=Draft(tokens[1:]))
        logits = runner.forward([rows], None).logits.astype(mx.float32)
        loss = nn.losses.cross_entropy(logits[:-1], mx.array(tokens[1:]), reduction="mean")
        found[bits] = mx.exp(loss).item()
        print(
            f"\n{bits:2} bits: {fitted.cache_bytes.token} bytes a token, perplexity {found[bits]:.3f}",
            end="",
        )
    print(f" of {len(tokens)} tokens")
    assert found[8] < found[0] * 1.01 and found[4] < found[0] * 1.5
