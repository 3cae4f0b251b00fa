"""The requests of all chat APIs in one form, and their conversion to engine requests.

Rule: every fault of a request is detected here, before anything is queued, except a grammar that
does not compile.
"""

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from mlxspec.server.errors import Json, invalid
from mlxspec.server.generate import Prepared
from mlxspec.server.state import TextModel
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
from mlxspec.text.images import Images, put_texts
from mlxspec.text.messages import TooLong, canonical, parameter_types, rejected
from mlxspec.text.output_parser import OutputParser
from mlxspec.text.structured.grammar import CompiledGrammar
from mlxspec.text.structured.json_schema import checked_lark, json_rule
from mlxspec.text.structured.loop_guard import LoopGuard
from mlxspec.text.structured.thinking import EFFORT_TOKENS, ThinkingBudget
from mlxspec.text.structured.wishes import asked
from mlxspec.text.template import template_reads
from mlxspec.types import COLDEST, UNLIMITED, Request, Sampling, too_long

HELD_BYTES = 1 << 21  # that a request may hold beside its prompt until it is answered
HELD_PER_CHAR = 16  # bytes for each character of the prompt: what it was rendered from
CHARS_PER_TOKEN = 8  # on average; a longer prediction is truncated before it is encoded

# Fields of a body with the same name in `Sampling`; a body's `logprobs` is something else.
SAMPLING_FIELDS = {setting.name for setting in fields(Sampling)} - {"logprobs"}
LIMITS = set("max_tokens max_completion_tokens max_output_tokens num_predict n_predict".split())
OBJECT = {"type": "object"}  # the schema of any JSON object


@dataclass(frozen=True)
class AnswerFormat:
    """The required form of an answer: JSON by the schema `value`, or text by the Lark grammar
    `value`. It comes from the body's `field`."""

    field: str
    value: Any
    lark: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to continue. `messages` and `tools` are in OpenAI's chat format, not yet
    checked; `deferred` tools may be called too, but are not in the prompt. `tool_choice` is auto,
    none, required, or an object with a tool's `full_name`. `options` are variables of the template;
    None: not sent. `source` is the body's field that holds the conversation. `continued`: the
    answer continues the last message. `budget` is the maximum of reasoning tokens, if any. `held`
    are the body's fields that are repeated in the answer or stored with it. `images` stand in the
    messages as markers."""

    messages: Sequence[Any]
    tools: Any = None
    tool_choice: Any = "auto"
    deferred: Sequence[Json] = ()
    options: Json = field(default_factory=dict)
    source: str = "messages"
    continued: bool = False
    budget: int | None = None
    held: Json = field(default_factory=dict)
    images: Images = field(default_factory=dict)


def memory_size(value: Any, limit: int) -> int:
    """The bytes that a JSON value takes in memory; any number above `limit` if they are more than
    that."""
    size, stack = 0, [value]
    while stack and size <= limit:
        value = stack.pop()
        size += sys.getsizeof(value)
        if size <= limit and isinstance(value, Mapping):
            stack += [*value, *value.values()]
        elif size <= limit and isinstance(value, list | tuple):
            stack += value
    return size


def prepare_chat(model: TextModel, body: Any, id: str, chat: ChatRequest) -> Prepared:
    """The engine request and choices for `chat`; on the text thread. The body has a `format` too.
    Raises RejectedRequest and ApiError."""
    tokenizer = model.tokenizer
    form = format_of(tokenizer)
    chat, talk, prompt = render_prompt(model, chat)
    room = HELD_BYTES + HELD_PER_CHAR * len(prompt.text)
    tools = [] if chat.tool_choice == "none" else [*talk.tools, *chat.deferred]
    types = parameter_types(tools)
    held = {**chat.held, "tools": [types, chat.held.get("tools")]}
    sizes = {name: memory_size(value, room) for name, value in held.items()}
    if sum(sizes.values()) > room:
        largest = max(sizes, key=lambda name: sizes[name])
        why = f"is part of what takes more than {room} bytes beside the prompt"
        raise rejected(largest, f"{why} until the answer ends; send less of it")
    request = engine_request(model, body, id, prompt.ids, chat.source)
    request = replace(request, images=prompt.images)
    grammar = _grammar(model, body, chat, talk, prompt)
    # The lowest of the server's limit, the request's, and that of its effort.
    budgets = [model.server.config.thinking_budget, chat.budget]
    if not template_reads(tokenizer, "reasoning_effort"):
        budgets.append(EFFORT_TOKENS.get(str(chat.options.get("reasoning_effort"))))
    limits = [limit for limit in budgets if limit is not None]

    thinking = prompt.thinking
    guard = loop_guard(model, body, request, _asked(talk), _shown(talk))

    def matcher() -> Any:
        """The matcher of one choice, once the grammar is compiled."""
        rules = grammar.result()() if grammar else None
        inner: Any = rules
        if form.think_start and (limits or guard):
            limit = min(limits, default=UNLIMITED)
            inner = ThinkingBudget(form, tokenizer.decode, limit, thinking, inner)
        return guard(inner, rules) if guard else inner

    if grammar or guard or (limits and form.think_start):
        request = replace(request, grammar=matcher)
    choices = []
    for index in range(body.n):
        detokenizer = Detokenizer(
            tokenizer, body.stop, request.stop_tokens, prompt_text_continues=chat.continued
        )
        parser = OutputParser(
            tokenizer,
            types,
            thinking=bool(thinking),
            constrained=grammar is not None,
            continued=chat.continued,
        )
        single = not body.parallel_tool_calls
        choices.append(Choice(index, request, detokenizer, parser=parser, single=single))
    prepared = Prepared([request], choices, grammar)
    if memory_size([talk.messages, talk.tools, talk.options], room) <= room:
        remember_all = partial(_remember, model, talk, prompt, choices)
        prepared = replace(prepared, on_done=partial(model.server.later, remember_all))
    return prepared


def _remember(
    model: TextModel,
    talk: Conversation,
    prompt: RenderedPrompt,
    choices: Choices,
) -> None:
    """Keep the tokens of the answers: the next turn's prompt should repeat them."""
    tokenizer, history = model.tokenizer, model.history
    for choice in choices:
        for call in choice.calls:
            history.keep_call(call)
        # Keep whole answers only: none that ended at a stop string or after its only call.
        cut = choice.stops.stopped is not None or (choice.single and choice.calls)
        cut = cut or talk.continued
        if choice.finish == "stop" and not cut and choice.ids[-1] in tokenizer.eos_token_ids:
            [turn] = canonical([message(choice)])
            remember(tokenizer, talk, prompt, answer=turn, ids=choice.ids, history=history)


