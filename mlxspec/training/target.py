"""The model that a head is trained for: the hidden states it reads, the tokens it should draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.model.checkpoint import flat
from mlxspec.model.pages import View
from mlxspec.model.trunk import embedding_and_lm_head, install_taps, trunk_of
from mlxspec.speculate.heads.tensors import sizes_of
from mlxspec.training.samples import Sample
from mlxspec.types import Json, Tap


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids `tokens` int32 [B, L], the target's hidden states `taps` [B, L, width], its logits
    `teacher` [B, L, draft vocabulary]; `learned` bool [B, L]: whether the next token should be
    learned, `weight` [B, L]: 1 where it can be drafted too, else 0."""

    tokens: mx.array
    taps: mx.array
    teacher: mx.array
    learned: mx.array
    weight: mx.array


class Target:
    """A loaded model and its config.json. Raises UnsupportedModel where no head can read its
    hidden states."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        config: Json,
    ) -> None:
        self.name = name
        self.model = model
        self.config = flat(config)
        self.trunk = trunk_of(model)
        embed, lm_head = embedding_and_lm_head(model)
        self.lm_head = getattr(lm_head, "__self__", lm_head)  # tied: embed.as_linear
        self.width, self.vocab = sizes_of(model)
        self.dtype = embed(mx.array([0])).dtype
        self._view = View(1, {None: 1}, {None: 1})

    def tap(
        self,
        taps: Sequence[Tap],
        drafted: mx.array,
    ) -> None:
        """Have `batch` return these hidden states, and the logits of the tokens `drafted`."""
        install_taps(self.trunk, self._view, taps)
        self.drafted = drafted
        self._is_drafted = mx.zeros((self.vocab,)).at[self.drafted].add(1)

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Samples side by side, computed."""
        length = max(len(s.tokens) for s in samples)
        tokens = mx.array([s.tokens + [0] * (length - len(s.tokens)) for s in samples])
        after = range(1, length + 1)
        learned = mx.array([[s.first <= i < len(s.tokens) for i in after] for s in samples])
        following = mx.roll(tokens, -1, 1)
        logits: Any = self.model(tokens)
        taps = mx.concatenate([self._view.tapped[t] for t in self._view.taps], axis=-1)
        self._view.tapped.clear()
        weight = learned * self._is_drafted[following]
        batch = Batch(tokens, taps, logits[..., self.drafted], learned, weight)
        mx.eval(batch.taps, batch.teacher, batch.weight)
        return batch
