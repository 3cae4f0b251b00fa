"""The reader: the same text for every grouping of the tokens, stop strings, whole characters,
bytes."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.text.chat import encode, load_tokenizer
from mlxspec.text.detokenizer import Detokenizer, token_bytes
from tests.support.tiny_tokenizer import Kind, save_tokenizer

END = 299


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Any]:
    path = tmp_path_factory.mktemp("tokenizers")
    kinds: tuple[Kind, ...] = ("bytes", "spm", "words")
    return {kind: load_tokenizer(save_tokenizer(path / kind, kind)) for kind in kinds}


@pytest.fixture(scope="module")
def tokenizer(tokenizers: dict[Kind, Any]) -> Any:
    return tokenizers["bytes"]


def read(reader: Detokenizer, groups: list[list[int]]) -> tuple[str, str | None, int, list[int]]:
    text = "".join([reader.feed(group) for group in groups]) + reader.finish()
    return text, reader.stopped, reader.count, reader.released


texts = st.text(alphabet="ab \n.éß漢🦊'the", max_size=40)
tokens = st.lists(st.integers(0, 310), max_size=40)
stops = st.lists(st.text(alphabet="ab the\n🦊", min_size=1, max_size=5), max_size=3)


@st.composite
def grouped(draw: st.DrawFn, of: st.SearchStrategy[list[int]]) -> tuple[list[int], list[list[int]]]:
    ids = draw(of)
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    return ids, [ids[a:b] for a, b in itertools.pairwise(cuts)]


@given(data=grouped(tokens), stop=stops, continues=st.booleans())
def test_every_grouping_reads_alike(
    tokenizer: Any, data: tuple[list[int], list[list[int]]], stop: list[str], continues: bool
) -> None:
    ids, groups = data
    one, each, some = (Detokenizer(tokenizer, stop, frozenset({END}), continues) for _ in range(3))
    assert read(one, [ids]) == read(each, [[t] for t in ids]) == read(some, groups)


@pytest.mark.parametrize("kind", ["bytes", "spm"])
@given(text=texts, stop=stops)
def test_the_text_is_cut_where_the_first_stop_string_completes(
    tokenizers: dict[Kind, Any], kind: Kind, text: str, stop: list[str]
) -> None:
    tokenizer = tokenizers[kind]
    ids = encode(tokenizer, text)
    whole = read(Detokenizer(tokenizer, prompt_text_continues=True), [ids])[0]
    reader = Detokenizer(tokenizer, stop, prompt_text_continues=True)
    shown, stopped, count, _ = read(reader, [[t] for t in ids])
    ends = [(whole.index(s) + len(s), whole.index(s), s) for s in stop if s in whole]
    if ends:
        assert (shown, stopped) == (whole[: min(ends)[1]], min(ends)[2])
    else:
        assert (shown, stopped, count) == (whole, None, len(ids))


@given(data=tokens)
def test_no_character_is_torn(tokenizer: Any, data: list[int]) -> None:
    """The pieces add up to the whole; a replacement character is shown only where the bytes are
    broken."""
    reader = Detokenizer(tokenizer, prompt_text_continues=True)
    pieces = [reader.feed([t]) for t in data] + [reader.finish()]
    raw = b"".join(token_bytes(tokenizer, t) for t in data)
    assert "".join(pieces) == raw.decode("utf-8", "replace")


def test_a_character_of_many_tokens_comes_whole(tokenizer: Any) -> None:
    ids = encode(tokenizer, "🦊é")
    assert len(ids) > 3
    reader = Detokenizer(tokenizer)
    assert [piece for t in ids if (piece := reader.feed([t]))] == ["🦊", "é"]


@pytest.mark.parametrize("kind", ["bytes", "spm", "words"])
def test_leading_space(tokenizers: dict[Kind, Any], kind: Kind) -> None:
    """An answer begins with a space where that is the model's, not SentencePiece's; a text that
    goes on keeps it."""
    tokenizer = tokenizers[kind]
    ids = encode(tokenizer, "a hello")
    prompt, rest = ids[:1], ids[1:]
    assert tokenizer.decode(ids) == "a hello" and tokenizer.decode(prompt) == "a"
    assert read(Detokenizer(tokenizer), [rest])[0] == (" hello" if kind == "bytes" else "hello")
    assert read(Detokenizer(tokenizer, prompt_text_continues=True), [rest])[0] == " hello"


def test_words_that_go_on_without_a_space(tokenizers: dict[Kind, Any]) -> None:
    ids = encode(tokenizers["words"], "hellos")
    assert len(ids) == 2
    assert read(Detokenizer(tokenizers["words"], prompt_text_continues=True), [ids[1:]])[0] == "s"


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("hello world", [" wor"], "hello", " wor"),
        ("hello world", ["world!"], "hello world", None),
        ("hello world", ["o", "hello"], "", "hello"),
        ("abcd", ["bc", "abcd"], "a", "bc"),
        ("abcd", ["abc", "bc"], "", "abc"),
        ("aaab", ["aab"], "a", "aab"),
        ("x\n\ny", ["\n\n"], "x", "\n\n"),
        ("a🦊b", ["🦊"], "a", "🦊"),
        ("hello", ["hello"], "", "hello"),
    ],
)
def test_stop_strings(
    tokenizer: Any, text: str, stop: list[str], shown: str, stopped: str | None
) -> None:
    for ids in (encode(tokenizer, text), [t for c in text for t in encode(tokenizer, c)]):
        reader = Detokenizer(tokenizer, stop)
        assert read(reader, [[t] for t in ids])[:2] == (shown, stopped)
        assert reader.feed(ids) == "" and reader.ended


def test_a_possible_stop_string_is_held_back(tokenizer: Any) -> None:
    reader = Detokenizer(tokenizer, ["</end>"])
    said = [reader.feed(encode(tokenizer, c)) for c in "a</e"]
    assert said == ["a", "", "", ""]
    assert reader.feed(encode(tokenizer, "x")) == "</ex"
    assert reader.feed(encode(tokenizer, "<")) == ""
    assert reader.finish() == "<"


def test_a_stop_string_that_only_the_end_completes(tokenizer: Any) -> None:
    reader = Detokenizer(tokenizer, ["\ufffd"])
    torn = encode(tokenizer, "a🦊")[:-1]
    assert reader.feed(torn) == "a"  # the character may still be completed
    assert reader.finish() == "" and reader.stopped == "\ufffd"


def test_the_stop_token_is_counted_and_never_shown(tokenizer: Any) -> None:
    reader = Detokenizer(tokenizer, stop_tokens=frozenset({END}))
    assert reader.feed([*encode(tokenizer, "hello"), END, 65]) == "hello"
    assert reader.finish() == "" and reader.stopped is None
    assert reader.count == 2 and reader.released == [0]


def test_tokens_after_a_stop_string_are_not_counted(tokenizer: Any) -> None:
    """Drafted tokens come several at once; usage must not depend on that."""
    ids = encode(tokenizer, "a.b.c")
    for groups in ([ids], [[t] for t in ids]):
        reader = Detokenizer(tokenizer, ["b"])
        assert read(reader, groups) == ("a.", "b", 3, [0, 1])


def test_log_probabilities_wait_for_their_text(tokenizer: Any) -> None:
    reader = Detokenizer(tokenizer, ["the end"])
    reader.feed(encode(tokenizer, "a"))
    assert reader.released == [0]
    for char in " the":
        reader.feed(encode(tokenizer, char))
    assert reader.released == [0, 1]  # of " the" the space only
    reader.feed(encode(tokenizer, "!"))
    assert reader.released == [0, 1, 2, 3, 4, 5]


def test_an_unknown_id_has_no_text(tokenizer: Any) -> None:
    assert read(Detokenizer(tokenizer), [[64, 300, 5000, 65]]) == ("ab", None, 4, [0, 1, 1, 1])
    assert token_bytes(tokenizer, 300) == b""


def test_token_bytes(tokenizers: dict[Kind, Any]) -> None:
    for kind, text in (("bytes", "hello 🦊 é\n\x00"), ("spm", "hello é🦊"), ("words", "hello")):
        tokenizer = tokenizers[kind]
        ids = encode(tokenizer, text)
        raw = b"".join(token_bytes(tokenizer, t) for t in ids)
        assert raw.decode().removeprefix(" ") == text.removeprefix(" ")
    assert token_bytes(tokenizers["bytes"], END) == b"<|im_end|>"
    fox = encode(tokenizers["bytes"], "🦊")
    assert [token_bytes(tokenizers["bytes"], t) for t in fox] == [b"\xf0\x9f", b"\xa6", b"\x8a"]


def test_added_tokens_are_spelled_out(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    made = json.loads(path.read_text())
    made["added_tokens"].append(made["added_tokens"][-1] | {"id": 300, "content": "<é ▁>"})
    path.write_text(json.dumps(made))
    assert token_bytes(load_tokenizer(tmp_path), 300).decode() == "<é ▁>"
