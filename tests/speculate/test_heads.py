"""Trained heads: every packaging gives the same one, and it drafts what mlx-vlm's own loop and a
plain simulation draft with it."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.config import Config
from mlxspec.engine.engine import Engine
from mlxspec.kernels.trial import Verdict
from mlxspec.kernels.verify import KERNELS
from mlxspec.load.drafting import Drafting
from mlxspec.model.checkpoint import load_model
from mlxspec.model.pages import Pages
from mlxspec.speculate.chain import MAX_CHAIN
from mlxspec.speculate.heads import drafter
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.model import HeadModel
from mlxspec.types import Sampling
from tests import metalsim
from tests.heads import packagings, runs
from tests.heads.packagings import FORMS, FOUR_BITS, MXFP4, SIDECAR, WHOLE, WRITERS
from tests.support import tiny
from tests.support.parameter_rows import only

Params = Mapping[str, mx.array]


def parameters(head: HeadModel) -> Params:
    found: Any = tree_flatten(head.module.parameters())
    return dict(found)


def assert_equal(got: Params, want: Params, rounding: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert mx.allclose(got[name], array, rtol=rounding, atol=0.0), name


# ---- packagings
# -----------------------------------------------------------------------------------------


def expected(packaging: str) -> Params:
    """The module's parameters, from the tensors that were trained."""
    trained = packagings.head_tensors()
    how = {
        "sidecar-4bit": lambda _: FOUR_BITS,
        "sidecar-mxfp4": lambda _: MXFP4,
        "embedded-mixed": packagings.mixed_bits,
    }
    return packagings.quantized(trained, how[packaging]) if packaging in how else trained


@pytest.mark.parametrize("packaging", WRITERS)
def test_every_packaging_gives_the_same_head(packaging: str, tmp_path: Path) -> None:
    path = packagings.write(packaging, tmp_path / packaging)
    target = load_model(path)[0] if packaging in WHOLE else runs.plain_target()
    head = runs.head_of(path, target)
    # A norm less one and one again may differ in its last bit.
    rounding = 1e-6 if packaging in ("raw", "sidecar-poisoned") else 0.0
    assert_equal(parameters(head), expected(packaging), rounding)
    assert head.name == "mtp" and len(head.module.layers) == 1


def test_each_layer_has_its_own_bits(tmp_path: Path) -> None:
    head: Any = runs.head_of(packagings.write("embedded-mixed", tmp_path), runs.plain_target())
    mlp = head.module.layers[0].mlp
    assert (mlp.up_proj.bits, mlp.down_proj.bits, mlp.down_proj.group_size) == (4, 8, 32)
    assert head.module.fc.weight.dtype == mx.float32


# ---- drafts
# ---------------------------------------------------------------------------------------------


@functools.cache
def engine() -> tuple[Engine, HeadDrafter]:
    return runs.engine(head=SIDECAR)


@functools.cache
def ours(depth: int) -> runs.Run:
    """The engine's greedy answers to all prompts, each alone. Only the first run is cold."""
    return runs.run(*engine(), depth, runs.reference()["prompts"])


@pytest.mark.parametrize("depth", [2, 4, 7])
@pytest.mark.parametrize("packaging", ["sidecar", "sidecar-4bit"])
def test_the_loaded_head_drafts_what_mlx_vlm_drafts(
    packaging: str, depth: int, tmp_path: Path
) -> None:
    """By a simulation that keeps the K/V of accepted drafts as they were drafted, as mlx-vlm
    does."""
    reference = runs.reference()
    head = runs.head_of(packagings.write(packaging, tmp_path), runs.plain_target())
    drafts = reference["by_depth"][packaging][str(depth)]["drafts_of_first"]
    for i, want in enumerate(drafts):
        prompt, answer = reference["prompts"][i], reference["greedy"][i]
        depths = [len(draft) for draft in want]
        assert want == runs.simulate(head, prompt + answer, len(prompt), depths, keep=True)


def assert_simulated(run: runs.Run, sampling: Sampling = runs.GREEDY) -> None:
    """The drafts are those of a simulation that reads all rows with the target's hidden states."""
    for prompt, answer, rounds in zip(run.prompts, run.answers, run.rounds, strict=True):
        got = [each.draft for each in rounds]
        at, depths = rounds[0].start, map(len, got)
        assert got == runs.simulate(
            runs.plain_head(), prompt + answer, at, depths, keep=False, sampling=sampling
        )


DEPTHS = [4, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (2, 7))]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_engine_drafts_what_a_simulation_drafts(depth: int) -> None:
    """Before it knows how many of the last drafts were kept."""
    run = ours(depth)
    assert run.answers == runs.reference()["greedy"]
    assert_simulated(run)
    overlaps = [each.overlaps for rounds in run.rounds for each in rounds]
    assert sum(overlaps) > 0.9 * len(overlaps)


