"""From the settings to what the service runs."""

import os
import sys
from pathlib import Path

import pytest

from mlxspec.config import ConfigError
from mlxspec.service.job import job_of

pytestmark = pytest.mark.usefixtures("bare_settings")


def words(flags: dict[str, str | list[str] | None], **env: str) -> list[str]:
    job = job_of(flags, env)
    assert job.command[:4] == (sys.executable, "-m", "mlxspec", "serve") and os.path.isabs(
        job.command[0]
    )
    return list(job.command[4:])


def write(text: str) -> None:
    file = Path("~/.config/mlxspec/config.toml").expanduser()
    file.parent.mkdir(parents=True)
    file.write_text(text)


def test_flags_and_variables_are_kept() -> None:
    assert words({}) == []
    found = words({"model": "org/name", "port": "81"}, MLXSPEC_PIN="a,b", OTHER="x")
    assert found == ["org/name", "--port", "81", "--pin", "a,b"]
    assert job_of({"drain_s": "100", "port": "81"}, {}).exit_s == 120


def test_the_file_is_left_to_the_file() -> None:
    write('model = "org/name"\nothers = ["b"]\nport = 9000\napi_key = "sesame"\n')
    assert words({}) == [] and job_of({}, {}).port == 9000
    assert words({"port": "8080"}) == ["--port", "8080"]  # the default, against the file
    assert words({"model": "x", "others": ["c"]}) == ["x", "c"]
    assert words({"others": ["c"]}) == ["org/name", "c"]


def test_no_secret_is_written_down() -> None:
    for flags, env in (({"api_key": "sesame"}, {}), ({}, {"MLXSPEC_API_KEY": "sesame"})):
        with pytest.raises(
            ConfigError, match=r"write api_key into .*config\.toml, chmod 600"
        ) as caught:
            job_of(flags, env)
        assert "sesame" not in str(caught.value)
    write('api_key = "sesame"')
    job = job_of({}, {"MLXSPEC_API_KEY": "sesame", "HF_TOKEN": "hf_x", "HF_HOME": "/x"})
    assert job.variables == {"PATH": job.variables["PATH"], "HF_HOME": "/x"}
    assert "sesame" not in repr(job)


def test_an_endpoint_with_a_password_is_refused() -> None:
    assert "HF_ENDPOINT" in job_of({}, {"HF_ENDPOINT": "https://hub.example"}).variables
    with pytest.raises(ConfigError, match="HF_ENDPOINT: it names a user") as caught:
        job_of({}, {"HF_ENDPOINT": "https://me:sesame@hub.example"})
    assert "sesame" not in str(caught.value)


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "small", "draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "my.toml").write_text("port = 82")
    flags = {
        "model": "model",
        "others": ["s=small", "org/name"],
        "draft": "draft",
        "cache_dir": "new",
    }
    job = job_of(flags, {"MLXSPEC_CONFIG": "my.toml"})
    at = str(tmp_path)
    assert list(job.command[4:]) == [
        *(
            f"{at}/model",
            f"s={at}/small",
            "org/name",
            "--draft",
            f"{at}/draft",
            "--cache-dir",
            f"{at}/new",
        )
    ]
    assert job.variables["MLXSPEC_CONFIG"] == f"{at}/my.toml" and job.port == 82


def test_any_port_is_none() -> None:
    with pytest.raises(ConfigError, match="port = 0: a service listens on one port"):
        job_of({"port": "0"}, {})
