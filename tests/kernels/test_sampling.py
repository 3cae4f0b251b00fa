"""sample_accept in the simulator: MLX's noise to the bit, the reference's tokens, each logit read
once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.kernels import reference, sampling
from mlxspec.kernels.inputs import Draws
from mlxspec.kernels.metal import source
from mlxspec.kernels.verify import KERNELS, Verdict
from mlxspec.types import COLDEST, NOT_FINITE
from tests import metalsim, test_lossless
from tests.kernels import FLOATS, on_simulator
from tests.metalsim.report import Report
from tests.support import tiny
from tests.support.token_grammar import Maze

VOCABS = [8, 9, 31, 64, 1000, 1023, 1025, 32_000, 151_936, 151_937, 262_144]
NAN, INF = float("nan"), float("inf")
Seen = dict[str, Report]
by_kernel = partial(sampling.sample_accept, unproven=True)
pytestmark = pytest.mark.usefixtures("device")


@contextmanager
def simulated(**changes: Any) -> Iterator[Seen]:
    """Inside, kernels run in the simulator; what it said of the last launch of each."""
    seen: Seen = {}

    def make(*arguments: Any, **named: Any) -> Callable[..., list[mx.array]]:
        kernel = metalsim.metal_kernel(*arguments, **named)

        def launch(**call: Any) -> list[mx.array]:
            out = kernel(**call)
            seen[arguments[0]] = metalsim.last()
            return out

        return launch

    with metalsim.patch(**changes):
        mx.fast.metal_kernel = make
        yield seen


def plain(temperatures: Sequence[float], **more: Any) -> Draws:
    n = len(temperatures)
    masks = more.pop("masks", [b""] * n)
    return Draws(
        list(temperatures), [2**32 - 1 - 31 * r for r in range(n)], list(range(n)), masks, **more
    )


def some(rows: int, vocab: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return (3 * mx.random.normal((rows, vocab), key=mx.random.key(seed))).astype(dtype)


def equal(logits: mx.array, draws: Draws, *draft: Any, **changes: Any) -> list[int]:
    with simulated(**changes):
        got, kept = by_kernel(logits, draws, *draft)
    want, stand = reference.sample_accept(logits, draws, *draft)
    assert got.dtype == want.dtype == mx.int32 and got.tolist() == want.tolist()
    assert (kept is None) == (stand is None)
    assert kept is None or kept.tolist() == stand.tolist()
    return got.tolist()


# ---- the noise
# ------------------------------------------------------------------------------------------


def noise_of(key: tuple[int, int], vocab: int, what: str, dtype: mx.Dtype) -> mx.array:
    """`what` of the bits of every token, by the functions of the kernel alone."""
    body = f"""
        const uint i = thread_position_in_grid.x, vocab = key[2], pairs = (vocab + 1) / 2;
        const uint2 bits = sample_bits(uint2(key[0], key[1]), i, pairs, vocab);
        out[i] = {what}(bits.x);
        if (i + pairs < vocab) {{
          out[i + pairs] = {what}(bits.y);
        }}
    """
    kernel = metalsim.metal_kernel("noise", ["key"], ["out"], body, source("sample_accept"))
    (out,) = kernel(
        inputs=[mx.array([*key, vocab, 0, 0, 0, 0, 0], mx.uint32)],
        grid=((vocab + 1) // 2, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(vocab,)],
        output_dtypes=[dtype],
    )
    return out


KEYS = [(0, 0), (7, 4096), (2**32 - 1, 2**31)]


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, *VOCABS])
def test_the_noise_is_mlx_s_to_the_bit(vocab: int) -> None:
    """Bits, uniforms and noise; MLX shows its bits as split keys, which come in pairs."""
    for key in KEYS:
        k = mx.array(key, mx.uint32)
        if vocab % 2 == 0:
            bits = mx.random.split(k, vocab // 2).flatten()
            assert mx.array_equal(noise_of(key, vocab, "uint", mx.uint32), bits)
        uniform = mx.random.uniform(shape=(vocab,), key=k)
        assert mx.array_equal(noise_of(key, vocab, "sample_uniform", mx.float32), uniform)
        want = reference.gumbel(k[:1], k[1:], vocab)[0]
        assert mx.array_equal(noise_of(key, vocab, "sample_gumbel", mx.float32), want)


def test_the_ends_of_the_noise() -> None:
    """Where bits are lowest and highest: below everything, and below what the kernel leaves out
    by."""
    bits = mx.array(
        [0, 1, 2**32 - 129, 2**32 - 128, 2**32 - 1, 2**31, 2**24 + 1, 2**25 + 3], mx.uint32
    )
    uniform = mx.minimum(bits / mx.array(2**32 - 1, mx.float32), 1 - 2**-24)
    body = "uint i = thread_position_in_grid.x; u[i] = sample_uniform(bits[i]); out[i] = sample_gumbel(bits[i]);"
    kernel = metalsim.metal_kernel("ends", ["bits"], ["u", "out"], body, source("sample_accept"))
    u, out = kernel(
        inputs=[bits],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(8,)] * 2,
        output_dtypes=[mx.float32] * 2,
    )
    assert mx.array_equal(u, uniform) and mx.array_equal(out, -mx.log(-mx.log(uniform)))
    assert out[0].item() == -INF and 16.6 < out.max().item() < 16.7


# ---- tokens
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_of_greedy_and_hot_rows(vocab: int, dtype: mx.Dtype) -> None:
    draws = plain([0.0, 1.0, 0.3, 0.0, 2.5], shift=mx.array([9, 0, 3, 4, 5]))
    equal(some(5, vocab, dtype), draws)


def test_tokens_of_thousands_of_draws() -> None:
    hot = [COLDEST, 0.1, 0.5, 0.7, 1.0, 1.3, 2.0, 10.0] * 500
    tokens = equal(some(len(hot), 700), plain(hot), checked=False)
    assert len(set(tokens)) > 600


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, hot = some(9, 1023, mx.bfloat16), [0.0, 0.8, 1.1] * 3
    whole = plain(
        hot, masks=[b"", b"\x5a" * 128, b""] * 3, min_logits=mx.array([-INF, -2.0, 0.5] * 3)
    )
    with simulated():
        together = by_kernel(x, whole)[0].tolist()
        for r in range(9):
            one = Draws(
                [hot[r]], [whole.seeds[r]], [r], [whole.masks[r]], None, whole.min_logits[r : r + 1]
            )
            assert by_kernel(x[r : r + 1], one)[0].item() == together[r]


@pytest.mark.parametrize("order", [0, 1, 7])
def test_ties_go_to_the_lowest_token(order: int) -> None:
    """Within a lane, across lanes, halves and splits; zeros of both signs are equal, values that
    differ by less than 1 can hold are not."""
    vocab = 5001
    x = np.full((13, vocab), -1.0, np.float32)
    best = [
        (0, 1),
        (4999, 5000),
        (32, 2533),
        (2500, 2501),
        (2501, 3),
        (511, 512),
        (513, 31),
        (0, vocab - 1),
    ]
    for r, pair in enumerate(best):
        x[r, list(pair)] = 2.0
    x[8, 7], x[8, 3000] = -0.0, 0.0
    x[9, 3000], x[9, 7] = -0.0, 0.0
    x[10] = 0.0
    x[11] = -INF
    x[12, 9], x[12, 4000] = 1e-9, 2e-9
    want = [min(pair) for pair in best] + [7, 7, 0, NOT_FINITE, 4000]
    assert equal(mx.array(x), plain([0.0] * 13), order=order) == want
    equal(mx.array(np.round(x)), plain([COLDEST] * 13), order=order)


def test_a_tie_between_the_parts_that_a_lane_joins_goes_to_the_lowest_token() -> None:
    """A lane joins parts 0 and 32, of which either may have the lower token: each has some of both
    halves."""
    vocab, pairs = 65_537, 32_769
    best = [
        (pairs + 5, 32 * 512 + 3),
        (pairs + 600, 33 * 512),
        (pairs, pairs - 1),
        (5, 32 * 512 + 3),
    ]
    x = mx.full((len(best), vocab), -1.0)
    for r, pair in enumerate(best):
        x[r, mx.array(pair)] = 2.0
    assert equal(x, plain([0.0] * len(best))) == [min(pair) for pair in best]


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF, 3e38, -3e38])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_is_not_a_number_or_overflows(temperature: float, bad: float) -> None:
    """Anywhere in a row: no token comes of it, and the rows beside it keep theirs."""
    x = some(7, 1025)
    for r, at in enumerate([[0], [700], [1024], [3, 600], [0, 512, 513], list(range(1025))]):
        x[r, mx.array(at)] = bad
    draws = plain([temperature] * 7)
    tokens = equal(x, draws)
    if bad == INF or bad != bad:
        assert tokens[:6] == [NOT_FINITE] * 6
        assert tokens[6] == equal(some(7, 1025), draws)[6]
    else:
        assert all(0 <= t < 1025 for t in tokens[:5]) and tokens[6] >= 0
        assert (tokens[5] == NOT_FINITE) == (bad == -INF)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", [0, 1, 7])
def test_a_mask_excludes_what_is_not_finite(order: int, dtype: mx.Dtype) -> None:
    """A row that may sample nothing is its grammar's fault, and one whose allowed logits are all
    -inf: that is no fault of the numbers."""
    x = some(8, 1001, dtype)
    x[:6, 9] = mx.array([NAN, INF, NAN, INF, NAN, NAN], dtype)
    x[6] = -INF
    others = bytes([255, 253]) + bytes([255] * 124)  # all but token 9
    alone = bytes([0, 2]) + bytes(124)  # token 9
    masks = [others, others, alone, alone, b"", bytes(126), others, b""]
    for hot in (0.0, 0.9):
        tokens = equal(x, plain([hot] * 8, masks=masks), order=order)
        assert min(tokens[:2]) >= 0 and 9 not in tokens[:2] and tokens[7] >= 0
        assert tokens[2:7] == [NOT_FINITE] * 3 + [0, 0]


def test_a_draft_is_not_accepted_across_what_is_not_finite() -> None:
    """Nor is a token that a drafter could not draw."""
    x = some(5, 1001)
    x[2] = NAN
    sampled = reference.sample_accept(x, plain([0.0] * 5))[0]
    drafted = mx.array([0, *sampled.tolist()[:4], 0, 0, 0])
    with simulated():
        for sample in (by_kernel, reference.sample_accept):
            tokens, kept = sample(x, plain([0.0] * 5), drafted, [(1, 4)])
            assert tokens.tolist()[2] == NOT_FINITE and kept.tolist() == [2]


@pytest.mark.parametrize("vocab", [30, 1001, 8192])
def test_masks_and_floors(vocab: int) -> None:
    """Rows with and without, at any temperature; nothing that a mask forbids or a floor cuts
    comes."""
    rng, rows = np.random.default_rng(vocab), 12
    wide = -(-vocab // 32) * 4  # a mask may be longer than the vocabulary
    masks = [rng.bytes(wide) if r % 2 else b"" for r in range(rows)]
    masks[3] = bytes(wide)
    masks[5] = bytes([0, 2]) + bytes(wide - 2)
    min_logits = mx.array([-INF, 1.5, 30.0, -INF, 0.0, 1.0] * 2)
    hot = [0.0, 0.7, 1.0, 1.4] * 3
    tokens = equal(some(rows, vocab), plain(hot, masks=masks, min_logits=min_logits))
    assert tokens[3] == 0 and tokens[5] in (9, 0)
    for t, mask in zip(tokens[6:], masks[6:], strict=True):
        assert not mask or t == 0 or mask[t // 8] >> t % 8 & 1
    equal(some(rows, vocab), plain(hot, masks=masks))
    equal(some(rows, vocab), plain(hot, min_logits=min_logits))


def test_a_floor_keeps_what_equals_it() -> None:
    x = some(4, 1001)
    best = mx.argmax(x, axis=-1).tolist()
    hot = [1.0, 0.7, 1.3, 3.0]
    min_logits = (x / mx.array(hot)[:, None]).max(axis=-1)
    assert equal(x, plain(hot, min_logits=min_logits)) == best


def test_ties_that_swallow_the_noise_go_to_the_lowest_token() -> None:
    """A lane meets 513 before 32; the noise of either is less than a step of such values."""
    x = mx.zeros((2, 1025))
    x[:, mx.array([32, 513])] = 1e30
    assert equal(x, plain([0.5, COLDEST])) == [32, 32]


# ---- the accept scan
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_ragged_drafts(seed: int) -> None:
    """Entries of no to many drafted tokens among inputs that nobody drafted, right and wrong
    anywhere."""
    rng = np.random.default_rng(seed)
    counts = [[5], [0, 3], [16, 0, 1], [0, 0, 2, 7, 1], [40, 1, 0], [1] * 20][seed]
    rows = sum(counts) + len(counts)
    x, draws = some(rows, 203, seed=seed), plain(rng.choice([0.0, 0.9], rows).tolist())
    drawn = reference.sample_accept(x, draws)[0].tolist()
    inputs, drafts, row, want = [], [], 0, []
    for i, count in enumerate(counts):
        inputs += rng.integers(0, 203, rng.integers(1, 4)).tolist()
        right = min(count, [count, 0, 2, 1][i % 4])
        drafts.append((len(inputs), count))
        told = drawn[row : row + count]
        inputs += [t if n != right else (t + 1) % 203 for n, t in enumerate(told)]
        want.append(right)
        row += count + 1
    ids = mx.array(inputs, mx.int32)
    equal(x, draws, ids, drafts)
    with simulated(order=seed):
        assert by_kernel(x, draws, ids, drafts)[1].tolist() == want


def test_drafts_that_are_all_empty() -> None:
    equal(some(2, 50), plain([0.0, 1.0]), mx.array([4, 5], mx.int32), [(0, 0), (2, 0)])


# ---- what it costs, and where it is used
# ------------------------------------------------------------------


@on_simulator
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows, vocab", [(1, 32_001), (5, 32_000), (16, 4097)])
def test_each_logit_is_read_once_and_no_noise_is_written(
    rows: int, vocab: int, dtype: mx.Dtype
) -> None:
    x = some(rows, vocab, dtype)
    with simulated() as seen:
        by_kernel(x, plain(([0.0, 0.9] * rows)[:rows]))
    part, merge = (seen[f"sample_accept_{name}"].traffic for name in ("part", "merge"))
    assert part["logits"].read == part["logits"].read_unique == x.nbytes
    parts = max(8, -(-vocab // 1024))
    written = [{name: t.written for name, t in each.items() if t.written} for each in (part, merge)]
    assert written == [
        dict.fromkeys(("part_max", "part_argmax"), 4 * rows * parts),
        dict.fromkeys(("tokens", "accepted"), 4 * rows),
    ]
    assert merge["part_max"].read == part["part_max"].written


@on_simulator
def test_a_mask_spares_the_logits_that_it_forbids() -> None:
    x = some(1, 4096)
    with simulated() as seen:
        by_kernel(x, plain([0.6], masks=[bytes(64) + b"\xff" * 8 + bytes(440)]))
    assert seen["sample_accept_part"].traffic["logits"].read == 64 * 4


def test_tokens_beyond_the_end_of_a_mask_are_excluded() -> None:
    masks = [b"\xff" * 124, b""]
    assert equal(some(2, 1000), plain([1.0, 1.0], masks=masks))[0] < 992
    lengths = [b"\xff" * 100, b"\xff" * 125, b"", b"\xff" * 130]  # as of grammars for other widths
    x = some(4, 1000, seed=1)
    x[:, 990:] += 100
    tokens = equal(x, plain([1.0] * 4, masks=lengths))
    assert tokens[0] < 800 and min(tokens[1:]) >= 990


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_case_of_a_vocabulary(dtype: mx.Dtype) -> None:
    case = sampling.sample_accept_case(1500, dtype)
    assert (
        case.tolerance == 0 and case.name == f"sample_accept 1500 {str(dtype).rpartition('.')[2]}"
    )
    for rows in (*case.raced, *case.rows):
        given = case.cut(case.inputs(0), rows)
        with simulated():
            got = [way(*given).tolist() for way in case.variants.values()]
        assert got == [case.reference(*given).tolist()] and case.stock(*given).tolist() == got[0]
    emitted = sum(accepted for _, accepted in got[0])
    assert rows == 68 and emitted == 1 + rows // 2, "half of the draft is accepted"


@pytest.fixture
def proven() -> Iterator[Verdict]:
    """As after a proof on this machine, for the vocabulary of the tiny models."""
    name = sampling.sample_accept_case(tiny.VOCAB, mx.float32).name
    KERNELS.verdicts[name] = Verdict(sampling.VARIANT, 1, 1000)
    yield KERNELS.verdicts[name]
    del KERNELS.verdicts[name]


def test_a_verdict_says_for_how_many_rows(proven: Verdict) -> None:
    x = some(3, tiny.VOCAB)
    proven.least, proven.most = 2, 4
    with simulated() as seen:
        want = reference.sample_accept(x, plain([1.0] * 3))[0].tolist()
        for rows in (1, 2, 3):
            seen.clear()
            assert sampling.sample_accept(x[:rows], plain([1.0] * rows))[0].tolist() == want[:rows]
            assert bool(seen) == (rows > 1)
        proven.variant, proven.reason = "", "parked"
        seen.clear()
        sampling.sample_accept(x, plain([1.0] * 3))
        assert not seen


@on_simulator
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["plain", "liar", "chain"])
def test_an_engine_says_the_same_with_the_kernel(
    drafter: str, temperature: float, proven: Verdict
) -> None:
    """With and without speculation, what plain decoding by mlx-lm says."""
    asked = test_lossless.requests(temperature)
    with simulated(checked=False) as seen:
        e = tiny.engine(test_lossless.model("llama"), block=test_lossless.BLOCK)
        sent = test_lossless.equip(e, drafter, "llama", asked)
        test_lossless.same("llama", test_lossless.drive(e, sent), asked)
        assert test_lossless.drafted(e, drafter) and len(seen) == 2


@on_simulator
def test_an_engine_with_filters_and_grammars_says_the_same(proven: Verdict) -> None:
    def said() -> list[list[int]]:
        e = tiny.engine(test_lossless.model("llama"), block=test_lossless.BLOCK)
        for i, (name, prompt) in enumerate(test_lossless.prompts().items()):
            more = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1, "presence_penalty": 0.5}, {}][
                i % 4
            ]
            r = tiny.request(name, prompt, 8, temperature=0.0 if i == 4 else 0.9, seed=i, **more)
            e.add(replace(r, grammar=Maze if i in (1, 3, 4) else None))
        out = tiny.run(e)
        return [tiny.tokens(out, name) for name in test_lossless.prompts()]

    with simulated(checked=False) as seen:
        got = said()
        assert len(seen) == 2
    proven.variant = ""
    assert said() == got
