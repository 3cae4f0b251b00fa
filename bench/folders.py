"""Folders that are a model with a few files of their own; all others are links to the model's.

Rule: weights and tokens stay as they are, only how a server finds or names them changes.
"""

import json
from pathlib import Path

import mlx.core as mx

# A message that begins so is the whole prompt: what the rest of it says, and nothing around.
RAW = "<raw>"
PAST = (  # the chat template; of a model that could see, messages are lists of parts
    "{% set said = messages[0]['content'] %}"
    "{% set said = said if said is string else said[0]['text'] %}"
    f"{{% if said[:{len(RAW)}] == '{RAW}' %}}{{{{ said[{len(RAW)}:] }}}}"
)
# Tokens of a model without a form to fill in the middle, which take the names of one that has it:
# such a model answers nonsense, after the same work.
LENT = {
    "<gh_stars>": "<|fim_prefix|>",
    "<issue_start>": "<|fim_suffix|>",
    "<issue_comment>": "<|fim_middle|>",
}


def chatting(model: Path, out: Path) -> Path:
    """For a server that has chats alone, mlx-vlm's: RAW goes past the chat template. It has a Qwen
    3.5 without images only under the text's own config, and a Gemma 4 whose head drafts only under
    the whole model's."""
    out.mkdir(parents=True, exist_ok=True)
    about = _read(model / "tokenizer_config.json")
    own = model / "chat_template.jinja"
    template = own.read_text("utf-8") if own.exists() else about.pop("chat_template", "")
    made = {
        "chat_template.jinja": f"{PAST}{{% else %}}{template}{{% endif %}}",
        "tokenizer_config.json": json.dumps(about),
    }
    config = _read(model / "config.json")
    if config["model_type"] == "qwen3_5" and "vision_config" not in config:
        made["config.json"] = json.dumps(config["text_config"])
    if config["model_type"] == "gemma4_text":
        made["config.json"] = json.dumps(config | {"model_type": "gemma4", "text_config": config})
        weights = mx.load(str(model / "model.safetensors"))
        renamed = {f"language_model.{name}": array for name, array in weights.items()}
        mx.save_safetensors(str(out / "model.safetensors"), renamed, metadata={"format": "mlx"})
    return _linked(model, out, made)


def filling(model: Path, out: Path) -> Path:
    """With the tokens of LENT."""
    tokens = (model / "tokenizer.json").read_text("utf-8")
    for name, lent in LENT.items():
        tokens = tokens.replace(json.dumps(name), json.dumps(lent))
    return _linked(model, out, {"tokenizer.json": tokens})


def _linked(model: Path, out: Path, made: dict[str, str]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = out / file.name
        if file.name not in made and not link.exists():
            link.symlink_to(file.resolve())
    for name, text in made.items():
        (out / name).write_text(text, "utf-8")
    return out


def _read(file: Path) -> dict[str, object]:
    return dict(json.loads(file.read_text("utf-8")))
