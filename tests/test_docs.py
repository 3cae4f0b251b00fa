"""The documents say what is so: settings, commands, flags, dependencies and links."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import mlxspec
from mlxspec import cli, config
from mlxspec.profiles import profiles_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("tests/*/*.md")])
OLD = {ROOT / "NOTES.md", ROOT / "CHANGELOG.md", *ROOT.glob("notes/*.md")}  # what was run then
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Every `mlxspec` line of a page's fenced blocks, with its comment; then, marked False, those
    in inline code, which may leave out what a command needs."""
    text = page.read_text("utf-8")
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.M | re.S):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            found = re.match(r"(?:\$ )?(?:\.venv/bin/)?mlxspec (.*)", line)
            if found:
                yield found[1], True
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for line in re.findall(r"`mlxspec ([a-z-][^`\n]*)`", prose):
        yield line, False


@pytest.mark.parametrize("script", ["docs", "help"])
def test_what_a_script_writes_is_current(script: str) -> None:
    command = [sys.executable, ROOT / f"scripts/{script}", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_stale_configuration_is_seen_and_mended(tmp_path: Path) -> None:
    package = [f"mlxspec/{path.name}" for path in (ROOT / "mlxspec").glob("*.py")]
    for name in ("scripts/docs", "docs/configuration.md", *package):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(read(name).replace("`8080`", "`8081`"))
    command = [sys.executable, tmp_path / "scripts/docs"]
    stale = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=60)
    assert stale.returncode == 1 and "configuration.md is stale" in stale.stderr, stale.stderr
    assert subprocess.run(command, timeout=60).returncode == 0
    assert subprocess.run([*command, "--check"], timeout=60).returncode == 0


def test_every_setting_is_documented() -> None:
    page = read("docs/configuration.md")
    assert [name for name in config.TABLE if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("page", ["configuration", "models", "operating"])
def test_the_examples_of_a_settings_file_are_read(page: str, tmp_path: Path) -> None:
    examples = re.findall(r"^```toml\n(.*?)^```$", read(f"docs/{page}.md"), re.M | re.S)
    for text in examples:
        (tmp_path / "config.toml").write_text(text)
        made = config.load_config({}, {"MLXSPEC_CONFIG": str(tmp_path / "config.toml")})
        if made.profiles:
            found = profiles_of(made.profiles, {made.name})
            assert (found["qwen3"].context, found["qwen3:code"].context) == (32768, 32768)
            code = found["qwen3:code"]
            assert (code.base, code.temperature, code.thinking) == ("qwen3", 0.2, False)
    assert examples


def test_the_api_page_names_every_field() -> None:
    from mlxspec.server.openai import schema

    page = read("docs/api.md")
    used = {*schema.Chat.model_fields, *schema.Completion.model_fields}
    assert [name for name in used if f"`{name}" not in page] == []


def test_every_metric_has_its_row() -> None:
    from mlxspec.metrics import Metrics
    from mlxspec.types import ModelInfo, Served, Stats

    info = ModelInfo("tiny", 512, 320, "rows", 16, 1, 1, 1)
    stats = Stats(drafts=(("lookup", 1, 1, 1),))
    shown = Metrics(lambda: {"tiny": Served(info, stats=stats)})
    served = {f.name + "_total" * (f.type == "counter") for f in shown.registry.collect()}
    written = set(re.findall(r"^\| `(mlxspec_\w+)", read("docs/operating.md"), re.M))
    assert written == served


def test_the_tree_names_every_module() -> None:
    """Each in its package, unless that package is one line, and nothing that is not there."""
    tree = re.search(r"^```\nmlxspec/\n(.*?)^```$", read("ARCHITECTURE.md"), re.M | re.S)
    assert tree
    named, package = set[str](), [""]
    for line in tree[1].splitlines():
        found = re.match(r"((?:  )+)((?:\w+/?, )*\w+/?)(?: |$)", line)
        assert found, line
        del package[len(found[1]) // 2 :]
        paths = [package[-1] + name for name in found[2].split(", ")]
        package.append(paths[-1])
        named.update(paths)
    packages = [name for name in named if name.endswith("/")]
    whole = tuple(each for each in packages if sum(name.startswith(each) for name in named) == 1)
    missing = set(named)
    for path in (ROOT / "mlxspec").rglob("*.py"):
        module = path.relative_to(ROOT / "mlxspec")
        name = str(module.with_suffix(""))
        if module.stem.startswith("__"):
            name = f"{module.parent}/"
        missing.discard(name)
        assert name in named or name.startswith(whole) or name == "./", name
    assert missing == set()


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", line)[0] for line in requirements}


def test_dependencies_are_explained() -> None:
    page = re.split(r"^## To (?:run|develop|build)$", read("docs/dependencies.md"), flags=re.M)
    run, develop, build = (set(re.findall(r"^\| `([^`]+)` \|", p, re.M)) for p in page[1:])
    assert run == names(PROJECT["dependencies"]) and build == {"hatchling"}
    assert develop == names(PROJECT["optional-dependencies"]["dev"])


def test_every_import_is_a_declared_dependency() -> None:
    imported = set()
    for path in (ROOT / "mlxspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    declared = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["menubar"])
    modules = {"PIL" if name == "pillow" else name.replace("-", "_") for name in declared}
    known = modules | sys.stdlib_module_names
    assert imported - known == {"mlxspec"}


def test_the_pages_name_the_version() -> None:
    assert PROJECT["dynamic"] == ["version"] and mlxspec.__version__ in read("README.md")
    (first, *_) = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.M)
    assert first in (mlxspec.__version__, "Unreleased")


def test_the_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    for page in PAGES:
        assert (
            set(re.findall(r"^(?:    )?make ([a-z-]+)", page.read_text("utf-8"), re.M)) <= targets
        )


LINES = [(p.name, *line) for p in PAGES if p not in OLD for line in commands(p)]


@pytest.mark.parametrize(("page", "line", "whole"), LINES)
def test_the_command_line_takes_it(page: str, line: str, whole: bool, bare_settings: None) -> None:
    command: Any = get_command(cli.app)
    words = shlex.split(line, comments=True)
    if words[0] in ("--version", "--install-completion", "--help"):
        return
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), "unknown"
    if words or whole:
        command.make_context(line, words)


def options(command: Any) -> set[str]:
    own = {name for param in command.params for name in param.opts}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


def test_the_settings_for_other_programs_parse_and_name_this_server() -> None:
    read_as: dict[str, Any] = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    page = read("docs/clients.md")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S)
    assert {kind for kind, _ in blocks} == {"sh", "python", *read_as}
    for kind, text in blocks:
        if kind in read_as:
            assert read_as[kind](text)
        elif kind == "python":
            compile(text, "clients.md", "exec")
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", page)) == {str(config.Config().port)}


