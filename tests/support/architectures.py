"""A tiny random fp32 model for every architecture of mlx-lm, and the layout that each one runs in.

Rule: structure is real (windows, sinks, experts, latent and recurrent layers), only sizes are
small, and a window is longer than the probes of `find_layout`, as in published models, but shorter than the
test's prompts. `python -m tests.support.architectures --write` tries them all and writes the table of
docs/models.md.
"""

import copy
import dataclasses
import importlib
import pkgutil
import re
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import mlx.nn as nn  # noqa: E402
import mlx_lm.models  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.models.cache import ArraysCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import MODEL_REMAPPING  # noqa: E402

from mlxspec.model.layout import LayoutChoice, find_layout  # noqa: E402
from mlxspec.types import UserError  # noqa: E402
from tests.support import tiny  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
BEGIN, END = (
    "<!-- begin: written by python -m tests.support.architectures --write -->\n",
    "<!-- end -->\n",
)

LISTED = {
    "rows": """
        Klear afmoe apertus bailing_moe cohere cohere2 dbrx deepseek deepseek_v2 dots1 ernie4_5 ernie4_5_moe
        exaone exaone4 exaone_moe gemma gemma3 gemma3n gemma3_text gemma4 gemma4_text glm glm4 glm4_moe gpt2
        gpt_neox gpt_oss gptj granite granitemoe helium hunyuan hunyuan_v1_dense iquestloopcoder laguna
        lille-130m llama llama4_text mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3
        mixtral muse_glimmer nanbeige nanochat nemotron nemotron-nas olmo2 olmo3 olmoe openelm phi phi3 phimoe
        phixtral pixtral qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3
        solar_open spark2_5 starcoder2 step3p5 talkie telechat3 youtu_llm
    """,
    "rect": """
        baichuan_m1 bailing_moe_linear falcon_h1 gear granitemoehybrid jamba lfm2 lfm2-vl lfm2_moe mamba
        mamba2 nemotron_h olmo_hybrid prism_hadamard_qwen35 qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma
        rwkv7
    """,
    "rect, one at a time": "gpt_bigcode internlm2 internlm3",
    "gather": """
        bailing_hybrid bailing_moe_v3 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k25 kimi_k3
        kimi_linear kimi_vl longcat_flash longcat_flash_ngram mistral4 plamo plamo2 stablelm
    """,
    "gather, one at a time": "afm7 gemma2",
    "solo": "deepseek_v41 llama4 minimax_m3_vl plamo3",
    "refused": "phi3small",
    "untestable": "bitnet muse_spark olmo",
}
LAYOUTS = {name: layout for layout, names in LISTED.items() for name in names.split()}

WHOLE = "lm_head on every row"  # of a prompt: the module that holds the layers was not found
WHOLE_HEAD = frozenset({"gemma3n"})
NO_DRAFTS = "decodes without drafts"  # its layers cannot roll back

# mlx-lm's own answer depends on where it cuts the prompt, so no engine that cuts prompts can equal
# it.
UNSTEADY = {
    "phi3small": "mlx-lm does not mask the future inside a block",
    "plamo3": "mlx-lm masks for one token more than it keeps: past the window its own answers depend on where"
    " it cuts the prompt, and ours differ from them",
}
# mlx-lm's own code cannot run these here: why, and what it raises.
_METAL = (
    "computes in kernels of its own that exist for Metal only; not tried yet",
    "No Metal back-end",
)
UNTESTABLE = {
    "bitnet": _METAL,
    "muse_spark": _METAL,
    "olmo": (
        "mlx-lm adds the name of its mask to the scores, which fails",
        "mlx.core.array and str",
    ),
}
REMARKS = UNSTEADY | {name: words for name, (words, _) in UNTESTABLE.items()}

