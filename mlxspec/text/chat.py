"""Chat templates and encoding: from a client's messages to token ids.

One conversation renders to the same tokens however it was spelled (a list of one part is its
string). It is rewritten only if the model's template refuses it, always in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from mlx_lm.utils import load_tokenizer as load_wrapper

from mlxspec import log
from mlxspec.files import read_json
from mlxspec.text.control_tokens import MARK, control_tokens_of, marked
from mlxspec.text.control_tokens import encode as encode_rendered
from mlxspec.text.detokenizer import token_bytes
from mlxspec.text.formats import PROBE_TOOLS, format_of, has_tokens, is_harmony
from mlxspec.text.history import History
from mlxspec.text.images import ImageEncoder, ImageReader, Images
from mlxspec.text.messages import (
    Messages,
    RejectedRequest,
    TooLong,
    Tools,
    canonical,
    check_tools,
    clean,
    in_json_words,
    rejected,
)
from mlxspec.text.rewrites import GENTLE, Rewrite, apply_rewrites, rewrites_for, tools_as_text
from mlxspec.text.template import apply_template, template_reads
from mlxspec.text.tool_calls import as_object
from mlxspec.types import ImageSpan, InvalidRequest, Json, Sampling, blame, shown, too_long

Tokenizer = TokenizerWrapper  # the server's name for it

FIRST_CHARS = 8  # per token of the context; few texts have more

RESERVED = frozenset(  # variables of a template that the server sets, not a request
    "messages conversation tools chat_template tokenize add_generation_prompt padding truncation"
    " continue_final_message max_length return_dict return_tensors return_assistant_tokens_mask"
    " tokenizer_kwargs processor_kwargs self raise_exception strftime_now".split(),
)


LIMITS = {  # of the default sampling parameters: type, minimum, maximum
    "temperature": (float, 0, 2),
    "top_k": (int, 0, 2**31),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 10),
}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, its end tokens from generation_config.json, else from
    config.json. Raises InvalidRequest if it is not usable."""
    generation, config = read_json(path / "generation_config.json"), read_json(path / "config.json")
    eos = generation.get("eos_token_id") or config.get("eos_token_id")
    options: Json = {"trust_remote_code": False}  # else transformers asks whether to run it
    template = read_json(path / "chat_template.json").get("chat_template")  # of image models
    configured = read_json(path / "tokenizer_config.json").get("chat_template")
    if template and not configured and not (path / "chat_template.jinja").exists():
        options["chat_template"] = template
    try:
        tokenizer: Tokenizer = load_wrapper(path, options, eos_token_ids=eos)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the libraries raise at such files
        why = f"{path} has no usable tokenizer: {blame(error)}; give a complete model directory"
        raise InvalidRequest(why) from error
    if not tokenizer.vocab_size:
        why = f"{path} has a tokenizer without a vocabulary; give a complete model directory"
        raise InvalidRequest(why)
    if not tokenizer.has_tool_calling:  # it may have been trained on Hermes'
        detokenizer = tokenizer.detokenizer
        tokenizer = TokenizerWrapper(
            tokenizer._tokenizer,
            lambda _: detokenizer,
            tokenizer.eos_token_ids,
            tool_call_start=json_tools.tool_call_start,
            tool_call_end=json_tools.tool_call_end,
            tool_parser=json_tools.parse_tool_call,
        )
    if is_harmony(tokenizer) and has_tokens(tokenizer, "<|call|>"):
        tokenizer.add_eos_token("<|call|>")
    tokenizer.model_max_length = 1 << 62  # we check the context; its warning would mislead
    return tokenizer


