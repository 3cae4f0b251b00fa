"""The documents say what is so: settings, commands, dependencies and links."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mlxspec

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md"), *ROOT.glob("tests/*/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

# Words that promise or belittle; a page says what is measured, and lets the reader judge what is
# easy.
BANNED = [
    "simply",
    "easily",
    "obviously",
    "of course",
    "blazing",
    "lightning-fast",
    "seamless",
    "powerful",
]
BANNED += ["state-of-the-art", "cutting-edge", "world-class", "effortless"]

# Where a package is not imported by its name on the registry alone.
IMPORTS = {
    "mlx-lm": {"mlx_lm"},
    "prometheus-client": {"prometheus_client"},
}


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[\[<>=; ]", line)[0] for line in requirements]


def code(page: Path) -> str:
    """The lines of a page that are code: inline, fenced or indented."""
    text = page.read_text("utf-8")
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", text)
    return "\n".join([*fenced, *inline, *re.findall(r"^    +(.*)$", text, re.M)])


RUNTIME = set(names(PROJECT["dependencies"]))
OPTIONAL = {
    name
    for extra in ("bench", "menubar")
    for name in names(PROJECT["optional-dependencies"][extra])
}
DEVELOPMENT = set(names(PROJECT["optional-dependencies"]["dev"]))


def test_configuration_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/docs", "--check"], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_api_page_names_every_field() -> None:
    from mlxspec.server.anthropic import schema as anthropic
    from mlxspec.server.openai import schema as openai
    from mlxspec.server.responses import schema as responses

    page = read("docs/api.md")
    used = {*openai.Chat.model_fields, *openai.Completion.model_fields}
    refused = {
        name
        for api in (openai, anthropic, responses)
        for fields in api.REFUSED.values()
        for name in fields
    }
    assert [name for name in used | refused if f"`{name}" not in page] == []


def test_a_stale_configuration_is_seen(tmp_path: Path) -> None:
    for name in (
        "scripts/docs",
        "mlxspec/__init__.py",
        "mlxspec/config.py",
        "docs/configuration.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(read(name).replace("option(8080,", "option(8081,"))
    command = [sys.executable, tmp_path / "scripts/docs"]
    stale = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=60)
    assert stale.returncode == 1 and "configuration.md is stale; run scripts/docs" in stale.stderr
    assert subprocess.run(command, timeout=60).returncode == 0
    assert "| `8081` |" in (tmp_path / "docs/configuration.md").read_text()
    assert subprocess.run([*command, "--check"], timeout=60).returncode == 0


def test_the_help_is_current(tmp_path: Path) -> None:
    """And a page that is not is seen, and written anew."""
    for name in ("scripts/help", "docs/cli.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(read(name))
    page, env = tmp_path / "docs/cli.md", {"PYTHONPATH": str(ROOT), "PATH": os.defpath}

    def helped(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tmp_path / "scripts/help", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert helped("--check").returncode == 0, "docs/cli.md is stale; run scripts/help"
    page.write_text(read("docs/cli.md").replace("`--force`: ", "`--forced`: "))
    stale = helped("--check")
    assert (stale.returncode, stale.stderr) == (1, "cli.md is stale; run scripts/help\n")
    assert helped().returncode == 0 and page.read_text() == read("docs/cli.md")


def test_architecture_names_every_module() -> None:
    """By itself or as one of `schema_*`; where a package has one line, the package."""
    parts = read("ARCHITECTURE.md").split("\n## ")[2]
    tree, prose = parts.split("```")[1:]
    told = "\n".join([tree, *re.findall(r"`([^`\n]+)`", prose)])
    whole = ("mlxspec/bench/", "mlxspec/service/", "mlxspec/server/page/")
    unsaid = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "mlxspec").rglob("*.py")
        if not path.relative_to(ROOT).as_posix().startswith(whole)
        and not path.stem.startswith(("__", "schema_"))
        if not re.search(rf"(?<![\w-]){path.stem}(?![\w-])", told)
    ]
    assert unsaid == []
    for package in (ROOT / "mlxspec").rglob("__init__.py"):
        assert f"{package.parent.name}/" in told or package.parent.name == "mlxspec", package


def test_every_metric_has_its_row() -> None:
    """With its labels and kind; of a histogram the buckets, sum and count are one."""
    from mlxspec.metrics import Metrics
    from mlxspec.types import ModelInfo, Served, Stats

    info = ModelInfo("tiny", 512, 320, "rows", 16, 64, 1, 1, 1)
    stats = Stats(drafts=(("lookup", 1, 1, 1),), depths=((1, 1),))
    shown = Metrics(lambda: {"tiny": Served(info, stats=stats)})
    for histogram in (shown.first_token, shown.between_tokens):
        histogram.labels("tiny").observe(1)
    shown.duration.labels("tiny", "stop").observe(1)
    shown.refused.labels("429").inc()
    served = set()
    for family in shown.registry.collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = family.name + "_total" * (family.type == "counter")
        served.add((name, frozenset(labels), family.type))
    rows = re.findall(
        r"^\| `(mlxspec_\w+)(?:\{([a-z,]+)\})?` \| (\w+) \|", read("docs/operating.md"), re.M
    )
    written = [(name, frozenset(labels.split(",")) - {""}, kind) for name, labels, kind in rows]
    assert set(written) == served and len(written) == len(served)
    for page in PAGES:
        named = re.findall(r"`(mlxspec_\w+?)(?:\{.*?\})?`", page.read_text("utf-8"))
        assert set(named) <= {name for name, _, _ in rows}, page


def test_dependencies_are_explained() -> None:
    run, develop, build = re.split(
        r"^## To (?:run|develop|build)$", read("docs/dependencies.md"), flags=re.M
    )[1:]
    rows = [set(re.findall(r"^\| `([^`]+)` \|", part, re.M)) for part in (run, develop, build)]
    assert rows[:2] == [RUNTIME, DEVELOPMENT] and OPTIONAL <= DEVELOPMENT
    assert rows[2] == {"hatchling"}


def test_every_import_is_a_declared_dependency() -> None:
    imported = set()
    for path in (ROOT / "mlxspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"mlxspec"}
    declared = set().union(*(IMPORTS.get(name, {name}) for name in RUNTIME | OPTIONAL))
    assert {"mlx", "typer"} <= foreign <= declared


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"] and re.fullmatch(r"\d+\.\d+\.\d+", mlxspec.__version__)
    assert mlxspec.__version__ in read("README.md")


def test_the_named_make_targets_exist() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.M)
    assert phony
    targets = set(phony[1].split())
    for target in targets:
        assert re.search(rf"^{target}:", read("Makefile"), re.M), target
    for page in PAGES:
        assert set(re.findall(r"^make ([a-z-]+)", code(page), re.M)) <= targets, page


def test_the_named_commands_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxspec", "--help"], capture_output=True, text=True, timeout=60
    )
    for page in PAGES:
        for word in re.findall(r"^(?:.*bin/)?mlxspec ([a-z-]+)", code(page), re.M):
            assert word in done.stdout, f"{page}: mlxspec {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_and_links(page: Path) -> None:
    text = page.read_text("utf-8")
    prose = re.sub(r"\]\(https:[^)]*\)", "]", text)  # another's address may say what it likes
    found = [word for word in BANNED if re.search(rf"\b{word}\b", prose, re.I)]
    assert found == []
    for link, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not link.startswith("https://"):
            to = page.parent / link if link else page
            assert to.exists(), link
            assert not place or place in places(to), f"{link}#{place}"


def places(page: Path) -> set[str]:
    """What a link can name in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
