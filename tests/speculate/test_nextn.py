"""Layer N of a raw checkpoint: found, loaded and run as mlx-lm would run it, and its drafts are
those of a dense computation in the layout of each kind of model."""

import importlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache

from mlxspec.config import Config
from mlxspec.kernels.verify import VerdictFile
from mlxspec.load.drafting import add_drafters, load_drafting
from mlxspec.load.measuring import Measuring
from mlxspec.load.warmup import PromptStore, WarmupCache
from mlxspec.model.checkpoint import load_model
from mlxspec.model.layout import find_layout
from mlxspec.speculate.heads import cache_bytes, load_head, read_weights
from mlxspec.speculate.heads.drafter import HeadDrafter
from mlxspec.speculate.heads.files import find_head
from mlxspec.speculate.proposer import Proposer
from tests.support import architectures, tiny
from tests.support.drafters import costs

LAYOUTS: dict[str, Any] = {"glm4_moe": "rows", "glm4_moe_lite": "gather", "deepseek_v3": "gather"}
PROMPTS = {"long": tuple(range(40, 67)), "fork": (*range(40, 60), 3, 4, 5), "two": (7, 9)}
N, DEPTH = 20, 3


class Reference:
    """A target and a random layer N: what it computes, and the tensors of its raw checkpoint."""

    def __init__(self, kind: str, answers: Sequence[Sequence[int]] = ()) -> None:
        self.kind, self.target = kind, architectures.build(kind)
        target: Any = self.target
        self.args = args = target.args
        mx.random.seed(5)
        decoder = type(target.model.layers[-1])
        self.layer = decoder(args, len(target.model.layers))
        self.layer.update(
            tree_map(lambda x: 0.3 * mx.random.normal(x.shape), self.layer.parameters())
        )
        size = args.hidden_size
        self.own = {
            "enorm.weight": 1 + 0.2 * mx.random.normal((size,)),
            "hnorm.weight": 1 + 0.2 * mx.random.normal((size,)),
            "shared_head.norm.weight": 1 + 0.2 * mx.random.normal((size,)),
            "eh_proj.weight": 0.1 * mx.random.normal((size, 2 * size)),
        }
        if answers:
            self._teach(answers)

    def _teach(self, answers: Sequence[Sequence[int]]) -> None:
        """Weights that draft from the newest token alone, more or less, and have seen the
        answers."""
        size = self.args.hidden_size
        self.own["eh_proj.weight"] += mx.concatenate([2 * mx.eye(size), mx.zeros((size, size))], 1)
        embedding = mx.random.normal((tiny.VOCAB, size))
        self.own["embed_tokens.weight"] = embedding
        lm_head = np.array(0.1 * mx.random.normal((tiny.VOCAB, size)))
        for answer in answers:
            for token, after in pairwise(answer):
                lm_head[after] += np.array(embedding[token])
        self.own["shared_head.head.weight"] = mx.array(lm_head)
        self.layer.update(tree_map(lambda x: 0.3 * x, self.layer.parameters()))

    def tensors(self) -> dict[str, mx.array]:
        """The layer's tensors, by their names in a raw checkpoint without the prefix."""
        raw = dict(self.own)
        for name, array in tree_flatten(self.layer.parameters()):
            if "switch_mlp" in name:
                for i, expert in enumerate(array):
                    raw[name.replace("switch_mlp", f"experts.{i}")] = expert
            elif "unembed_out" in name:
                key = dict(tree_flatten(self.layer.parameters()))["self_attn.embed_q.weight"]
                both = mx.concatenate([key.swapaxes(-1, -2), array], axis=1)
                raw["self_attn.kv_b_proj.weight"] = both.flatten(0, 1)
            elif "embed_q" not in name:
                raw[name] = array
        return raw

    def write(self, path: Path, **change: Any) -> None:
        """The target with its layer N, as a raw checkpoint."""
        config = architectures.config(self.kind) | {"num_nextn_predict_layers": 1} | change
        (path / "config.json").write_text(json.dumps(config))
        layer = {f"model.layers.2.{n}": a for n, a in self.tensors().items()}
        mx.save_safetensors(str(path / "model-2.safetensors"), layer)
        target = dict(tree_flatten(self.target.parameters()))
        mx.save_safetensors(str(path / "model-1.safetensors"), target)

    def step(self, tokens: Sequence[int], hidden: mx.array, cache: KVCache) -> mx.array:
        """The layer's output [n, D] for tokens and the hidden states [n, D] before them."""
        target: Any = self.target
        table = self.own.get("embed_tokens.weight", target.model.embed_tokens.weight)
        eps = self.args.rms_norm_eps
        e = mx.fast.rms_norm(table[mx.array(list(tokens))], self.own["enorm.weight"], eps)
        h = mx.fast.rms_norm(hidden, self.own["hnorm.weight"], eps)
        x = mx.concatenate([e, h], axis=-1) @ self.own["eh_proj.weight"].T
        source = importlib.import_module(type(self.layer).__module__)
        mask = source.create_attention_mask(x[None], cache, return_array=True)
        out = self.layer(x[None], mask, cache)[0]
        return mx.fast.rms_norm(out, self.own["shared_head.norm.weight"], eps)

    def logits(self, out: mx.array) -> mx.array:
        target: Any = self.target
        return out @ self.own.get("shared_head.head.weight", target.lm_head.weight).T

    def drafts(self, tokens: Sequence[int], depth: int) -> tuple[list[int], list[mx.array]]:
        """What the head drafts greedily behind these tokens, and the logits [vocab] of each."""
        target: Any = self.target
        cache = KVCache()  # type: ignore[no-untyped-call]
        hidden = target.model(mx.array([list(tokens)]))[0, :-1]
        found: list[int] = []
        rows = []
        new = list(tokens[1:])
        for _ in range(depth):
            hidden = self.step(new, hidden, cache)[-1:]
            rows.append(self.logits(hidden)[0])
            new = [int(mx.argmax(rows[-1]))]
            found += new
        return found, rows


