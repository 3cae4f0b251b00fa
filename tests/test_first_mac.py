"""scripts/first-mac as far as it goes here: what needs a Mac says so, the rest runs."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.first_mac import commands, loaded, parts, report
from mlxspec.commands.bench import figures
from mlxspec.commands.table import print_table
from mlxspec.kernels.trial import Case
from mlxspec.service import launchd
from mlxspec.types import Output
from tests.support.checkpoints import save
from tests.tiny_tokenizer import save_tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/first-mac"


def run(tmp_path: Path, *words: str, home: str = "") -> tuple[int, str]:
    """The exit status and the report."""
    out = tmp_path / "report.txt"
    env = {**os.environ, "MLXSPEC_CACHE_DIR": str(tmp_path / "cache"), "MLXSPEC_CONFIG": os.devnull}
    if home:
        env["HOME"] = home
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert out.exists(), done.stderr
    return done.returncode, out.read_text()


@pytest.mark.skipif(sys.platform == "darwin", reason="would run them")
def test_what_needs_a_mac_says_so(tmp_path: Path) -> None:
    needing = ("instances", "compiled", "kernels", "acceptance", "service", "menubar")
    status, told = run(tmp_path, "--parts", *needing)
    assert status == 0
    for part in needing:
        assert f"== {part}: not on this machine" in told


@pytest.mark.slow
def test_a_model_is_compared_with_mlx_lm(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "home/someone/model")
    save(model, "llama")
    chosen = ("--parts", "machine", "memory", "lossless", "exact", "steps")
    status, told = run(tmp_path, str(model), *chosen, home=str(tmp_path / "home/someone"))
    assert status == 0, told
    assert told.count(": ok (") == 5 and told.count("tokens equal") == 3
    assert "exact up to 33 rows, for " in told and "of 1000 tokens" in told
    assert told.count("command buffers: {") == 2 and "first token after" in told
    assert "trees of drafts: a further row" in told
    assert "someone" not in told and "~/model" in told


@pytest.mark.slow
def test_speed_beside_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one workload: all of them take minutes here. What `acceptance` reads of it is there."""
    model = save_tokenizer(tmp_path / "model")
    save(model, "llama", max_position_embeddings=4096)  # what bench asks is longer
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLXSPEC_CONFIG", os.devnull)
    monkeypatch.setattr(parts, "LENGTHS", ("-p", "8", "-g", "4", "-n", "1"))
    few = ("--workload", "edits", "--max-tokens", "8")
    monkeypatch.setattr(parts, "bench", lambda *words: commands.bench(*words, *few))
    ours, theirs, others = parts.speed(str(model))
    assert parts.tokens_per_round(ours) >= 1
    assert theirs.startswith("mlx-lm: Averages: prompt_tps=") and "generation_tps=" in theirs
    assert others.startswith("llama.cpp: not on this machine")


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    status, told = run(tmp_path, str(tmp_path / "none"), "--parts", "lossless", "compiled")
    assert status == 1
    assert "== lossless: FAILED" in told and "none" in told and "== compiled: " in told


def test_parts_for_which_no_time_is_left_say_so(tmp_path: Path) -> None:
    status, told = run(tmp_path, "--parts", "machine", "compiled", "--minutes", "0.5")
    assert status == 0
    assert told == "== machine: not run: no time left\n\n" + told[told.index("== compiled") :]
    assert "== compiled: not on this machine (" in told


