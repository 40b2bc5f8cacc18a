"""Limits of `docs/` and the conventions that no linter knows: sizes, arguments, module-level state, addresses that hold on one machine only.

usage: python scripts/check_limits.py [ROOT]      prints one line per violation; exits 1 if there is any
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_FILE_LINES: Final = 500
MAX_FUNCTION_LINES: Final = 60
MAX_POSITIONAL_ARGUMENTS: Final = 5
MUTABLE_CALLS: Final = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})

_FOLDERS: Final = "|".join(("home", "root", "opt", "work", "tmp", "Users", "mnt", "srv"))
_HOSTS: Final = "|".join((r"https?://[^\s\"')]+/(?:simple|packages)\b", "index" + "-url", "find" + "-links"))
LOCAL_PATH: Final = re.compile(rf"(?<![\w.~$}}/-])/(?:{_FOLDERS})/\w|(?:{_HOSTS})")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, violation) pairs of one Python file."""
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        yield MAX_FILE_LINES, f"{lines} lines, at most {MAX_FILE_LINES}"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from _check_function(node)
        elif isinstance(node, ast.Global):
            yield node.lineno, "global statement"
    for statement in tree.body:
        yield from _check_module_state(statement)


def check_text(source: str) -> Iterator[tuple[int, str]]:
    """(line, violation) pairs of any text file: folders of one machine, addresses of package hosts."""
    for number, line in enumerate(source.splitlines(), start=1):
        if match := LOCAL_PATH.search(line):
            yield number, f"{match.group()!r} holds on one machine or names a package host"


def _check_function(node: Function) -> Iterator[tuple[int, str]]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    if count > MAX_POSITIONAL_ARGUMENTS and not node.name.startswith("test_"):  # a test's arguments are fixtures and parameters
        yield node.lineno, f"{node.name} has {count} positional arguments, at most {MAX_POSITIONAL_ARGUMENTS}"


def _check_module_state(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    """A table is a filled literal under a capital name; an empty container, or one under a small name, is state."""
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return
    for target in targets:
        if isinstance(target, ast.Name) and not target.id.startswith("__") and _is_state(target.id, value):
            yield statement.lineno, f"module-level mutable state {target.id!r}"


def _is_state(name: str, value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in MUTABLE_CALLS
    if isinstance(value, ast.Dict):
        return not value.keys or not name.isupper()
    if isinstance(value, ast.List | ast.Set):
        return not value.elts or not name.isupper()
    return isinstance(value, ast.ListComp | ast.SetComp | ast.DictComp) and not name.isupper()


def _files(root: Path) -> list[Path]:
    """Files that git tracks or would add."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(path for name in listed.split("\0") if name and (path := root / name).is_file())


def main(root: Path) -> int:
    """Check every file; returns the exit status."""
    count = 0
    for path in _files(root):
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        found = list(check_text(source)) + (list(check_python(source)) if path.suffix == ".py" else [])
        for line, message in found:
            print(f"{path.relative_to(root)}:{line}: {message}")
        count += len(found)
    print(f"limits: {count} violations" if count else "limits: ok")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
