"""The composition root: the one place that knows every class, and makes a server of a configuration.

    async with open_server(ServerConfig()) as server:
        await server.add_run(RunConfig(...), folder=Path("."), resume=False)
        failures = await server.finished()

One process, one base, one device: SQLite for state and buffer, sampler and learner in process (design section 11).
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import final

import jax
import jax.numpy as jnp
from sqlalchemy import Connection, Engine

from noria.actors.pool import ActorPool
from noria.actors.rules import EpisodeRules, rules_of
from noria.adapters.versions import VersionFiles
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.clock import RealClock
from noria.config import RunConfig, ServerConfig, cache_dir
from noria.envs.builtin import BUILTIN
from noria.errors import ConfigError, StateConflictError, StorageError
from noria.learner.learner import Learner
from noria.model.lora import ROOM_SETTINGS, AdapterState, resident_tops, trained_tops
from noria.model.placement import base_dtype, place
from noria.model.weights import LoadedBase, load_base
from noria.observe import SpanRecorder, log_event
from noria.protocols import EnvironmentFactory
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.service import store
from noria.service.device import SharedDevice
from noria.service.first_version import first_state
from noria.service.folder import ADAPTERS, DATABASE, PAGES, exclusive, record_server
from noria.service.loop import Circle
from noria.service.progress import RunProgress
from noria.service.publish import PROBE_TOKENS, Publisher
from noria.service.runs import ActiveRun
from noria.service.stages import Stages, TenantWeights
from noria.service.supervised import NO_EXAMPLES, load_examples
from noria.storage import storing
from noria.text.examples import ExampleFile

log = logging.getLogger(__name__)

PROBE_TEXT = "The wheel does not wait for a bucket, and no bucket is lost."
"""Prompt of the probe after each publish (see service/publish.py)."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run as commands and reports show it."""

    config: RunConfig
    progress: RunProgress
    tokens_sampled: int
    dropped: dict[str, int]
    metrics: tuple[dict[str, float], ...]
    committed_at_s: tuple[float, ...]


@final
class Server:
    """One process's circle with its store. Made by `open_server`; all methods belong to the event loop."""

    def __init__(self, config: ServerConfig, base: LoadedBase, circle: Circle, spans: SpanRecorder, clock: RealClock) -> None:
        self.config, self.base, self.spans, self.clock = config, base, spans, clock
        self._circle = circle

    @property
    def runs(self) -> dict[str, ActiveRun]:
        """The active runs by name."""
        return self._circle.runs

    @property
    def stages(self) -> Stages:
        """The stages, for whoever measures them."""
        return self._circle.stages

    async def add_run(self, config: RunConfig, *, folder: Path, resume: bool, environment: EnvironmentFactory | None = None) -> ActiveRun:
        """Start a run, or bring it up again. folder: where the run file's relative paths start. environment: instead of the file's.

        A run that is refused leaves nothing behind, and one that existed stays as it was.
        Raises ConfigError (the file, or a run too large for this server), EnvironmentFailedError, DeadlineExceededError (it hangs),
        StateConflictError (it exists and `resume` is False, or exists with another configuration or other examples), DatasetError (the examples of
        its supervised phase), AdapterFormatError (the adapter it starts from), and what `ActiveRun.start` raises.
        """
        newest, sha256 = await self.stages.buffer.transaction(lambda connection: _stored(connection, config, resume))
        rules, initial = await self.prepare(config, folder=folder, environment=environment, is_new=newest is None)
        is_supervised = (newest or 0) < config.num_supervised_steps
        examples = await self.examples(config, folder=folder, sha256=sha256) if is_supervised else NO_EXAMPLES
        run = ActiveRun(config, rules, self.stages, initial, examples)
        await self._circle.add(run)
        return run

    async def prepare(
        self, config: RunConfig, *, folder: Path, environment: EnvironmentFactory | None = None, is_new: bool = True
    ) -> tuple[EpisodeRules, AdapterState]:
        """All that a run needs and that needs no state folder: how its episodes are played, and the state of version 0. Raises as `add_run`.

        is_new: the run has no version yet, so the state of version 0 is that of its warm start, if the file asks for one.
        """
        _check_fits(config, self.config)
        factory = environment or await self.stages.pool.load(config, builtin=BUILTIN, folder=folder)
        rules = rules_of(config, config.name, factory, self.base.tokenizer)
        warm_start = config.adapter.warm_start
        start = folder / warm_start if is_new and warm_start is not None else None
        return rules, await asyncio.to_thread(first_state, config, self.base, self.config.learner, start)

    async def examples(self, config: RunConfig, *, folder: Path, sha256: str | None = None) -> ExampleFile:
        """The examples of the run's supervised phase, none if it has no such phase. Raises as `supervised.load_examples`."""
        base, longest = self.base, self.stages.learner.planner.longest
        return await asyncio.to_thread(load_examples, config, base.tokenizer, base.chat, folder=folder, max_positions=longest, sha256=sha256)

    async def finished(self) -> dict[str, BaseException]:
        """Wait until every run has ended; the runs that failed, each with its cause."""
        return await self._circle.finished()

    async def report(self, run_id: str) -> RunReport:
        """What is known of a run, from the store."""
        buffer, run = self._circle.stages.buffer, self.runs[run_id]
        counts = await buffer.counts(run_id)
        rows = await buffer.transaction(lambda connection: store.versions(connection, run_id))
        sampled = await buffer.transaction(lambda connection: store.tokens_sampled(connection, run_id))
        metrics = tuple(dict(row.metrics) for row in rows[1:])
        return RunReport(run.config, run.progress, sampled, counts.by_reason, metrics, tuple(row.committed_at_s for row in rows))


