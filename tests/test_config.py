"""The settings: precedence, and errors that name source, setting, value and fix."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mlxspec.config import BUILT_IN, TABLE, Config, ConfigError, as_flags, flag, load_config
from mlxspec.settings import format_value


def file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def load(flags: dict[str, Any], env: dict[str, str], path: Path | None = None) -> Config:
    if path:
        env = env | {"MLXSPEC_CONFIG": str(path)}
    return load_config(flags, env)


def test_defaults_need_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({}, {}) == Config()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::", "fe80::1%en0", "mac.local", "my_mac", "bücher.de"]
)
def test_a_host_is_an_address_or_a_name(host: str, tmp_path: Path) -> None:
    none = file(tmp_path, "")
    assert (
        load({"host": host}, {}, none).host == load({}, {"MLXSPEC_HOST": host}, none).host == host
    )


@pytest.mark.parametrize(
    "host",
    [
        *(
            " ",
            "\t",
            "*",
            "<broadcast>",
            "http://0.0.0.0",
            "0.0.0.0:80",
            "[::1]",
            "a b",
            "a@b",
            "a/",
        ),
        *("127.0.0.1 ", "localhost\n", "a\0", "a,b", "\\", "::1%", ":::g"),
    ],
)
def test_a_malformed_host_is_refused(host: str, tmp_path: Path) -> None:
    """For a socket, some of them would be any address."""
    none = file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"^--host: host = .* is not allowed; give an address"):
        load({"host": host}, {}, none)
    with pytest.raises(ConfigError, match=r"^MLXSPEC_HOST: host = "):
        load({}, {"MLXSPEC_HOST": host}, none)


def test_an_empty_host_is_the_default(tmp_path: Path) -> None:
    """As from a shell's variable that is not set."""
    path = file(tmp_path, 'host = ""\n')
    assert load({}, {}, path).host == load({"host": ""}, {}, path).host == "127.0.0.1"


def test_default_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config/mlxspec").mkdir(parents=True)
    file(tmp_path / ".config/mlxspec", "port = 9000\n")
    assert load({}, {}).port == 9000


def test_flags_beat_variables_beat_file(tmp_path: Path) -> None:
    path = file(tmp_path, 'port = 1\nhost = "a"\nmodel = "m"\n')
    config = load({"port": "3", "host": None}, {"MLXSPEC_PORT": "2", "MLXSPEC_HOST": "b"}, path)
    assert (config.port, config.host, config.model) == (3, "b", "m")


def test_variable_names_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "port = 9000\n")
    assert load({}, {"MLXSPEC_CONFIG": str(path)}).port == 9000


def test_empty_variable_is_unset(tmp_path: Path) -> None:
    path = file(tmp_path, "port = 9000\n")
    assert load({}, {"MLXSPEC_PORT": ""}, path).port == 9000


@pytest.mark.parametrize("name", TABLE)
def test_every_row_takes_its_default_from_file_variable_and_flag(name: str, tmp_path: Path) -> None:
    value = getattr(Config(), name)
    text = format_value(TABLE[name], value)
    toml = (
        repr(list(value))
        if isinstance(value, tuple)
        else f'"{value}"'
        if isinstance(value, str)
        else f'"{text}"'
        if value is None or isinstance(value, bool)
        else text
    )
    nothing = file(tmp_path, "")
    assert load({name: text}, {}, nothing) == Config()
    assert load({}, {f"MLXSPEC_{name.upper()}": text}, nothing) == Config()
    assert load({}, {}, file(tmp_path, f"{name} = {toml}\n")) == Config()


def test_a_value_may_be_text(tmp_path: Path) -> None:
    config = load({}, {}, file(tmp_path, 'port = "80"\nhost = 1\napi_key = 53\nkv_bits = "4"\n'))
    assert (config.port, config.host, config.api_key, config.kv_bits) == (80, "1", "53", 4)


def test_lists(tmp_path: Path) -> None:
    from_file = load({}, {}, file(tmp_path, 'allowed_hosts = ["a.local", "b"]\n'))
    from_flag = load({"allowed_hosts": "a.local, , b,"}, {}, file(tmp_path, ""))
    assert from_file.allowed_hosts == from_flag.allowed_hosts == ("a.local", "b")


