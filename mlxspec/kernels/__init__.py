"""The operations of a step: paged attention and sampling, by Metal kernels where they are proven.

Rule: the reference is the specification; a kernel runs only after it matched the reference and was
faster than MLX's own operation on this machine.
"""
