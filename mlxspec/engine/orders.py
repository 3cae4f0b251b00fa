"""What the engine thread is asked to do with a model, and its answers."""

from dataclasses import dataclass
from typing import Any

from mlxspec.types import Finish, Output, Request


@dataclass(frozen=True, slots=True, eq=False)
class LoadCommand:
    """Load a model, and pin or unpin it unless `pin` is None; or unload it, or change whether it is
    served."""

    model: str
    load: bool
    pin: bool | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A command was carried out, or failed because of `error`."""

    command: LoadCommand
    error: str = ""


Order = Request | LoadCommand
Results = list[Output | Ended]


def end_of(order: Order, finish: Finish, **reason: Any) -> Results:
    """The end of a command, or the final output of each choice of a request."""
    if isinstance(order, LoadCommand):
        return [Ended(order, reason["error"])]
    return [Output(order.id, index, (), finish=finish, **reason) for index in range(order.n)]
