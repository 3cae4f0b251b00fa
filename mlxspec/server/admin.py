"""The bodies of the endpoints that load and unload models and that count tokens."""

from typing import Annotated, ClassVar

from pydantic import Field

from mlxspec.server.body import FIRST, Items, Strict, Token
from mlxspec.server.errors import Json
from mlxspec.server.openai.schema import RENDERING


class Load(Strict):
    model: str
    pin: bool | None = None


class Unload(Strict):
    model: str
    force: bool = False


class Tokenize(Strict):
    """Of a prompt or of messages; `add_special_tokens` belongs to the prompt, what follows it to
    the messages."""

    unsupported: ClassVar[Json] = RENDERING

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items, Field(min_length=1)] | None = None
    tools: Items | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None


class Detokenize(Strict):
    model: str | None = None
    tokens: Annotated[list[Token], FIRST]
