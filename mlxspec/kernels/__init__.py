"""Attention over pages. Rule: the reference is the specification; a Metal kernel is used only where it has
matched the reference and won a race on that machine. No model uses one yet: this is the reference."""

from mlxspec.kernels.packed import Packing
from mlxspec.kernels.reference import Group, paged_attention

__all__ = ["Group", "Packing", "paged_attention"]
