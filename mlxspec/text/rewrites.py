"""Rewritings of conversations for templates that refuse a turn, or leave out its text.

Which of them a model needs is found once, by conversations that agents send. They are applied in a
fixed order to every conversation, so that a turn's tokens never depend on later turns.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from mlxspec.text.formats import ChatFormat, written
from mlxspec.text.messages import Messages, Tools, joined
from mlxspec.types import Json

Rewrite = Callable[[Messages, ChatFormat], Messages]
Render = Callable[[Messages], str]  # raises where the template refuses

TOOLS_FOLLOW = "You can call these tools, each a JSON object on its line:"
HOW_TO_CALL = "To call one, write its name and arguments so, and nothing after the last call:\n"
BEGINNING = "(The conversation begins with an answer.)"
BETWEEN = "Go on."
MISSING = "(There is no result.)"


def calls_as_text(messages: Messages, form: ChatFormat) -> Messages:
    """Calls as the model writes them, in the content."""
    turns: Messages = []
    for message in messages:
        turn = dict(message)
        if calls := turn.pop("tool_calls", ()):
            named = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
            texts = [turn["content"], written(form.spelled or "json_tools", named)]
            turn["content"] = "\n".join(filter(None, texts))
        turns.append(turn)
    return turns


def results_as_user(messages: Messages, _: ChatFormat) -> Messages:
    """Results as text of the user."""
    turns: Messages = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        turns.append(message)
    return turns


def one_system(messages: Messages, _: ChatFormat) -> Messages:
    """The system texts that come first as one."""
    systems = list(takewhile(lambda turn: turn["role"] == "system", messages))
    return [joined(*systems), *messages[len(systems) :]] if systems else messages


def results_behind_calls(messages: Messages, form: ChatFormat) -> Messages:
    """Each turn of calls with its results behind it; one that has not come is said to be missing,
    and one without a call is the user's."""
    results = [message for message in messages if message["role"] == "tool"]
    turns: Messages = []
    for message in messages:
        if message["role"] == "tool":
            if any(message is each for each in results):  # of no call
                turns += results_as_user([message], form)
            continue
        turns.append(message)
        for call in message.get("tool_calls", ()):
            id = call.get("id")
            its = [each for each in results if each.get("tool_call_id", id) == id][:1]
            results = [each for each in results if not its or each is not its[0]]
            named = {"tool_call_id": id} if id else {}
            turns += its or [{"role": "tool", "content": MISSING, **named}]
    return turns


def system_as_user(messages: Messages, _: ChatFormat) -> Messages:
    """System text that does not come first as text of the user."""
    turns: Messages = []
    first = True
    for message in messages:
        if message["role"] != "system":
            first = False
        elif not first:
            said = f"<system>\n{message['content']}\n</system>"
            message = {**message, "role": "user", "content": said}
        turns.append(message)
    return turns


def without_system(messages: Messages, form: ChatFormat) -> Messages:
    """System text that comes first as the beginning of the user's text."""
    first, *rest = one_system(messages, form)
    if first["role"] != "system":
        return messages
    first = {**first, "role": "user"}
    if rest and rest[0]["role"] == "user":
        first, rest = joined(first, rest[0]), rest[1:]
    return [first, *rest]


def call_by_call(messages: Messages, _: ChatFormat) -> Messages:
    """A turn of several calls as turns of one, each with its result behind it."""
    turns: Messages = []
    waiting: Messages = []  # turns of calls whose results have not come
    for message in messages:
        if message["role"] == "tool" and turns and turns[-1]["role"] == "tool":
            id = message.get("tool_call_id")
            own = [turn for turn in waiting if turn["tool_calls"][0].get("id") == id] or waiting
            turns += own[:1]
            waiting = [turn for turn in waiting if turn is not turns[-1]]
        elif message["role"] != "tool":
            turns += waiting
            first, *more = [[call] for call in message.get("tool_calls", ())] or [[]]
            message = {**message, "tool_calls": first} if first else message
            waiting = [{"role": "assistant", "content": "", "tool_calls": call} for call in more]
        turns.append(message)
    return turns + waiting


def text_before_calls(messages: Messages, _: ChatFormat) -> Messages:
    """Text beside calls as a turn of its own before them, and one of the user between."""
    turns: Messages = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            turns.append({"role": "assistant", "content": message["content"]})
            turns.append({"role": "user", "content": BETWEEN})
            message = {**message, "content": ""}
        turns.append(message)
    return turns


def user_in_results(messages: Messages, _: ChatFormat) -> Messages:
    """The user's text behind results as part of the last result."""
    turns: Messages = []
    for message in messages:
        if message["role"] == "user" and turns and turns[-1]["role"] == "tool":
            said = f"{turns[-1]['content']}\n\n<user>\n{message['content']}\n</user>"
            turns[-1] = {**turns[-1], "content": said}
        else:
            turns.append(message)
    return turns


def user_first(messages: Messages, _: ChatFormat) -> Messages:
    """A turn of the user before an answer that comes first."""
    at = int(messages[0]["role"] == "system")
    if messages[at:] and messages[at]["role"] == "assistant":
        return [*messages[:at], {"role": "user", "content": BEGINNING}, *messages[at:]]
    return messages


