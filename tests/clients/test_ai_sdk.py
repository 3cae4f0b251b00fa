"""Vercel's AI SDK, which shows an object and a call's input while they grow."""

import json

import pytest

from tests.clients import install
from tests.clients.conftest import KEY, World
from tests.clients.script import call

pytestmark = pytest.mark.slow

PACKAGES = [
    ("ai", "7.0.173"),
    ("@ai-sdk/openai-compatible", "3.0.92"),
    ("@ai-sdk/anthropic", "4.0.105"),
]
GIVEN = {"title": "A greeting", "steps": ["Read hello.py, and mend it.", "Run it."]}
PROGRAM = """
const [kind, baseURL, apiKey, ...paths] = process.argv.slice(1);
const [ai, compatible, anthropic] = await Promise.all(paths.map((path) => import(path)));
const model = kind === "chat"
  ? compatible.createOpenAICompatible({ name: "local", baseURL, apiKey })("scripted/coder-1b")
  : anthropic.createAnthropic({ baseURL, apiKey })("scripted/coder-1b");
const steps = { type: "array", items: { type: "string" } };
const inputSchema = ai.jsonSchema({
  type: "object",
  properties: { title: { type: "string" }, steps },
  required: ["title", "steps"],
});
const tools = { plan: ai.tool({ description: "Plans.", inputSchema }) };
let pieces = 0, text = "", input = null;
for await (const part of ai.streamText({ model, tools, prompt: "Plan it." }).fullStream) {
  if (part.type === "tool-input-delta") { pieces += 1; text += part.delta; }
  if (part.type === "tool-call") input = part.input;
  if (part.type === "error") throw part.error;
}
console.log(JSON.stringify({ pieces, text, input }));
"""


@pytest.mark.parametrize("kind", ["chat", "anthropic"])
def test_the_input_of_a_call_grows(kind: str, world: World) -> None:
    folders = [install.npm(*package).parent for package in PACKAGES]
    paths = []
    for (name, _), folder in zip(PACKAGES, folders, strict=True):
        entry = json.loads((folder / name / "package.json").read_text())["exports"]["."]
        paths.append(str(folder / name / entry["import"]))
    world.player.play = lambda prompt: call("plan", GIVEN)
    node = str(install.node("22") / "node")
    words = [node, "--input-type=module", "-e", PROGRAM, kind, f"{world.url}/v1", KEY, *paths]
    said = json.loads(world.run([], *words, NODE_NO_WARNINGS="1"))
    assert said["input"] == json.loads(said["text"]) == GIVEN and said["pieces"] > 10
