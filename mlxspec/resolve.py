"""From the settings to what is to be loaded: models, tokenizers, draft models, the engine's
options.

Rule: the server and the bench start alike. BLAS is loaded before this is imported.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from mlxspec.config import Config, ConfigError
from mlxspec.engine import memory
from mlxspec.engine.loader import Options, start
from mlxspec.engine.models import ModelManager, ModelSlot
from mlxspec.model.hub import DEFAULT, Resolved, cache_of, cards, find_local, prompts_of, resolve
from mlxspec.model.layout import context_of
from mlxspec.model.runner import owed
from mlxspec.text.chat import Tokenizer, check_draft, load_tokenizer
from mlxspec.types import ModelInfo, UnsupportedModel, blame

PROOFS = "kernels"  # in the cache directory
LEAST = 1 << 28  # bytes beside the weights: a small KV pool and a step's activations


@dataclass(frozen=True)
class ResolvedModel:
    """`found` has the name to serve it under; `small` is the draft model, where there is one."""

    found: Resolved
    small: Resolved | None
    options: Options

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.found.path)

    @property
    def info(self) -> ModelInfo:
        """What the files promise, before anything is loaded."""
        file = self.found.path / "config.json"
        try:
            config = dict(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UnsupportedModel(
                f"{file} cannot be read: {blame(error)}; give a complete model directory"
            ) from error
        inner = config.get("text_config")
        inner = inner if isinstance(inner, dict) else {}
        paths = [one.path for one in (self.found, self.small) if one]
        return ModelInfo(
            name=self.found.name,
            context=min(context_of(config), self.options.context or 1 << 31),
            vocab=config.get("vocab_size") or inner.get("vocab_size") or len(self.tokenizer),
            layout=self.options.layout,
            block_size=self.options.block_size,
            kv_blocks=0,
            kv_bytes=0,
            weight_bytes=sum(
                file.stat().st_size for path in paths for file in path.glob("model*.safetensors")
            ),
            created=int(time.time()),
        )


def models_of(config: Config) -> list[tuple[str, int]]:
    """What starts prove kernels for: each model, its draft model behind it, with the bits of their
    K/V."""
    known, found = cards(), list[tuple[str, int]]()
    for each in (config.model, *config.others):
        model = _named(each)[1]
        card = known.get(model or DEFAULT)
        draft = (config.draft if not found else "") or (card.draft if card else "")
        found.append((model, config.kv_bits))
        found += [(draft, 0)] * (config.speculate == "on" and bool(draft))
    return found


def on_disk(model: str, config: Config) -> Path | None:
    """A model's directory, if nothing has to be fetched for it. Raises UnsupportedModel."""
    return find_local(model, cache_of(config), _metal())


def _metal() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def choose(config: Config, share: float = 1.0) -> ResolvedModel:
    """The first model. Fetches and converts what is not there yet. Raises ConfigError and
    UnsupportedModel."""
    cache = cache_of(config)
    metal = _metal()
    name, model = _named(config.model)
    found = resolve(model, cache, metal)
    found = replace(found, name=config.name or name or found.name)
    small = None
    if config.speculate == "on" and (named := config.draft or found.draft):
        small = resolve(named, cache, metal)
    options = Options(
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        memory=config.memory_bytes,
        context=config.context,
        layout=config.layout,
        kv_bits=config.kv_bits,
        max_sequences=config.max_sequences,
        prefill_budget=config.prefill_budget,
        decode_gap=config.decode_gap_ms / 1000,
        share=share,
        speculate=config.speculate == "on",
        draft=small.path if small else None,
        cache=cache / "costs",
        kernels=config.kernels == "auto",
        proofs=cache / PROOFS,
        disk=prompts_of(config),
        disk_bytes=config.disk_bytes,
    )
    chosen = ResolvedModel(found, small, options)
    if small:
        check_draft(chosen.tokenizer, load_tokenizer(small.path), (found.name, small.name))
    return chosen


def choose_all(config: Config) -> list[ResolvedModel]:
    """The first model and the others, each for its share of the memory. Raises ConfigError and
    UnsupportedModel."""
    share = 1 / (1 + len(config.others))
    rest = [replace(config, model=other, name="", draft="") for other in config.others]
    chosen = [choose(one, share) for one in (config, *rest)]
    names = [one.found.name for one in chosen]
    for name, other in zip(names[1:], config.others, strict=True):
        if names.count(name) > 1:
            raise ConfigError(
                f"others: two models are named {name!r}; give one as NAME={_named(other)[1]}"
            )
    if wrong := [name for name in config.pin if name not in names]:
        raise ConfigError(
            f"pin = {wrong[0]!r} is none of the models; give some of {', '.join(names)}"
        )
    return chosen


def fleet_of(chosen: Sequence[ResolvedModel], config: Config, asleep: bool = False) -> ModelManager:
    """The models for the engine's thread; `asleep`: none is loaded before it is asked for."""
    infos = [one.info for one in chosen]
    sizes = {info.name: info.weight_bytes for info in infos}

    def memory_check(name: str, held: int, freed: int) -> str:
        need = max(
            sizes[name] + memory.headroom() + LEAST,
            *(m.need for m in members if m.info.name == name),
        )
        # `held` and `freed` count what pools are yet to take.
        free = (
            config.memory_bytes - held if config.memory_gb else memory.available() - owed()
        ) + freed
        if need <= free:
            return ""
        stay = ", ".join(m.info.name for m in members if m.engine and m.pinned)
        mend = f"; {stay} is pinned: unpin it" * bool(stay) or "; close something"
        mend = f"{mend}, or raise --memory-gb" if config.memory_gb else mend
        return f"it needs {memory.gib(need)}, and {memory.gib(max(0, free))} can be had{mend}"

    members = [
        ModelSlot(
            partial(start, one.found.path, one.found.name, one.options),
            info,
            info.name in config.pin,
        )
        for one, info in zip(chosen, infos, strict=True)
    ]
    return ModelManager(members, memory_check, config.idle_ttl, lazy=asleep)


def _named(model: str) -> tuple[str, str]:
    """What NAME=MODEL says; no name for any other text, and for a path that is there."""
    name, sign, rest = model.partition("=")
    given = sign and name and "/" not in name and not os.path.exists(os.path.expanduser(model))
    return (name, rest) if given else ("", model)