def merged(messages: Messages, _: ChatFormat) -> Messages:
    """Neighbours of one role as one turn, except results."""
    turns: Messages = []
    for role, group in groupby(messages, itemgetter("role")):
        some = list(group)
        turns += some if role == "tool" else [joined(*some)]
    return turns


def short_ids(messages: Messages, _: ChatFormat) -> Messages:
    """Calls with ids of nine letters and digits, as Mistral's templates want them. A result without
    an id is of the next call."""
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


def _call(said: str, id: str) -> Json:
    function = {"name": "f", "arguments": {"a": said}}
    return {"id": id, "type": "function", "function": function}


ID, OTHER_ID, LONG_ID = "abcdef001", "abcdef002", "call_" + 24 * "0"
ASK, AGAIN = _turn("user", "zqask"), _turn("user", "zqagain")
SYSTEM, LATE = _turn("system", "zqsystem"), _turn("system", "zqlate")
SAID = _turn("assistant", "zqsaid")
CALL = _turn("assistant", tool_calls=[_call("zqcall", ID)])
SECOND = _turn("assistant", tool_calls=[_call("zqsecond", OTHER_ID)])
CALLS = _turn("assistant", tool_calls=CALL["tool_calls"] + SECOND["tool_calls"])
LONG = _turn("assistant", tool_calls=[_call("zqcall", LONG_ID)])
RESULT = _turn("tool", "zqresult", tool_call_id=ID)
MORE = _turn("tool", "zqmore", tool_call_id=OTHER_ID)
LONG_RESULT = {**RESULT, "tool_call_id": LONG_ID}

# In the order in which they are applied. Each has conversations that a template must take without
# it, with all their texts, or it is needed.
REWRITES: dict[Rewrite, list[Messages]] = {
    calls_as_text: [[ASK, CALL, RESULT]],
    results_as_user: [[ASK, CALL, RESULT]],
    results_behind_calls: [
        [ASK, CALL, AGAIN],
        [ASK, CALL, LATE, RESULT],
        [ASK, RESULT, AGAIN],
        [ASK, CALL, SECOND, RESULT, MORE],
    ],
    without_system: [[SYSTEM, ASK]],
    one_system: [[SYSTEM, LATE, ASK]],
    system_as_user: [[SYSTEM, ASK, SAID, LATE, AGAIN], [ASK, LATE], [ASK, CALL, RESULT, LATE]],
    call_by_call: [[ASK, CALLS, RESULT, MORE]],
    text_before_calls: [[ASK, {**CALL, "content": "zqbeside"}, RESULT]],
    user_in_results: [[ASK, CALL, RESULT, AGAIN], [ASK, CALL, RESULT, AGAIN, SAID, ASK]],
    user_first: [[SAID, ASK]],
    merged: [[ASK, AGAIN], [ASK, SAID, SAID, ASK]],
    short_ids: [[ASK, LONG, LONG_RESULT]],
}
GENTLE = tuple(REWRITES)[2:]  # the calls and results stay what they are


def rewrites_for(render: Render, form: ChatFormat) -> tuple[Rewrite, ...]:
    """The rewritings that a template needs: those without which it refuses a conversation, or
    leaves out a text."""

    known: dict[str, int] = {}

    def taken(sent: Messages, rewrites: Sequence[Rewrite]) -> int:
        messages = rewritten(sent, rewrites, form)
        key = json.dumps([sent, messages])
        if key not in known:
            known[key] = _taken(render, messages, sent)
        return known[key]

    tried: list[Messages] = []
    needed = tuple(REWRITES)
    if all(taken(each, GENTLE) >= taken(each, needed) for each in REWRITES[calls_as_text]):
        needed = GENTLE
    # First the one that changes most.
    for rewrite, conversations in sorted(REWRITES.items(), key=lambda item: item[0] is not merged):
        others = tuple(each for each in needed if each is not rewrite)
        tried += conversations  # also those that others of `needed` were enough for
        if all(taken(each, others) >= taken(each, needed) for each in tried):
            needed = others
    return needed


def rewritten(messages: Messages, rewrites: Iterable[Rewrite], form: ChatFormat) -> Messages:
    """The messages after these rewritings."""
    for rewrite in rewrites:
        messages = rewrite(messages, form)
    return messages


def _taken(render: Render, messages: Messages, sent: Messages) -> int:
    """Whether a template takes messages: 2 with all texts of what was sent, in their order, 1
    without some, 0 if it refuses."""
    try:
        text = render(messages)
    except Exception:  # a template raises whatever its author chose
        return 0
    places = []  # of the texts of each turn
    for turn in sent:
        calls = [call["function"]["arguments"]["a"] for call in turn.get("tool_calls", ())]
        places.append([text.find(word) for word in [turn["content"], *calls] if word])
    first = [min(each) for each in places if each]
    return 1 + (all(min(each, default=0) >= 0 for each in places) and first == sorted(first))


def tools_as_text(messages: Messages, tools: Tools, form: ChatFormat) -> Messages:
    """Messages with the tools and how to call them in the system text, for a template that knows no
    tools."""
    if not tools:
        return messages
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    layout = next(each for each in form.layouts if each.style == "json")
    example = layout.written("...", "{...}")
    first = {"role": "system", "content": "\n".join([TOOLS_FOLLOW, *lines, HOW_TO_CALL + example])}
    if messages[0]["role"] == "system":
        first, messages = joined(messages[0], first), messages[1:]
    return [first, *messages]
