"""The shapes that no pydantic model has, for /openapi.json: answers, and what bodies hold where their parser
looks by hand.

Rule: a shape admits what the server takes and nothing else. What hangs on the model, or on what else a
request says, is no shape; it is refused with 400 all the same.
"""

from typing import Any

from mlxspec.server.fields import MAX_PARTS, MAX_PROMPTS, MAX_STOP_CHARS, MAX_STOPS
from mlxspec.server.schema_anthropic import BLOCKS, IN_RESULT, SAYS
from mlxspec.server.schema_responses import FOREIGN, HOSTED, TEXTS

Json = dict[str, Any]
TYPES = ("string", "integer", "number", "boolean", "null", "object")
FALSY: Json = {"enum": [None, False, 0, "", [], {}]}


def form(told: Any) -> Json:
    """JSON Schema of a type's name or a constant, a set of constants, a tuple of alternatives, a list of one
    kind; a dict is a schema already."""
    if isinstance(told, dict):
        return told
    if isinstance(told, tuple):
        return {"anyOf": [form(one) for one in told]}
    if isinstance(told, list):
        return {"type": "array", "items": form(told[0])}
    if isinstance(told, set):
        return {"enum": sorted(told)}
    return {"type": told} if told in TYPES else {"const": told}


def of(**fields: Any) -> Json:
    """An object with these fields; one that ends in an underscore may be missing."""
    told = {name.removesuffix("_"): form(value) for name, value in fields.items()}
    return {"type": "object", "required": [n for n in fields if not n.endswith("_")], "properties": told}


# ---- inside bodies, by schema and field -----------------------------------------------------------------

TEXT = form(("string", [(of(type="text", text="string"), of(type="refusal", refusal="string"))]))
NAME = {"type": "string", "minLength": 1}
STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOPS = {"type": "array", "items": STOP, "maxItems": MAX_STOPS}
_CALLS = (FALSY, [of(id_={}, function=of(name="string", arguments_={}))])
_SAID: Json = {"function_call_": FALSY, "audio_": FALSY, "name_": ("string", "null")}
_SAID |= {"reasoning_content_": ("string", "null"), "tool_call_id_": ("string", "null")}
_NOT_SAID = {"refusal_": (FALSY, TEXT), "content_": "null"}
_MESSAGE = (
    of(role={"system", "developer", "user", "tool"}, content=TEXT, tool_calls_=FALSY, **_SAID),
    of(role="assistant", content=TEXT, tool_calls_=_CALLS, **_SAID),
    of(role="assistant", tool_calls_=_CALLS, **_NOT_SAID, **_SAID),
)
MESSAGES = {"minItems": 1} | form([_MESSAGE])
TOOLS = form(([of(type="function", function=of(name=NAME, parameters_=("object", "null")))], "null"))
CHOICES = {"auto", "none", "required"}
IDS: Json = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1
}  # fmt: skip
PROMPTS = form(("string", IDS, {**form([("string", IDS)]), "minItems": 1, "maxItems": MAX_PROMPTS}))

_KINDS: dict[type, str] = {str: "string", dict: "object"}
_BLOCK = {k: of(type=k, **{f: _KINDS[t] for f, t in needs.items()}) for k, needs in BLOCKS.items()}
_INNER = ("null", "string", [tuple(_BLOCK[kind] for kind in IN_RESULT)])
_BLOCK["tool_result"]["properties"]["content"] = form(_INNER)
TURNS = {"minItems": 1} | form(
    [tuple(of(role=r, content=("string", [tuple(_BLOCK[k] for k in kinds)])) for r, kinds in SAYS.items())]
)

