"""Rewrites of conversations, for templates that refuse a turn or leave out its text.

The rewrites that a model needs are determined once, with conversations such as agents send. They
are applied to every conversation in a fixed order, so that a turn's tokens never depend on later
turns.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from mlxspec.text.formats import ChatFormat, render_calls
from mlxspec.text.messages import Messages, Tools, join_turns
from mlxspec.types import Json

Rewrite = Callable[[Messages, ChatFormat], Messages]
Render = Callable[[Messages], str]  # raises where the template refuses

TOOLS_FOLLOW = "You can call these tools, each a JSON object on its line:"
HOW_TO_CALL = "To call one, write its name and arguments so, and nothing after the last call:\n"
BEGINNING = "(The conversation begins with an answer.)"
MISSING = "(There is no result.)"


def calls_as_text(messages: Messages, form: ChatFormat) -> Messages:
    """Move calls into the content, as the model writes them."""
    turns: Messages = []
    for message in messages:
        turn = dict(message)
        if calls := turn.pop("tool_calls", ()):
            named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            texts = [
                turn["content"],
                render_calls(form.history_format or "json_tools", named),
            ]
            turn["content"] = "\n".join(filter(None, texts))
        turns.append(turn)
    return turns


def results_as_user(messages: Messages, _: ChatFormat) -> Messages:
    """Turn results into text of the user."""
    turns: Messages = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        turns.append(message)
    return turns


def one_system(messages: Messages, _: ChatFormat) -> Messages:
    """Merge the system texts that come first."""
    systems = list(takewhile(lambda turn: turn["role"] == "system", messages))
    return [join_turns(*systems), *messages[len(systems) :]] if systems else messages


def results_after_calls(messages: Messages, form: ChatFormat) -> Messages:
    """Put results directly after their turn of calls; a note replaces a missing result, and one
    without a call becomes the user's."""
    results = [message for message in messages if message["role"] == "tool"]
    turns: Messages = []
    for message in messages:
        if message["role"] == "tool":
            if any(message is result for result in results):  # of no call
                turns += results_as_user([message], form)
            continue
        turns.append(message)
        for call in message.get("tool_calls", ()):
            id = call.get("id")
            answers = [turn for turn in results if turn.get("tool_call_id", id) == id][:1]
            results = [turn for turn in results if not answers or turn is not answers[0]]
            reference = {"tool_call_id": id} if id else {}
            turns += answers or [{"role": "tool", "content": MISSING, **reference}]
    return turns


def system_as_user(messages: Messages, _: ChatFormat) -> Messages:
    """Turn system texts that do not come first into text of the user."""
    turns: Messages = []
    first = True
    for message in messages:
        if message["role"] != "system":
            first = False
        elif not first:
            text = f"<system>\n{message['content']}\n</system>"
            message = {**message, "role": "user", "content": text}
        turns.append(message)
    return turns


def without_system(messages: Messages, form: ChatFormat) -> Messages:
    """Turn system texts that come first into the beginning of the user's text."""
    first, *rest = one_system(messages, form)
    if first["role"] != "system":
        return messages
    first = {**first, "role": "user"}
    if rest and rest[0]["role"] == "user":
        first, rest = join_turns(first, rest[0]), rest[1:]
    return [first, *rest]


def call_by_call(messages: Messages, _: ChatFormat) -> Messages:
    """Split a turn of several calls into turns of one, each followed by its result."""
    turns: Messages = []
    waiting: Messages = []  # turns of calls whose results have not come
    for message in messages:
        if message["role"] == "tool" and turns and turns[-1]["role"] == "tool":
            id = message.get("tool_call_id")
            calls = [turn for turn in waiting if turn["tool_calls"][0].get("id") == id] or waiting
            turns += calls[:1]
            waiting = [turn for turn in waiting if turn is not turns[-1]]
        elif message["role"] != "tool":
            turns += waiting
            first, *more = [[call] for call in message.get("tool_calls", ())] or [[]]
            message = {**message, "tool_calls": first} if first else message
            waiting = [{"role": "assistant", "content": "", "tool_calls": call} for call in more]
        turns.append(message)
    return turns + waiting


