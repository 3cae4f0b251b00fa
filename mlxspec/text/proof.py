"""The proof that a model's calls are read as its template writes them: what is rendered and read
again is the same call, argument by argument, to the letter.
"""

import json
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.text.formats import format_of, has_headers, written_by
from mlxspec.text.layouts import NamedCall
from mlxspec.text.output_parser import OutputParser
from mlxspec.types import Json

STRING: Json = {"type": "string"}
KINDS: Json = {
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
        "parameters": {"type": "object", "properties": KINDS},
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
def unread(tokenizer: TokenizerWrapper) -> tuple[str, ...]:
    """What of a model's own calls is not read back. Empty too where it has no format of its own."""
    form = format_of(tokenizer)
    if not form.own or has_headers(tokenizer):
        return ()
    closers = [way.closes for way in form.layouts[0].values] + [form.layouts[0].closes]
    markup = " b".join(["a", *closers, "c"])
    for token in tokenizer.added_tokens_decoder.values():
        markup = markup.replace(token.content, "") if token.special else markup  # never of a client
    proofs = PROOFS | {MARKUP: {"text": markup, "more": "d"}}
    return tuple(kind for kind, each in proofs.items() if not _read_back(tokenizer, each))


def forces_own(tokenizer: TokenizerWrapper) -> bool:
    """Whether forced calls are in the model's own format; no free text has the markup in it."""
    return not set(unread(tokenizer)) - {MARKUP}


def _read_back(tokenizer: TokenizerWrapper, arguments: Json) -> bool:
    calls: list[NamedCall] = [("try_it", arguments)]
    parser = OutputParser(tokenizer, [TOOL], False)
    parser.feed(written_by(tokenizer, calls, [TOOL]))
    parser.finish()
    try:
        return [(each.name, json.loads(each.arguments)) for each in parser.calls] == calls
    except ValueError:
        return False


def call_support(tokenizer: TokenizerWrapper) -> str:
    """How a model's calls are read and forced, in a line."""
    form, failed = format_of(tokenizer), unread(tokenizer)
    if failed:
        forced = "" if forces_own(tokenizer) else "; forced in JSON"
        return f"own format, which is not read back with {', '.join(failed)}{forced}"
    if form.own or has_headers(tokenizer):
        return "own format, proven"
    return f"known format ({form.spelled})" if form.spelled else "JSON in tags, as Hermes writes it"
