"""A model's directory as mlx-lm reads it: its modules, its config, and its weights, read last.

Rule: what mlx-lm cannot load is refused by name, before memory is taken.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn import Module
from mlx_lm import utils

from mlxspec import log
from mlxspec.files import read_json, weight_files
from mlxspec.kernels import cpu
from mlxspec.model import quantized
from mlxspec.model.pages import arrays_in, bytes_of
from mlxspec.model.parallel import ALONE, ProcessGroup, split
from mlxspec.progress import progress
from mlxspec.types import Json, UnsupportedModel, blame

# Weights are read in at least READS parts, of about READ_BYTES at most: after each, this thread
# waits some milliseconds for Python's lock, as another one imports modules.
READS, READ_BYTES = 8, 256 << 20
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DEFAULT_CONTEXT = 8192


def load_model(path: Path, group: ProcessGroup = ALONE) -> tuple[Module, Json]:
    """The model, or this rank's part of it if several ranks share it, and its config; the weights
    stay on disk until `load_weights`. Raises UnsupportedModel."""
    _check_layers(path)
    try:
        model, config = utils.load_model(path, lazy=True, get_model_classes=_classes)
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
    model_class, args_class = utils._get_classes(config)

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
        utils._get_classes(config)
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


def parameter_bytes(model: Module) -> int:
    """Bytes of the model's parameters."""
    return bytes_of(model.parameters())


def load_weights(model: Module, group: ProcessGroup = ALONE) -> None:
    """Read the weights into memory, with a progress bar. Several ranks read them one by one, as MLX
    may hang on a rank that is lost in between. Raises UnsupportedModel."""
    total = parameter_bytes(model)
    done = 0
    arrays = arrays_in(model.parameters())
    at_once = 1 if group.group else max(1, len(arrays) // max(READS, total // READ_BYTES))
    try:
        with progress("Loading weights") as report:
            for first in range(0, len(arrays), at_once):
                part = arrays[first : first + at_once]
                mx.eval(part)
                done += bytes_of(part)
                report(done, total)
                group.expect()
    except RuntimeError as error:
        raise UnsupportedModel(f"the weights cannot be read: {error}") from error
