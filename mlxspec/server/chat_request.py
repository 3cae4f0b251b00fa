"""What the chat APIs ask of the engine, in one form, and its way to an engine request.

Rule: everything that can be wrong with a request is found here, before anything is queued, but for
a grammar that does not compile.
"""

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from mlxspec.server.errors import Json, invalid
from mlxspec.server.generate import Generation
from mlxspec.server.state import Model
from mlxspec.server.stream import Choice, Choices, message
from mlxspec.text.chat import (
    Conversation,
    RenderedPrompt,
    check_length,
    conversation_of,
    encode,
    remember,
    render,
)
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.formats import FINAL, format_of
from mlxspec.text.messages import TooLong, canonical, rejected
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.grammar import Make
from mlxspec.text.structured.json_schema import checked_lark, json_rule
from mlxspec.text.structured.thinking import EFFORT_TOKENS, ThinkingBudget
from mlxspec.text.template import template_reads
from mlxspec.types import COLDEST, UNLIMITED, Request, Sampling, too_long

CHARS_PER_TOKEN = 32  # on average; a longer prediction is cut before it is encoded

# Fields of a body that are named as in `Sampling`; its `logprobs` is something else.
SAMPLING_FIELDS = {each.name for each in fields(Sampling)} - {"logprobs"}
OBJECT = {"type": "object"}  # the schema of any JSON object


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must be: JSON by the schema `value`, or text by the Lark grammar `value`. The
    request says so in `field`."""

    field: str
    value: Any
    lark: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to be continued. `messages` and `tools` are in OpenAI's chat format, not yet
    checked; `deferred` tools may be called too, but are not in the prompt. `tool_choice` is auto,
    none, required, or an object with a tool's `full_name`. `options` are variables of the template;
    None: not sent. `source` is the body's field that holds the conversation. `continued`: the
    answer continues the last message. `budget` is the most tokens of reasoning."""

    messages: Sequence[Any]
    tools: Any = None
    tool_choice: Any = "auto"
    deferred: Sequence[Json] = ()
    options: Json = field(default_factory=dict)
    source: str = "messages"
    continued: bool = False
    budget: int = UNLIMITED


def chat_generation(generation: Generation, chat: ChatRequest) -> Generation:
    """The response, ready to answer `chat`; on the text thread. Its body has a `format` too. Raises
    RejectedRequest and ApiError."""
    model, body = generation.model, generation.body
    talk, prompt = render_prompt(model, chat)
    request = engine_request(model, body, generation.writer.id, prompt.ids, chat.source)
    grammar = generation.grammar = _grammar(generation, chat, talk, prompt)
    request = replace(request, grammar=_limited(model, chat, prompt, grammar))
    tools = [*talk.tools, *chat.deferred]
    if chat.tool_choice == "none":
        tools = []
    constrained, single = grammar is not None, not body.parallel_tool_calls
    for i in range(body.n):
        reader = Detokenizer(model.tokenizer, body.stop, request.stop_tokens, chat.continued)
        parts = OutputParser(
            model.tokenizer, tools, bool(prompt.thinking), constrained, chat.continued
        )
        generation.choices.append(Choice(i, request, reader, parts, single))
    generation.requests.append(request)
    remember_all = partial(_remember, model, talk, prompt, generation.choices)
    generation.on_done = partial(model.server.later, remember_all)
    return generation


def _remember(model: Model, talk: Conversation, prompt: RenderedPrompt, choices: Choices) -> None:
    """Keep the tokens of the answers: the next turn's prompt should repeat them."""
    tokenizer, history = model.tokenizer, model.history
    for choice in choices:
        for call in choice.calls:
            history.keep_call(call)
        # It is whole and ended by itself: not by a stop string, nor after its only call.
        cut = choice.reader.stopped is not None or (choice.single and choice.calls)
        cut = cut or talk.continued
        if choice.finish == "stop" and not cut and choice.ids[-1] in tokenizer.eos_token_ids:
            [turn] = canonical([message(choice)])
            remember(tokenizer, talk, prompt, turn, choice.ids, history)


def render_prompt(
    model: Model, chat: ChatRequest, generation_prompt: bool = True
) -> tuple[Conversation, RenderedPrompt]:
    """The conversation and its prompt, on the text thread. Raises RejectedRequest."""
    options = {name: value for name, value in chat.options.items() if value is not None}
    talk = conversation_of(chat.messages, chat.tools, options, model.history)
    talk = replace(talk, continued=chat.continued)
    context = model.info.context
    prompt = render(model.tokenizer, talk, model.history, generation_prompt, context, chat.source)
    return talk, prompt


def prompt_length(model: Model, chat: ChatRequest) -> int:
    """The length of the prompt, on the text thread; an estimate if the text is far beyond the
    context: the client wants to know how much to leave out. Raises RejectedRequest."""
    try:
        return len(render_prompt(model, chat)[1].ids)
    except TooLong as error:
        return error.tokens


