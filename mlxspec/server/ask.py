"""What the three chat APIs ask of the engine, in one form, and how it is answered.

Rule: everything that can be wrong with a request is found here, before anything is queued.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from mlxspec.server.errors import unfit
from mlxspec.server.generate import Job, answer
from mlxspec.server.state import Model, while_connected
from mlxspec.server.stream import Choice, Piece, ResponseWriter, message
from mlxspec.text.chat import (
    Conversation,
    RenderedPrompt,
    check_length,
    conversation_of,
    encode,
    remember,
    render,
    template_reads,
)
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.messages import Refused
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.grammar import Grammars, Make
from mlxspec.types import COLDEST, Request, Sampling, too_long

T = TypeVar("T")

CHARS_PER_TOKEN = (
    32  # of a prediction, on average: more text than that is not worth encoding to be cut
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a request wants to be sampled; None: as the model does by itself."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    alternatives: int | None = None  # of each token, with its log-probability

    @classmethod
    def of(cls, body: Any) -> "Wishes":
        """From a body that has fields of these names."""
        return cls(**{name: getattr(body, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must be: any JSON object, JSON by a schema, or text by a grammar in Lark's
    form. `field` is where the request says so."""

    kind: Literal["object", "schema", "lark"]
    field: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation to be continued. `messages` and `tools` are OpenAI's chat form, as they came.
    `tool_choice` is auto, none, required, or a dict {"name": ...}; `single` takes one call at most.
    `limit` is the most tokens to generate. `deferred` tools may be called too, but the prompt does
    not name them by itself."""

    messages: Sequence[Any]
    tools: Any = None
    deferred: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, str] = "auto"
    single: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # for the template
    wishes: Wishes = field(default_factory=Wishes)
    limit: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    prediction: str = ""
    format: Format | None = None
    source: str = "messages"  # the field that the conversation comes from

    @classmethod
    def of(cls, body: Any, **own: Any) -> "Ask":
        """What OpenAI's two chat APIs have under the same names, and what is each one's `own`."""
        return cls(
            single=body.parallel_tool_calls is False,
            wishes=Wishes.of(body),
            limit=body.limit,
            stop=body.stop or (),
            stop_tokens=body.stop_token_ids or (),
            ignore_eos=bool(body.ignore_eos),
            prediction=body.prediction.text if body.prediction else "",
            **own,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """An `Ask` in token ids."""

    talk: Conversation
    prompt: RenderedPrompt
    predicted: tuple[int, ...]
    grammar: Make | None = None
    masks: int = 0  # the vocabulary that it is for


def prepare(model: Model, ask: Ask) -> Prepared:
    """On the text thread. Raises Refused."""
    talk = conversation_of(ask.messages, ask.tools, ask.options, model.history)
    prompt = render(
        model.tokenizer, talk, model.history, context=model.info.context, field=ask.source
    )
    grammars = model.grammars
    grammar = _grammar(grammars, ask, talk, prompt)
    return Prepared(talk, prompt, predicted(model, ask.prediction), grammar, grammars.vocab)


def _grammar(
    grammars: Grammars, ask: Ask, talk: Conversation, prompt: RenderedPrompt
) -> Make | None:
    """What the answer has to keep to: a call that is asked for, or else the format, or a call
    instead."""
    forced = ask.tool_choice not in ("auto", "none")
    if not forced and ask.format is None:
        return None
    end = grammars.tokenizer.think_end
    thinking = (
        True if prompt.thinking else False if end and prompt.text.rstrip().endswith(end) else None
    )
    if forced and ask.format:
        where = ask.format.field
        raise Refused(
            where, f"{where} with a tool_choice: a call has no format; leave one of them out"
        )
    if ask.format is None:
        name = ask.tool_choice["name"] if isinstance(ask.tool_choice, Mapping) else None
        ways = [grammars.calls(talk.tools, name, ask.single or name is not None, "tool_choice")]
        return grammars.compiled(grammars.rules(ways), thinking, "tool_choice")
    form, callable_ = ask.format, bool(talk.tools) and ask.tool_choice == "auto"
    if form.kind == "lark":
        if callable_:
            raise Refused(
                form.field, f"{form.field} with tools: send one of them, or tool_choice 'none'"
            )
        return grammars.compiled(grammars.lark(str(form.value), form.field), thinking, form.field)
    ways = [grammars.json({"type": "object"} if form.kind == "object" else form.value, form.field)]
    if callable_:
        ways.append(grammars.calls(talk.tools, None, ask.single, form.field))
    return grammars.compiled(grammars.rules(ways), thinking, form.field)


async def converse(
    http: HttpRequest, model: Model, ask: Ask, dialect: Callable[[str], ResponseWriter], name: str, streamed: bool,
    ignored: list[str], arrived: float,
) -> ASGIApp:  # fmt: skip
    """The response to an `Ask`, in the dialect that is made for its `name`. Raises ApiError."""
    check_count(model, ask.n, 1)
    ready = await while_connected(http.receive, model.front.on_text_thread(prepare, model, ask))
    request = request_of(model, ask, ready, name, arrived)
    tools = [*ready.talk.tools, *ask.deferred] if ask.tool_choice != "none" else ()
    choices = [
        Choice(
            i,
            Detokenizer(model.tokenizer, ask.stop, request.stop_tokens),
            OutputParser(
                model.tokenizer, tools, ready.prompt.thinking, call_id, ready.grammar is not None
            ),
            single=ask.single,
        )
        for i in range(ask.n)
    ]
    headers = {"x-request-id": name, "request-id": name, **model.front.report(ignored)}
    done = partial(_remember, model, ready, choices)
    return answer(
        model, Job([request], choices, dialect(name), streamed, headers, arrived, done=done)
    )


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _remember(
    model: Model, ready: Prepared, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]]
) -> None:
    """What the next turn's prompt should repeat token for token."""
    said = [(choice, message(choice, some)) for choice, some in zip(choices, pieces, strict=True)]

    def work() -> None:
        for choice, answered in said:
            for call in choice.calls:
                model.history.keep_call(call)
            if choice.ended_by_itself and choice.ids[-1] in model.tokenizer.eos_token_ids:
                canonical = conversation_of([answered], None, {}, model.history).messages[0]
                remember(
                    model.tokenizer, ready.talk, ready.prompt, canonical, choice.ids, model.history
                )

    model.front.later(work)


