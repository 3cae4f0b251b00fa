"""Reasoning, content and calls: the same however the text is cut, and nothing is lost."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.text.chat import load_tokenizer
from mlxspec.text.output_parser import OutputParser, Part
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


def read(tokenizer: Any, pieces: Any, tools: Any = TOOLS, thinking: bool = False) -> list[Part]:
    """The parts of an answer that comes in these pieces, neighbours of one kind joined."""
    ids = itertools.count()
    reader = OutputParser(tokenizer, tools, thinking, lambda: f"id{next(ids)}")
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    assert reader.calls == [part.call for part in parts if part.call]
    joined: list[Part] = []
    for part in parts:
        assert part.call or part.text, "an empty part"
        if joined and part.call is None and joined[-1].kind == part.kind:
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def told(tokenizer: Any, text: str, **kw: Any) -> list[Any]:
    """Short: ("kind", text) or ("call", name, arguments)."""
    return [
        ("call", p.call.name, json.loads(p.call.arguments)) if p.call else (p.kind, p.text)
        for p in read(tokenizer, [text], **kw)
    ]


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
    "a parameter without an end": (CUT_XML, [("content", CUT_XML)]),
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
    *("a", " ", "\n", "{", '"name":', "}", "é"),
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
    whole = read(tokenizer, [text], tools, thinking)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(tokenizer, pieces, tools, thinking) == whole
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


def test_why_a_call_is_text_is_logged(hermes: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxspec")
    told(hermes, '<tool_call>\n{"name": "read", "arg')
    assert "cannot be read" in caplog.text and "JSONDecodeError" in caplog.text


def test_content_is_shown_as_it_comes(hermes: Any) -> None:
    reader = OutputParser(hermes, TOOLS, False, str)
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
        ('<tool_call>{"name": "run", "arguments": {"x": NaN}}</tool_call>', None),
        ('<tool_call>{"name": "run", "arguments": {"x": 1e999}}</tool_call>', None),
        ("<tool_call>" + "[" * 5000, None),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_marker_is_text(hermes: Any, text: str, want: Any) -> None:
    assert told(hermes, text) == (want or [("content", text)])
    assert read(hermes, text) == read(hermes, [text])


def test_under_a_grammar_there_are_no_calls_but_those_with_tags(hermes: Any) -> None:
    def ruled(text: str) -> list[tuple[str, str]]:
        reader = OutputParser(hermes, TOOLS, True, str, constrained=True)
        return [
            (p.kind, p.text or p.call.name) for p in [*reader.feed(text), *reader.finish()] if p
        ]

    assert ruled(f"a {READ} b</think>{RUN}") == [("reasoning", f"a {READ} b"), ("call", "run")]
    assert ruled('</think>{"name": "read", "arguments": {}}')[0][0] == "content"


def test_half_a_surrogate_pair_can_be_sent(hermes: Any) -> None:
    [part] = read(
        hermes, ['<tool_call>{"name": "run", "arguments": {"command": "a\\ud800b"}}</tool_call>']
    )
    assert part.call and json.loads(part.call.arguments) == {"command": "a?b"}


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
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": kinds}}}]
    values = {"opt": "abc", "n": "5", "on": "true", "way": "x", "one": "5", "s": "NULL"}
    values |= {"id": "1234567890123456789", "version": "1.10", "none": "null"}
    said = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    [(_, _, arguments)] = told(coder, f"<function=f>\n{said}</function>", tools=tools)
    assert arguments == {"opt": "abc", "n": 5, "on": True, "way": "x", "one": 5, "s": "NULL"} | {
        "id": 1234567890123456789,
        "version": "1.10",
        "none": None,
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
