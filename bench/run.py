"""mlxspec beside other servers for MLX, on this machine: speed, waits, memory, and whether answers
are right.

Every server gets an environment of its own (two of them take 6 GB each) and the same model. Writes
a table of all values (CSV), a report (Markdown) and pictures. `make bench ARGS=--quick` is short.
"""

import argparse
import asyncio
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mlxspec import blas

blas.load()

import mlx.core as mx  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: E402

from bench import draw, report  # noqa: E402
from bench.cells import WORKLOADS  # noqa: E402
from bench.measure import Run, installed, measure  # noqa: E402
from bench.rows import ABOUT, Rows, read, write  # noqa: E402
from bench.servers import DEFAULT, SERVERS, drafting, environment  # noqa: E402
from bench.setting import Setting, window_of  # noqa: E402
from mlxspec.files import default_cache_dir  # noqa: E402
from mlxspec.model.hub import learned_head, resolve  # noqa: E402
from mlxspec.text.chat import load_tokenizer  # noqa: E402

HERE = Path(__file__).parent
QUICK = 0.25


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    several = {"type": lambda text: text.split(","), "metavar": "NAME,..."}
    parser.add_argument(
        "--model", default="", help="as for mlxspec serve; default: the built-in model"
    )
    parser.add_argument(
        "--servers", default=list(DEFAULT), help=f"default: {','.join(DEFAULT)}", **several
    )
    parser.add_argument(
        "--workloads",
        default=list(WORKLOADS),
        help="default: all; see --list; empty: probes alone",
        **several,
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; the median counts")
    parser.add_argument(
        "--probes", type=int, default=2, help="correctness probes of a length and cell; 0: none"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, short prompts and answers: does it run?"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds that a workload may take")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the results go")
    parser.add_argument(
        "--peers-dir", type=Path, default=HERE / ".peers", help="where the environments are"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="CSV",
        help="rebuild the report and its pictures from a table",
    )
    parser.add_argument(
        "--docs", action="store_true", help="with --report: write it into README and docs too"
    )
    parser.add_argument(
        "--list", action="store_true", help="names of servers and workloads, and nothing else"
    )
    args = parser.parse_args(given)
    for names, known in ((args.servers, SERVERS), (args.workloads, WORKLOADS)):
        if unknown := [n for n in names if n and n not in known]:
            parser.error(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    if args.quick:
        args.probes = min(1, args.probes)
    if args.docs and not args.report:
        parser.error("--docs is for --report, whose table it writes into the pages")
    if args.rounds < 1 or args.probes < 0 or args.limit <= 0:
        parser.error("--rounds takes 1 or more, --probes 0 or more, --limit more than 0")
    return args


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    console = Console(stderr=True)
    if args.list:
        print("servers:  ", ", ".join(SERVERS))
        print("workloads:", ", ".join(WORKLOADS))
    elif args.report:
        rows = read(args.report)
        finish(rows, args.report, console)
        for page in report.fill(rows, args.report.resolve(), HERE.parent) if args.docs else ():
            console.print(f"wrote {page}", highlight=False)
    else:
        finish(run(args, console), args.out / f"{machine()}.csv", console)


def run(args: argparse.Namespace, console: Console) -> Rows:
    """All that is asked for, measured."""
    found = resolve(args.model, default_cache_dir(), mx.metal.is_available())
    model, head = found.path, learned_head(found, default_cache_dir())
    rows, began = Rows(), time.time()
    servers = installed(
        [drafting(SERVERS[n], head) for n in args.servers],
        args.peers_dir.absolute(),
        rows,
        console,
    )
    setting = Setting(
        load_tokenizer(model),
        window_of(model),
        default_cache_dir(),
        int(began) % 10**6,
        QUICK if args.quick else 1.0,
    )
    with (
        tempfile.TemporaryDirectory(prefix="mlxspec-bench-", ignore_cleanup_errors=True) as scratch,
        Progress(*COLUMNS, console=console) as bar,
    ):
        about(rows, model, setting, args)
        work = Run(
            servers,
            model,
            Path(scratch),
            setting,
            rows,
            bar,
            1 if args.quick else args.rounds,
            [w for w in args.workloads if w],
            starts=2 if args.quick else 4,
            probes=args.probes,
            limit=args.limit,
        )
        asyncio.run(measure(work, args.out / f"{machine()}.csv"))
    rows.add(
        "", ABOUT, "minutes", 0, (time.time() - began) / 60, f"{(time.time() - began) / 60:.0f}"
    )
    return rows


COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    TaskProgressColumn(),
    TimeRemainingColumn(),
)


def finish(rows: Rows, file: Path, console: Console) -> None:
    """The table, the report and the pictures, side by side."""
    write(file, rows)
    pictures = draw.all_of(rows, file.with_suffix(""))
    text = report.markdown(rows, [p.name for p in pictures])
    file.with_suffix(".md").write_text(text, "utf-8")
    console.print(report.goals(rows))
    for made in (file, file.with_suffix(".md"), *pictures):
        console.print(f"wrote {made}", highlight=False)


def about(rows: Rows, model: Path, setting: Setting, args: argparse.Namespace) -> None:
    threads = environment(Path(tempfile.gettempdir()))["OPENBLAS_NUM_THREADS"]
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "model": model.name,
        "window": f"{setting.window} tokens",
        "session": f"to about {setting.share(1.0)} tokens",
        "mlx": f"{version('mlx')}, {mx.default_device()}",
        "python": platform.python_version(),
        "blas": f"{getattr(blas.load(), 'name', 'as mlx has it')}, OPENBLAS_NUM_THREADS={threads}",
        "seed": str(setting.seed),
        "rounds": "1, quick: no figure counts" if args.quick else str(args.rounds),
        "probes": f"{args.probes} of a length and cell",
        "commit": commit(),
    }
    for metric, note in facts.items():
        rows.add("", ABOUT, metric, 0, 0, note)
    for name in args.servers:
        rows.add(name, ABOUT, f"package {name}", 0, 0, SERVERS[name].package or "this checkout")


def commit() -> str:
    """Of this checkout, and whether it was changed since; "unknown" where git does not say."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=HERE, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


def machine() -> str:
    """Of the machine's kind, never its name."""
    kind = f"{platform.machine()}-{os.cpu_count()}-cores"
    if sys.platform == "darwin":
        sysctl = ["sysctl", "-n", "machdep.cpu.brand_string"]
        kind = subprocess.run(sysctl, capture_output=True, text=True, check=True, timeout=10).stdout
    return re.sub(r"[^a-z0-9_]+", "-", f"{platform.system()}-{kind}".lower()).strip("-")


if __name__ == "__main__":
    main()
