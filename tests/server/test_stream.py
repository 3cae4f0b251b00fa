"""Outputs to pieces, pieces to chunks, bodies and usage: pure functions."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mlxspec.server.errors import ApiError
from mlxspec.server.openai.completions import CompletionWriter, usage_object
from mlxspec.server.openai.schema import Chat, Completion
from mlxspec.server.stream import Choice, Piece, Usage, usage
from mlxspec.text.chat import encode
from mlxspec.text.detokenizer import Detokenizer
from mlxspec.text.output_parser import OutputParser, Part
from mlxspec.types import Logprob, Output, Request

END = 299


NOTHING = Usage(0, 0, 0, 0, 0)


def dialect(tokenizer: Any, chat: bool = True, **body: Any) -> CompletionWriter:
    said = {"messages": [1]} if chat else {"prompt": "a", "n": 2}
    request = (Chat if chat else Completion).model_validate(said | body)
    model: Any = SimpleNamespace(name="m", tokenizer=tokenizer)
    return CompletionWriter(model, request, "x", chat, 1)


ASKED = Request("a", (1, 2, 3), 50)


def choice(
    tokenizer: Any,
    index: int = 0,
    stop: tuple[str, ...] = (),
    parts: bool = False,
    request: Request = ASKED,
) -> Choice:
    read = OutputParser(tokenizer, (), False) if parts else None
    return Choice(index, request, Detokenizer(tokenizer, stop, frozenset({END})), read)


def events(made: bytes) -> list[Any]:
    return [data(chunk + b"\n\n") for chunk in made.split(b"\n\n")[:-1]]


def said(text: str, *rest: Any) -> Piece:
    return Piece([Part("content", text)] if text else [], *rest)


def text_of(piece: Piece) -> str:
    return "".join(part.text for part in piece.parts)


def output(tokens: list[int], **kw: Any) -> Output:
    return Output("r", 0, tuple(tokens), **kw)


def data(chunk: bytes) -> Any:
    assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n") == 2
    return json.loads(chunk[6:])


def test_pieces(tokenizer: Any) -> None:
    made = choice(tokenizer)
    assert made.take(output(encode(tokenizer, "hello"), cached=3, rounds=1)) == said(
        "hello", [], [0]
    )
    last = made.take(output([*encode(tokenizer, " world"), END], cached=3, rounds=4, finish="stop"))
    assert last == said(" world", [], [5], "stop")
    assert (made.finish, made.output.cached, made.output.rounds, made.detokenizer.count) == (
        "stop",
        3,
        4,
        3,
    )


def test_stop_string_ends_a_choice(tokenizer: Any) -> None:
    for finish in (None, "length"):
        made = choice(tokenizer, stop=("lo",))
        assert made.take(output(encode(tokenizer, "hello"), finish=finish)).finish == "stop"
    made = choice(tokenizer, stop=("\ufffd",))  # completed by the flush at the end
    piece = made.take(output(encode(tokenizer, "a🦊")[:-1], finish="length"))
    assert (text_of(piece), piece.finish) == ("a", "stop")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello\n\n\n\n", "\n\n", "hello"),
        ("\n\nhello \n \n", " \n \n", "\n\nhello"),
        ("hello\nyou", "\n", "hello"),
        ("hello\nyou\n\n", "u\n\n", "hello\nyo"),
    ],
)
def test_a_stop_string_of_white_space_ends_the_choice_at_once(
    tokenizer: Any, text: str, stop: str, shown: str
) -> None:
    made = choice(tokenizer, stop=(stop,), parts=True)
    last = Piece()
    for token in encode(tokenizer, text):
        last = made.take(output([token]))
        if last.finish:
            break
    assert last.finish == "stop" and text_of(made.whole) == shown


def test_text_held_back_for_a_stop_string_is_released_at_the_end(tokenizer: Any) -> None:
    made = choice(tokenizer, stop=("hello world",))
    assert made.take(output(encode(tokenizer, "hello"))) == Piece()
    assert made.take(output([END], finish="stop")) == said("hello", [], [0], "stop")


def test_logprobs_come_with_their_text(tokenizer: Any) -> None:
    made = choice(tokenizer, stop=("hello world",))
    hello, you = encode(tokenizer, "hello"), encode(tokenizer, "you")
    first, second = Logprob(hello[0], -1.0), Logprob(you[0], -2.0)
    assert made.take(output(hello, logprobs=(first,))).logprobs == []
    assert made.take(output(you, logprobs=(second,))).logprobs == [first, second]
    assert made.take(output([END], logprobs=(Logprob(END, -3.0),), finish="stop")).logprobs == []


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("abort", 503)])
def test_engine_failures(tokenizer: Any, finish: Any, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        choice(tokenizer).take(output([], finish=finish, error="broken"))
    assert caught.value.status == status


def test_a_piece_without_text_makes_no_chunk(tokenizer: Any) -> None:
    made = choice(tokenizer)
    assert dialect(tokenizer).chunk(made, Piece()) == b""
    assert len(events(dialect(tokenizer).chunk(made, Piece(finish="stop")))) == 1
    assert len(events(dialect(tokenizer).chunk(made, said("a", [], [], "stop")))) == 2


def test_chunks_are_one_line_of_utf8(tokenizer: Any) -> None:
    chunk = dialect(tokenizer).chunk(choice(tokenizer, 3), said("é\n\u2028🦊"))
    assert "é".encode() in chunk and data(chunk)["choices"][0] == {
        "index": 3,
        "delta": {"content": "é\n\u2028🦊"},
        "logprobs": None,
        "finish_reason": None,
    }


def test_openings(tokenizer: Any) -> None:
    roles = [e["choices"][0] for e in events(dialect(tokenizer, n=2).opening(NOTHING))]
    assert [(c["index"], c["delta"]) for c in roles] == [
        (i, {"role": "assistant", "content": ""}) for i in (0, 1)
    ]
    assert dialect(tokenizer, chat=False).opening(NOTHING) == b""


def test_the_chunk_that_says_nothing(tokenizer: Any) -> None:
    assert data(dialect(tokenizer).keepalive())["choices"][0]["delta"] == {"content": ""}
    assert data(dialect(tokenizer, chat=False).keepalive())["choices"][0]["text"] == ""


def test_closings(tokenizer: Any) -> None:
    assert dialect(tokenizer).closing([], NOTHING) == b"data: [DONE]\n\n"
    told = dialect(tokenizer, stream_options={"include_usage": True}).closing(
        [], Usage(3, 2, 1, 0, 0)
    )
    first, _, rest = told.partition(b"\n\n")
    assert rest == b"data: [DONE]\n\n"
    last = data(first + b"\n\n")
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5


def test_no_infinity_in_json(tokenizer: Any) -> None:
    never = Logprob(64, float("-inf"), ((65, float("-inf")),))
    for chat in (True, False):
        chunk = dialect(tokenizer, chat=chat, logprobs=True if chat else 1).chunk(
            choice(tokenizer), said("a", [never], [0])
        )
        assert b"Infinity" not in chunk and b"-9999.0" in chunk


def test_usage_counts_a_prompt_once(tokenizer: Any) -> None:
    requests = [Request("a", (1, 2, 3), 5, n=2), Request("b", (1,), 5, n=2)]
    choices = [choice(tokenizer, i, request=requests[i // 2]) for i in range(4)]
    for i, made in enumerate(choices):
        made.take(output([64] * (i + 1), cached=i))
    assert usage_object(usage(choices)) == {
        "prompt_tokens": 4,
        "completion_tokens": 10,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0 + 2},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def speculated(tokenizer: Any, *rounds: tuple[int, int], stop: tuple[str, ...] = ()) -> Choice:
    """A choice that read one output per round: (drafted, kept)."""
    made, drafted, accepted = choice(tokenizer, stop=stop), 0, 0
    for n, (more, kept) in enumerate(rounds, 1):
        drafted += more
        accepted += kept
        made.take(output([64] * (kept + 1), rounds=n, drafted=drafted, accepted=accepted))
    return made


def details(*choices: Choice) -> tuple[int, int]:
    found = usage_object(usage(choices))["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_usage_counts_drafts_over_all_choices(tokenizer: Any) -> None:
    one = speculated(tokenizer, (0, 0), (4, 3), (2, 0))
    other = speculated(tokenizer, (5, 5))
    assert (details(one), details(other)) == ((3, 3), (5, 0))
    assert details(one, other) == (8, 3)


@pytest.mark.parametrize("read", range(1, 5))
def test_drafts_behind_a_stop_are_not_kept(tokenizer: Any, read: int) -> None:
    """A round of three kept drafts and one more token, of which the stop string leaves `read`."""
    made = speculated(tokenizer, (2, 1), (3, 3), stop=("a" * (2 + read),))
    assert made.detokenizer.count == 2 + read and made.finish == "stop"
    kept = 1 + min(read, 3)
    assert details(made) == (kept, 5 - kept)


@pytest.mark.parametrize("chat", [True, False])
def test_a_body_is_what_its_stream_says(tokenizer: Any, chat: bool) -> None:
    look = dialect(tokenizer, chat=chat, logprobs=True if chat else 1)
    made, pieces = choice(tokenizer, parts=chat), []
    for token in encode(tokenizer, "hello é🦊 world"):
        pieces.append(made.take(output([token], logprobs=(Logprob(token, -1.0, ((64, -2.0),)),))))
    pieces.append(made.take(output([END], finish="stop")))
    [whole] = look.body([made], NOTHING)["choices"]
    chunks = [e["choices"][0] for p in pieces for e in events(look.chunk(made, p))]
    key = "content" if chat else "text_offset"
    entries = [entry for e in chunks if e["logprobs"] for entry in e["logprobs"][key]]
    assert entries == whole["logprobs"][key]
    texts = [e["delta"].get("content", "") if chat else e["text"] for e in chunks]
    assert (
        "".join(texts)
        == (whole["message"]["content"] if chat else whole["text"])
        == "hello é🦊 world"
    )
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "stop"
