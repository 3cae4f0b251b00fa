"""Trains the tiny targets and heads of tests/heads/data and writes what mlx-vlm does with them.

    python -m tests.heads.make mtp OUT
    python -m tests.heads.make eagle3 OUT
    python -m tests.heads.make dflash OUT --target OUT/target
    python -m tests.heads.make assistant OUT

writes OUT/target, the head and a reference.json: prompts, mlx-lm's plain greedy answers, and tokens
per round and drafts of mlx-vlm's own loop by depth. The files in data were made so, on a CPU with
OpenBLAS and one thread, with mlx 0.32.4, mlx-lm 0.32.2 and mlx-vlm 0.7.10 (pip install
mlx-vlm==0.7.10); it takes minutes. `--no-reference` needs no mlx-vlm for MTP.

All is fp32 and synthetic; nothing is downloaded. Another kind of head adds a row to KINDS.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tests.heads import make_assistant, make_more, make_mtp, oracle, packagings  # noqa: E402
from tests.heads.language import CHAT_TEMPLATE, END, SPECIAL, Language  # noqa: E402
from tests.heads.training import batches, train_target  # noqa: E402

TARGET_STEPS = 300  # like a head's so few that it is often right and often wrong
TEXT = 60_000  # phrases
DEPTHS = (2, 4, 7)


# ---- files
# -------------------------------------------------------------------------------------------


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


def mtp_reference(
    out: Path, target: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """What mlx-vlm does with two packagings, and with the mistakes."""
    made = dict(oracle=f"mlx-vlm {oracle.VERSION}", max_tokens=oracle.LENGTH)
    made |= dict(prompts=prompts, greedy=answers, by_depth={}, mistakes_at_4={})
    with tempfile.TemporaryDirectory() as folder:
        theirs = oracle.load_target(out / "target", Path(folder, "target"))
        for name in ("sidecar", "sidecar-4bit"):
            path = packagings.write(name, Path(folder, name), out)
            made["by_depth"][name] = by_depth(theirs, path, "mtp", prompts, answers)
    made["mistakes_at_4"] = mistakes(theirs, out / "sidecar", "mtp", prompts, answers)
    write(out / "reference.json", made)


def reference_of(kind: str) -> Callable[[Path, Any, list[list[int]], list[list[int]]], None]:
    """The same for a head in the directory of its kind; prompts and answers lie beside it."""

    def reference(
        out: Path, target: Any, prompts: list[list[int]], answers: list[list[int]]
    ) -> None:
        common = dict(oracle=f"mlx-vlm {oracle.VERSION}", max_tokens=oracle.LENGTH)
        write(out / "reference.json", common | dict(prompts=prompts, greedy=answers))
        path, theirs = out / kind, oracle.target_of(kind, target, out / "target")
        made = dict(by_depth=by_depth(theirs, path, kind, prompts, answers))
        made |= dict(mistakes_at_4=mistakes(theirs, path, kind, prompts, answers))
        write(path / "reference.json", made)

    return reference


def by_depth(
    target: Any, path: Path, kind: str, prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, Any]:
    drafter = oracle.load_drafter(path)
    return {
        str(depth): oracle.measure(target, drafter, prompts, answers, depth, kind)
        for depth in DEPTHS
    }


def mistakes(
    target: Any, path: Path, kind: str, prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, float]:
    found = {}
    for name, change in oracle.MISTAKES[kind].items():
        drafter = oracle.load_drafter(path)
        change(drafter)
        rate = oracle.measure(target, drafter, prompts, answers, 4, kind)["tokens_per_round"]
        found[name] = float(rate)
    return found


def write(path: Path, made: Any) -> None:
    path.write_text(oracle.lines(made) + "\n", "utf-8")


# ---- main
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of head: the module with its target, and how one is trained in so many steps, written
    and measured."""

    made_in: Any
    steps: int
    train: Callable[..., Any]
    write: Callable[..., None]
    measure: Callable[..., None]


KINDS = {
    "mtp": Kind(make_mtp, 170, make_mtp.train_mtp, make_mtp.write_mtp, mtp_reference),
    "eagle3": Kind(
        make_more, 250, make_more.train_eagle3, make_more.write_eagle3, reference_of("eagle3")
    ),
}
KINDS["assistant"] = Kind(
    make_assistant,
    300,
    make_assistant.train_assistant,
    make_assistant.write_assistant,
    reference_of("assistant"),
)
for block in ("dflash", "dflash2", "dspark"):
    KINDS[block] = Kind(
        make_more,
        300,
        make_more.train_block(block),
        make_more.write_block(block),
        reference_of(block),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, help="trained earlier with the same seed")
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument(
        "--head-steps", type=int, help="more than 25; those of the data if left out"
    )
    parser.add_argument("--no-reference", action="store_true", help="write the files only")
    a = parser.parse_args()
    kind, r, language = KINDS[a.kind], random.Random(a.seed), Language(a.seed)
    mx.random.seed(a.seed)
    home = a.out / "target"
    tokenizer = write_tokenizer(home, language)
    text = language.text(random.Random(a.seed + 7), TEXT)
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    target, data = kind.made_in.make_target(), batches(ids, r, 24, 64)
    if a.target:
        target.load_weights(str(a.target / "model.safetensors"))
    train_target(target, data, 0 if a.target else a.target_steps)
    packagings.write_json(home / "config.json", kind.made_in.target_config())
    packagings.save(home / "model.safetensors", dict(tree_flatten(target.parameters())))
    mx.random.seed(a.seed + 1)
    head = kind.train(target, batches(ids, r, 14, 64), a.head_steps or kind.steps, r)
    kind.write(a.out, head, ids)
    if not a.no_reference:
        kind.measure(a.out, target, *choose(target, language, tokenizer, a.seed))


if __name__ == "__main__":
    main()
