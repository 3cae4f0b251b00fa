"""Reasoning, content and calls: the same however the text is cut, and nothing is lost."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.output_parser import OutputParser, Part
from mlxspec.text.tool_calls import as_object
from tests.support.examples import examples
from tests.support.parameter_rows import only
from tests.tiny_tokenizer import AGENT, CALLS, CODER, THINK, save_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": p}},
    }
    for name, p in (
        ("read", {"path": {"type": "string"}, "lines": {"type": "integer"}}),
        ("run", {"command": {"type": "string"}}),
    )
]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(
        save_tokenizer(tmp_path_factory.mktemp("h"), template=AGENT, extra=THINK + CALLS)
    )


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(
        save_tokenizer(tmp_path_factory.mktemp("c"), template=CODER, extra=THINK + CALLS)
    )


def parts_of(
    tokenizer: Any, pieces: Any, tools: Any = TOOLS, thinking: bool = False, cut: bool = False
) -> list[Part]:
    """The parts of an answer that comes in these pieces."""
    reader = OutputParser(tokenizer, tools, thinking)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish(cut)
    assert reader.calls == [part.call for part in parts if part.opens]
    for i, call in enumerate(reader.calls):
        call.id = f"id{i}"
    return parts


def read(tokenizer: Any, pieces: Any, **kw: Any) -> list[Part]:
    """The parts of an answer that comes in these pieces, neighbours of one kind or call joined."""
    joined: list[Part] = []
    for part in parts_of(tokenizer, pieces, **kw):
        assert part.opens or part.ends or part.text, "an empty part"
        last = joined[-1] if joined else None
        if last and last.kind == part.kind and last.call is part.call and not part.opens:
            assert not last.ends, "a part behind the last one of its call"
            joined[-1] = Part(part.kind, last.text + part.text, part.call, last.opens, part.ends)
        else:
            joined.append(part)
    for part in joined:
        assert part.call is None or (part.opens and part.text == part.call.arguments)
    return joined


def told(tokenizer: Any, text: str, **kw: Any) -> list[Any]:
    """Short: ("kind", text), ("call", name, arguments), or ("cut", name, text of arguments)."""
    found: list[Any] = []
    for part in read(tokenizer, [text], **kw):
        if part.call is None:
            found.append((part.kind, part.text))
        elif part.ends:
            found.append(("call", part.call.name, json.loads(part.call.arguments)))
        else:
            found.append(("cut", part.call.name, part.call.arguments))
    return found


READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "lines": 3}}\n</tool_call>'
RUN = '<tool_call>\n{"name": "run", "arguments": {"command": "ls </tool_call> é"}}\n</tool_call>'
CALL_READ, CALL_RUN = (
    ("call", "read", {"path": "a.py", "lines": 3}),
    ("call", "run", {"command": "ls </tool_call> é"}),
)
XML = "<function=read>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n3\n</parameter>\n</function>"
BROKEN, NAMELESS = "<tool_call>x</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'
HERMES = {
    "plain": ("Hello, world. \n", [("content", "Hello, world. \n")]),
    "a call": (READ, [CALL_READ]),
    "text, two calls": (f"I read.\n{READ}\n{RUN}", [("content", "I read."), CALL_READ, CALL_RUN]),
    "a call, text": (f"{READ}\nDone.", [CALL_READ, ("content", "Done.")]),
    "thought": (f"<think>\nso\n</think>\n\n{READ}", [("reasoning", "so"), CALL_READ]),
    "thought, text": ("<think>\na \n b\n</think>\n\nYes\n", [("reasoning", "a \n b"), ("content", "Yes\n")]),
    "no end": (READ.removesuffix("\n</tool_call>"), [CALL_READ]),
    "no first end": (READ.removesuffix("</tool_call>") + RUN, [CALL_READ, CALL_RUN]),
    "two in one": (
        READ.replace("\n</tool_call>", ',\n{"name": "run", "arguments": "{}"}\n</tool_call>'),
        [CALL_READ, ("call", "run", {})],
    ),
    "bare": ('{"name": "read", "arguments": {"path": "a.py", "lines": 3}}', [CALL_READ]),
    "fenced": ('```json\n{"name": "run", "arguments": {}}\n```', [("call", "run", {})]),
    "bare, unknown": ('{"name": "rm", "arguments": {}}', [("content", '{"name": "rm", "arguments": {}}')]),
    "json": ('{"name": 5} \n', [("content", '{"name": 5} \n')]),
    "broken": ('<tool_call>\n{"name": "read", "arg', [("content", '<tool_call>\n{"name": "read", "arg')]),
    "broken off": (READ[:54], [("cut", "read", '{"path": "a.')]),
    "a brace left out": (READ.replace("}}", "}"), [CALL_READ]),
    "a brace too many": (READ.replace("}}", "}}}"), [CALL_READ]),
    "a field behind": (READ.replace("}}", '}, "id": "x"}'), [CALL_READ]),
    "escapes": (
        READ.replace("a.py", '\\\\ \\" } { \\u00e9'),
        [("call", "read", {"path": '\\ " } { é', "lines": 3})],
    ),
    "mentioned, then made": (
        f"In <tool_call> tags: {READ}",
        [("content", "In <tool_call> tags:"), CALL_READ],
    ),
    "bare, text": (READ[12:-13] + "\n\nDone.\n", [CALL_READ, ("content", "Done.")]),
    "bare, two": (READ[12:-13] + "\n" + RUN[12:-13], [CALL_READ, CALL_RUN]),
    "bare, broken off": (READ[12:54], [("cut", "read", '{"path": "a.')]),
    "broken, whole": ("<tool_call>x</tool_call> y", [("content", "<tool_call>x</tool_call> y")]),
    "broken, then a call": (f"{BROKEN}{RUN}", [("content", BROKEN), CALL_RUN]),
    "no name": (NAMELESS, [("content", NAMELESS)]),
    "almost a marker": ("a <tool_cal b </thin", [("content", "a <tool_cal b </thin")]),
}  # fmt: skip
CUT_XML = "<tool_call>\n<function=run>\n<parameter=command>\nrm -rf /tm"
MORE_XML = f"<tool_call>hi {XML}</tool_call>"
CODED = {
    "a call": (f"<tool_call>\n{XML}\n</tool_call>", [CALL_READ]),
    "naked": (XML, [CALL_READ]),
    "naked, its end left": (f"Look:\n{XML}\n</tool_call>", [("content", "Look:"), CALL_READ]),
    "no ends": (f"<tool_call>\n{XML.removesuffix('</function>')}", [CALL_READ]),
    "two naked": (f"{XML}\n{XML}", [CALL_READ, CALL_READ]),
    "thought, naked": (f"<think>a</think>{XML}", [("reasoning", "a"), CALL_READ]),
    "a parameter without an end": (CUT_XML, [("cut", "run", '{"command": "rm -rf /tm')]),
    "text behind a call": (f"<tool_call>{XML} ok</tool_call>", [CALL_READ, ("content", "ok")]),
    "no parameters": ("<function=run>\n</function>", [("call", "run", {})]),
    "an unknown tool": ("<function=rm>\n</function>", [("content", "<function=rm>\n</function>")]),
    "what looks like an end": (
        XML.replace("a.py", "</tool_call> </div>\n\n"),
        [("call", "read", {"path": "</tool_call> </div>\n\n", "lines": 3})],
    ),
    "a wrong number": (XML.replace("\n3\n", "\nx\n"), [("call", "read", {"path": "a.py", "lines": "x"})]),
    "two in one": (f"<tool_call>\n{XML}\n{XML}\n</tool_call>", [CALL_READ, CALL_READ]),
    "no first end": (f"<tool_call>\n{XML}\n<tool_call>\n{XML}\n</tool_call>", [CALL_READ, CALL_READ]),
    "an end in a value": (
        XML.replace("a.py", "a\n</parameter>\nb"),
        [("call", "read", {"path": "a\n</parameter>\nb", "lines": 3})],
    ),
    "more than a call": (MORE_XML, [("content", MORE_XML)]),
}  # fmt: skip


@pytest.mark.parametrize("name", HERMES)
def test_what_models_say(hermes: Any, name: str) -> None:
    text, want = HERMES[name]
    assert told(hermes, text) == want


@pytest.mark.parametrize("name", CODED)
def test_what_coders_say(coder: Any, name: str) -> None:
    text, want = CODED[name]
    assert told(coder, text) == want


@pytest.mark.parametrize("name", [*HERMES, *(f"coder: {name}" for name in CODED)])
def test_every_split_in_two_reads_alike(hermes: Any, coder: Any, name: str) -> None:
    tokenizer, table = (coder, CODED) if name.startswith("coder: ") else (hermes, HERMES)
    text, _ = table[name.removeprefix("coder: ")]
    whole = read(tokenizer, [text])
    for at in range(len(text) + 1):
        assert read(tokenizer, [text[:at], text[at:]]) == whole
    assert read(tokenizer, text) == whole, "character by character"


PIECES = [
    *("a", " ", "\n", "{", '"name":', "}", "é", '"', "\\", "```", "<", "[", READ[:40], XML[:40]),
    *THINK,
    *CALLS,
    READ,
    RUN,
    XML,
    "<function=",
    "</function>",
]


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES), max_size=9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_text_in_any_pieces(
    hermes: Any, coder: Any, some: Any, thinking: bool, xml: bool, calls: bool, data: Any
) -> None:
    text, tokenizer, tools = "".join(some), coder if xml else hermes, TOOLS if calls else ()
    whole = read(tokenizer, [text], tools=tools, thinking=thinking)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(tokenizer, pieces, tools=tools, thinking=thinking) == whole
    assert calls or not any(part.call for part in whole)
    if not calls:  # nothing but the markers of reasoning and white space goes
        kept = "".join(part.text for part in whole)
        for marker in THINK:
            text, kept = text.replace(marker, ""), kept.replace(marker, "")
        assert "".join(kept.split()) == "".join(text.split())


def test_without_tools_a_call_is_text(hermes: Any) -> None:
    assert told(hermes, f"x {READ} \n", tools=()) == [("content", f"x {READ} \n")]


def test_reasoning_that_the_prompt_opened(hermes: Any) -> None:
    assert told(hermes, "so\n</think>\n\nYes", thinking=True) == [
        ("reasoning", "so"),
        ("content", "Yes"),
    ]
    assert told(hermes, "never ends", thinking=True) == [("reasoning", "never ends")]


def test_a_bare_line_feed_in_json_is_escaped(hermes: Any) -> None:
    """Small models write code so; a client would not parse it."""
    said = '<tool_call>\n{"name": "run", "arguments": {"x": "a\n\tb",\n "y": 1}}\n</tool_call>'
    for pieces in ([said], list(said)):
        [part] = read(hermes, pieces)
        assert json.loads(part.text) == {"x": "a\n\tb", "y": 1}


def test_why_a_call_is_text_is_logged(hermes: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxspec")
    told(hermes, '<tool_call>\n{"name": "read", "arg')
    assert "cannot be parsed and is shown as text: ValueError" in caplog.text


def test_content_is_shown_as_it_comes(hermes: Any) -> None:
    reader = OutputParser(hermes, TOOLS, False)
    assert reader.feed("Hello wor") == [Part("content", "Hello wor")]
    assert reader.feed("ld <tool") == [Part("content", "ld")], (
        "what may be a marker waits, with the space"
    )


@pytest.mark.slow
def test_a_model_without_a_format_of_its_own(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert told(tokenizer, f"Yes.\n{READ}") == [("content", "Yes."), CALL_READ]


# ---- markers that are only text
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Use the <think> tag.", [("content", "Use the <think> tag.")]),
        ('{"a": "x <think> y"}', [("content", '{"a": "x <think> y"}')]),
        ("The `</tool_call>` tag", [("content", "The `</tool_call>` tag")]),
        (
            "<think>I will <tool_call> now</think>\nIt is 5.",
            [("reasoning", "I will <tool_call> now"), ("content", "It is 5.")],
        ),
        (
            f"<think>I <tool_call> so</tool_call> on</think>{READ}",
            [("reasoning", "I <tool_call> so</tool_call> on"), CALL_READ],
        ),
        (f"<think>so {READ}", [("reasoning", "so"), CALL_READ]),
        (
            '<think>so <tool_call>{"name": "run"}</think>x',
            [("reasoning", "so"), ("call", "run", {}), ("content", "x")],
        ),
        (
            f"<think>I say {READ} but no.</think>Fine",
            [("reasoning", "I say"), CALL_READ, ("reasoning", "but no."), ("content", "Fine")],
        ),
        (
            '<think>a <tool_call> b</think>\n{"name": "run", "arguments": {}}',
            [("reasoning", "a <tool_call> b"), ("call", "run", {})],
        ),
        ('{"name": "read", "price": 7}', [("content", '{"name": "read", "price": 7}')]),
        ('<tool_call>{"arguments": {"x": NaN}, "name": "run"}</tool_call>', None),
        ('<tool_call>{"arguments": {"x": 1e999}, "name": "run"}</tool_call>', None),
        ("<tool_call>" + "[" * 5000, None),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_marker_is_text(hermes: Any, text: str, want: Any) -> None:
    assert told(hermes, text) == (want or [("content", text)])
    assert read(hermes, text) == read(hermes, [text])


def test_under_a_grammar_there_are_no_calls_but_those_with_tags(hermes: Any) -> None:
    def ruled(text: str) -> list[tuple[str, str]]:
        reader = OutputParser(hermes, TOOLS, True, constrained=True)
        parts = [*reader.feed(text), *reader.finish()]
        return [(p.kind, p.call.name if p.call else p.text) for p in parts if p.opens or not p.call]

    assert ruled(f"a {READ} b</think>{RUN}") == [("reasoning", f"a {READ} b"), ("call", "run")]
    assert ruled('</think>{"name": "read", "arguments": {}}')[0][0] == "content"


def test_half_a_surrogate_pair_can_be_sent(hermes: Any) -> None:
    for call in (
        '{"name": "run", "arguments": {"command": "a\\ud800b"}}',
        '{"arguments": {"command": "a\\ud800b"}, "name": "run"}',
    ):
        [part] = read(hermes, [f"<tool_call>{call}</tool_call>"])
        assert part.call and as_object(part.call.arguments) == {"command": "a\ufffdb"}
        assert part.text.encode()


def test_values_in_xml_have_the_types_of_their_schema(coder: Any) -> None:
    kinds: dict[str, Any] = {
        "opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "on": {"type": ["boolean", "null"]},
        "way": {"enum": ["x", "y"]},
        "one": {"const": 5},
        "s": {"type": "string"},
        "id": {"type": "integer"},
        "version": {"type": ["string", "null"]},
        "none": {"type": ["string", "null"]},
        "upper": {"type": "STRING"},
        "place": {"$ref": "#/$defs/place"},
        "words": {"allOf": [{"description": "d"}, {"$ref": "#/$defs/word"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "https://example.com/a.json"},
    }
    places = {"type": "object", "properties": {"x": {"type": "integer"}}}
    defined = {"place": places, "word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    schema = {"properties": kinds, "$defs": defined}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    values = {"opt": "abc", "n": "5", "on": "true", "way": "x", "one": "5", "s": "NULL"}
    values |= {"id": "1234567890123456789", "version": "1.10", "none": "null", "upper": "7"}
    values |= {"place": '{"x": 1}', "words": "[1]", "loop": "l", "lost": "5"}
    said = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    [(_, _, arguments)] = told(coder, f"<function=f>\n{said}</function>", tools=tools)
    assert arguments == {"opt": "abc", "n": 5, "on": True, "way": "x", "one": 5, "s": "NULL"} | {
        "id": 1234567890123456789,
        "version": "1.10",
        "none": None,
        "upper": "7",
        "place": {"x": 1},
        "words": "[1]",
        "loop": "l",
        "lost": "5",
    }


@pytest.mark.parametrize(
    "text",
    [
        " " * 30_000,
        '{"name": ' + " " * 30_000,
        "<function=" * 3000 + "</function>" * 900,
        '{"name":"a"}' * 2000 + "x",
    ],
)
def test_a_model_that_loops_costs_little(hermes: Any, coder: Any, text: str) -> None:
    began = time.perf_counter()
    read(coder, ["<tool_call>", text, "</tool_call>" * 900])
    read(hermes, ["<tool_call>", text, "</tool_call>" * 900])
    assert time.perf_counter() - began < 20


# ---- calls while they are written
# ---------------------------------------------------------------------------

LONG = 'if a < b:\n    print("</b> \\\\ é")\n\n' * 4 + "end"
ARGUMENTS = {"path": LONG, "lines": 3}


def parameters(head: str, key: str, value: str, ends: str) -> str:
    """A call of `read` in a format with parameters; `%s` stands for names."""
    text = head % "read"
    for name, said in ARGUMENTS.items():
        text += key % name + value % said
    return text + ends


JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
MINIMAX = parameters(
    '<invoke name="%s">\n', '<parameter name="%s">', "%s</parameter>\n", "</invoke>\n"
)
GLM = parameters("%s\n", "<arg_key>%s</arg_key>\n", "<arg_value>%s</arg_value>\n", "")
KIMI = f"<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
FORMATS = {  # what the chat template says of a format, and an answer of two calls
    "json_tools": ("<tool_call> tool_call.name", f'<tool_call>\n{{"name": "read", "arguments": {JSON}}}\n</tool_call>\n' * 2),
    "qwen3_coder": (
        "<tool_call>\n<function=",
        "<tool_call>\n"
        + parameters("<function=%s>\n", "<parameter=%s>\n", "%s\n</parameter>\n", "</function>\n")
        + "</tool_call>\n" + "<tool_call>\n"
        + parameters("<function=%s>", "<parameter=%s>", "%s</parameter>", "</tool_call>"),
    ),
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS]read[ARGS]{JSON}" * 2),
    "mistral's list": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "read", "arguments": {JSON}, "id": "a1"}},'
        f' {{"name": "read", "arguments": {JSON}}}]',
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        f"<minimax:tool_call>\n{MINIMAX}{MINIMAX}</minimax:tool_call>",
    ),
    "glm47": ("<arg_key>", f"<tool_call>{GLM}</tool_call>\n<tool_call>{GLM}</tool_call>"),
    "longcat": (
        "<longcat_tool_call>",
        f"<tool_call>{GLM}</tool_call>".replace("arg_", "longcat_arg_").replace("tool_", "longcat_tool_") * 2,
    ),
}  # fmt: skip
WHOLE = {  # formats whose calls come in one piece
    "gemma4": ("<|tool_call><tool_call|>", '<|tool_call>call:read{path:<|"|>a.py<|"|>,lines:3}<tool_call|>'),
    "pythonic": ("<|tool_call_start|>", '<|tool_call_start|>[read(path="a.py", lines=3)]<|tool_call_end|>'),
    "function_gemma": ("<start_function_call>", "<start_function_call>call:read{path:<escape>a.py<escape>,lines:3}<end_function_call>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tokenizer of each format."""
    made = {}
    for name, (marks, _) in (FORMATS | WHOLE).items():
        path = tmp_path_factory.mktemp("format")
        template = f"{{# {marks} #}}{AGENT}"
        made[name] = load_tokenizer(save_tokenizer(path, template=template, extra=THINK))
        module = made[name].tool_parser.__module__
        assert module.endswith(name.removesuffix("'s list")), module
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_streamed(writers: dict[str, Any], name: str) -> None:
    """Several pieces inside of a long string, the same however the text is cut."""
    tokenizer, (_, text) = writers[name], FORMATS[name]
    parts = parts_of(tokenizer, text)
    whole = read(tokenizer, [text])
    calls = [part.call for part in whole if part.call]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * 2
    assert len(whole) == 2 and all(part.ends for part in whole)
    assert sum(bool(part.text) for part in parts) > len(LONG), "nearly every character at once"
    assert read(tokenizer, text) == whole
    for at in range(len(text)):
        assert read(tokenizer, [text[:at], text[at:]]) == whole


