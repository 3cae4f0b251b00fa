"""The `mlxspec` command. It loads nothing heavy until a command needs it, so that --help is
instant.

Whatever a user can mend ends in one line on stderr and exit status 2; a traceback is a bug of ours.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxspec import __version__, blas
from mlxspec.commands.chat import ChatError
from mlxspec.commands.launch import AGENTS
from mlxspec.commands.launch import launch as become
from mlxspec.config import ARGUMENTS, TABLE, Config, ConfigError, flag, kind, limits, load
from mlxspec.files import format_size
from mlxspec.types import UserError
from mlxspec.verbs import LOOK, MEASURE, RUN, USE, Dry, Key, Url, menubar, server_of, verbs, working

METAVARS = {str: "TEXT", int: "N", float: "N", tuple: "A,B"}
Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="As for serve.", show_default=False)
]
CacheDir = Annotated[
    str | None, typer.Option(help="As for serve; without it, the one of your settings.")
]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
cache = typer.Typer(no_args_is_help=True, help="Look at the prompt cache on disk, or empty it.")
app.add_typer(cache, name="cache", rich_help_panel=LOOK)
service = typer.Typer(
    no_args_is_help=True, help="Run the server after each login: launchd or systemd."
)
app.add_typer(service, name="service", rich_help_panel=RUN)
app.add_typer(menubar, name="menubar", rich_help_panel=RUN)
app.add_typer(verbs)


def main() -> None:
    """Runs the command of `sys.argv`."""
    try:
        app(prog_name="mlxspec")
    except SystemExit as end:
        if end.code == 2 and sys.argv[1:2] == ["serve"]:
            _refuse_words()
        raise
    except (ConfigError, ChatError, UserError) as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(
            Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True
        )
        sys.exit(2)


def _refuse_words() -> None:
    """A service's definition may have a flag that this version no longer knows."""

    def settings() -> Config:
        raise UserError(
            "its command line is not understood, see the log: `mlxspec service install` anew"
        )

    _serve_given(settings)


