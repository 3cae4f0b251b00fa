"""Proof that a model's calls survive a round trip: a call rendered by the chat template and parsed
again has exactly the same arguments.
"""

import json
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import format_of, has_headers, template_calls
from mlxspec.text.layouts import SAME_KEY, NamedCall
from mlxspec.text.output_parser import OutputParser
from mlxspec.types import Json

STRING: Json = {"type": "string"}
PROPERTIES: Json = {
    "text": STRING,
    "more": STRING,
    "count": {"type": "integer"},
    "part": {"type": "number"},
    "on": {"type": "boolean"},
    "items": {"type": "array"},
    "fields": {"type": "object"},
}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "try_it",
        "description": "",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
PROOFS: dict[str, Json] = {
    "plain text": {"text": "a.py", "more": "x = 1"},
    "no arguments": {},
    "empty text": {"text": "", "more": "a"},
    "line feeds": {"text": "\n a\n\n", "more": "\n"},
    "blanks": {"text": "  a  ", "more": "\t"},
    "quotes": {"text": "\"a\" 'b' \\n \\ `c`", "more": "it's"},
    "markup": {"text": '<a href="x">1 < 2 && 3</a>\n</b> ]] }', "more": "[x](y)"},
    "other letters": {"text": "é 漢字 😀", "more": "\u2028"},
    "text like values": {"text": "7", "more": "null"},
    "numbers": {"count": -3, "part": 0.5, "on": False},
    "lists and objects": {"items": ["a", 1, None, ["b, c"]], "fields": {"k": {"n": [True, "x"]}}},
}


MARKUP = "their own markup"


@lru_cache(16)
def failed_proofs(tokenizer: TokenizerWrapper) -> tuple[str, ...]:
    """The names of the proofs that fail in the model's own format. Empty too if it has none."""
    form = format_of(tokenizer)
    if not form.learned or has_headers(tokenizer):
        return ()
    closers = [value.closes for value in form.layouts[0].values] + [form.layouts[0].call_closes]
    markup = " b".join(["a", *closers, "c"]).replace(SAME_KEY, "text")
    for token in tokenizer.added_tokens_decoder.values():
        markup = markup.replace(token.content, "") if token.special else markup  # no client's
    proofs = PROOFS | {MARKUP: {"text": markup, "more": "d"}}
    return tuple(name for name, call in proofs.items() if not _round_trips(tokenizer, call))


def forces_own_format(tokenizer: TokenizerWrapper) -> bool:
    """Whether forced calls are in the model's own format; forced text cannot contain its markup."""
    return not set(failed_proofs(tokenizer)) - {MARKUP}


def _round_trips(tokenizer: TokenizerWrapper, arguments: Json) -> bool:
    calls: list[NamedCall] = [("try_it", arguments)]
    parser = OutputParser(tokenizer, [TOOL], False)
    parser.feed(template_calls(tokenizer, calls, [TOOL]))
    parser.finish()
    try:
        return [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls
    except ValueError:
        return False


def call_support(tokenizer: TokenizerWrapper) -> str:
    """How a model's calls are read and forced, in a line."""
    form, failed = format_of(tokenizer), failed_proofs(tokenizer)
    if failed:
        forced = "" if forces_own_format(tokenizer) else "; forced in JSON"
        return f"own format, not read back with {', '.join(failed)}{forced}"
    if form.learned or has_headers(tokenizer):
        return "own format, proven"
    if form.history_format:
        return f"known format ({form.history_format})"
    return "JSON in tags, as Hermes writes it"
