"""What the three chat APIs ask of the engine, in one form, and its way to an engine request.

Rule: everything that can be wrong with a request is found here, before anything is queued.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from mlxspec.server.errors import unfit
from mlxspec.server.generate import Generation
from mlxspec.server.state import Model, while_connected
from mlxspec.server.stream import Choice, ResponseWriter, message
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

CHARS_PER_TOKEN = 32  # on average; a longer prediction is cut before it is encoded

# Fields of OpenAI's bodies that are named as in `Sampling`.
SAMPLING_FIELDS = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
    " logit_bias seed"
).split()


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must be: any JSON object, JSON by a schema, or text by a Lark grammar. `field`
    is where the request says so."""

    kind: Literal["object", "schema", "lark"]
    field: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to be continued. `messages` and `tools` are in OpenAI's chat format, not yet
    checked. `tool_choice` is auto, none, required, or a dict {"name": ...}."""

    messages: Sequence[Any]
    tools: Any = None
    deferred: Sequence[Mapping[str, Any]] = ()  # may be called, but are not in the prompt
    tool_choice: str | Mapping[str, str] = "auto"
    single: bool = False  # at most one call
    options: Mapping[str, Any] = field(default_factory=dict)  # for the template
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `Sampling`; None: default
    limit: int | None = None  # most tokens to generate
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    prediction: str = ""
    format: Format | None = None
    source: str = "messages"  # the body's field that holds the conversation

    @classmethod
    def from_body(cls, body: Any, **own: Any) -> "ChatRequest":
        """The fields that OpenAI's two chat APIs share, and each one's `own`."""
        return cls(
            single=body.parallel_tool_calls is False,
            sampling=sampling_fields(body),
            limit=body.limit,
            stop=body.stop or (),
            stop_tokens=body.stop_token_ids or (),
            ignore_eos=bool(body.ignore_eos),
            prediction=body.prediction.text if body.prediction else "",
            **own,
        )


def render_prompt(model: Model, chat: ChatRequest) -> tuple[Conversation, RenderedPrompt]:
    """The conversation and its prompt, on the text thread. Raises Refused."""
    talk = conversation_of(chat.messages, chat.tools, chat.options, model.history)
    context = model.info.context
    prompt = render(model.tokenizer, talk, model.history, context=context, field=chat.source)
    return talk, prompt


def _prepare(
    model: Model, chat: ChatRequest, name: str, arrived: float
) -> tuple[Conversation, RenderedPrompt, Request]:
    """The engine's request for `chat`, on the text thread. Raises Refused and ApiError."""
    talk, prompt = render_prompt(model, chat)
    check_prompt(model, prompt.ids, chat.source)
    context, grammars = model.info.context, model.grammars
    request = Request(
        name,
        tuple(prompt.ids),
        min(context - len(prompt.ids), chat.limit or context),
        sampling(model, chat.sampling),
        stop_tokens(model, chat.stop_tokens, chat.ignore_eos),
        chat.n,
        arrived,
        predicted(model, chat.prediction),
        _grammar(grammars, chat, talk, prompt),
        model.name,
        grammars.vocab,
    )
    return talk, prompt, request


def _grammar(
    grammars: Grammars, chat: ChatRequest, talk: Conversation, prompt: RenderedPrompt
) -> Make | None:
    """The grammar of the answer: the required call, else the format or, if tools are offered, a
    call."""
    form, choice = chat.format, chat.tool_choice
    forced = choice not in ("auto", "none")
    offered = bool(talk.tools) and choice == "auto"
    if form is None and not forced:
        return None
    where = form.field if form else "tool_choice"
    if form and forced:
        why = f"{where} with a tool_choice: a call has no format; leave one of them out"
        raise Refused(where, why)
    if form and form.kind == "lark":
        if offered:
            why = f"{where} with tools: send one of them, or tool_choice 'none'"
            raise Refused(where, why)
        text = grammars.lark(str(form.value), where)
    else:
        rules = []
        if form:
            schema = {"type": "object"} if form.kind == "object" else form.value
            rules.append(grammars.json(schema, where))
        if forced or offered:
            name = choice["name"] if isinstance(choice, Mapping) else None
            single = chat.single or name is not None
            rules.append(grammars.calls(talk.tools, name, single, where))
        text = grammars.rules(rules)
    return grammars.compiled(text, _thinking(grammars, prompt), where)


def _thinking(grammars: Grammars, prompt: RenderedPrompt) -> bool | None:
    """Whether the answer begins inside the reasoning, behind it (False), or may open one (None)."""
    end = grammars.tokenizer.think_end
    if not prompt.thinking and end and prompt.text.rstrip().endswith(end):
        return False
    return prompt.thinking or None


