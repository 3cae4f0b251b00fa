"""From what a client wrote to token ids: the tokenizer, the chat template, the model's own sampling defaults.

Rule: one conversation renders to the same tokens however it was spelled (a one-part list is its string), and
it is rewritten only where the model's template refuses it, always in the same way.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_wrapper

from mlxspec.types import Unfit, shown

log = logging.getLogger("mlxspec")

Tokenizer = TokenizerWrapper  # the name that the server knows it by
Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant")
KEPT = ("name", "reasoning_content")  # besides role and content, what a template may read of a message
OURS = frozenset(  # what a template's caller decides, not a request
    "messages conversation chat_template tokenize add_generation_prompt continue_final_message padding"
    " truncation max_length return_dict return_tensors return_assistant_tokens_mask tokenizer_kwargs"
    " processor_kwargs".split()
)


class Refused(Unfit):
    """A prompt that cannot be rendered. `field` names what of the request is at fault: "messages[2].role"."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Defaults:
    """How the model wants to be sampled where a request is silent.

    From generation_config.json. What the file does not say: temperature 1.0, as OpenAI's API has it, and
    every filter and penalty off. `do_sample: false` means temperature 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


LIMITS = {  # of the defaults above, inclusive
    "temperature": (0, 2),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, its end tokens taken from generation_config.json, else config.json.

    Raises Unfit where there is none that can be used.
    """
    files = [_json(path / name) for name in ("generation_config.json", "config.json")]
    eos = files[0].get("eos_token_id") or files[1].get("eos_token_id")
    try:
        tokenizer: Tokenizer = load_wrapper(path, None, eos_token_ids=eos)  # type: ignore[no-untyped-call]
        tokenizer.model_max_length = 1 << 62  # the context is checked by us; its warning would mislead
        return tokenizer
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise Unfit(f"{path} has no usable tokenizer: {error}; give a complete model directory") from error


def check_draft(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Raises Unfit where the two do not give the same tokens the same ids; `names` are the models'. What one
    has beyond the other's last id does no harm: it is never drafted, never accepted, or read as another."""
    own, other = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    for i in range(min(max(own), max(other)) + 1):
        if own.get(i) != other.get(i):
            raise Unfit(
                f"draft = {names[1]} has another vocabulary than {names[0]}: token {i} is {other.get(i)!r}"
                f" there and {own.get(i)!r} here ({len(other)} and {len(own)} tokens); give a model of the"
                " same family, or leave --draft out"
            )


def generation_defaults(path: Path) -> Defaults:
    """What generation_config.json of a model directory says, see `Defaults`. A value that is no number or is
    out of range is left out, with a warning."""
    found = _json(path / "generation_config.json")
    values: dict[str, Any] = {}
    for row in fields(Defaults):
        value = found.get(row.name)
        if value is None:
            continue
        low, high = LIMITS[row.name]
        number = isinstance(value, int if row.name == "top_k" else (int, float))
        if number and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high:
            values[row.name] = value if row.name == "top_k" else float(value)
        else:
            log.warning(
                "generation_config.json: %s = %r is not used; it must be %s to %s", row.name, value, low, high
            )
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    return Defaults(**values)


def encode(tokenizer: Tokenizer, text: str, special: bool = True) -> list[int]:
    """Token ids of plain text, with the model's begin token if `special`, yet never twice."""
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=special and not begun))


def template_reads(tokenizer: Tokenizer, name: str) -> bool:
    """Whether the chat template may look at the variable `name`. A template in code is taken to do so."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template]
    return any(text is None or name in text for text in texts)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], generation_prompt: bool = True, /, **template: Any
) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to speak. `template` goes to the template.

    Where the template refuses the messages as they are, they are tried merged, then with the system text in
    the first user message. Raises Refused, naming the message.
    """
    if not tokenizer.has_chat_template:
        raise Refused(
            "messages", "messages cannot be rendered: the model has no chat template; use /v1/completions"
        )
    if taken := sorted(OURS & set(template)):
        raise Refused(
            "chat_template_kwargs", f"chat_template_kwargs.{taken[0]} is set by the server; leave it out"
        )
    apply: Callable[..., list[int]] = tokenizer.apply_chat_template
    plain = canonical(messages)
    tried: list[Messages] = []
    first = ""
    for rewrite in REWRITES:
        turns = rewrite(plain)
        if turns in tried:
            continue
        tried.append(turns)
        try:
            return list(apply(turns, add_generation_prompt=generation_prompt, **template))
        except Exception as error:  # a template raises whatever its author chose
            first = first or str(error).strip() or type(error).__name__
    raise Refused(
        "messages", f"messages: the model's chat template refuses them: {first}; change their roles or order"
    )


def canonical(messages: Sequence[Any]) -> Messages:
    """Messages with a known role and a string as content. Raises Refused for what this server cannot read."""
    if not messages:
        raise Refused("messages", "messages = []: send one message at least")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Refused(at, f"{at} = {shown(message)} is not an object; send role and content")
    role = message.get("role")
    if role in ("tool", "function"):
        raise Refused(
            f"{at}.role", f"{at}.role = {shown(role)}: tools are not supported; send the result as user text"
        )
    if role not in ROLES:
        raise Refused(
            f"{at}.role", f"{at}.role = {shown(role)} is not a role; send one of {', '.join(ROLES)}"
        )
    for key in ("tool_calls", "function_call", "audio"):
        if message.get(key):
            raise Refused(f"{at}.{key}", f"{at}.{key} is not supported; send what was said as content")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    plain = {"role": "system" if role == "developer" else role, "content": _text(content, f"{at}.content")}
    for key in KEPT:
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise Refused(f"{at}.{key}", f"{at}.{key} = {shown(value)} is not text; send a string")
            plain[key] = value
    return plain


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(at, f"{at} = {shown(content)} is not text; send a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            what = f"a part of type {shown(kind)}" if kind else f"{shown(part)}"
            raise Refused(
                f"{at}[{i}]",
                f"{at}[{i}] is {what}; this server reads text only: send {{'type': 'text', 'text': ...}}",
            )
        texts.append(text)
    return "".join(texts)


def _as_they_are(messages: Messages) -> Messages:
    return messages


def _merged(messages: Messages) -> Messages:
    """One system message at most, in front; a later one is user text; no role speaks twice in a row."""
    turns: Messages = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and any(turn["role"] != "system" for turn in turns):
            role, content = "user", f"<system>\n{content}\n</system>"
        if turns and turns[-1]["role"] == role:
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{content}"}
        else:
            turns.append({**message, "role": role, "content": content})
    return turns


def _without_system(messages: Messages) -> Messages:
    """Merged, for a template that knows no system role: its text opens the first user message."""
    turns = _merged(messages)
    if turns[0]["role"] != "system":
        return turns
    return _merged([{**turns[0], "role": "user"}, *turns[1:]])


REWRITES: tuple[Callable[[Messages], Messages], ...] = (_as_they_are, _merged, _without_system)


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
