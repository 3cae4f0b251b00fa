"""The bodies of OpenAI's /v1/chat/completions and /v1/completions.

Rule: where the body says nothing, a sampling setting is None and the model's own default applies.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mlxspec.server.body import FIRST, MAX_STOPS, Fraction, Items, Refused, Stops, Strict, Token
from mlxspec.types import MAX_CHOICES, MAX_TOP_LOGPROBS

MAX_PROMPTS = 32
MAX_BIASES = 1024
MAX_PARTS = 1024

AT_CHAT = "send it to /v1/chat/completions"
RENDER = "render the text yourself and send it to /v1/completions"
TEMPLATE = "send what the model's template reads as chat_template_kwargs"
SAMPLER = "use top_k, top_p or min_p instead"
GRAMMAR = "send response_format or grammar to /v1/chat/completions"

# Unsupported fields that would change the prompt of a conversation.
RENDERING: Refused = {
    "functions": ([], "send them as tools"),
    "system": (None, "send it as a message with the role system"),
    "documents": ([], "put their text into a message"),
    "truncate_prompt_tokens": (None, "shorten the prompt yourself"),
    "continue_final_message": (False, RENDER),
    "add_generation_prompt": (True, RENDER),
    "chat_template": (None, RENDER),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning"), (None, TEMPLATE)),
}
# These and the unsupported fields that would change the answer.
REFUSED: Refused = {
    **RENDERING,
    "tools": ([], AT_CHAT),
    "response_format": ({"type": "text"}, AT_CHAT),
    "grammar": (None, AT_CHAT),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs".split(),
        (None, GRAMMAR),
    ),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), (None, "send max_tokens instead")),
    "min_tokens": (0, "ban the end token with logit_bias instead"),
    "bad_words": ([], "ban their tokens with logit_bias instead"),
    "allowed_token_ids": ([], "use logit_bias instead"),
    "use_beam_search": (False, "beam search is not supported; leave it out"),
    "repeat_penalty": (1, "send repetition_penalty instead"),
    "typical_p": (1, SAMPLER),
    **dict.fromkeys(("mirostat", "xtc_probability", "dry_multiplier"), (0, SAMPLER)),
    "adapters": (None, "serve the model with its adapter instead"),
    "modalities": (["text"], "answers are text; leave it out"),
    "web_search_options": (None, "this server cannot search; leave it out"),
    "suffix": ("", "text is completed at its end only; leave it out"),
    "echo": (False, "only /v1/completions repeats the prompt"),
    "best_of": (1, "answers are not ranked; send n instead"),
    "prompt_logprobs": (0, "only generated tokens have log-probabilities; leave it out"),
    "include_stop_str_in_output": (False, "append the stop string yourself"),
}

Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class JsonSchema(Strict):
    """The schema of an answer. `strict` makes no difference: an answer always matches it."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    value: Any = Field(alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing; send {'name': ..., 'schema': {...}}")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # has no effect


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    """What the client expects the answer to be; its tokens are tried as drafts."""

    type: Literal["content"]
    content: Annotated[
        list[TextPart], FIRST, Field(max_length=MAX_PARTS), BeforeValidator(_text_parts)
    ]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class Common(Strict):
    """The fields that all of OpenAI's endpoints share."""

    refused: ClassVar[Refused] = REFUSED

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_tokens: Count | None = None
    stop: Annotated[Stops, BeforeValidator(_stop_list)] = []
    stop_token_ids: Annotated[list[Token], FIRST, Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    prediction: Prediction | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"holds {len(value)} entries; send at most {MAX_BIASES}")
        return value


class Chat(Common):
    """`alternatives`, here and below, is the number of top log-probabilities for each token; None
    if none are wanted."""

    messages: Annotated[Items, Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    grammar: str | None = None  # in llguidance's Lark form

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value in ("auto", "none", "required"):
            return value
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("send auto, none, required or {'type': 'function', 'function': {...}}")
        return {"name": function["name"]}

    @property
    def limit(self) -> int | None:
        given = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        return min(given, default=None)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Completion(Common):
    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Count | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        """A list of prompts, each a string or token ids; a single prompt becomes a list of one."""
        prompts = [value]
        if isinstance(value, list) and value and not _is_ids(value):
            prompts = value
        if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
            raise ValueError("send a string, a list of token ids, or a list of either")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"holds {len(prompts)} prompts; send at most {MAX_PROMPTS}")
        return prompts

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


def _is_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(x) is int and 0 <= x < 2**31 for x in value)
