"""The trunk, a model without its lm_head: passes on sampled rows only, hands out hidden states.

Rule: nothing is computed or kept for a hidden state that no drafter asked for.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlx.nn import Module

from mlxspec.model.pages import View
from mlxspec.types import FINAL_NORM, Tap, UnsupportedModel

TRUNK_NAMES = ("model", "backbone", "transformer")  # mlx-lm's, of the module with the layers


def find_trunk(model: Module) -> tuple[Any, str]:
    """The part of a model that holds its trunk, beside its lm_head, and the trunk's name there.
    Raises UnsupportedModel."""
    for owner, name in product((model, getattr(model, "language_model", None)), TRUNK_NAMES):
        inner = _trunk_in(owner, name) if isinstance(owner, Module) else None
        if not isinstance(inner, Module):
            continue
        if "layers" in inner or any(isinstance(each, list) for each in inner.values()):
            return owner, name
    raise UnsupportedModel("a head cannot be used: mlx-lm has this model's layers elsewhere")


def _trunk_in(owner: Module, name: str) -> Any:
    """Not by getattr, which finds properties too: they cannot be set."""
    return _unwrapped(owner.get(name) or vars(owner).get(name))


def trunk_of(model: Module) -> Any:
    """A model's trunk: embeddings, layers and the final norm. Raises UnsupportedModel."""
    return _trunk_in(*find_trunk(model))


def decoder_layers(model: Module) -> list[Module]:
    """A model's decoder layers."""
    return [_unwrapped(layer) for layer in layers_in(trunk_of(model))]


def embedding_and_lm_head(model: Module) -> tuple[Any, Any]:
    """A model's functions from tokens to embeddings and from hidden states to logits. Raises
    UnsupportedModel."""
    owner, _ = find_trunk(model)
    embed = trunk_of(model).get("embed_tokens")
    if embed is None:
        raise UnsupportedModel("a head cannot be used: the model has no embed_tokens")
    lm_head = owner.get("lm_head") or embed.as_linear
    if hasattr(lm_head, "group"):
        raise UnsupportedModel("a head cannot be used: lm_head is split among the ranks")
    return embed, lm_head


@dataclass(eq=False)
class TappedLayer:
    """Stands in for a decoder layer, or for the trunk: puts its output [B, L, D] into the view
    where `tap` is asked for. All else is looked up on the inner module."""

    _inner: Module
    _tap: Tap
    _view: View

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._inner(*args, **kwargs)
        view = self._view
        if self._tap in view.taps:
            hidden = out[0] if isinstance(out, tuple) else out
            view.tapped[self._tap] = hidden
        if self._tap == FINAL_NORM and view.sampled is not None:
            rows = out.flatten(0, 1)[view.sampled]
            return rows[:, None]  # only sampled rows go on to lm_head
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def install_trunk(model: Module, view: View) -> Module | None:
    """Make the model's trunk a TappedLayer with this view, and return the trunk. None where there
    is none."""
    with suppress(UnsupportedModel):
        owner, name = find_trunk(model)
        inner: Module = _trunk_in(owner, name)
        setattr(owner, name, TappedLayer(inner, FINAL_NORM, view))
        install_taps(inner, view, ())
        return inner
    return None


def _unwrapped(module: Any) -> Any:
    """The module that an earlier runner wrapped."""
    return module._inner if isinstance(module, TappedLayer) else module


def layers_in(trunk: Module) -> Any:
    """The list of a trunk's layers; some models have it in a module of that name."""
    layers = trunk.get("layers", [])
    return layers.get("layers", []) if isinstance(layers, Module) else layers


def install_taps(
    trunk: Module,
    view: View,
    taps: Sequence[Tap],
) -> None:
    """Hand out these hidden states and no others from now on. Raises UnsupportedModel for a layer
    that the trunk does not have."""
    layers = layers_in(trunk)
    layers[:] = map(_unwrapped, layers)
    for i in set(taps) - {FINAL_NORM}:
        if not 0 <= i < len(layers):
            raise UnsupportedModel(f"layer {i} is to be read; the model has {len(layers)}")
        layers[i] = TappedLayer(layers[i], i, view)
    view.taps, view.tapped = tuple(taps), {}
