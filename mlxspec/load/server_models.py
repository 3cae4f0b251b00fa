"""The models of a server, as one process loads them or as the ranks of a group do together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from mlxspec import log
from mlxspec.config import Config
from mlxspec.engine import memory
from mlxspec.engine.engine import Engine
from mlxspec.engine.manager import ModelManager, ModelSlot, release_memory
from mlxspec.files import format_size
from mlxspec.load.loader import free_bytes
from mlxspec.load.resolve import ResolvedModel, resolve_models
from mlxspec.model import meter
from mlxspec.model.mirror import Follower
from mlxspec.model.parallel import ALONE, ProcessGroup
from mlxspec.types import ModelInfo, UnsupportedModel, UserError

LEAST = 1 << 28  # bytes for a small KV pool, in addition to weights and headroom


def make_manager(
    models: Sequence[ResolvedModel],
    config: Config,
    load_on_request: bool = False,
    group: ProcessGroup = ALONE,
) -> ModelManager:
    """The models for the engine thread. `load_on_request`: none is loaded at launch."""
    slots: list[ModelSlot] = []

    def make_slot(model: ResolvedModel) -> ModelSlot:
        info = model.info
        # At least this rank's part; loading counts it.
        info = replace(info, weight_bytes=info.weight_bytes // group.size)
        load = partial(_load, model, slots, group)
        return ModelSlot(load, info, model.name in config.pin)

    slots.extend(map(make_slot, models))
    return ModelManager(
        slots,
        partial(_why_too_large, slots, config),
        config.idle_ttl,
        monitor=memory.MemoryMonitor(others=lambda: group.level),
        load_on_request=load_on_request,
        group=group,
        wired=config.wired,
        make_slot=make_slot if group.size == 1 else None,  # other ranks know the settings' alone
    )


def _load(
    model: ResolvedModel,
    slots: Sequence[ModelSlot],
    group: ProcessGroup,
) -> tuple[Engine, ModelInfo]:
    """Load a model beside those of `slots`, on all ranks."""
    group.call(model.name, "load")
    group.flush(inf)  # another rank may have to download it first
    try:
        return model.load(_reserved(slots), group, measure_idle=True)
    except Exception:
        group.call(model.name, "unload", [], 0.0)
        group.flush()
        raise


def _reserved(slots: Sequence[ModelSlot]) -> int:
    """Bytes by which the caches of the loaded models may still grow."""
    return max(0, sum(slot.nbytes for slot in slots) - meter.held()[0])


def _why_too_large(
    slots: Sequence[ModelSlot],
    config: Config,
    slot: ModelSlot,
    staying: int,
) -> str:
    """Why a model does not fit now beside loaded ones of `staying` bytes, "" if it does."""
    need = max(slot.need, slot.info.weight_bytes + memory.headroom() + LEAST)
    loaded = sum(slot.nbytes for slot in slots)
    free = free_bytes(config) - _reserved(slots) + loaded - staying
    if need <= free:
        return ""
    sizes = f"it needs {format_size(need)} and {format_size(max(0, free))} are available"
    return f"{sizes}; close other programs, unpin models or raise --memory-gb"


def follow(config: Config, group: ProcessGroup) -> None:
    """Repeat rank 0's calls until it ends. Raises UserError and what MLX raises."""
    models = {model.name: model for model in resolve_models(replace(config, speculate=False))}
    monitor = memory.MemoryMonitor()
    followers: dict[str, Follower] = {}
    level = memory.NORMAL
    while not group.ended:
        before, level = level, monitor.poll()
        if level > before:
            meter.trim()
        for name, what, *args in group.receive(level):
            if what == "load":
                try:
                    followers[name] = load_follower(models, name, group)
                except Exception as error:  # rank 0 reports it, and may try again
                    log.warning("%s: %s", name, error, exc_info=not isinstance(error, UserError))
            elif name in followers:
                followers[name].call(what, *args)
            if what == "unload":
                followers.pop(name, None)
                release_memory()


def load_follower(models: Mapping[str, ResolvedModel], name: str, group: ProcessGroup) -> Follower:
    """Load this rank's part of the model of that name. Raises UnsupportedModel."""
    if name not in models:
        error = UnsupportedModel(f"{name} is none of this rank's models: give all ranks the same")
        group.failed(error)
        raise error
    engine, _ = models[name].load(0, group)
    return Follower(engine, group)
