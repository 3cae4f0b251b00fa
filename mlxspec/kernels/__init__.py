"""What a step calls. Rule: the reference is the specification; a Metal kernel is used only where it
has matched the reference and won a race on that machine."""

from mlxspec.kernels.attention import proven_attention as paged_attention
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import Draws, Group
from mlxspec.kernels.sampling import sample_accept

__all__ = ["Draws", "Group", "Packing", "paged_attention", "sample_accept"]