def close(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> None:
    scale = float(mx.abs(b).max())
    assert float(mx.abs(a - b).max()) <= tolerance * max(1.0, scale)


def check_logits(reference: Reference, path: Path, tolerance: float = 1e-5) -> Any:
    """The head in `path`, whose logits are the reference's."""
    head = load_head(find_head(path), reference.target)
    assert head is not None and read_weights(head)
    mx.random.seed(8)
    tokens, hidden = [3, 1, 4, 1, 5, 9], mx.random.normal((6, reference.args.hidden_size))
    cache, own = KVCache(), KVCache()  # type: ignore[no-untyped-call]
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
        expected = reference.logits(reference.step(tokens[part], hidden[part], cache))
        embedded = head.embed(mx.array([tokens[part]]))
        found = head.lm_head(head.module(embedded, hidden[None, part], [own]))[0]
        close(found, expected, tolerance)
    return head


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("answers", [(), ((1, 2, 3),)], ids=["shared", "own"])
def test_logits_are_those_of_mlx_lms_layer(kind: str, answers: Any, tmp_path: Path) -> None:
    reference = Reference(kind, answers)
    reference.write(tmp_path)
    head = check_logits(reference, tmp_path)
    args = reference.args
    width = 2 * args.num_key_value_heads * getattr(args, "head_dim", 0)
    if LAYOUTS[kind] == "gather":
        width = args.kv_lora_rank + args.qk_rope_head_dim
    kept = cache_bytes(head)
    assert (kept.token, kept.state) == (4 * width, 4 * args.hidden_size)


def test_mlx_lm_reads_the_same_checkpoint(tmp_path: Path) -> None:
    reference = Reference("glm4_moe")
    reference.write(tmp_path)
    target, _ = load_model(tmp_path)
    tokens = mx.array([[3, 1, 4]])
    close(target(tokens), reference.target(tokens))
    assert load_head(find_head(tmp_path), target) and not find_head(tmp_path).standalone


@pytest.mark.parametrize("kind", LAYOUTS)
def test_drafts_are_those_of_a_dense_computation(kind: str, tmp_path: Path) -> None:
    plain = tiny.Plain(architectures.build(kind))
    answers = {name: plain(p, N) for name, p in PROMPTS.items()}
    reference = Reference(kind, [(*p[-1:], *answers[n]) for n, p in PROMPTS.items()])
    reference.write(tmp_path)
    head = load_head(find_head(tmp_path), reference.target)
    assert head is not None
    e = tiny.engine(architectures.build(kind), layout=LAYOUTS[kind])
    e.scheduler.kv.recompute_last = True
    e.proposer = Proposer(costs(), [HeadDrafter(head, e.runner)], fixed_depth=DEPTH)
    lm_head, logits = head.lm_head, []

    def recorded(hidden: mx.array) -> mx.array:
        logits.append(lm_head(hidden))
        return logits[-1]

    head.lm_head = recorded
    known = {name: list(p) for name, p in PROMPTS.items()}
    drafted: list[tuple[list[int], list[int]]] = []
    accepted = []
    observe = e.proposer.observe

    def record(step: Any, results: Any, seconds: float) -> None:
        for entry, new in zip(step.plan, results, strict=True):
            tokens = known[entry.seq.request.id.partition("-")[0]]
            if drafts := [int(t) for t in entry.draft.tokens]:
                drafted.append((list(tokens), drafts))
                accepted.append(new.drafts)
            tokens += new.tokens
        observe(step, results, seconds)

    e.proposer.observe = record  # type: ignore[method-assign]
    for name, prompt in PROMPTS.items():
        e.add(tiny.request(name, prompt, N))
    outputs = tiny.run(e)
    known["long"] = list(PROMPTS["long"])
    e.add(tiny.request("long-again", PROMPTS["long"], N))  # its prefix is cached
    outputs += tiny.run(e)
    assert e.counters["cached_tokens"] > 0
    for name in PROMPTS:
        assert tiny.tokens(outputs, name) == answers[name]
    assert tiny.tokens(outputs, "long-again") == answers["long"]
    computed = np.array(mx.concatenate(logits))
    for tokens, drafts in drafted:
        expected, rows = reference.drafts(tokens, len(drafts))
        assert drafts == expected, tokens
        for row in rows:
            errors = np.abs(computed - np.array(row)).max(axis=1)
            assert errors.min() < 1e-4 * np.abs(np.array(row)).max()
    assert max(map(len, (d for _, d in drafted))) == DEPTH
    assert 0 < sum(accepted) < sum(len(d) for _, d in drafted)


@pytest.mark.parametrize(("blocks", "tried"), [(20, 0), (64, 2)])
def test_a_head_is_tried_where_the_pool_has_room(
    tmp_path: Path, blocks: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[object] = []

    def rate(*args: object) -> float:
        rates.append(args)
        return 0.5

    monkeypatch.setattr(Measuring, "_acceptance_rate", rate)
    reference = Reference("glm4_moe")
    reference.write(tmp_path)
    cache = WarmupCache(layout=find_layout(reference.target), file=tmp_path / "known.json")
    e = tiny.engine(reference.target, blocks=blocks)
    drafting = load_drafting(reference.target, tmp_path, None, Config())
    add_drafters(e, drafting, Config())
    decided: list[str] = []
    prompts = PromptStore(tmp_path, "tiny", Config(), {})
    monkeypatch.setattr(PromptStore, "open", lambda _, engine, draft: decided.append(draft))
    Measuring(e, cache, (), VerdictFile(tmp_path), drafting, prompts).recall()
    assert len(decided) == (not tried)
    e.work_idle()
    assert isinstance(e.proposer, Proposer) and e.proposer.costs
    assert [d.name for d in e.proposer.drafters] == ["copy", "mtp"]
    taps = e.proposer.drafters[1].taps
    assert len(rates) == tried and decided == [f"{drafting.key} {taps}"]


def sidecar(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The names that mlx-vlm's converter gives."""
    names = {"shared_head.norm.weight": "model.shared_head_norm.weight"}
    names["shared_head.head.weight"] = "lm_head.weight"
    top = ("enorm", "hnorm", "eh_proj", "embed_tokens")
    made = {}
    for name, array in tensors.items():
        inner = "model." if name.startswith(top) else "model.mtp_block."
        made[names.get(name, inner + name)] = array
    return made


def test_a_sidecar_may_be_quantized(tmp_path: Path) -> None:
    reference = Reference("glm4_moe_lite", ((1, 2, 3),))
    kept = sidecar(reference.tensors())
    for name in ("eh_proj.weight", "embed_tokens.weight"):
        packed, scales, biases = mx.quantize(reference.own[name], 32, 4)
        base = f"model.{name.removesuffix('weight')}"
        kept |= {base + "weight": packed, base + "scales": scales, base + "biases": biases}
        reference.own[name] = mx.dequantize(packed, scales, biases, 32, 4)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), kept)
    config = {"model_type": "glm4_moe_lite_mtp", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_head(tmp_path).standalone
    head = check_logits(reference, tmp_path, 1e-4)
    assert isinstance(head.module.fc, nn.QuantizedLinear)
    assert head.embed is head.module.embed_tokens


def test_block_scaled_weights_are_dequantized(tmp_path: Path) -> None:
    reference = Reference("deepseek_v3")
    tensors = reference.tensors()
    size = reference.args.hidden_size
    weight = mx.to_fp8(mx.random.normal((size, 2 * size)))
    tensors["eh_proj.weight"], tensors["eh_proj.weight_scale_inv"] = weight, mx.array([[0.5]])
    mx.save_safetensors(
        str(tmp_path / "a.safetensors"), {f"model.layers.61.{n}": a for n, a in tensors.items()}
    )
    head = load_head(find_head(tmp_path), reference.target)
    assert head is not None
    close(head.module.fc.weight, 0.5 * mx.from_fp8(weight, mx.float32))


def test_the_first_of_several_layers_is_used(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.eh_proj.weight": mx.full((2, 4), n) for n in (46, 45)}
    mx.save_safetensors(str(tmp_path / "a.safetensors"), tensors)
    files = find_head(tmp_path)
    assert files is not None and files.tensors["eh_proj.weight"].max() == 45


def test_what_does_not_fit_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = Reference("glm4_moe")
    assert load_head(find_head(tmp_path), reference.target) is None and not caplog.records
    reference.write(tmp_path)
    for other, reason in {
        "deepseek_v3": "does not fit",
        "deepseek_v32": "more than keys",
        "qwen3": "does not fit",
    }.items():
        caplog.clear()
        assert load_head(find_head(tmp_path), architectures.build(other)) is None
        assert reason in caplog.text
