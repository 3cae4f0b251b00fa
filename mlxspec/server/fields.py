"""The fate of every field that is not used: harmless for the reason given here, or refused with the
mend.

Rule: nothing is silently ignored. What would change an answer is refused, what nobody knows is
reported.
"""

from typing import Any

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_PROMPTS = 32
MAX_BIASES = 1024
MAX_PARTS = 1024
MAX_ITEMS = 10_000  # messages, or tools
INT64 = 2**63

# Accepted without effect. None of them could change the text of an answer.
HARMLESS = {
    "user": "who asks makes no difference here",
    "safety_identifier": "who asks makes no difference here",
    "store": "nothing is ever stored",
    "metadata": "it goes with storing",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache finds shared prompts by itself",
    "prompt_cache_retention": "the prefix cache keeps what fits",
}
HARMLESS_INSIDE = {
    "stream_options": {"include_obfuscation"},
    "messages[]": {
        "role",
        "content",
        "name",
        "reasoning_content",
        "refusal",
        "id",
        "status",
        "annotations",
    }
    | {
        "tool_calls",
        "tool_call_id",
        "function_call",
        "audio",
    },  # the last two are refused if they hold something
    "messages[].content[]": {"type", "text", "refusal", "cache_control", "annotations"},
    "tools[]": {"type", "function"},
    "tools[].function": {"name", "description", "parameters", "strict"},
    "response_format": {"type", "json_schema"},
    "prediction": {"type", "content"},
    "prediction.content[]": {"type", "text"},
}

Refusals = dict[str, tuple[tuple[Any, ...], str]]

# Would change the answer, and the endpoint has no such field: the values that ask for nothing, and
# the mend.
REFUSED: Refusals = {
    **dict.fromkeys(
        ("tools", "tool_choice"), (([], "none", "auto"), "send it to /v1/chat/completions")
    ),
    "parallel_tool_calls": ((True,), "send it to /v1/chat/completions"),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tool_choice"),
    **dict.fromkeys(
        ("response_format", "grammar"), (({"type": "text"},), "send it to /v1/chat/completions")
    ),
    "modalities": ((["text"],), "answers are text; send ['text'] or leave it out"),
    "audio": ((), "answers are text; leave it out"),
    "web_search_options": ((), "this server searches nothing; leave it out"),
    "verbosity": (("medium",), "the model has no such setting; ask for it in a message"),
    "suffix": (("",), "text is completed at its end only; leave it out"),
    "min_tokens": ((0,), "an answer may be short; ban the end token with logit_bias instead"),
    "bad_words": (([],), "ban their tokens with logit_bias instead"),
    "allowed_token_ids": (([],), "use logit_bias instead"),
    "use_beam_search": ((False,), "beam search is not supported; leave it out"),
    "length_penalty": ((1, 1.0), "beam search is not supported; leave it out"),
    "prompt_logprobs": ((0,), "only generated tokens have log-probabilities; leave it out"),
    "include_stop_str_in_output": ((False,), "append the stop string yourself"),
    "skip_special_tokens": (
        (False,),
        "special tokens, but the last, are shown as text; leave it out",
    ),
    "draft_model": ((), "the server chooses how it drafts; leave it out"),
    "adapters": ((), "serve the model with its adapter instead"),
    "messages": ((), "send it to /v1/chat/completions"),
    "prompt": ((), "send it to /v1/completions"),
    "system": ((), "send it as a message with the role system"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), ((), "send max_tokens instead")),
    "repeat_penalty": ((1, 1.0), "send repetition_penalty instead"),
    "typical_p": ((1, 1.0), "use top_k, top_p or min_p instead"),
    "echo": ((False,), "an answer holds what is new; prepend the prompt yourself"),
    "best_of": ((1,), "nothing is ranked; ask for n answers"),
    "top_logprobs": ((0,), "send their number as logprobs"),
    "continue_final_message": ((False,), "render the text yourself and send it to /v1/completions"),
    "add_generation_prompt": ((True,), "render the text yourself and send it to /v1/completions"),
    "chat_template": ((), "render the text yourself and send it to /v1/completions"),
    "documents": (([],), "put their text into a message"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    **dict.fromkeys(
        ("thinking", "enable_thinking", "reasoning", "reasoning_effort", "chat_template_kwargs"),
        (
            ({},),
            "send to /v1/chat/completions what the model's template reads, as chat_template_kwargs",
        ),
    ),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs".split(),
        ((), "send response_format or grammar to /v1/chat/completions"),
    ),
    **dict.fromkeys(
        ("mirostat", "xtc_probability", "dry_multiplier"),
        ((0, 0.0), "use top_k, top_p or min_p instead"),
    ),
}
# Those that would change the tokens of messages.
RENDERING = {
    name: REFUSED[name]
    for name in "functions continue_final_message chat_template documents truncate_prompt_tokens"
    " thinking enable_thinking reasoning system".split()
}

# What is wrong with a value and the mend, by pydantic's names for it.
WRONG = {
    "int_type": "is not a whole number; send one",
    "int_from_float": "is not a whole number; send one",
    "float_type": "is not a number; send one",
    "finite_number": "is out of range; send a finite number",
    "bool_type": "is neither true nor false; send one of them",
    "string_type": "is not a string; send one",
    "list_type": "is not a list; send one",
    "dict_type": "is not an object; send one",
    "model_type": "is not an object; send one",
    "literal_error": "is not supported; send {expected}",
    "too_short": "is empty; send {min_length} at least",
    "too_long": "holds more than {max_length}; leave some out",
    "greater_than_equal": "is too small; send {ge} or more",
    "less_than_equal": "is too large; send {le} or less",
    "less_than": "is too large; send less than {lt}",
}


def stops(value: list[str]) -> list[str]:
    """What is checked of a field that is used, `stop` or `stop_sequences`. Raises ValueError."""
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in value):
        raise ValueError(
            f"holds an empty or overlong string; send 1 to {MAX_STOP_CHARS} characters each"
        )
    return value
