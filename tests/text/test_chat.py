"""Rendering: one conversation, one rendering; what a template refuses; the model's own defaults."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.chat import (
    RejectedRequest,
    canonical,
    check_draft,
    encode,
    generation_defaults,
    load_tokenizer,
    render_chat,
    template_reads,
)
from mlxspec.types import Sampling, UserError
from tests.tiny_tokenizer import TEMPLATE, save_tokenizer

STRICT = (  # alternates, system first only, as many models' templates demand
    "{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System must come first') }}{% endif %}"
    "{% if not loop.first and m['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% endfor %}"
) + TEMPLATE
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + STRICT
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def with_template(path: Path, template: str | None) -> Any:
    return load_tokenizer(save_tokenizer(path, template=template))


def text(tokenizer: Any, messages: list[Any], **kw: Any) -> str:
    return str(tokenizer.decode(render_chat(tokenizer, messages, **kw)))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


NINE = (  # as Mistral's: ids of nine letters and digits, of calls and of results
    "{# tools #}{% for m in messages %}{% for call in m['tool_calls'] or [] %}"
    "{% if call['id'] is not defined or call['id']|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ call['id'] }}{% endfor %}{% if m['role'] == 'tool' %}"
    "{% if m['tool_call_id'] is not defined or m['tool_call_id']|length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}{{ '=' + m['tool_call_id'] + ';' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "ids",
    [
        ("call_0123456789abcdef", "toolu_01_xyz"),
        ("a", "b"),
        (None, None),
        ("call_1_abcdefghi", "call_2_abcdefghi"),
    ],
)
def test_call_ids_that_a_template_refuses_are_shortened(tmp_path: Path, ids: Any) -> None:
    """Each result keeps its call."""
    tokenizer = with_template(tmp_path, NINE)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}} for _ in ids]
    results = [{"role": "tool", "content": "x"} for _ in ids]
    for id, call, result in zip(ids, calls, results, strict=True):
        if id:
            call["id"] = result["tool_call_id"] = id
    said = text(tokenizer, [user("a"), {"role": "assistant", "tool_calls": calls}, *results])
    first, second = said[:9], said[9:18]
    assert first != second and said[18:] == f"={first};={second};"


def test_an_effort_that_a_template_refuses_is_left_out(tmp_path: Path) -> None:
    """Qwen3.8's knows three words, and not "high", which agents send."""
    known = "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'medium') %}"
    template = known + "{{ raise_exception('effort') }}{% endif %}{{ reasoning_effort }}" + TEMPLATE
    tokenizer = with_template(tmp_path, template)
    assert text(tokenizer, [user("a")], reasoning_effort="low").startswith("low")
    assert text(tokenizer, [user("a")], reasoning_effort="high") == text(tokenizer, [user("a")])
    with pytest.raises(RejectedRequest, match="effort"):  # who wants none shall not get the most
        render_chat(tokenizer, [user("a")], reasoning_effort="none")


def test_a_conversation_is_rendered_up_to_the_answer(tokenizer: Any) -> None:
    assert text(tokenizer, [{"role": "system", "content": "Be brief."}, user("hello")]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        tokenizer.decode(render_chat(tokenizer, [user("a")], False))
        == "<|im_start|>user\na<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hello"), user([{"type": "text", "text": "hello"}])),
        (
            user("hello"),
            user(
                [
                    {"type": "text", "text": "hel"},
                    {"type": "text", "text": "lo", "cache_control": {}},
                ]
            ),
        ),
        ({"role": "system", "content": "x"}, {"role": "developer", "content": "x"}),
        ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}),
        ({"role": "assistant", "content": ""}, {"role": "assistant"}),
        (
            {"role": "assistant", "content": "No."},
            {"role": "assistant", "content": None, "refusal": "No."},
        ),
        (user("hello"), user("hello") | {"id": "1", "status": "done", "annotations": []}),
    ],
)
def test_two_spellings_render_alike(
    tokenizer: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert render_chat(tokenizer, [one, user("x")]) == render_chat(tokenizer, [other, user("x")])


def assistant(calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([user("x"), {"role": "robot", "content": "x"}], "messages[1].role"),
        ([assistant([{}])], "messages[0].tool_calls[0]"),
        ([assistant(5)], "messages[0].tool_calls"),
        ([user("x") | {"tool_calls": [{}]}], "messages[0].tool_calls"),
        ([user("x") | {"audio": {"id": 1}}], "messages[0].audio"),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0]"),
        ([user([{"type": "text", "text": 1}])], "messages[0].content[0]"),
        ([user(["x"])], "messages[0].content[0]"),
        ([user("x") | {"name": 5}], "messages[0].name"),
    ],
)
def test_what_cannot_be_read_is_refused(tokenizer: Any, messages: list[Any], field: str) -> None:
    with pytest.raises(RejectedRequest) as caught:
        render_chat(tokenizer, messages)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_refusing_template_gets_merged_messages(tmp_path: Path, tokenizer: Any) -> None:
    strict = with_template(tmp_path, STRICT)
    plain = [
        {"role": "system", "content": "S"},
        user("A"),
        {"role": "assistant", "content": "B"},
        user("C"),
    ]
    assert render_chat(strict, plain) == render_chat(tokenizer, plain)
    rough = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "T"},
        user("A"),
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": "B"},
        user("C"),
        user("D"),
    ]
    smooth = [
        {"role": "system", "content": "S\n\nT"},
        user("A\n\n<system>\nlate\n</system>"),
        {"role": "assistant", "content": "B"},
        user("C\n\nD"),
    ]
    assert render_chat(strict, rough) == render_chat(tokenizer, smooth)
    grown = [*rough, {"role": "assistant", "content": "E"}, user("F")]
    begin = render_chat(strict, rough, False)
    assert render_chat(strict, grown)[: len(begin)] == begin  # or the prefix cache would never hit


