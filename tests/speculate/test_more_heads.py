"""EAGLE-3, DFlash, DFlash 2 and DSpark: every packaging gives the same head, the engine drafts with
it what mlx-vlm's own loop drafts, and a head that does not fit is left out."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.chained import ParallelPass
from mlxspec.speculate.heads.files import find_head
from tests.heads import kinds, runs
from tests.heads.kinds import KINDS, PACKAGINGS, Config, Tensors
from tests.support.parameter_rows import only

IGNORED = ("d2t", "t2d", "confidence_head")
ALL = [(kind, packaging) for kind in KINDS for packaging in PACKAGINGS[kind]]


def head_of(path: Path) -> Any:
    return kinds.head_of(path, kinds.plain_target())


def read(kind: str, packaging: str, tmp_path: Path) -> Any:
    return head_of(kinds.write(kind, packaging, tmp_path / packaging))


def parameters(head: Any) -> Tensors:
    found: Any = tree_flatten(head.module.parameters())
    return dict(found)


# ---- packagings
# -----------------------------------------------------------------------------------------


def expected(kind: str, packaging: str) -> Tensors:
    """The module's parameters, from the tensors that were trained."""
    given, config = kinds.trained(kind)
    if packaging in ("full", "embedding", "deepspec"):
        given, _ = PACKAGINGS[kind][packaging](given, config)
    elif kind == "eagle3":
        del given["embed_tokens.weight"]  # a copy of the target's
    if packaging == "full":
        del given["embed_tokens.weight"]
    change = kinds.four_bits if packaging == "4bit" else kinds.named_codebooks
    return {n: x for n, x in change(given, config)[0].items() if not n.startswith(IGNORED)}


@pytest.mark.parametrize("kind, packaging", ALL)
def test_every_packaging_gives_the_same_head(kind: str, packaging: str, tmp_path: Path) -> None:
    head = read(kind, packaging, tmp_path)
    got, want = parameters(head), expected(kind, packaging)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert mx.array_equal(got[name], array), name
    assert head.name == kind.removesuffix("2")
    assert head.taps == ((1, 2, 3) if kind == "eagle3" else (1, 3, 5))
    if kind != "eagle3":
        block = head.module
        assert (head.depth, block.mask, block.from_anchor) == (7, 3, kind == "dspark")


def test_what_a_head_brings_is_used(tmp_path: Path) -> None:
    """Embeddings and lm_head; a copy of the target's embeddings is not even read."""
    token = mx.array([5, 6])
    target = kinds.plain_target().model.embed_tokens(token)
    plain = read("eagle3", "speculators", tmp_path)
    assert mx.array_equal(plain.embed(token), target)
    assert mx.array_equal(read("eagle3", "embedding", tmp_path).embed(token), 2 * target)
    deepspec = read("dspark", "deepspec", tmp_path)
    assert deepspec.embed is deepspec.module.embed_tokens
    assert deepspec.lm_head is deepspec.module.lm_head


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_in_the_precision_of_its_target(kind: str, tmp_path: Path) -> None:
    path = kinds.write(kind, next(iter(PACKAGINGS[kind])), tmp_path / kind)
    (file,) = path.glob("*.safetensors")
    saved: Any = mx.load(str(file))
    floats = [n for n, x in saved.items() if mx.issubdtype(x.dtype, mx.floating)]
    mx.save_safetensors(str(file), saved | {n: saved[n].astype(mx.bfloat16) for n in floats})
    head = head_of(path)
    dtypes = {x.dtype for x in parameters(head).values() if mx.issubdtype(x.dtype, mx.floating)}
    assert dtypes == {kinds.plain_target().model.embed_tokens.weight.dtype} == {mx.float32}


