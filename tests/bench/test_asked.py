"""What a server is asked, by what it knows, and what of its answer is counted."""

import asyncio
import itertools
import statistics
from pathlib import Path
from typing import Any, cast

import pytest

from bench import cells, http, probes, tiny
from bench.folders import RAW
from bench.http import Answer, asked, chat, plain
from bench.servers import MLX_VLM, SERVERS, Running, Server, drafting
from bench.setting import Setting
from mlxspec.text.chat import load_tokenizer
from tests.heads.language import Language

FORM = "<P>{prefix}<S>{suffix}<M>"


def running(server: Server, **kw: Any) -> Running:
    return Running(server, "http://at", cast(Any, None), Path(), 0.0, **kw)  # no process


def test_who_has_chats_alone_gets_a_raw_message() -> None:
    vlm, ours = running(MLX_VLM, model="/a/model"), running(SERVERS["mlxspec"])
    path, body = asked(vlm, plain("p", 3))
    assert (path, body["model"]) == ("http://at/v1/chat/completions", "/a/model")
    assert body["messages"] == [{"role": "user", "content": RAW + "p"}] and "prompt" not in body
    said = [{"role": "user", "content": "q"}]
    assert asked(vlm, chat(said, 3))[1]["messages"] == said
    assert asked(ours, plain("p", 3)) == (
        "http://at/v1/completions",
        {"model": "default_model", **plain("p", 3)},
    )


def test_rounds_are_those_of_ours_or_what_a_peer_says() -> None:
    counted = {"mlxspec_rounds_total": 10.0, "mlxspec_generated_tokens_total": 30.0}
    assert cells.per_round({}, counted, [Answer()]) == {"tokens_per_round": 3.0}
    assert cells.per_round({}, {}, [Answer()]) == {}
    said = Answer(tokens=9)
    http._take({"choices": [], "timings": {"draft_rounds": 2, "draft_n_accepted": 6}}, said)
    assert cells.per_round({}, {}, [said]) == {"tokens_per_round": 3.0}  # and the first token


@pytest.mark.parametrize("name", ["mlxspec", "mlx_lm.server"])
def test_every_key_asks_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []

    async def ask(server: Running, body: dict[str, Any]) -> Answer:
        bodies.append(body)
        return Answer(0.0, [0.1 * len(bodies)], "x", 1, 100, 90)

    monkeypatch.setattr(cells, "ask", ask)
    monkeypatch.setattr(cells, "fill_in_middle", lambda tokenizer: (FORM, "", frozenset()))
    setting = Setting(load_tokenizer(tiny.pair("mtp")[0]), 8192, tmp_path, 0, 0.2)
    found = asyncio.run(cells.WORKLOADS["typing"].cell(running(SERVERS[name]), setting, 0))
    assert found["first_key_s"] == pytest.approx(0.1) and found["cached_share"] == 0.9
    assert found["ttft_s"] == pytest.approx(0.5) and len(bodies) == 8
    prompts = [body["prompt"] for body in bodies]
    if SERVERS[name].fills:
        assert len({body["suffix"] for body in bodies}) == 1
        assert [len(p) - len(prompts[0]) for p in prompts] == list(range(8))
    else:
        assert all(p.startswith("<P>") and p.endswith("<M>") for p in prompts)
        assert not any("suffix" in body for body in bodies)


@pytest.mark.parametrize("silent", [{1}, {1, 3}, {2}, set(range(2, 9)), set(range(1, 9))])
def test_keys_without_an_answer_have_no_time(
    silent: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = itertools.count(1)

    async def ask(server: Running, body: dict[str, Any]) -> Answer:
        if (n := next(asks)) in silent:
            raise http.Silent("nothing")
        return Answer(0.0, [float(n)], "x", 1, 100, 90)

    monkeypatch.setattr(cells, "ask", ask)
    monkeypatch.setattr(cells, "fill_in_middle", lambda tokenizer: (FORM, "", frozenset()))
    setting = Setting(load_tokenizer(tiny.pair("mtp")[0]), 8192, tmp_path, 0, 0.2)
    found = asyncio.run(cells.WORKLOADS["typing"].cell(running(SERVERS["mlxspec"]), setting, 0))
    later = set(range(2, 9)) - silent
    want: dict[str, float] = {"silent_keys": len(silent)}
    want |= {} if 1 in silent else {"first_key_s": 1.0}
    want |= {"ttft_s": statistics.median(later), "cached_share": 0.9} if later else {}
    assert found == want


@pytest.mark.parametrize("prefix", probes.PREFIXES)
def test_prompts_of_a_trained_pair_have_the_tokens_that_were_meant(prefix: str) -> None:
    target, head = tiny.pair(probes.PAIR)
    truth = probes.Truth(target, Language(0).text)
    probe = truth.probe(prefix, 48)
    assert head.is_dir() and len(truth._ids(probe.prompt)) == 48 and probe.answer
    assert (probe.before == probe.prompt) == (prefix == "hit")
    again, _ = tiny.decode(truth.model, truth._ids(probe.prompt), probes.TOKENS)
    assert truth.tokenizer.decode(again) == probe.answer


def test_every_kind_of_head_has_its_pair() -> None:
    for name in cells.HEADS:
        for folder in tiny.pair(name):
            assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
        assert {f"{name} 1", f"{name} {cells.PROMPTS}"} <= cells.WORKLOADS.keys()
    assert set(MLX_VLM.heads) <= set(cells.HEADS) and probes.PAIR in MLX_VLM.heads


def test_mlxspec_is_told_of_the_models_own_head() -> None:
    """It is served by its directory, of which mlxspec knows no head."""
    head = Path("heads/own")
    ours = drafting(SERVERS["mlxspec"], head)
    assert ours.command("python", Path("model"), ours.setting)[-2:] == ["--draft", "heads/own"]
    assert drafting(SERVERS["mlxspec"], None) == SERVERS["mlxspec"]
    assert drafting(SERVERS["mlxspec-no-head"], head).setting == ("--draft", "off")
