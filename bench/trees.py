"""Compares trees of drafts with chains: which would be faster, at what costs? `python -m bench.trees`.

Rule: both draft by the same drafter, and both choose by the same rule, the most expected tokens per
second; what a node is worth is learned on the other half of the answers. A round counts what was
really accepted. Of a tree's drafting only the nodes that are continued are charged, as if they were
known before; with `--fixed`, both choose by positions and ranks alone, as rounds do that wait for
nothing, among paths whose likelihood was known: a fixed tree gains at most so much.
"""

import argparse
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from mlxspec import blas

blas.load()

import numpy as np  # noqa: E402  after BLAS

from bench import heads, replay  # noqa: E402
from bench.branches import (  # noqa: E402
    Answer,
    Tree,
    answer_of,
    copy_trees,
    head_trees,
    load_files,
    load_pair,
)
from bench.costs import CPU, Costs, macs  # noqa: E402
from bench.roofline import CONFIGS, sized  # noqa: E402

PAIRS = ("mtp", "eagle3", "dflash", "dflash2", "dspark")
COPIED = 31  # tokens of a copy at most
LENGTH = 64  # tokens of an answer of a tiny pair
OWN_HEAD = 5.5 / 48  # of a plain step: a pass of SmolLM2's head, on the CPU of `bench.costs`
Rates = dict[Hashable, float]


@dataclass(frozen=True, slots=True)
class Line:
    """What one more node of a draft brings, by their number, from none: expected tokens, tokens
    that were accepted, paths beside the first, and rows of the drafter's passes, [nodes, depth]."""

    expected: np.ndarray
    accepted: np.ndarray
    paths: np.ndarray
    rows: np.ndarray


def reached(tree: Tree, truth: Sequence[int]) -> list[bool]:
    """Whether each node lies on the path of `truth`, the tokens that follow."""
    on, depth = [], []
    for node in tree:
        level = 0 if node.parent < 0 else depth[node.parent] + 1
        above = node.parent < 0 or on[node.parent]
        depth.append(level)
        on.append(above and level < len(truth) and truth[level] == node.token)
    return on


def learn(trees: Sequence[Sequence[Tree]], truths: Sequence[Sequence[int]]) -> Rates:
    """By key: how often a node was right where its parent was. `truths` are whole answers, whose
    token i is the newest one of tree i."""
    hits: dict[Hashable, float] = {}
    tries: dict[Hashable, int] = {}
    for some, truth in zip(trees, truths, strict=True):
        for i, tree in enumerate(some):
            on = reached(tree, truth[i + 1 :])
            for node, right in zip(tree, on, strict=True):
                if node.parent < 0 or on[node.parent]:
                    hits[node.key] = hits.get(node.key, 0) + right
                    tries[node.key] = tries.get(node.key, 0) + 1
    return {key: (hits[key] + 0.2) / (n + 1) for key, n in tries.items()}


def by_path(tree: Tree) -> Tree:
    """The tree with the ranks from its root to each node as the node's key."""
    paths: list[tuple[int, ...]] = []
    for node in tree:
        above = paths[node.parent] if node.parent >= 0 else ()
        paths.append((*above, node.rank))
    return [replace(node, key=path) for node, path in zip(tree, paths, strict=True)]


def lines(tree: Tree, truth: Sequence[int], rates: Rates) -> tuple[Line, Line]:
    """Of the chain and of the tree, whose nodes come by their expected chance."""
    on = reached(tree, truth)
    chance: list[float] = []
    depth: list[int] = []
    first: list[bool] = []  # on the chain
    for node in tree:
        up = node.parent
        chance.append((chance[up] if up >= 0 else 1.0) * rates.get(node.key, 0.0))
        depth.append(depth[up] + 1 if up >= 0 else 1)
        first.append(node.rank == 0 and (up < 0 or first[up]))
    order = sorted(range(len(tree)), key=lambda i: (-chance[i], i))
    made = []
    for chosen in ([i for i in range(len(tree)) if first[i]], order):
        expected = np.cumsum([1.0, *(chance[i] for i in chosen)])
        accepted = np.maximum.accumulate([0, *(depth[i] if on[i] else 0 for i in chosen)])
        made.append(Line(expected, accepted, *shape(tree, chosen, depth)))
    return made[0], made[1]


