"""A session as a coding agent has it: what of each turn's prompt is cached, and how soon the answer
begins.

Rule: the shape is Claude Code's (a system text after its billing header, a dozen tools, more text
with each turn), the text is the standard library's. Turn 1 is asked of a server that has seen
nothing, each later turn carries all that was said. `python -m bench.session MODEL`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.servers import started

LIBRARY = Path(argparse.__file__).parent
TOOLS, TURNS = 12, 3


def text(at: int, chars: int) -> str:
    return (LIBRARY / ("argparse.py", "ast.py", "asyncio/tasks.py", "bdb.py")[at % 4]).read_text()[
        :chars
    ]


def body(system: int, tools: int, hash: str) -> dict[str, Any]:
    """The first request; `system` and `tools` are characters."""
    described = [
        {
            "name": f"Tool{i}",
            "description": text(i, tools // TOOLS),
            "input_schema": {
                "type": "object",
                "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["file_path"],
            },
        }
        for i in range(TOOLS)
    ]
    blocks = [f"x-anthropic-billing-header: cc_version=2.1.329.{hash};", text(0, system)]
    return {
        "model": "claude-sonnet-5",
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "system": [
            {"type": "text", "text": b, "cache_control": {"type": "ephemeral"}} for b in blocks
        ],
        "tools": described,
        "messages": [{"role": "user", "content": "Read the files and tell me what they do."}],
    }


def turn(url: str, ask: dict[str, Any]) -> tuple[float, dict[str, Any], list[dict[str, Any]]]:
    """Seconds to the first token, the usage, and the answer's blocks."""
    began, first = time.perf_counter(), 0.0
    blocks: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/messages?beta=true", json=ask, timeout=3600) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code} {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {"type": ""}
            if event["type"] == "content_block_start":
                first = first or time.perf_counter() - began
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta" and "text" in event["delta"]:
                blocks[-1]["text"] += event["delta"]["text"]
            elif event["type"] == "message_delta":
                usage = event["usage"]
    return first, usage, [b for b in blocks if b["type"] == "text" and b["text"]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.session", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--system", type=int, default=26_000, help="characters")
    parser.add_argument("--tools", type=int, default=26_000, help="characters")
    parser.add_argument("--result", type=int, default=2_000, help="characters that each turn adds")
    args = parser.parse_args()
    table = Table(title=f"{args.model.name}: a session like Claude Code's")
    for column in (
        "turn",
        "prompt",
        "cached",
        "of the prompt before",
        "first token, s",
        "of turn 1's",
    ):
        table.add_column(column, justify="right")
    with started("mlxspec", args.model) as url:
        ask, before, cold = body(args.system, args.tools, "a1b"), 0, 0.0
        for n in range(1, TURNS + 1):
            first, usage, said = turn(url, ask)
            cached = usage["cache_read_input_tokens"]
            prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
            cold = cold or first
            shared = f"{cached / before:.1%}" if before else "-"
            table.add_row(
                str(n), str(prompt), str(cached), shared, f"{first:.2f}", f"1/{cold / first:.0f}"
            )
            before = prompt
            ask["messages"] += [
                {"role": "assistant", "content": said or [{"type": "text", "text": "I see."}]},
                {"role": "user", "content": [{"type": "text", "text": text(n, args.result)}]},
            ]
            ask["system"][0]["text"] = ask["system"][0]["text"].replace("a1b", f"{n}cd")
    Console().print(table)


if __name__ == "__main__":
    main()