def check_draft(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Raises InvalidRequest if an id is a different token in each; `names` are the models'. Ids
    beyond the other's last do no harm: they are never drafted, or never accepted."""
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    for i in range(min(max(ours), max(theirs)) + 1):
        if ours.get(i) != theirs.get(i):
            raise InvalidRequest(
                f"draft = {names[1]} has another vocabulary than {names[0]}: token {i} is"
                f" {theirs.get(i)!r} there and {ours.get(i)!r} here; give a model of the same"
                " family, or leave --draft out",
            )


def generation_defaults(path: Path) -> Sampling:
    """Default sampling parameters, from generation_config.json. A value that is not a number or
    out of range is ignored, with a warning."""
    config = read_json(path / "generation_config.json")
    values: Json = {}
    for name, (kind, least, most) in LIMITS.items():
        value: Any = config.get(name)
        if type(value) in (int, kind) and least <= value <= most:
            values[name] = value
        elif value is not None:
            log.warning("%s: %s = %s is out of range and ignored", path, name, shown(value))
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    return Sampling(**values)


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> list[int]:
    """Token ids of plain text, with the model's begin token if `special`, yet never twice."""
    bos = tokenizer.bos_token
    if bos and text.startswith(bos):
        special = False
    return list(tokenizer.encode(text, add_special_tokens=special))


def check_length(tokenizer: Tokenizer, text: str, context: int, field: str) -> None:
    """Raises TooLong, naming `field`, for a text far longer than `context` tokens, estimated from
    its beginning: encoding all of it would take a second or two per megabyte."""
    size = context * FIRST_CHARS
    while size < len(text):
        n = len(tokenizer.encode(text[:size].replace(MARK, ""), add_special_tokens=False))
        if n > context + FIRST_CHARS:  # its last token may be cut
            tokens = n * len(text) // size
            why = f"{too_long(tokens, context)}; estimated from its beginning; shorten {field}"
            error = TooLong(field, why, "context_length_exceeded")
            error.tokens = tokens
            raise error
        size *= 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """Canonical messages, the tools that may be called, and further variables of the template.
    `continued`: the last message is an answer to continue. `images` stand in the messages by their
    markers."""

    messages: Messages
    tools: Tools = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    images: Images = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the template renders it, with the marks of control_tokens.py and the
    markers of images, and its token ids. `thinking`: its end opens the reasoning; False: it closes
    it; None: the answer may open it."""

    text: str
    ids: list[int]
    thinking: bool | None
    images: tuple[ImageSpan, ...] = ()


def conversation_of(
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    history: History,
) -> Conversation:
    """A client's request in canonical form. Its calls are as the model wrote them, unless the
    client changed more than to add defaults. Raises RejectedRequest."""
    for name in options:
        if name in RESERVED:
            why = f"chat_template_kwargs.{name} is set by the server; leave it out"
            raise RejectedRequest("chat_template_kwargs", why)
    plain = canonical(messages)
    for message in plain:
        for call in message.get("tool_calls", ()):
            original, function = history.call(call.get("id", "")), call["function"]
            if original and original.name == function["name"]:
                arguments = as_object(original.arguments)
                if arguments.items() <= function["arguments"].items():
                    function["arguments"] = arguments
    return Conversation(plain, check_tools(tools), options)


def render(
    tokenizer: Tokenizer,
    conversation: Conversation,
    history: History,
    generation_prompt: bool = True,
    context: int = 0,
    field: str = "messages",
    image_reader: ImageReader | None = None,
) -> RenderedPrompt:
    """The prompt of a conversation, with `generation_prompt` up to the assistant's turn. Raises
    RejectedRequest for the messages, and TooLong for `field` if the text is far longer than
    `context` tokens; 0: any length. `image_reader`: of a model that sees images."""
    if context:  # before rendering, which may be tried in several forms
        texts = [m["content"] for m in conversation.messages if m["role"] != "assistant"]
        check_length(tokenizer, "".join(texts), context, field)
    text = _render(tokenizer, conversation, generation_prompt)
    if context:
        check_length(tokenizer, text, context, field)
    encode_text = partial(encode_rendered, tokenizer)
    images: tuple[ImageSpan, ...] = ()
    if conversation.images and image_reader:
        encoder = ImageEncoder(image_reader, conversation.images)
        encoder.check(text, context, field)
        ids = history.encode(text, lambda piece: encoder.encode(piece, encode_text))
        images = encoder.spans(ids)
    else:
        ids = history.encode(text, encode_text)
    end, form = text.rstrip(), format_of(tokenizer)
    decided = form.think_start and end.endswith((form.think_start, form.think_end))
    thinking = end.endswith(form.think_start) if decided else None
    return RenderedPrompt(text, ids, thinking, images)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    generation_prompt: bool = True,
    /,
    **options: Any,
) -> list[int]:
    """Token ids of messages alone. `options` are variables for the template."""
    history = History()
    conversation = conversation_of(messages, None, options, history)
    return render(tokenizer, conversation, history, generation_prompt).ids


def remember(
    tokenizer: Tokenizer,
    conversation: Conversation,
    before: RenderedPrompt,
    answer: Mapping[str, Any],
    ids: Sequence[int],
    history: History,
) -> None:
    """Keep the tokens of an `answer`, a canonical message that ended by itself."""
    messages = [*conversation.messages, dict(answer)]
    try:
        after = _render(tokenizer, replace(conversation, messages=messages), False)
    except RejectedRequest:  # the next turn will encode this answer again
        return
    end = token_bytes(tokenizer, ids[-1]).decode("utf-8", "replace")
    rendered = after[len(before.text) :].replace(MARK, "")
    if str(answer.get("reasoning_content", "")).strip() in rendered:  # else the template hides it
        history.keep_turn(before.text, after, ids, end)


@lru_cache(16)
def rewrites_of(tokenizer: Tokenizer) -> tuple[Rewrite, ...]:
    """The rewrites that a tokenizer's template needs."""
    options = {"tools": PROBE_TOOLS} if template_reads(tokenizer, "tools") else {}
    render = partial(apply_template, tokenizer, add_generation_prompt=True, **options)
    return rewrites_for(render, format_of(tokenizer))


def _render(tokenizer: Tokenizer, conversation: Conversation, generation_prompt: bool) -> str:
    """The template's text. If the template refuses the messages, more rewrites are tried, then no
    `reasoning_effort`, for which it may know other words."""
    if not tokenizer.has_chat_template:
        why = "cannot be rendered: the model has no chat template; use /v1/completions"
        raise rejected("messages", why)
    reason, variants = "", [conversation]
    if conversation.options.get("reasoning_effort", "none") != "none":
        others = {k: v for k, v in conversation.options.items() if k != "reasoning_effort"}
        variants.append(replace(conversation, options=others))
    if not conversation.tools and template_reads(tokenizer, "tools"):  # some templates need a list
        variants.append(replace(conversation, options={**conversation.options, "tools": []}))
    # The last reason is for the unchanged messages.
    for variant, rewrites in product(variants, (rewrites_of(tokenizer), GENTLE, ())):
        try:
            return _apply(tokenizer, variant, rewrites, generation_prompt)
        except Exception as error:  # a template raises whatever its author chose
            reason = in_json_words(str(error)).strip() or type(error).__name__
    why = f"do not fit: the model's chat template refuses them: {reason}; change roles or order"
    raise rejected("messages", why)


def _apply(
    tokenizer: Tokenizer,
    conversation: Conversation,
    rewrites: Sequence[Rewrite],
    generation_prompt: bool,
) -> str:
    """The text of rewritten messages, in which no client's text is a control token. Tools become
    text if the template has none."""
    special = control_tokens_of(tokenizer)
    messages = []
    for turn in conversation.messages:
        pattern = special.answers if turn["role"] == "assistant" else special.begins
        message = {**marked(turn, pattern), "role": turn["role"]}
        if is_harmony(tokenizer) and message.get("tool_calls") and message["content"]:
            message.pop("reasoning_content", None)  # a call's turn has one of them
        messages.append(message)
    tools = marked(conversation.tools, special.begins)
    options = marked(conversation.options, special.begins)
    if not template_reads(tokenizer, "tools"):
        messages = tools_as_text(messages, tools, format_of(tokenizer))
    elif tools:
        options["tools"] = tools
    options["add_generation_prompt"] = generation_prompt and not conversation.continued
    if conversation.continued:
        options["continue_final_message"] = True
    turns = apply_rewrites(messages, rewrites, format_of(tokenizer))
    return clean(apply_template(tokenizer, turns, **options))