@pytest.mark.parametrize("depth", only([4, 2], 0))  # next to the test of the same answers
def test_as_much_is_accepted_as_by_mlx_vlm(depth: int) -> None:
    assert ours(depth).tokens_per_round(depth) >= 0.97 * tokens_per_round("sidecar", depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4, 7])
def test_the_first_draft_of_an_answer_is_mlx_vlms(depth: int) -> None:
    """Before anything was drafted, both have read the same hidden states."""
    drafts = runs.reference()["by_depth"]["sidecar"][str(depth)]["drafts_of_first"]
    run = ours(depth)
    for prompt, rounds, want in zip(run.prompts, run.rounds, drafts, strict=False):
        first = next(each for each in rounds if each.start >= len(prompt))
        assert first.draft == want[0]


def test_drafted_rows_stay_beside_the_pages_where_our_kernel_attends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And drafts are what they were, of two sequences that share passes."""

    class Attends(dict[str, Verdict]):
        def get(self, name: str, default: Any = None) -> Any:
            return Verdict("matrix", 1, 16) if name.startswith("paged") else default

    puts: list[Any] = []
    put = Pages.put
    monkeypatch.setattr(Pages, "put", lambda self, *rest: [puts.append(self), put(self, *rest)][1])
    monkeypatch.setattr(KERNELS, "verdicts", Attends())
    made, head = runs.engine(head=SIDECAR)
    depth, prompts = 4, runs.reference()["prompts"][:2]
    drafted = sampled = 0
    draft = head.draft

    def counted(*rest: Any) -> None:
        nonlocal drafted, sampled
        before = sum(pages in made.runner.head_pages for pages in puts)
        draft(*rest)
        drafted += sum(pages in made.runner.head_pages for pages in puts) - before
        sampled += bool(head.chosen(rest[0]))

    monkeypatch.setattr(head, "draft", counted)
    with metalsim.patch(checked=False):
        run = runs.run(made, head, depth, prompts, together=True)
    assert run.answers == runs.reference()["greedy"][:2]
    assert_simulated(run)
    assert drafted <= sampled, "each draft writes once"


def test_drafts_are_drawn_with_the_targets_noise() -> None:
    """At a temperature too the engine drafts what a simulation drafts."""
    prompts, sampling = runs.reference()["prompts"][:2], Sampling(temperature=0.8, seed=1)
    assert_simulated(runs.run(*engine(), 4, prompts, sampling), sampling)


def test_neighbours_change_no_draft() -> None:
    """Nor where a prompt's last token is a step of its own, with what stands before it in
    flight."""
    reference = runs.reference()
    single = [i for i, prompt in enumerate(reference["prompts"]) if len(prompt) % runs.BLOCK == 1]
    some = [0, *single[:2], 4]
    prompts = [reference["prompts"][i] for i in some]
    e, head = runs.engine(head=SIDECAR)
    run = runs.run(e, head, 3, prompts, together=True)
    assert run.answers == [reference["greedy"][i] for i in some]
    assert run.rounds[1][0].start == len(prompts[1]) - 1
    assert_simulated(run)


# ---- acceptance
# -----------------------------------------------------------------------------------------


def tokens_per_round(packaging: str, depth: int) -> float:
    """mlx-vlm's, which reads the others as the sidecar."""
    found = runs.reference()["by_depth"]
    of = packaging if packaging in found else "sidecar"
    return float(found[of][str(depth)]["tokens_per_round"])


@pytest.mark.slow
@pytest.mark.parametrize("depth", [4, 2])
@pytest.mark.parametrize(
    "packaging", ["sidecar-4bit", "sidecar-poisoned", "embedded", "beside", "raw"]
)
def test_as_much_is_accepted_with_any_packaging(packaging: str, depth: int, tmp_path: Path) -> None:
    path = packagings.write(packaging, tmp_path)
    made = runs.engine(path) if packaging in WHOLE else runs.engine(head=path)
    run = runs.run(*made, depth, runs.reference()["prompts"])
    assert run.answers == runs.reference()["greedy"]
    assert run.tokens_per_round(depth) >= 0.97 * tokens_per_round(packaging, depth)


def norms_without_one(head: Any) -> None:
    params = parameters(head)
    norms = [(name, array - 1) for name, array in params.items() if name.endswith("norm.weight")]
    head.module.load_weights(norms, strict=False)


def hidden_first(head: Any) -> None:
    weight = head.module.fc.weight
    head.module.fc.weight = mx.roll(weight, weight.shape[0], 1)


@pytest.mark.parametrize("mistake", only([norms_without_one, hidden_first], 0))
def test_mistakes_show(mistake: Any) -> None:
    """A wrong head changes no token, and is accepted so rarely that the tests above would fail."""
    e, head = runs.engine(head=SIDECAR)
    mistake(head.head)
    run = runs.run(e, head, 4, runs.reference()["prompts"][:1])
    assert run.answers == runs.reference()["greedy"][:1]
    assert run.tokens_per_round(4) < 0.6 * tokens_per_round("sidecar", 4)


