"""The description at /openapi.json is valid, whole and true: schemathesis reads it and tries what it says."""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlxspec.config import Config
from mlxspec.server.app import create_app
from mlxspec.server.openapi import LEFT_OUT
from mlxspec.server.schema_openai import MOST_FIELDS
from tests.server.live import live
from tests.server.scripted import INFO, Answer, Connection, Scripted, server

pytestmark = pytest.mark.anyio

BIG = "/(chat/completions|completions|messages|messages/count_tokens|responses|tokenize)$"
# Rules that no schema can say, by what the refusal says; all are in docs/api.md.
RULES = re.compile(
    r"needs logprobs|is not n = |has no tokens|prompt is too long|ids run from|ends with the assistant's"
    r"|asks for a tool|is none of the (tools|items)|there are no tools|is there twice|holds a name twice"
    r"|with response_format"
    r"|holds nothing that can be read|is not stored here|with logprobs|is more than \d+ answers"
    r"|with a tool_choice|with tools|is no(t a)? (JSON schema|grammar|Lark)|send one message at least"
)
BODIES: dict[str, Any] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/completions": {"prompt": "hello"},
    "/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    "/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/responses": {"input": "hello"},
    "/models/load": {"model": "tiny"},
    "/models/unload": {"model": "tiny"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [64]},
}


async def described(at: Any, **headers: str) -> Any:
    return (await at.get("/openapi.json", headers=headers)).json


def keeps_to(document: Any, path: str, method: str, answer: Answer) -> None:
    """Asserts that an answer is one that the description has, and of its shape."""
    told = document["paths"][path][method]["responses"][str(answer.status)]
    for name, header in told.get("headers", {}).items():
        assert not header.get("required") or name.lower() in answer.headers
    kind = answer.headers["content-type"].partition(";")[0]
    schema = told["content"][kind]["schema"]
    jsonschema.validate(answer.json, {**schema, "components": document["components"]})


async def test_it_is_valid(tokenizer: Any, model_dir: Path) -> None:
    import schemathesis

    document = await described(server(tokenizer, model_dir))
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    refs = re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(document))
    assert set(refs) <= document["components"]["schemas"].keys() and len(refs) > 50
    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    links = re.findall(r"'links'.*?'operationId': '(\w+)'", str(document))
    assert links and set(links) <= set(ids)


async def test_it_has_every_route(tokenizer: Any, model_dir: Path) -> None:
    at = server(tokenizer, model_dir)
    told = {(p, m.upper()) for p, some in (await described(at))["paths"].items() for m in some}
    routes = [route for route in at.app.routes if route.name not in LEFT_OUT]
    assert told == {(route.path_format, m) for route in routes for m in route.methods - {"HEAD"}}
    for path, method in told:  # each says what it answers, and the two spellings say the same
        assert method == "GET" or (f"/v1{path.removeprefix('/v1')}", method) in told


