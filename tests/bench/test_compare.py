"""The whole comparison, on a tiny model: mlxspec and a peer that is a few lines of Starlette
here."""

import asyncio
import dataclasses
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from bench import cells, measure, probes, report, run, tiny
from bench.cells import Setting
from bench.rows import Rows, read
from bench.servers import SERVERS, Server, environment
from mlxspec.commands.bench import Task
from mlxspec.text.chat import load_tokenizer

pytestmark = pytest.mark.slow  # half a minute, for what measures the program
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
                "mtp 1",
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
    for metric in ("tokens_per_round", "tokens_per_round_warm"):
        assert measured.values("mlxspec", "mtp 1", metric)[0] > 1.2
        assert not measured.values("peer", "mtp 1", metric)
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
        assert len(found) == (8 if right else 4)  # ours with a head too
        assert set(found.values()) == {3.0 if right else 0.0}, found


def test_the_report_has_it_all(measured: Rows, tmp_path: Path) -> None:
    text = report.markdown(measured)
    assert "| one chat, tokens/s | ≥ 1.4 | " in text and "**0/12**" in text and "| 12/12 |" in text
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


def test_other_servers_get_the_command_buffers_that_mlx_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "16")
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    env = environment(tmp_path)
    assert "MLX_MAX_OPS_PER_BUFFER" not in env and env["MLX_DISABLE_COMPILE"] == "1"
