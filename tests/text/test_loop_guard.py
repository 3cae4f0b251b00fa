"""The loop guard by itself: which answers it ends, where, and how."""

import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.corpora import corpus
from mlxspec.text.chat import load_tokenizer
from mlxspec.text.structured import loop_guard
from mlxspec.text.structured.grammar import Grammars
from mlxspec.text.structured.json_schema import json_rule
from mlxspec.text.structured.loop_guard import (
    LEAST,
    MAX_PERIOD,
    WINDOW,
    LoopGuard,
    tokens_of_loop,
)
from mlxspec.text.structured.thinking import ThinkingBudget
from mlxspec.text.structured.wishes import MAX_ASKED, asked
from tests.support.parameter_rows import diagonal

END, CLOSE = 2, (5, 9)
MOST = 4000  # tokens of an answer


def letters(ids: Iterable[int]) -> str:
    """The text of made-up tokens, of which each is one character."""
    return "".join(chr(0x4E00 + id) for id in ids)


def guard(prompt: Iterable[int] = (), repeats: int = 0, **more: Any) -> LoopGuard:
    return LoopGuard(END, partial(letters, tuple(prompt)), letters, repeats, **more)


def said(matcher: Any, wishes: Iterable[int], most: int = MOST) -> list[int]:
    """An answer that takes each token that is wished for, where the mask allows it, and else the
    first one that is allowed."""
    answer: list[int] = []
    for wish in islice(wishes, most):
        mask = int.from_bytes(matcher.masks(())[0], "little") if matcher.restricts(0) else 0
        token = wish if not mask or mask >> wish & 1 else (mask & -mask).bit_length() - 1
        answer.append(token)
        matcher.take([token])
        if token == END:
            break
    return answer


def noise(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, 1000) for _ in range(count)]


@pytest.mark.parametrize("period", [1, 2, 3, 7, 50, 99, 100, 133, MAX_PERIOD])
@pytest.mark.parametrize("before", [0, 1, 60, 511])
def test_a_loop_ends(period: int, before: int) -> None:
    """As soon as it is complete, but for a window."""
    looping = chain(noise(before, seed=1), cycle(noise(period)))
    answer = said(made := guard(), looping)
    assert answer[-1] == END and made.loops == 1
    assert tokens_of_loop(period) <= len(answer) - 1 - before < tokens_of_loop(period) + WINDOW
    assert (len(answer) - 1) % WINDOW == 0, "where it ends depends on the tokens alone"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(chain(noise(50), repeat(3, LEAST - 1), noise(3000)), id="too short"),
        pytest.param(chain(islice(cycle(noise(390)), 3 * 390), noise(2000, seed=2)), id="thrice"),
        pytest.param(cycle(noise(MAX_PERIOD + 1)), id="too long a period"),
        pytest.param(chain.from_iterable([*noise(30), n] for n in range(10, 900)), id="a counter"),
        pytest.param(noise(4000), id="none"),
        pytest.param(random.Random(3).choices([10, 11], k=4000), id="two tokens"),
    ],
)
def test_no_loop(answer: Iterable[int]) -> None:
    made = guard()
    assert END not in said(made, answer) and made.loops == 0


