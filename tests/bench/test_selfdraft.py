"""A model that drafts for itself: the forward is mlx-lm's, a draft of the whole model is right, and a
window sees what the paper says."""

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama, qwen2

from bench.costs import Costs
from bench.dense import Dense
from bench.lookahead import Shape, Window, common, steps_of, visible
from bench.lookahead import speed as lookahead_speed
from bench.replay import Recording
from bench.skipping import drafted, speed, text_of

CONFIG = dict(
    hidden_size=32,
    num_hidden_layers=3,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=40,
    tie_word_embeddings=True,
)
FREE = Costs("rows are free", [1.0 for _ in range(32)])
PROMPT, LENGTH = [3, 1, 4, 1, 5], 12


def model(kind) -> Dense:
    mx.random.seed(2)
    made = kind.Model(kind.ModelArgs.from_dict(CONFIG | {"model_type": kind.__name__[-5:]}))
    made.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, made.parameters()))
    return Dense(made)


def recorded(made: Dense) -> Recording:
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        tokens.append(int(made.model(mx.array([tokens]))[0, -1].argmax().item()))
    return Recording(tuple(PROMPT), tuple(tokens[len(PROMPT) :]))


@pytest.mark.parametrize("kind", [llama, qwen2])
def test_the_forward_is_mlx_lms(kind) -> None:
    made = model(kind)
    tokens = [*range(20)]
    ours, kept = made.read(tokens)
    assert mx.allclose(ours, made.model(mx.array([tokens]))[0], atol=1e-5)
    assert len(kept) == 3


def test_the_whole_model_drafts_right_and_a_part_of_it_does_not() -> None:
    made = model(llama)
    text = text_of(made, recorded(made))
    left = [min(4, LENGTH - 1 - i) for i in range(LENGTH - 1)]
    assert drafted(made, text, frozenset(), 4) == left
    half = frozenset(made.sublayers[2:])
    assert sum(drafted(made, text, half, 4)) < sum(left)
    assert made.share(frozenset()) == 1 and 0 < made.share(half) < 0.6


def test_the_best_depth_by_hand() -> None:
    kept = [[4, 4, 4, 4, 4]]
    assert speed(kept, FREE, 0.0) == pytest.approx((5, 4, 5))
    assert speed(kept, FREE, 0.5)[0] == pytest.approx(5 / 3)
    assert speed([[0, 0, 0]], FREE, 1.0) == pytest.approx((0.5, 1, 1))


def test_what_a_window_sees() -> None:
    seen = visible(Shape(2, 3, 1))  # rows: (level, column) = (0, 0), (0, 1), (1, 0), (1, 1)
    assert seen.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_a_window_learns_n_grams() -> None:
    window = Window(Shape(2, 3, 1), [[1, 2], [3, 4]])
    window.learn([5, 6])
    assert window.pool == {1: [(3, 5)], 2: [(4, 6)]} and window.guesses == [[3, 4], [5, 6]]
    assert window.candidates(2) == [(4, 6)] and window.candidates(9) == []
    assert common([1, 2, 3], [1, 2, 4]) == 2 and common([1], []) == 0


def test_the_steps_of_an_answer() -> None:
    made = model(llama)
    shape = Shape(3, 3, 2)
    steps = steps_of(made, recorded(made), shape, 0)
    assert sum(new for _, new in steps) == LENGTH - 1
    assert {rows for rows, _ in steps} <= {7, 9, 11}
    assert lookahead_speed(steps, FREE) == pytest.approx((LENGTH - 1) / len(steps))
    assert lookahead_speed(steps, Costs("", [1.0])) is None
