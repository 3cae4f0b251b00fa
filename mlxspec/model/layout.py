"""Loads an mlx-lm model and finds the layout it runs in, by trial.

Rule: fail loudly at load, never run silently slow. The first layout that reproduces mlx-lm's own
logits is used, and the log says why faster ones were refused. A trial does what serving does:
ragged batches, prompts cut anywhere, partly accepted drafts; but no quantized K/V.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from mlxspec import log
from mlxspec.files import read_json, weight_files
from mlxspec.kernels import cpu
from mlxspec.kernels.quantized_kv import Packing
from mlxspec.kernels.trial import Case
from mlxspec.model import quantized
from mlxspec.model.pages import arrays_in, flat_caches
from mlxspec.model.parallel import ALONE, ProcessGroup, split
from mlxspec.model.probe import (
    BLOCK,
    BLOCKS,
    PROMPTS,
    logits_error,
    probe_logits,
    reference_logits,
)
from mlxspec.model.runner import Layout, Runner
from mlxspec.progress import progress
from mlxspec.types import CacheBytes, Json, UnsupportedModel, blame, line_of

# Fastest first; the flag: one sequence at a time.
LAYOUTS: tuple[tuple[Layout, bool], ...] = (
    ("rows", False),
    ("rect", False),
    ("gather", False),
    ("rect", True),
    ("gather", True),
    ("solo", True),
)
# Weights are read in at least READS parts, of about READ_BYTES at most: after each, this thread
# waits some milliseconds for Python's lock, as another one imports modules.
READS, READ_BYTES = 8, 256 << 20
KV_STEP = 256  # tokens by which mlx-lm's own KV caches grow
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of a model, and the size of its caches in it."""

    layout: Layout
    trunk: bool  # lm_head runs on sampled rows only
    lone: bool  # one sequence at a time
    cache_bytes: CacheBytes
    vocab: int
    refused: tuple[str, ...] = ()  # faster layouts, each with the reason
    rollback: bool = True  # recurrent layers, if any, can drop rejected drafts
    sure: bool = True  # no refusal may have been due to a lack of memory

    @property
    def sharing(self) -> bool:
        """Whether sequences can share a cached prefix."""
        return self.layout != "solo"

    @property
    def can_draft(self) -> bool:
        """Whether rejected drafts can be rolled back."""
        return self.sharing and self.rollback

    def runner(
        self,
        model: Module,
        block_size: int,
        blocks: int,
        make: Callable[..., Runner] = Runner,
        **options: Any,
    ) -> Runner:
        """A runner in this layout with `blocks` in its pool; `make` is its type, `options` are
        Runner's other arguments."""
        options |= {"lone": self.lone, "rollback": self.rollback}
        return make(model, self.layout, block_size, blocks=blocks, **options)

    def cases(self, model: Module, block_size: int, kv_bits: int = 0) -> list[Case]:
        """The kernels to verify for the model."""
        blocks = quantized.CASE_BLOCKS
        return quantized.kernel_cases(self.runner(model, block_size, blocks, kv_bits=kv_bits))


def load(path: Path, group: ProcessGroup = ALONE) -> tuple[Module, Json]:
    """The model, or this rank's part of it if several ranks share it, and its config; the weights
    stay on disk until `load_weights`. Raises UnsupportedModel."""
    _check_layers(path)
    try:
        model, config = load_model(path, lazy=True, get_model_classes=_classes)
    except (Exception, SystemExit) as error:  # some models exit where a package is missing
        raise UnsupportedModel(
            f"mlx-lm cannot load {path}: {blame(error)}; give a complete model directory",
        ) from error
    if group.group:
        with group.together():
            split(model, group.group)
    else:
        cpu.install(model)
    # Each layer drew initial weights, which are never computed; MLX's random state would keep the
    # graph of all these draws.
    mx.eval(mx.random.state)
    model.eval()
    quantized.install(model)
    return model, config


def _check_layers(path: Path) -> None:
    """Refuse more layers than tensors, before modules are built for them: three million took
    3.8 GB. Raises UnsupportedModel."""
    tensors = 0
    with suppress(Exception):  # of damaged files, which the loader reports
        tensors = sum(len(cast(Json, mx.load(str(file)))) for file in weight_files(path))
    for name, count in flat(read_json(path / "config.json")).items():
        if tensors and name.endswith("layers") and isinstance(count, int) and count > tensors:
            raise UnsupportedModel(
                f"{path / 'config.json'}: {name} = {count}, but the files hold {tensors} tensors;"
                " give a complete model directory",
            )


def _classes(config: Json) -> Any:
    """mlx-lm's classes, but they also load a trunk alone, such as Qwen3-Embedding: names without a
    prefix, and no lm_head. Its stand-in samples tokens that nobody reads."""
    model_class, args_class = _get_classes(config)

    def build(args: Any) -> Module:
        model: Module = model_class(args)
        inherited = getattr(model, "sanitize", dict)

        def sanitize(weights: Json) -> Any:
            embed = weights.get("embed_tokens.weight")
            if embed is not None:
                weights = {f"model.{name}": array for name, array in weights.items()}
                if "lm_head" in model:
                    weights["lm_head.weight"] = embed
            return inherited(weights)

        model.sanitize = sanitize
        return model

    return build, args_class


def has_code(config: Json) -> bool:
    """Whether mlx-lm has code for a config.json's architecture."""
    try:
        _get_classes(config)
        return "model_file" not in config
    except (Exception, SystemExit):  # some models exit where a package is missing
        return False


def flat(config: Json) -> Json:
    """The config with its text model's fields in place of its own."""
    inner = config.get("text_config")
    return config | (inner if isinstance(inner, dict) else {})


