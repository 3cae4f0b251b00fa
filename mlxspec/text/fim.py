"""Fill in the middle: prompts in the format that a family of models was trained on, recognised by
the control tokens of its tokenizer.

Rule: the suffix comes first (SPM) if the family supports it: typing then appends to the prompt, and
the prefix cache has the rest. With the prefix first (PSM), the suffix is computed again.
"""

import re
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

FORMS = {
    # SPM is its only form (mistral-common).
    "Codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
    # Trained half on PSM and half on this SPM, variant 2 of arXiv 2207.14255 (arXiv 2305.06161,
    # 2405.04324).
    "StarCoder, Granite Code": "<fim_prefix><fim_suffix>{suffix}<fim_middle>{prefix}",
    # Trained on PSM (arXiv 2401.14196).
    "DeepSeek-Coder": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # noqa: RUF001
    # Trained on PSM (Qwen2.5-Coder: arXiv 2409.12186); CodeGemma on both orders (arXiv 2406.11409);
    # its documentation uses this one.
    "Qwen-Coder, CodeGemma, Granite 4": (
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    ),
}
TOKEN = re.compile(r"<[^<>]+>|\[[A-Z]+\]")  # a control token in a form
FILES = "<|file_sep|> <|file_separator|> <file_sep> <filename>".split()  # before a file's name
# Tokens that also end the middle, in addition to those of the form and FILES.
ENDS = "<|endoftext|> <|end_of_text|> <|fim_pad|> <fim_pad> <|repo_name|> <repo_name> [MIDDLE]"


@lru_cache(16)
def fill_in_middle(tokenizer: TokenizerWrapper) -> tuple[str, str, frozenset[int]]:
    """The form of a tokenizer's family, "" if its vocabulary has the tokens of none; the marker
    before another file's name; and the ids of the tokens that end the middle."""
    vocab = tokenizer.get_vocab()
    forms = (form for form in FORMS.values() if vocab.keys() >= set(TOKEN.findall(form)))
    form = next(forms, "")
    file = next((token for token in FILES if token in vocab), "#")
    ends = {*TOKEN.findall(form), *FILES, *ENDS.split()} & vocab.keys()
    return form, file, frozenset(vocab[token] for token in ends)
