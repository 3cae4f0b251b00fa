"""Small tokenizers for tests, saved as a model directory has them, with a ChatML template.

`bytes` is byte-level BPE with 300 ids, `spm` the SentencePiece kind with byte fallback, `words`
neither.
"""

import json
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = (
    "t h,th e,Ġ the,Ġ a,i n,Ġ in,e r,o n,r e,l l,h e,he ll,hell o,hello o,Ġ w,o r,Ġw or,l d,Ġwor ld,a n,"
    "an d,Ġ and,s t,e n,s y,sy st,syst e,syste m,u s,us er,a s,as s,Ã ©,ð Ł,Ċ Ċ,Ġ Ġ,n a,k e,m e,o u,y ou"
).split(",")
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")

# As Qwen3's: tools in the system text, reasoning kept behind the last question only,
# `enable_thinking`.
AGENT = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set last = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first') }}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content and loop.index0 > last.at %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if not loop.previtem or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if not loop.nextitem or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# As Qwen3-Coder's, of which only the form of a call is told from others.
CODER = AGENT.replace(
    """{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}""",
    """{{- '<tool_call>\n<function=' + f.name + '>\n' }}
{%- for key, value in f.arguments.items() %}{{ '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}""",
)
Kind = Literal["bytes", "spm", "words"]


def save_tokenizer(
    path: Path, kind: Kind = "bytes", template: str | None = TEMPLATE, extra: tuple[str, ...] = ()
) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `path`, which is made if it is not there.
    `extra` are more tokens, such as THINK and CALLS, which AGENT and CODER speak of."""
    path.mkdir(parents=True, exist_ok=True)
    made = {"bytes": _bytes, "spm": _spm, "words": _words}[kind]()
    made.add_special_tokens([*SPECIAL, *extra])
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _bytes() -> Tokenizer:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in MERGES)]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _spm() -> Tokenizer:
    words = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "l",
        "o",
        "h",
        "e",
        "w",
        "r",
        "d",
    ]
    merges = [("▁", "a"), ("▁", "b"), ("l", "o"), ("▁", "w"), ("h", "e")]
    vocab = {piece: i for i, piece in enumerate([*words, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def _words() -> Tokenizer:
    pieces = ["[UNK]", "a", "b", "hello", "world", "##s", "##ly", ".", ","]
    made = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


PSM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