async def converse(
    http: HttpRequest, model: Model, chat: ChatRequest, writer: Callable[[str], ResponseWriter],
    name: str, streamed: bool, ignored: list[str], arrived: float,
) -> ASGIApp:  # fmt: skip
    """The response to `chat`, written by `writer(name)`. Raises ApiError."""
    state = model.server
    check_count(model, chat.n, 1)
    preparing = state.on_text_thread(_prepare, model, chat, name, arrived)
    talk, prompt, request = await while_connected(http.receive, preparing)
    tools = [*talk.tools, *chat.deferred] if chat.tool_choice != "none" else ()
    choices = []
    for i in range(chat.n):
        reader = Detokenizer(model.tokenizer, chat.stop, request.stop_tokens)
        ruled = request.grammar is not None
        parts = OutputParser(model.tokenizer, tools, prompt.thinking, _call_id, ruled)
        choices.append(Choice(i, reader, parts, chat.single))
    headers = {"x-request-id": name, "request-id": name, **state.report(ignored)}
    done = partial(_remember, model, talk, prompt, choices)
    return Generation(model, [request], choices, writer(name), streamed, headers, arrived, done)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _remember(
    model: Model, talk: Conversation, prompt: RenderedPrompt, choices: Sequence[Choice]
) -> None:
    """Keep the tokens of the answers: the next turn's prompt should repeat them."""
    turns = [message(choice, choice.pieces) for choice in choices]

    def work() -> None:
        tokenizer, history = model.tokenizer, model.history
        for choice, turn in zip(choices, turns, strict=True):
            for call in choice.calls:
                history.keep_call(call)
            if choice.ended_by_itself and choice.ids[-1] in tokenizer.eos_token_ids:
                canonical = conversation_of([turn], None, {}, history).messages[0]
                remember(tokenizer, talk, prompt, canonical, choice.ids, history)

    model.server.later(work)


def stop_tokens(model: Model, own: Sequence[int], ignore_eos: bool) -> frozenset[int]:
    """The tokens that end an answer: the request's, and the model's end tokens."""
    ends = () if ignore_eos else model.tokenizer.eos_token_ids
    return frozenset(own) | frozenset(ends)


def check_count(model: Model, n: int, prompts: int) -> None:
    """Raises ApiError for more answers than the queue could ever take."""
    most = model.server.config.max_sequences + model.server.config.max_queue
    if n * prompts > most:
        why = f"n = {n} for {prompts} prompts is more than {most} answers; ask for fewer"
        raise unfit("n", why)


def check_prompt(model: Model, prompt: Sequence[int], source: str) -> None:
    """Raises ApiError for an empty prompt, unknown tokens, or one beyond the context."""
    info = model.info
    if not prompt:
        raise unfit(source, f"{source} has no tokens; send some text")
    if (highest := max(prompt)) >= info.vocab:
        why = f"{source} has the token id {highest}; ids run from 0 to {info.vocab - 1}"
        raise unfit(source, why)
    if len(prompt) >= info.context:
        why = f"{too_long(len(prompt), info.context)}; shorten {source}"
        raise unfit(source, why, "context_length_exceeded")


def template_options(
    model: Model, kwargs: Mapping[str, Any] | None, **fields: Any
) -> tuple[dict[str, Any], list[str]]:
    """Variables for the chat template, and the paths of those that this template does not read.
    `fields` are fields of the body that are named like the variables; None: not sent."""
    given = {f"chat_template_kwargs.{name}": (name, v) for name, v in (kwargs or {}).items()}
    given |= {name: (name, value) for name, value in fields.items() if value is not None}
    options, unread = {}, []
    for path, (name, value) in given.items():
        if template_reads(model.tokenizer, name):
            options[name] = value
        else:
            unread.append(path)
    return options, unread


def encode_prompt(model: Model, text: str, special: bool = True) -> list[int]:
    """Token ids of the field `prompt`. Raises Refused for a text far beyond the context."""
    check_length(model.tokenizer, text, model.info.context, "prompt")
    return encode(model.tokenizer, text, special)


def predicted(model: Model, text: str) -> tuple[int, ...]:
    """Token ids of the answer that the client expects. A hint, so the excess is dropped."""
    info = model.info
    ids = encode(model.tokenizer, text[: info.context * CHARS_PER_TOKEN], special=False)
    return tuple(token for token in ids[: info.context] if token < info.vocab)


def sampling_fields(body: Any) -> dict[str, Any]:
    """The sampling that one of OpenAI's bodies asks for; None: the default."""
    return {name: getattr(body, name) for name in SAMPLING_FIELDS} | {"logprobs": body.alternatives}


def sampling(model: Model, asked: Mapping[str, Any]) -> Sampling:
    """The sampling of a request: its own settings, else the model's. Raises ApiError."""
    given = {name: value for name, value in asked.items() if value is not None}
    values = {"seed": secrets.randbits(63)} | asdict(model.defaults) | given
    bias = {int(token): value for token, value in values.pop("logit_bias", {}).items()}
    if bias and (highest := max(bias)) >= model.info.vocab:
        why = f"logit_bias has the token id {highest}; ids run from 0 to {model.info.vocab - 1}"
        raise unfit("logit_bias", why)
    values["top_k"] = max(0, values["top_k"])
    if values["temperature"] < COLDEST:
        values["temperature"] = 0.0
    return Sampling(**values, logit_bias=tuple(bias.items()))
