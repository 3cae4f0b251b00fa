"""Tiny random models in fp32 and the plain decoding that everything must equal.

Rule: `plain` is mlx-lm's own forward with mlx-lm's own caches, one sequence, one token at a time.
"""

import functools
import importlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxspec.cache.blocks import BlockPool
from mlxspec.cache.prefix import KVCacheManager, StateCache, Window
from mlxspec.engine.budget import PrefillBudget
from mlxspec.engine.engine import Engine
from mlxspec.engine.manager import Load, ModelManager, ModelSlot
from mlxspec.engine.scheduler import Scheduler
from mlxspec.kernels.reference import gumbel
from mlxspec.model.pages import pools_of
from mlxspec.model.runner import Layout, Runner
from mlxspec.model.sampler import seed32
from mlxspec.speculate import NoSpeculation, Speculator
from mlxspec.types import MAX_DEPTH, ModelInfo, Output, Request, Sampling, Stats
from tests.heads.packagings import TARGET

VOCAB = 320
TRAINED = "trained"
FOUR = "-4bit"  # at the end of a kind: see four_bits
STRIDE = 3  # blocks between two states of a long prompt
WIDE = {"llama": {"head_dim": 128}, "gpt_oss": {"head_dim": 64}}  # heads that can be quantized
WIDE |= {kind: {"head_dim": 32} for kind in ("qwen3", "gemma3_text", "gemma2")}
SHARP = {"gemma2": 1.2, "mamba2": 1.5}  # how much larger than initialised the weights are
_DENSE: dict[str, Any] = dict(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rope_theta=1000.0,
    tie_word_embeddings=True,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _DENSE | _EXPERTS | dict(mlp_only_layers=[], moe_intermediate_size=32),
    "gemma3_text": _DENSE
    | dict(
        num_hidden_layers=3, sliding_window=12, sliding_window_pattern=3, query_pre_attn_scalar=16
    ),
    "gpt_oss": _DENSE | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=12),
    "gemma2": _DENSE
    | dict(query_pre_attn_scalar=16, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "deepseek_v3": dict(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        q_lora_rank=24,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        rope_theta=1000.0,
    ),
    "mamba2": dict(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        num_heads=4,
        head_dim=32,
        state_size=16,
        conv_kernel=4,
        n_groups=1,
        expand=2,
        intermediate_size=128,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.0, 100.0),
        time_step_rank=4,
        layer_norm_epsilon=1e-5,
        ssm_state_size=16,
        max_position_embeddings=512,
        num_attention_heads=4,
        residual_in_fp32=False,
        rescale_prenorm_residual=False,
        chunk_size=16,
    ),
}


def four_bits(m: nn.Module) -> nn.Module:
    """The model in bfloat16, with what can be quantized in 4 bits."""
    halves = tree_map(lambda x: x.astype(mx.bfloat16), m.parameters())
    m.update(halves)
    nn.quantize(m, 32, 4, class_predicate=lambda _, each: quantizable(each, 32))
    mx.eval(m.parameters())
    return m


def quantizable(layer: nn.Module, group: int) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group == 0


def kv_bits(kind: str) -> int:
    """Of a kind like "llama:8", whose heads are wide enough to be quantized; 0 for others."""
    return int(kind.partition(":")[2] or 0)


def config(kind: str, **change: Any) -> dict[str, Any]:
    name = kind.partition(":")[0]
    if name not in CONFIGS:
        from tests.support import architectures

        return architectures.config(name) | change
    return dict(
        model_type=name, **CONFIGS[name] | (WIDE.get(name, {}) if kv_bits(kind) else {}) | change
    )