def context_of(config: Json, most: int = 0) -> int:
    """The longest context the model was trained for, in tokens; 8192 if its config names none.
    `most` is an upper limit, 0: none."""
    fields = flat(config)
    lengths = [fields.get(key) for key in CONTEXT_KEYS]
    context = next((n for n in lengths if isinstance(n, int) and n > 0), 0)
    if not context:
        log.warning("config.json names no context length; assuming %d tokens", DEFAULT_CONTEXT)
        context = DEFAULT_CONTEXT
    return min(context, most or context)


def weights(model: Module) -> int:
    """Bytes of the model's parameters."""
    return _bytes_of(model.parameters())


def _bytes_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(array.nbytes for array in arrays_in(tree))


def geometry(model: Module, kv_bits: int = 0, group: ProcessGroup = ALONE) -> CacheBytes:
    """The size of the model's caches, quantized to `kv_bits` if not 0, before any weight is read:
    from a forward pass that is never evaluated. All 0 if the model's code cannot do that."""
    try:
        with group.together():
            caches = make_prompt_cache(model)
            model(mx.array([PROMPTS[0]]), cache=caches)
        return _measure(caches, kv_bits)
    except Exception as failure:  # the model's own code; `find_layout` reports it if it persists
        log.info("the size of the model's caches is unknown before it is loaded: %s", failure)
        return CacheBytes()


def bytes_of_layers(layers: int, run: Callable[[list[Any]], Any]) -> CacheBytes:
    """What `layers` layers with full attention cache; `run` builds a forward pass of them on the
    caches passed to it."""
    caches = [KVCache() for _ in range(layers)]  # type: ignore[no-untyped-call]
    run(caches)
    return _measure(caches, 0)


def _measure(caches: Iterable[Any], kv_bits: int) -> CacheBytes:
    """The size of mlx-lm's caches of one sequence, with K/V quantized to `kv_bits`."""
    state = 0
    sizes = Counter[int]()  # by window, 0: full attention
    for cache in flat_caches(caches):
        if cache.empty():  # a model may make caches that it never uses
            continue
        if isinstance(cache, ArraysCache):
            state += _bytes_of(cache.state)
            continue
        for kv in arrays_in(cache.state):  # [1, heads, tokens, dim]
            _, heads, _, dim = kv.shape
            row = dim * kv.dtype.size
            if kv_bits:
                row = 4 * Packing(dim, kv.dtype, kv_bits).width
            sizes[getattr(cache, "max_size", 0)] += heads * row
    token = sizes.pop(0, 0)
    return CacheBytes(token, tuple(sorted(sizes.items())), state)


def load_weights(model: Module, group: ProcessGroup = ALONE) -> None:
    """Read the weights into memory, with a progress bar. Several ranks read them one by one, as MLX
    may hang on a rank that is lost in between. Raises UnsupportedModel."""
    total = weights(model)
    done = 0
    arrays = arrays_in(model.parameters())
    at_once = 1 if group.group else max(1, len(arrays) // max(READS, total // READ_BYTES))
    try:
        with progress("Loading weights") as report:
            for first in range(0, len(arrays), at_once):
                part = arrays[first : first + at_once]
                mx.eval(part)
                done += sum(array.nbytes for array in part)
                report(done, total)
                group.expect()
    except RuntimeError as error:
        raise UnsupportedModel(f"the weights cannot be read: {error}") from error


def find_layout(
    model: Module,
    wanted: str = "auto",
    kv_bits: int = 0,
    group: ProcessGroup = ALONE,
) -> LayoutChoice:
    """The fastest layout, or `wanted`, that reproduces mlx-lm's logits with K/V as computed;
    `cache_bytes` are those with `kv_bits`. Raises UnsupportedModel, naming why each layout was
    refused, or that K/V cannot be quantized."""
    refused: dict[str, None] = {}
    sure = True
    with progress("Checking how it can be batched") as report, group.together():
        report(0, 2 * len(LAYOUTS))
        reference, caches = reference_logits(model)
        for (layout, lone), rollback in product(LAYOUTS, (True, False)):
            report(1 + len(refused), 2 * len(LAYOUTS))
            if wanted not in ("auto", layout):
                continue
            try:
                runner = Runner(model, layout, BLOCK, blocks=BLOCKS, lone=lone, rollback=rollback)
                if not (rollback or runner.states.layers):
                    continue  # the same as with rollback
                with group.together():
                    error = logits_error(probe_logits(runner), reference)
            except Exception as failure:  # the model's own code decides what it raises
                error = line_of(failure)
                sure = sure and not isinstance(failure, RuntimeError)
            if error:
                alone = ", one sequence at a time" if lone and layout != "solo" else ""
                refused[f"{layout}{alone}: {error}"] = None
                continue
            return LayoutChoice(
                layout,
                runner.trunk is not None,
                lone,
                cache_bytes=_cache_bytes(runner, caches, kv_bits),
                vocab=reference[0].shape[-1],
                refused=tuple(refused),
                rollback=rollback,
                sure=sure,
            )
    raise UnsupportedModel(
        "no layout reproduces mlx-lm's logits for this model: " + "; ".join(refused),
    )


def _cache_bytes(runner: Runner, caches: Sequence[Any], kv_bits: int) -> CacheBytes:
    """The size of a runner's caches, measured on mlx-lm's `caches` of one sequence. Raises
    UnsupportedModel if K/V cannot be quantized to `kv_bits`."""
    if kv_bits and not runner.pages():
        raise UnsupportedModel(
            f"kv_bits = {kv_bits}: in the {runner.layout} layout this model has no K/V pools;"
            " give 0",
        )
    if runner.layout == "solo":
        size = _bytes_of([cache.state for cache in caches])
        return CacheBytes(-(-size // KV_STEP))
    return _measure(caches, kv_bits)
