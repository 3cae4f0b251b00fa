"""Every command of the documents is in HOW: run here, or by the test that is named, or said why it
is not.

Rule: each `mlxspec` line is parsed by the real command line, so that no flag of a page can go
stale; a command without an entry fails, and so does an entry without a command.
"""

import ast
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mlxspec import __version__, cli, config
from mlxspec.commands import launch
from mlxspec.engine.worker import Worker
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import ModelInfo
from tests import tiny
from tests.server.live import live
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[1]
OLD = {"NOTES.md", "CHANGELOG.md", "cli.md"}  # what was run then; what test_docs compares whole
FILES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("[a-z]*/*.md"),
    *ROOT.glob("tests/[a-z]*/*.md"),
]  # not of caches
PAGES = [path for path in sorted(FILES) if path.name not in OLD]
OTHERS = (
    "apt-get|brew|chmod|codex|cp|curl|git|launchctl|llm|loginctl|make|npm|pip|pipx|pytest|python3?"
)
OTHERS += r"|scripts/\w+|uv"
COMMAND = re.compile(
    rf"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:scripts/\w+|(?:mlxspec|{OTHERS}) .*\S)"
)
ADDRESS = "http://127.0.0.1:8080"
CONTEXT = 256
HERE = launch.Server(ADDRESS, "none", "local", 65536)


@dataclass(frozen=True)
class Run:
    """Run here, beside a server or where there is `none`; what it must print."""

    none: bool = False
    says: str = ""


@dataclass(frozen=True)
class By:
    """Run by a test, which has to be there."""

    test: str


@dataclass(frozen=True)
class Near:
    """Not run as it stands: `why`. What it does is, by this test, in another way."""

    test: str
    why: str


@dataclass(frozen=True)
class Not:
    """Not run: why."""

    why: str