def shape(tree: Tree, chosen: Sequence[int], depth: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Line's `paths` and `rows` of nodes that are added in this order."""
    parents: set[int] = set()
    paths, count = [0], 0
    rows = np.zeros((len(chosen) + 1, max(depth, default=0)), int)
    for n, i in enumerate(chosen, 1):
        rows[n] = rows[n - 1]
        if tree[i].parent in parents:
            count += 1
        else:
            parents.add(tree[i].parent)
            rows[n, depth[i] - 1] += 1
        paths.append(count)
    return np.array(paths), rows


def speed(
    answers: Sequence[Sequence[Line]], costs: Costs, fixed: float, token: float, nodes: int | None
) -> float:
    """Tokens per plain step over answers, with `nodes` drafted in each round, None: as many as the
    rule says. Drafting costs `fixed`, and `token` for a pass of one row."""
    tokens = spent = 0.0
    steps = np.array(costs.steps)
    passes = np.array([0.0, *costs.steps])  # by rows
    for some in answers:
        i = 0
        while i < len(some):
            line = some[i]
            known = min(len(line.expected), len(steps))
            cost = steps[:known] + costs.path * line.paths[:known]
            cost[1:] += fixed
            if token:
                cost += token * passes[line.rows[:known]].sum(axis=1)
            n = int(np.argmax(line.expected[:known] / cost))
            if nodes is not None:
                n = min(nodes, known - 1)
            new = int(line.accepted[n]) + 1
            tokens += min(new, len(some) - i)
            spent += float(cost[n])
            i += new
    return tokens / spent


def best(answers: Sequence[Sequence[Line]], costs: Costs, fixed: float, token: float) -> float:
    """The faster of the rule and of the best fixed number of nodes, in hindsight."""
    most = max(len(line.expected) for some in answers for line in some) - 1
    tried = [n for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 31) if n <= most]
    return max(speed(answers, costs, fixed, token, n) for n in (None, *tried))


def compare(
    trees: Sequence[Sequence[Tree]],
    truths: Sequence[Sequence[int]],
    tables: Sequence[Costs],
    fixed: float,
    token: float,
    shaped: bool = False,
) -> list[tuple[float, float]]:
    """(tokens per plain step of the best chain, of the best tree) for each table of costs. `shaped`:
    their shapes are known before they are drafted."""
    if shaped:
        trees = [[by_path(tree) for tree in some] for some in trees]
    halves = [learn(trees[half::2], truths[half::2]) for half in (1, 0)]  # the other half's
    chains, branched = [], []
    for n, (some, truth) in enumerate(zip(trees, truths, strict=True)):
        pairs = [lines(tree, truth[i + 1 :], halves[n % 2]) for i, tree in enumerate(some)]
        chains.append([chain for chain, _ in pairs])
        branched.append([tree for _, tree in pairs])
    return [
        (best(chains, costs, fixed, token), best(branched, costs, fixed, token)) for costs in tables
    ]


def drafting(kind: str) -> tuple[float, float]:
    """(plain steps of a draft, of each pass): that of such a head of a 27B."""
    text = json.loads((CONFIGS / "qwen3.8-27b.json").read_text("utf-8"))
    inner = text["text_config"]
    made = {
        "mtp": heads.mtp(inner),
        "eagle3": heads.eagle3(inner, inner["intermediate_size"]),
        "dflash": heads.block(inner, inner["intermediate_size"]),
        "dflash2": heads.block(inner, inner["intermediate_size"]),
        "dspark": heads.block(inner, inner["intermediate_size"], rank=256),
    }[kind]
    step = sized(text, 4).dense
    return made.draft(0) / step, (made.draft(1) - made.draft(0)) / step


