"""The trunk, a model without its lm_head: passes only sampled rows to lm_head, and hands out hidden
states.

Rule: nothing is computed or kept for a hidden state that no drafter asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from mlx.nn import Module

from mlxspec.model.pages import View
from mlxspec.types import FINAL_NORM, Tap, UnsupportedModel

TRUNK_NAMES = ("model", "backbone", "transformer")  # mlx-lm's, of the module with the layers


def find_trunk(model: Module) -> tuple[Any, Any]:
    """The module that holds a model's trunk, beside its lm_head; and the trunk: embeddings, layers
    and the final norm. Raises UnsupportedModel."""
    for owner, name in product((model, getattr(model, "language_model", None)), TRUNK_NAMES):
        # Not by getattr, which finds properties too.
        inner = owner.get(name) if isinstance(owner, Module) else None
        if not isinstance(inner, Module):
            continue
        if "layers" in inner or any(isinstance(child, list) for child in inner.values()):
            return owner, inner
    raise UnsupportedModel("mlx-lm has this model's layers elsewhere")


def trunk_of(model: Module) -> Any:
    """A model's trunk. Raises UnsupportedModel."""
    return find_trunk(model)[1]


def layers_in(trunk: Module) -> Any:
    """The list of a trunk's layers; some models have it in a module of that name."""
    layers = trunk.get("layers", [])
    return layers.get("layers", []) if isinstance(layers, Module) else layers


def decoder_layers(model: Module) -> list[Module]:
    """A model's decoder layers."""
    return list(layers_in(trunk_of(model)))


def embedding_and_lm_head(model: Module) -> tuple[Any, Any]:
    """A model's functions from tokens to embeddings and from hidden states to logits. Raises
    UnsupportedModel."""
    owner, trunk = find_trunk(model)
    embed = trunk.get("embed_tokens")
    if embed is None:
        raise UnsupportedModel("a head cannot be used: the model has no embed_tokens")
    lm_head = owner.get("lm_head") or embed.as_linear
    if hasattr(lm_head, "group"):
        raise UnsupportedModel("a head cannot be used: lm_head is split among the ranks")
    return embed, lm_head


class Tapped:
    """Mixed into the class of a decoder layer, or of the trunk: puts its output [B, L, D] into the
    view if its tap is requested. The trunk's passes only `view.sampled` rows on, to lm_head: as
    [rows, 1, D], or all of them where that is None. Without a view, for example in a layer of such
    a class that a head builds, it does nothing."""

    _tap: Tap
    _view: View | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out: Any = super().__call__(*args, **kwargs)  # type: ignore[misc]
        view = self._view
        if view is None:
            return out
        if self._tap in view.taps:
            hidden = out[0] if isinstance(out, tuple) else out
            view.tapped[self._tap] = hidden
        if self._tap == FINAL_NORM and view.sampled is not None:
            rows = out.flatten(0, 1)[view.sampled]
            return rows[:, None]
        return out


def mix_in(module: Any, mixin: type) -> None:
    """Put a class before a module's own, unless it is there; the names of its class stay."""
    kind = type(module)
    if not isinstance(module, mixin):
        names = {"__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (mixin, kind), names)


def mix_out(module: Any, mixin: type) -> None:
    """Undo `mix_in`, where it is the last one."""
    if isinstance(module, mixin):
        module.__class__ = type(module).__bases__[1]


class Watched:
    """Mixed into the class of a part while it is watched: keeps what it makes."""

    _seen: dict[str, Any]
    _name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y: Any = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._seen[self._name] = y
        return y


@contextmanager
def watched(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What these parts, by name, make from now on: the last of each, in the order of calls."""
    seen: dict[str, Any] = {}
    for name, part in parts.items():
        mix_in(part, Watched)
        part._seen, part._name = seen, name
    try:
        yield seen
    finally:
        for part in parts.values():
            mix_out(part, Watched)
            del part._seen, part._name


def _tap(module: Any, tap: Tap, view: View) -> None:
    mix_in(module, Tapped)
    module._tap, module._view = tap, view


def install_trunk(model: Module, view: View) -> Module | None:
    """Let the model's trunk and layers fill this view, and return the trunk. None where there is
    none."""
    with suppress(UnsupportedModel):
        trunk: Module = trunk_of(model)
        _tap(trunk, FINAL_NORM, view)
        install_taps(trunk, view, ())
        return trunk
    return None


def install_taps(trunk: Module, view: View, taps: Sequence[Tap]) -> None:
    """Hand out these hidden states and no others from now on."""
    layers = layers_in(trunk)
    for layer in layers:
        if isinstance(layer, Tapped):
            layer._view = None
    for i in set(taps) - {FINAL_NORM}:
        _tap(layers[i], i, view)
    view.taps, view.tapped = tuple(taps), {}
