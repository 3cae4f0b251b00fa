"""mlxspec: a local server for language models on Apple Silicon, built on MLX."""

__version__ = "0.1.0"
