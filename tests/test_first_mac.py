"""scripts/first-mac as far as it goes here: what needs a Mac says so, the rest runs."""

import os
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxspec.commands.bench import figures
from mlxspec.commands.table import print_table
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
    parts = ("compiled", "kernels", "acceptance", "service", "menubar")
    status, report = run(tmp_path, "--parts", *parts)
    assert status == 0
    for part in parts:
        assert f"== {part}: not on this machine" in report


@pytest.mark.slow
def test_a_model_is_compared_with_mlx_lm(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path / "home/someone/model")
    save(model, "llama")
    parts = ("--parts", "machine", "memory", "lossless", "exact", "steps")
    status, report = run(tmp_path, str(model), *parts, home=str(tmp_path / "home/someone"))
    assert status == 0, report
    assert report.count(": ok (") == 5 and report.count("tokens equal") == 3
    assert "exact up to 17 rows, for " in report and "of 1000 tokens" in report
    assert report.count("command buffers: {") == 2 and "first token after" in report
    assert "trees of drafts: a further row" in report
    assert "someone" not in report and "~/model" in report


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    status, report = run(tmp_path, str(tmp_path / "none"), "--parts", "lossless", "compiled")
    assert status == 1
    assert "== lossless: FAILED" in report and "none" in report and "== compiled: " in report


def test_tokens_a_round_are_read_from_the_table_of_bench(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = [(0.1, Output("a", 0, (1,))), (0.3, Output("a", 0, (2, 3, 4, 5), rounds=2))]
    found = figures([("a", answer, answer)])
    print("a model, greedy")
    print_table(["workload", *found], [["edits", *(f"{v:.4g}" for v in found.values())]])
    script = runpy.run_path(str(SCRIPT))
    assert script["tokens_per_round"](capsys.readouterr().out) == 2.5


def test_what_a_part_has_said_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPT))
    late = "print('so far', flush=True); import time; time.sleep(60)"
    with pytest.raises(script["Failed"], match="longer than 1 s:\nso far"):
        script["run"](sys.executable, "-c", late, seconds=1)
    differing = "print('Answers that differ with speculation: a'); raise SystemExit(1)"
    run_ = script["run"]
    assert "differ" in run_(sys.executable, "-c", differing, fine=lambda said: "differ" in said)
    with pytest.raises(script["Failed"], match="ended with 1"):
        run_(sys.executable, "-c", differing)


def test_mlx_lm_has_its_own_command_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "16")
    shown = "import os; print(os.environ.get('MLX_MAX_OPS_PER_BUFFER'))"
    script = runpy.run_path(str(SCRIPT))
    assert script["run"](sys.executable, "-c", shown, without=(script["OPS"],)) == "None"


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
    script = runpy.run_path(str(SCRIPT))
    part = script["service"]
    monkeypatch.setitem(part.__globals__, "only_on_a_mac", lambda: None)
    assert "200 OK" in part("") and len(removed) == 1
    (tmp_path / "agent").touch()
    with pytest.raises(script["Elsewhere"], match="installed"):
        part("")


def test_kernels_are_written_without_zig(tmp_path: Path) -> None:
    """Which is installed on Linux only."""
    hidden = "import sys, runpy; sys.modules['ziglang'] = None; "
    hidden += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(SCRIPT.parent / "metal")
    words = [sys.executable, "-c", hidden, script, str(tmp_path)]
    done = subprocess.run(words, cwd=SCRIPT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.glob("*.metal"))) >= 69