def model(kind: str, **change: Any) -> nn.Module:
    """A fresh model with the same random weights every time: of CONFIGS, where `change` overrides
    the config, or of tests.support.architectures; or the one that was trained with an MTP head."""
    name = kind.partition(":")[0]
    if name == TRAINED:
        return load_model(TARGET)[0]
    if name.endswith(FOUR):
        return four_bits(model(name.removesuffix(FOUR), **change))
    if name not in CONFIGS:
        from tests.support import architectures

        return architectures.build(name)
    arch = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    m = arch.Model(arch.ModelArgs.from_dict(config(kind, **change)))
    # Weights as initialised give nearly flat logits; with larger ones a wrong cache changes the
    # choice.
    m.update(tree_map(lambda x: x * SHARP.get(name, 2.5) if x.ndim > 1 else x, m.parameters()))
    for layer in m.layers:
        if "sinks" in getattr(layer, "self_attn", {}):
            layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    mx.eval(m.parameters())
    m.eval()
    return m


@dataclass
class Plain:
    """Plain decoding by mlx-lm: the truth. Remembers what it has computed. With `kv_bits` its
    caches get what is left of each token's K/V after quantizing and back."""

    model: nn.Module
    kv_bits: int = 0
    caches: Callable[[nn.Module], list[Any]] = make_prompt_cache
    _known: dict[Any, list[int]] = field(default_factory=dict)

    def __call__(
        self, prompt: Sequence[int], n: int, temperature: float = 0.0, seed: int = 0, index: int = 0
    ) -> list[int]:
        key = (tuple(prompt), n, temperature, seed, index)
        if key not in self._known:
            self._known[key] = self._decode(list(prompt), n, temperature, seed, index)
        return self._known[key]

    def _decode(
        self, tokens: list[int], n: int, temperature: float, seed: int, index: int
    ) -> list[int]:
        cache = rounded(self.caches(self.model), self.kv_bits)
        x, out = mx.array([tokens]), []
        for position in range(len(tokens), len(tokens) + n):
            logits = self.model(x, cache=cache)[:, -1].astype(mx.float32)
            if temperature:
                key = mx.array([seed32(seed, index)], mx.uint32)
                noise = gumbel(key, mx.array([position], mx.uint32), logits.shape[-1])
                logits = logits / temperature + noise
            out.append(int(mx.argmax(logits).item()))
            x = mx.array([[out[-1]]])
        return out


def stats(worker: Any) -> Stats:
    """Of all models of an engine thread together; what is not a number is left out."""
    merged: dict[str, Any] = {}
    for served in worker.models.values():
        for name, value in asdict(served.stats).items():
            if isinstance(value, int):
                merged[name] = merged.get(name, 0) + value
    return Stats(**merged)


def windows_of(m: nn.Module) -> list[int]:
    """The sliding windows of a model's layers."""
    return sorted({c.max_size for c in make_prompt_cache(m) if isinstance(c, RotatingKVCache)})


def rounded(caches: list[Any], bits: int) -> list[Any]:
    """Caches that get what is left of K and V after quantizing to so many bits and back; 0: all."""
    for c in caches if bits else ():
        c.update_and_fetch = functools.partial(_round, c.update_and_fetch, bits)
    return caches


def _round(put: Callable[..., Any], bits: int, k: mx.array, v: mx.array) -> Any:
    def back(x: mx.array) -> mx.array:
        group = 32 if x.shape[-1] % 64 else 64
        return mx.dequantize(*mx.quantize(x, group, bits), group_size=group, bits=bits)

    return put(back(k), back(v))


