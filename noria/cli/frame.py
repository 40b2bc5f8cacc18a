"""What every command stands in: refusals become one line and an exit code, logs go to a file, options that several commands have.

Exit codes: 0 all went well; 1 a run failed, or a check did; 2 the command or a file could not be used; 130 stopped by a signal.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from noria.errors import NoriaError

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED, UNUSABLE, STOPPED = 1, 2, 130

EXIT_CODES = "Exit codes: 0 all went well, 1 a run failed, 2 the command or a file cannot be used, 130 stopped (go on with --resume)."

DEFAULT_STATE_DIR = Path(".noria")

IMPORTED_S = time.monotonic()

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on one line instead of tables.")]
StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of database, adapters and reports.", show_default=".noria")]
ServerFile = Annotated[Path | None, typer.Option(metavar="SERVER.toml", help="Server file. Without one, base and sizes follow the runs.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name.")]


def examples(*commands: str) -> str:
    """An epilog: each command on its own line (typer makes one line break of two), then the exit codes."""
    return "\n\n".join(("Examples:", *commands, EXIT_CODES))


@contextmanager
def refusals() -> Iterator[None]:
    """What noria refuses becomes one line and exit code 2; SIGINT or SIGTERM outside training becomes 130."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except NoriaError as error:
        print_error(error)
        raise typer.Exit(UNUSABLE) from error
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(STOPPED) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_error(error: BaseException, *, about: str = "") -> None:
    """One line on standard error: the error's code, and what is wrong. about: which run, unless the message says so."""
    code = error.code if isinstance(error, NoriaError) else "unexpected"
    text = str(error) if isinstance(error, NoriaError) else f"{type(error).__name__}: {error}"
    typer.echo(f"error[{code}]: " + (text if about in text else f"{about}: {text}"), err=True)


def show(value: Any, table: "RenderableType", *, as_json: bool) -> None:
    """The result of a command: `value` as one line of JSON, or the table."""
    if as_json:
        typer.echo(json.dumps(value, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(table)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Logs go into a file, since the screen belongs to the table. Raises StorageError."""
    from noria.observe import configure_logging
    from noria.storage import storing

    with storing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a", encoding="utf-8")
    with opened as stream:
        configure_logging(as_json=True, stream=stream)
        try:
            yield
        finally:
            configure_logging()


def elapsed_s() -> float:
    """Seconds since the process began; where the system does not say, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): clock ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - IMPORTED_S


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