@pytest.mark.parametrize(
    ("does", "state", "more"),
    [
        ("time.sleep(60)", "cut: no time left", ""),
        ("subprocess.run(['sleep', '60'])", "cut: no time left", ""),
        ("os.kill(os.getpid(), 11)", "FAILED", "ended with -11:\na warning"),
        ("raise SystemExit(1)", "FAILED", ""),
    ],
)
def test_what_a_part_has_printed_is_kept_however_it_ends(
    does: str, state: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "import os, subprocess, sys, time; print('so far', flush=True);"
    said += f"print('a warning', file=sys.stderr, flush=True); {does}"
    monkeypatch.setattr(report, "words_of", lambda *_: [sys.executable, "-c", said])
    monkeypatch.setattr(report, "LEAVE_S", 0.5)
    began = time.monotonic()
    seconds = 3 if "60" in does else 30  # an interpreter starts in that; those end by themselves
    told = report.run_part("a part", "", seconds)
    assert told == (state, "\n".join(filter(None, ["so far", more])))
    assert time.monotonic() - began < 40


def test_a_part_may_take_half_of_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def run_part(name: str, model: str, seconds: float) -> tuple[str, str]:
        given.append(seconds)
        now[0] += seconds
        return "ok", ""

    now = [0.0]
    monkeypatch.setattr(report, "run_part", run_part)
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(report, "LEAVE_S", 0.0)
    assert report.write_report(tmp_path / "report", ["a", "b", "c"], "", 800) == 0
    assert given == [400, 200, 200]


def test_the_instances_are_those_that_the_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tokenizer(tmp_path / "model")
    save(model, "llama")
    monkeypatch.setenv("MLXSPEC_CONFIG", os.devnull)
    monkeypatch.setattr(loaded, "only_on_a_mac", lambda: None)
    monkeypatch.setattr(loaded, "first_launches", lambda cases: [case.name for case in cases])
    kernels = {name.split()[0] for name in loaded.instances(str(model))}
    assert kernels == {"paged_attention", "sample_accept"}  # its products are not quantized


def test_each_first_launch_is_timed_and_what_cannot_run_is_told() -> None:
    def fails(x: mx.array) -> mx.array:
        raise ValueError("it does not compile")

    case = Case(
        name="a case",
        rows=(1, 2),
        inputs=lambda seed: (mx.ones((2, 4)),),
        stock=mx.exp,
        reference=mx.exp,
        variants={"plain": mx.exp, "matrix": fails},
        tolerance=0.0,
    )
    lines = []
    with pytest.raises(commands.Failed, match="2 instances cannot run"):
        for line in loaded.first_launches([case, case]):
            lines.append(line)
    assert [line.partition(": ")[0] for line in lines] == [
        "a case, plain, 1 rows",
        "a case, plain, 2 rows",
        "a case, matrix, 1 rows",
        "a case, matrix, 2 rows",
        "all first launches",
    ]
    assert " s, then " in lines[0] and lines[2].endswith(": it does not compile")


def test_tokens_a_round_are_read_from_the_table_of_bench(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = [(0.1, Output("a", 0, (1,))), (0.3, Output("a", 0, (2, 3, 4, 5), rounds=2))]
    found = figures([("a", answer, answer)])
    print("a model, greedy")
    names = (name.replace("_", " ") for name in found)
    print_table(["workload", *names], [["edits", *(f"{v:.4g}" for v in found.values())]])
    assert parts.tokens_per_round(capsys.readouterr().out) == 2.5


def test_what_a_command_has_said_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "print('so far', flush=True); import time; time.sleep(60)"
    with pytest.raises(commands.Failed, match="longer than 1 s:\nso far"):
        commands.run(sys.executable, "-c", late, seconds=1)
    with monkeypatch.context() as patch:
        patch.setattr(commands.CLOCK, "until", time.monotonic() + 1)
        with pytest.raises(commands.Late, match="did not end:\nso far"):
            commands.run(sys.executable, "-c", late)
    differing = "print('Answers that differ with speculation: a'); raise SystemExit(1)"
    kept = commands.run(sys.executable, "-c", differing, fine=lambda said: "differ" in said)
    assert "differ" in kept
    with pytest.raises(commands.Failed, match="ended with 1"):
        commands.run(sys.executable, "-c", differing)


def test_mlx_lm_has_its_own_command_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "16")
    shown = "import os; print(os.environ.get('MLX_MAX_OPS_PER_BUFFER'))"
    assert commands.run(sys.executable, "-c", shown, without=(commands.OPS,)) == "None"


def test_a_service_is_asked_until_it_answers_200(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that loads answers 503, and one that dies sends nothing; beside an installed service
    the part would wait for that one's lock."""
    said = [b"HTTP/1.0 503 Busy\r\n\r\n", b"", b"HTTP/1.0 200 OK\r\n\r\n"]

    def serve(agent: dict[str, Any]) -> None:
        port = agent["flags"]["port"]
        listener = socket.create_server(("127.0.0.1", int(port)))

        def answer() -> None:
            with listener:
                for words in said:
                    with listener.accept()[0] as client:
                        client.recv(1000)
                        client.sendall(words)

        threading.Thread(target=answer, daemon=True).start()

    removed = []
    monkeypatch.setattr(launchd, "agent_file", lambda: tmp_path / "agent")
    monkeypatch.setattr(launchd, "definition", lambda flags, env: {"flags": flags})
    monkeypatch.setattr(launchd, "load_agent", serve)
    monkeypatch.setattr(launchd, "remove_agent", removed.append)
    monkeypatch.setattr(parts, "only_on_a_mac", lambda: None)
    assert "200 OK" in "".join(parts.service("")) and len(removed) == 1
    (tmp_path / "agent").touch()
    with pytest.raises(commands.Elsewhere, match="installed"):
        next(parts.service(""))


def test_kernels_are_written_without_zig(tmp_path: Path) -> None:
    """Which is installed on Linux only."""
    hidden = "import sys, runpy; sys.modules['ziglang'] = None; "
    hidden += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(SCRIPT.parent / "metal")
    words = [sys.executable, "-c", hidden, script, str(tmp_path)]
    done = subprocess.run(words, cwd=SCRIPT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("*.metal"))) >= 69
