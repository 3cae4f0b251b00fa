"""Trees against chains: the score of a round by hand, and drafts that are the server's own."""

import numpy as np
import pytest

from bench.branches import Answer, Node, copy_trees, head_trees, load_pair
from bench.costs import Costs
from bench.trees import best, by_path, compare, learn, lines, reached, speed
from tests.heads import kinds

FREE = Costs("rows are free", [1.0 for _ in range(8)])
DEAR = Costs("each row is a step", [float(r) for r in range(1, 9)])
# Behind the newest token: 1 then 2, or, less likely, 7 then 8.
TREE = [Node(-1, 1, 0, "a"), Node(-1, 7, 1, "b"), Node(0, 2, 0, "a"), Node(1, 8, 0, "c")]
RATES = {"a": 0.6, "b": 0.3, "c": 0.9}


def test_what_lies_on_the_path() -> None:
    assert reached(TREE, [1, 2]) == [True, False, True, False]
    assert reached(TREE, [7, 2]) == [False, True, False, False]
    assert reached(TREE, [7]) == [False, True, False, False]


def test_a_chain_and_a_tree_by_hand() -> None:
    chain, tree = lines(TREE, [7, 8, 9], RATES)
    assert chain.expected.tolist() == pytest.approx([1, 1.6, 1.96])
    assert chain.accepted.tolist() == [0, 0, 0] and chain.paths.tolist() == [0, 0, 0]
    assert tree.expected.tolist() == pytest.approx([1, 1.6, 1.96, 2.26, 2.53])
    assert tree.accepted.tolist() == [0, 0, 0, 1, 2] and tree.paths.tolist() == [0, 0, 0, 1, 1]
    assert tree.rows[-1].tolist() == [1, 2]


def test_speeds_by_hand() -> None:
    chain, tree = lines(TREE, [7, 8, 9], RATES)
    some = [chain, chain, chain], [tree, tree, tree]
    assert speed(some[:1], FREE, 0, 0, 2) == pytest.approx(1)
    assert speed(some[1:], FREE, 0, 0, 4) == pytest.approx(3)  # two drafts and the sample
    assert speed(some[1:], DEAR, 0, 0, 4) == pytest.approx(3 / 5)
    assert speed(some[1:], FREE, 0.5, 0.25, 4) == pytest.approx(3 / 2)  # two passes
    assert speed(some[1:], Costs("", FREE.steps, 0.5), 0, 0, 4) == pytest.approx(3 / 1.5)
    assert best(some[1:], FREE, 0, 0) == pytest.approx(3)
    assert best(some[1:], DEAR, 0, 0) == pytest.approx(1)


def test_rates_count_where_the_parent_was_right() -> None:
    rates = learn([[TREE, TREE]], [[0, 1, 2]])  # behind 0 comes 1, 2; behind 1 comes 2
    assert rates == pytest.approx({"a": 2.2 / 4, "b": 0.2 / 3})


def test_of_a_fixed_shape_only_positions_and_ranks_are_known() -> None:
    assert [node.key for node in by_path(TREE)] == [(0,), (1,), (0, 0), (1, 0)]
    sure = [Node(-1, 1, 0, "sure"), Node(-1, 7, 1, "no")]
    unsure = [Node(-1, 1, 0, "unsure"), Node(-1, 7, 1, "yes")]
    told = [[sure, sure, unsure, unsure] for _ in range(2)]
    truth = [[0, 1, 1, 7, 7] for _ in range(2)]
    costs = [Costs("a row costs half a step", [1.0, 1.5, 2.0])]
    [(_, tree)] = compare(told, truth, costs, 0, 0)
    [(_, fixed)] = compare(told, truth, costs, 0, 0, shaped=True)
    assert tree > fixed  # which node is likely now is seen in what was drafted


def test_copies_branch_where_they_went_on_otherwise() -> None:
    answer = Answer([1, 2, 3, 4, 1, 2, 9, 4, 1, 2, 3], start=8)
    first = copy_trees(answer, 2)[1]  # behind the newest 1, 2
    assert {node.token for node in first if node.parent < 0} == {3, 9}
    assert {node.token for node in first if node.parent >= 0} == {4}


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_chain_is_what_the_head_drafts(kind: str) -> None:
    target, head, prompts, greedy = load_pair(kind, kinds.DATA)
    answer = Answer([*prompts[0], *greedy[0][:3]], len(prompts[0]))
    tree = head_trees(head, target, answer)[0]
    chain, parent = [], -1
    for i, node in enumerate(tree):
        if (node.parent, node.rank) == (parent, 0):
            chain.append(node.token)
            parent = i
    wanted = kinds.reference(kind)["by_depth"]["4"]["drafts_of_first"][0][0]
    assert chain[:4] == wanted


def test_more_nodes_are_no_loss_where_rows_are_free() -> None:
    trees, truth = [TREE, TREE, TREE], [0, 7, 8, 9]
    [(chain, tree)] = compare([trees, trees], [truth, truth], [FREE], 0, 0)
    assert tree > chain >= 1
    assert np.isfinite(tree)
