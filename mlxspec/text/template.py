"""Chat templates: which variables one reads, and rendering."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils import chat_template_utils

SANDBOX = SandboxedEnvironment()


def template_reads(tokenizer: TokenizerWrapper, name: str) -> bool:
    """Whether the chat template may read the variable `name`; True for a template in code."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    return any(text is None or name in text for text in texts)


def compile_template(text: str) -> Template:
    """A template in transformers' sandbox, but allowed to change lists and objects, as Kimi K2's
    does. It only gets copies."""
    compile_text: Callable[[str], Template] = chat_template_utils._compile_jinja_template
    template = compile_text(text)
    # Replaces a method of this environment only; Jinja's types do not allow that.
    template.environment.is_safe_attribute = SANDBOX.is_safe_attribute  # type: ignore[attr-defined]
    return template


def apply_template(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    **options: Any,
) -> str:
    """The rendered messages. `options` are variables of the template. If it refuses the messages,
    raises whatever its author chose."""
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        if text:  # transformers caches it and renders it next
            compile_template(text)
    apply: Callable[..., str] = tokenizer.apply_chat_template
    return apply(messages, tokenize=False, **options)
