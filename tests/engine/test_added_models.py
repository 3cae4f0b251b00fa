"""Models that a running engine is given, and that are taken from it."""

from dataclasses import replace
from typing import Any

from mlxspec.engine.manager import ModelManager, ModelSlot
from mlxspec.engine.orders import Ended, LoadCommand
from mlxspec.types import ModelInfo, Output, UnsupportedModel
from tests.support import tiny

INFO = ModelInfo("", 512, tiny.VOCAB, "rows", 8, 0, 1, 1)


def slot(name: str) -> ModelSlot:
    if name == "broken":
        raise UnsupportedModel("its files cannot be read")

    def start() -> Any:
        return tiny.engine(tiny.model("llama"), vocab=tiny.VOCAB), replace(INFO, name=name)

    return ModelSlot(start, replace(INFO, name=name))


def make(**kw: Any) -> ModelManager:
    made = ModelManager([slot("a")], make_slot=slot, **kw)
    made.launch()
    return made


def change(made: ModelManager, how: str, name: str) -> str:
    """The error of an addition or a removal; "" if there was none."""
    command = LoadCommand(name, False)
    args = (name,) if how == "add" else ()
    [ended] = getattr(made, how)(command, *args)
    assert isinstance(ended, Ended) and ended.command is command
    return ended.error


def ask(made: ModelManager, name: str, model: str) -> list[Output]:
    outputs = made.submit(replace(tiny.request(name, [1, 2, 3], 4), model=model))
    while made.busy:
        outputs += made.step()
    return [output for output in outputs if isinstance(output, Output)]


def test_an_added_model_is_loaded_by_its_first_request() -> None:
    made = make()
    assert change(made, "add", "b") == "" and [*made.snapshot()] == ["a", "b"]
    assert made.snapshot()["b"].status == "unloaded"
    assert ask(made, "r", "b")[-1].finish == "length" and made.slots[1].loads == 1
    assert change(made, "add", "b") == "" and [*made.snapshot()] == ["a", "b"]


def test_what_cannot_be_added_is_told() -> None:
    made = make()
    assert "cannot be read" in change(made, "add", "broken")
    made.make_slot = None
    assert "restart" in change(made, "add", "b") and [*made.snapshot()] == ["a"]


def test_a_model_is_removed_once_it_is_unloaded() -> None:
    made = make()
    change(made, "add", "b")
    assert "first model" in change(made, "remove", "a")
    made.submit(LoadCommand("b", True))
    assert "is loaded" in change(made, "remove", "b")  # it is about to be
    while made.busy:
        made.step()
    assert "is loaded" in change(made, "remove", "b")
    made.submit(LoadCommand("b", False))
    while made.busy:
        made.step()
    assert change(made, "remove", "b") == "" == change(made, "remove", "b")
    assert [*made.snapshot()] == ["a"]


def test_a_request_for_a_removed_model_is_answered() -> None:
    """It may have come before its client could know."""
    made = make()
    change(made, "add", "b")
    change(made, "remove", "b")
    [output] = ask(made, "r", "b")
    assert output.finish == "error" and "no longer served" in output.error
    [ended] = made.submit(LoadCommand("b", True))
    assert isinstance(ended, Ended) and "no longer served" in ended.error
    assert ask(made, "s", "a")[-1].finish == "length"
