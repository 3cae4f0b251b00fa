"""From the settings to the models to load: names, directories, draft models, parts of the memory.

Rule: server and bench resolve and load models the same way. Import it after BLAS is loaded.
"""

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mlxspec import log
from mlxspec.cache.follower import DiskFollower
from mlxspec.config import BUILT_IN, Config, ConfigError
from mlxspec.engine import memory
from mlxspec.engine.engine import Engine
from mlxspec.engine.models import CLOSE_S, UNLOAD_S, ModelManager, ModelSlot, release_memory
from mlxspec.files import format_size, read_json, weight_bytes
from mlxspec.load.drafting import NONE
from mlxspec.load.loader import free_bytes, load_engine
from mlxspec.model import meter
from mlxspec.model.cards import head_of
from mlxspec.model.hub import Resolved, cache_of, find_local, learned_head, resolve
from mlxspec.model.layout import context_of
from mlxspec.model.mirror import Follower
from mlxspec.model.parallel import Ranks
from mlxspec.speculate.heads.files import find_draft, find_head
from mlxspec.text.chat import Tokenizer, check_draft, load_tokenizer
from mlxspec.types import Json, ModelInfo, RankLost, UnsupportedModel, UserError

LEAST = 1 << 28  # bytes for a small KV pool, in addition to weights and headroom
METAL = sys.platform == "darwin" and platform.machine() == "arm64"


@dataclass(frozen=True)
class ResolvedModel:
    """A model on disk that can be loaded. `config` are the settings for this model."""

    name: str
    path: Path
    draft: Resolved | None
    config: Config

    def load(
        self, reserved: int = 0, ranks: Ranks | None = None, measure_idle: bool = False
    ) -> tuple[Engine, ModelInfo]:
        """`reserved`: bytes that other models may still take; `measure_idle`: what a first start
        measures is left to idle moments. Several ranks have no kernels of our own, as their results
        must be equal to the last bit."""
        config = self.config
        if ranks and ranks.group:
            log.info("rank %d of %d: no kernels of our own", ranks.rank, ranks.size)
            config = replace(config, kernels=False)
        draft = self.draft.path if self.draft else None
        if not config.draft:  # a head may have been trained or deleted since the server started
            draft = learned_head(Resolved(self.path, self.name), cache_of(config)) or draft
            if draft and not find_head(draft).standalone:
                draft = None
        try:
            return load_engine(self.path, self.name, config, draft, reserved, ranks, measure_idle)
        except Exception as error:
            if ranks:
                ranks.failed(error)
            raise

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @property
    def info(self) -> ModelInfo:
        """What the files say before the model is loaded. Raises UnsupportedModel."""
        file = self.path / "config.json"
        config = read_json(file)
        if not config:
            raise UnsupportedModel(f"{file} cannot be read; give a complete model directory")
        weights = weight_bytes(self.path)
        # A head is left out if it does not fit.
        if self.draft and not find_draft(self.draft.path, self.path).standalone:
            weights += weight_bytes(self.draft.path)
        return ModelInfo(
            name=self.name,
            context=context_of(config, self.config.context),
            vocab=config.get("vocab_size") or len(self.tokenizer),
            layout=self.config.layout,
            block_size=self.config.block_size,
            kv_bytes=0,
            weight_bytes=weights,
            created=int(time.time()),
        )


def models_of(config: Config) -> list[str]:
    """Names of all models, each followed by what drafts for it, as far as the cards know it."""
    found: list[str] = []
    for each in _each(config):
        model = _split_name(each.model)[1] or BUILT_IN
        found.append(model)
        with suppress(UnsupportedModel):  # files or a card, which their user reports
            found += filter(None, [draft_of(model, on_disk(model, config), each)])
    return found


def on_disk(model: str, config: Config) -> Path | None:
    """A model's directory if nothing has to be downloaded. Raises UnsupportedModel."""
    served = [_split_name(each)[1] for each in (config.model, *config.others)]
    return find_local(model, cache_of(config), METAL, draft=model not in served)


def resolve_model(config: Config) -> ResolvedModel:
    """The first model of the settings. Downloads and converts what is missing. Raises
    UnsupportedModel."""
    cache, draft = cache_of(config), None
    name, model = _split_name(config.model)
    found = resolve(model, cache, METAL)
    try:
        if wanted := draft_of(found.name, found.path, config):
            if not find_local(wanted, cache, METAL, draft=True):
                log.info(
                    "fetching %s, which drafts for this model; --draft off disables it", wanted
                )
            draft = resolve(wanted, cache, METAL, draft=True)
            if not config.draft and not find_head(draft.path).standalone:
                raise UnsupportedModel(f"{wanted} holds no head that can be read")
    except UnsupportedModel as error:
        if config.draft:
            raise UnsupportedModel(f"--draft: {error}; or give --draft off") from error
        log.warning("decoding without a head: %s", error)
        config, draft = replace(config, draft=NONE), None
    made = ResolvedModel(config.name or name or found.name, found.path, draft, config)
    if config.draft and draft and not find_draft(draft.path, found.path).standalone:
        check_draft(made.tokenizer, load_tokenizer(draft.path), (made.name, draft.name))
    return made