def _serve_given(settings: Callable[[], Config]) -> None:
    """Serve where launchd or systemd handed a socket over, and end; else return."""
    from mlxspec.service.socket import inherited

    if listeners := inherited():
        from mlxspec.service import daemon

        sys.exit(daemon.serve(settings, listeners))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mlxspec {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A local server for language models on Apple Silicon, built on MLX."""


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the models as its arguments and a flag for each other row of the settings'
    table."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
    parameters = []
    for name, row in TABLE.items():
        notes = [row.metadata["help"]]
        notes += [f"Admits: {limits(row)}."] if limits(row) else []
        notes += [f"Default: {row.default}."] if row.default else []
        text = " ".join(notes)
        info: Any = typer.Argument(help=text, show_default=False, metavar=flag(name))
        if name not in ARGUMENTS:
            info = typer.Option(
                flag(name), help=text, show_default=False, metavar=METAVARS[kind(row)]
            )
        taken: Any = list[str] if name == "others" else str
        given: Any = Annotated[taken | None, info]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=given)
        )
    parameters += own
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@app.command(rich_help_panel=RUN)
@_with_flags
def serve(**flags: str | list[str] | None) -> None:
    """Serve models: directories in mlx-lm's format, hub ids, or, without MODEL, the embedded
    one."""
    log_to_stderr("info")

    def settings() -> Config:
        config = load(flags, os.environ)
        log_to_stderr(config.log_level)
        return config

    _serve_given(settings)
    config = settings()
    from mlxspec.server.process import serve_model

    sys.exit(serve_model(config))


@app.command(rich_help_panel=USE)
def chat(
    url: Url = None,
    api_key: Key = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: the model's.")
    ] = None,
) -> None:
    """Chat with the running server. /reset starts anew, /exit ends, Ctrl-C stops an answer."""
    from mlxspec.commands.chat import run

    run(*server_of(url, api_key), system, temperature)


@app.command(rich_help_panel=USE, context_settings={"allow_interspersed_args": False})
def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="All behind AGENT is for it.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Show the command, and start nothing.")
    ] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Start a coding agent on the running server. None of its files are changed."""
    become(agent, args or [], *server_of(url, api_key), show)


@app.command(rich_help_panel=MEASURE)
def bench(
    model: Model = None,
    draft: Annotated[str, typer.Option(metavar="MODEL", help="A small model that drafts.")] = "",
    workload: Annotated[
        str,
        typer.Option(
            help="edits, humaneval, chat, mixed, or all: the first three. edits needs no network."
        ),
    ] = "all",
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Prompts of each workload.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.001, max=1, help="Of the likeliest tokens.")] = 1.0,
    streams: Annotated[
        str, typer.Option(metavar="N,N", help="How many prompts run at a time.")
    ] = "1",
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often all of it is repeated.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw a picture; needs matplotlib.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that was measured.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a timeline of every step instead, for ui.perfetto.dev; say what our own Python takes"
            " and how long nothing was submitted.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Score copying on recorded tokens instead; loads no model."
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="P", help="Measure the controller instead; loads no model."
        ),
    ] = None,
    row_cost: Annotated[
        float, typer.Option(min=0, max=2, help="Of a row, in steps; for these two.")
    ] = 0.1,
    draft_cost: Annotated[
        float, typer.Option(min=0, max=10, help="Of a drafted token, in steps.")
    ] = 0.1,
) -> None:
    """Measure what speculation brings: the same prompts with it and without, in turn, on this
    machine.

    Exits with 1 if any answer differs.
    """
    config = load({"model": model}, os.environ)
    log_to_stderr(config.log_level)
    from mlxspec.bench import run

    if replay or synthetic_acceptance is not None:
        return run.offline(replay, synthetic_acceptance, row_cost, draft_cost)
    wanted = run.Ask(
        workloads=run.workloads_of(workload),
        prompts=prompts,
        max_tokens=max_tokens,
        streams=run.streams_of(streams),
        rounds=rounds,
        draft=draft,
        temperature=temperature,
        top_p=top_p,
        out=out,
        json=json,
        trace=trace,
    )
    sys.exit(run.bench(config, wanted))


