"""The parts that load a model themselves: each yields its lines.

Rule: MLX is imported inside a part, once a fast BLAS is loaded; the report itself needs neither.
"""

import gc
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from bench.first_mac.commands import ON_A_MAC, OPS, ROOT, Failed, only_on_a_mac, run

LONG = 8192 if ON_A_MAC else 2048  # tokens of the context whose peak is told
IDLE_S = 60  # after which weights may have been unwired
ROWS = (1, 2, 3, 5, 6, 9, 13, 17)  # of a step that is timed
EARLY = 8  # tokens: ties in all answers so soon are none
TOKENS = 64  # of an answer that is compared
PROMPTS = (
    "Write a Python function that merges two sorted lists.",
    "Explain in five sentences how a hash table works.",
    "List the planets of the solar system with one fact for each.",
)


def loaded(model: str, context: int = 2048) -> tuple[Any, Any]:
    """An engine with its proven kernels, and what it was loaded from."""
    from mlxspec.config import load_config
    from mlxspec.load.resolve import resolve_model

    found = resolve_model(load_config({"model": model or None, "context": str(context)}))
    engine, _ = found.load()
    return engine, found


def instances(model: str) -> Iterator[str]:
    """Seconds of the first launch of each instance of a kernel that the model needs, which is
    compiling it unless macOS has kept it, and of the second."""
    only_on_a_mac()
    from mlxspec import blas

    blas.load()
    import mlx_lm

    from mlxspec.config import load_config
    from mlxspec.load.resolve import resolve_model
    from mlxspec.model import quantized
    from mlxspec.model.layout import find_layout

    found = resolve_model(load_config({"model": model or None}))
    plain, _ = mlx_lm.load(str(found.path))
    quantized.install(plain)
    yield from first_launches(find_layout(plain).cases(plain, 32))


def first_launches(cases: Iterable[Any]) -> Iterator[str]:
    """A line for each instance of these cases, and the sum. Raises Failed where one cannot run."""
    import mlx.core as mx

    total, wrong = 0.0, 0
    for case in {case.name: case for case in cases}.values():
        inputs = case.inputs(0)
        mx.eval(inputs)
        for variant, call in case.variants.items():
            for rows in case.raced or case.rows:
                name, took = f"{case.name}, {variant}, {rows} rows", []
                try:
                    for _ in range(2):
                        began = time.perf_counter()
                        mx.eval(call(*case.cut(inputs, rows)))
                        took.append(time.perf_counter() - began)
                except Exception as error:  # it may not compile
                    wrong += 1
                    yield f"{name}: {error}"
                    continue
                total += took[0]
                yield f"{name}: {took[0]:.3f} s, then {1e3 * took[1]:.1f} ms"
    yield f"all first launches: {total:.1f} s"
    if wrong:
        raise Failed(f"{wrong} instances cannot run")


def memory(model: str) -> Iterator[str]:
    """What is available before a model is loaded, and what a loaded one holds."""
    from mlxspec import blas

    blas.load()
    import mlx.core as mx

    from mlxspec.engine import memory as of_machine
    from mlxspec.files import format_size
    from mlxspec.types import Request, Sampling

    before = of_machine.available()
    engine, _ = loaded(model, LONG)
    held, after = mx.get_active_memory(), of_machine.available()
    level = of_machine.LEVELS[of_machine.system_level()].partition(":")[0]
    pages = {}
    if ON_A_MAC:
        pages = {name: of_machine.sysctl(name) for name in of_machine.FREE_PAGES}

    def answer(engine: Any, name: str, length: int, tokens: int) -> float:
        """Seconds to the first token."""
        prompt = tuple(3 + i % 50 for i in range(length))
        engine.add(Request(name, prompt, tokens, Sampling(0.0)))
        began, first = time.monotonic(), 0.0
        while engine.busy:
            if any(output.tokens for output in engine.step()) and not first:
                first = time.monotonic() - began
        return first

    yield (
        f"{format_size(of_machine.total())} in all; available {format_size(before)} before,"
        f" {format_size(after)} with the model, of which MLX holds {format_size(held)}"
    )
    yield f"pressure with the model: {level}; pages: {pages}"
    longest = engine.scheduler.limit * 3 // 4
    answer(engine, "warm", 8, 8)
    mx.reset_peak_memory()
    answer(engine, "long", longest, 32)
    peak = mx.get_peak_memory()
    names = [drafter.name for drafter in getattr(engine.proposer, "drafters", ())]
    yield (
        f"peak at a context of {longest} tokens with {', '.join(names) or 'no drafter'}:"
        f" {format_size(peak)}"
    )
    warm = answer(engine, "now", 9, 2)
    pause = IDLE_S if ON_A_MAC else 1
    time.sleep(pause)
    idle = answer(engine, "later", 10, 2)
    yield f"first token after {1e3 * warm:.0f} ms, {1e3 * idle:.0f} ms after {pause} s idle"