def _each(config: Config) -> list[Config]:
    """The settings of each model: `name` is the first one's, and `draft` too, unless it is off."""
    draft = NONE if config.draft == NONE else ""
    others = [replace(config, model=other, name="", draft=draft) for other in config.others]
    return [config, *others]


def draft_of(model: str, path: Path | None, config: Config) -> str:
    """What drafts for a model: by the settings, else the head that was trained for it here, else
    the one that a card names, unless its files hold one or are damaged. Raises UnsupportedModel."""
    if config.draft == NONE or not config.speculate:
        return ""
    learned = path and learned_head(Resolved(path, model), cache_of(config))
    if config.draft or learned:
        return config.draft or str(learned)
    named = head_of(model) if "/" in model else ""
    own = find_head(path) if named and path else None
    return "" if own and (own.kind or own.error) else named


def resolve_models(config: Config) -> list[ResolvedModel]:
    """All models of the settings, with equal parts of the memory. Raises ConfigError and
    UnsupportedModel."""
    models: dict[str, ResolvedModel] = {}
    for each in _each(config):
        model = resolve_model(each)
        if model.name in models:
            raise ConfigError(
                f"others: two models are named {model.name!r}; give one as NAME={model.path}"
            )
        models[model.name] = model
    for name in config.pin:
        if name not in models:
            raise ConfigError(f"pin = {name!r} is not a model; give some of {', '.join(models)}")
    return list(models.values())


def follow(config: Config, ranks: Ranks) -> None:
    """Do what rank 0 says until it ends. Raises UserError and what MLX raises."""
    models = {each.name: each for each in resolve_models(replace(config, speculate=False))}
    monitor = memory.MemoryMonitor()
    followers: dict[str, Follower] = {}
    message: Json = {}
    level = memory.NORMAL
    while "end" not in message:
        before, level = level, monitor.poll()
        if level > before:
            meter.trim()
        message = ranks.receive(level)
        match message:
            case {"step": name}:
                followers[name].step(message)
            case {"load": name}:
                try:
                    followers[name] = _follower(models, name, ranks)
                except RankLost:
                    raise
                except Exception as error:  # rank 0 answers with it, and may try again
                    log.warning("%s: %s", name, error, exc_info=not isinstance(error, UserError))
            case {"unload": name}:
                if name in followers:
                    followers.pop(name).close(UNLOAD_S)
                release_memory()
            case {"of": name}:
                followers[name].apply(message["events"], message["read"])
            case {"found": name}:
                followers[name].found()
    for each in followers.values():
        each.close(CLOSE_S)


def _follower(models: Mapping[str, ResolvedModel], name: str, ranks: Ranks) -> Follower:
    if name not in models:
        error = UnsupportedModel(f"{name} is none of this rank's models: give all ranks the same")
        ranks.failed(error)
        raise error
    engine, _ = models[name].load(0, ranks)
    offloader = engine.offloader
    disk = offloader and DiskFollower(offloader.disk, offloader.transfer)
    return Follower(engine.runner, ranks, disk)


def make_manager(
    models: Sequence[ResolvedModel],
    config: Config,
    load_on_request: bool = False,
    ranks: Ranks | None = None,
) -> ModelManager:
    """The models for the engine thread. `load_on_request`: none is loaded at launch."""
    ranks = ranks or Ranks()

    def reserved() -> int:
        """Bytes by which the caches of the loaded models may still grow."""
        return max(0, sum(slot.nbytes for slot in slots) - meter.held()[0])

    def slot_of(model: ResolvedModel) -> ModelSlot:
        info = model.info
        # At least this rank's part; loading counts it.
        info = replace(info, weight_bytes=info.weight_bytes // ranks.size)
        return ModelSlot(
            lambda: model.load(reserved(), ranks, measure_idle=True), info, model.name in config.pin
        )

    slots = [slot_of(each) for each in models]

    def memory_check(slot: ModelSlot, staying: int) -> str:
        """Why a model does not fit now, "" if it does, beside loaded ones of so many bytes."""
        need = max(slot.need, slot.info.weight_bytes + memory.headroom() + LEAST)
        loaded = sum(slot.nbytes for slot in slots)
        free = free_bytes(config) - reserved() + loaded - staying
        if need <= free:
            return ""
        sizes = f"it needs {format_size(need)} and {format_size(max(0, free))} are available"
        return f"{sizes}; close other programs, unpin models or raise --memory-gb"

    return ModelManager(
        slots,
        memory_check,
        config.idle_ttl,
        monitor=memory.MemoryMonitor(others=lambda: ranks.level),
        load_on_request=load_on_request,
        ranks=ranks,
        wired=config.wired,
    )


def _split_name(model: str) -> tuple[str, str]:
    """(NAME, MODEL) of NAME=MODEL; ("", model) of other text and of an existing path."""
    name, sign, rest = model.partition("=")
    if sign and name and "/" not in name and not os.path.exists(os.path.expanduser(model)):
        return name, rest
    return "", model