def test_a_template_without_a_system_role(tmp_path: Path, tokenizer: Any) -> None:
    bare = with_template(tmp_path, NO_SYSTEM)
    assert render_chat(bare, [{"role": "system", "content": "S"}, user("A")]) == render_chat(
        tokenizer, [user("S\n\nA")]
    )
    assert render_chat(bare, [{"role": "system", "content": "S"}]) == render_chat(
        tokenizer, [user("S")]
    )


def test_what_the_template_refuses_in_every_form(tmp_path: Path) -> None:
    never = with_template(tmp_path, "{{ raise_exception('Not these ' ~ messages|length) }}")
    with pytest.raises(RejectedRequest, match="refuses them: Not these 2; change roles") as caught:
        render_chat(never, [user("A"), user("B")])  # what is said of the messages as they came
    assert caught.value.field == "messages"


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(RejectedRequest, match="no chat template; use /v1/completions"):
        render_chat(with_template(tmp_path, None), [user("A")])


def test_a_billing_header_is_dropped_from_the_system_text_alone(tokenizer: Any) -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    parts = [header, {"type": "text", "text": "S\nT"}]
    assert canonical([{"role": "system", "content": parts}])[0]["content"] == "S\nT"
    assert canonical([user([header])])[0]["content"] == header["text"]


def test_template_variables(tmp_path: Path) -> None:
    loud = with_template(tmp_path, "{{ effort }}" + TEMPLATE)
    assert text(loud, [user("A")], effort="high").startswith("high<|im_start|>")
    assert template_reads(loud, "effort") and not template_reads(loud, "colour")
    with pytest.raises(
        RejectedRequest, match=r"chat_template_kwargs\.tokenize is set by the server"
    ):
        render_chat(loud, [user("A")], tokenize=False)
    with pytest.raises(
        RejectedRequest, match=r"chat_template_kwargs\.messages is set by the server"
    ):
        render_chat(loud, [user("A")], messages=[])
    for name in "self", "raise_exception", "strftime_now":
        with pytest.raises(RejectedRequest, match=rf"chat_template_kwargs\.{name} is set"):
            render_chat(loud, [user("A")], **{name: 1})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_and_names_reach_the_template(tmp_path: Path, field: str) -> None:
    told = with_template(
        tmp_path,
        "{% for m in messages %}{{ m.name }}:{{ m.reasoning_content }}:{{ m.content }};{% endfor %}",
    )
    said = {"role": "assistant", "content": "B", field: "hm"}
    assert text(told, [user("A") | {"name": "Ann"}, said]) == "Ann::A;:hm:B;"


def test_canonical_keeps_the_callers_messages_as_they_were() -> None:
    given = [user([{"type": "text", "text": "A"}])]
    canonical(given)
    assert given == [user([{"type": "text", "text": "A"}])]


def test_encode(tmp_path: Path, tokenizer: Any) -> None:
    assert tokenizer.decode(encode(tokenizer, "hello é\n")) == "hello é\n"
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<|endoftext|>"}))
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    begin = {"id": "<|endoftext|>", "type_id": 0}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [297], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    begun = load_tokenizer(tmp_path)
    [a] = encode(tokenizer, "a")
    assert encode(begun, "a") == [297, a]
    assert encode(begun, "<|endoftext|>a") == [297, a]  # not twice
    assert encode(begun, "a", special=False) == [a]


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, {299}),
        ({"eos_token_id": 297}, None, {297, 299}),
        ({"eos_token_id": 297}, {"eos_token_id": [298, 5]}, {298, 5, 299}),
        ({"eos_token_id": 297}, {"eos_token_id": None}, {297, 299}),
    ],
)
def test_end_tokens(tmp_path: Path, config: dict[str, Any], generation: Any, ids: set[int]) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path).eos_token_ids == ids


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="has no usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, Sampling()),
        ("{broken", Sampling()),
        ("[]", Sampling()),
        ({"eos_token_id": 2}, Sampling(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, Sampling(temperature=0.0)),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0,
                "repetition_penalty": 1.05,
            },
            Sampling(0.6, 20, 0.95, 0.0, 1.05),
        ),
        ({"temperature": None, "top_k": None}, Sampling()),
    ],
)
def test_generation_defaults(tmp_path: Path, content: Any, expected: Sampling) -> None:
    if content is not None:
        written = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(written)
    assert generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "value", [-1, 3, 10**400, -(10**400), "0.6", True, float("nan"), float("inf"), [0.6]]
)
def test_a_bad_default_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with caplog.at_level(logging.WARNING, "mlxspec"):
        assert generation_defaults(tmp_path) == Sampling()
    assert "temperature" in caplog.text


def test_a_draft_model_must_have_the_same_vocabulary(tokenizer: Any) -> None:
    class Other:
        def __init__(self, vocab: dict[str, int]) -> None:
            self.get_vocab = lambda: vocab

    own = tokenizer.get_vocab()
    check_draft(tokenizer, tokenizer, ("big", "small"))
    check_draft(tokenizer, Other({**own, "<more>": max(own.values()) + 1}), ("big", "small"))
    check_draft(tokenizer, Other({t: i for t, i in own.items() if i < 200}), ("big", "small"))
    [token] = [t for t, i in own.items() if i == 77]
    swapped = {t: i for t, i in own.items() if i != 77} | {"other": 77}
    with pytest.raises(
        UserError, match="draft = small has another vocabulary than big: token 77 is 'other' there"
    ) as e:
        check_draft(tokenizer, Other(swapped), ("big", "small"))
    assert f"{token!r} here" in str(e.value)
