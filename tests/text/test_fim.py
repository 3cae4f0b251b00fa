# ruff: noqa: RUF001
"""The prompt of each family that fills in the middle, found by the tokenizer's own tokens."""

from pathlib import Path

import pytest

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.fim import fill_in_middle
from tests.support.tiny_tokenizer import save_tokenizer

QWEN = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>"
FAMILIES = {
    "Qwen-Coder": (
        f"{QWEN} <|fim_pad|> <|repo_name|> <|file_sep|>",
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|file_sep|>",
    ),
    "Granite 4": (f"{QWEN} <|fim_pad|>", "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>", "#"),
    "CodeGemma": (
        f"{QWEN} <|file_separator|>",
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|file_separator|>",
    ),
    "StarCoder": (
        "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename>",
        "<fim_prefix><fim_suffix>S<fim_middle>P",
        "<filename>",
    ),
    "StarCoder2": (
        "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <repo_name> <file_sep>",
        "<fim_prefix><fim_suffix>S<fim_middle>P",
        "<file_sep>",
    ),
    "DeepSeek-Coder": (
        "<｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜>",
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
        "#",
    ),
    "Codestral": ("[PREFIX] [MIDDLE] [SUFFIX]", "[SUFFIX]S[PREFIX]P", "#"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Each of a family's tokens ends the text in the middle, and so does the end of a text."""
    tokens, prompt, before_file = FAMILIES[family]
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, extra=tuple(tokens.split())))
    form, file, ends = fill_in_middle(tokenizer)
    assert form.format(prefix="P", suffix="S") == prompt
    assert file == before_file
    assert set(tokenizer.convert_ids_to_tokens(list(ends))) == {*tokens.split(), "<|endoftext|>"}
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert sum(i in ends for i in ids) == len(ids) - 2


def test_braces_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, extra=tuple(QWEN.split())))
    form, _, _ = fill_in_middle(tokenizer)
    filled = form.format(prefix="{suffix} {0} {", suffix="} {prefix}")
    assert filled == "<|fim_prefix|>{suffix} {0} {<|fim_suffix|>} {prefix}<|fim_middle|>"


def test_a_tokenizer_without_them(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, extra=("<fim_prefix>", "<fim_suffix>")))
    assert fill_in_middle(tokenizer)[0] == ""
