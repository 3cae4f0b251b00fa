"""The tests of the server run on asyncio, with the tiny tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from mlxspec.text.chat import load_tokenizer
from tests.support.tiny_tokenizer import AGENT, CALLS, THINK, save_tokenizer


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tokenizer that knows tools and reasoning, and its directory."""
    path = save_tokenizer(tmp_path_factory.mktemp("agent"), template=AGENT, extra=THINK + CALLS)
    return load_tokenizer(path), path
