"""What a step calls: attention over pages and sampling, by Metal kernels where they are proven.

Rule: the reference is the specification; a kernel runs only after it matched the reference and was
faster than MLX's own operation on this machine.
"""

from mlxspec.kernels.attention import paged_attention
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.reference import Attention, Draws, Group
from mlxspec.kernels.sampling import sample_accept

__all__ = [
    "Attention",
    "Draws",
    "Group",
    "Packing",
    "paged_attention",
    "sample_accept",
]
