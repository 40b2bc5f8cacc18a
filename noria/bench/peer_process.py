"""A system that ours is measured against: a process of another environment, which keeps its models and takes its turn when a line asks it to.

One request a line on its standard input, one JSON object a line on its standard output; the first object, unasked, says what it is. What it writes to
standard error is ours too. Between its turns it computes nothing, so that nobody computes while the other is timed.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from noria.errors import ConfigError


@final
class PeerProcess:
    """The other side, under way. Owned by one thread; `ask` blocks. about: its first object."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None, "the process was started with pipes"
        assert process.stdout is not None, "the process was started with pipes"
        self._process, self._requests, self._answers = process, process.stdin, process.stdout
        self.about = self._read()

    def ask(self, request: str) -> dict[str, Any]:
        """Its answer to one line. Raises ConfigError if it has ended."""
        self._requests.write(f"{request}\n")
        self._requests.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ConfigError(f"the peer ended with exit code {self._process.wait()}: what it said is on standard error")
        answer: dict[str, Any] = json.loads(line)
        return answer


def require(python: Path, script: Path, *, make: str) -> None:
    """make: the target that makes the environment. Raises ConfigError where there is no such environment, or no checkout."""
    if not (python.exists() and script.exists()):
        raise ConfigError(f"the peer runs in an environment of a checkout, which is not there: run `make {make}` in the checkout")


@contextmanager
def running(python: Path, script: Path, arguments: Sequence[str | Path], *, make: str) -> Iterator[PeerProcess]:
    """The script under the environment's interpreter, ended afterwards. Raises as `require`."""
    require(python, script, make=make)
    with subprocess.Popen([python, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True) as process:
        try:
            yield PeerProcess(process)
        finally:
            process.kill()