def test_embeddings_that_the_target_scales(tmp_path: Path) -> None:
    """Gemma's: a block head reads them as the model's own layers do, unless they are its own."""
    target = load_model(kinds.TARGET)[0]
    target.model.embed_scale = 8.0
    token = mx.array([5])
    for packaging, scale in {"dflash-config": 8, "deepspec": 1}.items():
        head = kinds.head_of(kinds.write("dspark", packaging, tmp_path / packaging), target)
        assert mx.array_equal(head.embed(token), scale * target.model.embed_tokens(token))


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Its tokens have the logits that a full one gives them; others are never drafted."""
    hidden = mx.random.normal((3, 64), key=mx.random.key(1))
    ids = kinds.kept_ids(kinds.trained("eagle3")[0])
    reduced = read("eagle3", "speculators", tmp_path).lm_head(hidden)
    full = read("eagle3", "full", tmp_path).lm_head(hidden)
    assert reduced.shape == full.shape == (3, 640) and mx.isfinite(full).all()
    assert mx.allclose(reduced[:, ids], full[:, ids], atol=1e-5)
    assert int(mx.isfinite(reduced).sum()) == 3 * ids.size


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_head_of_a_reduced_vocabulary(kind: str, tmp_path: Path) -> None:
    full = read(kind, "speculators", tmp_path)
    tensors, config = kinds.reduced(*kinds.trained(kind))
    reduced = head_of(kinds.save_head(tmp_path / "reduced", tensors, config))
    hidden, before = mx.random.normal((3, 64), key=mx.random.key(1)), mx.array([5, 6, 7])
    want, got = (h.module.scores(h.lm_head(hidden), hidden, before) for h in (full, reduced))
    ids = kinds.kept_ids(tensors)
    assert got.shape == want.shape == (3, 640)
    assert mx.allclose(got[:, ids], want[:, ids], atol=1e-5)
    assert int(mx.isfinite(got).sum()) == 3 * ids.size


def close(got: mx.array, want: mx.array) -> None:
    assert float(mx.abs(got - want).max()) <= 1e-4 * float(mx.abs(want).max())


@pytest.mark.parametrize("kind", only(KINDS, 0))
def test_a_quantized_head_computes_with_its_weights(kind: str, tmp_path: Path) -> None:
    """The same drafts as with what is left of each weight."""
    tensors, config = kinds.four_bits(*kinds.trained(kind))
    whole = {}
    for name, array in tensors.items():
        base = name.removesuffix(".weight")
        if f"{base}.scales" in tensors and name != base:
            parts = (tensors[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            whole[name] = mx.dequantize(array, *parts, group_size=32, bits=4)
        elif not name.endswith((".scales", ".biases")):
            whole[name] = array
    both = [
        kinds.save_head(tmp_path / name, some, config)
        for name, some in {"4bit": tensors, "whole": whole}.items()
    ]
    prompts = kinds.reference(kind)["prompts"][:1]
    quantized, plain = (run_of(path, 4, prompts) for path in both)
    assert quantized.answers == plain.answers
    drafts = [[each.draft for each in run.rounds[0]] for run in (quantized, plain)]
    same = sum(a == b for a, b in zip(*drafts, strict=False))
    assert same >= 0.9 * len(drafts[0]), "more than roundings differ"


# ---- EAGLE-3's settings
# ---------------------------------------------------------------------------------

SETTINGS = ("norm_output", "fc_norm", "norm_before_fc", "norm_before_residual")


def variant(which: str) -> tuple[Tensors, Config]:
    """A random head with one of the settings; "": with none."""
    tensors, config = kinds.trained("eagle3")
    config |= dict.fromkeys(SETTINGS, False)
    if which == "fc_norm":
        tensors |= {f"fc_norm.{i}.weight": mx.ones(64) for i in range(3)}
    if which == "norm_before_fc":
        tensors |= {"input_norm.weight": mx.ones(192)}
    return kinds.random_tensors(tensors), config | ({which: True} if which else {})


def by_hand(
    tensors: Tensors, which: str, embedded: mx.array, taps: mx.array
) -> tuple[mx.array, mx.array]:
    """The output of one pass over rows [T, D], and its logits of the reduced vocabulary."""
    rows = len(taps)

    def norm(x: mx.array, name: str) -> mx.array:
        scaled = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return scaled * tensors[f"{name}.weight"]

    def times(x: mx.array, name: str) -> mx.array:
        return x @ tensors[f"{name}.weight"].T

    def heads(x: mx.array, name: str) -> mx.array:
        return times(x, f"layers.0.self_attn.{name}_proj").reshape(1, rows, -1, 32).swapaxes(1, 2)

    if which == "norm_before_fc":
        taps = norm(taps, "input_norm")
    if which == "fc_norm":
        parts = mx.split(taps, 3, axis=-1)
        taps = mx.concatenate([norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], axis=-1)
    hidden = times(taps, "fc")
    normed = norm(hidden, "layers.0.hidden_norm")
    x = mx.concatenate([norm(embedded, "layers.0.input_layernorm"), normed], axis=-1)
    q, k, v = (heads(x, name) for name in "qkv")
    q, k = (mx.fast.rope(y, 32, traditional=False, base=1e4, scale=1, offset=0) for y in (q, k))
    seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=32**-0.5, mask="causal")
    x = times(seen.swapaxes(1, 2).reshape(rows, -1), "layers.0.self_attn.o_proj")
    x = x + (normed if which == "norm_before_residual" else hidden)
    y = norm(x, "layers.0.post_attention_layernorm")
    gate = times(y, "layers.0.mlp.gate_proj")
    x = x + times(
        gate * mx.sigmoid(gate) * times(y, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj"
    )
    normed = norm(x, "norm")
    return (normed if which == "norm_output" else x), times(normed, "lm_head")


@pytest.mark.parametrize("which", ["", *SETTINGS])
def test_each_setting_of_eagle3(which: str, tmp_path: Path) -> None:
    tensors, config = variant(which)
    head = head_of(kinds.save_head(tmp_path, tensors, config))
    taps = mx.random.normal((9, 192), key=mx.random.key(2))
    tokens = list(range(20, 29))
    out = runs.DenseHead(head)(tokens, head.prepare(taps))
    want, logits = by_hand(tensors, which, head.embed(mx.array(tokens)), taps)
    close(out, want)
    close(head.lm_head(out)[:, kinds.kept_ids(tensors)], logits)


def test_newer_names_of_rope_settings(tmp_path: Path) -> None:
    """As transformers 5 writes them."""
    tensors, config = variant("")
    layer = dict(config["transformer_layer_config"])
    del layer["rope_theta"]
    layer["rope_parameters"] = dict(rope_type="default", rope_theta=1e4)
    head = head_of(
        kinds.save_head(tmp_path, tensors, config | dict(transformer_layer_config=layer))
    )
    other = layer | dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))
    wrong = head_of(
        kinds.save_head(tmp_path, tensors, config | dict(transformer_layer_config=other))
    )
    taps = mx.random.normal((9, 192), key=mx.random.key(2))
    tokens = list(range(20, 29))
    want, _ = by_hand(tensors, "", head.embed(mx.array(tokens)), taps)
    close(runs.DenseHead(head)(tokens, head.prepare(taps)), want)
    off = runs.DenseHead(wrong)(tokens, wrong.prepare(taps)) - want
    assert float(mx.abs(off).max()) > 0.01 * float(mx.abs(want).max())


# ---- P-EAGLE
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mask_token_id", "ptd_token_id", "pard_token"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_learned_mask_makes_a_parallel_head(name: str, legacy: bool, tmp_path: Path) -> None:
    """In both formats, whatever the mask's token is called; its embeddings are its own."""
    tensors, config = kinds.parallel(*kinds.own_embedding(*kinds.trained("eagle3")))
    own = {"embed_tokens.weight": tensors["embed_tokens.weight"]}
    if legacy:
        tensors, config = kinds.legacy(tensors, config)
    config |= {"mask_token_id": None} | {name: 3}
    head = head_of(kinds.save_head(tmp_path, tensors | own, config))
    assert (head.name, head.pass_type, head.module.mask) == ("peagle", ParallelPass, 3)
    assert head.embed is head.module.embed_tokens
    assert mx.array_equal(head.embed(mx.array([5])), own["embed_tokens.weight"][5:6])
    assert mx.array_equal(head.module.mask_hidden, tensors["mask_hidden"][0])


