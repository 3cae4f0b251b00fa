"""mlxspec: a local server for language models on Apple Silicon, built on MLX."""

import logging

__version__ = "0.1.0"

log = logging.getLogger("mlxspec")