def test_whole_number_serves_as_number(tmp_path: Path) -> None:
    config = load({}, {}, file(tmp_path, "drain_s = 3\n"))
    assert config.drain_s == 3.0 and isinstance(config.drain_s, float)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("port = 99999\n", "port = 99999 is not allowed; give 0 to 65535"),
        ('port = "8o"\n', "port = '8o' is not allowed; give 0 to 65535"),
        ("port = 80.5\n", "port = 80.5 is not allowed; give 0 to 65535"),
        ("port = [80]\n", "port = [80] is not allowed; give 0 to 65535"),
        ("port = true\n", "port = True is not allowed; give 0 to 65535"),
        ("drain_s = nan\n", "drain_s = nan is not allowed; give 0 to 3600"),
        ('layout = "box"\n', "layout = 'box' is not allowed; give one of auto, rows,"),
        ("kv_bits = 5\n", "kv_bits = 5 is not allowed; give one of 0, 4, 8"),
        ("max_que = 3\n", "there is no setting 'max_que'; "),
        ("[server]\nport = 1\n", "there is no setting 'server'; "),
        ("port = \n", "Invalid value (at line 1"),
    ],
)
def test_errors_in_the_file(toml: str, message: str, tmp_path: Path) -> None:
    path = file(tmp_path, toml)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, path)
    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        ({"port": "x"}, {}, "--port: port = 'x' is not allowed; give 0 to 65535"),
        ({"drain_s": "nan"}, {}, "--drain-s: drain_s = 'nan' is not allowed; give 0 to 3600"),
        (
            {},
            {"MLXSPEC_PORT": "-1"},
            "MLXSPEC_PORT: port = '-1' is not allowed; give 0 to 65535",
        ),
        (
            {},
            {"MLXSPEC_PROT": "1"},
            "MLXSPEC_PROT: there is no setting 'prot'; docs/configuration.md lists",
        ),
        (
            {},
            {"MLXSPEC_ZZZ": "1"},
            "there is no setting 'zzz'; docs/configuration.md lists them all",
        ),
    ],
)
def test_errors_elsewhere(
    flags: dict[str, str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, env, file(tmp_path, ""))
    assert message in str(caught.value)


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.toml: .*No such file .* unset MLXSPEC_CONFIG"):
        load({}, {"MLXSPEC_CONFIG": str(tmp_path / "gone.toml")})
    with pytest.raises(ConfigError, match="Is a directory"):
        load({}, {}, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    with pytest.raises(ConfigError, match="'utf-8' codec"):
        load({}, {}, tmp_path / "latin.toml")


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    path = file(tmp_path, 'api_key = "s3cret"\n')
    config = load({}, {}, path)
    assert config.api_key == "s3cret"
    assert "s3cret" not in repr(config) + as_flags(config)


def test_as_flags_reads_back(tmp_path: Path) -> None:
    assert as_flags(Config()) == ""
    assert as_flags(load({"kv_bits": "4"}, {}, file(tmp_path, ""))) == "--kv-bits 4"
    for host in ("0.0.0.0", "10.0.0.0"):
        assert as_flags(Config(host=host)) == f"--host {host}"
    config = Config(
        model="/a model", layout="rows", kv_blocks=900, allowed_hosts=("a", "b"), drain_s=2.5
    )
    text = as_flags(config)
    assert text == "'/a model' --allowed-hosts a,b --kv-blocks 900 --layout rows --drain-s 2.5"


def test_more_models(tmp_path: Path) -> None:
    path = file(tmp_path, 'model = "a"\nothers = ["b", "c=d"]\npin = ["b"]\n')
    config = load({"others": []}, {}, path)
    assert (config.model, config.others, config.pin) == ("a", ("b", "c=d"), ("b",))
    config = load({"model": "x", "others": ["y, z", "w"]}, {}, path)
    assert config.others == ("y, z", "w")  # arguments, not one list
    assert load({}, {"MLXSPEC_OTHERS": "y,z"}, path).others == ("y", "z")
    assert as_flags(config) == "x 'y, z' w --pin b"
    alone = load({}, {"MLXSPEC_OTHERS": "y"}, file(tmp_path, ""))
    assert as_flags(alone) == f"{BUILT_IN} y", "y alone would be the model"


def test_every_row_is_complete() -> None:
    assert [f.name for f in fields(Config)] == [*TABLE, "profiles"]
    for name, row in TABLE.items():
        assert row.metadata["help"].endswith("."), name
        if isinstance(row.default, int | float) and not isinstance(row.default, bool):
            assert row.metadata["low"] <= row.default <= row.metadata["high"] < float("inf"), name
    assert flag("model") == "MODEL" and flag("max_queue") == "--max-queue"
