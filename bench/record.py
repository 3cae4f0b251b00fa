"""Records answers of a model in the files that bench.replay and bench.trees read. `python -m bench.record
MODEL FILE`.

Rule: the target alone writes, by mlx-lm's own batch generator; no drafter has a part in it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.utils import load  # noqa: E402

from bench.workloads import ALONE, tasks  # noqa: E402
from mlxspec.commands.bench import Task  # noqa: E402
from mlxspec.files import default_cache_dir  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.record", description=__doc__)
    parser.add_argument("model", help="a directory in mlx-lm's format")
    parser.add_argument("file", type=Path, help="JSON lines: task, prompt, output (token ids)")
    parser.add_argument("--workload", choices=ALONE, default="humaneval")
    parser.add_argument("--tasks", type=int, default=8, help="they run as one batch")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mx.random.seed(args.seed)
    model, tokenizer = load(args.model)[:2]
    chosen = tasks(args.workload, default_cache_dir())[: args.tasks]
    prompts = [prompt_of(tokenizer, task) for task in chosen]
    answers = write(model, prompts, args.tokens, args.temperature, tokenizer.eos_token_ids)
    with args.file.open("w", encoding="utf-8") as file:
        for task, prompt, output in zip(chosen, prompts, answers, strict=True):
            line = {"task": task.name, "prompt": prompt, "output": output}
            file.write(json.dumps(line) + "\n")


def prompt_of(tokenizer, task: Task) -> list[int]:
    """The task as the chat template has it, with the answer's opening behind it."""
    message = [{"role": "user", "content": task.text}]
    tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    return [*tokens, *tokenizer.encode(task.opening, add_special_tokens=False)]


def write(
    model, prompts: Sequence[list[int]], tokens: int, temperature: float, ends: Sequence[int]
) -> list[list[int]]:
    """What the model writes after each prompt."""

    def draw(logprobs: mx.array) -> mx.array:
        if not temperature:
            return mx.argmax(logprobs, axis=-1)
        return mx.random.categorical(logprobs / temperature)

    batch = BatchGenerator(
        model,
        max_tokens=tokens,
        stop_tokens=[[end] for end in ends],
        sampler=draw,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    found: dict[int, list[int]] = {uid: [] for uid in batch.insert(list(prompts))}
    while answers := batch.next_generated():
        for answer in answers:
            found[answer.uid].append(answer.token)
    batch.close()
    return list(found.values())


if __name__ == "__main__":
    main()
