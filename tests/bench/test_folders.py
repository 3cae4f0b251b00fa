"""Folders that are a model under other names: what a server reads of them."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from bench import tiny
from bench.folders import LENT, RAW, chatting, filling
from mlxspec.text.chat import encode, load_tokenizer, render_chat
from mlxspec.text.fim import fill_in_middle


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """With a chat template that says more than the message, and tokens that it can lend."""
    made = tiny.save(tmp_path / "model", tiny.model())
    about = json.loads((made / "tokenizer_config.json").read_text())
    about["chat_template"] = "U{% for m in messages %}{{ m.content }}{% endfor %}A"
    (made / "tokenizer_config.json").write_text(json.dumps(about))
    tokens = json.loads((made / "tokenizer.json").read_text())
    first = tokens["added_tokens"][0]
    for i, name in enumerate(LENT):
        tokens["added_tokens"].append(first | {"id": first["id"] + 1 + i, "content": name})
    (made / "tokenizer.json").write_text(json.dumps(tokens))
    return made


def said(folder: Path, text: str) -> str:
    tokenizer = load_tokenizer(folder)
    return str(tokenizer.decode(render_chat(tokenizer, [{"role": "user", "content": text}])))


def test_a_raw_message_is_the_prompt_and_others_are_as_before(model: Path, tmp_path: Path) -> None:
    made = chatting(model, tmp_path / "made")
    assert chatting(model, made) == made  # each start of a server makes it
    assert said(model, "hello") == said(made, "hello") == "UhelloA"
    assert said(made, RAW + "hello") == "hello"
    template = load_tokenizer(made).apply_chat_template  # a server may send parts
    parts = [{"role": "user", "content": [{"type": "text", "text": RAW + "hello"}]}]
    assert template(parts, tokenize=False) == "hello"
    assert (made / "model.safetensors").samefile(model / "model.safetensors")


def test_configs_that_mlx_vlm_reads(tmp_path: Path) -> None:
    for kind, expected in (("mtp", "qwen3_5_text"), ("assistant", "gemma4"), ("dflash", "qwen3")):
        made = chatting(tiny.pair(kind)[0], tmp_path / kind)
        assert json.loads((made / "config.json").read_text())["model_type"] == expected
        assert mx.load(str(made / "model.safetensors"))
        assert said(made, RAW + "baba") == "baba"


def test_tokens_are_lent_to_fill_in_the_middle(model: Path, tmp_path: Path) -> None:
    form, _, _ = fill_in_middle(load_tokenizer(model))
    assert not form
    tokenizer = load_tokenizer(filling(model, tmp_path / "made"))
    form, _, _ = fill_in_middle(tokenizer)
    assert form
    lent = encode(tokenizer, form.format(prefix="a", suffix="b"), special=False)
    assert lent == encode(load_tokenizer(model), "<gh_stars>a<issue_start>b<issue_comment>", False)