def test_a_vocabulary_names_a_format_of_which_the_template_says_nothing(tmp_path: Path) -> None:
    """As Codestral's does."""
    made = load_tokenizer(save_tokenizer(tmp_path, template=AGENT, extra=("[TOOL_CALLS]",)))
    for name in ("mistral", "mistral's list"):
        calls = [part.call for part in read(made, FORMATS[name][1]) if part.call]
        assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * 2


@pytest.mark.parametrize("name", WHOLE)
def test_other_formats_come_whole(writers: dict[str, Any], name: str) -> None:
    tokenizer, (_, text) = writers[name], WHOLE[name]
    assert told(tokenizer, text) == [CALL_READ]
    opening, whole = parts_of(tokenizer, text)
    assert opening.opens and whole.ends and json.loads(whole.text) == CALL_READ[2]
    assert told(tokenizer, text[:-20], cut=True) == [("cut", "read", "")]


@pytest.mark.parametrize("text", ["[1] See the book.", "[x](http://a.b)", "[a (b)]"])
def test_what_is_no_list_of_calls_is_shown_as_it_comes(tmp_path: Path, text: str) -> None:
    """Where calls are lists without markers."""
    key = "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    each = "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}" + key
    each = (
        "{% for c in m.tool_calls %}"
        + each
        + "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}"
    )
    turn = "<turn>{{ m.content }}{% if m.tool_calls %}[" + each + "]{% endif %}"
    made = load_tokenizer(
        save_tokenizer(tmp_path, template="{% for m in messages %}" + turn + "{% endfor %}")
    )
    assert [name for _, name, _ in told(made, '[read(path="a.py", lines=3)]')] == ["read"]
    reader = OutputParser(made, TOOLS, False)
    shown = "".join(part.text for piece in text for part in reader.feed(piece))
    assert shown == text


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_max_tokens_cut_is_a_partial_call(writers: dict[str, Any], name: str) -> None:
    """From its name on, wherever the answer ends: no text, and arguments that begin as the whole
    ones do."""
    tokenizer, (_, text) = writers[name], FORMATS[name]
    [first, _] = read(tokenizer, [text])
    assert first.call
    ends = False
    for at in range(text.index("read") + 5, len(text)):
        if not ends:
            [part] = read(tokenizer, [text[:at]], cut=True)
            assert [part] == read(tokenizer, text[:at], cut=True)
            assert part.call and part.call.name == "read" and first.text.startswith(part.text)
            ends = part.ends
            assert ends == (part.text == first.text)
    assert ends


