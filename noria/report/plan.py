"""What a training session is asked to do: a server's configuration and its runs, read from run files.

Deliberately light: no jax, no database. A bad file is refused here, before anything is loaded.
"""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

from noria.config import BUILTIN_BASES, RunConfig, ServerConfig, load_toml, parse
from noria.errors import ConfigError
from noria.protocols import EnvironmentFactory

ConfigT = TypeVar("ConfigT", RunConfig, ServerConfig)

DEMO_RUNS = ("largest", "first_letter", "doubling")
"""The packaged run files of `noria demo`, in the order of its table."""

RANK_CLASSES = (8, 32, 128)
"""The rank classes of servers that are made for their runs. A run's is the smallest that holds its rank, whoever else there is."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run and the folder where its file's relative paths start. environment: instead of the one that the file names."""

    config: RunConfig
    folder: Path
    environment: EnvironmentFactory | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One server with its runs. resume: go on with runs that the state folder knows."""

    server: ServerConfig
    runs: tuple[PlannedRun, ...]
    resume: bool = False

    @property
    def state_dir(self) -> Path:
        """Folder of the database, adapters and reports."""
        return Path(self.server.state_dir)


def demo_plan(*, state_dir: Path | None, resume: bool, steps: int | None) -> Plan:
    """The packaged runs on the packaged server. steps: instead of the files'. Raises ConfigError."""
    with as_file(files("noria") / "demo") as folder:
        server = load_toml(folder / "server.toml", ServerConfig)
        configs = [load_toml(folder / f"{name}.toml", RunConfig) for name in DEMO_RUNS]
    return _plan(server, [PlannedRun(config, Path()) for config in configs], state_dir, resume, steps)


def train_plan(
    run_files: Sequence[Path], *, server_config: Path | None = None, state_dir: Path | None = None, resume: bool = False, steps: int | None = None
) -> Plan:
    """The runs of the files, at least one. Without a server file, base and sizes follow the runs.

    Raises ConfigError: an unusable file, two runs of one name, runs of different bases.
    """
    runs = [PlannedRun(base_beside(load_toml(path, RunConfig), path.parent), path.parent) for path in run_files]
    server = load_server(server_config) if server_config else server_for([run.config for run in runs])
    return _plan(server, runs, state_dir, resume, steps)


def load_server(path: Path) -> ServerConfig:
    """The server of a file. Raises ConfigError."""
    return base_beside(load_toml(path, ServerConfig), path.parent)


def base_beside(config: ConfigT, folder: Path) -> ConfigT:
    """The configuration with a base that lies on disk, relative to `folder`, by its absolute path: it means the same wherever it is read again.

    Names of built-in bases and of the hub, and what nobody knows, stay as they are. Raises ConfigError for what can be neither, and for a path that
    leads somewhere only from the current directory.
    """
    if config.base in BUILTIN_BASES or not config.base:
        return config
    try:
        path = folder / Path(config.base).expanduser()
        is_path = config.base.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.exists()
        is_elsewhere = not is_path and Path(config.base).exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a user without a home
        raise ConfigError(f"base {config.base[:80]!r} can be neither a name nor a path: {getattr(error, 'strerror', None) or error}") from error
    if is_elsewhere:
        raise ConfigError(
            f"base {config.base!r} is relative to the file that names it, and {os.path.abspath(path)} does not exist; for the one in the current "
            f"directory write {os.path.abspath(config.base)!r}"
        )
    return config.model_copy(update={"base": os.path.abspath(path)}) if is_path else config


def server_for(configs: Sequence[RunConfig]) -> ServerConfig:
    """The default server with the rank classes of these runs, grown where they would not fit.

    A run's own class depends on its rank alone: beside any others it computes at the same width, and comes to the same bits.
    """
    plain = ServerConfig()
    learner = {
        "rank_classes": tuple(sorted({_rank_class(config.adapter.rank) for config in configs})),
        "num_slots": max(plain.learner.num_slots, len(configs)),
        "has_unembed": any(config.lora.train_unembed for config in configs),
        "has_values": any(config.lora.train_value for config in configs),
    }
    # a run may hold its newest version, one under evaluation and one that requests still finish; slot 0 is the base
    sampler = {"num_slots": max(plain.sampler.num_slots, 1 + 3 * len(configs))}
    return plain.model_copy(
        update={
            "base": configs[0].base,
            "learner": plain.learner.model_copy(update=learner),
            "sampler": plain.sampler.model_copy(update=sampler),
        }
    )


def _rank_class(rank: int) -> int:
    """The canonical class of a rank; a rank above all is a class of its own."""
    return next((width for width in RANK_CLASSES if width >= rank), rank)


def _plan(server: ServerConfig, runs: Sequence[PlannedRun], state_dir: Path | None, resume: bool, steps: int | None) -> Plan:
    if steps is not None:
        runs = [replace(run, config=_with_steps(run.config, steps)) for run in runs]
    names = [run.config.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} run files have the name {name!r}; a run's name is unique within its server")
    for run in runs:
        if run.config.base != server.base:
            raise ConfigError(f"run {run.config.name} wants base {run.config.base!r}, the server holds {server.base!r}; one server has one base")
    if state_dir is not None:
        server = server.model_copy(update={"state_dir": str(state_dir)})
    return Plan(server, tuple(runs), resume)


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    data = config.model_dump()
    data["algorithm"]["steps"] = steps
    return parse(data, RunConfig, source=f"run {config.name}")