def text_before_calls(messages: Messages, _: ChatFormat) -> Messages:
    """Append text beside calls to the user's text or the result before it: a further turn of the
    user would move what templates write beside the last one, as Mistral's do with the tools."""
    turns: Messages = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            said = f"<assistant>\n{message['content']}\n</assistant>"
            message = {**message, "content": ""}
            if turns and turns[-1]["role"] in ("user", "tool"):
                turns[-1] = {
                    **turns[-1],
                    "content": f"{turns[-1]['content']}\n\n{said}",
                }
            else:
                turns.append({"role": "user", "content": said})
        turns.append(message)
    return turns


def without_empty(messages: Messages, _: ChatFormat) -> Messages:
    """Leave out answers without text and calls, as of a client that was stopped."""
    return [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or message.get("tool_calls")
    ]


def content_as_list(messages: Messages, _: ChatFormat) -> Messages:
    """Content as a list of one part, for templates that read no other."""
    return [
        {
            **message,
            "content": [{"type": "text", "text": message["content"]}],
        }
        for message in messages
    ]


def user_in_results(messages: Messages, _: ChatFormat) -> Messages:
    """Append the user's text after results to the last result."""
    turns: Messages = []
    for message in messages:
        if message["role"] == "user" and turns and turns[-1]["role"] == "tool":
            text = f"{turns[-1]['content']}\n\n<user>\n{message['content']}\n</user>"
            turns[-1] = {**turns[-1], "content": text}
        else:
            turns.append(message)
    return turns


def user_first(messages: Messages, _: ChatFormat) -> Messages:
    """Insert a turn of the user before an answer that comes first."""
    at = int(messages[0]["role"] == "system")
    if messages[at:] and messages[at]["role"] == "assistant":
        return [
            *messages[:at],
            {"role": "user", "content": BEGINNING},
            *messages[at:],
        ]
    return messages


def merged(messages: Messages, _: ChatFormat) -> Messages:
    """Merge neighbouring turns of one role, except results."""
    turns: Messages = []
    for role, group in groupby(messages, itemgetter("role")):
        same = list(group)
        turns += same if role == "tool" else [join_turns(*same)]
    return turns


def short_ids(messages: Messages, _: ChatFormat) -> Messages:
    """Replace ids of calls by nine letters and digits, as Mistral's templates want them. A result
    without an id belongs to the next call."""
    turns, open_calls = [], []
    for message in messages:
        turn = dict(message)
        if calls := turn.get("tool_calls"):
            open_calls = [_short_id(call.get("id") or f"{n}") for n, call in enumerate(calls)]
            turn["tool_calls"] = [
                {**call, "id": id} for call, id in zip(calls, open_calls, strict=True)
            ]
        elif turn["role"] == "tool":
            following = open_calls.pop(0) if open_calls else ""
            turn["tool_call_id"] = _short_id(turn.get("tool_call_id") or following)
        turns.append(turn)
    return turns


def _short_id(id: str) -> str:
    return id if re.fullmatch("[a-zA-Z0-9]{9}", id) else sha256(id.encode()).hexdigest()[:9]


