"""Trains the tiny target and the head of tests/heads/data and writes what mlx-vlm does with them.

    python -m tests.heads.make mtp OUT

writes OUT/target, OUT/sidecar and OUT/reference.json: prompts, mlx-lm's plain greedy answers, and
tokens per round and drafts of mlx-vlm's own loop by packaging and depth. The files in data were made
so, on a CPU with OpenBLAS and one thread, with mlx 0.32.4, mlx-lm 0.32.2 and mlx-vlm 0.7.10 (pip
install mlx-vlm==0.7.10); it takes minutes. `--no-reference` needs no mlx-vlm.

All is fp32 and synthetic; nothing is downloaded. Another kind of head adds a row to KINDS.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tests.heads import oracle, packagings  # noqa: E402
from tests.heads.language import CHAT_TEMPLATE, END, SPECIAL, VOCAB, Language  # noqa: E402

LAYERS, EVERY = 4, 2  # decoder layers; each second one has full attention
TEXT_CONFIG: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    model_type="qwen3_5_text",
    num_hidden_layers=LAYERS,
    full_attention_interval=EVERY,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        mrope_section=[2, 1, 1],
    ),
)
ENDS: dict[str, Any] = dict(eos_token_id=END, pad_token_id=0, dtype="float32")
TARGET_STEPS, HEAD_STEPS = 300, 170  # so few that the head is often right and often wrong
RATE = 3e-3
CHAIN = 3  # passes of a head that are trained together
TEXT = 60_000  # phrases
DEPTHS = (2, 4, 7)

Batches = Iterator[mx.array]


# ---- training
# ------------------------------------------------------------------------------------------


def batches(ids: np.ndarray, r: random.Random, rows: int, length: int) -> Batches:
    while True:
        at = [r.randrange(len(ids) - length) for _ in range(rows)]
        yield mx.array(np.stack([ids[a : a + length] for a in at]))


def train(
    name: str, module: nn.Module, loss: Callable[[mx.array], mx.array], data: Batches, steps: int
) -> None:
    """AdamW, a short warm-up, a cosine down to a twentieth."""
    warm_up = optim.linear_schedule(0.0, RATE, 25)
    decay = optim.cosine_decay(RATE, steps - 25, RATE / 20)
    schedule = optim.join_schedules([warm_up, decay], [25])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01)
    step = nn.value_and_grad(module.train(), loss)
    began, seen = time.time(), []
    for i in range(1, steps + 1):
        value, gradients = step(next(data))
        optimizer.update(module, optim.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(value, module.parameters(), optimizer.state)
        seen.append(value.item())
        if i % 50 == 0:
            seconds = time.time() - began
            print(f"{name}: step {i}, loss {np.mean(seen[-20:]):.3f}, {seconds:.0f} s", flush=True)
    module.eval()


def soft_cross_entropy(teacher: mx.array, logits: mx.array) -> mx.array:
    """Of a head's logits against the target's own distribution; both [..., vocabulary]."""
    return -(teacher * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(-1)


def make_target() -> Any:
    text = json.loads(json.dumps(TEXT_CONFIG))
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))


def train_target(data: Batches) -> Any:
    target = make_target()

    def loss(x: mx.array) -> mx.array:
        return nn.losses.cross_entropy(target(x[:, :-1]), x[:, 1:], reduction="mean")

    train("target", target, loss, data, TARGET_STEPS)
    target.freeze()
    target.eval()
    return target


class Unroll:
    """In the place of a KV cache while a chain is trained: step s sees the true rows up to its own,
    and of the chain's steps before it only those of its own row. Row t of step s is at position
    t + s."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys.append(keys)
        self.values.append(values)
        return mx.concatenate(self.keys, 2), mx.concatenate(self.values, 2)

    def mask(self, rows: int) -> mx.array:
        own = [mx.eye(rows).astype(mx.bool_)] * self.offset
        return mx.concatenate([mx.tril(mx.ones((rows, rows), mx.bool_)), *own], 1)


class MTP(nn.Module):
    """Qwen3.5's head, written apart from mlxspec's own."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.norm = nn.RMSNorm(size, eps)
        self.layers = [qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)]

    def __call__(self, embedded: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(mx.concatenate(parts, -1)), mask, cache))


def train_mtp(target: Any, data: Batches) -> nn.Module:
    """Each step of the chain takes the head's own output for the hidden state."""
    text = target.language_model
    head = MTP(text.args)

    def loss(x: mx.array) -> mx.array:
        hidden = mx.stop_gradient(text.model(x))
        teacher = mx.stop_gradient(mx.softmax(text.lm_head(hidden), -1))
        rows, unroll, total = x.shape[1] - CHAIN, Unroll(), 0.0
        h = hidden[:, :rows]
        for s in range(CHAIN):
            unroll.offset = s
            embedded = text.model.embed_tokens(x[:, 1 + s : 1 + s + rows])
            h = head(embedded, h, unroll.mask(rows), unroll)
            right = teacher[:, 1 + s : 1 + s + rows]
            total += 0.8**s * soft_cross_entropy(right, text.lm_head(h)).mean()
        return total

    train("MTP", head, loss, data, HEAD_STEPS)
    return head


