"""What a start of a model keeps for later ones: what it measured, its layout and its step times,
and prompts.

Rule: a cache file is named by a fingerprint of the model's files, the versions, the machine and the
settings, also those of MLX and BLAS. A damaged file is ignored.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from mlxspec import __version__, blas, log
from mlxspec.cache.disk import DiskCache, fingerprint
from mlxspec.cache.offload import KVOffloader
from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.files import write_atomic
from mlxspec.kernels.verify import KERNELS, machine
from mlxspec.load.exact import Exactness
from mlxspec.model.hub import cache_of, prompts_of
from mlxspec.model.layout import LayoutChoice
from mlxspec.model.parallel import ProcessGroup
from mlxspec.speculate.chain import DraftCosts
from mlxspec.speculate.controller import Costs
from mlxspec.types import Tap


class WarmupCache(BaseModel):
    """The measurements of one model; `costs` were measured with `kernels` in use, so was what
    `drafts` cost, by the fingerprint of what drafts. `exact` was found with `exact_kernels`. `taps`
    are the hidden states that MTP heads read, by their fingerprints."""

    layout: LayoutChoice
    costs: Costs | None = None
    kernels: str = ""
    taps: dict[str, Tap] = {}
    drafts: dict[str, DraftCosts] = {}
    exact: Exactness | None = None
    exact_kernels: str = ""  # with which it was found
    blind: str | None = None  # why the model cannot see images; "": it can, None: not tried
    file: Path = Field(default=Path(), exclude=True)  # where it is kept

    @classmethod
    def load(cls, file: Path) -> "WarmupCache | None":
        """None where the file is missing or damaged."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self) -> None:
        """Write the file; failures are logged, as the next start only is slower. A layout that may
        be due to a lack of memory is not kept."""
        try:
            if self.layout.sure:
                write_atomic(self.file, self.model_dump_json().encode())
        except OSError as error:
            log.warning("%s: %s; the next start measures again", self.file, error.strerror)


@dataclass(frozen=True, slots=True)
class PromptStore:
    """Where a model's prompts are kept on disk; beside tokens, their K/V depend on `facts`."""

    path: Path
    name: str
    config: Config
    facts: dict[str, str]

    def open(self, engine: Engine, **drafting: str) -> None:
        """Let the engine use it, if the settings and the layout allow it. `drafting`: what the
        drafter's K/V depend on, which lie in the same blocks."""
        if self.config.disk_bytes and engine.scheduler.sharing:
            key = fingerprint(self.path, self.facts | drafting)
            disk = DiskCache(prompts_of(self.config), key, self.config.disk_bytes, model=self.name)
            offloader = KVOffloader(disk, engine.scheduler.kv, engine.runner)
            engine.offloader = engine.scheduler.offloader = offloader


def cache_file(model: Path, config: Config, group: ProcessGroup) -> Path:
    """The file for this process's part of `model` under these settings."""
    settings = f"{config.layout} {config.kv_bits} {config.block_size} {group}"
    facts = here() | {"mlxspec": __version__, "settings": settings}
    return cache_of(config) / "costs" / f"known-{fingerprint(model, facts)}.json"


def here() -> dict[str, str]:
    """What the bits of a row depend on, beside the model's files and the settings."""
    return machine() | versions() | blas.order()


def versions() -> dict[str, str]:
    """The versions of the libraries that compute."""
    return {name: version(name) for name in ("mlx", "mlx-lm")}


def kernels_in_use() -> str:
    """Their cases, variants and row counts, to compare with those of another start."""
    used = [
        (name, v.variant, v.least, v.most, v.right)
        for name, v in KERNELS.verdicts.items()
        if v.variant or v.right
    ]
    return str(sorted(used))
