"""From the settings to the models to load: names, directories, draft models.

Rule: server and bench resolve and load models the same way. Import it after BLAS is loaded.
"""

import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mlxspec import log
from mlxspec.config import BUILT_IN, Config, ConfigError, split_name
from mlxspec.engine.engine import Engine
from mlxspec.files import read_json, weight_bytes
from mlxspec.load.drafting import NONE
from mlxspec.load.loader import load_engine
from mlxspec.model.cards import head_of
from mlxspec.model.checkpoint import context_of
from mlxspec.model.hub import Resolved, cache_of, find_local, learned_head, name_of, resolve
from mlxspec.model.parallel import ALONE, ProcessGroup
from mlxspec.model.vision import has_tower
from mlxspec.profiles import OF_THE_MODEL, profiles_of
from mlxspec.speculate.heads.files import find_draft, find_head
from mlxspec.text.chat import Tokenizer, check_draft, load_tokenizer
from mlxspec.types import ModelInfo, UnsupportedModel

METAL = sys.platform == "darwin" and platform.machine() == "arm64"


@dataclass(frozen=True)
class ResolvedModel:
    """A model on disk that can be loaded. `config` are the settings for this model."""

    name: str
    path: Path
    draft: Resolved | None
    config: Config

    def load(
        self,
        reserved: int = 0,
        group: ProcessGroup = ALONE,
        measure_idle: bool = False,
    ) -> tuple[Engine, ModelInfo]:
        """`reserved`: bytes that other models may still take; `measure_idle`: leave what a first
        start measures to idle moments."""
        config = self.config
        draft = self.draft.path if self.draft else None
        if not config.draft:  # a head may have been trained or deleted since the server started
            draft = learned_head(Resolved(self.path, self.name), cache_of(config)) or draft
            if draft and not find_head(draft).standalone:
                draft = None
        try:
            return load_engine(
                self.path,
                self.name,
                config,
                draft=draft,
                reserved=reserved,
                group=group,
                measure_idle=measure_idle,
            )
        except Exception as error:
            group.failed(error)
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
            sees=self.config.vision and has_tower(self.path, config),
        )


def models_of(config: Config) -> list[str]:
    """Names of all models, each followed by what drafts for it, as far as the cards know it."""
    names: list[str] = []
    for settings in map(with_table, _configs(config)):
        model = split_name(settings.model)[1] or BUILT_IN
        names.append(model)
        with suppress(UnsupportedModel):  # bad files or cards are reported where they are used
            names += filter(None, [draft_of(model, on_disk(model, config), settings)])
    return names


def served_names(config: Config) -> list[str]:
    """The names of all models in the API, found without a download."""
    return list(map(_served_name, _configs(config)))


def _served_name(config: Config) -> str:
    name, model = split_name(config.model)
    return config.name or name or name_of(model)


def with_table(config: Config) -> Config:
    """The settings with what the first model's table says of it; no tables remain."""
    name = _served_name(config) if config.profiles else ""
    found = next((table.values for table in config.profiles if table.name == name), {})
    values = {key: found[key] for key in found.keys() & OF_THE_MODEL}
    return replace(config, **values, profiles=())


def on_disk(model: str, config: Config) -> Path | None:
    """A model's directory if nothing has to be downloaded. Raises UnsupportedModel."""
    served = [split_name(name)[1] for name in (config.model, *config.others)]
    return find_local(model, cache_of(config), METAL, draft=model not in served)


def resolve_model(config: Config) -> ResolvedModel:
    """The first model of the settings. Downloads and converts what is missing. Raises
    UnsupportedModel."""
    cache, draft = cache_of(config), None
    config = with_table(config)
    name, model = split_name(config.model)
    target = resolve(model, cache, METAL)
    try:
        if wanted := draft_of(target.name, target.path, config):
            if not find_local(wanted, cache, METAL, draft=True):
                log.info(
                    "fetching %s, which drafts for this model; --draft off disables it",
                    wanted,
                )
            draft = resolve(wanted, cache, METAL, draft=True)
            if not config.draft and not find_head(draft.path).standalone:
                raise UnsupportedModel(f"{wanted} holds no head that can be read")
    except UnsupportedModel as error:
        if config.draft:
            raise UnsupportedModel(f"--draft: {error}; or give --draft off") from error
        log.warning("decoding without a head: %s", error)
        config, draft = replace(config, draft=NONE), None
    resolved = ResolvedModel(config.name or name or target.name, target.path, draft, config=config)
    if config.draft and draft and not find_draft(draft.path, target.path).standalone:
        check_draft(resolved.tokenizer, load_tokenizer(draft.path), (resolved.name, draft.name))
    return resolved


def _configs(config: Config) -> list[Config]:
    """The settings of each model: `name` is for the first only, as is `draft` unless it is off."""
    draft = NONE if config.draft == NONE else ""
    others = [replace(config, model=other, name="", draft=draft) for other in config.others]
    return [config, *others]


def resolve_another(model: str, config: Config) -> ResolvedModel:
    """A model that a running server with these settings is to serve too. Raises
    UnsupportedModel."""
    return resolve_model(_configs(replace(config, others=(model,)))[1])


def draft_of(model: str, path: Path | None, config: Config) -> str:
    """What drafts for a model: as set, else the head that was trained for it here, else the one
    that a card names, unless its own files hold one or are damaged. Raises UnsupportedModel."""
    if config.draft == NONE or not config.speculate:
        return ""
    learned = path and learned_head(Resolved(path, model), cache_of(config))
    if config.draft or learned:
        return config.draft or str(learned)
    published = head_of(model) if "/" in model else ""
    embedded = find_head(path) if published and path else None
    return "" if embedded and (embedded.kind or embedded.error) else published


def resolve_models(config: Config) -> list[ResolvedModel]:
    """All models of the settings, with equal parts of the memory. Raises ConfigError and
    UnsupportedModel."""
    models: dict[str, ResolvedModel] = {}
    for settings in _configs(config):
        model = resolve_model(settings)
        if model.name in models:
            raise ConfigError(
                f"others: two models are named {model.name!r}; give one as NAME={model.path}",
            )
        models[model.name] = model
    for name in config.pin:
        if name not in models:
            raise ConfigError(f"pin = {name!r} is not a model; give some of {', '.join(models)}")
    found = profiles_of(config.profiles, models)
    for table in config.profiles:
        if table.name in found:
            log.info("%s: by default %s", table.name, found[table.name])
        else:
            log.warning("%s is of no model that is served", table.source)
    return list(models.values())