_PARTS = [(of(type={*TEXTS} - {"refusal"}, text="string"), of(type="refusal", refusal="string"))]
_TEXT = form(("string", _PARTS))
_FULL = form(({**_TEXT["anyOf"][0], "minLength": 1}, {**_TEXT["anyOf"][1], "minItems": 1}))
_CALL: Json = {"call_id": "string", "name": "string", "namespace_": ("string", FALSY)}
ITEMS = (
    of(type_=("message", FALSY), role={"user", "assistant", "system", "developer"}, content=_TEXT),
    of(type="reasoning", content=_FULL),
    of(type="reasoning", content_=FALSY, summary_=(FALSY, _TEXT)),
    of(type="function_call", arguments="string", **_CALL),
    of(type="custom_tool_call", input="string", **_CALL),
    of(type={"function_call_output", "custom_tool_call_output"}, output=_TEXT, call_id="string"),
    of(type={*FOREIGN}),
    of(type="item_reference", id="string"),
)
_OTHER = {"type": "string", "not": {"enum": ["function", "custom", "namespace", *HOSTED]}}
_FUNCTION = of(type="function", name=NAME, parameters_=("object", FALSY))
_TOOL = (_FUNCTION, of(type="custom", name=NAME), of(type=_OTHER))
_SPACED = [(*_TOOL, of(type="namespace"))]  # a namespace in a namespace is not read
_ALLOWED = of(type="allowed_tools", mode_={"auto", "required"}, tools=[of(name="string")])
INSIDE: dict[tuple[str, str], Json] = {
    **dict.fromkeys((("Chat", "stop"), ("Completion", "stop"), ("Create", "stop")), form((STOP, STOPS))),
    ("Messages", "stop_sequences"): STOPS,
    **dict.fromkeys((("Chat", "messages"), ("Tokenize", "messages")), MESSAGES),
    ("Chat", "tools"): TOOLS,
    ("Chat", "tool_choice"): form((CHOICES, of(function=of(name="string")))),
    ("Completion", "prompt"): PROMPTS,
    ("Prediction", "content"): form(("string", {"maxItems": MAX_PARTS} | form([_BLOCK["text"]]))),
    **dict.fromkeys((("Prompt", "messages"), ("Messages", "messages")), TURNS),
    **dict.fromkeys((("Prompt", "system"), ("Messages", "system")), form(("string", [_BLOCK["text"]]))),
    ("Tool", "type"): form(("custom", "null")),
    ("Create", "input"): form(("string", {**form([ITEMS]), "minItems": 1})),
    ("Create", "tools"): form([(*_TOOL, of(type="namespace", name="string", tools=_SPACED))]),
    ("Create", "tool_choice"): form((CHOICES, of(type={"function", "custom"}, name="string"), _ALLOWED)),
    ("Create", "include"): form([{"type": "string", "not": {"const": "message.output_text.logprobs"}}]),
}
_COMPLETE = {"type": {"const": "json_schema"}}
WHOLE: dict[str, Json] = {  # what one field asks of another
    "ResponseFormat": {"if": {"properties": _COMPLETE}, "then": of(json_schema="object")},
    "TextFormat": {"if": {"properties": _COMPLETE}, "then": of(schema=("object", "boolean"))},
    "Tokenize": form(
        (
            of(prompt="string", messages_="null"),
            of(messages={"not": form("null")}, prompt_="null", tools_=TOOLS),
        )
    ),
}

# ---- answers --------------------------------------------------------------------------------------------

_COUNTS = of(prompt_tokens="integer", completion_tokens="integer", total_tokens="integer")
_HEAD: Json = {"id": "string", "created": "integer", "model": "string", "usage": _COUNTS}
_CALLED = of(id="string", type="function", function=of(name="string", arguments="string"))
_ANSWER = of(role="assistant", content=("string", "null"), tool_calls_=[_CALLED])
_END: Json = {"index": "integer", "logprobs": ("object", "null")}
_END |= {"finish_reason": {"stop", "length", "tool_calls"}}
_MODEL = of(id="string", object="model", created="integer", owned_by="string", status="string")
_DONE: Json = {"allOf": [_MODEL, of(seconds="number")]}
_MODEL_A = of(type="model", id="string", display_name="string", created_at="string")
_PAGE: Json = {"has_more": "boolean", "first_id_": "string", "last_id_": "string"}
_READ = {f: "integer" for f in ("input_tokens", "output_tokens")}
_CACHED = {f"cache_{did}_input_tokens": "integer" for did in ("creation", "read")}
_SAYS = [of(type={"text", "thinking", "tool_use"})]
_RESPONSE = of(
    id="string", object="response", created_at="integer", model="string", output=[of(type="string")],
    status={"completed", "incomplete"}, usage=of(**_READ, total_tokens="integer"), error="null",
)  # fmt: skip
ANSWERS: dict[str, Json] = {  # by the endpoint's name
    "chat": of(object="chat.completion", choices=[of(message=_ANSWER, **_END)], **_HEAD),
    "completions": of(object="text_completion", choices=[of(text="string", **_END)], **_HEAD),
    "messages": of(
        id="string", type="message", role="assistant", model="string", content=_SAYS,
        stop_reason="string", stop_sequence=("string", "null"), usage=of(**_READ, **_CACHED),
    ),
    "count_tokens": of(input_tokens="integer"),
    **dict.fromkeys(("create", "stored"), _RESPONSE),
    "deleted": of(id="string", object="response", deleted={"const": True}),
    "input_items": of(object="list", data=[of(id="string", type="string")], **_PAGE),
    "models": form((of(object="list", data=[_MODEL]), of(data=[_MODEL_A], **_PAGE))),
    "model": form((_MODEL, _MODEL_A)),
    **dict.fromkeys(("load", "unload"), _DONE),
    "tokenize": of(count="integer", max_model_len="integer", tokens=["integer"]),
    "detokenize": of(prompt="string"),
    "index": of(name="mlxspec", version="string", model="string", endpoints=["string"]),
    "health": of(status="ok", running="integer", waiting="integer", loaded=["string"], note_="string"),
    "now": of(version="string", pid="integer", models=["object"], requests=["object"]),
    "description": of(openapi="string", info="object", paths="object"),
}  # fmt: skip
UNHEALTHY = of(status="unhealthy", reason="string")
_KIND: Json = {"message": "string", "type": "string"}
ERRORS = {
    "Error": of(error=of(param=("string", "null"), code=("string", "null"), **_KIND)),
    "AnthropicError": of(type="error", error=of(**_KIND)),
}
