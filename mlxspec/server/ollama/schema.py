"""The bodies of Ollama's API, with conversations as OpenAI's chat messages.

Rule: `options` count as fields of the body, so they are checked, refused and reported like others.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from mlxspec.server.body import FIRST, MAX_ITEMS, Items
from mlxspec.server.chat_request import OBJECT, Format
from mlxspec.server.content import READABLE
from mlxspec.server.errors import Json
from mlxspec.server.openai.schema import Common
from mlxspec.text.messages import listed


def _turn(message: Any) -> Any:
    """A message of Ollama's as one of OpenAI's."""
    if not isinstance(message, dict):
        return message
    images = listed(message.get("images") or [])
    if len(images) > MAX_ITEMS:
        raise ValueError(f"it has more than {MAX_ITEMS} images; send fewer")
    parts: list[Json] = [{"type": "image"} for _ in images]
    parts.append({"type": "text", "text": message.get("content") or ""})
    said = {"reasoning_content": message.get("thinking"), "name": message.get("tool_name")}
    return {**said, **message, "content": parts}


class Chat(Common):
    """The body of /api/chat, and of /api/show, which reads `model` alone."""

    parallel_tool_calls: ClassVar[bool] = True

    model: str | None = Field(None, validation_alias=AliasChoices("model", "name"))
    n: Literal[1] = 1
    stream: bool = True
    messages: Annotated[list[Annotated[Json, READABLE, BeforeValidator(_turn)]], FIRST] = Field(
        [], max_length=MAX_ITEMS
    )
    tools: Items | None = None
    options: Json = Field({})
    form: Literal["", "json"] | Json = Field("", alias="format")
    think: bool | str | None = None
    num_predict: int = -1  # below 1: no limit

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, value: Any) -> Any:
        match value:
            case {"options": dict(options)}:
                return {**options, **value}
        return value

    @property
    def limit(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else super().limit

    @property
    def format(self) -> Format | None:
        schema = OBJECT if self.form == "json" else self.form
        return Format("format", schema) if schema else None


class Generate(Chat):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: Items = Field([])
    raw: bool = False  # without the chat template

    @model_validator(mode="before")
    @classmethod
    def _as_messages(cls, value: Any) -> Any:
        match value:
            case {"prompt": str(prompt)} if prompt:
                turn = {"role": "user", "content": prompt, "images": value.get("images")}
                first = {"role": "system", "content": value.get("system")}
                return {**value, "messages": [first, turn] if first["content"] else [turn]}
        return value
