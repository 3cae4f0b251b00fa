"""Loads a model's drafter, if it has one besides prompt lookup: a draft model or a trained head.

Rule: a small model that cannot draft is the user's mistake and is refused; a head that does not fit
is left out, and the log says why.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx.nn import Module

from mlxspec import log
from mlxspec.cache.disk import fingerprint
from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.kernels.trial import Case
from mlxspec.load.plan import Room, shortage
from mlxspec.model.checkpoint import context_of, load_model, load_weights, parameter_bytes
from mlxspec.model.layout import LayoutChoice, find_layout, geometry
from mlxspec.model.quantized import linear_cases
from mlxspec.model.runner import Runner
from mlxspec.speculate import Drafter
from mlxspec.speculate.calibrate import MORE, contexts_in, time_step
from mlxspec.speculate.draft_model import DraftModel
from mlxspec.speculate.heads import cache_bytes, load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_draft
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.speculate.ngram import NgramDrafter
from mlxspec.speculate.proposer import Proposer
from mlxspec.types import FINAL_NORM, CacheBytes, UnsupportedModel

NONE = "off"  # --draft off: neither small model nor head


@dataclass(slots=True)
class Drafting:
    """A small model or a head, from the files at `path`; both None: copies only."""

    path: Path
    small: Any = None  # a Module
    head: HeadModel | None = None
    context: int = 0  # the small model's
    layout: LayoutChoice | None = None  # the small model's
    nbytes: int = 0  # of the weights
    key: str = ""  # the fingerprint of what drafts, once it is attached

    def cases(self, config: Config) -> list[Case]:
        """The kernels to verify for it, once its layout is found."""
        if self.head:
            return linear_cases(self.head.module, partial(cache_bytes, self.head))
        return self.layout.cases(self.small, config.block_size) if self.layout else []

    def beside(self, cache: CacheBytes) -> CacheBytes:
        """The size of the model's caches, `cache`, with what is cached for drafting, whose K/V are
        under the ids of the blocks for full attention."""
        extra = CacheBytes()
        if self.head:
            extra = self.head.cached
        elif self.layout:
            extra = self.layout.cache_bytes
        elif self.small:
            extra = geometry(self.small)
        token = cache.token + extra.token + sum(size for _, size in extra.windows)
        return cache._replace(token=token, state=cache.state and cache.state + extra.state)

    def check_room(self, room: Room, size: int, cache: CacheBytes | None = None) -> None:
        """Leave a head out if there is no room for it beside the model, whose weights have `size`
        bytes and whose caches take `cache`, None: not known yet. Raises OutOfMemory if there is no
        room for the rest."""
        total = self.beside(cache) if cache else CacheBytes()
        error = shortage(room, size + self.nbytes, total)
        if error and self.head:
            self.drop_head()
            self.check_room(room, size, cache)
            log.warning("decoding without a head: with it, %s", error)
        elif error:
            raise error

    def load_weights(self) -> None:
        """Read the weights; a damaged head is left out. Raises UnsupportedModel."""
        if self.small:
            load_weights(self.small)
        if self.head and not read_weights(self.head):
            self.drop_head()

    def fit_layout(self, target: LayoutChoice) -> None:
        """Find the small model's layout, or whether the target can use a head. Raises
        UnsupportedModel where the small model cannot draft."""
        if self.small:
            if not target.can_draft:
                raise UnsupportedModel(
                    f"--draft: rejected drafts cannot be rolled back in the {target.layout} layout"
                    " of this model; leave --draft out",
                )
            try:
                self.layout = find_layout(self.small, "rows")
            except UnsupportedModel as error:
                raise UnsupportedModel(
                    f"{self.path} cannot draft: {error}; give another --draft",
                ) from error
        if self.head and not (target.can_draft and target.trunk):
            log.warning("decoding without a head: this model cannot use one here")
            self.drop_head()

    def drop_head(self) -> None:
        self.head, self.nbytes = None, 0


def load_drafting(model: Module, path: Path, draft: Path | None, config: Config) -> Drafting:
    """What `draft` holds, or the head in the model's own files; the weights stay on disk. Raises
    UnsupportedModel."""
    if not config.speculate or config.draft == NONE:
        return Drafting(path)
    files = find_draft(draft or path, path)
    if draft and not files.standalone:
        small, small_config = load_model(draft)
        return Drafting(
            draft, small, context=context_of(small_config), nbytes=parameter_bytes(small)
        )
    head = load_head(files, model)
    return Drafting(files.path, head=head, nbytes=parameter_bytes(head.module) if head else 0)


def add_drafters(engine: Engine, drafting: Drafting, config: Config) -> None:
    """Give the idle engine its drafters, which draft once the costs of steps are known."""
    pool = engine.scheduler.pool
    if not engine.scheduler.can_draft:
        log.warning("no speculation: this model cannot roll back a rejected draft")
        return
    if contexts_in(len(pool.free_blocks) * pool.block_size)[1] < 1:
        log.warning("no speculation: the KV pool is too small to measure what a draft costs")
        return
    drafters: list[Drafter] = [NgramDrafter()]
    if drafter := _attach(engine, drafting):
        drafters.append(drafter)
    padded = engine.runner.layout != "rows"
    depth = config.draft_depth if len(drafters) > 1 else 0
    engine.proposer = Proposer(None, drafters, depth, padded=padded, tries_likeliest=True)


def _attach(engine: Engine, drafting: Drafting) -> HeadDrafter | None:
    """The small model or the head; None where there is none, or the head's code fails."""
    kv, pool = engine.scheduler.kv, engine.scheduler.pool
    head = drafting.head
    if layout := drafting.layout:
        runner = Runner(drafting.small, "rows", pool.block_size, blocks=pool.size)
        head = DraftModel(runner, engine.vocab, layout.vocab, context=drafting.context).head()
    if not head:
        return None
    drafter = HeadDrafter(head, engine.runner)
    drafting.key = fingerprint(drafting.path, {})
    try:
        with pool.lent(2 * MORE) as table:
            drafter.draft_once(table)
            if kv.states is not None:
                # Shows the dtypes of a state before one is read from disk.
                time_step(engine.runner, table, 1, rows=1)
    except Exception:  # mlx-lm's modules with the head's weights
        if not drafting.head:
            raise
        log.exception("decoding without a head: it cannot run")
        drafter.detach()
        return None
    kv.recompute_last = head.slot_offset > 0 and head.kv_layers > 0 and kv.states is None
    return drafter


def facts_of(drafting: Drafting, drafter: HeadDrafter | None) -> dict[str, str]:
    """What the content of the model's blocks depends on, as the K/V of a small model or head are
    saved with them; logs what drafts."""
    if not drafter:
        return {}
    where = ["the final norm" if tap == FINAL_NORM else f"layer {tap}" for tap in drafter.taps]
    reading = f" from the hidden states after {', '.join(where)}" if where else ""
    log.info("%s drafts%s: %s", drafter.name, reading, drafting.path)
    return {"draft": f"{drafting.key} {drafter.taps}"}
