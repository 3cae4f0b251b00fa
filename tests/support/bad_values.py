"""What others wrote and nobody checked: JSON of any kind, bodies with a hole for it, other bytes."""

import json
from pathlib import Path

from tests.tiny_tokenizer import AGENT, CALLS, PSM, THINK, save_tokenizer

DEEP = 100_000
VALUES = {  # JSON texts, as they stand in a body or a file
    "deep list": "[" * DEEP + "]" * DEEP,
    "10k deep": "[" * 10_000 + "]" * 10_000,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "190 deep": "[" * 190 + "]" * 190,
    "unclosed": "[" * DEEP,
    "1e999": "1e999",
    "-1e999": "-1e999",
    "NaN": "NaN",
    "Infinity inside": '{"a": [Infinity]}',
    "int of 5000": "9" * 5000,
    "int of 4000": "9" * 4000,
    "float of 400": "9" * 400 + ".5",
    "250 digits and e99": "9" * 250 + "e99",
    "true": "true",
    "0.5": "0.5",
    "-1": "-1",
    "text": '"x"',
    "nothing": "[]",
    "empty": "{}",
    "nulls": "[null]",
    "lists": "[[]]",
    "surrogate": '{"\\udc00": "\\ud800"}',
    "nul": '{"\\u0000": "\\u0000"}',
    "twice": '{"a": 1, "a": "b"}',
    "many": json.dumps({f"k{i}": i for i in range(3000)}),
    "deep in text": json.dumps("[" * DEEP + "]" * DEEP),
    "900 deep in text": json.dumps('{"a":' * 900 + "1" + "}" * 900),
    "int of 5000 in text": json.dumps('{"a": ' + "9" * 5000 + "}"),
    "infinite in text": json.dumps('{"a": 1e999, "b": "\\ud800"}'),
}
SAID = '"messages": [{"role": "user", "content": "a"}]'
CALL = '{"id": "1", "type": "function", "function": {"name": "f", "arguments": %s}}'
PARAMETERS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
BODIES = [  # path, and a body with a hole
    *(
        ("/v1/chat/completions", f"{{{body}}}")
        for body in (
            '"messages": %s',
            '"messages": [{"role": "user", "content": %s}]',
            '"messages": [{"role": %s, "content": "a"}]',
            f'"messages": [{{"role": "assistant", "tool_calls": [{CALL}]}}]',
            *(f'{SAID}, "{name}": %s' for name in ("max_tokens", "temperature", "seed", "stop", "metadata")),
            *(f'{SAID}, "{name}": %s' for name in ("logit_bias", "grammar", "tool_choice", "zzz")),
            f"{SAID}, {PARAMETERS}",
            f'{SAID}, "tool_choice": "required", {PARAMETERS}',
            f'{SAID}, "tool_choice": "required", {PARAMETERS}'.replace("%s", '{"required": %s}'),
            f'{SAID}, "chat_template_kwargs": {{"a": %s}}',
            *(
                f'{SAID}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {each}}}}}'
                for each in ("%s", *(f'{{"{k}": %s}}' for k in ("enum", "multipleOf", "minimum", "allOf")))
            ),
        )
    ),
    ("/v1/completions", '{"prompt": %s}'),
    ("/v1/completions", '{"prompt": "a", "best_of": %s}'),
    ("/v1/messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": %s}]}'),
    ("/v1/messages", f'{{"max_tokens": 5, {SAID}, "tools": [{{"name": "f", "input_schema": %s}}]}}'),
    (
        "/v1/messages",
        '{"max_tokens": 5, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":'
        ' [{"type": "tool_use", "id": "1", "name": "f", "input": %s}]}, {"role": "user", "content": "b"}]}',
    ),
    ("/v1/messages/count_tokens", f'{{{SAID}, "system": %s}}'),
    ("/api/chat", f'{{{SAID}, "options": %s}}'),
    ("/api/chat", f'{{{SAID}, "options": {{"num_predict": %s}}}}'),
    ("/api/chat", f'{{{SAID}, "format": %s}}'),
    ("/api/chat", f'{{{SAID}, "think": %s}}'),
    ("/api/chat", '{"messages": [%s]}'),
    ("/api/chat", '{"messages": [{"role": "user", "images": %s}]}'),
    ("/api/chat", '{"messages": [{"role": "assistant", "thinking": %s}]}'),
    ("/api/generate", '{"keep_alive": %s}'),
    ("/api/generate", '{"prompt": %s, "raw": true}'),
    ("/api/generate", '{"prompt": "a", "system": %s}'),
    ("/api/generate", '{"prompt": "a", "suffix": %s}'),
    ("/api/embed", '{"input": %s}'),
    ("/api/embed", '{"input": "a", "dimensions": %s}'),
    ("/api/embeddings", '{"prompt": %s}'),
    ("/api/show", '{"model": %s}'),
    ("/v1/embeddings", '{"input": %s}'),
    ("/v1/embeddings", '{"input": [%s]}'),
    ("/v1/embeddings", '{"input": "a", "dimensions": %s}'),
    ("/v1/embeddings", '{"input": "a", "encoding_format": %s}'),
    ("/v1/completions", '{"prompt": "a", "suffix": %s}'),
    ("/v1/fim/completions", '{"prompt": %s, "suffix": "b"}'),
    ("/v1/fim/completions", '{"prompt": "a", "suffix": %s}'),
    ("/infill", '{"input_prefix": %s}'),
    ("/infill", '{"input_suffix": "b", "n_predict": %s}'),
    ("/infill", '{"input_extra": %s}'),
    ("/infill", '{"input_extra": [{"filename": %s, "text": "a"}]}'),
    ("/v1/responses", '{"input": %s}'),
    ("/v1/responses", '{"input": "a", "metadata": %s}'),
    ("/v1/responses", '{"input": "a", "user": %s}'),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %s}]}'),
    ("/v1/models/load", '{"model": %s}'),
    ("/v1/models/unload", '{"model": "tiny", "force": %s}'),
    ("/v1/tokenize", '{"prompt": %s}'),
    ("/v1/detokenize", '{"tokens": %s}'),
]  # fmt: skip
RAW = [
    *(
        b"",
        b" ",
        b"\0",
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b"{}{}",
        b'{"a":1,}',
        b"{'a': 1}",
        b"{" * DEEP,
    ),
    *(
        2 * b"\xef\xbb\xbf" + b"{}",
        "{}".encode("utf-16"),
        "{}".encode("utf-16-le"),
        "{}".encode("utf-32"),
    ),
    *(
        b'{"a": "\xff\xfe"}',
        b'{"a": "\xc0\xaf"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\0"}',
        b'{"a": 1',
    ),
]
MANY = b'{"k": 1' + b"".join(b', "k%d": 1' % i for i in range(200_000)) + b"}"


def save_agent(place: Path) -> Path:
    """The tokenizer of a model that thinks, calls tools and fills in the middle."""
    return save_tokenizer(place, template=AGENT, extra=THINK + CALLS + PSM)
