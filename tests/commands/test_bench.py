"""`mlxspec bench` on a tiny model: its workloads, the comparison of both sides and its figures."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxspec import cli
from mlxspec.commands import bench
from mlxspec.commands.bench import Answer, Pairs, Task
from mlxspec.engine.engine import Engine
from mlxspec.text.chat import encode, load_tokenizer, render_chat
from mlxspec.types import ModelInfo, Output
from tests.support import tiny
from tests.support.noisy_oracle import NoisyOracle
from tests.tiny_tokenizer import save_tokenizer

TOKENS = 24
PROMPTS = {f"p{i}": tuple((7 * i + 3 * at) % tiny.VOCAB for at in range(20 + i)) for i in range(4)}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mlxspec", "bench", *words])
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_settings: None) -> SimpleNamespace:
    """A tiny model in place of the one that the settings name, with short tasks."""
    seen = SimpleNamespace(config=None)
    info = ModelInfo("tiny", 512, tiny.VOCAB, "rows", 8, 1, 1, 0)
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model"))

    def resolve(config: object) -> SimpleNamespace:
        seen.config = config
        engine = tiny.engine(tiny.model("llama"), vocab=tiny.VOCAB)
        return SimpleNamespace(tokenizer=tokenizer, load=lambda: (engine, info))

    tasks = [Task(f"t{i}", "hello world " * (i + 1)) for i in range(4)]
    monkeypatch.setattr(bench, "resolve_model", resolve)
    monkeypatch.setattr(bench, "tasks_of", lambda workload: tasks)
    monkeypatch.setattr(cli, "log_to_stderr", lambda level: None)
    return seen


def test_from_flags_to_table(loaded: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    words = "some/model --draft small --workload edits --max-tokens 6 --streams 2"
    assert command(*words.split()) == 0
    said = capsys.readouterr().out
    lines = [x.split() for x in said.splitlines() if x.startswith("edits")]
    assert [x[:2] for x in lines] == [["edits", "24"]]
    assert "Every answer is the same" in said
    config = loaded.config
    assert (config.model, config.draft, config.max_sequences) == ("some/model", "small", 2)


@pytest.mark.parametrize("words", [("--workload", "poems"), ("--streams", "0"), ("--streams", "x")])
def test_mistakes_are_named_before_the_model_is_loaded(
    loaded: SimpleNamespace, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    assert command(*words) == 2
    assert words[0] in capsys.readouterr().err and loaded.config is None


def lying_engine() -> tuple[Engine, dict[str, list[int]]]:
    """An engine whose drafter knows the answers and lies now and then, and the answers."""
    plain = tiny.Plain(tiny.model("llama"))
    truth = {name: plain(prompt, TOKENS) for name, prompt in PROMPTS.items()}
    known = {(PROMPTS[name], 0): answer for name, answer in truth.items()}
    return tiny.engine(tiny.model("llama"), proposer=NoisyOracle(known), vocab=tiny.VOCAB), truth


def measured(engine: Engine, streams: int = 2) -> Pairs:
    requests = [tiny.request(name, list(prompt), TOKENS) for name, prompt in PROMPTS.items()]
    return bench.measure(engine, engine.proposer, requests, streams)


def test_both_sides_are_plain_decoding_and_nothing_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, truth = lying_engine()
    order, run = [], bench.run_group

    def watched(engine: Engine, speculator: object, requests: list) -> object:
        answers = run(engine, speculator, requests)
        order.append((isinstance(speculator, NoisyOracle), engine.counters["cached_tokens"]))
        return answers

    monkeypatch.setattr(bench, "run_group", watched)
    pairs = measured(engine)
    assert [drafts for drafts, _ in order[2:]] == [False, True, True, False]
    assert {cached for _, cached in order} == {0} and len(pairs) == len(PROMPTS)
    for name, plain, drafted in pairs:
        assert bench.tokens_of(plain) == bench.tokens_of(drafted) == truth[name]
        last = drafted[-1][1]
        assert plain[-1][1].drafted == 0 < last.accepted < last.drafted
    assert bench.figures(pairs)["tokens_per_round"] > 1.3


def test_an_answer_that_differs_is_seen(
    loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = bench.measure

    def differ(*args: object, **how: int) -> Pairs:
        pairs = measure(*args, **how)
        pairs[0][2].pop()
        return pairs

    monkeypatch.setattr(bench, "measure", differ)
    assert command("--workload", "edits", "--max-tokens", "3") == 1
    assert "t0" in capsys.readouterr().out.splitlines()[-1]


def test_the_figures_of_a_scripted_run() -> None:
    def answer(outputs: list[tuple[float, int]], drafted: int = 0, accepted: int = 0) -> Answer:
        made = []
        for n, (now, count) in enumerate(outputs, 1):
            made.append((now, Output("a", 0, (1,) * count, (), None, 0, n, "", drafted, accepted)))
        return made

    plain = answer([(2.0 + i, 1) for i in range(9)])
    fast = answer([(2.0, 1), (3.0, 4), (4.0, 4)], drafted=8, accepted=6)
    assert bench.figures([("a", plain, fast)]) == {
        "tokens": 9,
        "first_token_s": 2.0,
        "tokens_per_s_plain": 1.0,
        "tokens_per_s": 4.0,
        "speedup": 4.0,
        "tokens_per_round": 3.0,
        "accepted": 0.75,
    }


def test_every_workload_has_prompts_with_names_of_their_own() -> None:
    for name in bench.WORKLOADS:
        tasks = bench.tasks_of(name)
        assert tasks == bench.tasks_of(name) and len({t.name for t in tasks}) == len(tasks) >= 12


def test_every_edit_is_code_with_the_old_name_and_without_the_new_one() -> None:
    for task in bench.edits():
        old, new = re.findall(r"`(\w+)`", task.text.rpartition("\n\n")[2])
        code = re.fullmatch(r"```python\n(.*)```\n\nRename .*", task.text, re.S)
        assert code and ast.parse(code[1])
        assert len(re.findall(rf"\b{old}\b", code[1])) >= 2, task.name
        assert not re.search(rf"\b{new}\b", code[1]), task.name


def test_a_task_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "chat"))
    rendered = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    opening = encode(tokenizer, "```python\n", special=False)
    task = Task("a", "hello", "```python\n")
    assert bench.prompt_of(task, tokenizer) == (*rendered, *opening)
    base = load_tokenizer(save_tokenizer(tmp_path / "base", template=None))
    assert base.decode(list(bench.prompt_of(Task("a", "hello", "you"), base))) == "hello\n\nyou"
