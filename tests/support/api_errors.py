"""The paths of all APIs, and the error that an answer of each tells."""

import json

from tests.support.scripted import Answer

CHAT, PLAIN, MESSAGE, RESPONSE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)


OLLAMA, FIM, EMBED = "/api/chat", "/v1/fim/completions", "/v1/embeddings"


def told(url: str, answer: Answer) -> str:
    """What a streamed answer ends with, or a whole one is, in its API's shape."""
    if url == OLLAMA:
        return str(json.loads(answer.body.splitlines()[-1])["error"])
    if answer.status != 200:
        error = answer.json["error"]
        assert answer.json.get("type") == ("error" if url == MESSAGE else None)
        kinds = ("api_error", "overloaded_error") if url == MESSAGE else ("server_error",)
        assert error["type"] in kinds
        return str(error["message"])
    last = answer.body.decode().strip().rpartition("\n\n")[2]
    data = json.loads(last.rpartition("data: ")[2])
    if url == RESPONSE:
        assert data["type"] == "response.failed" and data["response"]["status"] == "failed"
        return str(data["response"]["error"]["message"])
    assert last.startswith("event: error\n") if url == MESSAGE else last.startswith("data: ")
    return str(data["error"]["message"])
