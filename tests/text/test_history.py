"""What was generated comes back token for token, and only there."""

import json
from typing import Any

import pytest

from mlxspec.text import history as module
from mlxspec.text.chat import conversation_of, encode, load_tokenizer, remember, render
from mlxspec.text.history import History
from mlxspec.text.output_parser import Call, OutputParser
from tests.tiny_tokenizer import AGENT, CALLS, CODER, THINK, save_tokenizer

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}]
END = "<|im_end|>"


@pytest.fixture(scope="module", params=[("bytes", AGENT), ("spm", AGENT), ("bytes", CODER)])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, template = request.param
    return load_tokenizer(
        save_tokenizer(tmp_path_factory.mktemp("t"), kind, template, THINK + CALLS)
    )


def letters(tokenizer: Any, text: str) -> list[int]:
    """A spelling that no encoder would choose: one token per character, markers aside."""
    made: list[int] = []
    rest = text
    while rest:
        marker = next((m for m in (*THINK, *CALLS, END) if rest.startswith(m)), rest[0])
        made += encode(tokenizer, marker, special=False)
        rest = rest[len(marker) :]
    return made


class Session:
    """A client and the server's memory; `say` is what the model generates next."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.history = tokenizer, History()
        self.messages: list[Any] = [{"role": "user", "content": "hello"}]

    def prompt(self) -> Any:
        self.talk = conversation_of(self.messages, TOOLS, {}, self.history)
        self.rendered = render(self.tokenizer, self.talk, self.history)
        return self.rendered.ids

    def say(self, text: str) -> list[int]:
        """The tokens of prompt and answer; the client keeps the answer as it read it."""
        prompt, made = self.prompt(), letters(self.tokenizer, text + END)
        reader = OutputParser(self.tokenizer, TOOLS, False)
        parts = reader.feed(text) + reader.finish()
        said: dict[str, Any] = {"role": "assistant"}
        said["content"] = "".join(p.text for p in parts if p.kind == "content")
        said["reasoning_content"] = "".join(p.text for p in parts if p.kind == "reasoning")
        said["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reader.calls
        ]
        for call in reader.calls:
            self.history.keep_call(call)
        answer = conversation_of([said], None, {}, self.history).messages[0]
        remember(self.tokenizer, self.talk, self.rendered, answer, made, self.history)
        self.messages.append(said)
        return [*prompt, *made]

    def result(self, text: str = "done") -> None:
        last = self.messages[-1]["tool_calls"]
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": text} for call in last
        ]


def spelled(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def calls_of(tokenizer: Any) -> list[str]:
    if tokenizer.tool_parser and "qwen3_coder" in tokenizer.tool_parser.__module__:
        xml = "<function=edit>\n<parameter=a>\n{}\n</parameter>\n</function>"
        return [spelled(xml.format(a)) for a in ("x", "y z")]
    return [
        spelled('{"name":"edit","arguments":{"a":"x" , "b":[1,2]}}'),
        spelled('{"arguments": {}, "name": "edit"}'),
    ]


def test_each_turn_begins_with_the_tokens_of_the_turn_before(tokenizer: Any) -> None:
    s = Session(tokenizer)
    first, second = calls_of(tokenizer)
    for text in (f"I try.\n{first}", f"{first}\n{second}", "well"):
        so_far = s.say(text)
        if s.messages[-1]["tool_calls"]:
            s.result()
        else:
            s.messages.append({"role": "user", "content": "and"})
        assert s.prompt()[: len(so_far)] == so_far
    assert s.prompt() != encode(tokenizer, s.rendered.text, special=False), "the test says nothing"


def test_reasoning_is_kept_where_the_template_keeps_it(tokenizer: Any) -> None:
    s = Session(tokenizer)
    first, _ = calls_of(tokenizer)
    so_far = s.say(f"<think>\nso\n</think>\n\n{first}")
    s.result()
    assert s.prompt()[: len(so_far)] == so_far
    s.messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "new"}]
    assert "so" not in s.rendered.text or s.prompt()[: len(so_far)] != so_far, (
        "the template drops it now"
    )
    assert s.prompt() == encode(tokenizer, s.rendered.text, special=False)


@pytest.mark.parametrize("how", ["compact", "defaults", "sorted"])
def test_arguments_that_clients_spell_anew(tokenizer: Any, how: str) -> None:
    s = Session(tokenizer)
    so_far = s.say(calls_of(tokenizer)[0])
    function = s.messages[-1]["tool_calls"][0]["function"]
    own = json.loads(function["arguments"])
    changed = (
        {"replace_all": False, **own}
        if how == "defaults"
        else dict(sorted(own.items(), reverse=True))
    )
    function["arguments"] = json.dumps(own if how == "compact" else changed, separators=(",", ":"))
    s.result()
    assert s.prompt()[: len(so_far)] == so_far


def test_what_the_client_changed_is_encoded_as_it_came(tokenizer: Any) -> None:
    s = Session(tokenizer)
    s.say("hello you")
    s.messages[-1]["content"] = "hello me"
    s.messages.append({"role": "user", "content": "and"})
    assert s.prompt() == encode(tokenizer, s.rendered.text, special=False)
    assert "hello me" in tokenizer.decode(s.prompt())


def test_another_conversation_gets_nothing(tokenizer: Any) -> None:
    s, other = Session(tokenizer), Session(tokenizer)
    s.say("hello you")
    other.history = s.history
    other.messages = [
        {"role": "user", "content": "Hello"},
        *s.messages[1:],
        {"role": "user", "content": "and"},
    ]
    assert other.prompt() == encode(tokenizer, other.rendered.text, special=False)


def test_a_fork_has_both_ways(tokenizer: Any) -> None:
    s = Session(tokenizer)
    base = list(s.messages)
    ways = []
    for text in ("hello you", "hello system"):
        s.messages = list(base)
        ways.append((s.say(text), [*s.messages, {"role": "user", "content": "and"}]))
    for so_far, messages in ways:
        s.messages = messages
        assert s.prompt()[: len(so_far)] == so_far


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    kept = History()
    for i in range(40):
        kept.keep_turn(f"{i}", f"{i}yes!", list(range(9)), "!")
        kept.keep_call(Call(f"c{i}", "f", "x" * (i % 7)))
        assert sum(len(t.ids) for t in kept._turns.values()) <= 100
        assert len(kept._calls) <= 3
    assert kept.call("c39") and kept.call("c0") is None
    kept.keep_turn("a", "ayes!", list(range(500)), "!")
    assert not kept._turns


def test_an_answer_that_its_template_renders_otherwise_is_not_kept() -> None:
    kept = History()
    kept.keep_turn("ab", "aXyes!", [1], "!")
    kept.keep_turn("ab", "abyes", [1], "!")
    kept.keep_turn("ab!", "ab!", [1], "!")
    kept.keep_turn("ab", "abyes", [1], "")
    assert not kept._turns


@pytest.mark.parametrize("change", ["value", "name", "less"])
def test_a_call_that_the_client_changed_is_its_own(tokenizer: Any, change: str) -> None:
    s = Session(tokenizer)
    s.say(calls_of(tokenizer)[0])
    function = s.messages[-1]["tool_calls"][0]["function"]
    function["name"] = "delete" if change == "name" else "edit"
    function["arguments"] = {"value": '{"a": "ls", "b": [1, 2]}', "less": "{}"}.get(
        change, function["arguments"]
    )
    s.result()
    assert s.prompt() == encode(tokenizer, s.rendered.text, special=False)
    text = tokenizer.decode(s.prompt())
    assert {"value": "ls", "name": "delete"}.get(change, "edit") in text
    assert change != "less" or '"a": "x"' not in text


def test_reasoning_that_the_template_hides_stays_hidden(tmp_path: Any) -> None:
    """Else the next client that says the same would be shown what was thought for another."""
    shown = "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    assert shown in AGENT
    hiding = load_tokenizer(
        save_tokenizer(tmp_path, "bytes", AGENT.replace(shown, ""), THINK + CALLS)
    )
    s = Session(hiding)
    s.say("<think>\nSECRET\n</think>\n\nhello")
    s.messages.append({"role": "user", "content": "and"})
    assert "SECRET" not in hiding.decode(s.prompt())


def test_what_is_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    monkeypatch.setattr(module, "MAX_TURNS", 5)
    kept = History()
    for i in range(9):
        kept.keep_call(Call(f"c{i}", "f", "{}"))
        kept.keep_turn(f"{i}", f"{i}yes!", [1], "!")
        assert kept.call("c0")
    assert len(kept._turns) == 5


def test_a_reply_that_comes_back_in_two_messages(tokenizer: Any) -> None:
    s = Session(tokenizer)
    so_far = s.say(f"I try.\n{calls_of(tokenizer)[0]}")
    said = s.messages.pop()
    s.messages += [
        {"role": "assistant", "content": "I try."},
        {"role": "assistant", "content": None, "tool_calls": said["tool_calls"]},
    ]
    s.result()
    assert s.prompt()[: len(so_far)] == so_far