# Why `find_layout` refuses the faster layouts, in plain words.
CAUSES = {
    "ArraysCache": "layers with a running state",
    "ChunkedKVCache": "attention in chunks, with a cache of its own",
    "CacheList": "layers that keep several caches",
    "LayerCache": "a cache of its own kind",
    "but its cache keeps": "another window in the mask than in the cache",
    "Only length-1 arrays": "takes one position for the whole batch",
    "empty array": "keeps keys without values",
    "standard deviations": "gives other logits in a batch",
    "'Pages' object has no attribute 'swapaxes'": "latent attention, computed by the model itself",
    "Pages": "works on the keys and values itself",
    "incompatible function arguments": "works on the keys and values itself",
}

_SIZES: list[tuple[Any, str]] = [
    (tiny.VOCAB, "vocab_size num_vocab vocab_size_per_layer_input embedding_size"),
    (
        64,
        "hidden_size hidden_dim d_model n_embd model_dim block_dim moe_hidden_size n_inner mamba_d_ssm",
    ),
    (64, "routed_expert_hidden_size dense_intermediate_size"),
    (
        128,
        "intermediate_size ffn_hidden_size ff_intermediate_size intermediate_size_mlp mlp_hidden_size",
    ),
    (
        32,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size share_expert_dim",
    ),
    (
        32,
        "moe_shared_expert_intermediate_size shared_intermediate_size dim_model_base mamba_head_dim",
    ),
    (24, "q_lora_rank"),
    (
        16,
        "head_dim kv_lora_rank v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim index_head_dim",
    ),
    (
        16,
        "linear_key_head_dim linear_value_head_dim kv_channels hidden_size_per_head global_head_dim",
    ),
    (16, "state_size ssm_state_size mamba_d_state mamba_d_head mamba_chunk_size o_lora_rank"),
    (16, "hidden_size_per_layer_input query_pre_attn_scalar"),
    (
        8,
        "qk_rope_head_dim rotary_dim n_routed_experts ffn_dim_divisor block_multiple_of laurel_rank",
    ),
    (8, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
    (
        4,
        "num_attention_heads num_heads n_heads n_head num_experts num_local_experts moe_num_experts",
    ),
    (
        4,
        "swa_num_attention_heads linear_num_value_heads linear_conv_kernel_dim conv_kernel mamba_d_conv",
    ),
    (4, "conv1d_width mamba_n_heads mamba_num_heads group_norm_size time_step_rank"),
    (3, "conv_L_cache"),
    (
        2,
        "num_hidden_layers num_layers n_layer n_layers num_transformer_layers n_group n_shared_head",
    ),
    (2, "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads num_attention_groups"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts hc_mult o_groups",
    ),
    (
        2,
        "linear_num_key_heads index_n_heads conv_window mamba_expand zero_expert_num altup_num_inputs",
    ),
    (
        2,
        "layer_group_size full_attention_interval sliding_window_pattern dense_attention_every_n_layers",
    ),
    (
        1,
        "num_shared_experts n_shared_experts num_shared_expert topk_group first_k_dense_replace n_groups",
    ),
    (
        1,
        "num_dense_layers moe_num_shared_experts moe_layer_freq decoder_sparse_step mamba_n_groups",
    ),
    (
        12,
        "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size",
    ),
    (12, "loop_window_size index_topk"),
    (
        512,
        "max_position_embeddings original_max_position_embeddings n_positions n_ctx model_max_length",
    ),
    (512, "block_size"),
    (
        1e-5,
        "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps post_norm_eps",
    ),
    (1000.0, "rope_theta swa_rope_theta rope_local_base_freq rope_local_theta rotary_emb_base"),
    (30.0, "final_logit_softcapping logits_soft_cap"),
    (1.0, "routed_scaling_factor logits_scaling"),
    (
        0.5,
        "partial_rotary_factor rotary_pct residual_multiplier output_multiplier attention_multiplier",
    ),
    (2.0, "embedding_multiplier scale_emb scale_depth gegelu_limit"),
    (
        True,
        "norm_topk_prob use_qk_norm qk_norm use_expert_bias mamba_conv_bias altup_correct_scale",
    ),
    (True, "mla_scale_q_lora mla_scale_kv_lora linear_allow_neg_eigval use_mixed_mlp_moe"),
    (
        False,
        "tie_word_embeddings attention_bias mlp_bias use_bias use_qkv_bias use_conv_bias conv_bias",
    ),
    (False, "mamba_proj_bias post_norm block_auto_adjust_ff_dim"),
    ([0], "mlp_only_layers"),
    (None, "rope_scaling"),
]
SIZES = {field: value for value, fields in _SIZES for field in fields.split()}

# The first table holds for every architecture; this one has what cannot be told from a field's
# name.
_WINDOWS = ["sliding_attention", "full_attention"]
_ROPES = {kind: dict(rope_theta=1000.0, rope_type="default") for kind in _WINDOWS}
_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=16)
_LLAMA3 = dict(rope_type="llama3", factor=8.0)
_GROWING = dict(
    _YARN, rope_theta=1000.0, llama_4_scaling_beta=0.1
)  # queries grow with their position
_KDA = dict(
    kda_layers=[1], full_attn_layers=[2], num_heads=4, head_dim=16, short_conv_kernel_size=4
)
_BLOCKS = [
    dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=1.0)),
    dict(attention=dict(no_op=True), ffn=dict(ffn_mult=1.0)),
    dict(attention=dict(replace_with_linear=True), ffn=dict(no_op=True)),
]
_PACKED = [("gate_proj", 0), ("up_proj", 0), ("down_proj", 512)]


