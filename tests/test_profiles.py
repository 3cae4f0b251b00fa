"""The tables of models in the settings file: what they may say, which model they are of, and errors
that name file, table, key, value and fix."""

from pathlib import Path

import pytest

from mlxspec.config import BUILT_IN, Config, ConfigError, load_config
from mlxspec.load.resolve import resolve_model, resolve_models, served_names, with_table
from mlxspec.profiles import ROWS, Profile, profiles_of
from mlxspec.settings import format_value
from mlxspec.types import Sampling
from tests.support.served_model import save

EVERY = """
[models."qwen3:code"]
temperature = 0.2
top_p = 0.9
top_k = -1
min_p = 0.05
repetition_penalty = 1.1
presence_penalty = -0.5
frequency_penalty = 0
seed = 7
max_tokens = 4096
thinking = "off"
effort = "low"
priority = 50
system = '''
You write code.
'''
"""


def read(tmp_path: Path, text: str, env: dict[str, str] | None = None, **flags: str) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_config(flags, {"MLXSPEC_CONFIG": str(file), **(env or {})})


def test_every_key(tmp_path: Path) -> None:
    [table] = read(tmp_path, EVERY).profiles
    assert table == Profile(
        "qwen3:code",
        temperature=0.2,
        top_p=0.9,
        top_k=-1,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.0,
        seed=7,
        max_tokens=4096,
        thinking=False,
        effort="low",
        priority=50,
        system="You write code.\n",
    )
    assert table.values.keys() | {"context", "draft"} == ROWS.keys()
    assert str(table).startswith("temperature 0.2, top_p 0.9, top_k -1,")
    assert str(table).endswith("thinking off, effort low, system of 16 characters, priority 50")


def test_tables_are_no_setting_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, f'port = 9000\n{EVERY}\n[models.other]\nthinking = "on"\n')
    assert (config.port, [t.name for t in config.profiles]) == (9000, ["qwen3:code", "other"])
    with pytest.raises(ConfigError, match="MLXSPEC_MODELS: there is no setting 'models'"):
        read(tmp_path, "", {"MLXSPEC_MODELS": "x"})
    hash(config)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("temperature = 3", "temperature = 3 is not allowed; give 0 to 2"),
        ("temperature = true", "temperature = True is not allowed; give 0 to 2"),
        ("temperature = nan", "temperature = nan is not allowed; give 0 to 2"),
        ('temperature = "hot"', "temperature = 'hot' is not allowed; give 0 to 2"),
        ("top_p = [1]", "top_p = [1] is not allowed; give 0 to 1"),
        ("top_k = 1.5", "top_k = 1.5 is not allowed; give -1 to 2147483647"),
        ("presence_penalty = -2.1", "presence_penalty = -2.1 is not allowed; give -2 to 2"),
        ("repetition_penalty = 0", "repetition_penalty = 0 is not allowed; give 0.01 to 10"),
        ("max_tokens = 0", "max_tokens = 0 is not allowed; give 1 to 16777216"),
        ("seed = -1", "seed = -1 is not allowed; give 0 to "),
        ("thinking = true", "thinking = True is not allowed; give one of on, off"),
        ("system = 5", "system = 5 is not allowed; give text in quotes"),
        ('effort = ["low"]', "effort = ['low'] is not allowed; give text in quotes"),
        ("temprature = 1", "there is no setting 'temprature'; docs/configuration.md lists"),
        ("port = 1", "there is no setting 'port'; docs/configuration.md lists"),
        ("name = 'x'", "there is no setting 'name'; docs/configuration.md lists"),
        ("base = 'x'", "there is no setting 'base'; docs/configuration.md lists"),
    ],
)
def test_wrong_values(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f'[models."a/b:c"]\n{toml}\n')
    said = str(caught.value)
    assert said.startswith(f'{tmp_path / "config.toml"}: [models."a/b:c"]: {message}')


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("models = 5", 'models = 5 is not allowed; give tables such as [models."NAME"]'),
        ("models = ['a']", "models = ['a'] is not allowed; give tables such as [models.\"NAME\"]"),
        ("[models]\nqwen3 = 5", "models = {'qwen3': 5} is not allowed; give tables such as"),
        (
            "[models.Qwen3.5-4B]\nseed = 1",
            "[models.\"Qwen3\"]: 5-4B = {'seed': 1} is not allowed; a name with a dot is in quotes",
        ),
    ],
)
def test_what_is_no_table(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, toml)
    assert message in str(caught.value)


def test_a_named_one_has_what_its_model_has() -> None:
    tables = (
        Profile("q", temperature=0.7, system="Base.", context=9, draft="off"),
        Profile("q:code", temperature=0.2, thinking=False),
        Profile("q:plain", system=""),
        Profile("q:code:deep", effort="high"),  # q:code is no model that is loaded
        Profile("gone", seed=1),
        Profile("other:x", seed=2),
    )
    found = profiles_of(tables, {"q", "other"})
    assert found.keys() == {"q", "q:code", "q:plain", "other:x"}
    code = found["q:code"]
    assert (code.base, code.temperature, code.system, code.thinking) == ("q", 0.2, "Base.", False)
    assert (found["q:plain"].system, found["q:plain"].temperature) == ("", 0.7)
    assert found["other:x"].base == "other" and found["q"].base == "q"
    assert profiles_of(tables, {"q:code"}).keys() == {"q:code", "q:code:deep"}


