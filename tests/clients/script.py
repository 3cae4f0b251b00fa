"""An engine that plays a coding model: it reads the prompt's text and says what its script has for
that turn.

All else is the server's own: templates, token ids, the reader of answers, the APIs.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlxspec.text.chat import encode
from mlxspec.types import ModelInfo, Output, Request
from tests.support.scripted import END, Scripted
from tests.tiny_tokenizer import save_tokenizer

Play = Callable[[str], str]  # from a prompt to what is said to it

NAME = "scripted/coder-1b"
INFO = ModelInfo(NAME, 200_000, 320, "rows", 16, 1 << 20, 1 << 20, 1_700_000_000)
SIDE = "A greeting is mended"  # to what comes without tools: a title, a commit message
DONE = "The greeting is mended."
SUMMARY = "So far, files were read."
TOOLS, RESULT = "<tools>", "<tool_response>"
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

# As Qwen's: the system text and the tools first, results in a user's turn, and no system message
# further on.
TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% if tools %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{% endif %}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'system' %}\
{% if not loop.first %}{{ raise_exception('the system message must come first') }}{% endif %}\
{% elif message.role == 'tool' %}\
{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}\
{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_model(path: Path) -> Path:
    """A directory with the tokenizer of a model that reasons and calls tools."""
    save_tokenizer(path, template=TEMPLATE)
    made = Tokenizer.from_file(str(path / "tokenizer.json"))
    made.add_tokens(MARKS)
    made.save(str(path / "tokenizer.json"))
    return path


def call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def steps(*texts: str) -> Play:
    """The first text where no call has been answered yet, and then the next ones: one call is made
    at a time but for those of the first text, all of which are answered by then."""
    first = texts[0].count("<tool_call>") or 1

    def play(prompt: str) -> str:
        if TOOLS not in prompt:
            return SIDE
        answered = prompt.count(RESULT)
        return texts[0] if answered < first else texts[answered - first + 1]

    return play


def reading(read: Callable[[int], str]) -> Play:
    """Reads file after file, until its client wants a summary; once that is in the prompt it is
    done."""
    seen = 0

    def play(prompt: str) -> str:
        nonlocal seen
        answered = prompt.count(RESULT)
        seen = max(seen, answered)
        assert answered < 12, "no summary was asked for"
        if SUMMARY in prompt:
            return DONE
        if TOOLS not in prompt or "summary" in prompt[-400:]:
            return f"<summary>{SUMMARY}</summary>" if seen else SIDE
        return read(answered)

    return play


def restricted(request: Request) -> bool:
    """Whether a grammar restricts its first token; a loop guard does not."""
    return request.grammar is not None and request.grammar().restricts(0)


@dataclass(repr=False)  # it holds megabytes
class Player(Scripted):
    """Answers each prompt by `play`."""

    info: ModelInfo = INFO
    play: Play = lambda prompt: DONE
    prompts: list[str] = field(default_factory=list)

    def choice(self, request: Request, index: int) -> Iterator[Output]:
        # The rows of images are no tokens.
        self.prompts.append(self.tokenizer.decode([t for t in request.prompt if t >= 0]))
        self.says = (self.play(self.prompts[-1]),)
        yield from super().choice(request, index)

    def forks(self) -> list[str]:
        """Where a prompt with tools does not begin with the one before and its answer, token for
        token."""
        whole: tuple[int, ...] = ()
        found = []
        for request, prompt in zip(self.submitted, self.prompts, strict=True):
            if TOOLS in prompt:
                if request.prompt[: len(whole)] != whole:
                    pairs = zip(request.prompt, whole, strict=False)
                    same = takewhile(lambda pair: pair[0] == pair[1], pairs)
                    found.append(self.tokenizer.decode(request.prompt[sum(1 for _ in same) :][:80]))
                said = encode(self.tokenizer, self.play(prompt), special=False)
                whole = (*request.prompt, *said, END)
        return found
