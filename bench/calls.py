"""Tool calls of a real model, asked for in the manner of the Berkeley function-calling leaderboard:
simple, one of several tools, several calls at once, and none that fits.

Rule: what counts is what a client sees: calls that are read, that keep to the schema, with the name
and the arguments that were meant. `python -m bench.calls MODEL`, greedy, tool_choice auto.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec import blas

blas.load()

import jsonschema  # noqa: E402  after BLAS
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from mlxspec.config import Config  # noqa: E402
from mlxspec.load.loader import load_engine  # noqa: E402
from mlxspec.text.chat import conversation_of, load_tokenizer, render  # noqa: E402
from mlxspec.text.history import History  # noqa: E402
from mlxspec.text.output_parser import OutputParser  # noqa: E402
from mlxspec.types import Request, Sampling  # noqa: E402


def tool(
    name: str, description: str, required: tuple[str, ...], **properties: Any
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
WEATHER = tool(
    "get_weather",
    "Current weather of a city.",
    ("city",),
    city=TEXT,
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
AREA = tool("triangle_area", "Area of a triangle.", ("base", "height"), base=NUMBER, height=NUMBER)
FACTORIAL = tool("factorial", "The factorial of a whole number.", ("n",), n=WHOLE)
READ = tool("read_file", "Read a file.", ("path",), path=TEXT, limit=WHOLE)
RUN = tool("run_command", "Run a command in the shell.", ("command",), command=TEXT)
MAIL = tool(
    "send_mail",
    "Send a mail.",
    ("to", "subject"),
    to={"type": "array", "items": TEXT},
    subject=TEXT,
    body=TEXT,
)
ALL = [WEATHER, AREA, FACTORIAL, READ, RUN, MAIL]


@dataclass(frozen=True)
class Case:
    kind: str
    text: str
    tools: list[dict[str, Any]]
    want: list[tuple[str, dict[str, Any]]]


CASES = [
    Case(
        "simple", "What is the weather in Paris?", [WEATHER], [("get_weather", {"city": "Paris"})]
    ),
    Case(
        "simple",
        "How warm is it in Boston, in fahrenheit?",
        [WEATHER],
        [("get_weather", {"city": "Boston", "unit": "fahrenheit"})],
    ),
    Case(
        "simple",
        "A triangle has a base of 10 and a height of 5. What is its area?",
        [AREA],
        [("triangle_area", {"base": 10, "height": 5})],
    ),
    Case("simple", "What is the factorial of 5?", [FACTORIAL], [("factorial", {"n": 5})]),
    Case("of several", "Show me what is in setup.py.", ALL, [("read_file", {"path": "setup.py"})]),
    Case(
        "of several",
        "Run the command `git status`.",
        ALL,
        [("run_command", {"command": "git status"})],
    ),
    Case(
        "of several", "What's the weather like in Rome?", ALL, [("get_weather", {"city": "Rome"})]
    ),
    Case(
        "of several",
        "Write a mail to ann@example.com with the subject Lunch.",
        ALL,
        [("send_mail", {"to": ["ann@example.com"], "subject": "Lunch"})],
    ),
    Case(
        "at once",
        "What is the weather in Paris and in Rome? Call the tool for both at once.",
        [WEATHER],
        [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
    ),
    Case(
        "at once",
        "Compute the factorials of 3 and of 4, with two calls at once.",
        [FACTORIAL],
        [("factorial", {"n": 3}), ("factorial", {"n": 4})],
    ),
    Case("none", "Say hello in French.", [FACTORIAL], []),
    Case("none", "Who wrote Faust?", [AREA], []),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    engine, _ = load_engine(args.model, args.model.name, Config(context=4096, cache_gb=0))
    rows: dict[str, list[int]] = {}
    for case in track(CASES, "Asking", console=Console(stderr=True)):
        talk = conversation_of([{"role": "user", "content": case.text}], case.tools, {}, History())
        prompt = render(tokenizer, talk, History())
        ends = frozenset(tokenizer.eos_token_ids)
        engine.add(Request("r", tuple(prompt.ids), 160, Sampling(temperature=0), ends))
        tokens: list[int] = []
        while engine.busy:
            tokens += [t for output in engine.step() for t in output.tokens]
        text = tokenizer.decode([t for t in tokens if t not in ends])
        reader = OutputParser(tokenizer, case.tools, prompt.thinking)
        reader.feed(text)
        reader.finish()
        made = [(call.name, json.loads(call.arguments)) for call in reader.calls]
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in case.tools}
        valid = all(
            n in schemas and jsonschema.Draft202012Validator(schemas[n]).is_valid(a)
            for n, a in made
        )
        right = len(made) == len(case.want) and all(
            name == n and all(a.get(k) == v for k, v in wanted.items())
            for (name, wanted), (n, a) in zip(case.want, made, strict=True)
        )
        for n, each in enumerate((1, bool(made) == bool(case.want), valid, right)):
            rows.setdefault(case.kind, [0] * 4)[n] += each
        if not right:
            Console().print(f"[dim]{case.text}[/] {text!r}", markup=True)
    table = Table(title=f"{args.model.name}: tool calls, greedy")
    for column in ("", "questions", "a call where one is meant", "by the schema", "as meant"):
        table.add_column(column)
    for kind, counts in rows.items():
        table.add_row(kind, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    main()