BROKEN_CALLS = {
    "no value": ('{"name": "run", "arguments": {"x": , "y": 1}}', '{"x": , "y": 1}'),
    "no number": ('{"name": "run", "arguments": {"x": NaN}}', '{"x": NaN}'),
    "no bracket": ('{"name": "run", "arguments": {"x": [1}}', '{"x": [1}}'),
}


@pytest.mark.parametrize("name", BROKEN_CALLS)
def test_a_call_that_turns_out_broken_stays_a_call(hermes: Any, name: str) -> None:
    """Its arguments are what the model wrote, which is no JSON, and the text behind it goes on."""
    said, arguments = BROKEN_CALLS[name]
    text = f"<tool_call>{said}</tool_call>{READ}"
    for pieces in ([text], text):
        broken, good = read(hermes, pieces)
        assert broken.call and good.call and broken.ends
        assert broken.text == arguments and good.call.name == "read"
        assert as_object(broken.text) == {"INVALID_JSON": arguments}


@pytest.mark.parametrize("tail", only(["<", "}", '\\"', "</", "\n", " ", "</parameter>"], 0, 2))
def test_long_arguments_take_linear_time(hermes: Any, coder: Any, tail: str) -> None:
    heads = {hermes: READ[:48], coder: "<tool_call><function=read><parameter=path>\nx"}

    def seconds(tokenizer: Any, n: int) -> float:
        began = time.process_time()
        parts_of(tokenizer, itertools.chain([heads[tokenizer]], itertools.repeat(tail, n)))
        return time.process_time() - began

    for tokenizer in heads:
        growth = min(seconds(tokenizer, 8000) / seconds(tokenizer, 1000) for _ in range(3))
        assert growth < 24, "8 is linear, 64 quadratic"