def request_of(model: Model, ask: Ask, ready: Prepared, name: str, arrived: float) -> Request:
    """The engine's request. Raises ApiError for what cannot be run here."""
    prompt = ready.prompt.ids
    check_prompt(model, prompt, ask.source)
    info = model.info
    most = min(info.context - len(prompt), ask.limit or info.context)
    ends = stop_tokens(model, ask.stop_tokens, ask.ignore_eos)
    drawn = sampling(model, ask.wishes)
    return Request(
        name,
        tuple(prompt),
        most,
        drawn,
        ends,
        ask.n,
        arrived,
        ready.predicted,
        ready.grammar,
        model.name,
        ready.masks,
    )


def stop_tokens(model: Model, own: Sequence[int], ignore_eos: bool) -> frozenset[int]:
    ends = frozenset() if ignore_eos else frozenset(model.tokenizer.eos_token_ids)
    return ends | frozenset(own)


def check_count(model: Model, n: int, prompts: int) -> None:
    """Raises ApiError for more answers than could ever wait together."""
    most = model.front.config.max_sequences + model.front.config.max_queue
    if n * prompts > most:
        raise unfit(
            "n", f"n = {n} for {prompts} prompts is more than {most} answers; ask for fewer"
        )


def check_prompt(model: Model, prompt: Sequence[int], source: str) -> None:
    """Raises ApiError. That a prompt is too long is said in the words by which agents know to
    compact."""
    info = model.info
    if not prompt:
        raise unfit(source, f"{source} has no tokens; send some text")
    if max(prompt) >= info.vocab:
        raise unfit(
            source, f"{source} has the token id {max(prompt)}; ids run from 0 to {info.vocab - 1}"
        )
    if len(prompt) >= info.context:
        raise unfit(
            source,
            f"{too_long(len(prompt), info.context)}; shorten {source}",
            "context_length_exceeded",
        )


def template_options(
    model: Model, kwargs: Mapping[str, Any] | None, **fields: Any
) -> tuple[dict[str, Any], list[str]]:
    """What the request tells the chat template, and the names of what this template does not look
    at. `fields` are those of the body that are named as the template's variables; None: not
    sent."""
    given = {f"chat_template_kwargs.{k}": (k, v) for k, v in (kwargs or {}).items()}
    given |= {name: (name, value) for name, value in fields.items() if value is not None}
    read = {path: template_reads(model.tokenizer, name) for path, (name, _) in given.items()}
    options = {name: value for path, (name, value) in given.items() if read[path]}
    return options, [path for path in given if not read[path]]


def encode_prompt(model: Model, text: str, special: bool = True) -> list[int]:
    """Token ids of a field `prompt`. Raises Refused for one that is far too long."""
    check_length(model.tokenizer, text, model.info.context, "prompt")
    return encode(model.tokenizer, text, special)


def predicted(model: Model, text: str) -> tuple[int, ...]:
    """Token ids of what the client expects. They are a hint: what is too much is left out, not
    refused."""
    info = model.info
    text = text[: info.context * CHARS_PER_TOKEN]
    if not text:
        return ()
    return tuple(t for t in encode(model.tokenizer, text, special=False) if t < info.vocab)[
        : info.context
    ]


def sampling(model: Model, wishes: Wishes) -> Sampling:
    """The request's own settings, where it is silent the model's. Raises ApiError."""
    defaults, vocab = model.defaults, model.info.vocab
    bias = {int(key): value for key, value in (wishes.logit_bias or {}).items()}
    if bias and max(bias) >= vocab:
        raise unfit(
            "logit_bias", f"logit_bias has the token id {max(bias)}; ids run from 0 to {vocab - 1}"
        )
    temperature = _or(wishes.temperature, defaults.temperature)
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_k=max(0, _or(wishes.top_k, defaults.top_k)),
        top_p=_or(wishes.top_p, defaults.top_p),
        min_p=_or(wishes.min_p, defaults.min_p),
        repetition_penalty=_or(wishes.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=wishes.presence_penalty or 0.0,
        frequency_penalty=wishes.frequency_penalty or 0.0,
        logit_bias=tuple(bias.items()),
        seed=_or(wishes.seed, secrets.randbits(63)),
        logprobs=wishes.alternatives,
    )


def _or(own: T | None, default: T) -> T:
    return default if own is None else own
