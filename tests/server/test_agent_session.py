"""A session like Claude Code's, on the real engine: what each turn finds in the prefix cache."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from mlxspec.config import Config
from mlxspec.engine.worker import EngineThread
from mlxspec.server.app import create_app
from mlxspec.text.chat import load_tokenizer
from mlxspec.types import ModelInfo
from tests.support import tiny
from tests.support.live import live
from tests.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer

CONTEXT = 40_960
WORDS = "and the user sent the world a system; "


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anthropic]:
    path = save_tokenizer(tmp_path_factory.mktemp("model"), template=AGENT, extra=THINK + CALLS)

    def start() -> Any:
        engine = tiny.engine(
            tiny.model("llama"),
            block=32,
            blocks=2 * CONTEXT // 32,
            budget=256,
            context=CONTEXT,
            vocab=tiny.VOCAB,
        )
        return engine, ModelInfo("tiny", CONTEXT, tiny.VOCAB, "rows", 32, 1, 1, 1_700_000_000)

    worker = EngineThread(tiny.manager(start), max_sequences=4, max_queue=16)
    worker.launch()
    with live(create_app(worker, load_tokenizer(path), path, Config())) as base:
        with Anthropic(base_url=base, api_key="none", max_retries=0, timeout=600) as made:
            yield made
    worker.stop()


@pytest.mark.slow
def test_three_turns(client: Anthropic) -> None:
    """30,000 tokens of system text and tools behind a header that changes; each turn a call, which
    the client sends back with a default in front, its result, and `content` now as a list, now as a
    string."""
    tools: Any = [
        {
            "name": f"tool{i}",
            "description": WORDS * 12,
            "input_schema": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 4},
                    "all": {"type": "boolean"},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for i in range(12)
    ]
    messages: Any = [{"role": "user", "content": "hello"}]
    before, cold = 0, 0.0
    for turn in range(3):
        system: Any = [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.329.{turn}a{turn};",
            },
            {"type": "text", "text": WORDS * 1280, "cache_control": {"type": "ephemeral"}},
        ]
        began, first = time.perf_counter(), 0.0
        with client.messages.stream(
            model="claude-sonnet-5",
            max_tokens=300,
            system=system,
            tools=tools,
            tool_choice={"type": "tool", "name": f"tool{turn}"},
            messages=messages,
        ) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    first = first or time.perf_counter() - began
            made = stream.get_final_message()
        cold = cold or first
        assert not before or first <= cold / 20, f"{first:.2f} s, the first turn {cold:.2f} s"
        usage = made.usage
        assert made.stop_reason == "tool_use"
        prompt = (
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        )
        if before:
            assert usage.cache_read_input_tokens >= 0.99 * before
            assert usage.input_tokens < 200
        assert prompt >= 15_000
        before = prompt + usage.output_tokens
        [call] = made.content
        spelled = {**call.model_dump(), "input": {"all": None, **call.input}}
        result = (
            "fine"
            if turn
            else [{"type": "text", "text": "fine", "cache_control": {"type": "ephemeral"}}]
        )
        messages += [
            {"role": "assistant", "content": [spelled]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}],
            },
        ]