SAID = st.text(alphabet='a"\\{}[]<>/\n é,:', max_size=30)


@settings(max_examples=100, deadline=None)
@given(path=SAID, command=SAID, data=st.data())
def test_any_arguments_in_any_pieces(
    writers: dict[str, Any], path: str, command: str, data: Any
) -> None:
    tokenizer = writers[data.draw(st.sampled_from(["json_tools", "mistral", "kimi_k2"]))]
    arguments = json.dumps({"path": path, command: [command, {"x": None}]})
    start = tokenizer.tool_call_start
    text = f'{start}{{"name": "read", "arguments": {arguments}}}{tokenizer.tool_call_end}'
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    [part] = read(tokenizer, pieces)
    assert part.ends and part.text == arguments


@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS | WHOLE)),
    thinking=st.booleans(),
    cut=st.booleans(),
    data=st.data(),
)
def test_any_text_of_any_format_in_any_pieces(
    writers: dict[str, Any], name: str, thinking: bool, cut: bool, data: Any
) -> None:
    said, how = (FORMATS | WHOLE)[name][1], {"thinking": thinking, "cut": cut}
    places = st.integers(0, len(said))
    piece = st.builds(lambda a, b: said[a:b], places, places) | st.just(said)
    text = "".join(data.draw(st.lists(piece | st.sampled_from(PIECES), max_size=9)))
    whole = read(writers[name], [text], **how)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(writers[name], pieces, **how) == whole
    assert read(writers[name], text, **how) == whole, "character by character"