def room_for(model: Model, prompt: Sequence[int], source: str) -> int:
    """How many tokens fit behind a prompt from the body's field `source`. Raises ApiError."""
    if not prompt:
        raise invalid(source, f"{source} has no tokens; send some text")
    check_ids(model, prompt, source)
    context = model.info.context
    room = context - len(prompt)
    if room <= 0:
        why = f"{too_long(len(prompt), context)}; shorten {source}"
        raise invalid(source, why, "context_length_exceeded")
    return room


def engine_request(
    model: Model, body: Any, name: str, prompt: Sequence[int], source: str
) -> Request:
    """The engine's request for a prompt from the body's field `source`. Raises ApiError."""
    room = room_for(model, prompt, source)
    ends = () if body.ignore_eos else model.tokenizer.eos_token_ids
    return Request(
        name,
        tuple(prompt),
        min(room, body.limit or room),
        _sampling(model, body),
        frozenset({*ends, *body.stop_token_ids}),
        body.n,
        _predicted(model, body),
        model=model.name,
    )


def _sampling(model: Model, body: Any) -> Sampling:
    """The request's own settings, else the model's. Raises ApiError."""
    given = body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    values = {**asdict(model.defaults), "seed": secrets.randbits(63), **given}
    bias = body.logit_bias or {}
    check_ids(model, bias, "logit_bias")
    values["logit_bias"] = tuple(bias.items())
    values["logprobs"] = body.alternatives
    values["top_k"] = max(0, values["top_k"])
    if values["temperature"] < COLDEST:
        values["temperature"] = 0.0
    return Sampling(**values)


def _predicted(model: Model, body: Any) -> tuple[int, ...]:
    """Token ids of the answer that the client expects. A hint, so the excess is dropped."""
    if body.prediction is None:
        return ()
    info = model.info
    text = "".join(part.text for part in body.prediction.content)[: info.context * CHARS_PER_TOKEN]
    ids = encode(model.tokenizer, text, special=False)[: info.context]
    return tuple(token for token in ids if token < info.vocab)


def _grammar(
    generation: Generation, chat: ChatRequest, talk: Conversation, prompt: RenderedPrompt
) -> Future[Make] | None:
    """The grammar of the answer, which may still be compiling: the required call, which has no
    format, else the format or, if tools are offered, a call."""
    grammars, form, choice = generation.model.grammars, generation.body.format, chat.tool_choice
    required = choice not in ("auto", "none")
    calls = required or (talk.tools and choice == "auto")
    if form and chat.continued:
        raise rejected(form.field, "with a last message of the assistant: send one of them")
    if form and form.lark and calls:
        raise rejected(form.field, "with tools: send one of them, or tool_choice 'none'")
    if required:
        form = Format("tool_choice", None)
    if form is None:
        return None
    header = grammars.header_rule(FINAL, form.field)
    if form.lark:
        if header:
            raise rejected(form.field, "does not fit this model's format; send response_format")
        text = checked_lark(form.value, form.field)
        return grammars.compile(text, prompt.thinking, form.field)
    name = None if isinstance(choice, str) else choice.full_name
    single = name is not None or not generation.body.parallel_tool_calls
    texts = []
    for loose in (False, True):
        rules = [] if required else [header + json_rule(form.value, form.field)]
        if calls:
            rules.append(grammars.calls(talk.tools, name, single, form.field, loose))
        texts.append(grammars.rules(rules))
    return grammars.compile(texts[0], prompt.thinking, form.field, instead=texts[1])


def _limited(
    model: Model, chat: ChatRequest, prompt: RenderedPrompt, grammar: Future[Make] | None
) -> Make | None:
    """What makes the answers' matchers: by the grammar, once it is compiled, and with no more
    reasoning than the server's setting, the request and its word of effort all allow."""
    tokenizer, form = model.tokenizer, format_of(model.tokenizer)
    effort = str(chat.options.get("reasoning_effort"))
    most = min(model.server.config.thinking_budget, chat.budget)
    if not template_reads(tokenizer, "reasoning_effort"):
        most = min(most, EFFORT_TOKENS.get(effort, most))
    if most == UNLIMITED or not form.think_start:
        return (lambda: grammar.result()()) if grammar else None
    return lambda: ThinkingBudget(
        form, tokenizer.decode, most, prompt.thinking, grammar and grammar.result()()
    )


def check_ids(model: Model, ids: Iterable[int], source: str) -> None:
    """Raises ApiError for a token id that the model does not have."""
    highest, vocab = max(ids, default=0), model.info.vocab
    if highest >= vocab:
        why = f"{source} has the token id {highest}; ids run from 0 to {vocab - 1}"
        raise invalid(source, why)


def encode_prompt(
    model: Model, text: str, special: bool = True, field: str = "prompt"
) -> list[int]:
    """Token ids of a field. Raises RejectedRequest for a text far beyond the context."""
    check_length(model.tokenizer, text, model.info.context, field)
    return encode(model.tokenizer, text, special)
