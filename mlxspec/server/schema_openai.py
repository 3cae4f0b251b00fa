"""What OpenAI's endpoints take, field by field: strict types, ranges, and the fate of every other field.

Rule: nothing is silently ignored. A field is used, or harmless for the reason given here, or refused because
it would change the answer; what nobody knows is reported back.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from mlxspec.server.errors import ApiError, unfit
from mlxspec.types import MAX_CHOICES, MAX_TOP_LOGPROBS, shown

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_PROMPTS = 32
MAX_BIASES = 1024
MAX_PARTS = 1024
INT64 = 2**63

# Accepted without effect. None of them could change the text of an answer.
HARMLESS = {
    "user": "who asks makes no difference here",
    "safety_identifier": "who asks makes no difference here",
    "store": "nothing is ever stored",
    "metadata": "it goes with storing",
    "parallel_tool_calls": "there are no tools to call",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache finds shared prompts by itself",
    "prompt_cache_retention": "the prefix cache keeps what fits",
}
HARMLESS_INSIDE = {
    "stream_options": {"include_obfuscation"},
    "messages[]": {"role", "content", "name", "reasoning_content", "refusal", "id", "status", "annotations"}
    | {"tool_calls", "function_call", "audio", "tool_call_id"},  # refused where they hold something
    "messages[].content[]": {"type", "text", "refusal", "cache_control", "annotations"},
    "prediction": {"type", "content"},
    "prediction.content[]": {"type", "text"},
}

Refusals = dict[str, tuple[tuple[Any, ...], str]]

# Would change the answer, and the endpoint has no such field: the values that ask for nothing, and the mend.
REFUSED: Refusals = {
    **dict.fromkeys(("tools", "functions"), (([],), "tools are not supported; leave it out")),
    **dict.fromkeys(
        ("tool_choice", "function_call"), (("none", "auto"), "tools are not supported; leave it out")
    ),
    "response_format": (({"type": "text"},), "the only format is {'type': 'text'}; leave it out"),
    "modalities": ((["text"],), "answers are text; send ['text'] or leave it out"),
    "audio": ((), "answers are text; leave it out"),
    "web_search_options": ((), "this server searches nothing; leave it out"),
    "verbosity": (("medium",), "the model has no such setting; ask for it in a message"),
    "suffix": (("",), "text is completed at its end only; leave it out"),
    "min_tokens": ((0,), "an answer may be short; ban the end token with logit_bias instead"),
    "bad_words": (([],), "ban their tokens with logit_bias instead"),
    "allowed_token_ids": (([],), "use logit_bias instead"),
    "use_beam_search": ((False,), "beam search is not supported; leave it out"),
    "length_penalty": ((1, 1.0), "beam search is not supported; leave it out"),
    "prompt_logprobs": ((0,), "only generated tokens have log-probabilities; leave it out"),
    "include_stop_str_in_output": ((False,), "append the stop string yourself"),
    "skip_special_tokens": ((False,), "special tokens, but the last, are shown as text; leave it out"),
    "draft_model": ((), "the server chooses how it drafts; leave it out"),
    "adapters": ((), "serve the model with its adapter instead"),
    "messages": ((), "send it to /v1/chat/completions"),
    "prompt": ((), "send it to /v1/completions"),
    "system": ((), "send it as a message with the role system"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), ((), "send max_tokens instead")),
    "repeat_penalty": ((1, 1.0), "send repetition_penalty instead"),
    "typical_p": ((1, 1.0), "use top_k, top_p or min_p instead"),
    "echo": ((False,), "an answer holds what is new; prepend the prompt yourself"),
    "best_of": ((1,), "nothing is ranked; ask for n answers"),
    "top_logprobs": ((0,), "send their number as logprobs"),
    "continue_final_message": ((False,), "render the text yourself and send it to /v1/completions"),
    "add_generation_prompt": ((True,), "render the text yourself and send it to /v1/completions"),
    "chat_template": ((), "render the text yourself and send it to /v1/completions"),
    "documents": (([],), "put their text into a message"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    **dict.fromkeys(
        ("thinking", "enable_thinking", "reasoning", "reasoning_effort", "chat_template_kwargs"),
        (({},), "send to /v1/chat/completions what the model's template reads, as chat_template_kwargs"),
    ),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs grammar".split(),
        ((), "constrained answers are not supported; leave it out"),
    ),
    **dict.fromkeys(
        ("mirostat", "xtc_probability", "dry_multiplier"), ((0, 0.0), "use top_k, top_p or min_p instead")
    ),
}
# Those that would change the tokens of messages.
RENDERING = {
    name: REFUSED[name]
    for name in "tools functions continue_final_message chat_template documents truncate_prompt_tokens"
    " thinking enable_thinking reasoning system".split()
}

# What is wrong with a value and the mend, by pydantic's names for it.
WRONG = {
    "int_type": "is not a whole number; send one",
    "int_from_float": "is not a whole number; send one",
    "float_type": "is not a number; send one",
    "finite_number": "is out of range; send a finite number",
    "bool_type": "is neither true nor false; send one of them",
    "string_type": "is not a string; send one",
    "list_type": "is not a list; send one",
    "dict_type": "is not an object; send one",
    "model_type": "is not an object; send one",
    "literal_error": "is not supported; send {expected}",
    "too_short": "is empty; send {min_length} at least",
    "too_long": "holds more than {max_length}; leave some out",
    "greater_than_equal": "is too small; send {ge} or more",
    "less_than_equal": "is too large; send {le} or less",
    "less_than": "is too large; send less than {lt}",
}

OBJECT = TypeAdapter(dict[str, Any])
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """What the client expects the answer to be."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["content"]
    content: Annotated[list[Part], Field(max_length=MAX_PARTS)]

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ValueError("is neither a string nor a list of text parts; send one of these")
        return value

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class Common(BaseModel):
    """What both endpoints take. None, or no such field: the model's own setting, or the effect is off.

    `source` is the field that the prompt comes from, `limit` the most tokens to generate, `alternatives` the
    number of top log-probabilities per token, None for no log-probabilities.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refuses: ClassVar[Refusals] = REFUSED

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    prediction: Prediction | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise ValueError("is neither a string nor a list of strings; send one of these")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"holds {len(stops)} strings; send {MAX_STOPS} at most")
        if not all(0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise ValueError(f"holds an empty or overlong string; send 1 to {MAX_STOP_CHARS} characters each")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(
                    f"has the key {key[:40]!r}; keys are token ids in digits, see POST /tokenize"
                )
        return value


class Chat(Common):
    api: ClassVar[Literal["chat"]] = "chat"
    prefix: ClassVar[str] = "chatcmpl"
    source: ClassVar[str] = "messages"

    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        given = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        return min(given, default=None)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Completion(Common):
    api: ClassVar[Literal["completions"]] = "completions"
    prefix: ClassVar[str] = "cmpl"
    source: ClassVar[str] = "prompt"

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        """A string, token ids, or a list of either -> always a list of them."""
        some = value if isinstance(value, list) and value and not is_ids(value) else [value]
        if not all(isinstance(prompt, str) or is_ids(prompt) for prompt in some):
            raise ValueError("must be a string, a list of token ids, or a list of either; send one of these")
        if len(some) > MAX_PROMPTS:
            raise ValueError(f"holds {len(some)} prompts; send {MAX_PROMPTS} at most in one request")
        return some

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Tokenize(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    refuses: ClassVar[Refusals] = RENDERING

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any], Field(min_length=1)] | None = None
    add_special_tokens: bool = True  # of a prompt
    add_generation_prompt: bool = True  # of messages, as are those below
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    refuses: ClassVar[Refusals] = {}

    model: str | None = None
    tokens: list[Token]


Body = TypeVar("Body", Chat, Completion, Tokenize, Detokenize)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int and x >= 0 for x in value)


def parse(kind: type[Body], data: bytes) -> tuple[Body, list[str]]:
    """The checked body, and the names of the fields that nobody knows. Raises ApiError 400."""
    try:
        raw = OBJECT.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = first["ctx"]["error"] if first["type"] == "json_invalid" else "it is another value"
        message = f"the body is no JSON object: {why}; send one"
        raise ApiError(400, message, code="invalid_json") from error
    given = {name: value for name, value in raw.items() if value is not None}
    for name, value in given.items():
        neutral, mend = kind.refuses.get(name, ((value,), ""))
        if name not in kind.model_fields and not any(type(v) is type(value) and v == value for v in neutral):
            raise unfit(name, f"{name} = {shown(value)} is not supported: {mend}", "unsupported_parameter")
    try:
        return kind.model_validate(given), list(dict.fromkeys(unknown(kind, given)))
    except ValidationError as error:
        raise _refusal(error) from error


def unknown(kind: type[Body], given: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields that are neither used, nor harmless, nor refused; inner ones as `messages[].name`."""
    for name in given:
        if name not in kind.model_fields and name not in HARMLESS and name not in kind.refuses:
            yield name
    if isinstance(options := given.get("stream_options"), dict):
        known = {*StreamOptions.model_fields, *HARMLESS_INSIDE["stream_options"]}
        yield from (f"stream_options.{name}" for name in options if name not in known)
    if isinstance(predicted := given.get("prediction"), dict) and "prediction" in kind.model_fields:
        yield from _inside("prediction", predicted)
        yield from _inside_parts("prediction.content[]", predicted.get("content"))
    for message in given["messages"] if isinstance(given.get("messages"), list) else ():
        if isinstance(message, dict):
            yield from _inside("messages[]", message)
            yield from _inside_parts("messages[].content[]", message.get("content"))


def _inside(where: str, given: Mapping[str, Any]) -> Iterator[str]:
    return (f"{where}.{name}" for name in given if name not in HARMLESS_INSIDE[where])


def _inside_parts(where: str, parts: Any) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        yield from _inside(where, part if isinstance(part, dict) else {})


def _refusal(error: ValidationError) -> ApiError:
    """OpenAI's error for the first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    where = ""
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if first["type"] == "missing":
        return unfit(where, f"{where} is missing; send it")
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    # What a validator of ours said may hold the client's own braces.
    why = WRONG[first["type"]].format(**first.get("ctx", {})) if first["type"] in WRONG else said
    return unfit(where, f"{where} = {shown(first['input'])} {why}")