HOW: dict[Run | By | Near | Not, list[str]] = {
    Run(says="tiny"): [
        "curl http://127.0.0.1:8080/health",
        "curl http://127.0.0.1:8080/metrics",
        "curl http://127.0.0.1:8080/v1/models",
        "curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json'"
        """ -d '{"messages": [{"role": "user", "content": "Name three rivers."}]}'""",
        "mlxspec models",
        "mlxspec status",
    ],
    Run(says="Serving"): ["mlxspec doctor"],
    Run(says=f"model_context_window={CONTEXT}"): ["mlxspec launch --print codex"],
    Run(): [".venv/bin/mlxspec chat", "mlxspec chat"],
    Run(none=True, says="nothing is cached"): [
        "mlxspec cache ls",
        "mlxspec cache clear",
        "mlxspec cache clear --yes",
    ],
    Run(none=True, says="limit"): ["mlxspec cache stats"],
    Run(none=True, says=__version__): ["mlxspec --version"],
    Run(none=True, says="ProgramArguments"): ["mlxspec service install --dry-run"],
    Run(none=True, says="usage: scripts/roofline"): ["scripts/roofline --help"],
    By("bench/test_roofline.py::test_the_page_shows_what_its_commands_print"): [
        "scripts/roofline",
        "scripts/roofline bench/configs/qwen3.8-27b.json --bits 4",
        'scripts/roofline bench/configs/qwen3.8-27b.json --bits 4 --chips "M4 Pro" --rows m4pro-4bit',
        'scripts/roofline bench/configs/qwen3-30b-a3b.json --bits 4 --chips "M4 Pro" "M4 Max"',
    ],
    By("server/test_run.py::test_the_command_serves_a_model"): [
        "mlxspec serve ./my-model",
        "mlxspec serve ./big small=./my-model",
        "mlxspec serve A B C",
        "mlxspec serve NAME",
    ],
    Near(
        "test_cli.py::test_serve_hands_over_the_settings",
        "up to the settings; the port may be anybody's, and the embedded model is a fetch",
    ): ["mlxspec serve", "mlxspec serve --port 8081"],
    Near(
        "commands/test_models.py::test_models_and_pull",
        "MODEL is a directory there, so nothing is fetched",
    ): ["mlxspec pull MODEL"],
    By("commands/test_launch.py::test_an_agent_is_pointed_at_the_server"): [
        "mlxspec launch AGENT",
        "mlxspec launch aider",
        "mlxspec launch claude",
        "mlxspec launch codex",
        "mlxspec launch opencode",
    ],
    By("clients/test_agents.py::test_mends_a_file"): [
        'mlxspec launch claude -p "Explain this repository"',
        'mlxspec launch codex exec "Mend the tests"',
        'mlxspec launch opencode run "Mend the tests"',
    ],
    By("clients/test_aider.py::test_mends_a_file"): [
        'mlxspec launch aider --message "Mend the tests" hello.py'
    ],
    By("test_cli.py::test_a_service_is_installed_by_the_command"): [
        "mlxspec service install",
        "mlxspec service status",
        "mlxspec service uninstall",
    ],
    By("service/test_launchd.py::test_a_whole_life"): [
        "mlxspec service restart",
        "mlxspec service start",
    ],
    By("service/test_launchd.py::test_the_log"): ["mlxspec service logs -f"],
    By("test_cli.py::test_the_menu_bar_shows_the_server"): [
        "mlxspec menubar",
        "mlxspec menubar --url URL",
    ],
    By("service/test_menubar.py::test_install_and_uninstall"): ["mlxspec menubar install"],
    By("commands/test_doctor.py::test_a_machine_in_order"): ["mlxspec doctor ./tinyq"],
    By("bench/test_run.py::test_from_flags_to_table_and_json"): [
        "mlxspec bench",
        "mlxspec bench --workload edits --prompts 4",
    ],
    By("bench/test_run.py::test_the_lines_of_the_pages"): [
        "mlxspec bench --workload all --prompts 6 --max-tokens 128",
        "mlxspec bench --workload all --streams 1,4",
        "mlxspec bench DIR/qwen2.5-coder-1.5b --draft DIR/qwen2.5-coder-0.5b",
    ],
    Near(
        "test_conformance.py::test_conforms", "it writes a page; the rows of that page are tried"
    ): [".venv/bin/python -m tests.architectures --write"],
    Near(
        "kernels/test_mutants.py::test_mutants_are_caught",
        "the same mutants, judged in its own process",
    ): [
        ".venv/bin/python -m tests.kernels.mutants --count 30 --seed 0",
        "python -m tests.kernels.mutants --count 30 --seed 0",
    ],
    By("metalsim/test_launch.py::test_the_option_sets_the_order"): ["pytest --metal-order N"],
    Near(
        "bench/test_compare.py::test_every_workload_gives_figures",
        "an hour, and the network for the others; the same code measures a tiny model and stand-ins",
    ): [
        "make bench",
        "make bench ARGS=--quick",
    ],
    By("bench/test_run.py::test_a_timeline_from_the_flag_to_the_file"): [
        "mlxspec bench --workload edits --max-tokens 64 --trace trace.json"
    ],
    Near(
        "test_commands.py::test_make_would_run_what_the_pages_say",
        "it installs, or takes minutes to hours",
    ): [
        "make lint",
        "make serve",
        "make setup",
        "make test",
        "make test-slow",
    ],
    By("test_commands.py::test_completion_is_installed"): ["mlxspec --install-completion"],
    By("bench/test_pair.py::test_the_parts_are_joined_in_order_and_once"): [
        "python -m bench.pair DIR"
    ],
    By("bench/test_scripts.py::test_coupling"): [
        "python -m bench.coupling DIR/qwen2.5-coder-1.5b DIR/qwen2.5-coder-0.5b"
    ],
    Near(
        "service/test_launchd.py::test_a_disabled_label_is_enabled", "a fake launchctl is asked"
    ): ["launchctl enable"],
    Near(
        "service/test_launchd.py::test_a_bootstrap_waits_until_the_label_is_gone", "a fake is asked"
    ): ["launchctl print"],
    Near("service/test_launchd.py::test_a_whole_life", "the page says that we do not"): [
        "launchctl stop"
    ],
    Not("continuous integration runs all of that script: .ci/run"): [
        "scripts/test tests/test_config.py -x"
    ],
    By("kernels/test_mutants.py::test_the_battery_and_what_a_mac_compiles"): [
        ".venv/bin/python scripts/metal build/metal"
    ],
    Not("it installs or removes programs, from the network"): [
        "apt-get install chromium",
        "apt-get install libopenblas0-pthread",
        "git pull",
        "mlxspec serve mlx-community/Qwen3-4B-4bit",
        "npm install -g @anthropic-ai/claude-code",
        "npm install -g @openai/codex",
        "npm install -g opencode-ai",
        "pip install 'mlxspec[bench]'",
        "pip install 'mlxspec[menubar]'",
        "pip install gguf",
        "pip install openai",
        "pipx install --force .",
        "pipx install .",
        "pipx uninstall mlxspec",
        "python -m pip install aider-chat",
        "uv tool install .",
    ],
    Not("it changes what another program or the system keeps"): [
        "llm keys set openai",
        "loginctl enable-linger",
    ],
    Not("a mode for a file of the reader's, no line to type"): ["chmod 600"],
    Not("Homebrew: the page says that it is untested"): [
        'HOMEBREW_MLXSPEC_GIT="file://$PWD" brew install --HEAD local/mlxspec/mlxspec',
        "brew tap-new local/mlxspec",
        'cp packaging/mlxspec.rb "$(brew --repository local/mlxspec)/Formula/"',
    ],
    Not("the agents by hand: compared with what launch gives them, below"): [
        "ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=local"
        " ANTHROPIC_DEFAULT_HAIKU_MODEL=local CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536 claude",
        "COPILOT_PROVIDER_BASE_URL=http://127.0.0.1:8080/v1 COPILOT_MODEL=local COPILOT_OFFLINE=true copilot",
        "GOOSE_PROVIDER=openai GOOSE_MODEL=local OPENAI_HOST=http://127.0.0.1:8080"
        " OPENAI_API_KEY=none goose session",
        "OPENAI_API_BASE=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none aider --model openai/local",
        "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none qwen --auth-type openai --model local",
        "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none"
        ' llm -m gpt-4o-mini "Name three rivers."',
    ],
}


