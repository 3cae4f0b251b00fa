"""How often a drafted token is kept at a temperature, by each rule that keeps the target's
distribution.

Rule: nothing is drawn to measure it. The target writes the text; at each of its positions both
models' whole distributions over the same prefix give every rule's acceptance exactly.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
import numpy as np  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.utils import load  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.workloads import ALONE, tasks  # noqa: E402
from mlxspec.commands.bench import Task  # noqa: E402
from mlxspec.files import default_cache_dir  # noqa: E402

RULES = ("optimal, Σ min(p, q)", "shared noise", "greedy draft, p(argmax q)", "independent, Σ p·q")
Kept = list[np.ndarray]  # one [positions, rules] for each task


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.coupling", description=__doc__)
    parser.add_argument("target", help="a directory in mlx-lm's format")
    parser.add_argument("draft", help="another, with the same tokens")
    parser.add_argument("--workloads", nargs="+", choices=ALONE, default=["humaneval", "chat"])
    parser.add_argument(
        "--tasks", type=int, default=8, help="of each workload; they run as one batch"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="that the target writes for each, at most"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mx.random.seed(args.seed)
    target, tokenizer = load(args.target)[:2]
    draft = load(args.draft)[0]
    console, kept = Console(), {}
    with Progress(console=Console(stderr=True)) as bar:
        for name in args.workloads:
            chosen = tasks(name, default_cache_dir())[: args.tasks]
            prompts = [_prompt(tokenizer, task) for task in chosen]
            step = bar.add_task(f"{name}: writing", total=args.tokens)
            texts = _write(
                target, prompts, args, tokenizer.eos_token_ids, lambda s=step: bar.advance(s)
            )
            step = bar.add_task(f"{name}: drafting", total=len(chosen))
            kept[name] = []
            for prompt, (tokens, logits) in zip(prompts, texts, strict=True):
                theirs = _logits(draft, prompt, tokens)
                kept[name].append(np.stack(list(_rows(logits, theirs, args.temperature))))
                bar.advance(step)
    widths = f"{logits.shape[1]} tokens of the target's, {theirs.shape[1]} of the draft's"
    console.print(
        f"{Path(args.target).name} + {Path(args.draft).name}: {widths}; those of both are compared"
    )
    console.print(_table(kept, args.temperature))


def _prompt(tokenizer, task: Task) -> list[int]:
    message = [{"role": "user", "content": task.text}]
    tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    return (
        [*tokens, *tokenizer.encode(task.opening, add_special_tokens=False)]
        if task.opening
        else tokens
    )


def _write(model, prompts, args, ends, advance) -> list[tuple[list[int], np.ndarray]]:
    """What the target writes after each prompt, without the end token's successor, and its
    log-probabilities float32 [tokens, vocab] at temperature 1."""
    batch = BatchGenerator(
        model,
        max_tokens=args.tokens,
        stop_tokens=[[end] for end in ends],
        sampler=lambda logprobs: mx.random.categorical(logprobs / args.temperature),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    found = {uid: ([], []) for uid in batch.insert(prompts)}
    while answers := batch.next_generated():
        for answer in answers:
            tokens, logprobs = found[answer.uid]
            tokens.append(answer.token)
            logprobs.append(np.array(answer.logprobs, np.float32))
        advance()
    batch.close()
    return [(tokens, np.stack(logprobs)) for tokens, logprobs in found.values()]


def _logits(model, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]: what the model says at the place of each of `tokens`, all before it
    given."""
    whole = mx.array([prompt + tokens[:-1]])
    return np.array(model(whole)[0, len(prompt) - 1 :].astype(mx.float32))


def _rows(target: np.ndarray, draft: np.ndarray, temperature: float) -> Iterator[tuple[float, ...]]:
    both = min(target.shape[1], draft.shape[1])  # what is beyond is padding of the matrices
    for a, b in zip(target[:, :both], draft[:, :both], strict=True):
        p, q = _softmax(a / temperature), _softmax(b / temperature)
        yield np.minimum(p, q).sum(), shared(p, q), p[q.argmax()], p @ q


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def shared(p: np.ndarray, q: np.ndarray) -> float:
    """The chance that argmax(log p + g) == argmax(log q + g) for one Gumbel noise g: p, q positive
    [vocab].

    Token i wins both with the chance 1 / Σ_j max(p_j / p_i, q_j / q_i). In the order of q / p the
    first is the larger up to i and the second after it, so that two running sums give all the
    terms."""
    order = np.argsort(q / p)
    p, q = p[order], q[order]
    before, after = np.cumsum(p), q[::-1].cumsum()[::-1] - q
    return float((1 / (before / p + after / q)).sum())


def _table(kept: dict[str, Kept], temperature: float) -> Table:
    table = Table(
        title=f"share of drafted tokens kept at T = {temperature:g} (± one standard error)"
    )
    if len(kept) > 1:
        kept = {**kept, "all": [task for found in kept.values() for task in found]}
    for column in ("", *kept):
        table.add_column(column)
    table.add_row("tasks", *(str(len(found)) for found in kept.values()))
    table.add_row(
        "positions", *(str(sum(map(len, found))) for found in kept.values()), end_section=True
    )
    for i, rule in enumerate(RULES):
        table.add_row(rule, *(_figure([task[:, i] for task in found]) for found in kept.values()))
    lost = ([task[:, 0] - task[:, 1] for task in found] for found in kept.values())
    table.add_row("lost by shared noise", *map(_figure, lost))
    return table


def _figure(values: list[np.ndarray]) -> str:
    """The mean over positions. Its error is of whole tasks: the positions of one are not
    independent."""
    count, mean = sum(map(len, values)), np.concatenate(values).mean()
    if len(values) == 1:
        return f"{mean:.4f}"
    spread = sum((task - mean).sum() ** 2 for task in values) * len(values) / (len(values) - 1)
    return f"{mean:.4f} ± {spread**0.5 / count:.4f}"


if __name__ == "__main__":
    main()
