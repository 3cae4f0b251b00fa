"""The logits that EAGLE-3, P-EAGLE, block and MTP heads draft from are those of the modules that train
them, on random weights. Needs speculators and torch, which nothing else does: pip
install speculators==0.9.0.

These modules train many places of a text at once; here they are given one, the engine's.
"""

import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.training.eagle import new_head
from mlxspec.training.run import save_head
from mlxspec.training.trainer import Trainer
from tests.heads import kinds, make_more, packagings, runs
from tests.heads.kinds import Config, Tensors
from tests.heads.packagings import TARGET
from tests.training import pair

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its imports

VERSION = "0.9.0"
CLOSE = 1e-4  # of the largest logit
DEPTH = 7
CHAINS = ("eagle3", "peagle")  # their rows join a token with the hidden state before it
PAD = 16  # rows behind the text, which nothing sees


@pytest.fixture(autouse=True)
def _speculators() -> None:
    try:
        found = importlib.metadata.version("speculators")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        pytest.skip(f"this compares with speculators {VERSION}; {found} is installed")


def then(*changes: kinds.Writer) -> kinds.Writer:
    def change(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        for each in changes:
            tensors, config = each(tensors, config)
        return tensors, config

    return change


def sliding(non_causal: bool) -> kinds.Writer:
    """A window that is wider than the prompts: at its edge, training differs by a row."""
    kinds_of_layers = ["sliding_attention", "full_attention", "sliding_attention"]

    def change(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
        layer = config["transformer_layer_config"] | dict(layer_types=kinds_of_layers)
        layer |= dict(sliding_window=400, use_sliding_window=True)
        more = dict(sliding_window_non_causal=non_causal, transformer_layer_config=layer)
        return tensors, config | more

    return change


def learned(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """As `mlxspec train` writes it, before the first step."""
    own = pair.target()
    files = new_head(own, pair.VOCABULARY)
    trainer = Trainer(own, files, 1)
    with tempfile.TemporaryDirectory() as name:
        save_head(trainer, files, Path(name), {})
        found = dict(mx.load(f"{name}/model.safetensors"))
        mx.eval(found)
    return found, files.config


MASKED, BLOCKS = kinds.parallel, kinds.speculators
VARIANTS: dict[str, tuple[str, str, kinds.Writer]] = {
    "eagle3": ("eagle3", "eagle3", kinds.as_it_is),
    "eagle3, two layers": ("eagle3", "eagle3", kinds.two_layers),
    "eagle3, normed output": ("eagle3", "eagle3", kinds.setting(norm_output=True)),
    "peagle": ("peagle", "eagle3", MASKED),
    "peagle, two layers": ("peagle", "eagle3", then(kinds.two_layers, MASKED)),
    "peagle, normed taps": ("peagle", "eagle3", then(kinds.normed_taps, MASKED)),
    "dflash": ("dflash", "dflash", BLOCKS),
    "dflash, sliding": ("dflash", "dflash", then(BLOCKS, sliding(False))),
    "dflash, sliding both ways": ("dflash", "dflash", then(BLOCKS, sliding(True))),
    "dflash, reduced": ("dflash", "dflash", kinds.reduced),
    "dflash2": ("dflash2", "dflash2", BLOCKS),
    "dflash2, sliding": ("dflash2", "dflash2", then(BLOCKS, sliding(True))),
    "dspark": ("dspark", "dspark", BLOCKS),
    "dspark, reduced": ("dspark", "dspark", kinds.reduced),
    "eagle3, learned": ("eagle3", "eagle3", learned),
    "dspark, sliding": ("dspark", "dspark", then(BLOCKS, sliding(False))),
}


def their_module(kind: str, tensors: Tensors, config: Config) -> Any:
    import torch

    module = importlib.import_module(f"speculators.models.{kind}.core")
    model = next(
        x
        for name, x in vars(module).items()
        if name.endswith("DraftModel") and x.__module__ == module.__name__
    )
    verifier = dict(name_or_path=None, architectures=[])
    method = dict(proposal_type="greedy", speculative_tokens=DEPTH)
    own = dict(algorithm=kind, proposal_methods=[method], default_proposal_method="greedy")
    settings = model.config_class(**config | dict(speculators_config=own | dict(verifier=verifier)))
    settings.transformer_layer_config._attn_implementation = "eager"
    theirs = model(settings)
    target = dict(mx.load(str(kinds.TARGET / "model.safetensors")))
    made = {"lm_head.weight": target["lm_head.weight"]} | tensors
    if not config.get("embed_requires_grad"):
        made["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    arrays = {name: np.array(x.astype(mx.float32)) for name, x in made.items()}
    if "d2t" in tensors:
        arrays |= {name: np.array(tensors[name]) for name in ("d2t", "t2d")}
    found = theirs.load_state_dict({n: torch.tensor(x) for n, x in arrays.items()}, strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith("verifier_") for name in found.missing_keys)
    return theirs.float().eval()


# ---- the places that are trained
# -----------------------------------------------------------------------------------


def one_chain(newest: int) -> Callable[..., Any]:
    """Rows of the text, and masks behind the newest token's, in the place of a random choice."""
    import torch

    def chosen(seq_length: int, **_: Any) -> tuple[Any, Any]:
        masks = range(1, DEPTH)
        anchors = [*range(newest + 1), *(newest for _ in masks)]
        depths = [*(0 for _ in range(newest + 1)), *masks]
        return torch.tensor(anchors), torch.tensor(depths)

    return chosen


def corrected(theirs: Any, kind: str, logits: Any, hidden: Any, before: Any) -> Any:
    """The likeliest tokens after those before them."""
    if kind == "dspark":
        bias = theirs.markov_head.block_bias(prev_token_ids=before[None], hidden_states=hidden)
        return (logits + bias[0]).argmax(-1)
    if kind == "dflash2":
        ids, scores = theirs.candidate_selector.select(logits, hidden, before)
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
    return logits.argmax(-1)


def their_logits(
    theirs: Any, kind: str, known: list[int], draft: list[int], taps: mx.array
) -> tuple[np.ndarray, list[int]]:
    """Their logits where our draft is, and the tokens of these, each behind those of our draft."""
    import torch

    read, found = [], []

    def hook(module: Any, inputs: Any, out: Any) -> None:
        read.append(inputs[0][0].detach())
        found.append(out[0].detach())

    theirs.lm_head.register_forward_hook(hook)
    told = known + draft
    told = told[1:] if kind in CHAINS else told
    newest = len(taps) - 1 if kind in CHAINS else len(taps)
    rows = len(told) + PAD
    hidden = torch.zeros((1, rows, taps.shape[-1]))
    hidden[0, : len(taps)] = torch.tensor(np.array(taps))
    tokens = torch.zeros((1, rows), dtype=torch.long)
    tokens[0, : len(told)] = torch.tensor(told)
    place = torch.zeros((1, rows))
    place[0, newest] = 1
    more: dict[str, Any] = dict(
        loss_mask=place, verifier_last_hidden_states=torch.zeros((1, rows, 64))
    )
    if kind == "eagle3":
        more = dict(ttt_steps=DEPTH)
    more |= dict(document_ids=torch.zeros((1, rows), dtype=torch.long), max_anchors=1)
    with torch.no_grad():
        theirs(hidden_states=hidden, input_ids=tokens, **more)
    if kind == "eagle3":
        logits = torch.stack([out[newest] for out in found])
    else:
        logits = found[0][-DEPTH:]
    before = torch.tensor([known[-1], *draft[:-1]])
    with torch.no_grad():
        chosen = corrected(theirs, kind, logits, read[0][-DEPTH:], before)
    if theirs.d2t is not None:
        chosen = chosen + theirs.d2t[chosen]
    return np.array(logits), chosen.tolist()


@pytest.mark.parametrize("kind, of, change", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_speculators(
    kind: str, of: str, change: kinds.Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, config = change(*kinds.trained(of))
    tensors = kinds.random_tensors(tensors)
    path = kinds.save_head(tmp_path, tensors, config)
    known, draft, logits = kinds.first_round(path, kinds.reference(of)["prompts"][0], DEPTH)
    if kind in CHAINS:
        logits = logits[:, kinds.kept_ids(tensors)]
    ids = config.get("eagle_aux_hidden_state_layer_ids") or config["aux_hidden_state_layer_ids"]
    text = mx.array([known[:-1]])
    taps, _ = make_more.hidden_states(kinds.plain_target(), text, [i - 1 for i in ids])
    theirs = their_module(kind, tensors, config)
    core = importlib.import_module(f"speculators.models.{kind}.core")
    monkeypatch.setattr(core, "compute_metrics", lambda *args, **kwargs: (0.0, {}))  # needs a GPU
    if kind == "peagle":
        chain = one_chain(len(known) - 2)
        monkeypatch.setattr(core, "generate_cod_sample_indices", chain)
    found, tokens = their_logits(theirs, kind, known, draft, taps[0])
    ours = np.array(logits)

    def off(found: np.ndarray) -> float:
        return float(np.abs(ours - found).max() / np.abs(found).max())

    print(f"{kind}: off by {off(found):.1e} of the largest logit")
    assert off(found) <= CLOSE and draft == tokens
    wrong, _ = their_logits(theirs, kind, known, draft, taps[0, ::-1])
    assert off(wrong) > 100 * CLOSE


# ---- MTP
# -------------------------------------------------------------------------------------------

NAMES = {
    "fc.": "mtp_layers.0.input_proj.",
    "pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "norm.": "mtp_layers.0.final_layernorm.",
    "layers.": "mtp_layers.",
}


def renamed(tensors: Tensors) -> dict[str, np.ndarray]:
    """Under their names, norms zero-centred."""
    made = {}
    for name, array in tensors.items():
        old = next(start for start in NAMES if name.startswith(start))
        made[NAMES[old] + name.removeprefix(old)] = np.array(array - (array.ndim == 1))
    return made


def test_logits_of_mtp_are_those_of_speculators(tmp_path: Path) -> None:
    """Of rows with the target's hidden states; chained ones are trained without those before."""
    import torch
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    target, config = runs.plain_target(), packagings.read_json(TARGET / "config.json")
    text, ends = config["text_config"], target.language_model
    tensors = runs.random_tensors(target)
    path = packagings.write_sidecar(tmp_path, tensors, packagings.sidecar_config(text))
    tokens = mx.random.randint(0, text["vocab_size"], (40,), key=mx.random.key(4))
    hidden = mx.random.normal((40, text["hidden_size"]), key=mx.random.key(5))
    head = runs.head_of(path, target)
    ours = np.array(head.lm_head(runs.DenseHead(head)(tokens[1:39].tolist(), hidden[:38])))

    method = dict(proposal_type="greedy", speculative_tokens=1)
    verifier = dict(name_or_path=None, architectures=[])
    own = dict(algorithm="mtp", proposal_methods=[method], default_proposal_method="greedy")
    theirs = MTPDraftModel(
        MTPSpeculatorConfig(
            transformer_layer_config=text, speculators_config=own | dict(verifier=verifier)
        )
    )
    arrays = renamed(tensors)
    arrays["embed_tokens.weight"] = np.array(ends.model.embed_tokens.weight)
    arrays["lm_head.weight"] = np.array(ends.lm_head.weight)
    found = theirs.load_state_dict({n: torch.tensor(x) for n, x in arrays.items()}, strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith("verifier_") for name in found.missing_keys)
    with torch.no_grad():
        ids, states = torch.tensor(np.array(tokens))[None], torch.tensor(np.array(hidden))[None]
        logits = theirs.float().eval()(ids, states)[0][0][0].numpy()

    def off(found: np.ndarray) -> float:
        return float(np.abs(ours - found).max() / np.abs(found).max())

    print(f"mtp: off by {off(logits):.1e} of the largest logit")
    assert logits.shape == ours.shape and off(logits) <= CLOSE
    assert off(logits[::-1]) > 100 * CLOSE
