"""aider: no tools; the model answers with whole files, and is asked for a commit message."""

import subprocess

import pytest

from tests.clients import install
from tests.clients.conftest import MENDED, World

pytestmark = pytest.mark.slow


def test_mends_a_file(world: World) -> None:
    path = [install.pip("aider-chat", "0.86.2")]
    (world.home / ".aider.conf.yml").write_text(
        "openai-api-base: http://127.0.0.1:9\nmodel: gpt-9\n"
    )
    world.player.play = lambda prompt: f"I fix it.\n\nhello.py\n```\n{MENDED}```\n"
    words = ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-release-notes"]
    out = world.launch(
        path,
        "aider",
        *words,
        "--message",
        "Fix it",
        "hello.py",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert "Applied edit to hello.py" in out
    assert world.file.read_text() == MENDED
    streamed, commit = world.asked("/v1/chat/completions")
    assert streamed["stream"] and not commit.get("stream")
    log = subprocess.run(
        ["git", "log", "--oneline"], cwd=world.project, capture_output=True, text=True
    )
    assert len(log.stdout.splitlines()) == 2
