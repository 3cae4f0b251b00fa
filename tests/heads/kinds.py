"""The trained EAGLE-3, DFlash, DFlash 2 and DSpark heads of tests/heads/data, all for one target, in
every packaging that is published."""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils

from mlxspec.engine.engine import Engine
from mlxspec.model.checkpoint import load_model
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_head
from tests.heads import runs
from tests.heads.packagings import NARROW_FOUR_BITS, Tensors, quantized, read_json, save_head
from tests.support import tiny

DATA = Path(__file__).parent / "data"
TARGET = DATA / "qwen3/target"
KINDS = ("eagle3", "dflash", "dflash2", "dspark")
TRAINED = (*KINDS, "assistant")  # the last for a target of its own

Config = dict[str, Any]
Writer = Callable[[Tensors, Config], tuple[Tensors, Config]]


def target_of(kind: str) -> Path:
    """The directory of what a kind's head was trained for."""
    return DATA / "gemma4/target" if kind == "assistant" else TARGET


@functools.cache
def reference(kind: str) -> Any:
    """mlx-vlm's results with a head, and the prompts and answers that all have in common."""
    common = read_json(target_of(kind).parent / "reference.json")
    return dict(common | read_json(DATA / kind / "reference.json"))


@functools.cache
def plain_target() -> Any:
    """The target as mlx-lm loads it, which no engine has changed."""
    return utils.load_model(TARGET)[0]


def head_of(path: Path, target: Any) -> Any:
    """The head in a directory, with its weights."""
    head = load_head(find_head(path), target)
    assert head is not None and read_weights(head)
    return head


def engine(path: Path, target: Path = TARGET) -> tuple[Engine, Any]:
    """An engine over the target, and the head at `path` for its proposer."""
    model, _ = load_model(target)
    head = head_of(path, model)
    e = tiny.engine(model, block=8, blocks=256, budget=256)
    return e, HeadDrafter(head, e.runner)


def first_round(path: Path, prompt: list[int], depth: int) -> tuple[list[int], list[int], mx.array]:
    """Of the engine's first round with a head: the tokens before it, its draft, and the logits of
    that, before a selector or Markov head."""
    e, drafter = engine(path)
    inner, found = drafter.head.lm_head, []

    def lm_head(hidden: mx.array) -> mx.array:
        found.append(inner(hidden))
        return found[-1]

    drafter.head.lm_head = lm_head
    run = runs.run(e, drafter, depth, [prompt])
    first = run.rounds[0][0]
    logits = mx.concatenate([each.reshape(-1, each.shape[-1]) for each in found])[:depth]
    return (prompt + run.answers[0])[: first.start + 1], first.draft, logits


def trained(kind: str) -> tuple[Tensors, Config]:
    return dict(mx.load(str(DATA / kind / "model.safetensors"))), config_of(kind)


def config_of(kind: str) -> Config:
    return dict(read_json(DATA / kind / "config.json"))


def random_tensors(tensors: Tensors) -> Tensors:
    """Of the same shapes, the same every time; what says which tokens there are stays."""
    mx.random.seed(3)
    made: Tensors = {}
    for name, array in sorted(tensors.items()):
        if name in ("d2t", "t2d"):
            made[name] = array
        elif array.ndim == 1:
            made[name] = 1 + 0.3 * mx.random.normal(array.shape)
        else:
            made[name] = mx.random.normal(array.shape) * 1.5 / array.shape[-1] ** 0.5
    return made


# ---- EAGLE-3
# --------------------------------------------------------------------------------------------


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def why_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line of the log that says why the head in a directory is not used."""
    assert load_head(find_head(path), plain_target()) is None
    (line,) = warnings_in(caplog)
    assert "decoding without a head" in line and "\n" not in line
    return line


def as_it_is(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    return tensors, config


def legacy(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """As the authors write it: one flat config, the default layers, the target's embeddings."""
    made = {name.replace("layers.0.", "midlayer."): array for name, array in tensors.items()}
    del made["embed_tokens.weight"]
    flat = dict(config["transformer_layer_config"])
    own = dict(architectures=["LlamaForCausalLMEagle3"], torch_dtype="float32")
    return made, flat | own | dict(draft_vocab_size=config["draft_vocab_size"])


