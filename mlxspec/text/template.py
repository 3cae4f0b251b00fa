"""Chat templates: whether one reads a variable, and the text that it renders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils import chat_template_utils

SANDBOX = SandboxedEnvironment()


def template_reads(tokenizer: TokenizerWrapper, name: str) -> bool:
    """Whether the chat template may read the variable `name`. A template in code may."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    return any(text is None or name in text for text in texts)


def compiled(text: str) -> Template:
    """A template in transformers' sandbox, which may also change lists and objects: Kimi K2's
    appends to one of its own. All that it gets are copies."""
    compile_text: Callable[[str], Template] = chat_template_utils._compile_jinja_template
    template = compile_text(text)
    # A method of one environment, which Jinja's types do not let be set.
    template.environment.is_safe_attribute = SANDBOX.is_safe_attribute  # type: ignore[attr-defined]
    return template


def apply_template(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    **options: Any,
) -> str:
    """The text of messages. `options` are variables. Raises whatever the template's author chose
    for messages that it refuses."""
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        if text:  # the one that transformers renders next
            compiled(text)
    apply: Callable[..., str] = tokenizer.apply_chat_template
    return apply(messages, tokenize=False, **options)
