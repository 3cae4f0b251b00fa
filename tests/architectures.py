"""One tiny random model in fp32 for every architecture of mlx-lm."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import mlx_lm.models

from tests import tiny

WINDOW = 12

_NAMES: dict[Any, str] = {
    tiny.VOCAB: "vocab_size num_vocab vocab_size_per_layer_input",
    64: "hidden_size hidden_dim d_model n_embd model_dim block_dim ssm_intermediate routed_expert_hidden_size"
    " moe_hidden_size n_inner ",
    128: "intermediate_size ffn_hidden_size ff_intermediate_size block_ff_dim intermediate_size_mlp"
    " dense_intermediate_size",
    32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"
    " moe_shared_expert_intermediate_size shared_intermediate_size share_expert_dim mamba_head_dim"
    " mamba_d_head",
    2: "num_hidden_layers num_layers n_layer n_layers num_transformer_layers num_key_value_heads num_kv_heads"
    " n_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts"
    " swa_num_key_value_heads num_swa_key_value_heads num_attention_groups n_group n_shared_head"
    " linear_num_key_heads index_n_heads hc_mult o_groups loop_num num_loops mamba_expand",
    4: "num_attention_heads num_heads n_heads n_head num_experts num_local_experts n_routed_experts"
    " moe_num_experts swa_num_attention_heads num_swa_attention_heads linear_num_value_heads"
    " linear_conv_kernel_dim conv_kernel mamba_d_conv conv1d_width short_conv_kernel_size mamba_n_heads"
    " mamba_num_heads group_norm_size",
    1: "num_shared_experts n_shared_experts num_shared_expert topk_group first_k_dense_replace"
    " num_dense_layers moe_num_shared_experts moe_layer_freq n_groups decoder_sparse_step"
    " layer_group_size mamba_n_groups",
    16: "head_dim kv_lora_rank v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim linear_key_head_dim"
    " linear_value_head_dim index_head_dim kv_channels hidden_size_per_head state_size ssm_state_size"
    " mamba_d_state mamba_chunk_size o_lora_rank global_head_dim hidden_size_per_layer_input",
    24: "q_lora_rank",
    8: "qk_rope_head_dim rotary_dim",
    WINDOW: "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"
    " loop_window_size index_topk",
    512: "max_position_embeddings original_max_position_embeddings n_positions n_ctx model_max_length block_size",
    1e-5: "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps",
    1000.0: "rope_theta swa_rope_theta rope_local_base_freq rotary_emb_base",
    False: "tie_word_embeddings attention_bias mlp_bias use_bias use_conv_bias conv_bias",
    True: "norm_topk_prob use_qk_norm",
}
SMALL = {name: value for value, names in _NAMES.items() for name in names.split()}

TEXT = {}
TINY: dict[str, dict[str, Any]] = {}


def names() -> list[str]:
    """Modules of mlx-lm that define a model; one that cannot even be imported counts too."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            m = importlib.import_module(f"mlx_lm.models.{module.name}")
        except SystemExit:
            found.append(module.name)
            continue
        if hasattr(m, "Model") and hasattr(m, "ModelArgs"):
            found.append(module.name)
    return found


def fill(cls: Any) -> dict[str, Any]:
    return {f.name: SMALL[f.name] for f in dataclasses.fields(cls) if f.name in SMALL}
