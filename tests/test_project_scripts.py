"""The project's own checks: each limit is noticed when it is passed, and only then."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_limits", ROOT / "scripts" / "check_limits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(*, lines: int = 3, arguments: str = "a, b, c, d, e", name: str = "f") -> str:
    return f"def {name}({arguments}):\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ("x = 1\n" * 501, "501 lines"),
        (function(lines=61), "61 lines"),
        (function(arguments="a, b, c, d, e, f"), "6 positional"),
        ("class C:\n    async def f(self, a, b, c, d, e, f): ...\n", "6 positional"),
        ("def f():\n    global x\n    x = 1\n", "global statement"),
        ("cache = {}\n", "'cache'"),
        ("CACHE: dict[str, int] = {}\n", "'CACHE'"),
        ("SEEN = set()\n", "'SEEN'"),
        ("names = ['a']\n", "'names'"),
    ],
)
def test_each_limit_is_noticed(limits: ModuleType, source: str, violation: str) -> None:
    assert [violation in message for _, message in limits.check_python(source)] == [True]


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * 500,
        function(lines=60),
        function(arguments="a, b, c, d, e, *, f, g"),
        function(arguments="a, b, c, d, e, f", name="test_many_fixtures"),
        "class C:\n    def f(self, a, b, c, d, e): ...\n",
        "TABLE = {'a': 1}\n_KINDS: dict[str, int] = {'b': 2}\n__all__ = ['x']\nSIZES = (1, 2)\n",
        "def f():\n    seen = []\n    return seen\n",
    ],
)
def test_what_is_inside_the_limits_passes(limits: ModuleType, source: str) -> None:
    assert list(limits.check_python(source)) == []


@pytest.mark.parametrize("text", ["see /" + "home/someone/x", "--index" + "-url=", "https://packages.example" + "/simple", "'/" + "tmp/a'"])
def test_addresses_of_one_machine_are_noticed(limits: ModuleType, text: str) -> None:
    assert len(list(limits.check_text(f"first line\n{text}\n"))) == 1


def test_relative_paths_and_routes_pass(limits: ModuleType) -> None:
    assert list(limits.check_text("~/home/x src/home/x GET /v1/episodes $HOME/srv/x ./mnt/x and/opt/out\n")) == []


def test_the_newest_usable_python_is_found(tmp_path: Path) -> None:
    for minor in (11, 13):
        fake = tmp_path / f"python3.{minor}"
        fake.write_text(f"#!/bin/sh\necho {minor} {fake}\n")
        fake.chmod(0o755)
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)

    def find(*minors: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "none")}
        return subprocess.run([ROOT / "scripts" / "find_python.sh", *minors], env=environment, capture_output=True, text=True, check=False)

    assert find().stdout.strip() == str(tmp_path / "python3.13")
    assert find("11", "13").stdout.strip() == str(tmp_path / "python3.11")
    assert find("99").returncode == 1
    assert "Python 3.99" in find("99").stderr


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    for needed, file in ((project["project"]["dependencies"] + groups["dev"], "constraints.txt"), (groups["ref"], "constraints-ref.txt")):
        pinned = {line.split("==")[0] for line in (ROOT / file).read_text().splitlines() if "==" in line}
        assert {name.split(">")[0].split("=")[0].replace("_", "-") for name in needed} <= pinned


def test_this_interpreter_is_supported() -> None:
    assert (3, 11) <= sys.version_info < (3, 14)