def _longrope(dims: int, **kw: Any) -> dict[str, Any]:
    factors = dict(
        long_factor=[2.0] * dims, short_factor=[1.0] * dims, original_max_position_embeddings=64
    )
    return dict(factors, type="longrope", **kw)


SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": dict(num_layers=3, num_kv_reuse_layers=1),
    "afmoe": dict(layer_types=_WINDOWS),
    "baichuan_m1": dict(sliding_window_layers=[0]),
    "bailing_hybrid": dict(num_hidden_layers=4),
    "bailing_moe_linear": dict(num_hidden_layers=4),
    "bailing_moe_v3": dict(num_hidden_layers=4),
    "cohere2": dict(num_hidden_layers=4),
    "dbrx": dict(
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1000.0),
    ),
    "deepseek_v2": dict(topk_method="group_limited_greedy", rope_scaling=_YARN),
    "deepseek_v3": dict(rope_scaling=_YARN),
    "deepseek_v41": dict(
        num_hidden_layers=4,
        compress_ratios=(0, 2, 2, 2),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=1,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        index_topk=4,
        rope_scaling=_YARN,
    ),
    "exaone": dict(rope_scaling=_LLAMA3),
    "exaone4": dict(num_hidden_layers=4, sliding_window_pattern="LLLG", rope_scaling=_LLAMA3),
    "exaone_moe": dict(layer_types=_WINDOWS, is_moe_layer=[False, True]),
    "gear": dict(num_hidden_layers=3, layer_types=["conv_mixer", *_WINDOWS]),
    "gemma3n": dict(
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=_WINDOWS * 3,
        activation_sparsity_pattern=[0.5, 0.0] * 3,
        altup_coef_clip=120.0,
        altup_active_idx=0,
    ),
    "gemma3_text": dict(num_hidden_layers=4),
    "gemma4_text": dict(num_hidden_layers=6, num_kv_shared_layers=2, enable_moe_block=True),
    "glm_moe_dsa": dict(
        topk_method="noaux_tc", scoring_func="sigmoid", rope_parameters=_ROPES[_WINDOWS[0]]
    ),
    "gpt_oss": dict(rope_scaling=_YARN),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "hunyuan": dict(
        num_hidden_layers=4,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling=dict(type="dynamic", factor=1.0, alpha=2.0),
    ),
    "internlm2": dict(rope_scaling=dict(type="dynamic", factor=2.0)),
    "internlm3": dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)),
    "jamba": dict(
        attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=0, expert_layer_period=2
    ),
    "kimi_k3": dict(linear_attn_config=_KDA, activation_situ_beta=1.0, attn_res_block_size=1),
    "kimi_linear": dict(linear_attn_config=_KDA),
    "laguna": dict(
        layer_types=_WINDOWS, rope_parameters=_ROPES, num_attention_heads_per_layer=[4, 2]
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_ffn_dim_multiplier=1.0),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "llama": dict(layer_types=_WINDOWS, rope_scaling=_LLAMA3),
    "llama4": dict(
        num_hidden_layers=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attn_temperature_tuning=4,
        floor_scale=8,
    ),
    "llama4_text": dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
    "longcat_flash": dict(attention_method="MLA", zero_expert_type="identity"),
    "longcat_flash_ngram": dict(ngram_vocab_size_ratio=2, emb_neighbor_num=3, emb_split_num=2),
    "mamba2": dict(time_step_limit=(0.0, 100.0), head_dim=32),
    "mellum": dict(layer_types=_WINDOWS, rope_parameters=_ROPES),
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[1, 0],
        moe_layer_freq=[0, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        v_head_dim=8,
        swa_v_head_dim=8,
    ),
    "minicpm3": dict(rope_scaling=_longrope(4)),
    "minimax_m3_vl": dict(
        layer_types=["full_attention", "sparse"],
        moe_layer_freq=[0, 1],
        index_block_size=4,
        index_topk_blocks=2,
    ),
    "ministral3": dict(layer_types=_WINDOWS, rope_parameters=_GROWING),
    "mistral3": dict(
        layer_types=None
    ),  # windows inside this wrapper would get no cache of their own
    "mistral4": dict(rope_parameters=_GROWING),
    "muse_glimmer": dict(layer_types=_WINDOWS),
    "muse_spark": dict(
        num_shared_experts=0,
        rope_parameters=dict(rope_theta=1000.0),
        layer_rope_theta=[1000.0, 0.0],
        layer_types=_WINDOWS,
    ),
    "nanbeige": dict(num_loops=2),
    "nemotron": dict(hidden_act="relu2"),
    "nemotron-nas": dict(num_hidden_layers=3, block_configs=_BLOCKS),
    "nemotron_h": dict(hybrid_override_pattern=list("M*-E")),
    "olmo3": dict(layer_types=_WINDOWS),
    "olmo_hybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "openelm": dict(num_query_heads=[4, 4], num_kv_heads=[2, 2], ffn_multipliers=[1.0, 2.0]),
    "phi3": dict(rope_scaling=_longrope(8), partial_rotary_factor=1.0),
    "phi3small": dict(vocab_size=100352),  # it rules token ids out that lie above 100,000
    "phimoe": dict(rope_scaling=_longrope(8, long_mscale=1.2, short_mscale=1.2)),
    "pixtral": dict(layer_types=None),  # as in mistral3
    "plamo3": dict(num_hidden_layers=4),
    "prism_hadamard_qwen35": dict(
        hidden_size=128,
        intermediate_size=512,
        tensor_namespace="mlx-vlm-qwen3_5",
        quantization=dict(bits=2, group_size=128, mode="affine"),
        modules=[
            dict(path=f"model.layers.0.mlp.{part}", block=block, embedding=False, dtype="float16")
            for part, block in _PACKED
        ],
    ),
    "qwen3_5": dict(num_hidden_layers=4, num_experts=0, rope_parameters=dict(_ROPES[_WINDOWS[0]])),
    "qwen3_5_moe": dict(num_experts=4),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], num_key_value_heads=1),
    "smollm3": dict(num_hidden_layers=4),
    "spark2_5": dict(layer_types=_WINDOWS, rope_parameters=_ROPES),
    "step3p5": dict(
        num_hidden_layers=3, layer_types=[*_WINDOWS, "full_attention"], moe_layers_enum="1,2"
    ),
}