@app.command(rich_help_panel=LOOK)
def doctor(
    model: Model = None,
    cache_dir: CacheDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show the machine, the paths, and which kernels were proven and are used here. It measures
    nothing.

    Exits with 1 if something is broken.
    """
    config, wrong = Config(model=model or "", cache_dir=cache_dir or ""), ""
    try:
        config = load({"model": model, "cache_dir": cache_dir}, os.environ)
    except ConfigError as error:
        wrong = str(error)
    log_to_stderr("error")
    from mlxspec.commands.doctor import doctor

    sys.exit(doctor(config, wrong, json))


@app.command(rich_help_panel=MEASURE)
def tune(
    model: Model = None,
    cache_dir: CacheDir = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Where the picture goes; default: tune.png in the cache."),
    ] = None,
) -> None:
    """Try the kernels and measure what a step costs, whatever is known already, for later starts of
    serve."""
    config = load({"model": model, "cache_dir": cache_dir}, os.environ)
    log_to_stderr(config.log_level)
    blas.load()
    from mlxspec.bench.tune import tune

    sys.exit(tune(config, out))


@cache.command("ls")
def cache_ls(cache_dir: CacheDir = None) -> None:
    """What is cached, by model."""
    from rich.console import Console

    from mlxspec.commands.cache import show

    show(_prompts(cache_dir)[0], Console())


@cache.command("stats")
def cache_stats(cache_dir: CacheDir = None) -> None:
    """How much is cached in all, and how much may be."""
    from rich.console import Console

    from mlxspec.commands.cache import totals

    totals(*_prompts(cache_dir), Console())


@cache.command("clear")
def cache_clear(
    cache_dir: CacheDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all of it. A running server goes on, and fills it anew."""
    from mlxspec.commands.cache import clear, survey

    root = _prompts(cache_dir)[0]
    held = sum(model.bytes for model in survey(root))
    if held and not yes:
        typer.confirm(f"Delete {format_size(held)} of prompt cache in {root}?", abort=True)
    files, freed = clear(root)
    print(
        f"{format_size(freed)} freed; files deleted: {files}"
        if files
        else f"nothing is cached in {root}"
    )


@service.command("install")
@_with_flags
def service_install(*, dry_run: Dry = False, **flags: str | list[str] | None) -> None:
    """Install the service with the settings that serve would heed here, or change one that is
    installed."""
    from mlxspec.service import Hands, here, verbs
    from mlxspec.service.job import job_of

    with working("service install", shown=not dry_run):
        said = verbs.install(here(), job_of(flags, os.environ), Hands(dry_run))
    print(said)


VERBS = {
    "uninstall": "End the service, and remove it and its menu bar. Settings, models and caches stay.",
    "start": "Start the service, also one that stays down after crashes or a kernel panic.",
    "stop": "Stop the service, until it is started or the next login.",
    "restart": "Stop the service, once running answers have ended, and start it anew.",
}


def _add(verb: str) -> None:
    @service.command(verb, help=VERBS[verb])
    def act(dry_run: Dry = False) -> None:
        from mlxspec.service import Hands, here, verbs

        with working(f"service {verb}", shown=not dry_run):
            said = getattr(verbs, verb)(here(), Hands(dry_run))
        print(said)


for each in VERBS:
    _add(each)


@service.command("status")
def service_status() -> None:
    """How the service is, which is not woken. Exits with 3 if it is down, with 4 if it is not
    installed."""
    from mlxspec.service import here
    from mlxspec.service.status import UP, installed, look, show

    if not (at := installed(here())):
        print("not installed; `mlxspec service install` does that")
        sys.exit(4)
    now = look(at, load({}, os.environ).api_key)
    show(now, as_json=False)
    sys.exit(0 if now.state in UP else 3)


@app.command("logs", rich_help_panel=LOOK)
@service.command("logs")
def service_logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many of the last.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what comes.")] = False,
) -> None:
    """Show the service's log."""
    from mlxspec.service import here, named
    from mlxspec.service.status import installed

    system = here()
    if not installed(system):
        raise UserError(
            "the service is not installed; a server that you started says all in its terminal"
        )
    command = system.logs(lines, follow)
    with named(command[0]):
        os.execvp(command[0], command)


@service.command("print")
@_with_flags
def service_print(
    *,
    launchd: Annotated[bool, typer.Option("--launchd", help="The launch agent.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="The units.")] = False,
    **flags: str | list[str] | None,
) -> None:
    """Show the service's definition with these settings, on any platform; without a choice, this
    one's."""
    from mlxspec.service import System, here
    from mlxspec.service import launchd as agent
    from mlxspec.service import systemd as units
    from mlxspec.service.job import job_of

    wanted: list[System] = [agent] if launchd else []
    wanted += [units] if systemd else []
    for system in wanted or [here()]:
        for path, data in system.files(job_of(flags, os.environ)).items():
            print(
                "" if path.suffix == ".plist" else f"# {path.name}\n", data.decode(), sep="", end=""
            )


def _prompts(cache_dir: str | None) -> tuple[Path, int]:
    """Where the prompt cache is, and its limit in bytes."""
    from mlxspec.model.hub import prompts_of

    config = load({"cache_dir": cache_dir}, os.environ)
    return prompts_of(config), config.disk_bytes


def log_to_stderr(level: str) -> None:
    """Our own log at `level`; other libraries' warnings and errors."""
    line = logging.StreamHandler(sys.stderr)
    line.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[line])
    logging.getLogger("mlxspec").setLevel(level.upper())
