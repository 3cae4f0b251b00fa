"""The data that all layers share: requests, outputs, counters and errors.

A `Request` is frozen; an `Output` goes from the engine thread to the server. Imports the standard
library only.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]  # a JSON object
Finish = Literal["stop", "length", "abort", "error"]
Pooling = Literal["", "last", "mean"]

Tap = int  # a hidden state of the target: after layer i, or FINAL_NORM: after the final norm
FINAL_NORM: Tap = -1
NULL_BLOCK = 0  # padding points here; it is never allocated
STATE = -1  # in place of a pool's number: the recurrent states
NOT_FINITE = -1  # in place of a sampled token: its logits are not finite
LOADING = "loading"  # the code of the API's error while a server loads its model
UNLIMITED = 1 << 24  # tokens: no context is longer
MAX_CHOICES = 8
MAX_PRIORITY = 1000  # the lowest goes first
BACKGROUND = 100  # the priority of what nobody waits for
MAX_DEPTH = 32  # tokens drafted for one sequence
MAX_TOP_LOGPROBS = 20
NARROW = 1024  # a top_k up to here needs no sorted vocabulary
# the lowest temperature above 0: dividing by a lower one would overflow
COLDEST = 1e-5


def shown(value: Any) -> str:
    """A client's value for a message: JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """Text from elsewhere, without the characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request draws its tokens; by default from the plain distribution.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and the penalties' neutral values
    switch a filter off. Order: bias, penalties, temperature, top_k, top_p, min_p (vLLM's).
    `presence_penalty` and `frequency_penalty` look at generated tokens, `repetition_penalty` at
    prompt and generated tokens. `logprobs` is None (off) or the number of alternatives to report
    per token, 0 to 20; they are the model's own, before bias, penalties and temperature.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        counted = self.presence_penalty or self.frequency_penalty
        return self.repetition_penalty != 1.0 or bool(counted)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image as a vision tower reads it. `patches`: uint8 [rows * columns, patch * patch * 3],
    numpy's, row by row, each pixel's channels together, of which the tower gets (patches / 255 -
    mean) / std. `digest`: of all of it. `scaled` says in pixels how much larger it was, if it was
    much larger."""

    patches: Any
    rows: int
    columns: int
    digest: bytes
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scaled: str = ""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a prompt: ids `start` to `stop`, of which the negative ones are its
    rows, in order. `rows` and `columns` are counted in these. `both_ways`: these rows see those
    after them too, in layers with a window, so that one forward has all that are not cached."""

    start: int
    stop: int
    image: Image
    rows: int
    columns: int
    both_ways: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request, in token ids. `n` choices share the prompt's blocks.

    `max_tokens` is already clamped to the context; `stop_tokens` end a choice and are reported as
    the last token of its final output. `pooling` says which final hidden states make up the
    prompt's embedding, if one is wanted: `max_tokens` is 1 then, and the only output has the
    embedding and no token. Of `priority`, -MAX_PRIORITY to MAX_PRIORITY, the lowest goes first.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    n: int = 1
    prediction: tuple[int, ...] = ()  # the answer that the client expects, to copy from
    # Makes the GrammarMatcher, ThinkingBudget or LoopGuard of each choice.
    grammar: Callable[[], Any] | None = None
    model: str = ""  # its served name; empty: the default
    pooling: Pooling = ""
    images: tuple[ImageSpan, ...] = ()  # of the prompt
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, and the best `(token, logprob)` alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought for one choice of a request; several tokens if drafts were accepted.

    `finish` is set in the last output of the choice; with "stop", the last token is the stop token.
    `cached` counts prompt tokens from the cache, `rounds` the steps that sampled for the choice so
    far, `drafted` the verified draft tokens, `accepted` the accepted ones. `error` comes with
    `finish == "error"`; `fault` says what was at fault: the engine, the model (not loaded), its
    numbers (not finite), the prompt (longer than the context), the grammar, or the client (did not
    read). `embedding` is float32 [D] of any length, numpy's.
    """

    request: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    cached: int = 0
    rounds: int = 0
    error: str = ""
    drafted: int = 0
    accepted: int = 0
    fault: Literal["engine", "model", "numbers", "prompt", "grammar", "client"] = "engine"
    embedding: Any = None
    loops: int = 0  # that the loop guard ended in the choice so far


Outputs = list[Output]  # of a step, or in answer to an order


class CacheBytes(NamedTuple):
    """Bytes that a model caches."""

    token: int = 0  # per token, in layers with full attention
    windows: tuple[tuple[int, int], ...] = ()  # (window, bytes per token), by window
    state: int = 0  # per sequence, in recurrent layers


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server knows of a model: from its files, or once it is loaded, derived. `context`
    bounds prompt + output, in tokens."""

    name: str
    context: int
    vocab: int
    layout: str
    block_size: int
    kv_bytes: int
    weight_bytes: int
    created: int = 0  # unix seconds
    exact: str = ""  # the verdict on batch invariance, in words
    exact_rows: int = 0  # rows of one sequence in a step for which it is proven
    sees: bool = False  # images
    parent: str | None = None  # the model whose weights a profile has


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine, made by the engine thread after each step; counters only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    steps: int = 0
    rounds: int = 0
    prompt_tokens: int = 0
    prompt_left: int = 0  # prompt tokens of accepted requests that are not computed yet
    cached_tokens: int = 0
    generated_tokens: int = 0
    # (source, position from 1, drafted, accepted)
    drafts: tuple[tuple[str, int, int, int], ...] = ()
    parked_seconds: float = 0.0  # with sequences that decoded and no draft
    preemptions: int = 0
    loops: int = 0  # that the loop guard ended
    step_seconds: float = 0.0  # of the last step
    memory_pressure: int = 0  # 0 normal, 1 short, 2 very short
    footprint_bytes: int = 0  # of the process
    mlx_active_bytes: int = 0
    mlx_cache_bytes: int = 0
    live_arrays: int = 0  # that Python holds
    ranks: int = 1  # processes that hold a part of the model
    states: int = 0  # of recurrent layers, kept for later prompts
    disk_bytes: int = 0  # of the prefix cache, all models'
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_runs_found: int = 0  # files of blocks or states that were loaded
    disk_runs_damaged: int = 0
    # (id, cached prompt tokens, these and the computed ones) of each running request
    running_requests: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be requested. `error` says why its last load failed."""

    info: ModelInfo
    status: Literal["loaded", "loading", "unloaded"] = "loaded"
    stats: Stats = field(default_factory=Stats)
    pinned: bool = False
    loads: int = 0
    error: str = ""


class Interrupted(Exception):
    """Work of idle moments stops, as there is a request; it goes on later."""


Check = Callable[[], None]  # raises Interrupted where somebody waits


class Busy(Exception):
    """No request is accepted now. `retry_after` is in seconds, at least 1."""

    def __init__(self, retry_after: int, why: str = "the server's queue is full") -> None:
        super().__init__(f"{why}; try again in {retry_after} s")
        self.retry_after = retry_after


class Dead(RuntimeError):
    """The engine's thread has ended or is ending; nothing can be served."""


class UserError(ValueError):
    """Something the user can fix. The message names the field, the value and the fix."""


class InvalidRequest(UserError):
    """A request that this server cannot run."""


class UnsupportedModel(UserError):
    """A model, draft model or layout that cannot be used here."""


def line_of(error: BaseException) -> str:
    """An error of other code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error)[:2000].split())[:400]}"


def blame(error: BaseException) -> str:
    """Why a model directory cannot be used, in a line. Code in it is never run."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own to run, which mlxspec never does"
    return line_of(error)


def too_long(tokens: int, context: int) -> str:
    """The error for a prompt that is too long, in the words that make coding agents compact."""
    return (
        f"prompt is too long: {tokens} tokens > {context} maximum. This model's maximum context"
        f" length is {context} tokens, and an answer needs room in it"
    )


def not_finite(model: str, tokens: int) -> str:
    """The error for a prefix of so many tokens that has no usable logits."""
    return (
        f"what {model or 'the model'} computes from the first {tokens} tokens is not finite (NaN or"
        " infinite): its weights are damaged, or overflow in their data type; download it again, or"
        " serve another quantization of it"
    )


class OutOfMemory(UnsupportedModel):
    """A model that does not fit into the free memory: it needs `need` bytes, with headroom."""

    def __init__(self, message: str, need: int = 0) -> None:
        super().__init__(message)
        self.need = need