def fenced(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def lines(block: str) -> Iterator[str]:
    """The commands of a block of shell, each on one line and without its comment."""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if shlex.split(line, comments=True):  # which fails where a quote is left open
            yield " ".join(line.partition(" # ")[0].split())


def commands(page: Path) -> Iterator[str]:
    """Fenced shell, what follows a `$` in a transcript, indented lines and inline code that are
    commands."""
    for block in fenced(page, "sh"):
        yield from lines(block)
    for block in fenced(page, ""):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    rest = re.sub(r"^```[a-z]*\n.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for line in re.findall(r"^    +(.*)$", rest, re.M):
        yield from lines(line) if COMMAND.fullmatch(line) else ()
    yield from (
        code for code in re.findall(r"`([^`\n]+)`", rest) if " " in code and COMMAND.fullmatch(code)
    )


FOUND = {command: page for page in PAGES for command in commands(page)}
ALL = [(how, command) for how, some in HOW.items() for command in some]
TESTS = [c for c in FOUND if re.search(r"\bpytest .*tests/", c)]
OWN = [re.sub(r"^\.venv/bin/", "", c) for c in FOUND if re.match(r"(\.venv/bin/)?mlxspec ", c)]


def test_every_command_has_its_entry_and_every_entry_its_command() -> None:
    entries = [command for _, command in ALL]
    unsaid = {c: str(page) for c, page in FOUND.items() if c not in entries and c not in TESTS}
    assert unsaid == {}, "say in HOW how it is run"
    assert [c for c in entries if c not in FOUND] == [], "no page has it"
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("line", TESTS)
def test_a_line_of_pytest_has_tests_to_run(line: str) -> None:
    """`make test` and `make test-slow` run them all; a line must name files, and with -m slow slow
    ones."""
    words = shlex.split(line)
    for name in words[words.index("pytest") + 1 :]:
        if name.startswith("tests/"):
            files = [*(ROOT / name).rglob("test_*.py")] or [ROOT / name]
            assert ("slow" in words) in {slow for file in files for slow in slows(file)}, name


def slows(file: Path) -> Iterator[bool]:
    """Of each test of a file, whether it is slow."""
    tree = ast.parse(file.read_text("utf-8"))
    marks = [ast.unparse(s) for s in tree.body if isinstance(s, ast.Assign)]
    whole = any(m.startswith("pytestmark") and "pytest.mark.slow" in m for m in marks)
    for test in tree.body:
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith(
            "test_"
        ):
            yield whole or any("pytest.mark.slow" in ast.unparse(d) for d in test.decorator_list)


def test_slow_tests_are_told_from_others(tmp_path: Path) -> None:
    """A word in a comment marks nothing, and neither does a mark of one test another."""
    text = "# pytest.mark.slow\ndef test_a(): ...\n@pytest.mark.slow\ndef test_b(): ...\ndef c(): ...\n"
    (tmp_path / "test_x.py").write_text(text)
    assert list(slows(tmp_path / "test_x.py")) == [False, True]
    (tmp_path / "test_x.py").write_text(f"pytestmark = [pytest.mark.slow]\n{text}")
    assert list(slows(tmp_path / "test_x.py")) == [True, True]


def test_the_named_tests_are_there_and_speak_of_the_command() -> None:
    for how, command in ALL:
        if isinstance(how, By | Near):
            file, name = how.test.split("::")
            source = (ROOT / "tests" / file).read_text("utf-8")
            assert f"\ndef {name}(" in source, how.test
            if isinstance(how, By):
                word = rf"(?<![\w-]){re.escape(verb(command))}(?![\w-])"
                assert re.search(word, source), f"{how.test} says nothing of {command}"


def verb(command: str) -> str:
    """What tells a command from others: mlxspec's own verb, a module's or a program's name."""
    words = [w for w in shlex.split(command) if "=" not in w]
    program, *rest = words
    if program.startswith("python") or program.endswith("/python"):
        return rest[1].rpartition(".")[2] if rest[0] == "-m" else rest[0]
    return rest[0] if program == "mlxspec" else Path(program).name


def test_the_scripts_that_the_notes_name_are_there() -> None:
    """Old commands are not run again, but what they ran is, by tests/bench."""
    named = set(
        re.findall(r"python -m ((?:bench|tests)\.[\w.]+)", (ROOT / "NOTES.md").read_text("utf-8"))
    )
    assert named and [x for x in named if not (ROOT / f"{x.replace('.', '/')}.py").is_file()] == []


def options(command: Any) -> set[str]:
    own = {name for param in command.params for name in param.opts}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("line", OWN)
def test_the_command_line_takes_it(line: str, bare_settings: None) -> None:
    command, words = get_command(cli.app), shlex.split(line)[1:]
    if words in (["--version"], ["--install-completion"]):
        return None  # which act while they are parsed, and are run
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    given = command.make_context(line, words).params
    if set(given) >= set(config.TABLE):
        config.load({name: given[name] for name in config.TABLE}, {})
    return None


def test_a_stale_flag_is_seen() -> None:
    for words in (["serve", "--prot", "1"], ["bench", "--prompts", "many"], ["load"]):
        with pytest.raises(Exception, match=r"No such option|valid integer|Missing"):
            get_command(cli.app).commands[words[0]].make_context(words[0], words[1:])


def test_every_flag_that_a_page_names_is_one() -> None:
    """Also alone, as `--kv-bits 8`; those of the scripts and of others' programs are listed."""
    others = {"--check", "--rows", "--reached", "--model", "--list", "--servers", "--workloads"}
    others |= {"--report", "--docs"}
    known = options(get_command(cli.app)) | others | {"--help"}
    named = {
        (flag, page.name)
        for page in PAGES
        for code in re.findall(r"`(--[a-z][^`\n]*)`", page.read_text("utf-8"))
        for flag in re.findall(r"(?:^| )(--[a-z-]+)", code)
    }
    assert [(flag, page) for flag, page in sorted(named) if flag not in known] == []
    assert {flag for flag, _ in named} >= others, "a page no longer names one of the others"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the real engine and a tiny random model."""
    path = save_tokenizer(tmp_path_factory.mktemp("tiny"))
    (path / "generation_config.json").write_text(
        '{"temperature": 0}'
    )  # an answer that is always the same

    def start() -> Any:
        engine = tiny.engine(tiny.model("llama"), blocks=256, context=CONTEXT, vocab=tiny.VOCAB)
        return engine, ModelInfo("tiny", CONTEXT, tiny.VOCAB, "rows", 8, 256, 1, 1, 1_700_000_000)

    worker = Worker(start, max_sequences=8, max_queue=16)
    worker.launch()
    with live(create_app(worker, load_tokenizer(path), path, config.Config())) as base:
        yield base
    worker.stop()


@pytest.fixture
def new_user(bare_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home, no service, and the log where it was."""
    monkeypatch.setattr(cli, "log_to_stderr", lambda level: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("VENV", sys.prefix)
    monkeypatch.chdir(ROOT)


def run(command: str) -> tuple[int, str, str]:
    """Its status, its output and all that it prints: ours in this process, others in a shell."""
    name, *words = shlex.split(command)
    if name == "curl" and shutil.which(name) is None:
        return 0, *[curl(words)] * 2
    if name.endswith("mlxspec"):
        made = CliRunner().invoke(cli.app, words, input="Name three rivers.\n", prog_name="mlxspec")
        return made.exit_code, made.stdout, made.output
    command = command.replace("curl ", "curl -sS --fail -m 30 ", 1)
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stdout + done.stderr


def curl(words: list[str]) -> str:
    """What it does with an address, -H and -d; raises where the status is not 2xx."""
    said = dict(zip(words[1::2], words[2::2], strict=True))
    headers = dict([said["-H"].split(": ", 1)] if "-H" in said else [])
    data = said["-d"].encode() if "-d" in said else None
    with urllib.request.urlopen(
        urllib.request.Request(words[0], data, headers), timeout=30
    ) as answer:
        assert said.keys() <= {"-H", "-d"}
        return str(answer.read().decode())


@pytest.mark.parametrize(("how", "command"), [(h, c) for h, c in ALL if isinstance(h, Run)])
def test_it_runs(
    how: Run, command: str, url: str, new_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = f"http://127.0.0.1:{probe.getsockname()[1]}"
    at = free if how.none else url
    monkeypatch.setenv("MLXSPEC_PORT", at.rpartition(":")[2])
    status, output, said = run(command.replace(ADDRESS, at))
    assert status == 0 and (how.says in said if how.says else output.strip()), said


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("lint", ["scripts/check"]),
        ("serve", ["pip install", " -e .\n", "/mlxspec serve\n"]),
        ("setup", ["pip install", " -e .\n"]),
        ("test", ["scripts/test -n auto "]),
        ("test-slow", ["scripts/test -m slow "]),
    ],
)
def test_make_would_run_what_the_pages_say(target: str, runs: list[str]) -> None:
    """With a pyproject.toml that has changed, so that it would install as well."""
    command = ["make", "-n", "-W", "pyproject.toml", target, f"BIN={sys.prefix}/bin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and [x for x in runs if x not in done.stdout] == [], (
        done.stdout + done.stderr
    )


def test_make_takes_arguments_for_the_comparison() -> None:
    command = ["make", "-o", ".venv/developed", "bench", f"BIN={sys.prefix}/bin", "ARGS=--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "mlx_lm.server" in done.stdout and "session" in done.stdout, (
        done.stderr
    )


def test_completion_is_installed(bare_settings: None, tmp_path: Path) -> None:
    script = (
        f'"{sys.executable}" -m mlxspec --install-completion; exit $?'  # bash must be its parent
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0 and "bash completion installed" in done.stdout, (
        done.stdout + done.stderr
    )
    assert [*tmp_path.rglob(".bash_completions/*.sh")]


def test_what_a_page_shows_as_data_is_read(bare_settings: None, tmp_path: Path) -> None:
    for page in PAGES:
        for block in fenced(page, "json"):
            json.loads(block)
        for block in fenced(page, "toml"):
            tomllib.loads(block)
            if page.name != "clients.md":  # whose TOML is an agent's
                (tmp_path / "config.toml").write_text(block)
                assert config.load({}, {}, tmp_path / "config.toml") != config.Config()


def test_python_of_a_page_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for page in PAGES for block in fenced(page, "python")]
    assert blocks
    for block in blocks:
        exec(compile(block.replace(ADDRESS, url), "page", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_by_hand_is_what_launch_does() -> None:
    """Codex' file with the flags, opencode's with the variable; of the variables those that both
    set."""
    page = ROOT / "docs/clients.md"
    [toml], [file] = fenced(page, "toml"), fenced(page, "json")
    flags = tomllib.loads("\n".join(launch.AGENTS["codex"].flags(HERE)[1::2]))
    flags["model_providers"]["mlxspec"].pop("env_key")  # a server without a key asks for none
    assert tomllib.loads(toml) == flags
    made = json.loads(launch.AGENTS["opencode"].variables(HERE)["OPENCODE_CONFIG_CONTENT"])
    made["provider"]["mlxspec"]["models"]["local"].pop("name")
    assert json.loads(file) == made
    seen = set()
    for line in (c for c in commands(page) if re.match(r"[A-Z_]+=", c)):
        words = shlex.split(line)
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        agent = launch.AGENTS[name := words[len(variables)]]
        told = agent.variables(HERE)
        both = variables.keys() & told.keys()
        assert {key: variables[key] for key in both} == {key: told[key] for key in both} and both, (
            line
        )
        seen.add(name)
    assert seen == launch.AGENTS.keys() - {"codex", "opencode"}