def test_a_named_one_has_no_context_or_draft_of_its_own(tmp_path: Path) -> None:
    for key, value in (("context", "4096"), ("draft", '"off"'), ("context", "0")):
        tables = read(tmp_path, f'[models."q:code"]\n{key} = {value}\n').profiles
        with pytest.raises(ConfigError) as caught:
            profiles_of(tables, {"q"})
        file, shown = tmp_path / "config.toml", value.replace('"', "'")
        assert str(caught.value) == (
            f'{file}: [models."q:code"]: {key} = {shown} is not allowed: q shares its weights and'
            f' cache; set it in [models."q"]'
        )
        assert profiles_of(tables, {"q:code"}), "it is a model's own name here"


@pytest.mark.parametrize("name", ["", " q", "q\\n", "q\\u0007", "q:\\u200b"])
def test_a_name_that_no_client_could_send(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not allowed; give the name of a served model"):
        read(tmp_path, f'[models."{name}"]\nseed = 1\n')


@pytest.mark.parametrize("profile", ["", "latest", "a/b"])
def test_a_profile_that_the_api_does_not_tell_from_its_model(profile: str) -> None:
    """Ollama's clients add :latest to any name; a path begins another model's name."""
    table = Profile(f"q:{profile}", "config.toml")
    with pytest.raises(ConfigError, match=f"config.toml: '{profile}' is no name of a profile"):
        profiles_of([table], {"q"})
    assert profiles_of([table], {f"q:{profile}"}), "it is a model's own name here"


def test_over_a_models_own_defaults() -> None:
    own = Sampling(temperature=0.6, top_k=20)
    assert Profile(temperature=0.2, seed=3).over(own) == Sampling(0.2, top_k=20, seed=3)
    assert Profile().over(own) == own


def test_settings_of_the_model(tmp_path: Path) -> None:
    one, two = str(save(tmp_path / "one")), str(save(tmp_path / "two"))
    text = f"""
    model = "{one}"
    others = ["b={two}"]
    context = 400
    [models.one]
    draft = "off"
    [models.b]
    context = 64
    draft = "{one}"
    [models."b:code"]
    temperature = 0.2
    """
    first, other = resolve_models(config := read(tmp_path, text))
    assert served_names(config) == ["one", "b"]
    assert (first.info.context, first.config.draft, first.draft) == (400, "off", None)
    assert other.info.context == 64 and other.draft and str(other.draft.path) == one
    for change in (
        {"env": {"MLXSPEC_CONTEXT": "128", "MLXSPEC_DRAFT": "off"}},
        {"context": "128", "draft": "off"},
    ):  # variables and flags win here too
        both = resolve_models(read(tmp_path, text, **change))  # type: ignore[arg-type]
        assert [(m.info.context, m.draft) for m in both] == [(128, None)] * 2
    used = with_table(config)
    assert (used.draft, used.context, used.profiles) == ("off", 400, ())
    named = read(tmp_path, f'name = "q"\nmodel = "{one}"\n[models.q]\ncontext = 99\n')
    assert resolve_model(named).config.context == 99


def test_names_are_known_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.model.hub.installed", lambda: {"a/short": tmp_path, "b": tmp_path})
    one = save(tmp_path / "one")
    asked = ("", f"{one}/", "owner/name", "short", "n=owner/name", BUILT_IN, "gone")
    known = [BUILT_IN, "one", "owner/name", "a/short", "n", BUILT_IN, "gone"]
    assert [served_names(Config(model=model))[0] for model in asked] == known
    assert resolve_model(Config(model=f"{one}/")).name == "one"
    assert served_names(Config(model="a/b", name="q", others=("c/d", "e=c/d"))) == ["q", "c/d", "e"]


def test_a_named_one_that_asks_for_more_stops_the_start(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    with pytest.raises(ConfigError, match=r'\[models."one:long"\]: context = 9 is not allowed'):
        resolve_models(read(tmp_path, f'model = "{one}"\n[models."one:long"]\ncontext = 9\n'))


def test_the_start_says_what_is_used_and_what_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = save(tmp_path / "one")
    text = f'model = "{one}"\n[models."one:code"]\nseed = 5\nsystem = "secret"\n[models.gone]\n'
    with caplog.at_level("INFO", "mlxspec"):
        resolve_models(read(tmp_path, text))
    assert "one:code: by default seed 5, system of 6 characters" in caplog.text
    assert '[models."gone"] is of no model that is served' in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_complete(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    assert row.default is None and row.metadata["help"].endswith(".")
    assert format_value(row, None) == ""
