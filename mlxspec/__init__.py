"""mlxspec: a local server for language models on Apple Silicon, built on MLX."""

import logging

__version__ = "0.2.0"

log = logging.getLogger("mlxspec")
