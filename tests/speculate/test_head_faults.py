"""A head that is damaged or belongs to another model costs a line in the log, never a request."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.load.drafting import load_drafting
from mlxspec.load.loader import load_engine
from mlxspec.model.checkpoint import load_model
from mlxspec.speculate.heads import load_head, read_weights
from mlxspec.speculate.heads.block import Block
from mlxspec.speculate.heads.eagle import Eagle3
from mlxspec.speculate.heads.files import find_head
from mlxspec.types import Request, Sampling
from tests.heads import kinds, packagings, runs
from tests.heads.kinds import warnings_in
from tests.heads.packagings import FOUR_BITS, SIDECAR, TARGET, Tensors
from tests.support import tiny
from tests.support.parameter_rows import in_turn

MLP = "layers.0.mlp"


def sidecar(out: Path, tensors: Tensors) -> Path:
    config = packagings.read_json(SIDECAR / "config.json")
    return packagings.write_sidecar(out, tensors, config)


# ---- files
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 10, 100_000, -8])
def test_a_truncated_file(left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = packagings.write("sidecar", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert load_head(find_head(tmp_path), runs.plain_target()) is None
    assert len(warnings_in(caplog)) == 1 and str(file) in warnings_in(caplog)[0]
    assert "download it again" in warnings_in(caplog)[0]


def test_a_file_that_shrinks_before_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = load_head(find_head(packagings.write("sidecar", tmp_path)), runs.plain_target())
    os.truncate(tmp_path / "model.safetensors", 100_000)
    assert head is not None and not read_weights(head)
    assert len(warnings_in(caplog)) == 1 and "without a head" in warnings_in(caplog)[0]


def test_a_truncated_head_is_still_no_small_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server that was told to draft with it starts without a head."""
    file = packagings.write("sidecar", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    drafting = load_drafting(runs.plain_target(), TARGET, tmp_path, Config())
    assert not (drafting.small or drafting.head) and len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    "outside", ["../head/model.safetensors", "{path}", "/{path}", "x/../../head"]
)
def test_a_file_outside_the_directory(
    outside: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file outside the directory is not read."""
    file = packagings.write("sidecar", tmp_path / "head") / "model.safetensors"
    target = tmp_path / "target"
    target.mkdir()
    name = outside.format(path=file)
    packagings.write_json(target / "config.json", dict(mlx_lm_extra_tensors=dict(mtp_file=name)))
    assert load_head(find_head(target), runs.plain_target()) is None
    assert len(warnings_in(caplog)) == 1 and f"mtp_file = {name!r}" in warnings_in(caplog)[0]


def test_a_promise_without_tensors(caplog: pytest.LogCaptureFixture) -> None:
    assert load_head(find_head(TARGET), runs.plain_target()) is None
    assert len(warnings_in(caplog)) == 1
    assert str(TARGET) in warnings_in(caplog)[0] and "--draft" in warnings_in(caplog)[0]


def test_a_promise_names_the_head_of_a_model_in_the_hub_s_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There, a directory's name is that of a commit."""
    path = tmp_path / "models--mlx-community--Qwen3.8-27B-4bit/snapshots/0123abc"
    shutil.copytree(TARGET, path)
    assert load_head(find_head(path), runs.plain_target()) is None
    assert "--draft mlx-community/Qwen3.8-27B-MTP-4bit" in warnings_in(caplog)[0]


def test_neither_head_nor_promise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_head(find_head(tmp_path), runs.plain_target()) is None
    packagings.write_json(tmp_path / "config.json", [1, 2])
    assert load_head(find_head(tmp_path), runs.plain_target()) is None
    packagings.save(tmp_path / "model.safetensors", {"norm.weight": mx.ones((4,))})
    assert load_head(find_head(tmp_path), runs.plain_target()) is None
    assert not warnings_in(caplog)


@pytest.mark.parametrize("name", [f"{MLP}.up_proj.weight", "norm.weight", "fc.scales"])
def test_values_that_are_not_finite(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = packagings.head_tensors()
    if name not in tensors:
        tensors = packagings.quantized(tensors, lambda _: FOUR_BITS)
    at = mx.arange(tensors[name].size).reshape(tensors[name].shape) == 3
    head = load_head(
        find_head(sidecar(tmp_path, tensors | {name: mx.where(at, mx.nan, tensors[name])})),
        runs.plain_target(),
    )
    assert head is not None and not read_weights(head)
    assert len(warnings_in(caplog)) == 1 and name in warnings_in(caplog)[0]


def test_the_model_starts_without_a_damaged_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = packagings.head_tensors()
    path = sidecar(tmp_path / "head", tensors | {"fc.weight": tensors["fc.weight"] * mx.inf})
    config = Config(cache_dir=str(tmp_path), kv_blocks=64, context=256)
    _, plain = load_engine(TARGET, "tiny", replace(config, draft="off"))
    e, info = load_engine(TARGET, "tiny", config, path)
    assert len(warnings_in(caplog)) == 1 and "fc.weight is not finite" in warnings_in(caplog)[0]
    assert info.weight_bytes == plain.weight_bytes
    e.add(Request("r", tuple(runs.reference()["prompts"][0]), 16, runs.GREEDY))
    out = tiny.run(e)
    assert tiny.tokens(out, "r") == runs.reference()["greedy"][0][:16]
    assert not e.spec_metrics.accepted["mtp", 1]


def test_a_model_that_cannot_use_a_head_plans_no_memory_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(cache_dir=str(tmp_path), kv_blocks=64, context=256, layout="solo")
    _, plain = load_engine(TARGET, "tiny", replace(config, draft="off"))
    _, info = load_engine(TARGET, "tiny", config, SIDECAR)
    assert "this model cannot use one here" in caplog.text
    assert info.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.hidden_norm.weight", "model.norm.weight"],
        ["model.hidden_norm.weight", "model.embed_tokens.weight"],
        ["hidden_norm.weight", "layers.3.fc.weight"],
        ["my_hidden_norm.weight", "my_fc.weight", "fc.weight"],
        ["tower.post_projection.weight", "pre_projection.weight"],
        ["blocks.0.0.linear.weight", "blocks.0.1.linear.weight"],
        ["10.0.linear.weight", "10.0.linear.bias", "0.0.linear.bias"],
        ["my_pre_fc_norm_hidden.weight", "my_eh_proj.weight"],
    ],
)
def test_a_plain_model_is_no_head(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its tensors are called."""
    packagings.save(tmp_path / "model.safetensors", {name: mx.ones((4,)) for name in names})
    found = find_head(tmp_path)
    assert not found.kind and not found.standalone
    assert load_head(found, runs.plain_target()) is None and not warnings_in(caplog)


# ---- tensors
# --------------------------------------------------------------------------------------------


def without(*endings: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {name: array for name, array in t.items() if not name.endswith(endings)}


def adding(**tensors: Sequence[int]) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {name: mx.ones(shape) for name, shape in tensors.items()}


def narrow(t: Tensors) -> Tensors:
    """Of a model half as wide."""
    return {name: array[..., : array.shape[-1] // 2] for name, array in t.items()}


def four_bits(t: Tensors) -> Tensors:
    return packagings.quantized(t, lambda _: FOUR_BITS)


def mark_alone(t: Tensors) -> Tensors:
    return {name: array for name, array in t.items() if name == "pre_fc_norm_hidden.weight"}


UNFIT: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no fc": (without("fc.weight"), "fc.weight"),
    "no norm of keys": (without("k_norm.weight"), "layers.0.self_attn.k_norm.weight"),
    "no layer": (lambda t: {k: v for k, v in t.items() if "layers" not in k}, f"{MLP}.up_proj"),
    "one tensor": (mark_alone, "fc.weight"),
    "one too many": (adding(extra=(3,)), "extra"),
    "a matrix too many": (adding(**{"extra.weight": (3, 3)}), "extra.weight"),
    "another layer": (adding(**{"layers.7.fc.weight": (3, 3)}), "layers.7.fc.weight"),
    "a strange layer": (adding(**{"layers.x.weight": (3, 3)}), "layers.x.weight"),
    "half the hidden size": (narrow, "fc.weight"),
    "half a matrix": (adding(**{"fc.weight": (64, 64)}), "fc.weight"),
    "a number": (adding(**{"norm.weight": ()}), "norm.weight"),
    "no scales": (lambda t: without("scales")(four_bits(t)), "fc.biases"),
    "no biases": (lambda t: without("biases")(four_bits(t)), "(64, 4)"),
    "scales alone": (lambda t: without("up_proj.weight")(four_bits(t)), f"{MLP}.up_proj.weight"),
    "odd experts": (adding(**{f"{MLP}.experts.gate_up_proj": (4, 3, 64)}), "(4,3,64)"),
    "few rows of logits": (adding(**{"lm_head.weight": (639, 64)}), "fewer than 640 tokens"),
    "few embeddings": (adding(**{"embed_tokens.weight": (639, 64)}), "fewer than 640 tokens"),
    "many rows of logits": (adding(**{"lm_head.weight": (641, 64)}), "more or fewer than 640"),
    "no down_proj": (adding(**{f"{MLP}.experts.gate_up_proj": (4, 64, 64)}), "down_proj"),
}


@pytest.mark.parametrize("change, said", UNFIT.values(), ids=UNFIT)
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], Tensors],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = sidecar(tmp_path, change(packagings.head_tensors()))
    assert load_head(find_head(path), runs.plain_target()) is None
    assert len(warnings_in(caplog)) == 1 and "\n" not in warnings_in(caplog)[0]
    assert "decoding without" in warnings_in(caplog)[0] and said in warnings_in(caplog)[0]


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_numbered_experts_with_a_gap(
    gone: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where there are as many as the model has: each would answer for another."""
    target = tiny.model("qwen3_5_moe")
    tensors = packagings.numbered(runs.random_tensors(target))
    names = [name for name in tensors if f".experts.{gone}." in name]
    moved = {name.replace(f".{gone}.", ".9."): tensors.pop(name) for name in names}
    for some in (tensors, tensors | moved):
        caplog.clear()
        assert load_head(find_head(sidecar(tmp_path, some)), target) is None
        assert len(warnings_in(caplog)) == 1 and "decoding without" in warnings_in(caplog)[0]


def test_a_head_of_another_architecture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same hidden size, but with experts; and where the model cannot have one."""
    assert load_head(find_head(SIDECAR), tiny.model("qwen3_5_moe")) is None
    assert load_head(find_head(SIDECAR), tiny.model("mamba2")) is None
    assert len(warnings_in(caplog)) == 2


# ---- heads of other kinds
# --------------------------------------------------------------------------------


def few_embeddings(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    """Trained with the head."""
    tensors, config = kinds.own_embedding(tensors, config)
    return tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"][:639]}, config


def few_tokens(packaging: kinds.Writer) -> kinds.Writer:
    """Of a model with 600 tokens; the target has 640."""

    def change(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
        tensors, config = packaging(tensors, config)
        few = {name: x[:600] if len(x) == 640 else x for name, x in tensors.items()}
        return few, config | dict(vocab_size=600)

    return change


def half_as_wide(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    """Of a model whose hidden size is 32, without embeddings; the target's is 64."""
    layer = config["transformer_layer_config"] | dict(hidden_size=32)
    head = Eagle3(layer, 3, 32)
    own = dict(tree_flatten(head.parameters()))
    own |= {"lm_head.weight": tensors["lm_head.weight"][:, :32], "d2t": tensors["d2t"]}
    return own, config | dict(transformer_layer_config=layer, target_hidden_size=32)


def with_embeddings(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    own, config = half_as_wide(tensors, config)
    return own | {"embed_tokens.weight": tensors["embed_tokens.weight"][:, :32]}, config


def narrow_within(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    """Reads the target's hidden states, but not its embeddings."""
    own, config = half_as_wide(tensors, config)
    return own | {"fc.weight": mx.ones((32, 192))}, config | dict(target_hidden_size=64)


def narrow_block(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    """Of half the hidden size, with an lm_head but no embeddings of its own."""
    config |= dict(hidden_size=32)
    own = dict(tree_flatten(Block(config | config["dflash_config"], 3, 64).parameters()))
    return own | {"lm_head.weight": mx.ones((640, 32))}, config


def no_hidden_size(tensors: Tensors, config: kinds.Config) -> tuple[Tensors, kinds.Config]:
    return tensors, {name: x for name, x in config.items() if name != "hidden_size"}


MISFITS: dict[str, tuple[str, kinds.Writer, str]] = {
    "few embeddings": ("eagle3", few_embeddings, "fewer than 640 tokens"),
    "few tokens": ("eagle3", few_tokens(kinds.full_vocabulary), "fewer than 640 tokens"),
    "a short codebook": ("dflash2", few_tokens(kinds.as_it_is), "fewer than 640 tokens"),
    "a short Markov head": ("dspark", few_tokens(kinds.as_it_is), "fewer than 640 tokens"),
    "half the hidden size": ("eagle3", half_as_wide, "fc.weight"),
    "half the hidden size, embeddings": ("eagle3", with_embeddings, "fc.weight"),
    "narrow": ("eagle3", narrow_within, "does not fit: ValueError"),
    "a narrow block": ("dflash", narrow_block, "does not fit: ValueError"),
    "no hidden size": ("dflash", no_hidden_size, "lacks 'hidden_size'"),
    "few tokens of its own": ("dspark", few_tokens(kinds.deepspec), "fewer than 640 tokens"),
}


@pytest.mark.parametrize("kind, change, said", MISFITS.values(), ids=MISFITS)
def test_other_heads_that_do_not_fit(
    kind: str,
    change: kinds.Writer,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = kinds.save_head(tmp_path, *change(*kinds.trained(kind)))
    why = kinds.why_left_out(path, caplog)
    assert f"decoding without a head: the head in {path} " in why and said in why


ODD = ["true", "-1", "0", "0.5", '"x"', "[]", "{}", "[[]]", "1e999", "9" * 400, "null"]


def with_odd_values(config: Any, values: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    """The config with each value that it holds, at any depth, replaced by each of these."""
    for name, value in config.items():
        for odd in map(json.loads, values):
            yield Path(name), config | {name: odd}
        if isinstance(value, dict):
            for place, inner in with_odd_values(value, values):
                yield name / place, config | {name: inner}


@pytest.mark.parametrize(
    "kind, values",
    [
        ("dspark", ODD[1:8:3]),
        *(pytest.param(kind, ODD, marks=pytest.mark.slow) for kind in kinds.TRAINED),
    ],
)
def test_a_config_that_holds_anything(
    kind: str, values: Sequence[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that is left out is left out in a line; nothing is raised."""
    target = load_model(kinds.target_of(kind))[0]
    path = kinds.save_head(tmp_path, *kinds.trained(kind))
    depths = set()
    for place, config in with_odd_values(kinds.config_of(kind), values):
        caplog.clear()
        packagings.write_json(path / "config.json", config)
        head = load_head(find_head(path), target)
        said = warnings_in(caplog)
        assert len(said) == (head is None), (place, config, said)
        if head is not None:
            depths.add(head.depth)
    assert 1 <= min(depths) <= max(depths) <= 256


# ---- a head that fails
# ----------------------------------------------------------------------------------


def failing(f: Any, calls: int) -> Any:
    """Fails from this call on."""
    made = []

    def call(*args: Any) -> Any:
        made.append(0)
        if len(made) >= calls:
            raise RuntimeError("broken")
        return f(*args)

    return call


@pytest.mark.parametrize(
    "part, calls, temperature", in_turn(["lm_head", "embed"], [1, 2, 9, 30], [0.0, 0.8], every=6)
)
def test_a_head_that_fails_is_dropped(
    part: str, calls: int, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """While it reads a prompt, in the first pass of a draft or in a later one: all requests end
    with plain tokens, those in flight and those that come."""
    model = runs.plain_target()
    prompts = runs.reference()["prompts"][:3]
    plain = tiny.Plain(model)
    e, head = runs.engine(head=SIDECAR)
    setattr(head.head, part, failing(getattr(head.head, part), calls))
    e.proposer = proposer = runs.proposer_of(head, 4)
    out = []
    for i, prompt in enumerate(prompts):
        e.add(Request(str(i), tuple(prompt), 24, Sampling(temperature=temperature, seed=i)))
        out += e.step() if i else tiny.run(e)
    out += tiny.run(e)
    for i, prompt in enumerate(prompts):
        assert tiny.tokens(out, str(i)) == plain(prompt, 24, temperature, i)
    assert proposer.drafters == []
    assert caplog.text.count("drafting by mtp failed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_a_head_that_is_dropped_costs_nothing_more(depth: int, tmp_path: Path) -> None:
    """No hidden states are handed out, a prompt that is known costs a token more than without a
    head, and at a fixed depth nothing else drafts in its place."""
    config = Config(cache_dir=str(tmp_path), block_size=8, kv_blocks=64, context=256, cache_gb=0)
    prompt = kinds.reference("eagle3")["prompts"][0][:33]
    found = []
    for draft in ("off", ""):
        settings = replace(config, draft=draft, draft_depth=depth)
        e, _ = load_engine(kinds.TARGET, "tiny", settings, kinds.DATA / "eagle3")
        if draft != "off":
            head = e.proposer.drafters[-1]  # type: ignore[attr-defined]
            head.head.module = failing(head.head.module, 3)
        e.add(tiny.request("first", prompt, 24))
        answer = tiny.tokens(tiny.run(e), "first")
        before = e.spec_metrics.drafted.total()
        e.add(replace(tiny.request("again", prompt, 24), prediction=tuple(answer)))
        outputs = e.step()
        assert e.in_flight is not None and not e.in_flight.taps
        outputs += tiny.run(e)
        assert tiny.tokens(outputs, "again") == answer
        copied = e.spec_metrics.drafted.total() - before
        assert bool(copied) == (draft == "off" or not depth)
        found.append(outputs[-1].cached)
    assert found == [32, 31]
