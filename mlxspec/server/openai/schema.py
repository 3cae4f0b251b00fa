"""The bodies of OpenAI's /v1/chat/completions and /v1/completions.

Rule: a sampling setting that is missing is None, and the model's own default applies.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, TypeAdapter, model_validator

from mlxspec.server.body import (
    FIRST,
    MAX_STOPS,
    TEXT_PART,
    Count,
    Fraction,
    Items,
    Queued,
    Stops,
    Strict,
    Token,
)
from mlxspec.server.chat_request import OBJECT, AnswerFormat
from mlxspec.server.content import READABLE
from mlxspec.server.errors import Json, invalid
from mlxspec.text.messages import as_list
from mlxspec.types import MAX_CHOICES, MAX_TOP_LOGPROBS

MAX_PROMPTS = 32
MAX_INPUTS = 2048
MAX_BIASES = 1024
MAX_PARTS = 1024

# Fields that are not supported and would change the prompt of a conversation.
RENDERING: Json = {
    "continue_final_message": False,
    "add_generation_prompt": True,
    **dict.fromkeys(
        "chat_template thinking enable_thinking reasoning system documents functions"
        " truncate_prompt_tokens context template".split(),
    ),
}
NO_EFFECT_UNSET = (
    "messages prompt conversation tools mcp_servers container suffix chat_template_kwargs"
    " reasoning_effort top_logprobs prompt_logprobs output_format grammar guided_json guided_regex"
    " guided_choice guided_grammar structured_outputs mirostat xtc_probability dry_multiplier"
    " min_tokens random_seed bad_words allowed_token_ids max_new_tokens web_search_options adapters"
).split()
# These and fields that would change the answer, in all APIs, unless a body declares the field.
UNSUPPORTED: Json = {
    **RENDERING,
    **dict.fromkeys(NO_EFFECT_UNSET),
    "background": False,
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "logprobs": False,
    "response_format": {"type": "text"},
    "typical_p": 1,
    "use_beam_search": False,
    "best_of": 1,
    "modalities": ["text"],
    "include_stop_str_in_output": False,
}

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = dict[Annotated[Token, Field(strict=False)], Bias]
Budget = Annotated[int, Field(ge=0)]  # of tokens
Tops = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]  # alternatives for each token


Ids = Annotated[list[Token], FIRST, Field(min_length=1)]
IDS = TypeAdapter(Ids)


def _listed_ids(value: Any) -> Any:
    match value:
        case [int(), *_]:  # checked here, so that an error has the place in the client's list
            return [IDS.validate_python(value, strict=True)]
    return value


ONE_OR_MORE = BeforeValidator(_listed_ids)  # token ids become a list of one prompt


def _unset(value: Any) -> Any:
    return None if value == -1 else value


UNSET = BeforeValidator(_unset)  # -1 means unset, as for Ollama, llama.cpp and LM Studio


def _bounded(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"send at most {MAX_BIASES} entries")
    return value


class JsonSchema(Strict):
    """The schema of an answer. `strict` makes no difference: an answer always matches it."""

    name: str | None = None
    description: str | None = None
    strict: bool = True
    value: Any = Field(default=None, alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema = JsonSchema()
    value: Any = Field(default=None, alias="schema")  # here too, as llama.cpp has it


class StreamOptions(Strict):
    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: bool = False  # has no effect


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    """What the client expects the answer to be; its tokens are tried as drafts."""

    type: Literal["content"]
    content: Annotated[list[TextPart], FIRST, Field(max_length=MAX_PARTS), TEXT_PART]


class Common(Queued):
    """The fields of all endpoints that generate. `alternatives`, here and below, is the number of
    top log-probabilities for each token; None if none are wanted."""

    unsupported: ClassVar[Json] = UNSUPPORTED

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False
    max_tokens: Annotated[Count | None, UNSET] = None
    max_completion_tokens: Annotated[Count | None, UNSET] = None
    max_output_tokens: Annotated[Count | None, UNSET] = None
    stop: Annotated[Stops, BeforeValidator(as_list)] = []
    stop_token_ids: Annotated[list[Token], FIRST] = Field([], max_length=MAX_STOPS)
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = Field(
        None,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Biases, BeforeValidator(_bounded)] | None = None
    seed: Annotated[Annotated[int, Field(ge=-(2**63), lt=2**63)] | None, UNSET] = None
    prediction: Prediction | None = None
    loop_guard: bool | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens to generate."""
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens

    @property
    def progress(self) -> bool:
        """Whether a stream has events that report how much of the prompt was read."""
        return self.return_progress or self.stream_options.include_progress

    @property
    def alternatives(self) -> int | None:
        return None


