"""From the settings to what is to be loaded: the model, its tokenizer, its draft model, the engine's options.

Rule: the server and the bench start alike. BLAS is loaded before this is imported.
"""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxspec.config import Config
from mlxspec.engine.start import Options
from mlxspec.model.catalog import Resolved, default_cache_dir, resolve
from mlxspec.text.prompt import Tokenizer, check_draft, load_tokenizer


@dataclass(frozen=True, slots=True)
class Chosen:
    """`small` is the draft model, where there is one."""

    found: Resolved
    small: Resolved | None
    tokenizer: Tokenizer
    options: Options


def choose(config: Config) -> Chosen:
    """Fetches and converts what is not there yet. Raises ConfigError and Unfit."""
    cache = cache_of(config)
    metal = sys.platform == "darwin" and platform.machine() == "arm64"
    found = resolve(config.model, cache, metal)
    tokenizer = load_tokenizer(found.path)
    small = None
    if config.speculate == "on" and (named := config.draft or found.draft):
        small = resolve(named, cache, metal)
        check_draft(tokenizer, load_tokenizer(small.path), (found.name, small.name))
    options = Options(
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        memory=int(config.memory_gb * 2**30),
        context=config.context,
        layout=config.layout,
        kv_bits=config.kv_bits,
        max_sequences=config.max_sequences,
        prefill_budget=config.prefill_budget,
        decode_gap=config.decode_gap_ms / 1000,
        speculate=config.speculate == "on",
        draft=small.path if small else None,
        cache=cache / "costs",
        disk=cache / "prompts",
        disk_bytes=int(config.cache_gb * 2**30),
    )
    return Chosen(found, small, tokenizer, options)


def cache_of(config: Config) -> Path:
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
