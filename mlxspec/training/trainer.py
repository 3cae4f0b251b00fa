"""Trains a head on samples, and measures it on those held out.

The loss is the cross-entropy with the target's distribution for each token of a draft; later tokens
weigh less (EAGLE-3, arXiv 2503.01840).
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxspec.speculate.heads.eagle import load_eagle
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.training.eagle import CHAIN, eagle_drafts
from mlxspec.training.samples import Sample
from mlxspec.training.target import Batch, Target

FADE = 0.8
SIMILAR = 32  # tokens by which the lengths in a batch may differ
LENGTH = 512  # most tokens of a window
ROWS = 512  # tokens of a batch, with its padding
MATRIX_RATE = 0.05  # learning rate at its highest
VECTOR_RATE = 6e-4
WARM_UP = 20  # steps
LAYER_ROWS = 12  # hidden states of a row that a layer keeps for its gradients


def windows(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of at most LENGTH tokens: the end of a long prompt, all parts of a long answer."""
    parts = []
    for sample in samples:
        begin = max(0, sample.first - LENGTH // 2)
        for start in range(begin, len(sample.tokens), LENGTH):
            tokens = sample.tokens[start : start + LENGTH]
            part = Sample(tokens, max(0, sample.first - start))
            if len(part) > 0 and len(tokens) > SIMILAR:
                parts.append(part)
    return parts


def batches(samples: Sequence[Sample], epochs: int = 1) -> list[list[Sample]]:
    """All samples in batches of similar length, in a new order in each epoch."""
    order = list(samples)
    rng = random.Random("batches")
    rng.shuffle(order)
    order.sort(key=lambda s: len(s.tokens) // SIMILAR)
    groups: list[list[Sample]] = []
    for sample in order:
        longest = len(sample.tokens) // SIMILAR * SIMILAR + SIMILAR
        if not groups or (len(groups[-1]) + 1) * longest > ROWS:
            groups.append([])
        groups[-1].append(sample)
    return [batch for _ in range(epochs) for batch in rng.sample(groups, len(groups))]


class Trainer:
    """A head from its files, and its optimizer. `steps`: of all epochs, for the schedule of the
    learning rate, which `rate` scales; `done`: steps so far. Raises UnsupportedModel."""

    def __init__(
        self,
        target: Target,
        files: HeadFiles,
        steps: int,
        rate: float = 1.0,
    ) -> None:
        self.head = load_eagle(files, target.model)
        self.target = target
        self.done = 0
        added = files.tensors["d2t"]
        target.tap(self.head.taps, mx.arange(len(added)) + added)
        self.head.module.lm_head.freeze()
        flat: Any = tree_flatten(self.head.module.trainable_parameters())
        self.weights: Any = tree_unflatten([(n, w.astype(mx.float32)) for n, w in sorted(flat)])
        # Muon learns as much from half the answers; weight decay would be larger than a gradient.
        muon = optim.Muon(_schedule(rate * MATRIX_RATE, steps), weight_decay=0)
        others = optim.AdamW(_schedule(rate * VECTOR_RATE, steps), betas=[0.9, 0.95])
        self.optimizer = optim.MultiOptimizer([muon, others], [lambda _, w: w.ndim == 2])
        self.optimizer.init(self.weights)
        self._step = mx.value_and_grad(self._loss)

    def step(self, samples: Sequence[Sample]) -> float:
        """Learn from a batch. Returns its loss."""
        batch = self.target.batch(samples)
        loss, grads = self._step(self.weights, batch)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        updated: Any = tree_flatten(self.optimizer.apply_gradients(grads, self.weights))
        # Sorted: the norm of all gradients is summed in this order, and MultiOptimizer's varies.
        self.weights = tree_unflatten(sorted(updated))
        self._use(self.weights)
        self.done += 1  # before the wait, during which Ctrl-C may come
        mx.eval(self.weights, self.optimizer.state, loss)
        return float(np.array(loss))

    def measure(
        self,
        samples: Sequence[Sample],
        wait: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """The share of drafts of held-out samples with more than 0, 1, ... correct tokens: the
        target's likeliest ones. `wait` is called before each batch."""
        correct = [0.0] * CHAIN
        tried = 0.0
        for group in batches(samples):
            wait()
            batch = self.target.batch(group)
            best = batch.teacher.argmax(axis=-1)
            alive: Any = 1
            for i, (logits, positions) in enumerate(eagle_drafts(self.head, batch)):
                if i == 0:
                    tried += float(np.array(batch.learned[:, positions].sum()))
                same = logits.argmax(axis=-1) == best[:, positions]
                alive = alive * same * batch.weight[:, positions]
                correct[i] += float(np.array(alive.sum()))
        return [count / max(1.0, tried) for count in correct]

    def _loss(
        self,
        weights: Any,
        batch: Batch,
    ) -> mx.array:
        self._use(weights)
        total = mx.array(0.0)
        for i, (logits, positions) in enumerate(eagle_drafts(self.head, batch)):
            teacher = mx.softmax(batch.teacher[:, positions].astype(mx.float32), axis=-1)
            logits = logits.astype(mx.float32)
            entropy = mx.logsumexp(logits, axis=-1) - (teacher * logits).sum(axis=-1)
            weight = batch.weight[:, positions]
            mean = (entropy * weight).sum() / mx.maximum(weight.sum(), 1)
            total = total + FADE**i * mean
        return total

    def _use(self, weights: Any) -> None:
        """Give the head these weights, in the target's precision."""
        self.head.module.update(tree_map(lambda w: w.astype(self.target.dtype), weights))

    def needed_bytes(self) -> int:
        """Memory of a step besides the target's weights: for each of the head's weights the weight
        in both precisions, its gradient and momentum; for each row logits in fp32, with gradients,
        and the hidden states inside the head."""
        flat: Any = tree_flatten(self.weights)
        module = self.head.module
        logits = 2 * len(module.lm_head.weight)
        hidden = LAYER_ROWS * self.target.width + 3 * len(module.layers[0].mlp.up_proj.weight)
        rows = ROWS * (CHAIN + 1) * (logits + hidden)
        weights = sum(w.nbytes for _, w in flat)
        return int(4 * weights + 4 * rows)

    # ---- checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, mx.array]:
        """All that a stopped training needs to go on."""
        tree = {"weights": self.weights, "optimizer": self.optimizer.state}
        flat: Any = tree_flatten(tree | {"done": mx.array(self.done)})
        return dict(flat)

    def resume(self, state: Mapping[str, mx.array]) -> None:
        tree: Any = tree_unflatten(sorted(state.items()))
        self.done = int(np.array(tree["done"]))
        self.weights = tree["weights"]
        self.optimizer.state = tree["optimizer"]
        self._use(self.weights)


def _schedule(
    rate: float,
    steps: int,
) -> Callable[[mx.array], mx.array]:
    """A learning rate that rises, then falls to a twentieth by the last step."""
    up = optim.linear_schedule(rate / WARM_UP, rate, WARM_UP)
    down = optim.cosine_decay(rate, max(1, steps - WARM_UP), rate / 20)
    return optim.join_schedules([up, down], [WARM_UP])


def vocabulary_of(
    samples: Sequence[Sample],
    size: int,
    total: int,
) -> list[int]:
    """Token ids of a draft vocabulary of `size`, ascending: the most frequent ones in the samples,
    then the lowest, which tokenizers give to what they saw most. `total`: the size of the model's
    vocabulary."""
    counts = Counter(token for s in samples for token in s.tokens[s.first :])
    best = sorted(range(total), key=lambda token: -counts[token])
    return sorted(best[:size])
