"""`mlxspec doctor`: one check per line, and exit status 1 where something is broken."""

import json
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.commands.doctor import _installation
from mlxspec.config import Config
from mlxspec.kernels.verify import Verdict, VerdictFile
from mlxspec.load.loader import KERNELS_DIR
from mlxspec.service.status import Status
from mlxspec.types import UserError
from tests.support import tiny
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(autouse=True)
def bare(bare_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("MLXSPEC_PORT", "0")
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("mlxspec.commands.doctor.log_to_stderr", lambda level: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_tokenizer(tmp_path / "model")
    made: nn.Module = tiny.model("llama")
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(made.parameters())))
    (path / "config.json").write_text(json.dumps(tiny.config("llama")))
    return path


def report(*words: str) -> tuple[int, dict[str, list[str]], str]:
    """Exit status, the texts by name, and those of the broken checks."""
    done = CliRunner().invoke(cli.app, ["doctor", *words, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    found = json.loads(done.stdout)
    texts: dict[str, list[str]] = {}
    for check in found["checks"]:
        texts.setdefault(check["name"], []).append(check["text"])
    broken = "\n".join(check["text"] for check in found["checks"] if check["broken"])
    assert found["broken"] == bool(broken) == bool(done.exit_code)
    return done.exit_code, texts, broken


def test_a_machine_in_order(model: Path, tmp_path: Path) -> None:
    code, texts, _ = report(str(model))
    assert code == 0
    names = {"settings", "system", "versions", "machine", "cache", "model", "kernels"}
    assert names <= texts.keys()
    assert not (tmp_path / "cache").exists(), "it writes nothing"
    done = CliRunner().invoke(cli.app, ["doctor", str(model)])
    assert "ok     cache     ~/cache" in done.stdout and "broken" not in done.stdout


def test_no_weights_are_read(model: Path) -> None:
    mx.clear_cache()
    before, size = mx.get_active_memory(), (model / "model.safetensors").stat().st_size
    mx.reset_peak_memory()
    assert report(str(model))[0] == 0
    assert mx.get_peak_memory() - before < size / 4


def test_kernels(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = VerdictFile(tmp_path / "cache" / KERNELS_DIR)
    used = Verdict("matrix", 1, 16, {1: 0.98, 8: 2.5})
    file.save({"qmm 8": used, "sample 9": Verdict(reason="plain: off by 3")})
    code, texts, _ = report(str(model))
    assert code == 0
    assert texts["kernels"][0] == "qmm 8: used for 1 to 16 rows"
    assert "plain: off by 3" in texts["kernels"][1]
    monkeypatch.setenv("MLXSPEC_KERNELS", "off")
    assert report(str(model))[1]["kernels"] == ["off by your settings"]


def test_every_model_is_checked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_DRAFT", str(model))
    monkeypatch.setenv("MLXSPEC_OTHERS", f"gone,again={model}")
    code, texts, broken = report(str(model))
    assert code == 1 and "'gone'" in broken and len(texts["model"]) == 4


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.model.hub.resolve", lambda *_: pytest.fail("downloaded"))
    for words in ((), ("some/model",)):
        code, texts, _ = report(*words)
        assert code == 0 and "mlxspec pull" in texts["model"][0]


@pytest.mark.parametrize(
    ("words", "name", "value", "text"),
    [
        ((), "MLXSPEC_CACHE_DIR", "{file}", "{file} is not writable"),
        (("{file}",), "MLXSPEC_PORT", "0", "is a file; give the directory"),
        (("no-such-model",), "MLXSPEC_PORT", "0", "no model 'no-such-model'"),
        ((), "MLXSPEC_PORT", "x", "MLXSPEC_PORT: port = 'x'"),
    ],
)
def test_mistakes_are_broken_checks(
    words: tuple[str, ...],
    name: str,
    value: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(name, value.format(file=file))
    code, _, broken = report(*(word.format(file=file) for word in words))
    assert code == 1 and text.format(file=file) in broken


def test_a_cache_that_nobody_may_look_into(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pathlib raises."""
    config = Config(cache_dir=str(tmp_path / "closed/cache"))

    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    assert {check.name for check in _installation(config)} >= {"versions", "cache"}


def test_weights_that_were_cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, _, broken = report(str(model))
    assert code == 1 and f"{file}: " in broken and "mlxspec pull" in broken


def test_a_model_too_large_for_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.engine.memory.total", lambda: 1 << 20)
    code, _, broken = report(str(model))
    assert code == 1 and "give a smaller model" in broken


def test_a_system_that_mlx_fails_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise UserError("update to 26.2")

    monkeypatch.setattr("mlxspec.commands.doctor.blas.load", load)
    code, texts, broken = report(str(model))
    assert code == 1 and broken == "update to 26.2" and len(texts["system"]) == 2


def test_a_port_with_something_else(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MLXSPEC_PORT", str(port))
        monkeypatch.setattr("mlxspec.service.status.TIMEOUT_S", 0.05)
        assert report(str(model))[0] == 1  # it does not answer
    code, texts, _ = report(str(model))
    assert code == 0 and "start one with: mlxspec serve" in texts["server"][0]


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({"state": "asleep", "service": "waiting"}, ""),
        ({"state": "idle", "service": "running"}, ""),
        ({"state": "unwell", "service": "running", "why": "no progress"}, "no progress"),
    ],
)
def test_the_service(
    now: dict[str, Any], text: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9"
    monkeypatch.setattr("mlxspec.commands.doctor.installed_url", lambda: url)
    monkeypatch.setattr("mlxspec.commands.doctor.get_status", lambda *_: Status(url, **now))
    code, texts, broken = report(str(model))
    assert len(texts["server"]) == 1 and code == bool(text) and text in broken


def test_safe_mode_is_broken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_PORT", "9")
    now = Status("http://127.0.0.1:9", "idle", "running", note="safe mode")
    monkeypatch.setattr("mlxspec.commands.doctor.get_status", lambda *_: now)
    assert "safe mode" in report(str(model))[2]


def test_tables_of_models(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("MLXSPEC_CONFIG", str(file))
    tables = '[models."model:code"]\ntemperature = 0.2\nsystem = "secret"\n'
    file.write_text(f"{tables}[models.other]\nseed = 1\n")
    code, texts, _ = report(str(model))
    assert code == 0 and texts["profile"] == [
        "model:code: temperature 0.2, system of 6 characters",
        f'{file}: [models."other"] is of no model of these settings',
    ]
    assert report("other/model")[1]["profile"][0].endswith("is of no model of these settings")
    file.write_text(f'model = "{model}"\n{tables}[models."model:long"]\ncontext = 9\n')
    code, texts, broken = report()
    assert code == 1 and f'{file}: [models."model:long"]: context = 9 is not allowed' in broken
    assert texts["kernels"], "the other checks go on"
    file.write_text(f"{tables}top = 1\n")
    assert "there is no setting 'top'" in report(str(model))[2]