def render_prompt(
    model: TextModel,
    chat: ChatRequest,
    generation_prompt: bool = True,
) -> tuple[ChatRequest, Conversation, RenderedPrompt]:
    """The request with what the model's profile adds, its conversation and prompt; on the text
    thread. Raises RejectedRequest."""
    chat = _with_profile(model, chat)
    options = {name: value for name, value in chat.options.items() if value is not None}
    talk = conversation_of(chat.messages, chat.tools, options, history=model.history)
    system = model.profile.system
    if system and all(turn["role"] != "system" for turn in talk.messages):
        talk.messages.insert(0, {"role": "system", "content": system})
    for turn in talk.messages:
        turn["content"] = put_texts(turn["content"], chat.images)
    talk = replace(talk, continued=chat.continued, images=chat.images)
    context = model.info.context
    prompt = render(
        model.tokenizer,
        talk,
        model.history,
        generation_prompt=generation_prompt,
        context=context,
        field=chat.source,
        image_reader=model.image_cache.reader if model.image_cache else None,
    )
    return chat, talk, prompt


def _with_profile(model: TextModel, chat: ChatRequest) -> ChatRequest:
    """The conversation with what the model's profile says of reasoning, unless the client does."""
    if chat.budget is not None:
        return chat
    profile = model.profile
    sent = {name: value for name, value in chat.options.items() if value is not None}
    given: Json = {"enable_thinking": profile.thinking, "reasoning_effort": profile.effort or None}
    if sent.get("enable_thinking") or sent.get("reasoning_effort", "none") != "none":
        # The client wants reasoning, so the profile does not turn it off.
        given = {name: value for name, value in given.items() if value not in (False, "none")}
    off = given.get("enable_thinking") is False and "enable_thinking" not in sent
    switch = template_reads(model.tokenizer, "enable_thinking")
    return replace(chat, options={**given, **sent}, budget=0 if off and not switch else None)


def prompt_length(model: TextModel, chat: ChatRequest) -> int:
    """The length of the prompt, on the text thread; an estimate if the text is far beyond the
    context: the client wants to know how much to leave out. Raises RejectedRequest."""
    try:
        return len(render_prompt(model, chat)[-1].ids)
    except TooLong as error:
        return error.tokens