# ---- what cannot be read, or not at once
# ---------------------------------------------------------------------------

HEADS = {  # a call of `read`, up to its parameters and after them
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="read">\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "glm47": ("<tool_call>read\n", "</tool_call>"),
    "qwen3_coder": ("<tool_call>\n<function=read>\n", "</function>\n</tool_call>"),
}
PARAMETERS = {
    "minimax_m2": '<parameter name="%s">%s</parameter>\n',
    "glm47": "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
    "qwen3_coder": "<parameter=%s>\n%s\n</parameter>\n",
}


def function(**properties: Any) -> list[Any]:
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "read", "parameters": schema}}]


def spelled(name: str, **values: str) -> str:
    head, ends = HEADS[name]
    return head + "".join(PARAMETERS[name] % item for item in values.items()) + ends


def calls_in(tokenizer: Any, pieces: Any, tools: Any = TOOLS) -> list[Any]:
    return [part.call for part in read(tokenizer, pieces, tools=tools) if part.call]


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("values", [["</parameter>\n</invoke>"], [["</arg_value>"], {"a": "</"}]])
@pytest.mark.parametrize("name", ["minimax_m2", "glm47", "qwen3_coder"])
def test_a_list_may_hold_the_markers(writers: dict[str, Any], name: str, values: Any) -> None:
    tools = function(items={"type": "array"}, path={"type": "string"})
    said = spelled(name, items=json.dumps(values), path="a")
    for pieces in ([said], list(said)):
        [call] = calls_in(writers[name], pieces, tools)
        assert json.loads(call.arguments) == {"items": values, "path": "a"}