def full_vocabulary(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """lm_head has a row for each of the target's tokens."""
    made = dict(tensors)
    ids = kept_ids(made)
    rows = made["embed_tokens.weight"] + 0  # for tokens that the reduced vocabulary lacks
    rows[ids] = made["lm_head.weight"]
    del made["d2t"], made["t2d"]
    return made | {"lm_head.weight": rows}, config | dict(draft_vocab_size=len(rows))


def kept_ids(tensors: Tensors) -> mx.array:
    """The target's tokens that a head with a reduced vocabulary drafts."""
    return mx.arange(tensors["d2t"].size) + tensors["d2t"]


def own_embedding(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Trained with the head."""
    twice = {"embed_tokens.weight": 2 * tensors["embed_tokens.weight"]}
    return tensors | twice, config | dict(embed_requires_grad=True)


# ---- blocks
# ---------------------------------------------------------------------------------------------


def deepspec(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """DSpark as DeepSeek writes it: copies of the target's embeddings and its lm_head, all settings
    at the top level."""
    target = mx.load(str(TARGET / "model.safetensors"))
    own = {"embed_tokens.weight": target["model.embed_tokens.weight"]}
    own |= {"lm_head.weight": target["lm_head.weight"]}
    return tensors | own, {name: x for name, x in config.items() if name != "dflash_config"}


def prefixed(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    return {f"model.{name}": array for name, array in tensors.items()}, config


def named_codebooks(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """As mlx-vlm saves DFlash 2's."""
    return {
        f"{name}.weight" if name.endswith("_codebook") else name: array
        for name, array in tensors.items()
    }, config


def four_bits(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """As mlx-vlm quantizes a head."""
    named, config = named_codebooks(tensors, config)

    def how(name: str) -> Mapping[str, Any] | None:
        return None if "base_kernel" in name else NARROW_FOUR_BITS

    return quantized(named, how), config | dict(quantization=NARROW_FOUR_BITS)


def setting(**changed: Any) -> Writer:
    return lambda tensors, config: (tensors, config | changed)


def normed_taps(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    return tensors | {"input_norm.weight": mx.ones(192)}, config | dict(norm_before_fc=True)


def two_layers(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The second sees no embeddings."""
    more = {}
    for name, array in tensors.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            wide = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
            more[name.replace("layers.0.", "layers.1.")] = array[:, :64] if wide else array
    layer = config["transformer_layer_config"] | dict(num_hidden_layers=2)
    return tensors | more, config | dict(transformer_layer_config=layer)


def parallel(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """EAGLE-3 as P-EAGLE in the speculators format, which brings embeddings of its own."""
    mask = 0.5 * mx.random.normal((1, 1, 192), key=mx.random.key(7))
    own = dict(speculators_model_type="peagle", architectures=["PEagleSpeculator"])
    own |= dict(mask_token_id=3, embed_requires_grad=True)
    return tensors | {"mask_hidden": mask}, config | own


def speculators(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """A block head as speculators writes it: ids count the hidden states before the layers."""
    inner = config["dflash_config"]
    layer = {name: x for name, x in config.items() if name != "dflash_config"}
    kind = (
        "dflash2" if "selector_rank" in inner else "dspark" if "markov_rank" in inner else "dflash"
    )
    taps = [i + 1 for i in inner["target_layer_ids"]]
    own = {n: x for n, x in inner.items() if n not in ("target_layer_ids", "projector_type")}
    own |= dict(speculators_model_type=kind, aux_hidden_state_layer_ids=taps)
    own |= dict(transformer_layer_config=layer, block_size=config["block_size"])
    return tensors, own | dict(draft_vocab_size=config["vocab_size"])


def reduced(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """A block head of speculators that drafts every third token only, with an lm_head of its own."""
    tensors, config = speculators(tensors, config)
    kept = mx.arange(1, 640, 3)
    target = mx.load(str(TARGET / "model.safetensors"))
    own = {"lm_head.weight": target["lm_head.weight"][kept], "d2t": kept - mx.arange(len(kept))}
    own["t2d"] = mx.array([i % 3 == 1 for i in range(640)])
    if "markov_head.markov_w2.weight" in tensors:
        own["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][kept]
    return tensors | own, config | dict(draft_vocab_size=len(kept))


PACKAGINGS: dict[str, dict[str, Writer]] = {
    "eagle3": {
        "speculators": as_it_is,
        "legacy": legacy,
        "full": full_vocabulary,
        "embedding": own_embedding,
        "4bit": four_bits,
    },
    "dflash": {
        "z-lab": as_it_is,
        "prefixed": prefixed,
        "speculators": speculators,
        "4bit": four_bits,
    },
    "dflash2": {
        "incoai": as_it_is,
        "named": named_codebooks,
        "speculators": speculators,
        "4bit": four_bits,
    },
    "dspark": {
        "dflash-config": as_it_is,
        "deepspec": deepspec,
        "speculators": speculators,
        "4bit": four_bits,
    },
    "assistant": {"google": as_it_is},
}


def write(kind: str, packaging: str, out: Path) -> Path:
    """The trained head of a kind so packaged, in the directory `out`."""
    return save_head(out, *PACKAGINGS[kind][packaging](*trained(kind)))