# Whose text model a wrapper holds, where it does not define one.
TEXT = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

# How much larger than initialised the weights are: so much that the next token depends on all
# before it.
SHARP = tiny.SHARP | dict.fromkeys("cohere gear gpt2 mamba phi3small talkie".split(), 4.0)
SHARP |= dict.fromkeys("gpt_bigcode gpt_neox llama4 nanochat".split(), 6.0) | {"jamba": 1.5}


def module(name: str) -> types.ModuleType:
    """mlx-lm's module of an architecture."""
    # One asks whether a package is there that it never uses, and ends the process if not.
    sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")


def known() -> set[str]:
    """The architectures that this mlx-lm has."""
    names = (m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__))
    return {n for n in names if hasattr(module(n), "Model") and hasattr(module(n), "ModelArgs")}


def config(name: str) -> dict[str, Any]:
    """The tiny config, as config.json would have it."""
    special = SPECIAL.get(name, {})
    outer = {f.name for f in dataclasses.fields(module(name).ModelArgs)}
    found = {field: SIZES[field] for field in outer & SIZES.keys()}
    if "text_config" in outer:
        kind = TEXT.get(name, name)
        parts = [
            vars(module(kind)).get(n)
            for n in ("TextArgs", "TextConfig", "TextModelArgs", "ModelArgs")
        ]
        inner = {f.name for f in dataclasses.fields(next(p for p in parts if p))}
        text = (
            {field: SIZES[field] for field in inner & SIZES.keys()}
            | SPECIAL.get(kind, {})
            | special
        )
        found["text_config"] = text | {"model_type": kind}
        special = {field: special[field] for field in outer & special.keys()}
    return copy.deepcopy(found | special | {"model_type": name})


