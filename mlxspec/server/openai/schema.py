"""What OpenAI's endpoints take, field by field: strict types, ranges, and the fate of every other
field.

Rule: a field is used, or it is in the tables of `fields`, or it is reported back.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from mlxspec.server import fields
from mlxspec.server.errors import ApiError, unfit
from mlxspec.types import MAX_CHOICES, MAX_TOP_LOGPROBS, shown

OBJECT = TypeAdapter(dict[str, Any])
MOST_FIELDS = 1000  # of a body: a million of them keep the event loop for seconds
MOST_VALUES = (
    1_000_000  # by its commas, those of texts too: a context has about as many tokens at most
)
INFINITE = re.compile(
    rb"[eE]\+?\d\d|\d{300}|NaN|Infinity"
)  # where a number may be none that JSON can tell
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
FIRST = Field(fail_fast=True)  # or what is wrong with each of a million would be described
Items = Annotated[list[Any], Field(max_length=fields.MAX_ITEMS)]


class Strict(BaseModel):
    """A body or an object in one: its types are taken as they are, and `refuses` says which other
    fields of a body are refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refuses: ClassVar[fields.Refusals] = {}


class JsonSchema(Strict):
    """The schema of an answer. `strict` makes no difference: an answer always keeps to it."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    body: Any = Field(alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("has no json_schema; send {'name': ..., 'schema': {...}} in it")
        return self


class StreamOptions(Strict):
    include_usage: bool | None = None


class Part(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    """What the client expects the answer to be."""

    type: Literal["content"]
    content: Annotated[list[Part], FIRST, Field(max_length=fields.MAX_PARTS)]

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


class Common(Strict):
    """What both endpoints take. None, or no such field: the model's own setting, or the effect is
    off.

    `source` is the field that the prompt comes from, `limit` the most tokens to generate,
    `alternatives` the number of top log-probabilities per token, None for no log-probabilities.
    """

    refuses: ClassVar[fields.Refusals] = fields.REFUSED

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[Token], FIRST, Field(max_length=fields.MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(
                max_length=fields.MAX_BIASES,
                json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
            ),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-fields.INT64, lt=fields.INT64)] | None = None
    prediction: Prediction | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise ValueError("is neither a string nor a list of strings; send one of these")
        if len(stops) > fields.MAX_STOPS:
            raise ValueError(f"holds {len(stops)} strings; send {fields.MAX_STOPS} at most")
        return fields.stops(stops)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_keys(cls, value: Any) -> Any:
        keys = value if isinstance(value, dict) else ()
        if len(keys) > fields.MAX_BIASES:
            raise ValueError(f"has {len(keys)} entries; send {fields.MAX_BIASES} at most")
        for key in keys:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(
                    f"has the key {key[:40]!r}; keys are token ids in digits, see POST /tokenize"
                )
        return value


class Chat(Common):
    api: ClassVar[Literal["chat"]] = "chat"
    prefix: ClassVar[str] = "chatcmpl"
    source: ClassVar[str] = "messages"

    messages: Annotated[Items, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None  # Lark

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value in (None, "auto", "none", "required"):
            return value
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                "is not a choice; send auto, none, required, or {'type': 'function', 'function': {'name':"
                " ...}}"
            )
        return {"name": function["name"]}

    @property
    def choice(self) -> Any:
        return self.tool_choice or "auto"

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
            raise ValueError(
                "must be a string, a list of token ids, or a list of either; send one of these"
            )
        if len(some) > fields.MAX_PROMPTS:
            raise ValueError(
                f"holds {len(some)} prompts; send {fields.MAX_PROMPTS} at most in one request"
            )
        return some

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Tokenize(Strict):
    refuses: ClassVar[fields.Refusals] = fields.RENDERING

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items, Field(min_length=1)] | None = None
    tools: Items | None = None
    add_special_tokens: bool = True  # of a prompt
    add_generation_prompt: bool = True  # of messages, as are those below
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Strict):
    model: str | None = None
    tokens: Annotated[list[Token], FIRST]


class Load(Strict):
    model: str
    pin: bool | None = None


class Unload(Strict):
    model: str
    force: bool = False


Body = TypeVar("Body", bound=Strict)


def is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(x) is int and 0 <= x < 2**31 for x in value)
    )


def parse(kind: type[Body], data: bytes) -> tuple[Body, list[str]]:
    """The checked body, and the names of the fields that nobody knows. Raises ApiError 400."""
    if (values := data.count(b",")) > MOST_VALUES:
        raise unfit("body", f"the body has {values} commas; send {MOST_VALUES} at most")
    try:
        raw = OBJECT.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = first["ctx"]["error"] if first["type"] == "json_invalid" else "it is another value"
        message = f"the body is no JSON object: {why}; send one"
        raise ApiError(400, message, code="invalid_json") from error
    if len(raw) > MOST_FIELDS:
        raise unfit(
            "body", f"the body has {len(raw)} fields; send {MOST_FIELDS} at most", "invalid_json"
        )
    given = {name: value for name, value in raw.items() if value is not None}
    for name, value in given.items():
        neutral, mend = kind.refuses.get(name, ((value,), ""))
        if name not in kind.model_fields and not any(
            type(v) is type(value) and v == value for v in neutral
        ):
            raise unfit(
                name, f"{name} = {shown(value)} is not supported: {mend}", "unsupported_parameter"
            )
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error
    for name, value in given.items() if INFINITE.search(data) else ():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise unfit(
                name, f"{name} = {shown(value)} has a number out of range; send finite ones"
            ) from error
    return body, list(dict.fromkeys(unknown(kind, given)))


def unknown(kind: type[Body], given: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields that are neither used, nor harmless, nor refused; inner ones as
    `messages[].name`."""
    for name in given:
        if (
            name not in kind.model_fields
            and name not in fields.HARMLESS
            and name not in kind.refuses
        ):
            yield name
    if isinstance(options := given.get("stream_options"), dict):
        known = {*StreamOptions.model_fields, *fields.HARMLESS_INSIDE["stream_options"]}
        yield from (f"stream_options.{name}" for name in options if name not in known)
    if isinstance(predicted := given.get("prediction"), dict) and "prediction" in kind.model_fields:
        yield from _inside("prediction", predicted)
        yield from _inside_parts("prediction.content[]", predicted.get("content"))
    if "tools" in kind.model_fields and isinstance(tools := given.get("tools"), list):
        for tool in (each for each in tools if isinstance(each, dict)):
            yield from _inside("tools[]", tool)
            function = tool.get("function")
            yield from _inside("tools[].function", function if isinstance(function, dict) else {})
    if "response_format" in kind.model_fields and isinstance(
        form := given.get("response_format"), dict
    ):
        yield from _inside("response_format", form)
    for message in given["messages"] if isinstance(given.get("messages"), list) else ():
        if isinstance(message, dict):
            yield from _inside("messages[]", message)
            yield from _inside_parts("messages[].content[]", message.get("content"))


def _inside(where: str, given: Mapping[str, Any]) -> Iterator[str]:
    return (f"{where}.{name}" for name in given if name not in fields.HARMLESS_INSIDE[where])


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
    why = (
        fields.WRONG[first["type"]].format(**first.get("ctx", {}))
        if first["type"] in fields.WRONG
        else said
    )
    return unfit(where, f"{where} = {shown(first['input'])} {why}")
