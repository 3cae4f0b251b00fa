"""The workload `edits`: rename a name throughout a function or class of Python's own standard
library.

Rule: the same interpreter gives the same prompts, and nothing is fetched.
"""

import ast
import re
import sysconfig
from pathlib import Path

from mlxspec.types import UserError

# (file, top-level function or class, old name, new name); 40 to 120 lines each
RENAMES = (
    ("copy.py", "deepcopy", "memo", "seen"),
    ("shutil.py", "move", "real_dst", "target"),
    ("textwrap.py", "dedent", "margin", "prefix"),
    ("heapq.py", "merge", "value", "item"),
    ("posixpath.py", "expandvars", "name", "variable"),
    ("csv.py", "DictReader", "row", "record"),
    ("urllib/parse.py", "parse_qsl", "separator", "delimiter"),
    ("json/scanner.py", "py_make_scanner", "nextchar", "char"),
    ("quopri.py", "decode", "new", "decoded"),
    ("linecache.py", "updatecache", "fullname", "full_path"),
    ("inspect.py", "getcallargs", "arg2value", "values_by_name"),
    ("difflib.py", "unified_diff", "lineterm", "ending"),
    ("pkgutil.py", "walk_packages", "info", "entry"),
    ("base64.py", "a85decode", "curr", "group"),
    ("calendar.py", "TextCalendar", "width", "columns"),
    ("sched.py", "scheduler", "action", "callback"),
)


def edits() -> list[tuple[str, str]]:
    """Name and instruction of each edit, in a fixed order.

    What this version of Python does not have is left out. Raises UserError where there is no source
    at all."""
    found = []
    for file, name, old, new in RENAMES:
        code = definition(Path(sysconfig.get_paths()["stdlib"]) / file, name)
        if code is None or not re.search(rf"\b{old}\b", code):
            continue
        text = (
            f"```python\n{code}\n```\n\nRename `{old}` to `{new}` everywhere in this code."
            " Answer with the whole code, changed in nothing else."
        )
        found.append((f"{file}:{name}", text))
    if not found:
        raise UserError(
            "workload edits: this Python has no source of its standard library; name another workload,"
            " or run mlxspec with an interpreter that has its .py files"
        )
    return found


def definition(file: Path, name: str) -> str | None:
    """The source lines of a top-level function or class with its decorators; None where it is not
    there."""
    try:
        source = file.read_text("utf-8")
    except OSError:
        return None
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return None
