"""`noria.train(...)`: a run in this process, from a script or a notebook, and what came of it.

    result = noria.train(environment=MyTask, model="smollm2-135m", steps=24, sampling={"max_tokens": 5, "stop": ["\\n"]})
    result.plot()

The server has an event loop of its own in a thread, so that it works where one is running already, as in every notebook; the caller's thread waits,
and a KeyboardInterrupt there becomes the orderly end of the run, after which it is raised.
"""

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, final

from matplotlib.figure import Figure
from pydantic import BaseModel
from rich.console import Console

from noria.actors.load import environment_factory
from noria.config import RunConfig, ServerConfig, parse
from noria.errors import ConfigError
from noria.protocols import EnvironmentFactory
from noria.report.curves import DPI, runs_figure
from noria.report.episodes import read_episodes
from noria.report.live import Display, Lines, LiveTable, Snapshot
from noria.report.plan import Plan, PlannedRun, base_beside, server_for
from noria.report.session import train as train_session
from noria.report.summary import SessionReport
from noria.service.build import RunReport
from noria.service.export import Kind, export_version, version_folder
from noria.storage import storing

T = TypeVar("T")

EnvironmentSource: TypeAlias = str | Mapping[str, Any] | Callable[..., Any] | EnvironmentFactory

POLL_S = 0.2
"""How often the waiting thread wakes up, so that a signal is seen at once on every platform."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run.

    rewards: mean raw reward of each step of reinforcement learning. evaluations: held-out accuracy by version. metrics: of every step, by name, the
    supervised ones first. folder: the state folder, which `noria runs` reads. adapter: folder of the newest version's files. message: why the run
    ended early, "" if it did not.
    """

    config: RunConfig
    folder: Path
    adapter: Path
    version: int
    rewards: tuple[float, ...]
    evaluations: Mapping[int, float]
    metrics: tuple[Mapping[str, float], ...]
    message: str
    report: RunReport

    def plot(self) -> Figure:
        """The run's curves as a matplotlib figure, which a notebook shows as a picture."""
        return runs_figure([self.report], make=_Picture)

    def export(self, folder: str | Path, kind: Kind = "peft", *, version: int | str = "newest") -> Path:
        """Write a version as a PEFT adapter folder ("peft") or a whole Hugging Face model ("merged"); the folder.

        version: a number, "best" or "newest".

        Raises UnknownVersionError, AdapterFileCorruptError, AdapterFormatError, StateConflictError (the folder holds something).
        """
        export_version(self.folder, self.config.name, version=str(version), kind=kind, out=Path(folder))
        return Path(folder)

    def episodes(self, version: int | None = None) -> list[dict[str, Any]]:
        """The run's recorded episodes as rows (report/episodes.py); version: only those that the step to this version trained."""
        return read_episodes(self.folder, self.config.name, version=version)


def train(  # noqa: PLR0913 - named arguments, each a word of the run file or of the command line
    environment: EnvironmentSource | None = None,
    *,
    model: str | None = None,
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    server: ServerConfig | Mapping[str, Any] | None = None,
    progress: bool = True,
    **sections: Any,
) -> TrainingResult:
    """Train one run to its end, in this process.

    environment: a class (or function) that makes an environment per episode, an `EnvironmentFactory`, or a
    name, or a section, as in a run file.
    model, steps, settings: base, steps of reinforcement learning, keyword arguments of the environment. config: a RunConfig or the same as a dict;
    what is given beside it wins. folder: the state folder, kept; without one a new temporary folder, which is kept too (`result.folder`).
    resume: go on with the run of that folder. server: a ServerConfig or a dict; default: sizes that follow the run. progress: show a live table or
    a line per step. sections: everything else of a run file, for example `adapter={"rank": 16}`, `evaluation={"num_tasks": 32}`, `seed=3`.

    Raises ConfigError (what cannot be used, with the nearest key), EnvironmentFailedError, StateConflictError (the folder has the run already and
    `resume` is False), and what made the run fail: RunFailedError, GradientNotFiniteError, ... KeyboardInterrupt after the run has let go in order.
    """
    run, factory = _run_of(environment, config, dict(sections), model=model, steps=steps, settings=settings)
    run = base_beside(run, Path())
    served = base_beside(_server_of(server, run), Path())
    state_dir = _state_dir(folder)
    served = served.model_copy(update={"state_dir": str(state_dir)})
    plan = Plan(served, (PlannedRun(run, Path(), factory),), resume)
    display = _display() if progress else _Silent()
    start_s = time.monotonic()
    try:
        session = _in_thread(train_session(plan, display, lambda: time.monotonic() - start_s))
    except KeyboardInterrupt:
        display.close()
        print(f"stopped in order; go on with noria.train(..., folder={str(state_dir)!r}, resume=True)", file=sys.stderr)  # noqa: T201 - to a person
        raise
    finally:
        display.close()
    return _result(session, state_dir)


