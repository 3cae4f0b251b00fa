"""What a step calls. Rule: the reference is the specification; a Metal kernel is used only where it has
matched the reference and won a race on that machine."""

from mlxspec.kernels.draw import sample_accept
from mlxspec.kernels.packed import Packing
from mlxspec.kernels.paged import proven_attention as paged_attention
from mlxspec.kernels.reference import Draws, Group

__all__ = ["Draws", "Group", "Packing", "paged_attention", "sample_accept"]