# ---- files
# -------------------------------------------------------------------------------------------


def target_config() -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    text = TEXT_CONFIG | ENDS
    text |= dict(hidden_act="silu", attention_bias=False, attn_output_gate=True)
    text |= dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    text |= dict(layer_types=[kinds[(i + 1) % EVERY == 0] for i in range(LAYERS)])
    config = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5")
    return config | dict(text_config=text, tie_word_embeddings=False) | ENDS


def write_tokenizer(out: Path, language: Language) -> Tokenizer:
    out.mkdir(parents=True, exist_ok=True)
    language.tokenizer().save(str(out / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[0],
        bos_token=None,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    packagings.write_json(out / "tokenizer_config.json", config)
    packagings.write_json(out / "generation_config.json", dict(eos_token_id=END, pad_token_id=0))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def write_mtp(out: Path, head: nn.Module) -> None:
    config = packagings.sidecar_config(target_config()["text_config"])
    tensors = dict(tree_flatten(head.parameters()))
    packagings.write_sidecar(out / "sidecar", tensors, config, out)


# ---- the reference
# -----------------------------------------------------------------------------------------


def greedy(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """mlx-lm's own answers."""
    return [
        [int(t) for t, _ in generate_step(mx.array(p), model, max_tokens=oracle.LENGTH)]
        for p in prompts
    ]


def grams(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]


def choose(
    target: Any, language: Language, tokenizer: Tokenizer, seed: int, count: int = 12, of: int = 60
) -> tuple[list[list[int]], list[list[int]]]:
    """Held-out prompts and their answers: those that repeat least, of themselves or of one another,
    as copying must not help much."""
    r = random.Random(seed + 1000)
    prompts = []
    for _ in range(of):
        ids = tokenizer.encode(language.text(r, r.randint(8, 16))).ids
        prompts.append(ids[: -r.randint(1, 6)])
    pool = list(zip(prompts, greedy(target, prompts), strict=True))
    chosen: list[tuple[list[int], list[int]]] = []
    said: set[tuple[int, ...]] = set()

    def repeats(pair: tuple[list[int], list[int]]) -> int:
        own = grams(pair[0] + pair[1])
        return len(own) - len(set(own)) + len(said & set(grams(pair[1])))

    while len(chosen) < count:
        best = min(pool, key=repeats)
        pool.remove(best)
        chosen.append(best)
        said |= set(grams(best[1]))
    return [p for p, _ in chosen], [a for _, a in chosen]


def reference(
    out: Path, prompts: list[list[int]], answers: list[list[int]], names: Sequence[str]
) -> dict[str, Any]:
    """What mlx-vlm does with these packagings, and with the mistakes."""
    made = dict(oracle=f"mlx-vlm {oracle.VERSION}", max_tokens=oracle.LENGTH)
    made |= dict(prompts=prompts, greedy=answers, by_depth={}, mistakes_at_4={})
    with tempfile.TemporaryDirectory() as folder:
        target = oracle.load_target(out / "target", Path(folder, "target"))
        for name in names:
            drafter = oracle.load_drafter(packagings.write(name, Path(folder, name), out))
            made["by_depth"][name] = {
                str(depth): oracle.measure(target, drafter, prompts, answers, depth)
                for depth in DEPTHS
            }
        for name, change in oracle.MISTAKES.items():
            drafter = oracle.load_drafter(out / "sidecar")
            change(drafter)
            found = oracle.measure(target, drafter, prompts, answers, 4)
            made["mistakes_at_4"][name] = found["tokens_per_round"]
    return made


# ---- main
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of head: how one is trained for a target, how it is written, and the packagings that
    the reference measures."""

    train: Callable[[Any, Batches], nn.Module]
    write: Callable[[Path, nn.Module], None]
    measured: tuple[str, ...]


KINDS = {"mtp": Kind(train_mtp, write_mtp, ("sidecar", "sidecar-4bit"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-reference", action="store_true", help="write the files only")
    a = parser.parse_args()
    kind, r, language = KINDS[a.kind], random.Random(a.seed), Language(a.seed)
    mx.random.seed(a.seed)
    home = a.out / "target"
    tokenizer = write_tokenizer(home, language)
    text = language.text(random.Random(a.seed + 7), TEXT)
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    target = train_target(batches(ids, r, 24, 64))
    packagings.write_json(home / "config.json", target_config())
    packagings.save(home / "model.safetensors", dict(tree_flatten(target.parameters())))
    mx.random.seed(a.seed + 1)
    kind.write(a.out, kind.train(target, batches(ids, r, 14, 64)))
    if not a.no_reference:
        prompts, answers = choose(target, language, tokenizer, a.seed)
        made = reference(a.out, prompts, answers, kind.measured)
        (a.out / "reference.json").write_text(oracle.lines(made) + "\n", "utf-8")


if __name__ == "__main__":
    main()
