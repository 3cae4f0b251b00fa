"""What the workloads need to know of a run and its model, and the texts that they are made of."""

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bench.http import words
from mlxspec.model.checkpoint import context_of
from mlxspec.text.chat import Tokenizer, encode

MOST_CONTEXT = 16_384  # tokens of the last turn of a session, where the window allows it
LIBRARY = ("argparse.py", "ast.py", "asyncio/tasks.py", "bdb.py", "calendar.py", "cmd.py", "csv.py")


@dataclass(slots=True)
class Setting:
    """`seed` is of the run: prompts that no cache has seen.
    `scale` shortens everything for a quick look; `window` is the model's, in tokens."""

    tokenizer: Tokenizer
    window: int
    cache_dir: Path
    seed: int
    scale: float = 1.0

    def tokens(self, count: int) -> int:
        return max(8, int(count * self.scale))

    def share(self, part: float) -> int:
        """Tokens: a part of the window that is used, which has room for answers too."""
        return int(
            part * min(MOST_CONTEXT, self.window * 15 // 16) * (self.scale if self.scale < 1 else 1)
        )

    def long(self, count: int, seed: int) -> str:
        """Text of about `count` tokens; its words are one token each in most tokenizers."""
        per_word = len(encode(self.tokenizer, words(200, 1), special=False)) / 200
        return words(int(count / per_word), seed)

    def library(self) -> list[int]:
        """Tokens of the standard library's sources, enough for a session."""
        ids: list[int] = []
        for name in LIBRARY:
            source = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text("utf-8")
            ids += encode(self.tokenizer, source, special=False)
            if len(ids) > MOST_CONTEXT:
                break
        return ids


def window_of(model: Path) -> int:
    return context_of(json.loads((model / "config.json").read_text("utf-8")))