def lossless(model: str) -> Iterator[str]:
    """Greedy answers equal mlx-lm's own, but for ties: where they part, the logits of both tokens
    must be within the precision of the model's numbers."""
    from mlxspec import blas

    blas.load()
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    from mlxspec.commands.bench import Task, prompt_of, run_group, tokens_of
    from mlxspec.model.quantized import coarsest_dtype
    from mlxspec.types import Request, Sampling

    engine, found = loaded(model)
    plain, _ = mlx_lm.load(str(found.path))
    wrong, early = 0, 0
    for text in PROMPTS:
        prompt = prompt_of(Task(text, text), found.tokenizer)
        request = Request(text, prompt, TOKENS, Sampling(0.0))
        ours = tokens_of(run_group(engine, engine.proposer, [request])[text])
        steps = generate_step(mx.array(prompt), plain, max_tokens=TOKENS)
        theirs = [int(token) for token, _ in steps]
        same = equal(ours, theirs)
        if same == TOKENS:
            yield f"{same} tokens equal: {text}"
            continue
        logits = plain(mx.array([[*prompt, *ours[:same]]]))[0, -1].astype(mx.float32)
        gap = abs(float(logits[ours[same]] - logits[theirs[same]]))
        # Two sums in another order differ by some units in the last place of the largest logit.
        limit = float(mx.abs(logits).max()) * 2 * float(mx.finfo(coarsest_dtype(plain)).eps)
        tie = gap <= limit
        wrong += not tie
        early += same < EARLY
        kind = "a tie" if tie else "DIFFERENT"
        yield f"{same} tokens equal, then {kind} (logits {gap:.2g} apart): {text}"
    if wrong or early == len(PROMPTS):
        raise Failed("answers differ from mlx-lm's")


def equal(ours: list[int], theirs: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    while count < min(len(ours), len(theirs)) and ours[count] == theirs[count]:
        count += 1
    return count


def exact(model: str) -> Iterator[str]:
    """Whether a row's bits depend on other rows, what keeping them costs, and how often mlx-lm's
    likeliest token depends on the rows that are computed with it."""
    from mlxspec import blas

    blas.load()
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    from mlxspec.commands.bench import Task, prompt_of
    from mlxspec.load.exact import examine, measure_cost
    from mlxspec.model import quantized
    from mlxspec.model.layout import find_layout

    found = loaded(model)[1]  # its kernels are proven by now
    gc.collect()  # what was loaded
    plain, _ = mlx_lm.load(str(found.path))
    flips = total = 0
    for text in PROMPTS:
        prompt = prompt_of(Task(text, text), found.tokenizer)
        steps = generate_step(mx.array(prompt), plain, max_tokens=TOKENS)
        alone = [int(token) for token, _ in steps]
        rows = plain(mx.array([[*prompt, *alone[:-1]]]))[0, len(prompt) - 1 :]
        flips += int((rows.argmax(axis=-1) != mx.array(alone)).sum())
        total += len(alone)
    yield f"mlx-lm: {1000 * flips / total:.1f} of 1000 tokens depend on the rows beside them"
    quantized.install(plain)
    config = found.config
    layout = find_layout(plain, kv_bits=config.kv_bits)
    proven = examine(plain, layout, config.block_size, kv_bits=config.kv_bits)
    if proven.invariance:
        runner = layout.runner(plain, config.block_size, 16, kv_bits=config.kv_bits)
        table = list(range(1, 16))
        cost = measure_cost(runner, proven.invariance, table, lambda: None)
        proven = replace(proven, cost=cost)
        yield from (f"{key}: {calls}" for key, calls in proven.invariance.calls.items())
        yield f"attention by {'our kernel' if proven.invariance.by_kernel else 'products'}"
    yield proven.describe("on")


def steps(model: str) -> Iterator[str]:
    """Seconds of a step by its rows, with command buffers as we have them and as MLX has them, and
    whether trees of drafts would pay at ours."""
    from bench.trees import verdict

    script = str(ROOT / "scripts/first-mac")
    words = [sys.executable, script, "--time-steps", *([model] if model else [])]
    trees = ""
    for name, env in (("ours", {}), ("MLX's", {OPS: buffer_of_mlx()})):
        said = run(*words, env=env).splitlines()[-1]
        yield f"ms by rows, {name} command buffers: {said}"
        if not env:
            took = json.loads(said)
            trees = verdict({int(rows): float(ms) for rows, ms in took.items()})
    yield trees


def buffer_of_mlx() -> str:
    """Launches of a command buffer as MLX has it for this chip: backend/metal/device.cpp."""
    import mlx.core as mx

    return "50" if str(mx.device_info().get("architecture", ""))[-1:] in ("s", "d") else "40"


def time_steps(model: str) -> str:
    """Milliseconds of a step by rows, as JSON."""
    from mlxspec import blas

    blas.load()
    from mlxspec.speculate.calibrate import MORE, time_step

    engine, _ = loaded(model)
    with engine.scheduler.pool.lent(64 + MORE) as table:
        best = dict.fromkeys(ROWS, float("inf"))
        for _ in range(8):
            for rows in ROWS:
                best[rows] = min(best[rows], time_step(engine.runner, table, 64, rows))
    return json.dumps({rows: round(1e3 * took, 3) for rows, took in best.items()})
