"""The edits: of this interpreter's own library, the same every time."""

import ast
import re
from pathlib import Path

import pytest

from mlxspec.bench import edits
from mlxspec.types import UserError


def test_every_edit_is_code_that_has_the_name_and_not_yet_the_new_one() -> None:
    found = edits.edits()
    assert found == edits.edits()
    assert len(dict(found)) == len(found) >= 12
    for name, text in found:
        old, new = re.findall(r"`(\w+)`", text.rpartition("\n\n")[2])
        code = re.fullmatch(r"```python\n(.*)\n```\n\nRename .*", text, re.S)
        assert code and isinstance(ast.parse(code[1]).body[0], ast.FunctionDef | ast.ClassDef), name
        assert 36 <= len(code[1].splitlines()) <= 125, name
        assert len(re.findall(rf"\b{old}\b", code[1])) >= 2 and not re.search(
            rf"\b{new}\b", code[1]
        ), name


def test_a_definition_has_its_decorators_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("import x\n\n@x.y\n@x.z\ndef f():\n    return 1\n\ndef g(): ...\n")
    assert edits.definition(file, "f") == "@x.y\n@x.z\ndef f():\n    return 1"
    assert edits.definition(file, "h") is None and edits.definition(tmp_path / "n.py", "f") is None


def test_a_python_without_its_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"workload edits: .*no source"):
        edits.edits()


def test_what_this_version_does_not_have_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy.py").write_text("def deepcopy(memo):\n    return memo\n")
    (tmp_path / "shutil.py").write_text("def move(a):\n    return a\n")  # without the name
    monkeypatch.setattr(edits.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [name for name, _ in edits.edits()] == ["copy.py:deepcopy"]