def pair_row(
    kind: str,
    data: Path,
    temperature: float,
    answers: int,
    tables: Sequence[Costs],
    shaped: bool,
) -> list[tuple[float, float]]:
    """A line of the table, of a pair of tests/heads. At a temperature the better of two ways to
    draw counts, for the chain and for the tree: with the target's noise, and the likeliest."""
    target, head, prompts, greedy = load_pair(kind, data)
    if temperature:
        made = [
            answer_of(target, prompt, LENGTH, temperature, seed)
            for seed, prompt in enumerate(prompts[:answers])
        ]
    else:
        both = zip(prompts[:answers], greedy, strict=False)
        made = [Answer([*prompt, *said], len(prompt)) for prompt, said in both]
    truths = [a.tokens[a.start :] for a in made]
    found = []
    for coupled in (False, True) if temperature else (False,):
        trees = [head_trees(head, target, a, temperature, coupled) for a in made]
        found.append(compare(trees, truths, tables, *drafting(kind), shaped))
    return [tuple(map(max, zip(*ways, strict=True))) for ways in zip(*found, strict=True)]


def recordings(files: Sequence[Path]):
    """(name, answers, what each of them says) of each recording."""
    for file in files:
        recorded = [r for r in replay.read(file) if len(r.output) > 1]
        answers = [Answer([*r.prompt, *r.output], len(r.prompt)) for r in recorded]
        yield file.stem, answers, [a.tokens[a.start :] for a in answers]


def copy_rows(files: Sequence[Path], tables: Sequence[Costs]):
    """A line of the table for each recording, drafted by copies."""
    for name, answers, truths in recordings(files):
        trees = [copy_trees(a, COPIED) for a in answers]
        yield f"copies, {name}", compare(trees, truths, tables, 0.0, 0.0)


def head_rows(
    files: Sequence[Path], model: Path, head: Path, tables: Sequence[Costs], shaped: bool
):
    """A line of the table for each recording, drafted by a head's likeliest tokens; each of its
    passes costs what SmolLM2's do on the CPU of `bench.costs`."""
    target, loaded = load_files(model, head)
    for name, answers, truths in recordings(files):
        trees = [head_trees(loaded, target, a) for a in answers]
        yield f"head, {name}", compare(trees, truths, tables, 0.0, OWN_HEAD, shaped)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trees", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="recordings, to be drafted by copies")
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=PAIRS)
    parser.add_argument("--data", type=Path, default=Path("tests/heads/data"))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--answers", type=int, default=12, help="of each pair, at most")
    parser.add_argument("--model", type=Path, help="of the recordings, with --head")
    parser.add_argument(
        "--head", type=Path, help="in the place of copies; its passes cost OWN_HEAD"
    )
    parser.add_argument("--fixed", action="store_true", help="heads' drafts have fixed shapes")
    args = parser.parse_args()
    tables = [CPU, *macs()]
    made = Table(box=MARKDOWN)
    for name in ("drafts", *(t.name for t in tables)):
        made.add_column(name, no_wrap=True)
    if args.head:
        rows = list(head_rows(args.files, args.model, args.head, tables, args.fixed))
    else:
        rows = list(copy_rows(args.files, tables))
    for kind in args.pairs:
        for temperature in args.temperatures:
            row = pair_row(kind, args.data, temperature, args.answers, tables, args.fixed)
            rows.append((f"{kind}, T = {temperature:g}", row))
    for name, found in rows:
        cells = [f"{chain:.2f} {tree:.2f} {tree / chain - 1:+.0%}" for chain, tree in found]
        made.add_row(name, *cells)
    console = Console(width=400)
    console.print("tokens per plain step: of the best chain, of the best tree, and the gain")
    console.print(made)


if __name__ == "__main__":
    main()