def test_a_parameter_that_cannot_be_read_is_not_left_out(writers: dict[str, Any]) -> None:
    """The call is not one that a client can run by mistake."""
    tools = function(a={"type": "integer"}, b={"type": "string"})
    broken = [
        ("minimax_m2", '<parameter name="a">1</parameter>\n<parameter>b\nx</parameter>'),
        ("glm47", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b\n<arg_value>x"),
        ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n<parameter>b\nx\n</parameter>"),
        ("qwen3_coder", "<parameter=b>\nx\n</parameter>\n<parameter>a\n1\n</parameter>"),
    ]
    for name, inner in broken:
        head, ends = HEADS[name]
        said = head + inner + ends
        calls = calls_in(writers[name], list(said), tools)
        for call in calls:
            with pytest.raises(ValueError):
                json.loads(call.arguments)
        assert len(calls) == 1


def test_further_attributes_and_nothing(writers: dict[str, Any]) -> None:
    kinds = {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}
    said = '<parameter name="a" type="int">1</parameter>\n<parameter name="b">None</parameter>\n'
    head, ends = HEADS["minimax_m2"]
    [call] = calls_in(writers["minimax_m2"], list(head + said + ends), function(**kinds))
    assert json.loads(call.arguments) == {"a": 1, "b": None}


def test_a_string_that_may_be_null_is_streamed(writers: dict[str, Any]) -> None:
    """Once it is none; and a long value is not searched twice."""
    tools = function(b={"type": ["string", "null"]}, items={"type": "array"})
    head, ends = HEADS["qwen3_coder"]
    text = "nullable " + "word " * 12_000
    reader = OutputParser(writers["qwen3_coder"], tools, False)
    began = time.process_time()
    for piece in cut(head + f"<parameter=b>\n{text}", 4):
        reader.feed(piece)
    assert len(reader.calls[0].arguments) > len(text)
    many = json.dumps(["x" * 8] * 6_000)
    said = head + f"<parameter=items>\n{many}\n</parameter>" + ends
    [call] = calls_in(writers["qwen3_coder"], cut(said, 4), tools)
    assert len(json.loads(call.arguments)["items"]) == 6_000
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "said",
    [
        '{"type": "function", "name": "read", "parameters": {"path": "a.py", "lines": 3}}',
        '{"id": "1", "name": "read", "arguments": {"path": "a.py", "lines": 3}}',
        '{"function": "read", "parameters": {"path": "a.py", "lines": 3}}',
        '{"type": "function", "function": {"name": "read", "arguments": {"path": "a.py", "lines": 3}}}',
        '{"name": "read", "parameters": "{\\"path\\": \\"a.py\\", \\"lines\\": 3}"}',
    ],
)
def test_calls_in_json_without_tags_in_other_orders(hermes: Any, said: str) -> None:
    for pieces in ([said], list(said)):
        [call] = calls_in(hermes, pieces)
        assert (call.name, json.loads(call.arguments)) == ("read", CALL_READ[2])


