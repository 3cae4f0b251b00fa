"""Downloads a model in a process of its own: python -m mlxspec.model.puller NAME [HEAD].

Rule: it ends when the process that started it closes its stdin or dies, and leaves no part of a
file: the hub's client could not use it again. Its last line on stderr is why it failed.
"""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from mlxspec.model.hub import hub_folder, resolve
from mlxspec.types import UnsupportedModel


def main(name: str, head: str = "") -> None:
    """Download what is missing of a model and of its head. Exits with 1 and the reason."""

    def parts() -> set[Path]:
        return {
            file for each in (name, head) for file in hub_folder(each).glob("blobs/*.incomplete")
        }

    def end_with_parent() -> None:
        os.read(0, 1)  # sys.stdin has a lock, which would hold up the exit
        for file in parts() - others:
            file.unlink(missing_ok=True)
        os._exit(1)

    others = parts()
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        resolve(name, Path(), False)
    except UnsupportedModel as error:
        sys.exit(str(error))
    if head:
        with suppress(UnsupportedModel):  # the model runs without it, and says so when it loads
            resolve(head, Path(), False, draft=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