def engine(
    m: nn.Module,
    *,
    layout: Layout = "rows",
    block: int = 8,
    blocks: int = 64,
    budget: int = 16,
    proposer: Speculator | None = None,
    max_sequences: int = 8,
    context: int = 512,
    lone: bool = False,
    own: bool = True,
    rollback: bool = True,
    states: int = 32,
    kv_bits: int = 0,
    whole: bool = False,
    **kw: Any,
) -> Engine:
    """`own`: sliding windows have as few blocks of their own as are enough; else they share the
    others. `states` are kept of recurrent layers. `whole`: the pools do not begin with two blocks
    and grow."""
    sizes: dict[int, int] = {}
    for w in windows_of(m) if own and layout != "solo" else ():
        sizes[w] = min(blocks, Window.min_blocks(w, block, max_sequences, budget, MAX_DEPTH))
    runner = Runner(
        m,
        layout,
        block,
        blocks,
        windows=sizes,
        lone=lone,
        rollback=rollback,
        kv_bits=kv_bits,
    )
    stateful = bool(runner.states.layers)
    groups = KVCacheManager(
        BlockPool(blocks, block),
        [Window(w, BlockPool(n, block)) for w, n in sizes.items()],
        StateCache(states, STRIDE, runner.keep) if stateful else None,
    )
    if not whole:
        runner.grow_on_demand(lambda: [pool.highest for pool in groups.pools])
        runner.view.allocated = {w: min(2, size) for w, size in runner.view.num_blocks.items()}
    scheduler = Scheduler(
        groups,
        context=context,
        max_sequences=max_sequences,
        prefill_budget=PrefillBudget(fixed=budget),
        sharing=layout != "solo",
        can_draft=rollback and layout != "solo",
    )
    return Engine(runner, scheduler, proposer or NoSpeculation(), **kw)


def manager(load: Load) -> ModelManager:
    """Of one model, which `load` loads."""
    unknown = ModelInfo("", 0, 0, "", 0, 0, 0, created=1_700_000_000)
    return ModelManager([ModelSlot(load, unknown)])


def request(
    name: str,
    prompt: Iterable[int],
    n: int = 12,
    *,
    temperature: float = 0.0,
    choices: int = 1,
    **kw: Any,
) -> Request:
    stop = kw.pop("stop_tokens", frozenset())
    return Request(name, tuple(prompt), n, Sampling(temperature=temperature, **kw), stop, choices)


def admit_blindly(s: Scheduler) -> None:
    """Let sequences start without looking ahead at blocks, so that these do run out."""
    s._lacking = lambda seq: 0  # type: ignore[method-assign]


def check_sequences(s: Scheduler) -> None:
    """Assert what must hold for sequences between steps."""
    assert all(not seq.table and not seq.computed for seq in s.waiting), "waiting with blocks"
    assert len(s.running) <= s.max_sequences
    for seq in (*s.running, *s.waiting):
        assert seq.finish is None, "an ended sequence is still listed"
        assert seq.computed <= len(seq.table) * s.pool.block_size, "computed without a block"
        assert seq.computed <= seq.known, "computed what does not exist"


def settled(e: Engine) -> bool:
    """Whether no pool waits for a graph, which would grow and hold its inputs."""
    graph = io.StringIO()
    for pool in pools_of(e.runner.pages()):
        mx.export_to_dot(graph, pool)
    return "rectangle" not in graph.getvalue()


def run(e: Engine, each: Callable[[int], object] = lambda i: None, last: int = 0) -> list[Output]:
    """Step until idle; `each(i)` runs before turn i, up to turn `last` at least. Checks the
    invariants."""
    outputs: list[Output] = []
    for i in range(2000):
        each(i)
        if e.busy:
            outputs += e.step()
            e.check()
            check_sequences(e.scheduler)
        elif i >= last:
            break
    assert not e.busy, "the engine did not come to rest"
    return outputs


def tokens(outputs: Iterable[Output], name: str, index: int = 0) -> list[int]:
    return [t for o in outputs if o.request == name and o.index == index for t in o.tokens]


def answers_after(first: list[int], m: nn.Module, kind: str) -> list[list[int]]:
    """Two answers from a pool of so few blocks that they use the slots of the prompt `first`."""
    e = engine(m, block=8, blocks=4, kv_bits=kv_bits(kind))
    e.add(request("first", first, 4))
    run(e)
    e.add(request("a", [5, 6, 7], 12))
    e.add(request("b", [9, 8, 7, 6], 4))
    outputs = run(e)
    return [tokens(outputs, name) for name in "ab"]
