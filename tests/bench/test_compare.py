"""The whole comparison, on a tiny model: mlxspec and a peer that is a few lines of Starlette
here."""

import asyncio
import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from bench import cells, draw, goals, http, measure, probes, report, run, tiny
from bench.cells import WORKLOADS, Setting, arrivals, quantile
from bench.rows import Rows, read
from bench.servers import SERVERS, Ended, Server
from mlxspec.bench.workloads import Task
from mlxspec.text.chat import load_tokenizer

ROOT = Path(__file__).parents[2]
PEER = """
    import asyncio, json, os, sys
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    port, ends_after = int(sys.argv[1]), int(sys.argv[2])  # sys.argv is what the launcher left
    asked = 0

    async def answer(request):
        global asked
        asked += 1
        if asked > ends_after:
            print("out of answers", flush=True)
            os._exit(9)
        body = await request.json()
        chat = "messages" in body
        async def events():
            for i in range(body["max_tokens"]):
                await asyncio.sleep(0.003)
                piece = {"delta": {"content": "a"}} if chat else {"text": "a"}
                yield f"data: {json.dumps({'choices': [piece]})}\\n\\n"
            if not chat:  # a chat's tokens are left to the client to count
                usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\\n\\n"
            yield "data: [DONE]\\n\\n"
        if not body.get("stream"):
            await asyncio.sleep(60)
        return StreamingResponse(events(), media_type="text/event-stream")

    async def ok(request):
        return PlainTextResponse("fine")

    def main():
        paths = [Route(p, answer, methods=["POST"]) for p in ("/v1/completions", "/v1/chat/completions")]
        app = Starlette(routes=[*paths, Route("/health", ok)])
        uvicorn.run(app, port=port, log_level="critical", timeout_graceful_shutdown=1)
"""
BRITTLE = ("chat", "streams 4", "session")
TASKS = [Task(f"t{i}", "say " * (i + 2), "" if i % 2 else "abc") for i in range(9)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """One round of mlxspec, of a peer, of one that dies on the way and of one that never starts."""
    folder = tmp_path_factory.mktemp("bench")
    model = tiny.save(folder / "model", tiny.model())
    (folder / "peer.py").write_text(textwrap.dedent(PEER))
    peer = Server("peer", "peer", "peer==1", "peer:main", ("{port}", "100000"))
    servers = [
        dataclasses.replace(SERVERS["mlxspec"], drafted=None),
        peer,
        dataclasses.replace(peer, name="brittle", arguments=("{port}", "6"), only=BRITTLE),
        dataclasses.replace(peer, name="absent", entry="nowhere:main", only=BRITTLE),
    ]
    rows = Rows()
    with pytest.MonkeyPatch.context() as patch, Progress(console=Console(quiet=True)) as bar:
        patch.setattr(cells, "tasks", lambda workload, cache_dir: TASKS)
        patch.setattr(cells, "LEAVE", 0.3)
        patch.setattr(cells, "AFTER", 0.5)
        patch.setattr(measure, "IDLE", 0.2)
        patch.setattr(measure, "PAUSE", 0.1)
        patch.setattr(probes, "PREFIXES", ("hit",))
        patch.setattr(probes, "BATCHES", ("alone", "joining"))
        setting = Setting(load_tokenizer(model), 1024, folder, 7, 0.3)
        work = measure.Run(
            {s.name: (s, sys.executable) for s in servers},
            model,
            folder,
            setting,
            rows,
            bar,
            rounds=1,
            workloads=[
                "chat",
                "edit",
                "streams 4",
                "prefill",
                "first token",
                "session",
                "disconnect",
            ],
            starts=1,
            probes=1,
            limit=60,
            env={"PYTHONPATH": f"{ROOT}:{folder}", "OPENBLAS_NUM_THREADS": "1"},
        )
        asyncio.run(measure.measure(work, folder / "kept.csv"))
    assert len(read(folder / "kept.csv").rows) > 50
    return rows


def test_every_workload_gives_figures(measured: Rows) -> None:
    for server in ("mlxspec", "peer"):
        for workload, metric in (
            ("start", "first_token_s"),
            ("chat", "tokens_per_s"),
            ("edit", "whole_tokens_per_s"),
            ("edit", "gap_p99_s"),
            ("streams 4", "tokens_per_s"),
            ("prefill", "gap_longest_s"),
            ("first token", "hot_by_cold"),
            ("session", "ttft_turn_10_s"),
            ("memory", "rss_mb"),
        ):
            [value] = measured.values(server, workload, metric).values()
            assert value > 0, (server, workload, metric)
        assert measured.values(server, "disconnect", "cpu_after_leaving_s")[0] < 0.5
    assert measured.values("mlxspec", "edit", "tokens_per_round")[0] >= 1
    assert measured.values("peer", "chat", "tokens") == {0: 56}  # 4 * 48 * 0.3, counted here


def test_what_dies_is_named_and_the_others_go_on(measured: Rows) -> None:
    why = {(r.server, r.workload): r.note for r in measured.failures()}
    assert "status 9: out of answers" in why["brittle", "streams 4"]
    assert "No module named 'nowhere'" in why["absent", "start"]
    assert not {s for s, _ in why} & {"mlxspec", "peer"}, why
    assert measured.values("brittle", "chat", "tokens_per_s") and not measured.values(
        "brittle", "session", "ttft_turn_1_s"
    )


def test_right_and_wrong_answers_are_told_apart(measured: Rows) -> None:
    for server, right in (("mlxspec", True), ("peer", False)):
        found = {
            r.workload: r.value for r in measured.rows if r.server == server and r.metric == "right"
        }
        assert len(found) == 4
        assert set(found.values()) == {3.0 if right else 0.0}, found


def test_an_answer_that_does_not_come_is_not_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless it could not be asked for: then it counts neither way. Who has died is asked nothing
    more."""
    asked = [
        probes.Cell(name, "alone", "other", (probes.Probe("", "p", "a"),) * 3) for name in "abcde"
    ]
    ends = {"a": http.Refused("no"), "b": http.Early("too soon"), "d": http.Refused("gone")}

    async def matches(running: "Fake", cell: probes.Cell) -> int:
        running.died = cell.prefix == "d"
        if error := ends.get(cell.prefix):
            raise error
        return 2

    class Fake:
        died = False

        def check(self) -> None:
            if self.died:
                raise Ended("it died")

        def end(self) -> None: ...

    monkeypatch.setattr(probes, "matches", matches)
    monkeypatch.setattr(measure, "start", lambda *_: Fake())
    server = dataclasses.replace(SERVERS["mlxspec"], drafted=None)
    with Progress(console=Console(quiet=True)) as bar:
        setting = Setting(None, 1, tmp_path, 0)  # type: ignore[arg-type]
        work = measure.Run(
            {"mlxspec": (server, "python")}, tmp_path, tmp_path, setting, Rows(), bar, 1, []
        )
        asyncio.run(measure._probe(work, "mlxspec", asked))
    counts = {name: work.rows.answered("mlxspec", "no draft", name) for name in "abcde"}
    assert counts == {"a": (0, 3), "b": (0, 0), "c": (2, 3), "d": (0, 3), "e": (0, 0)}
    assert {r.workload: r.note for r in work.rows.failures()} == {
        "a/alone/other/no draft": "Refused: no",
        "b/alone/other/no draft": "Early: too soon",
        "d/alone/other/no draft": "Refused: gone",
        "probes, no draft": "it died",
    }
    found = {
        v.goal.metric: v for v in goals.verdicts(work.rows) if v.goal.workload == goals.ANSWERS
    }
    assert found["no draft"].found is not None and found["no draft"].found.median == 2 / 9
    assert found["no draft"].met is False and found["draft"].met is None


def test_the_report_has_it_all(measured: Rows, tmp_path: Path) -> None:
    text = report.markdown(measured)
    assert "| one chat, tokens/s | ≥ 1 | " in text and "**0/12**" in text and "| 12/12 |" in text
    assert "- brittle, streams 4, round 1:" in text and "status 9" in text
    run.finish(measured, tmp_path / "m.csv", Console(quiet=True))
    assert {p.name for p in tmp_path.iterdir()} == {
        "m.csv",
        "m.md",
        *(f"m-{name}.png" for name in ("streams", "session", "gaps")),
    }
    run.main(["--report", str(tmp_path / "m.csv")])
    assert (tmp_path / "m.md").read_text("utf-8").startswith("# ") and read(
        tmp_path / "m.csv"
    ) == measured


def test_a_run_says_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the flags to what is measured: how often, and what the table tells of it."""
    model, seen = tiny.save(tmp_path / "model", tiny.model()), []

    async def watched(work: measure.Run, keep: Path) -> None:
        seen.append((work, keep))

    monkeypatch.setattr(run, "measure", watched)
    monkeypatch.setattr(
        run, "installed", lambda servers, *_: {s.name: (s, "python") for s in servers}
    )
    words = ["--model", str(model), "--servers", "mlxspec", "--rounds", "2"]
    for quick in (False, True):
        out = tmp_path / f"quick-{quick}"
        run.main([*words, "--out", str(out), *(["--quick"] if quick else [])])
        ((work, keep),), seen = seen, []
        assert (work.rounds, work.probes, work.starts) == ((1, 1, 2) if quick else (2, 2, 4))
        assert list(work.servers) == ["mlxspec"] and work.workloads == list(WORKLOADS)
        about = read(keep).about()
        assert keep == out / f"{run.machine()}.csv" and about["model"] == "model"
        assert about["probes"] == f"{work.probes} of a length and cell"
        assert ("quick" in about["rounds"]) == quick
        assert about["commit"] and about["package mlxspec"] == "this checkout"


def test_the_commit_is_named_where_git_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.commit() == "unknown"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("a")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    named = run.commit()
    assert named != "unknown" and set(named) <= set("0123456789abcdef")
    (tmp_path / "a").write_text("b")
    assert run.commit() == f"{named}-dirty"


def test_nothing_measured_is_reported_too(tmp_path: Path) -> None:
    assert not draw.all_of(Rows(), tmp_path / "x") and "not measured" in report.markdown(Rows())
    assert all(v.said == "not measured" for v in goals.verdicts(Rows()))


def test_arrivals_are_a_seeded_poisson_process() -> None:
    some = arrivals(2000, 0.25, 1)
    assert some == arrivals(2000, 0.25, 1) != arrivals(2000, 0.25, 2)
    assert some[0] == 0 and some == sorted(some) and 0.23 < some[-1] / 1999 < 0.27
    assert len(arrivals(1, 1.0, 1)) == 1


def test_quantiles() -> None:
    assert (
        quantile([], 0.5) == 0
        and quantile([3, 1, 2], 0.5) == 2
        and quantile(range(100), 0.99) == 99
    )


def test_names_are_checked() -> None:
    assert run.arguments(["--servers", "mlxspec,vllm-mlx"]).servers == ["mlxspec", "vllm-mlx"]
    with pytest.raises(SystemExit):
        run.arguments(["--workloads", "chat,nothing"])
    assert {g.workload for g in goals.GOALS} <= {
        *WORKLOADS,
        "memory",
        "start",
        "install",
        goals.ANSWERS,
    }
