"""Token ids of messages alone, as the server encodes them."""

from collections.abc import Sequence
from typing import Any

from mlxspec.text.chat import Tokenizer, conversation_of, render
from mlxspec.text.history import History


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], generation_prompt: bool = True, /, **options: Any
) -> list[int]:
    """`options` are variables for the template."""
    history = History()
    conversation = conversation_of(messages, None, options, history)
    return render(tokenizer, conversation, history, generation_prompt).ids