class Reasoning(Strict):
    """How much to reason: a word that a template may know, or a number of tokens."""

    effort: str | None = None
    max_tokens: Budget | None = None


class TemplateFields(Strict):
    """What a chat template reads beside messages and tools."""

    reasoning_effort: str | None = None
    reasoning: Reasoning = Reasoning()
    chat_template_kwargs: Json = {}

    @property
    def options(self) -> Json:
        """Variables of the template; `chat_template_kwargs` override the other fields."""
        effort = self.reasoning_effort or self.reasoning.effort
        return {"reasoning_effort": effort, **self.chat_template_kwargs}


class NamedTool(Strict):
    type: str = "function"
    full_name: str = Field(validation_alias=AliasPath("function", "name"))


def only_allowed(body: Any) -> Any:
    """The body with only the tools that its tool_choice allows, if it lists some: in a field
    `allowed_tools` or, as in the Responses API, itself."""
    match body:
        case {"tools": [*tools], "tool_choice": {"allowed_tools": allowed}}:
            pass
        case {"tools": [*tools], "tool_choice": {"type": "allowed_tools"} as allowed}:
            pass
        case _:
            return body
    match allowed:
        case {"mode": mode, "tools": [*listed]}:
            names = set(map(_name, listed))
            tools = [tool for tool in tools if _name(tool) in names]
            return {**body, "tools": tools, "tool_choice": mode}
    return body


def _name(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return ""


class Chat(Common, TemplateFields):
    messages: Annotated[Items, Field(min_length=1), READABLE]
    logprobs: bool = False
    top_logprobs: Tops | None = None
    tools: Items | None = None
    functions: Items | None = None  # the form before tools: an answer has one call at most
    function_call: Any = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    grammar: str | None = None  # in llguidance's Lark form

    @model_validator(mode="before")
    @classmethod
    def _only_tools(cls, value: Any) -> Any:
        """`functions` and `function_call` as tools and tool_choice, and allowed tools as the only
        ones."""
        match value:
            case {"functions": [_, *_] as functions}:
                tools = [{"type": "function", "function": function} for function in functions]
                choice = value.get("function_call") or "auto"
                if isinstance(choice, dict):
                    choice = {"function": choice}
                fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
                return value | fields
        return only_allowed(value)

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or (0 if self.logprobs else None)

    @property
    def format(self) -> AnswerFormat | None:
        """What the answer must be. Raises ApiError."""
        form = self.response_format
        if self.grammar is not None:
            if form.type != "text":
                raise invalid("grammar", "grammar with response_format: send one of them")
            return AnswerFormat("grammar", self.grammar, lark=True)
        if form.type == "json_object":
            return AnswerFormat("response_format", form.value or OBJECT)
        if form.type == "json_schema":
            schema = form.json_schema.value
            where = "response_format.json_schema.schema"
            return AnswerFormat(where, form.value if schema is None else schema)
        return None


class Completion(Common):
    """`prompt` is a text, or a list of texts and token ids."""

    unsupported: ClassVar[Json] = UNSUPPORTED | {"echo": False}

    prompt: Annotated[
        Annotated[list[Ids | str], FIRST, Field(min_length=1, max_length=MAX_PROMPTS)] | str,
        ONE_OR_MORE,
    ]
    suffix: str = ""  # what comes after an answer
    logprobs: Tops | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class File(Strict):
    filename: str = ""
    text: str = ""


class Fill(Completion):
    """Mistral's /v1/fim/completions: an answer comes before the suffix, even an empty one."""

    prompt: str
    input_prefix: str = ""  # what the prompt continues
    input_extra: Annotated[list[File], FIRST] = Field([], max_length=MAX_PARTS)


class Infill(Fill):
    """llama.cpp's /infill. `n_predict` -1: no limit; 0: only read the prompt, which here generates
    one token."""

    n: Literal[1] = 1
    stream: Literal[False] = False
    prompt: str = ""
    suffix: str = Field("", alias="input_suffix")
    n_predict: int = -1

    @property
    def limit(self) -> int | None:
        return None if self.n_predict < 0 else max(1, self.n_predict)


class Embeddings(Queued):
    """`input` is like a completion's prompt. `place` is the name of one input in errors."""

    place: ClassVar[str] = "input[{}]"

    input: Annotated[
        Annotated[list[Ids | str], FIRST, Field(min_length=1, max_length=MAX_INPUTS)] | str,
        ONE_OR_MORE,
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


class OneEmbedding(Embeddings):
    """Ollama's older /api/embeddings."""

    place: ClassVar[str] = "prompt"

    input: str = Field(alias="prompt")