@pytest.mark.parametrize("period", [1, 20, 300])
def test_what_the_prompt_repeats_may_be_copied(period: int) -> None:
    """But not for ever."""
    table = [*islice(cycle(noise(period)), 6 * tokens_of_loop(period) // 2)]
    prompt = [*noise(700, seed=5), *table, *noise(90, seed=6)]
    turned = table[period // 2 :] + table[: period // 2]
    copied = said(guard(prompt), chain(turned, noise(500, seed=7)))
    assert END not in copied
    endless = said(guard(prompt), cycle(noise(period)), most=10_000)
    assert endless[-1] == END and len(endless) > len(table)


def test_a_table_may_be_copied_into_the_arguments_of_a_call(smollm2: Path) -> None:
    """There it is the text of a JSON string."""
    tokenizer = load_tokenizer(smollm2)
    table = '<li class="a">x</li>\n' * 80
    ids = tokenizer.encode(json.dumps(table), add_special_tokens=False)
    made = replace(guard(), shown=lambda: f"Write this: {table}", decode=tokenizer.decode)
    assert END not in said(made, ids) and not made.loops
    other = replace(guard(), decode=tokenizer.decode)
    assert said(other, ids)[-1] == END


LINES = ["\t<td>0</td>", "", "    <td>a\\b</td>"] * 60
CAT = "\n".join(f"{i:6}\t{line}" for i, line in enumerate(LINES, 1))
COPIES = {
    "cat -n": CAT,
    "an arrow": "\n".join(f"{i:6}→{line}" for i, line in enumerate(LINES, 1)),
    "carriage returns": "\r\n".join(LINES),
    "opencode": "\n".join(f"{i:05}| {line}" for i, line in enumerate(LINES, 1)),
    "a bar": "\n".join(f"{i:3} | {line}" for i, line in enumerate(LINES, 1)),
    "codex": "\n".join(f"L{i}: {line}" for i, line in enumerate(LINES, 1)),
    "grep": "\n".join(f"src/a.html:{i}:{line}" for i, line in enumerate(LINES, 1)),
    "diff": "\n".join(f"+{line}" for line in LINES),
    "bat": "\n".join(f"{i:4} │ {line}" for i, line in enumerate(LINES, 1)),
    "grep without numbers": "\n".join(f"src/a.html:{line}" for line in LINES),
    "lines around what grep found": "\n".join(
        f"src/a-b.html-{i}-{line}" for i, line in enumerate(LINES, 1)
    ),
    "a quote in a quote": "\n".join(f"> > {line}" for line in LINES),
    "comments": "\n".join(f"// {line}" for line in LINES),
    "a result in JSON": json.dumps({"output": "\n".join(LINES)}),
    "cat -n in JSON": json.dumps({"output": CAT}),
    "a result in JSON in JSON": json.dumps({"text": json.dumps({"output": "\n".join(LINES)})}),
    "escapes for HTML": json.dumps("\n".join(LINES)).replace("<", "\\u003c"),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2)


@pytest.mark.parametrize(
    "name, ends, escaped", diagonal(list(COPIES), ["\n", "\r\n"], [False, True])
)
def test_lines_may_be_copied_without_what_a_tool_puts_before(
    tokenizer: Any, name: str, ends: str, escaped: bool
) -> None:
    """And with other ends, in text and in the arguments of a call; but not for ever."""
    prompt = f"Write this:\n{COPIES[name]}\nas it is"
    for times in (1, 9):
        text = ends.join(LINES * times) + ends
        ids = tokenizer.encode(json.dumps(text) if escaped else text, add_special_tokens=False)
        made = replace(guard(), shown=lambda: prompt, decode=tokenizer.decode)
        assert (END in said(made, ids, most=20_000)) == (times > 1)


MATRIX = [[0] * 20] * 40
SHORT = json.dumps(MATRIX[0], separators=(",", ":"))
TABLE = "| 0 | n/a |\n" * 80
REWRITTEN = {  # what the prompt has, what the answer makes of it
    "a table that is aligned": (TABLE, "|   0 | n/a    |\n" * 80),
    "an empty one": ("| | |\n" * 300, "|   |    |\n" * 300),
    "JSON with blanks": (f"[{SHORT},{SHORT}]" * 20, f"{MATRIX[0]}, " * 40),
    "JSON without": (json.dumps(MATRIX, indent=1), f"{SHORT}," * 40),
    "other quotes": ("'é': 'b',\n" * 99, '"é": "b",\n' * 99),
    "umlauts in JSON": (json.dumps("ä 😀 ö\n" * 99), "ä 😀 ö\n" * 99),
    "CSV as a table": ("0,0,n/a\n" * 99, "| 0 | 0 | n/a |\n" * 99),
    "a list in Python": ("red\ngreen\n" * 99, '    "red",\n    "green",\n' * 99),
    "HTML's entities": ("&lt;td&gt;x&lt;/td&gt;\n" * 99, "<td>x</td>\n" * 99),
    "text for HTML": ("if a < b && b > c:\n" * 99, "if a &lt; b &amp;&amp; b &gt; c:\n" * 99),
    "a change of all lines": ("<td>0</td>\n" * 99, "+<td>0</td>\n" * 99),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rows_may_be_written_in_another_way(tokenizer: Any, name: str) -> None:
    """With other white space, quotes and signs; but not for ever."""
    prompt, text = REWRITTEN[name]
    for times in (1, 9):
        ids = tokenizer.encode(text * times, add_special_tokens=False)
        made = LoopGuard(END, lambda: f"Rewrite:\n{prompt}\n!", tokenizer.decode)
        assert (END in said(made, ids, most=30_000)) == (times > 1)


@pytest.mark.parametrize("odd", ["&#" + "9" * 9000 + ";", "\\ud83d", "\ud83d", "\0", "\\" * 99])
def test_what_the_client_sent_may_be_anything(odd: str) -> None:
    table = [*islice(cycle(noise(20)), 2000)]
    shown = f"{odd}\n{letters(table)}{odd}"
    assert END not in said(LoopGuard(END, lambda: shown, letters), table)
    assert said(LoopGuard(END, lambda: shown, lambda ids: odd * len(ids)), cycle([7, 8]))


def test_what_the_client_sent_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all choices of a request, and searched once for each loop."""
    table = [*islice(cycle(noise(20)), 4000)]
    read, searched = [], []

    def shown() -> str:
        read.append(1)
        return letters(table)

    def search(*some: Any) -> int:
        searched.append(1)
        return longest(*some)

    longest = loop_guard._longest_run
    monkeypatch.setattr(loop_guard, "_longest_run", search)
    make = partial(LoopGuard, END, shown, letters, forms={})
    for _ in range(2):
        assert END not in said(make(), table)
    assert len(read) == 1 and len(searched) <= 2 * 4


ROW = "[" + ", ".join(["0"] * 40) + "],\n"


@pytest.mark.parametrize(
    ("wish", "row", "count"),
    [
        ("a 40x40 matrix of zeros", ROW, 40),
        ("a table of forty rows, all n/a", "| n/a " * 12 + "|\n", 40),
        ("forty objects", '{"id": 0, "name": "", "on": false, "tags": [], "of": null},\n', 40),
    ],
)
def test_rows_that_are_asked_for_by_number(tokenizer: Any, wish: str, row: str, count: int) -> None:
    for times in (count, 9 * count):
        ids = tokenizer.encode(row * times, add_special_tokens=False)
        made = replace(guard(repeats=asked(wish)[0]), decode=tokenizer.decode)
        assert (END in said(made, ids, most=70_000)) == (times > count)


def test_a_large_matrix_may_be_written(tokenizer: Any) -> None:
    """Beyond what a number alone allows."""
    wish = "Write a 64x64 matrix of zeros"
    ids = tokenizer.encode(("[" + ", ".join(["0"] * 64) + "],\n") * 600, add_special_tokens=False)
    whole = len(ids) * 64 // 600
    assert MAX_ASKED < whole < asked(wish)[1]
    made = replace(guard(repeats=asked(wish)[0]), decode=tokenizer.decode)
    assert len(said(made, ids, most=len(ids))) < whole
    made = replace(guard(repeats=asked(wish)[0]), decode=tokenizer.decode)
    answer = said(replace(made, most=asked(wish)[1]), ids, most=len(ids))
    assert answer[-1] == END and whole < len(answer) < len(ids) // 2
    assert asked("9000 zeros")[1] == asked("a 16x16 matrix")[1] == MAX_ASKED


def test_what_the_prompt_asks_for_may_repeat() -> None:
    text = "Write 500 zeros, please."
    assert asked(text)[0] == 500
    row = noise(4)
    assert END not in said(guard(repeats=500), chain(islice(cycle(row), 500 * 4), noise(300)))
    endless = said(guard(repeats=500), cycle(row))
    assert endless[-1] == END and len(endless) > 500 * 4
    paragraph = said(guard(repeats=500), cycle(noise(90)))
    assert len(paragraph) - 1 < tokens_of_loop(90) + WINDOW, (
        "a list is asked for, not the same paragraph"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a 300 x 20 table", 6000),
        ("a 16x16 matrix of zeros", 256),
        ("Write a 16 by 16 matrix, in 3 steps", 256),
        ("an image of 3 \u00d7 28 \u00d7 28", 2352),
        ("1920x1080 pixels", 0),
        ("a 128x128 image", 128 * 128),
        ("five hundred zeros", 500),
        ("Twenty-five rows, not twenty", 25),
        ("two thousand five hundred and one times", 2501),
        ("a hundred ones and sixteen by sixteen twos", 256),
        ("5k zeros", 5000),
        ("1.000 Nullen", 1000),
        ("2000 zeros", 2000),
        ("x² and ① of ³", 0),
        ("5 x " * 200, 0),
        ("3 of 4. By then, 7 by the door", 0),
        ("buy x and y", 0),
        ("", 0),
        ("no number", 0),
        ("pi is 3.14159", 0),
        ("write 1,000 zeros", 1000),
        ("line 12345678 of it", 0),
        ("999999 times", 999_999),
        ("what happened in 1989?", 0),
        ("500 " + "word " * 400, 0),
        ("Write 500 zeros. " + "word 9000 " * 400, 500),
        ("<task>\nWrite 500 zeros.\n</task>\n<files>\n" + "src/a9000.py\n" * 400, 500),
        ("word 9000 " * 400 + "\nPlease give me 500 zeros", 500),
        ("two dozen rows", 24),
        ("a dozen", 12),
        ("a million ha", 1_000_000),
        ("one million two thousand and five", 1_002_005),
        ("1\u202f000 zeros or 2 000 ones", 2000),
        ("1'000 Nullen", 1000),
        ("400-500 zeros", 500),
        ("zeros, 500x", 500),
        ("[0]*500", 500),
        ("a 24-hour grid", 24),
        ("* 100\n* 200\n* 300", 300),
        ("n=500", 500),
        ("**500** zeros (40)", 500),
        ("the error is in line 8000", 0),
        ("Print this line 500 times, not line 8000", 500),
        ("port 8080 is taken, port: 8081", 0),
        ("issue 50123, ticket #4711, RFC 2616", 0),
        ("on 12/31/2023 at 10:30", 0),
        ("https://example.com/12345 and user@10.0.0.12", 0),
        ("fix CVE-2024-12345 in ab1234cd", 0),
        ("0x1000 and 2^16, 1024*1024", 0),
        ("$5000, 5000 \u20ac, 80%", 0),
        ("call +49", 0),
        ("an iPhone of 256GB, GPT-4, UTF-8, SHA-256", 0),
        ("Write an essay of 600 words about whales.", 0),
        ("My salary is 120000 dollars. Tell me about whales.", 0),
        ("Plan 45 minutes for 30 people", 0),
        ("Write 1000000 zeros", 1_000_000),
        ("Write the word ha 500 times", 500),
        ("a 16x0 matrix with 5 rows", 5),
        ("print hello 500 times", 500),
        ("a list of 300 zeros", 300),
        ("count to 1000", 1000),
        ("give me 200 rows of test data", 200),
        ("1000 random digits", 1000),
        ("Write the letter a 2000 times.", 2000),
        ("I want 400 lines that say hi", 400),
        ("Repeat the word ha five hundred times", 500),
        ("Could you generate 250 empty JSON objects?", 250),
        ("Please count from 1 to 600.", 600),
        ("Output a CSV with 800 rows, all of them 0,0,0", 800),
        ("say sorry 300x", 300),
        ("Fill a 30x30 board with dots", 900),
        ("make an array of length 700", 700),
        ("list the first 500 even numbers", 500),
        ("I need 150 copies of this line", 150),
        ("two thousand zeros, nothing else", 2000),
        ("Type 'no' 450 times in a row", 450),
        ("Draw a line of 120 dashes", 120),
        ("write 1k times the word test", 1000),
        ("Return 300 nulls in a list", 300),
        ("Echo this sentence exactly 100 times", 100),
        ("a table with 60 rows and 4 columns, all n/a", 60),
        ("Create 90 user records with the same name", 90),
        ("Show me 350 stars", 350),
        ("Write out 10000 zeros", 10000),
        ("Produce a hundred blank lines", 100),
        ("Now the same, but 250 of them: write them all", 250),
        ("Give me a 12 by 12 identity matrix", 144),
        ('Write "I will not talk in class" 200 times on the board', 200),
        ("Room 4000 is cold", 0),
        ("My flat number is 1204, who do I call?", 0),
        ("It costs 4999 plus tax.", 0),
        ("I paid 2500 for it, was that too much?", 0),
        ("In 1066 William invaded England", 0),
        ("The church was built in 1850 by monks.", 0),
        ("nginx listens on 8080 and answers 502", 0),
        ("I live at 1600 Pennsylvania Avenue", 0),
        ("My id is 884213, is it valid?", 0),
        ("Order 55012 has not arrived", 0),
        ("Ticket 98765 was closed by mistake", 0),
        ("What is the square root of 1024?", 0),
        ("Is 7919 prime?", 0),
        ("Highway 101 is closed today", 0),
        ("Bus 400 does not stop here any more", 0),
        ("The password is 123456, change it", 0),
        ("Boeing 747 or Airbus 380?", 0),
        ("Explain why postcode 90210 is famous", 0),
        ("The population was 8000 then and is 12000 now", 0),
        ("What is 12345 divided by 5?", 0),
        ("Flight 1234 was late again, what now?", 0),
        ("Fahrenheit 451 is a good book", 0),
        ("Write a poem about room 4000", 0),
        ("Write a story that is set in 1066", 0),
        ("Invoice 48213 is overdue; write a reminder.", 0),
        ("The year 2150 will be hot", 0),
        ("gate 300, seat 214", 0),
        ("Who lives in apartment 1500?", 0),
        ("They say that model 9000 never fails", 0),
        ("Keep going until you have written 400 of them", 400),
        ("The hotel gave us room 1408 again", 0),
        ("Is it true that 90% of 4000 is 3600?", 0),
        ("My score of 1600 is the highest", 0),
        ("localhost 8080 refuses it", 0),
        ("Employee 20417 wants leave", 0),
        ("She earns 95000 a year", 0),
        ("Write a mail that employee 20417 wants leave", 0),
        ("Show me how to kill process 3912", 0),
        ("Give me the capital of region 640", 0),
        ("The house has 240 square metres", 0),
        ("Der Server 10443 antwortet nicht", 0),
        ("Write a summary of the sales in 2023", 0),
        ("a vector of 2048 zeros", 2048),
        ("Schreibe 500 Nullen", 500),
        ("Wiederhole das Wort ja 200 Mal", 200),
        ("\u00c9cris 500 z\u00e9ros", 500),
        ("I would like to see 400 commas", 400),
        ("Write out exactly 300 zeros", 300),
    ],
)
def test_the_number_that_a_message_names(text: str, count: int) -> None:
    assert asked(text)[0] == count


def test_a_loop_in_the_reasoning_forces_its_end() -> None:
    """The answer goes on, and another loop ends it."""
    form: Any = SimpleNamespace(think_start="<think>", think_end_tokens=CLOSE)
    budget = ThinkingBudget(form, str, 1 << 24, thinking=True)
    made = guard(inner=budget)
    reasoning, rest = noise(10), noise(350, seed=8)
    wishes = chain(islice(cycle(reasoning), 200 + len(CLOSE)), rest, cycle([7]))
    answer = said(made, wishes)
    assert answer[200:202] == [*CLOSE] and answer[202 : 202 + len(rest)] == rest
    assert answer[-1] == END and made.loops == 2
    assert not budget.thinking


def test_a_draft_ends_where_a_loop_may_be_complete() -> None:
    made = guard()
    made.take([7] * (LEAST - 10))
    assert made.restricts(32) and not made.restricts(9)
    assert len(made.masks([7] * 32)) == 10
    made.take([7] * 10)
    assert made.masks([7] * 32) == [(1 << END).to_bytes(1, "little")]
    assert made.forced(8) == []


def test_text_is_never_restricted() -> None:
    """So no step waits for the guard."""
    made = guard()
    for token in noise(2000):
        made.take([token])
        assert not made.restricts(66)


# ---- under a grammar


@pytest.fixture(scope="module")
def under(smollm2: Path) -> Callable[..., tuple[str, LoopGuard]]:
    """The answer under a JSON schema of a model that wishes for the tokens of these texts."""
    tokenizer = load_tokenizer(smollm2)
    grammars = Grammars(tokenizer, len(tokenizer))

    def answer(schema: Any, begin: str, again: str, rest: str = "") -> tuple[str, LoopGuard]:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        lark = grammars.rules([json_rule(schema, "response_format")])
        inner = grammars.compile(lark, False, "response_format").result()()
        [end, *_] = sorted(tokenizer.eos_token_ids)
        made = replace(guard(inner=inner, grammar=inner), end=end, decode=tokenizer.decode)
        wishes = chain(ids(begin), cycle(ids(again)))
        got: list[int] = []
        for wish in islice(wishes, MOST):
            mask = int.from_bytes(made.masks(())[0], "little")
            token = wish if mask >> wish & 1 else (mask & -mask).bit_length() - 1
            if token == end:
                break
            got.append(token)
            made.take([token])
        return tokenizer.decode(got), made

    return answer


STRING = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def numbers(least: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, "minItems": least}


def test_a_string_that_repeats_is_closed(under: Any) -> None:
    text, made = under(STRING, '{"a": "', "ha ho ")
    assert json.loads(text)["a"].startswith("ha ho ha ho") and made.loops == 1


def test_a_string_with_escaped_quotes_is_closed(under: Any) -> None:
    text, made = under(STRING, '{"a": "', '<a b=\\"x\\"> ')
    assert '<a b="x"> <a b="x">' in json.loads(text)["a"] and made.loops == 1


def test_a_list_that_repeats_is_closed(under: Any) -> None:
    text, made = under(numbers(0), "[", "0, ")
    assert set(json.loads(text)) == {0} and made.loops == 1


def test_a_list_that_the_schema_demands_is_none(under: Any) -> None:
    text, _ = under(numbers(800), "[", "0, ")
    assert len(json.loads(text)) >= 800


def test_a_list_of_objects_is_closed_behind_one(under: Any) -> None:
    row = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text, made = under({"type": "array", "items": row}, "[", '{"n": 1}, ')
    assert len(json.loads(text)) > 20 and made.loops == 1


# ---- false alarms


def alarms(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """The texts that would be ended as answers to a prompt that says nothing."""
    found = []
    for text in texts:
        ids, made = tokenizer.encode(text, add_special_tokens=False), guard()
        for start in range(0, len(ids), 32):
            made.take(ids[start : start + 32])
        if made.loops:
            found.append(text)
    return found


def tables() -> Iterator[str]:
    """JSON, CSV and hex, sparse and dense."""
    source = random.Random(7)
    for width in (1, 3, 16):
        rows = [[source.randrange(10) for _ in range(width)] for _ in range(200)]
        yield json.dumps(rows)
        yield json.dumps([{"id": i, "on": True, "tags": []} for i in range(200)], indent=width)
        yield "\n".join(",".join(map(str, [i, *row])) for i, row in enumerate(rows))
        data = bytes(source.randrange(256) for _ in range(400 * width))
        yield "\n".join(f"{i:08x}: {data[i : i + 16].hex(' ')}" for i in range(0, len(data), 16))
        yield "\n".join(f"{i:08x}: {'00 ' * 16}" for i in range(0, len(data), 16))


def sources(part: int, of: int) -> Iterator[str]:
    """Of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    for file in files[part::of]:
        if "site-packages" not in file.parts:
            yield file.read_text("utf-8", "ignore")


def test_no_table_is_a_loop(smollm2: Path) -> None:
    assert not alarms(load_tokenizer(smollm2), tables())


def test_no_source_is_a_loop(smollm2: Path) -> None:
    assert not alarms(load_tokenizer(smollm2), sources(0, of=500))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_source_of_the_library_is_a_loop(smollm2: Path, part: int) -> None:
    assert not alarms(load_tokenizer(smollm2), sources(part, of=8))


@pytest.mark.slow
def test_no_answer_of_a_corpus_is_a_loop(smollm2: Path, tmp_path: Path) -> None:
    """HumanEval's solutions; MT-Bench's questions and references."""
    lines = gzip.decompress(corpus("humaneval", tmp_path)).splitlines()
    tasks = [json.loads(line) for line in lines]
    questions = [json.loads(line) for line in corpus("chat", tmp_path).splitlines()]
    solved = [task["prompt"] + task["canonical_solution"] for task in tasks]
    asked = [turn for question in questions for turn in question["turns"]]
    told = [text for question in questions for text in question.get("reference", [])]
    assert len(solved) == 164 and len(asked) == 160
    texts = [*solved, *asked, *told, "\n".join(solved)]
    assert not alarms(load_tokenizer(smollm2), texts)