async def test_it_needs_the_key_and_says_so(tokenizer: Any, model_dir: Path) -> None:
    at = server(tokenizer, model_dir, Config(api_key="secret"))
    assert (await at.get("/openapi.json")).status == 401
    assert (await at.get("/openapi.json", headers={"host": "evil.example"})).status == 403
    document = await described(at, authorization="Bearer secret")
    assert [*document["components"]["securitySchemes"]] == [
        *document["security"][0],
        *document["security"][1],
    ]
    for path, some in document["paths"].items():
        for one in some.values():
            assert ("401" in one["responses"]) == (one.get("security") != []) == (path != "/health")
    assert "security" not in await described(server(tokenizer, model_dir))
    keeps_to(document, "/v1/models", "get", await at.get("/v1/models"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("status", "script", "headers"),
    [
        ({200, 409}, {}, {}),
        ({200, 409}, {}, {"anthropic-version": "2023-06-01"}),
        ({200, 409, 429}, {"busy": 3}, {}),
        ({200, 409, 503}, {"lives": False}, {}),
        ({200, 409, 503}, {"wrong": "no space"}, {}),
        ({403}, {}, {"host": "evil.example"}),
        ({413}, {}, {"content-length": str(1 << 40)}),
    ],
)
async def test_what_is_sent_is_told(
    tokenizer: Any, model_dir: Path, path: str, status: set[int], script: Any, headers: dict[str, str]
) -> None:
    at = server(tokenizer, model_dir, **script)
    document = await described(at)
    for spelled in (path, f"/v1{path}"):
        answer = await at.post(spelled, BODIES[path], headers=headers)
        assert answer.status in status
        keeps_to(document, spelled, "post", answer)


async def test_a_bug_is_told_in_shape(tokenizer: Any, model_dir: Path, monkeypatch: Any) -> None:
    at = server(tokenizer, model_dir)
    document = await described(at)
    monkeypatch.setattr(at.engine, "models", lambda: 1 / 0)
    for path, body in BODIES.items():
        asked = Connection(at.app, path, body)
        with pytest.raises(ZeroDivisionError):  # Starlette raises it again, for the log
            await asked.answer()
        head = {k.decode(): v.decode() for k, v in asked.sent[0]["headers"]}
        keeps_to(document, path, "post", Answer(500, head, asked.body))


async def test_bounds_are_told(tokenizer: Any, model_dir: Path) -> None:
    """The largest that is told is taken, or refused for another reason; one more keeps to no schema."""
    at = server(tokenizer, model_dir)
    document = await described(at)
    body = {"$ref": "#/components/schemas/Completion", "components": document["components"]}
    crowd = {f"k{i}": 1 for i in range(MOST_FIELDS - 1)}
    for right, wrong in (
        ({"prompt": [2**31 - 1]}, {"prompt": [2**31]}),
        ({"prompt": [[2**31 - 1]]}, {"prompt": [[-1]]}),
        ({"prompt": "a", **crowd}, {"prompt": "a", **crowd, "one": 1}),
    ):
        jsonschema.validate(right, body)
        answer = await at.post("/v1/completions", right)
        assert answer.status == 200 or RULES.search(answer.error["message"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, body)
        answer = await at.post("/v1/completions", wrong)
        assert answer.status == 400 and not RULES.search(answer.error["message"])


# ---- schemathesis ---------------------------------------------------------------------------------------


class Tried:
    """What came of a run: (path and method, status) counted, what failed, and what took long."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.failed: list[str] = []
        self.slowest = (0.0, "")


def tries(base: str, examples: int, only: str = "", without: str = "", coverage: bool = True) -> Tried:
    """Coverage, fuzzing and stateful phases against a server. Operations are told by regular expressions."""
    import schemathesis
    from schemathesis.engine import events, from_schema

    schema = schemathesis.openapi.from_url(f"{base}/openapi.json", config=schemathesis.Config())
    schema = schema.exclude(path="/page/events")  # it never ends; tests/server/test_page.py reads it
    schema = schema.include(path_regex=only) if only else schema
    schema = schema.exclude(path_regex=without) if without else schema
    schema.config.seed = 1
    schema.config.phases.coverage.enabled = coverage
    schema.config.generation.max_examples = examples
    schema.config.generation.deterministic = True
    schema.config.request_timeout = 20
    schema.config.continue_on_failure = True
    schema.config.checks.positive_data_acceptance.expected_statuses += ["400"]  # looked at below, by RULES
    return _tried(from_schema(schema).execute(), events)


def _tried(stream: Any, events: Any) -> Tried:
    made = Tried()
    for event in stream:
        if isinstance(event, events.NonFatalError | events.FatalError):
            made.failed.append(str(getattr(event, "info", None) or event))
        for case_id, found in event.recorder.interactions.items() if hasattr(event, "recorder") else ():
            case = event.recorder.cases[case_id].value
            if found.response is None:
                made.failed.append(f"no response: {case.as_curl_command()}")
                continue
            made.statuses[case.operation.label, found.response.status_code] += 1
            took = (found.response.elapsed, case.as_curl_command()[:500])
            made.slowest = max(made.slowest, took)
            said = found.response.content.decode("utf-8", "replace")[:500]
            valid = case.meta.generation.mode.is_positive and found.response.status_code == 400
            if valid and not RULES.search(said):
                made.failed.append(f"valid, yet refused:\n{took[1]}\n{said}")
            for check in event.recorder.checks.get(case_id, ()):
                if check.failure_info:
                    failure = check.failure_info.failure
                    made.failed.append(f"{check.name}: {failure.message}\n{took[1]}\n{said}")
    return made


@pytest.fixture
def base(agent: tuple[Any, Path]) -> Iterator[str]:
    """A server, and a hook that leads what is tried beyond the first lines: to models and responses that are
    there, past rules that no schema can say, three times of four."""
    import httpx
    import schemathesis

    tokenizer, path = agent
    engine = Scripted(tokenizer, info=replace(INFO, context=1 << 20))
    with live(create_app(engine, tokenizer, path, Config(log_level="error"))) as at:
        kept = httpx.post(f"{at}/v1/responses", json={"input": "hello"}).json()["id"]

        @schemathesis.hook
        def before_call(context: Any, case: Any, kwargs: Any) -> None:
            often = zlib.crc32(repr((case.body, case.query, case.path_parameters)).encode()) % 4
            if isinstance(case.body, dict):
                if often and isinstance(case.body.get("model"), str):
                    case.body["model"] = "default"
                if case.meta.generation.mode.is_positive:
                    case.body = whole(case.body)
                    for name in RULED if often else ():
                        case.body.pop(name, None)
                    for name in {"prompt", "tokens"} & case.body.keys() if often else ():
                        case.body[name] = known(case.body[name])
            stored = "id" in case.path_parameters and case.method == "GET"
            if often and stored and case.meta.phase.name.value != "stateful":
                case.path_parameters["id"] = kept

        yield at
        schemathesis.hooks.unregister_all()


RULED = (
    "stop_token_ids tool_choice grammar logit_bias top_logprobs best_of echo previous_response_id"
    " response_format text output_config"
).split()


def whole(value: Any) -> Any:
    """The same with whole numbers spelled so: to JSON Schema 5.0 is one, here it is refused."""
    if isinstance(value, dict):
        return {name: whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def known(value: Any) -> Any:
    """The same with token ids that the model has, where they could be some model's."""
    if isinstance(value, list):
        return [known(one) for one in value]
    return value % 256 if type(value) is int and INFO.vocab <= value < 2**31 else value


def test_a_little_of_everything(base: str) -> None:
    small = tries(base, 2, only="^(/v1/|/[a-z.]*$)", without=BIG)
    large = tries(base, 4, only="^/v1/(chat|completions|messages|responses|tokenize)", coverage=False)
    assert not small.failed + large.failed, "\n\n".join(small.failed + large.failed)
    assert {status for _, status in small.statuses} >= {200, 400, 404, 405}
    assert {status for _, status in large.statuses} >= {200, 400}


@pytest.mark.slow
def test_everything(base: str) -> None:
    found = tries(base, 100)
    print(sum(found.statuses.values()), sorted(found.statuses.items()), found.slowest)
    assert not found.failed, "\n\n".join(found.failed)
    answered = {label for label, status in found.statuses if status == 200}
    assert answered >= {f"POST {at}{path}" for path in BODIES for at in ("", "/v1")}
    assert found.slowest[0] < 10
