"""A random Gemma 4 assistant for a tiny target of mlx-lm's gemma4_text, as it is published."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.speculate.heads.assistant import load_assistant
from mlxspec.speculate.heads.files import HeadFiles
from mlxspec.speculate.heads.model import HeadModel
from tests.heads.packagings import NARROW_FOUR_BITS, Tensors, quantized, save_head

SIZE, MLP, HEADS, CLUSTERS, BEST = 32, 96, 4, 16, 3
SLIDING, FULL = "sliding_attention", "full_attention"
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def config_of(target: Any, **changed: Any) -> dict[str, Any]:
    """config.json for a target with these arguments."""
    args = getattr(target, "language_model", target).args
    text = dict(
        model_type="gemma4_text",
        hidden_size=SIZE,
        intermediate_size=MLP,
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        num_attention_heads=HEADS,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        rms_norm_eps=1e-6,
        hidden_size_per_layer_input=0,
    )
    same = "head_dim global_head_dim num_key_value_heads vocab_size sliding_window rope_parameters"
    text |= {name: getattr(args, name) for name in same.split()}
    return dict(
        model_type="gemma4_assistant",
        backbone_hidden_size=args.hidden_size,
        use_ordered_embeddings=False,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=BEST,
        tie_word_embeddings=True,
        block_size=4,
        text_config=text,
    ) | dict(changed)


def tensors_of(config: dict[str, Any]) -> Tensors:
    """The same every time; with centroids where config.json has them."""
    mx.random.seed(3)
    text, width = config["text_config"], config["backbone_hidden_size"]
    vocab = text["vocab_size"]

    def matrix(rows: int, columns: int) -> mx.array:
        return mx.random.normal((rows, columns)) * 1.5 / columns**0.5

    def norm(size: int) -> mx.array:
        return 1 + 0.3 * mx.random.normal((size,))

    made = {
        "model.embed_tokens.weight": matrix(vocab, SIZE),
        "model.norm.weight": norm(SIZE),
        "pre_projection.weight": matrix(SIZE, 2 * width),
        "post_projection.weight": matrix(width, SIZE),
    }
    for i, kind in enumerate(text["layer_types"]):
        dim = text["global_head_dim" if kind == FULL else "head_dim"]
        layer = {f"{name}_layernorm": norm(SIZE) for name in NORMS}
        layer |= {"self_attn.q_proj": matrix(HEADS * dim, SIZE), "self_attn.q_norm": norm(dim)}
        layer |= {"self_attn.o_proj": matrix(SIZE, HEADS * dim), "mlp.up_proj": matrix(MLP, SIZE)}
        layer |= {"mlp.gate_proj": matrix(MLP, SIZE), "mlp.down_proj": matrix(SIZE, MLP)}
        made |= {f"model.layers.{i}.{name}.weight": array for name, array in layer.items()}
        made[f"model.layers.{i}.layer_scalar"] = norm(1)
    if config["use_ordered_embeddings"]:
        made["masked_embedding.centroids.weight"] = matrix(CLUSTERS, SIZE)
        made["masked_embedding.token_ordering"] = mx.random.permutation(vocab).astype(mx.int64)
    return made


def random_assistant(target: Any) -> HeadModel:
    config = config_of(target)
    return load_assistant(HeadFiles(Path(), config, tensors=tensors_of(config)), target)


def write(out: Path, target: Any, bits: bool = False, **changed: Any) -> Path:
    """The head in a directory. mlx-vlm looks up the rows of the best clusters' tokens, so that with
    centroids the embedding stays as it is."""
    config = config_of(target, **changed)
    tensors = tensors_of(config)
    if bits:
        config |= dict(quantization=NARROW_FOUR_BITS)
        left = ("layer_scalar", "token_ordering")
        left += ("embed_tokens.weight",) if config["use_ordered_embeddings"] else ()
        tensors = quantized(tensors, lambda name: None if name.endswith(left) else NARROW_FOUR_BITS)
    return save_head(out, tensors, config)
