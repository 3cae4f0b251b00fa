"""The history of what is typed in the chat: a file that may be cut anywhere, and its bound."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.commands import terminal_input
from tests.support.parameter_rows import only

readline: Any = pytest.importorskip("readline")
LIMIT = 8_000_000  # bytes, in docs/operating.md


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    yield
    readline.clear_history()
    readline.set_completer(None)
    readline.set_auto_history(True)


def type_messages(monkeypatch: pytest.MonkeyPatch, file: Path, *texts: str) -> list[str]:
    """What the history holds when a chat starts in which these messages are typed."""
    readline.clear_history()
    left = list(texts)
    found: list[list[str]] = []

    def line(*_: object) -> str:
        if not found:
            count = readline.get_current_history_length()
            found.append([readline.get_history_item(n + 1) for n in range(count)])
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(terminal_input, "_waits", lambda: False)
    told = list(terminal_input.read_messages(file, (), "hint"))
    assert told == [text.strip() for text in texts]
    return found[0]


@pytest.mark.parametrize(
    "broken",
    [b'"cut', b'"half an \xc3', b"\xff\xfe", b"", b"[" * 3000, b'"nul \\u0000"'],
)
def test_a_broken_line_is_skipped_alone(
    broken: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat-history"
    file.write_bytes(b'"one"\n' + broken + b'\n"two"\n')
    assert type_messages(monkeypatch, file) == ["one", "two"]


def test_what_follows_a_cut_line_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat-history"
    file.write_bytes(b'"one"\n"tw')
    assert type_messages(monkeypatch, file, "three", "four") == ["one"]
    assert type_messages(monkeypatch, file) == ["one", "three", "four"]


@pytest.mark.parametrize(
    "character", only(["a", "\x01", "é", "水", "😀", "\ud800", "\udcff"], 1, 2, 3, 4, 6)
)
def test_the_file_has_its_bound(
    character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever characters the messages have, in one long chat too; the longest are not kept."""
    file = tmp_path / "chat-history"
    lengths = [size // len(json.dumps(character)[1:-1]) for size in (3900, 8000, 50_000)]
    texts = [f"{n % 10}" + character * length for n in range(5) for length in lengths]
    type_messages(monkeypatch, file, *texts)
    assert 0 < file.stat().st_size <= 5 * 2 * 4000
    line = file.read_bytes().splitlines(keepends=True)[0]
    file.write_bytes(line * (LIMIT // len(line) - 2))
    most = 0
    for n in range(4):
        type_messages(monkeypatch, file, f"{n}" + character * lengths[0])
        most = max(most, file.stat().st_size)
    assert most <= LIMIT and file.stat().st_mode & 0o777 == 0o600
    kept = file.read_bytes().splitlines()
    assert json.loads(kept[-1]) == f"3{character * lengths[0]}" and len(kept) > 900
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_line_of_any_length_leaves_with_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat-history"
    file.write_bytes(b'"one"\n' + b"x" * LIMIT + b"\n")
    assert type_messages(monkeypatch, file, "two") == ["one"]
    assert file.read_bytes() == b'"one"\n"two"\n'
