"""`mlxspec tune` from its flags to table and picture, on a tiny model; what it kept is what serve
reads."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from mlxspec import cli
from mlxspec.bench import curves, tune
from mlxspec.config import Config, ConfigError
from mlxspec.kernels.verify import KERNELS, Verdict
from mlxspec.speculate import calibrate
from mlxspec.speculate.controller import Costs
from tests.model.test_layout import save
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def model(tmp_path: Path, bare_settings: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cli, "log_to_stderr", lambda level: None)
    monkeypatch.setattr(calibrate, "TUNING", 0.1)
    path = save_tokenizer(tmp_path / "model")
    save(path)
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["tune", *words])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_from_flags_to_table_and_picture(model: Path, tmp_path: Path) -> None:
    words = (str(model), "--cache-dir", str(tmp_path / "cache"))
    said = run(*words)
    assert (
        "no Metal here: no kernel was tried" in said
        and "A step, in ms" in said
        and "copies" in said
    )
    picture = tmp_path / "cache" / "tune.png"
    assert f"picture: {picture}" in said and picture.read_bytes().startswith(b"\x89PNG")
    [file] = (tmp_path / "cache" / "costs").iterdir()
    before = file.read_text()
    assert json.loads(before)["costs"]["rows"] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    run(*words, "--out", str(tmp_path / "other.png"))
    assert [file] == list((tmp_path / "cache" / "costs").iterdir()) and file.read_text() != before
    assert (tmp_path / "other.png").is_file()


def test_without_matplotlib_the_table_is_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.importlib.util, "find_spec", lambda name: None)
    said = run(str(model), "--cache-dir", str(tmp_path / "cache"))
    assert "Tokens drafted" in said and tune.NO_PICTURE in said
    assert not (tmp_path / "cache" / "tune.png").exists()


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("--out", "no/a.png"), "--out: name a file"),
        (("--out", "."), "--out: name a file"),
        (("--out", "file/a.png"), "--out: name a file"),
        (("--cache-dir", "file"), "--cache-dir: name another"),
        (("--cache-dir", "taken"), "--cache-dir: name another"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_measured(
    words: tuple[str, str], mend: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "choose", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    (tmp_path / "taken/tune.png").mkdir(parents=True)
    done = CliRunner().invoke(cli.app, ["tune", str(model), *words])
    assert isinstance(done.exception, ConfigError)
    assert mend in str(done.exception) and "cannot be written" in str(done.exception)


def test_a_full_disk_is_not_a_traceback(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, found: tune.Found) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curves, "draw", full)
    (tmp_path / "old.png").write_text("old")
    words = ("--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "old.png"))
    done = CliRunner().invoke(cli.app, ["tune", str(model), *words])
    assert isinstance(done.exception, ConfigError) and "No space left" in str(done.exception)
    assert "Tokens drafted" in done.stdout and (tmp_path / "old.png").read_text() == "old"


@pytest.mark.parametrize(
    ("body", "shares"), [(b'{"status": "unhealthy"}', True), (b"[]", False), (b"<html>", False)]
)
def test_a_server_beside_it_is_seen(body: bytes, shares: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        config = Config(host="0.0.0.0", port=server.server_port)
        Thread(target=server.handle_request, daemon=True).start()
        assert tune._sharing(config) == f"http://127.0.0.1:{server.server_port}" * shares
    assert tune._sharing(config) == tune._sharing(Config(port=0)) == ""


def test_a_server_beside_it_is_said_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "_sharing", lambda config: "http://here:1")
    monkeypatch.setattr(tune, "choose", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        tune.tune(Config(model=str(model), cache_dir=str(tmp_path / "cache")), None)
    assert "http://here:1 and shares this machine" in capsys.readouterr().out


def test_depth_is_the_controllers() -> None:
    """Rows that cost nothing are all taken, dear ones never; a draft's own seconds count."""
    free = Costs((64, 2048), (1, 32), ((1.0, 1.0), (1.0, 1.0)))
    dear = Costs((64, 2048), (1, 32), ((1.0, 32.0), (1.0, 32.0)))
    assert tune._depth(free, 0.9, 64, 0.0, 32)[0] == 32
    assert tune._depth(dear, 0.9, 64, 0.0, 32) == (0, 1.0)
    depth, gain = tune._depth(free, 0.5, 64, 0.2, 8)
    assert (depth, gain) == (1, pytest.approx(1.5 / 1.2))


def test_the_kernels_are_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KERNELS.verdicts["small_qmm 8x8"] = Verdict(
        "matrix", 1, 8, 0.0, {1: 0.99, 8: 2.25}, "plain: slower"
    )
    try:
        tune._kernels(tune.Console(width=150), "")
    finally:
        KERNELS.reset()
    said = capsys.readouterr().out
    assert "1 to 8" in said and "1: 0.99  8: 2.25" in said and "matrix; plain: slower" in said
    depths = {name: {64: {0.5: (1, 1.2), 0.9: (4, 2.0)}} for name in ("copies", "the draft model")}
    found = tune.Found(
        "tiny", {64: {1: 0.01, 8: 0.02}}, depths, {"small_qmm 8x8": {1: 0.99, 8: 2.25}}
    )
    curves.draw(tmp_path / "a.png", found)
    assert (tmp_path / "a.png").stat().st_size > 10_000