def greedy_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, only the likeliest tokens are drafted."""
    own = drafter.sampling_of
    monkeypatch.setattr(drafter, "sampling_of", lambda *args: replace(own(*args), temperature=0.0))


@pytest.mark.slow
def test_the_targets_noise_pays_where_the_target_is_unsure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is accepted than of greedy drafts, of the same tokens."""
    prompts, sampling = runs.reference()["prompts"][:2], Sampling(temperature=1.5, seed=0)
    coupled = runs.run(*engine(), 4, prompts, sampling)
    greedy_drafts(monkeypatch)
    greedy = runs.run(*engine(), 4, prompts, sampling)
    assert coupled.answers == greedy.answers
    assert coupled.tokens_per_round(4) > 1.2 * greedy.tokens_per_round(4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_measured_rates_decide_how_drafts_are_drawn(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the target's noise, or as the likeliest tokens: hardly worse than always the better."""
    prompts, sampling = runs.reference()["prompts"][:6], Sampling(temperature=temperature, seed=0)

    def rounds(depth: int) -> int:
        return sum(map(len, runs.run(*engine(), depth, prompts, sampling).rounds))

    measured, drawn = rounds(0), rounds(MAX_CHAIN)
    greedy_drafts(monkeypatch)
    likeliest = rounds(MAX_CHAIN)
    print(measured, drawn, likeliest)
    assert measured < 1.07 * min(drawn, likeliest)
    assert max(drawn, likeliest) > 1.15 * min(drawn, likeliest), "it does not matter here"


# ---- experts
# --------------------------------------------------------------------------------------------

GROUPS = dict(group_size=32, bits=4, mode="affine")  # the tiny experts are narrow


@functools.cache
def experts(kind: str) -> tuple[Any, Params, tiny.Plain]:
    """A random target, a random head for it, and plain decoding."""
    target = tiny.model(kind)
    return target, runs.random_tensors(target), tiny.Plain(tiny.model(kind))


def write_experts(out: Path, form: str, tensors: Params) -> Path:
    """In the names of Qwen's own checkpoints where their experts are."""
    made = FORMS[form](dict(tensors))
    if form == "fused":
        made = {f"mtp.{k}": v for k, v in packagings.zero_centred(made).items()}
    return packagings.write_sidecar(out, made, packagings.sidecar_config({}))


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize(
    "form, bits", [*((form, 0) for form in FORMS), ("stacked", 4), ("numbered", 4)]
)
def test_experts_in_any_form_give_the_same_head(
    kind: str, form: str, bits: int, tmp_path: Path
) -> None:
    target, tensors, _ = experts(kind)
    if bits:
        tensors = packagings.quantized(dict(tensors), lambda _: GROUPS)
    head = runs.head_of(write_experts(tmp_path, form, tensors), target)
    assert_equal(parameters(head), tensors, rounding=1e-6 if form == "fused" else 0.0)
    assert any("switch_mlp" in name for name in tensors)


def test_experts_have_kernels(tmp_path: Path) -> None:
    """Those of the head's own rows: of gate and up, whose choices share a row, and of down."""
    target, tensors, _ = experts("qwen3_5_moe")
    tensors = packagings.quantized(dict(tensors), lambda _: GROUPS)
    head = runs.head_of(write_experts(tmp_path, "stacked", tensors), target)
    names = {case.name for case in Drafting(tmp_path, head=head).cases(Config())}
    args = target.language_model.args
    of = f"small_qmm_experts {args.num_experts_per_tok} of {args.num_experts}x"
    found = sorted(name.rpartition(", ")[2] for name in names if name.startswith(of))
    assert found == ["one row", "own rows"]
    assert any(name.startswith("small_qmm ") for name in names)


@pytest.mark.parametrize("kind, temperature", [("qwen3_5_moe", 0.0), ("qwen3_next", 0.8)])
def test_experts_draft(kind: str, temperature: float, tmp_path: Path) -> None:
    model, tensors, plain = experts(kind)
    e = tiny.engine(model, layout="rect", block=8, blocks=64)
    head = HeadDrafter(runs.head_of(write_experts(tmp_path, "fused", tensors), model), e.runner)
    e.proposer = proposer = runs.proposer_of(head, 3)
    prompts = [[(7 * i + 3 * j) % tiny.VOCAB for j in range(5 + 6 * i)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        e.add(tiny.request(str(i), prompt, 24, temperature=temperature, seed=i))
    out = tiny.run(e)
    for i, prompt in enumerate(prompts):
        assert tiny.tokens(out, str(i)) == plain(prompt, 24, temperature, i)
        assert sum(len(each.draft) for each in proposer.rounds[str(i)]) > 24
    assert proposer.drafters == [head]