# ---- drafts
# ---------------------------------------------------------------------------------------------


def run_of(path: Path, depth: int, prompts: list[list[int]]) -> runs.Run:
    """The engine's greedy answers, each alone."""
    return runs.run(*kinds.engine(path), depth, prompts)


@functools.cache
def ours(kind: str, depth: int) -> runs.Run:
    made = kinds.engine(kinds.DATA / kind, kinds.target_of(kind))
    return runs.run(*made, depth, kinds.reference(kind)["prompts"])


DEPTHS = [4, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (2, 7))]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", only(kinds.TRAINED, 3))
def test_the_engine_drafts_what_mlx_vlm_drafts(kind: str, depth: int) -> None:
    """Round by round, up to the drafts that max_tokens cuts short."""
    reference, run = kinds.reference(kind), ours(kind, depth)
    assert run.answers == reference["greedy"]
    for i, want in enumerate(reference["by_depth"][str(depth)]["drafts_of_first"]):
        rounds = [r for r in run.rounds[i] if r.start >= len(run.prompts[i])]
        got = [r.draft for r in rounds]
        whole = list(itertools.takewhile(lambda draft: len(draft) == depth, got))
        assert whole == want[: len(whole)]
        end = len(run.prompts[i]) + reference["max_tokens"]
        cut = [r.start for r in rounds[len(whole) :]]
        assert min(cut, default=end) >= end - 2 * (depth + 1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", only(kinds.TRAINED, 3))
def test_as_much_is_accepted_as_by_mlx_vlm(kind: str, depth: int) -> None:
    want = kinds.reference(kind)["by_depth"][str(depth)]["tokens_per_round"]
    assert ours(kind, depth).tokens_per_round(depth) >= 0.97 * want


# ---- heads that do not fit
# ------------------------------------------------------------------------------


def without(ending: str) -> kinds.Writer:
    def change(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        return {n: x for n, x in tensors.items() if not n.endswith(ending)}, config

    return change


def setting(**changed: Any) -> kinds.Writer:
    return lambda tensors, config: (tensors, config | changed)


def inner(name: str, **changed: Any) -> kinds.Writer:
    return lambda tensors, config: (tensors, config | {name: config[name] | changed})


def narrow(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Of a model half as wide."""
    half = tensors["fc.weight"][:, :96]
    return tensors | {"fc.weight": half}, config


def ids(change: Callable[[mx.array], mx.array]) -> kinds.Writer:
    return lambda tensors, config: (tensors | {"d2t": change(tensors["d2t"])}, config)


def unmasked(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    tensors, config = kinds.parallel(tensors, config)
    return tensors, config | dict(mask_token_id=None)


EAGLE_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
UNFIT: dict[str, tuple[str, kinds.Writer, str]] = {
    "eagle3: no o_proj": ("eagle3", without("o_proj.weight"), "o_proj.weight"),
    "eagle3: no norm": ("eagle3", without("post_attention_layernorm.weight"), "layernorm.weight"),
    "eagle3: half the hidden size": ("eagle3", narrow, "fc.weight"),
    "eagle3: a layer too high": ("eagle3", setting(**{EAGLE_LAYERS: [2, 3, 8]}), "has 7"),
    "eagle3: embeddings": ("eagle3", setting(**{EAGLE_LAYERS: [0, 3, 4]}), "layers [-1, 2, 3]"),
    "eagle3: one layer too few": ("eagle3", setting(**{EAGLE_LAYERS: [2, 3]}), "fc.weight"),
    "eagle3: strange layers": ("eagle3", inner(LAYER, model_type="gpt_oss"), "'gpt_oss'"),
    "eagle3: no size": ("eagle3", setting(**{LAYER: {"model_type": "llama"}}), "hidden_size"),
    "eagle3: ids too high": ("eagle3", ids(lambda d: d + 640), "than 640 tokens"),
    "peagle: no mask": ("eagle3", unmasked, "mask_token_id = None, not"),
    "eagle3: ids below zero": ("eagle3", ids(lambda d: d - 640), "than 640 tokens"),
    "dflash: another model": (
        "dflash",
        setting(num_target_layers=8),
        "num_target_layers = 8, but only 7",
    ),
    "dflash: sinks": (
        "dflash",
        inner("dflash_config", attention_sink_bias=True),
        "attention_sink_bias = True, but only False",
    ),
    "dspark: no such mask": ("dspark", inner("dflash_config", mask_token_id=640), "id = 640, not"),
    "dflash: no k_norm": ("dflash", without("k_norm.weight"), "k_norm.weight"),
    "dflash: half the hidden size": ("dflash", narrow, "fc.weight"),
    "dflash: no mask token": (
        "dflash",
        setting(dflash_config={"target_layer_ids": [1]}),
        "mask_token",
    ),
    "dflash: a layer too high": (
        "dflash",
        inner("dflash_config", target_layer_ids=[1, 3, 7]),
        "layers [1, 3, 7]",
    ),
    "dflash2: no codebook": ("dflash2", without("successor_codebook"), "successor_codebook"),
    "dflash2: no convolution": ("dflash2", without("1.mlp_conv.base_kernel"), "base_kernel"),
    "dspark: no Markov head": ("dspark", without("markov_w2.weight"), "markov_w2"),
    "dspark: another vocabulary": ("dspark", setting(vocab_size=600), "markov_w"),
}


@pytest.mark.parametrize("kind, change, said", UNFIT.values(), ids=UNFIT)
def test_a_head_that_does_not_fit(
    kind: str,
    change: kinds.Writer,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = kinds.save_head(tmp_path, *change(*kinds.trained(kind)))
    assert said in kinds.why_left_out(path, caplog)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, config = kinds.trained(kind)
    bad = {"fc.weight": tensors["fc.weight"] * mx.inf}
    head = load_head(
        find_head(kinds.save_head(tmp_path, tensors | bad, config)), kinds.plain_target()
    )
    assert head is not None and not read_weights(head)
    assert "fc.weight is not finite" in caplog.text