@asynccontextmanager
async def open_server(config: ServerConfig) -> AsyncIterator[Server]:
    """A running server; leaving the block stops it in order, and what is committed stays.

    Raises ModelFileMissingError, ModelFileCorruptError, ModelUnsupportedError, ConfigError; StateConflictError if another process uses the folder,
    StorageError if it cannot be written.
    """
    state_dir = Path(config.state_dir)
    with exclusive(state_dir):
        record_server(state_dir, config)
        _use_compilation_cache()
        base = await asyncio.to_thread(load_base, config.base)
        database = open_database(state_dir / DATABASE)
        try:
            circle, spans, clock = _build(config, base, database, state_dir)
            if config.warm_up:
                stages = circle.stages
                await asyncio.gather(asyncio.to_thread(stages.sampler.warm_up), asyncio.to_thread(stages.learner.warm_up))
            circle.start()
            try:
                yield Server(config, base, circle, spans, clock)
            finally:
                await circle.close(config.drain_s)
        finally:
            database.dispose()


def _build(config: ServerConfig, base: LoadedBase, database: Engine, state_dir: Path) -> tuple[Circle, SpanRecorder, RealClock]:
    clock = RealClock()
    spans = SpanRecorder(clock)
    dtype = base_dtype() if config.dtype == "auto" else config.dtype
    log_event(log, logging.INFO, "base placed", base=config.base, dtype=dtype, backend=jax.default_backend(), jax=jax.__version__)
    params = place(base.params, jnp.dtype(dtype))
    wakers: list[SharedDevice] = []

    def wake() -> None:
        for device in wakers:
            device.wake()

    max_stall_s = config.max_stall_ms / 1000
    learner = Learner(
        params.stacked, base.config, config.learner, spans=spans, clock=clock, wake=wake, max_stall_s=max_stall_s, spill_dir=state_dir / PAGES
    )
    sampler = SamplerEngine(
        params,
        base.config,
        config.sampler,
        rank_classes=config.learner.rank_classes,
        eos_id=base.tokenizer.eos_id,
        spans=spans,
        clock=clock,
        tokenizer=base.tokenizer,
        wake=wake,
        shapes=Shapes.of(config.sampler, resident_tops(config.learner)),
    )
    shares = {"sampler": config.sampler_share, "learner": 1 - config.sampler_share}
    device = SharedDevice({"sampler": sampler, "learner": learner}, shares, clock, max_stall_s)
    wakers.append(device)
    buffer = SqliteBuffer(database, clock, keep_payload=config.keep_episodes)
    store.create_tables(database)
    probe_ids = base.tokenizer.encode(PROBE_TEXT)[: config.sampler.max_context - PROBE_TOKENS]
    stages = Stages(
        learner=learner,
        sampler=sampler,
        device=device,
        publisher=Publisher(sampler, learner, device, clock=clock, spans=spans, probe_ids=probe_ids, dtype=dtype),
        buffer=buffer,
        pool=ActorPool(sampler, base.tokenizer, clock, spans, chat=base.chat, max_episodes=config.max_episodes),
        files=VersionFiles(state_dir / ADAPTERS),
        clock=clock,
        spans=spans,
        sizes=config.learner,
        keep_versions=config.keep_versions,
        weights=TenantWeights(sampler, device),
    )
    return Circle(stages), spans, clock