def _turn(role: str, content: str = "", **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def _call(text: str, id: str) -> Json:
    function = {"name": "f", "arguments": {"a": text}}
    return {"id": id, "type": "function", "function": function}


ID, OTHER_ID, LONG_ID = "abcdef001", "abcdef002", "call_" + 24 * "0"
ASK, AGAIN = _turn("user", "zqask"), _turn("user", "zqagain")
SYSTEM, LATE = _turn("system", "zqsystem"), _turn("system", "zqlate")
ANSWER, EMPTY = _turn("assistant", "zqsaid"), _turn("assistant")
CALL = _turn("assistant", tool_calls=[_call("zqcall", ID)])
BESIDE = {**CALL, "content": "zqbeside"}
SECOND = _turn("assistant", tool_calls=[_call("zqsecond", OTHER_ID)])
CALLS = _turn("assistant", tool_calls=CALL["tool_calls"] + SECOND["tool_calls"])
LONG = _turn("assistant", tool_calls=[_call("zqcall", LONG_ID)])
RESULT = _turn("tool", "zqresult", tool_call_id=ID)
MORE = _turn("tool", "zqmore", tool_call_id=OTHER_ID)
LONG_RESULT = {**RESULT, "tool_call_id": LONG_ID}

# In the order of application, each with conversations: it is needed unless the template renders all
# of their texts without it.
REWRITES: dict[Rewrite, list[Messages]] = {
    calls_as_text: [[ASK, CALL, RESULT]],
    results_as_user: [[ASK, CALL, RESULT]],
    results_after_calls: [
        [ASK, CALL],
        [ASK, CALL, AGAIN],
        [ASK, CALL, LATE, RESULT],
        [ASK, RESULT, AGAIN],
        [ASK, CALL, SECOND, RESULT, MORE],
    ],
    without_empty: [[ASK, EMPTY, AGAIN], [ASK, CALL, RESULT, EMPTY, AGAIN]],
    without_system: [[SYSTEM, ASK], [SYSTEM, ASK, CALL, RESULT]],
    one_system: [[SYSTEM, LATE, ASK]],
    system_as_user: [
        [SYSTEM, ASK, ANSWER, LATE, AGAIN],
        [ASK, LATE],
        [ASK, CALL, RESULT, LATE],
    ],
    call_by_call: [[ASK, CALLS, RESULT, MORE]],
    text_before_calls: [
        [ASK, BESIDE, RESULT],
        [ASK, BESIDE, RESULT, ANSWER, AGAIN],
    ],
    user_in_results: [
        [ASK, CALL, RESULT, AGAIN],
        [ASK, CALL, RESULT, AGAIN, ANSWER, ASK],
    ],
    user_first: [[ANSWER, ASK], [CALL, RESULT, ANSWER, ASK]],
    merged: [[ASK, AGAIN], [ASK, ANSWER, ANSWER, ASK]],
    short_ids: [[ASK, LONG, LONG_RESULT]],
}
GENTLE = tuple(REWRITES)[2:]  # they leave calls and results what they are


def rewrites_for(render: Render, form: ChatFormat) -> tuple[Rewrite, ...]:
    """The rewrites that a template needs: without them it refuses a conversation or leaves out a
    text."""

    scores: dict[str, int] = {}
    last: tuple[Rewrite, ...] = ()

    def score(original: Messages, rewrites: Sequence[Rewrite]) -> int:
        messages = apply_rewrites(original, (*rewrites, *last), form)
        key = json.dumps([original, messages])
        if key not in scores:
            scores[key] = _score(render, messages, original)
        return scores[key]

    if score([ASK], ()) < score([ASK], (content_as_list,)):
        last = (content_as_list,)
    tried: list[Messages] = []
    needed = tuple(REWRITES)
    if all(score(turns, GENTLE) >= score(turns, needed) for turns in REWRITES[calls_as_text]):
        needed = GENTLE
    # The one that changes most is tried first.
    for rewrite, conversations in sorted(REWRITES.items(), key=lambda item: item[0] is not merged):
        others = tuple(other for other in needed if other is not rewrite)
        tried += conversations  # also those for which other rewrites were enough
        if all(score(turns, others) >= score(turns, needed) for turns in tried):
            needed = others
    return (*needed, *last)


def apply_rewrites(messages: Messages, rewrites: Iterable[Rewrite], form: ChatFormat) -> Messages:
    """The messages after these rewrites."""
    for rewrite in rewrites:
        messages = rewrite(messages, form)
    return messages


def _score(render: Render, messages: Messages, original: Messages) -> int:
    """How well a template renders messages: 2 with all texts of the original ones in order, 1 if
    some are missing or moved, 0 if it refuses."""
    try:
        text = render(messages)
    except Exception:  # a template raises whatever its author chose
        return 0
    places = []  # of the texts of each turn
    for turn in original:
        calls = [call["function"]["arguments"]["a"] for call in turn.get("tool_calls", ())]
        places.append([text.find(word) for word in [turn["content"], *calls] if word])
    first = [min(starts) for starts in places if starts]
    return 1 + (all(min(starts, default=0) >= 0 for starts in places) and first == sorted(first))


def tools_as_text(messages: Messages, tools: Tools, form: ChatFormat) -> Messages:
    """Add the tools and how to call them to the system text, for a template without tools."""
    if not tools:
        return messages
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    layout = next(layout for layout in form.layouts if layout.style == "json")
    example = layout.render("...", "{...}")
    first = {
        "role": "system",
        "content": "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL + example]),
    }
    if messages[0]["role"] == "system":
        first, messages = join_turns(messages[0], first), messages[1:]
    return [first, *messages]