def _run_of(
    environment: EnvironmentSource | None,
    config: RunConfig | Mapping[str, Any] | None,
    sections: dict[str, Any],
    *,
    model: str | None,
    steps: int | None,
    settings: Mapping[str, Any] | None,
) -> tuple[RunConfig, EnvironmentFactory | None]:
    """The run's configuration, and its environment unless a name says it all."""
    data = _section("config", config)
    for key, value in sections.items():
        below = _plain(value)
        data[key] = {**_section(key, data.get(key)), **below} if isinstance(below, Mapping) else below
    if model is not None:
        data["base"] = model
    if steps is not None:
        data["algorithm"] = {**_section("algorithm", data.get("algorithm")), "steps": steps}
    world = _section("environment", data.get("environment"))
    if isinstance(environment, Mapping):
        world |= environment
    elif environment is not None:
        world["name"] = environment if isinstance(environment, str) else _name_of(environment)
    if settings is not None:
        world["settings"] = _section("settings", settings)
    if "name" not in world:
        raise ConfigError(
            "noria.train needs an environment: a class with reset and step, or a built-in's name, as in noria.train(environment=MyTask)"
        )
    if "steps" not in _section("algorithm", data.get("algorithm")):
        raise ConfigError("noria.train needs steps, the number of optimizer steps, as in noria.train(..., steps=24)")
    run = parse({"name": "run", **data, "environment": world}, RunConfig, source="noria.train")
    is_named = environment is None or isinstance(environment, str | Mapping)
    return run, None if is_named else _factory_of(environment, run)


def _plain(value: Any) -> Any:
    """A section as a dict, whether it is one or a configuration object; anything else as it is."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _section(name: str, value: Any) -> dict[str, Any]:
    """A section as a new dict, none as an empty one. Raises ConfigError for what is no section."""
    plain = {} if value is None else _plain(value)
    if not isinstance(plain, Mapping) or not all(isinstance(key, str) for key in plain):
        raise ConfigError(f"noria.train: {name} must be a dict of its settings (got {plain!r:.80})")
    return dict(plain)


def _state_dir(folder: str | Path | None) -> Path:
    """The state folder, a new temporary one for None. Raises ConfigError, StorageError."""
    if folder is None:
        with storing(tempfile.gettempdir()):
            return Path(tempfile.mkdtemp(prefix="noria-"))
    if not isinstance(folder, str | Path):
        raise ConfigError(f"noria.train: folder must be a path (got {folder!r:.80})")
    return Path(folder)


def _factory_of(environment: Any, run: RunConfig) -> EnvironmentFactory:
    if isinstance(environment, type) or not hasattr(environment, "num_tasks"):
        return environment_factory(environment, run.environment.settings, name=run.environment.name)
    if run.environment.settings:
        raise ConfigError("noria.train: settings are for a class; this environment factory has been made already")
    if not hasattr(environment, "num_held_out"):
        raise ConfigError("noria.train: an environment factory says num_tasks and num_held_out; see noria.protocols.EnvironmentFactory")
    made: EnvironmentFactory = environment
    return made


def _name_of(environment: Any) -> str:
    """What runs are listed under. Raises ConfigError for what makes no environments."""
    if not callable(environment):
        if callable(getattr(environment, "reset", None)):
            kind = type(environment).__name__
            raise ConfigError(
                f"noria.train: each episode needs an environment of its own; give the class, environment={kind}, and not an object of it"
            )
        raise ConfigError(f"noria.train: {environment!r} is no environment; give a class with reset and step, or a built-in's name")
    return str(getattr(environment, "__name__", type(environment).__name__))


def _server_of(server: ServerConfig | Mapping[str, Any] | None, run: RunConfig) -> ServerConfig:
    if isinstance(server, ServerConfig):
        return server
    default = server_for([run])
    data = default.model_dump(mode="json")
    for key, value in _section("server", server).items():
        data[key] = {**data[key], **value} if isinstance(value, Mapping) and isinstance(data.get(key), dict) else value
    return parse(data, ServerConfig, source="noria.train: server")


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run by an event loop of its own in a thread. A KeyboardInterrupt here cancels it, waits for its end, and is raised."""
    runner = _Runner(work)
    thread = threading.Thread(target=runner.run, name="noria-train", daemon=True)
    thread.start()
    try:
        while not runner.finished.wait(POLL_S):  # and not `join`: interrupted, it takes a running thread for ended (Python 3.11)
            continue
    except KeyboardInterrupt:
        runner.cancel()
        runner.finished.wait()
        raise
    finally:
        thread.join()
    return runner.result()


@final
class _Runner(Generic[T]):
    """A coroutine in a thread. `run`: that thread; `cancel` and `result`: the one that waits. finished: set once `run` has its outcome."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._ready = threading.Event()
        self.finished = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the coroutine to its end."""
        try:
            self._result.append(asyncio.run(self._main()))
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the caller's thread
            self._error = error
        finally:
            self._ready.set()
            self.finished.set()

    async def _main(self) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self._work)
        self._ready.set()
        return await self._task

    def cancel(self) -> None:
        """Cancel the coroutine, if it still runs."""
        self._ready.wait()
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def result(self) -> T:
        """What the coroutine returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]


def _result(session: SessionReport, state_dir: Path) -> TrainingResult:
    for error in session.failures.values():
        raise error
    (report,) = session.runs
    return TrainingResult(
        config=report.config,
        folder=state_dir,
        adapter=version_folder(state_dir, report.config.name, report.progress.version),
        version=report.progress.version,
        rewards=tuple(report.progress.rewards),
        evaluations=dict(report.progress.evaluations),
        metrics=report.metrics,
        message=report.progress.message,
        report=report,
    )


def _display() -> Display:
    console = Console()
    return LiveTable(console) if console.is_terminal else Lines(sys.stdout)


@final
class _Silent:
    """Satisfies `live.Display`, and shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Picture(Figure):
    """A figure that a notebook shows: one that is made without pyplot has no picture of its own there."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()