def _check_fits(config: RunConfig, server: ServerConfig) -> None:
    """Raises ConfigError for a run that could never work on this server, before anything of it is made."""
    max_tokens, max_context = config.sampling.max_tokens, server.sampler.max_context
    if config.base != server.base:
        raise ConfigError(f"run {config.name} wants base {config.base!r}, this server holds {server.base!r}")
    try:
        server.learner.class_of(config.adapter.rank)
    except ConfigError as error:
        raise ConfigError(f"run {config.name}: adapter.{error}") from error
    if without_room := set(trained_tops(config.lora)) - set(resident_tops(server.learner)):
        settings = " and ".join(f"learner.{ROOM_SETTINGS[module]} = true" for module in sorted(without_room))
        raise ConfigError(f"run {config.name} trains {', '.join(sorted(without_room))}, for which this server has no room: set {settings}")
    if config.algorithm.prefix_gradient == "stop" and not server.learner.path_positions:
        raise ConfigError(f'run {config.name} has algorithm.prefix_gradient = "stop", which this server cannot walk: set learner.path_positions')
    if max_tokens >= max_context:
        raise ConfigError(
            f"run {config.name} has sampling.max_tokens = {max_tokens}, which leaves no room for a prompt in this server's "
            f"sampler.max_context = {max_context}: lower it, or raise max_context and learner.max_positions"
        )


def _stored(connection: Connection, config: RunConfig, resume: bool) -> tuple[int | None, str | None]:
    """The run's newest committed version and the SHA-256 of its examples; None and None for a new run. Raises StateConflictError: see `add_run`."""
    row = store.find_run(connection, config.name)
    if row is None:
        return None, None
    if not resume:
        raise StateConflictError(
            f"run {config.name} exists already in this state folder: resume it (--resume, or resume=True), or choose another name or folder "
            "(--state-dir, or folder=...)"
        )
    if row.config != config:
        changed = [name for name in RunConfig.model_fields if getattr(row.config, name) != getattr(config, name)]
        raise StateConflictError(f"run {config.name} was started with other settings ({', '.join(changed)} differ); resume it with the same run file")
    return store.versions(connection, config.name)[-1].record.version, row.examples_sha256


def _use_compilation_cache() -> None:
    """Keep compiled programs between processes, where their folder can be written; else log a warning and go on without."""
    folder = cache_dir() / "xla"
    try:
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
    except StorageError as error:
        log_event(log, logging.WARNING, "no compilation cache: every start compiles anew; set NORIA_CACHE_DIR to a writable folder", error=str(error))
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones too: 0.6 s of a second start, 0.2 MB
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