def test_every_flag_of_the_guides_is_known() -> None:
    """Flags in inline code, such as `--kv-bits 8`, in the pages for users of the server."""
    known = options(get_command(cli.app)) | {"--help"}
    scripts = {"mac.md", "roofline.md"}  # whose flags are other programs'
    pages = [page for page in ROOT.glob("docs/*.md") if page.name not in scripts]
    for page in (ROOT / "README.md", *pages):
        flags = set(re.findall(r"`(--[a-z-]+)", page.read_text("utf-8")))
        assert flags <= known, page


def test_what_the_page_on_slowness_quotes_is_what_the_program_says() -> None:
    """Inline code in its first and second columns, but commands, flags and metrics: each part
    between two `…` stands in a string of the package or in the status page."""
    source = [path.read_text("utf-8") for path in (ROOT / "mlxspec/server/page").glob("*.js")]
    for path in (ROOT / "mlxspec").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        source += [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str]
    said = "\n".join(source).replace("%%", "%")
    quoted = set[str]()
    for row in re.findall(r"^\| (.*) \| .* \|$", read("docs/slow.md"), re.M):
        quoted |= set(re.findall(r"`([^`]+)`", row))
    quoted = {one for one in quoted if not one.startswith(("mlxspec", "--"))}
    assert len(quoted) > 20
    parts = {part.strip() for one in quoted for part in one.split("…")}
    assert [part for part in sorted(parts) if part not in said] == []


def test_the_named_heads_are_those_of_the_cards() -> None:
    cards = [tomllib.loads(path.read_text("utf-8")) for path in ROOT.glob("models/heads/*.toml")]
    known = {head["id"] for card in cards for head in card["heads"]}
    table = re.findall(r"^\| .*(?:Qwen|gpt-oss|Gemma|GLM).* \|$", read("docs/heads.md"), re.M)
    rows = [
        row for row in table if "raw checkpoints" in row or re.search("dflash|dspark", row, re.I)
    ]
    named = set(re.findall(r"`([\w-]+/[\w.-]+)`", "\n".join(rows)))
    named |= set(re.findall(r"--draft ([\w-]+/[\w.-]+)`", read("README.md")))
    assert len(named) > 10 and named <= known, named - known


def test_the_named_tests_exist() -> None:
    for name, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", read("docs/mac.md")):
        assert f"def {test}(" in read(name), f"{name}::{test}"


def test_the_first_pages_are_short() -> None:
    assert len(read("README.md").splitlines()) <= 120
    assert (ROOT / "docs/performance.md").stat().st_size <= 10_000
    assert (ROOT / "docs/page.png").stat().st_size <= 150_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
        if not link.startswith("https://"):
            to = page.parent / link if link else page
            assert to.exists(), link
            assert not place or place in places(to), f"{link}#{place}"


def places(page: Path) -> set[str]:
    """What a link can name in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
