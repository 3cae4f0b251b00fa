"""What `mlxspec doctor` says, of this machine, of a model on the disk, of what is broken."""

import json
import re
import socket
import tomllib
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from rich.console import Console
from typer.testing import CliRunner

import mlxspec.commands.doctor
from mlxspec import cli
from mlxspec.commands.doctor import show
from mlxspec.kernels import verify
from mlxspec.kernels.verify import CRASHED, Verdict, VerdictFile
from mlxspec.resolve import PROOFS
from mlxspec.service.status import Status
from tests import tiny
from tests.model.test_layout import save
from tests.tiny_tokenizer import save_tokenizer

NAMES = [f"small_qmm {n}x64 of 4 bits, group 32, float32" for n in (128, 32, 64)]
CONTEXTS = ("context 512", "ragged", "context 32768")


@pytest.fixture(autouse=True)
def bare(bare_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("MLXSPEC_PORT", "0")
    monkeypatch.setattr(cli, "log_to_stderr", lambda level: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny quantized model in a directory."""
    path = save_tokenizer(tmp_path / "model")
    made = tiny.model("llama")
    nn.quantize(
        made,
        32,
        4,
        class_predicate=lambda _, m: isinstance(m, nn.Linear) and m.weight.shape[1] == 64,
    )
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(made.parameters())))
    how = {"group_size": 32, "bits": 4}
    (path / "config.json").write_text(json.dumps(tiny.config("llama") | {"quantization": how}))
    return path


def doctor(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["doctor", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def report(*words: str) -> tuple[int, dict[str, Any]]:
    code, said = doctor(*words, "--json")
    return code, json.loads(said)


def test_a_machine_without_metal(model: Path, tmp_path: Path) -> None:
    code, said = doctor(str(model), "--cache-dir", str(tmp_path / "cache"))
    assert code == 0 and "metal     no" in said and "cache     ~/cache" in said
    lines = [line for line in said.splitlines() if line.startswith("small_qmm")]
    assert [line[: len(name)] for line, name in zip(sorted(lines), NAMES, strict=True)] == NAMES
    assert all("no Metal here: it would be proven on a Mac" in line for line in lines)
    assert not (tmp_path / "cache").exists(), "it writes nothing"


def test_as_json(model: Path, tmp_path: Path) -> None:
    code, found = report(str(model))
    assert code == 0 and found["broken"] == []
    assert {"mlx", "mlx-lm", "chip", "memory", "system", "python", "metal", "blas"} <= set(
        found["machine"]
    )
    size = (model / "model.safetensors").stat().st_size / 1024
    about = {"name": str(model), "path": str(model), "weights": f"{size:.1f} KB", "kernels": "auto"}
    assert found["model"] == about
    assert {row["state"] for row in found["kernels"]} == {"not tried yet"}
    names = [row["name"] for row in found["kernels"]]
    assert sorted(name for name in names if name.startswith("small_qmm")) == NAMES
    attention = [f"paged_attention float32 4/2x16 block 32 {at}" for at in CONTEXTS]
    assert names[-4:] == [*attention, f"sample_accept {tiny.VOCAB} float32"]


def test_no_weight_is_read(model: Path) -> None:
    mx.clear_cache()
    before, size = mx.get_active_memory(), (model / "model.safetensors").stat().st_size
    mx.reset_peak_memory()
    assert report(str(model))[0] == 0
    assert mx.get_peak_memory() - before < size / 4


def test_what_was_proven_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with Metal."""
    monkeypatch.setattr(verify, "missing", lambda: "")
    file = VerdictFile(tmp_path / "cache" / PROOFS)
    file.save({NAMES[0]: Verdict("matrix", 1, 16, 1e-3, {1: 0.98, 8: 2.5}, "plain: slower")})
    file.path("trying").write_text(NAMES[1])
    file.save({"sample 9": Verdict(why="plain: off by 3")})
    words = (str(model), "--cache-dir", str(tmp_path / "cache"))
    code, found = report(*words)
    rows = {row["name"]: row for row in found["kernels"]}
    assert code == 0, "what is parked is not broken"
    assert [rows[name]["state"] for name in (*NAMES[:2], "sample 9")] == [
        "used",
        "parked",
        "not used",
    ]
    assert rows[NAMES[1]]["why"] == CRASHED and not rows["sample 9"]["model"]
    said = doctor(*words)[1]
    for part in (
        "1 to 16",
        "0.98 to 2.50",
        "matrix; plain: slower",
        "parked",
        "sample 9 (another model's)",
    ):
        assert part in said
    monkeypatch.setenv("MLXSPEC_KERNELS", "off")
    assert "none of them runs" in doctor(*words)[1]


def test_the_draft_model_and_the_others_are_models_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a start proves: K/V of a draft model are not quantized. What cannot be read hides no
    other."""
    small = save_tokenizer(tmp_path / "small")
    save(small)
    file = VerdictFile(tmp_path / "cache" / PROOFS)
    drafts = f"paged_attention float32 4/2x16 block 32 {CONTEXTS[0]}"
    file.save({drafts: Verdict("lanes", 1, 8)})
    words = (str(model), "--cache-dir", str(tmp_path / "cache"))
    monkeypatch.setenv("MLXSPEC_KV_BITS", "8")
    rows = {row["name"]: row["model"] for row in report(*words)[1]["kernels"]}
    assert not rows[drafts]
    monkeypatch.setenv("MLXSPEC_DRAFT", str(small))
    found = report(*words)[1]
    assert {row["name"]: row["model"] for row in found["kernels"]}[drafts]
    assert (found["model"]["name 2"], found["model"]["path 2"]) == (str(small), str(small))
    monkeypatch.setenv("MLXSPEC_SPECULATE", "off")
    assert not {row["name"]: row["model"] for row in report(*words)[1]["kernels"]}[drafts]
    monkeypatch.delenv("MLXSPEC_KV_BITS")
    monkeypatch.setenv("MLXSPEC_OTHERS", f"gone,again={model}")
    code, found = report(str(small), *words[1:])
    assert code == 1 and "no model 'gone'" in found["broken"][0]
    assert set(NAMES) <= {row["name"] for row in found["kernels"] if row["model"]}


def test_no_word_is_cut_on_a_narrow_terminal(model: Path, tmp_path: Path) -> None:
    file = VerdictFile(tmp_path / "cache" / PROOFS)
    file.save({NAMES[0]: Verdict("matrix", 1, 16, 1e-3, {1: 0.98, 8: 2.5}, "plain: slower")})
    file.path("trying").write_text(NAMES[1])
    found = report(str(model), "--cache-dir", str(tmp_path / "cache"))[1]
    tables = set()
    for columns in range(30, 161):
        console = Console(width=columns, file=StringIO(), markup=False)
        show(found, console)
        said = console.file.getvalue()
        tables |= {columns} if "times as fast  error" in said else set()
        said = said.split("\n\n")[-1]
        assert max(map(len, said.splitlines())) <= columns
        for row in found["kernels"]:
            assert set(f"{row['name']} {row['state']} {row['way']}".split()) <= set(
                re.split(r"[;\s]+", said)
            )
        assert {"0.98", "2.50", "1.0e-03", "slower"} <= set(said.split())
    assert tables == set(range(100, 161))


def test_what_is_not_there_yet_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.model.hub.embedded", lambda *_: pytest.fail("fetched"))
    for words in ((), ("some/model",)):
        code, found = report(*words, "--cache-dir", str(tmp_path))
        assert code == 0 and found["model"]["path"].startswith("not fetched yet")


@pytest.mark.parametrize(
    ("words", "env", "wrong"),
    [
        (("--cache-dir", "{file}"), {}, "{file} cannot be written; name another directory"),
        (("{file}",), {}, "is a file; give the directory"),
        (("no-such-model",), {}, "no model 'no-such-model'"),
        ((), {"MLXSPEC_PORT": "x"}, "MLXSPEC_PORT: port = 'x' is not a whole number"),
    ],
)
def test_what_is_broken_is_said(
    words: tuple[str, ...],
    env: dict[str, str],
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, found = report(*(word.format(file=file) for word in words))
    assert code == 1 and any(wrong.format(file=file) in line for line in found["broken"])
    assert "broken: " in doctor(*(word.format(file=file) for word in words))[1]


def test_a_broken_model_and_a_mac_without_metal(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text('{"model_type": "unheard-of"}')
    monkeypatch.setattr("mlxspec.commands.doctor.sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr("mlxspec.commands.doctor.platform.machine", lambda: "arm64")
    code, found = report(str(model))
    assert (
        code == 1
        and "mlx-lm cannot load" in found["broken"][1]
        and "no Metal" in found["broken"][0]
    )


def test_weights_that_were_cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, found = report(str(model))
    assert (
        code == 1 and f"{file} has " in found["broken"][0] and "mlxspec pull" in found["broken"][0]
    )


def test_weights_that_mlx_refuses(model: Path) -> None:
    """Whole by their own header, of a type that there is none of."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U32"', b'"X32"'))
    code, found = report(str(model))
    assert code == 1 and len(found["broken"]) == 1
    assert str(model) in found["broken"][0] and "run: mlxspec pull" in found["broken"][0]


def test_what_does_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.engine.memory.total", lambda: 1 << 20)
    code, found = report(str(model))
    assert code == 1 and "weights and headroom take" in found["broken"][0]


def test_an_old_python(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert wanted["requires-python"] == ">={}.{}".format(*mlxspec.commands.doctor.PYTHON)
    monkeypatch.setattr(
        "mlxspec.commands.doctor.platform.python_version_tuple", lambda: ("3", "10", "1")
    )
    assert "is too old; install 3.11" in report(str(model))[1]["broken"][0]


def test_reports_that_may_not_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.service.ledger.os.access", lambda path, how: path != model)
    monkeypatch.setattr("mlxspec.service.ledger.PANICS", (str(model), "/no/such"))
    assert report(str(model))[1]["server"]["panics"] == f"not seen: {model} cannot be read"


def test_an_old_macos(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, code in (("13.6.1", 1), ("14.0", 0), ("26.1", 0)):
        monkeypatch.setattr(
            "mlxspec.commands.doctor.platform.mac_ver", lambda version=version: (version, (), "")
        )
        assert report(str(model))[0] == code


def test_the_port(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MLXSPEC_PORT", str(port))
        monkeypatch.setattr("mlxspec.service.status.PATIENCE_S", 0.05)
        code, found = report(str(model))
        assert code == 1 and found["server"]["port"].endswith("is taken")
        assert "somebody else's (" in found["broken"][0] and "--port" not in found["broken"][0]
        assert "or set another port, by MLXSPEC_PORT" in found["broken"][0]
    code, found = report(str(model))
    assert code == 0 and found["server"]["port"] == f"http://127.0.0.1:{port} is free"
    with socket.socket() as other:  # has the port, and does not listen
        other.bind(("127.0.0.1", port))
        code, found = report(str(model))
        assert code == 1 and f"lsof -i :{port}" in found["broken"][0]
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(
        "mlxspec.commands.doctor.look", lambda url, key: Status(url, "idle", version="0.1.0")
    )
    assert report(str(model))[1]["server"]["port"].startswith(f"{url} is ours")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"state": "asleep", "service": "waiting"}, ""),
        ({"state": "idle", "service": "running", "version": "1"}, ""),
        ({"state": "unwell", "service": "held", "why": "it panicked"}, "the service: it panicked"),
        (
            {"state": "idle", "service": "running", "version": "1", "note": "safe mode"},
            "safe mode; mlxspec serv",
        ),
        (
            {"state": "unwell", "service": "running", "version": "1", "why": "no progress"},
            "no progress",
        ),
    ],
)
def test_the_service(
    now: dict[str, Any], said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.commands.doctor.here", lambda: None)
    monkeypatch.setattr("mlxspec.commands.doctor.installed", lambda system: "http://127.0.0.1:9")
    monkeypatch.setattr("mlxspec.commands.doctor.look", lambda url, key: Status(url, **now))
    for port in ("0", "9"):
        monkeypatch.setenv("MLXSPEC_PORT", port)
        code, found = report(str(model))
        assert found["server"]["service"].startswith(f"{now['service']} at http://127.0.0.1:9: ")
        assert (
            code == bool(said) and len(found["broken"]) == code and said in "".join(found["broken"])
        )
