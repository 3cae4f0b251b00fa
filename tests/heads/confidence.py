"""Whether DSpark's confidence head would help to choose how much to draft, on the trained tiny pair.

    python -m tests.heads.confidence

At every position of the recorded greedy answers a whole block is drafted, with the confidence of
each token and how many would be accepted; policies are then played on that, exactly. Times are in
steps of one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402

from mlxspec.speculate.controller import AcceptanceRates, Controller, Costs, Proposal  # noqa: E402
from mlxspec.speculate.proposer import FIRST_TOKEN  # noqa: E402
from tests.heads import kinds, make_more  # noqa: E402

WIDTH = 7
KEYS = [("dspark", i + 1) for i in range(WIDTH)]
SETTINGS = [(row, fixed) for row in (0.01, 0.03, 0.1, 0.2) for fixed in (0.05, 0.15)]


@dataclass(frozen=True)
class Block:
    """A draft after some token: the chance of each of its tokens, if those before it are accepted,
    and how many would be."""

    chances: tuple[float, ...]
    accepted: int


class Rows:
    """In the place of pages, to catch K and V of the context."""

    def __init__(self, count: int) -> None:
        self.view = SimpleNamespace(positions=mx.arange(count))
        self.offset = 0

    def write(self, k: mx.array, v: mx.array) -> None:
        self.keys, self.values = (x[:, :, 0].swapaxes(0, 1)[None] for x in (k, v))

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        before = self.keys[:, :, : self.offset], self.values[:, :, : self.offset]
        return mx.concatenate([before[0], k], 2), mx.concatenate([before[1], v], 2)


def blocks_of(prompt: list[int], answer: list[int]) -> list[Block]:
    """A block after each token of the answer but the last ones."""
    tensors, _ = kinds.trained("dspark")
    head = kinds.head_of(kinds.DATA / "dspark", kinds.plain_target())
    module, known = head.module, prompt + answer
    taps, _ = make_more.hidden_states(kinds.plain_target(), mx.array([known]), head.taps)
    layers: list[Any] = [Rows(len(known)) for _ in module.layers]
    module.store(taps[0].astype(mx.float32), layers)
    made = []
    for newest in range(len(prompt), len(known) - WIDTH):
        for each in layers:
            each.offset = newest
        ids = mx.array([[known[newest], *(module.mask for _ in range(WIDTH - 1))]])
        seen = mx.ones((1, 1, WIDTH, newest + WIDTH), mx.bool_)
        hidden = module(head.embed(ids), [(seen, each) for each in layers])
        logits, before, draft, chances = head.lm_head(hidden), known[newest], [], []
        for i in range(WIDTH):
            last = mx.array([before])
            features = mx.concatenate([hidden[:, i], module.markov_head.markov_w1(last)], -1)
            sure = features @ tensors["confidence_head.proj.weight"].T
            sure = mx.sigmoid(sure + tensors["confidence_head.proj.bias"])
            before = int(module.scores(logits[:, i], hidden[:, i], last).argmax())
            draft.append(before)
            chances.append(float(sure.item()))
        right = np.array(draft) == np.array(known[newest + 1 : newest + 1 + WIDTH])
        made.append(Block(tuple(chances), int(np.cumprod(right).sum())))
    return made


# ---- policies
# ---------------------------------------------------------------------------------------------


class Learned:
    """The server's: depths from acceptance rates by position. `soft`: positions behind a rejected
    token, of which nothing is known, are learned from the confidence. `prior`: rates start from the
    mean confidence by position."""

    def __init__(self, row: float, fixed: float, soft: bool = False, prior: bool = False) -> None:
        line = (1.0, 1.0 + 31 * row)
        self.control = Controller(Costs((64, 128), (1, 32), (line, line)), self._first)
        self.fixed, self.soft, self.prior = fixed, soft, prior
        self.means: list[list[float]] = [[] for _ in KEYS]
        self.begin()

    def _first(self, key: tuple[str, int]) -> float:
        place = key[1]
        if self.prior and self.means[place - 1]:
            return float(np.mean(self.means[place - 1]))
        return FIRST_TOKEN if place == 1 else self.control.rate.of((key[0], place - 1))

    def begin(self) -> None:
        self.stats: AcceptanceRates = self.control.begin()

    def depth(self, block: Block) -> int:
        rates = [self.stats.of(key) for key in KEYS]
        option = Proposal("dspark", rates, 1e-6, self.fixed, KEYS)
        ((depth, _),) = self.control.decide([self.stats], [[option]], 64, "overlap")
        return depth

    def learn(self, block: Block, depth: int) -> None:
        accepted = min(depth, block.accepted)
        self.control.learn(self.stats, KEYS[:depth], accepted)
        if not depth:
            return
        for means, chance in zip(self.means, block.chances, strict=True):
            means.append(chance)
        if self.soft:
            for rate in (self.control.rate, self.stats):
                for key, chance in list(zip(KEYS, block.chances, strict=True))[accepted + 1 :]:
                    rate.learn(key, chance)  # type: ignore[arg-type]


class Cut:
    """Drafts a whole block, waits for its confidences and verifies what they are worth. The wait is
    free here."""

    def __init__(self, row: float, fixed: float) -> None:
        self.row, self.fixed = row, fixed

    def begin(self) -> None: ...

    def depth(self, block: Block) -> int:
        tokens = 1 + np.cumsum(np.cumprod(block.chances))
        seconds = 1 + self.fixed + self.row * np.arange(1, WIDTH + 1)
        return int((tokens / seconds).argmax()) + 1

    def learn(self, block: Block, depth: int) -> None: ...


class Known(Cut):
    """Verifies what will be accepted, and a token more if there is one: no policy can do better."""

    def depth(self, block: Block) -> int:
        return max(1, block.accepted)


def speed(policy: Any, answers: Sequence[list[Block]], row: float, fixed: float) -> float:
    """Tokens per step of one row."""
    tokens, seconds = 0, 0.0
    for blocks in answers:
        policy.begin()
        at = 0
        while at < len(blocks):
            depth = policy.depth(blocks[at])
            policy.learn(blocks[at], depth)
            new = 1 + min(depth, blocks[at].accepted)
            tokens += new
            at += new
            seconds += 1 + row * depth + (fixed if depth else 0)
    return tokens / seconds


POLICIES: dict[str, Callable[[float, float], Any]] = {
    "learned": Learned,
    "soft": lambda row, fixed: Learned(row, fixed, soft=True),
    "prior": lambda row, fixed: Learned(row, fixed, prior=True),
    "cut": Cut,
    "known": Known,
}


def main() -> None:
    reference = kinds.reference("dspark")
    pairs = zip(reference["prompts"], reference["greedy"], strict=True)
    answers = [blocks_of(prompt, answer) for prompt, answer in pairs]
    every = [block for blocks in answers for block in blocks]
    print(f"{len(every)} blocks; position, reached, accepted, mean confidence, AUC")
    for i in range(WIDTH):
        reached = [b for b in every if b.accepted >= i]
        right = np.array([b.accepted > i for b in reached])
        sure = np.array([b.chances[i] for b in reached])
        above = sure[right][:, None] - sure[~right]
        area = (above > 0).mean() + (above == 0).mean() / 2
        print(f"{i + 1}  {len(reached):4}  {right.mean():.2f}  {sure.mean():.2f}  {area:.2f}")
    print("tokens per step of one row: all answers by one server; each by a new one")
    for row, fixed in SETTINGS:
        found = []
        for name, make in POLICIES.items():
            together = speed(make(row, fixed), answers, row, fixed)
            alone = np.mean([speed(make(row, fixed), [one], row, fixed) for one in answers])
            found.append(f"{name} {together:.3f} {alone:.3f}")
        print(f"row {row}, draft {fixed}: ", "  ".join(found))


if __name__ == "__main__":
    main()
