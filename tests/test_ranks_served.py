"""`mlxspec serve --ranks 2`: one server of several processes, which end together."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.text.structured import trial
from tests.support.checkpoints import save
from tests.support.scripted import MESSAGES
from tests.tiny_tokenizer import save_tokenizer

KINDS = ["llama", "qwen3_5"]
END_S = 30  # for all processes to end
KILLS = 20
ANSWER = 100  # tokens


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tokenizer(tmp_path_factory.mktemp("model"))
    save(path, request.param)
    return path


class Served:
    """A running `mlxspec serve` and what it says."""

    def __init__(self, path: Path, cache: Path, *flags: str) -> None:
        words = ["serve", str(path), "--port", "0", "--kv-blocks", "64", "--context", "512"]
        words += ["--cache-dir", str(cache), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxspec", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        assert self.process.stderr
        self.reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self.reader.start()
        assert self.process.stdout
        for line in self.process.stdout:
            if found := re.search(r"http://\S+(?=/v1$)", line):
                self.url = found[0]
                return
        self.reader.join()
        self.process.wait(END_S)
        self.process.stdout.close()
        self.process.stderr.close()
        raise AssertionError(self.said)

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.said += line

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def complete(self, n: int = 16, **more: Any) -> dict[str, Any]:
        body = {"max_tokens": n, "ignore_eos": True, "seed": 3} | more
        chat = "response_format" in body
        body |= {"messages": MESSAGES} if chat else {"prompt": more.get("prompt", "hello")}
        return self.post("/v1/chat/completions" if chat else "/v1/completions", body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(json.load(response))

    def stream(self, n: int) -> Iterator[str]:
        """The same answer, ever longer. Raises OSError where an error ends it."""
        body = {"prompt": "hello", "max_tokens": n, "ignore_eos": True, "seed": 3, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text = ""
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise OSError(event["error"])
                    text += event["choices"][0]["text"] if event["choices"] else ""
                    yield text

    def others(self) -> list[int]:
        """The processes of the other ranks; not the one that compiles grammars."""
        rows = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found = [row.split(maxsplit=2) for row in rows.splitlines() if trial.__name__ not in row]
        return [int(pid) for pid, parent, *_ in found if int(parent) == self.process.pid]


@contextmanager
def served(path: Path, cache: Path, *flags: str) -> Iterator[Served]:
    server = Served(path, cache, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.reader.join(END_S)
        server.process.stdout.close()
        server.process.stderr.close()


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def ended(pids: list[int]) -> bool:
    """Whether all these processes end in time."""
    until = time.monotonic() + END_S
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.slow
def test_two_ranks_answer_as_one(path: Path, tmp_path: Path) -> None:
    """The same answers, with a grammar and without; the ranks are shown; a signal ends all."""
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"7": 3}},
        {"prompt": "hello " * 30, "temperature": 0},
        {"prompt": "hello " * 30, "temperature": 0, "n": 2},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
    ]
    told = {}
    vectors: list[list[float]] = []
    for ranks in (1, 2):
        with served(path, tmp_path, "--ranks", str(ranks)) as server:
            told[ranks] = [
                [
                    choice.get("text") or choice["message"]
                    for choice in server.complete(**each)["choices"]
                ]
                for each in asked
            ]
            embedded = server.post("/v1/embeddings", {"input": ["hello " * 40]})["data"][0]
            vectors.append(embedded["embedding"])
            assert f"mlxspec_ranks {ranks}.0" in server.get("/metrics")
            others = server.others()
            assert len(others) == ranks - 1
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_S) == 0, server.said
            assert ended(others)
            assert "CRITICAL" not in server.said
    assert told[1] == told[2]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)


@pytest.mark.slow
def test_prompts_on_disk(path: Path, tmp_path: Path) -> None:
    """Each rank saves its part of a prompt and restores it after a restart; where one has lost its
    part, all compute. The prompt takes more blocks than pools have at first."""
    prompt = "hello world " * 150
    more = ["--block-size", "8", "--kv-blocks", "256"]

    def ask(server: Served) -> tuple[str, int]:
        told = server.complete(prompt=prompt, temperature=0)
        return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    def one_start(lost: bool = False) -> tuple[str, int]:
        with served(path, tmp_path, "--ranks", "2", *more) as server:
            if lost:  # the ranks have read their folders
                last = max(folders(), key=lambda each: each.stat().st_ctime_ns)
                for file in last.iterdir():
                    file.unlink()
            told = ask(server)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_S) == 0, server.said
            assert "Traceback" not in server.said
        return told

    def folders() -> list[Path]:
        return [each for each in (tmp_path / "prompts").iterdir() if each.is_dir()]

    text, cached = one_start()
    assert cached == 0 and len(folders()) == 2
    again, cached = one_start()
    assert again == text and cached > 100
    again, cached = one_start(lost=True)
    assert again == text and cached < 100
    again, cached = one_start()  # the lost part was saved again
    assert again == text and cached > 100


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux says of a process")
def test_weights_read(tmp_path: Path) -> None:
    """Each rank reads no more of the weights than its part of what is split and what is on every
    rank, at the first start and at a later one."""
    path = save_tokenizer(tmp_path / "model")
    save(path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    weights = mx.load(str(path / "model.safetensors"))
    sizes = {name: array.nbytes for name, array in weights.items()}
    whole = sum(sizes.values())
    replicated = sum(sizes[each] for each in sizes if "proj" not in each)
    part = (whole - replicated) / 2 + replicated

    def start(ranks: int) -> list[int]:
        """The bytes that each process has read from files."""
        with served(path, tmp_path, "--ranks", str(ranks)) as server:
            pids = [server.process.pid, *server.others()]
            read = [Path(f"/proc/{pid}/io").read_text() for pid in pids]
            said.append(server.complete(temperature=0)["choices"][0]["text"])
        return [int(re.search(r"rchar: (\d+)", each)[1]) for each in read]

    said: list[str] = []
    start(1)  # reads what later starts find in caches
    (alone,) = start(1)
    for read in start(2) + start(2):
        assert alone - read == pytest.approx(whole - part, rel=0.1)
    assert len(set(said)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["other", "first"])
def test_all_end_with_one(path: Path, tmp_path: Path, victim: str) -> None:
    kill_one(path, tmp_path, victim, 1.0)


@pytest.mark.slow
def test_kills_at_random_moments(path: Path, tmp_path: Path) -> None:
    rng = random.Random(4)
    for _ in range(KILLS):
        kill_one(path, tmp_path, rng.choice(["other", "first"]), rng.uniform(0, 2))


@pytest.mark.slow
def test_the_rank_that_ended_first_is_named(tmp_path: Path) -> None:
    """Its neighbours in the ring end as well."""
    path = save_tokenizer(tmp_path / "model")
    save(path, "llama", num_key_value_heads=4)
    with served(path, tmp_path, "--ranks", "4") as server:
        server.complete()
        others = server.others()
        os.kill(others[1], signal.SIGKILL)  # in the order in which they were started
        assert server.process.wait(END_S) == 1
        assert ended(others)
        server.reader.join(END_S)
        assert "rank 2 has ended with status -9" in server.said


@pytest.mark.slow
def test_a_draft_model_on_two_ranks(path: Path, tmp_path: Path) -> None:
    """It is on rank 0 alone; the answers are those without it."""
    small = save_tokenizer(tmp_path / "small")
    save(small, "llama", num_hidden_layers=1)
    told = []
    for more in ([], ["--ranks", "2", "--draft", str(small), "--draft-depth", "3"]):
        with served(path, tmp_path, *more) as server:
            answers = [server.complete(40, temperature=warm) for warm in (0, 0.8)]
            told.append([answer["choices"][0]["text"] for answer in answers])
    assert told[0] == told[1]


def kill_one(path: Path, cache: Path, victim: str, after: float) -> None:
    """kill -9 of a rank ends all, with an error for each client and a line that says which."""
    with served(path, cache, "--ranks", "2") as server:
        truth = server.complete(ANSWER)["choices"][0]["text"]
        failed: list[str] = []

        def call() -> None:
            try:
                while True:
                    for text in server.stream(ANSWER):
                        assert truth.startswith(text), (truth, text)
            except (OSError, HTTPException) as error:
                failed.append(str(error))

        callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for each in callers:
            each.start()
        time.sleep(after)
        (other,) = server.others()
        killed = other if victim == "other" else server.process.pid
        subprocess.run(["kill", "-9", str(killed)], check=True)
        status = server.process.wait(END_S)
        assert ended([other])
        for each in callers:
            each.join(END_S)
            assert not each.is_alive()
        assert len(failed) == 2
        server.reader.join(END_S)
        if victim == "other":
            assert status == 1
            assert "rank 1 has ended with status -9" in server.said
            assert "Traceback" not in server.said
        else:
            assert "rank 0 is gone" in server.said


@pytest.mark.slow
def test_two_models(path: Path, tmp_path: Path) -> None:
    """Two models in turn and at once on two ranks, one of them unloaded and loaded again."""
    second = save_tokenizer(tmp_path / "second")
    save(second, "qwen3")
    told: list[list[str]] = []
    for ranks in ("1", "2"):
        with served(path, tmp_path, "--ranks", ranks, f"other={second}") as server:

            def ask(model: str, server: Served = server) -> str:
                answer = server.complete(40, model=model, temperature=0.8)
                return str(answer["choices"][0]["text"])

            said = [ask(path.name), ask("other")]
            with ThreadPoolExecutor(4) as pool:
                said += pool.map(ask, [path.name, "other"] * 4)
            server.post("/v1/models/unload", {"model": "other"})
            said += [ask(path.name), ask("other")]
            told.append(said)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_S) == 0, server.said
            assert "Traceback" not in server.said
    assert told[0] == told[1]
    assert len(set(told[0])) == 2


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded(path: Path, tmp_path: Path) -> None:
    """Requests for it fail, those for the other model do not; with its files repaired, a load
    command loads it."""
    second = save_tokenizer(tmp_path / "second")
    save(second, "qwen3")
    weights = second / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"damaged")
    with served(path, tmp_path, "--ranks", "2", f"other={second}") as server:
        truth = server.complete(temperature=0)["choices"][0]["text"]
        for _ in range(2):
            with pytest.raises(OSError):
                server.complete(model="other")
        assert server.complete(temperature=0)["choices"][0]["text"] == truth
        weights.write_bytes(whole)
        server.post("/v1/models/load", {"model": "other"})
        assert server.complete(model="other", temperature=0)["choices"][0]["text"]
        assert server.complete(temperature=0)["choices"][0]["text"] == truth
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0, server.said
        assert "Traceback" not in server.said and "is gone" not in server.said


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_model_loads(path: Path, tmp_path: Path) -> None:
    """It stands still first, so that the load cannot end before."""
    second = save_tokenizer(tmp_path / "second")
    save(second, "qwen3")
    with served(path, tmp_path, "--ranks", "2", f"other={second}") as server:
        server.complete()
        (other,) = server.others()
        subprocess.run(["kill", "-STOP", str(other)], check=True)
        kill = threading.Timer(1, os.kill, [other, signal.SIGKILL])
        kill.start()
        with pytest.raises((OSError, HTTPException)):
            server.post("/v1/models/load", {"model": "other"})
        kill.join()
        assert server.process.wait(END_S) == 1
        server.reader.join(END_S)
        assert "rank 1 has ended with status -9" in server.said
        assert "Traceback" not in server.said


@pytest.mark.slow
def test_many_clients_of_two_ranks(path: Path, tmp_path: Path) -> None:
    """More than run at once, of whom every third leaves: the others get what one alone gets, and
    nothing is left."""
    with served(path, tmp_path, "--ranks", "2", "--max-sequences", "3") as server:
        prompts = ["hello " * n for n in range(1, 13)]

        def ask(prompt: str) -> str:
            found = server.complete(40, prompt=prompt, temperature=0.8)["choices"][0]["text"]
            return str(found)

        def one(number: int) -> str:
            if number % 3:
                return ask(prompts[number % 12])
            for _ in zip(server.stream(ANSWER), range(number % 5 + 1), strict=False):
                pass
            return ""

        truth = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(12) as pool:
            said = list(pool.map(one, range(96)))
        assert all(text == truth[i % 12] for i, text in enumerate(said) if i % 3)
        idle = [r'running\{model="[^"]*"', r'waiting\{model="[^"]*"']
        idle += [r'kv_blocks\{model="[^"]*",state="used"']
        until = time.monotonic() + END_S  # those who left are noticed at their next token

        def busy() -> bool:
            page = server.get("/metrics")
            return not all(re.search(rf"mlxspec_{each}}} 0\.0\n", page) for each in idle)

        while busy():
            assert time.monotonic() < until
            time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0, server.said
        assert "sampled other tokens" not in server.said


HOSTS = {
    "no file": None,
    "no JSON": "{",
    "one host": '[["127.0.0.1:1"]]',
    "no port": '[["127.0.0.1"], ["127.0.0.1"]]',
    "no address": '[["x:1"], ["x:2"]]',
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTS)
def test_hosts_that_cannot_be_connected(path: Path, tmp_path: Path, what: str) -> None:
    file = tmp_path / "hosts.json"
    if (text := HOSTS[what]) is not None:
        file.write_text(text)
    variables = os.environ | {"MLX_RANK": "0", "MLX_HOSTFILE": str(file)}
    words = [sys.executable, "-m", "mlxspec", "serve", str(path), "--port", "0"]
    words += ["--cache-dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 2, done.stderr
    assert "the ranks cannot be connected" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_heads_that_cannot_be_divided(path: Path, tmp_path: Path) -> None:
    """All processes end, and one line says why."""
    with pytest.raises(AssertionError, match="cannot be split among 3 ranks") as caught:
        Served(path, tmp_path, "--ranks", "3")
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_a_silent_rank_counts_as_gone(path: Path, tmp_path: Path) -> None:
    """A process that stands still keeps its connections, as a Mac does whose cable was pulled."""
    with served(path, tmp_path, "--ranks", "2") as server:
        (other,) = server.others()
        subprocess.run(["kill", "-STOP", str(other)], check=True)
        with pytest.raises(OSError):
            server.complete(300)
        assert server.process.wait(END_S) == 1
        server.reader.join(END_S)
        assert "rank 1 is gone: no message for" in server.said
        subprocess.run(["kill", "-CONT", str(other)], check=True)
        assert ended([other])


@pytest.mark.slow
def test_mlx_launch(path: Path, tmp_path: Path) -> None:
    """MLX's own launcher starts the ranks."""
    launch = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "2", "--backend", "ring"]
    words = [sys.executable, "-m", "mlxspec", "serve", str(path), "--port", "0"]
    words += ["--kv-blocks", "64", "--cache-dir", str(tmp_path)]
    process = subprocess.Popen(
        [*launch, "--", *words],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout and process.stdin
    with process, process.stdin:
        url = next(filter(None, (re.search(r"http://\S+(?=/v1$)", x) for x in process.stdout)))[0]
        with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
            assert b"mlxspec_ranks 2.0" in response.read()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        process.wait(END_S)