def test_a_marker_inside_a_string_of_a_call_that_is_read_whole(writers: dict[str, Any]) -> None:
    for name, (_, said) in WHOLE.items():
        end = re.search(r"<[^<>]*>\Z", said)
        assert end
        said = said.replace("a.py", f"a{end[0]}.py")
        [call] = calls_in(writers[name], list(said))
        assert json.loads(call.arguments) == {"path": f"a{end[0]}.py", "lines": 3}


def test_a_section_whose_calls_have_tags_of_their_own(tmp_path: Path) -> None:
    """As Hunyuan's."""
    each = "<tool_call>{{ c.function.name }}<tool_sep>\n```json\n{{ c.function.arguments | tojson }}\n```</tool_call>\n"
    turn = (
        "<turn>{{ m.content }}{% if m.tool_calls %}<tool_calls>\n{% for c in m.tool_calls %}" + each
    )
    template = "{% for m in messages %}" + turn + "{% endfor %}</tool_calls>{% endif %}{% endfor %}"
    made = load_tokenizer(save_tokenizer(tmp_path, template=template))
    once = f"<tool_call>read<tool_sep>\n```json\n{JSON}\n```</tool_call>\n"
    parts = read(made, list(f"<tool_calls>\n{once}{once}</tool_calls>"))
    assert [json.loads(part.call.arguments) for part in parts if part.call] == [ARGUMENTS] * 2
    assert all(part.call for part in parts)


def test_the_key_of_a_value_may_close_it_too(tmp_path: Path) -> None:
    key = "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>\n"
    each = (
        '<use name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}' + key
    )
    turn = (
        "<turn>{{ m.content }}{% for c in m.tool_calls or [] %}"
        + each
        + "{% endfor %}</use>{% endfor %}"
    )
    made = load_tokenizer(
        save_tokenizer(tmp_path, template="{% for m in messages %}" + turn + "{% endfor %}")
    )
    said = '<use name="read">\n<path><b>a</b>\n<lines>x</path>\n<lines>3</lines>\n</use>'
    [call] = calls_in(made, list(said))
    assert json.loads(call.arguments) == {"path": "<b>a</b>\n<lines>x", "lines": 3}