def build(name: str, settings: dict[str, Any] | None = None) -> nn.Module:
    """A fresh model with the same random weights every time; `settings`: its config, if it is not
    the tiny one."""
    arch = module(name)
    mx.random.seed(3)
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(settings or config(name)))

    def weight(x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return mx.random.randint(0, 1 << 30, x.shape).astype(x.dtype)
        if not mx.any(x).item():  # sinks, routers, biases: as zeros they would do nothing
            return 0.3 * mx.random.normal(x.shape)
        return x.astype(mx.float32) * (SHARP.get(name, 2.5) if x.ndim > 1 else 1)

    model.update(tree_map(weight, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def label(found: LayoutChoice) -> str:
    return found.layout + ", one at a time" * (found.lone and found.layout != "solo")


def _row(name: str) -> str:
    """Try the architecture; its row of the table."""
    model, cause, head, plain = build(name), "", False, False
    try:
        tiny.Plain(model)([1, 2, 3], 1)
        found = find_layout(model)
        layout, head, plain = label(found), not found.trunk, not found.rollback
        if found.layout != "rows":
            kept = [
                c for cache in make_prompt_cache(model) for c in getattr(cache, "caches", [cache])
            ]
            said = next(r for r in found.refused if "no setter" not in r)
            said = "ArraysCache" if any(isinstance(c, ArraysCache) for c in kept) else said
            cause = next((words for text, words in CAUSES.items() if text in said), said)
    except UserError:
        layout = "refused"
    except (RuntimeError, ValueError):
        layout = "untestable"
    also = ", ".join(f"`{n}`" for n, to in sorted(MODEL_REMAPPING.items()) if to == name)
    remarks = "; ".join(x for x in (cause, NO_DRAFTS * plain, WHOLE * head, REMARKS.get(name)) if x)
    return f"| `{name}` | {layout} | {also} | {remarks} |\n"


def read() -> dict[str, tuple[str, bool]]:
    """Layout and whether lm_head runs on every row, by architecture, as the page has it."""
    table = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|[^|]*\| ([^|]*)\|$", table, re.M)
    return {name: (layout, WHOLE in remarks) for name, layout, remarks in rows}


def write() -> None:
    """Try every architecture and write the page's table."""
    rows = [_row(name) for name in sorted(known(), key=str.lower)]
    counts = Counter(row.split("|")[2].strip() for row in rows)
    total = "; ".join(f"{counts[layout]} {layout}" for layout in LISTED)
    made = (
        f"With mlx {mx.__version__} and mlx-lm {mlx_lm.__version__}, of {len(rows)}: {total}.\n\n"
    )
    head = "| Architecture | Layout | Also for | Remarks |\n|---|---|---|---|\n"
    old = PAGE.read_text("utf-8")
    new = old[: old.index(BEGIN) + len(BEGIN)] + made + head + "".join(rows) + old[old.index(END) :]
    PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.support.architectures --write")
    write()