def room_for(model: TextModel, prompt: Sequence[int], source: str) -> int:
    """How many tokens fit after a prompt from the body's field `source`. Raises ApiError."""
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
    model: TextModel,
    body: Any,
    id: str,
    prompt: Sequence[int],
    source: str,
) -> Request:
    """The engine's request for a prompt from the body's field `source`, with the body's settings
    and the model's defaults. Raises ApiError."""
    room, info, tokenizer = room_for(model, prompt, source), model.info, model.tokenizer
    settings = body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    sent, profile = body.model_fields_set, model.profile
    seed = None if "seed" in sent else profile.seed  # -1 was sent too
    seed = secrets.randbits(63) if seed is None else seed
    values = {**asdict(model.defaults), "seed": seed, **settings}
    bias = body.logit_bias or {}
    check_ids(model, bias, "logit_bias")
    values["logit_bias"] = tuple(bias.items())
    values["logprobs"] = body.alternatives
    values["top_k"] = max(0, values["top_k"])
    if values["temperature"] < COLDEST:
        values["temperature"] = 0.0
    predicted: list[int] = []  # a hint, so the excess is dropped
    if body.prediction:
        text = "".join(part.text for part in body.prediction.content)
        ids = encode(tokenizer, text[: info.context * CHARS_PER_TOKEN], special=False)
        predicted = [token for token in ids[: info.context] if token < info.vocab]
    ends = () if body.ignore_eos else tokenizer.eos_token_ids
    return Request(
        id=id,
        prompt=tuple(prompt),
        max_tokens=min(room, (body.limit if sent & LIMITS else profile.max_tokens) or room),
        sampling=Sampling(**values),
        stop_tokens=frozenset({*ends, *body.stop_token_ids}),
        n=body.n,
        prediction=tuple(predicted),
        model=model.base,
        priority=(profile.priority if body.priority is None else body.priority) or 0,
    )


def loop_guard(
    model: TextModel,
    body: Any,
    request: Request,
    wish: str,
    shown: Callable[[], str],
) -> Callable[..., LoopGuard] | None:
    """The function that makes the loop guard of each choice, around another matcher if there is
    one; None if it is off or nothing ends the answer. `wish`: the text that may name a number of
    repetitions; `shown` returns all that the client sent."""
    wanted = model.server.config.loop_guard if body.loop_guard is None else body.loop_guard
    ends = sorted(request.stop_tokens & {*model.tokenizer.eos_token_ids})
    if not wanted or not ends:
        return None
    repeats, most = asked(wish)
    usual = model.tokenizer.eos_token_id  # of several, the one that ends a turn
    end = usual if usual in ends else ends[0]
    return partial(LoopGuard, end, shown, model.tokenizer.decode, repeats, most=most, forms={})


def _shown(talk: Conversation) -> Callable[[], str]:
    """Returns what the answer may copy: all but the model's own turns."""
    texts = [turn["content"] for turn in talk.messages if turn["role"] != "assistant"]
    return partial("\n".join, texts)


def _asked(talk: Conversation) -> str:
    """What the user said last, if the model has only called tools since."""
    for turn in reversed(talk.messages):
        if turn["role"] == "user":
            return str(turn["content"])
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            break
    return ""


def _grammar(
    model: TextModel,
    body: Any,
    chat: ChatRequest,
    talk: Conversation,
    prompt: RenderedPrompt,
) -> Future[CompiledGrammar] | None:
    """The grammar of the answer, which may still be compiling: a required call, whatever the
    format; else the format or, if tools are offered, a call."""
    grammars, choice = model.grammars, chat.tool_choice
    wanted = body.format
    required = choice not in ("auto", "none")
    calls = required or (talk.tools and choice == "auto")
    if wanted and chat.continued:
        raise rejected(wanted.field, "with a last message of the assistant: send one of them")
    if wanted and wanted.lark and calls:
        raise rejected(wanted.field, "with tools: send one of them, or tool_choice 'none'")
    if required:
        wanted = AnswerFormat("tool_choice", None)
    if wanted is None:
        return None
    header = grammars.header_rule(FINAL, wanted.field)
    if wanted.lark:
        if header:
            raise rejected(wanted.field, "does not fit this model's format; send response_format")
        text = checked_lark(wanted.value, wanted.field)
        return grammars.compile(text, prompt.thinking, wanted.field)
    name = None if isinstance(choice, str) else choice.full_name
    single = name is not None or not body.parallel_tool_calls
    rules, some = [], None
    if not required:
        rules.append(header + json_rule(wanted.value, wanted.field))
    if calls:
        some = grammars.calls(talk.tools, name, single, wanted.field)
        rules.append(some.rule())
    return grammars.compile(grammars.rules(rules), prompt.thinking, wanted.field, some)


def check_ids(model: TextModel, ids: Iterable[int], source: str) -> None:
    """Raises ApiError for a token id that the model does not have."""
    highest, vocab = max(ids, default=0), model.info.vocab
    if highest >= vocab:
        why = f"{source} has the token id {highest}; ids run from 0 to {vocab - 1}"
        raise invalid(source, why)


def encode_prompt(
    model: TextModel,
    text: str,
    special: bool = True,
    field: str = "prompt",
) -> list[int]:
    """Token ids of a field. Raises RejectedRequest for a text far beyond the context."""
    check_length(model.tokenizer, text, model.info.context, field=field)
    return encode(model.tokenizer, text, special)
