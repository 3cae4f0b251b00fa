"""Tiny models and their plain decoding: a random one whose every answer depends on every token
before it, and the trained targets and heads of tests/heads.

Rule: the probes ask the random one for a text, so each token is one letter or digit, and the end
token is one that the model cannot give. The prompts are those whose answers have no near tie, so a
wrong token is a wrong cache.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.sizes import read_config, unloaded

LETTERS = string.ascii_letters + string.digits
END = "<|end|>"
MARGIN = 0.02  # between the best logit and the next
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(LETTERS),
    "max_position_embeddings": 2048,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "eos_token_id": len(LETTERS),
    "torch_dtype": "float32",
}
DATA = Path(__file__).parents[1] / "tests/heads/data"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def model() -> qwen3.Model:
    """The same weights every time, large enough that a wrong cache changes the answer."""
    mx.random.seed(3)
    made = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    made.update(tree_map(lambda x: x * 2.5 if x.ndim > 1 else x, made.parameters()))
    mx.eval(made.parameters())
    return made


def experts(folder: Path) -> Path:
    """A random mixture of experts in 4 bits as a model's directory: Qwen3-30B-A3B with fewer layers
    and narrower ones."""
    config = read_config("qwen3-30b-a3b") | {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "vocab_size": 256,
        "eos_token_id": len(LETTERS),
        "torch_dtype": "float32",
        "quantization": {"group_size": 64, "bits": 4},
    }
    return save(folder, unloaded(config), config=config)


def save(folder: Path, of: nn.Module, noise: float = 0.0, config: dict[str, Any] = CONFIG) -> Path:
    """As a model's directory; with `noise`, of the weights' size, a draft for it that is often
    right."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(5)
    leaves: Any = tree_flatten(of.parameters())
    weights = {
        k: v + noise * mx.std(v) * mx.random.normal(v.shape) if noise else v for k, v in leaves
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def pair(kind: str) -> tuple[Path, Path]:
    """A trained target and its head, of a kind of `servers.HEADS`."""
    if kind == "mtp":
        return DATA / "mtp/target", DATA / "mtp/sidecar"
    return DATA / ("gemma4" if kind == "assistant" else "qwen3") / "target", DATA / kind


def prompt(rng: random.Random, length: int) -> str:
    """Of `length` tokens; what repeats in it is what copying drafters look for."""
    pieces = ["".join(rng.choice(LETTERS) for _ in range(8)) for _ in range(4)]
    return "".join(rng.choice(pieces) for _ in range(length // 8 + 1))[:length]


def decode(of: nn.Module, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """Greedy, with a cache of its own, one token at a time; and the least margin on the way."""
    cache, x = make_prompt_cache(of), mx.array([prompt])
    said, margin = list[int](), float("inf")
    for _ in range(tokens):
        logits = of(x, cache=cache)[0, -1].astype(mx.float32)
        second, first = mx.sort(logits)[-2:].tolist()
        margin = min(margin, first - second)
        said.append(int(mx.argmax(logits).item()))
        x = mx.array([said[-1:]])
    return said, margin
