"""A run's versions: each is committed, then published, and only then does anybody sample it.

    learner's state ──▶ files ──▶ one transaction: the version, and every group settled as what became of it ──▶ sampler, with a proof

The transaction is the point of no return; once begun, a commit is finished, whoever is cancelled meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

from sqlalchemy import Connection

from noria.model.lora import AdapterState, checksum
from noria.service import store
from noria.service.evaluations import Evaluations
from noria.service.progress import RunState
from noria.types import AdapterVersion

Settle: TypeAlias = Callable[[Connection, int], None]
"""What else a step's transaction does: (connection, the new version)."""


@final
class Versions:
    """Makes one run's versions durable and then visible. `add` by one task at a time. Event loop only."""

    def __init__(self, state: RunState, evaluations: Evaluations) -> None:
        self._state, self._stages, self._evaluations = state, state.stages, evaluations

    async def create(self, initial: AdapterState, register: Callable[[Connection], None], *, examples_sha256: str | None = None) -> None:
        """Prove version 0 in the sampler; only then is anything stored. register: what else the first transaction does.

        examples_sha256: of the file of the run's supervised phase, if it has one.
        """
        unwritten = AdapterVersion(self._state.run_id, 0, checksum(initial.params), moments_checksum=0, path="")
        await self.publish(unwritten, initial)
        await self._state.tasks.durably(self._commit_first(initial, register, examples_sha256))

    async def add(self, adapter: AdapterState, metrics: Mapping[str, float], settle: Settle | None = None, *, settled: Sequence[str] = ()) -> None:
        """Commit and publish what an optimizer step made. settle: what else its transaction does; settled: ids of the groups that it settles.

        Raises PublishProofError, DeadlineExceededError, StageStoppedError.
        """
        state = self._state
        async with state.admission:
            record = await state.tasks.durably(self._commit(adapter, metrics, settle, settled))
            await self.publish(record, adapter)
            state.progress.version = record.version
        state.change()

    async def publish(self, record: AdapterVersion, adapter: AdapterState) -> None:
        """Publish what the learner holds, and prove it."""
        config = self._state.config
        await self._stages.publisher.publish(record, adapter.params, config.adapter.lora, timeout_s=config.deadlines.publish_s)

    async def retain(self, newest: int) -> None:
        """Remove from disk what need not be kept: all but the newest ones, the best one, and those that wait for their evaluation."""
        kept = {*range(newest - self._stages.keep_versions + 1, newest + 1), *self._evaluations.pending(newest)}
        if self._evaluations.best is not None:
            kept.add(self._evaluations.best)
        await asyncio.to_thread(self._stages.files.keep_only, self._state.run_id, kept)

    async def _write(self, version: int, adapter: AdapterState) -> AdapterVersion:
        return await asyncio.to_thread(self._stages.files.write, self._state.run_id, version, adapter, self._state.config.adapter.rank)

    async def _commit_first(self, initial: AdapterState, register: Callable[[Connection], None], examples_sha256: str | None) -> None:
        record = await self._write(0, initial)

        def commit(connection: Connection) -> None:
            now_s = self._stages.clock.wall()
            store.create_run(connection, self._state.config, now_s, examples_sha256=examples_sha256)
            store.add_version(connection, record, {}, now_s)
            register(connection)

        await self._stages.buffer.transaction(commit)
        self._state.is_up = True

    async def _commit(self, adapter: AdapterState, metrics: Mapping[str, float], settle: Settle | None, settled: Sequence[str]) -> AdapterVersion:
        """Files, then the transaction."""
        record = await self._write(self._state.progress.version + 1, adapter)

        def commit(connection: Connection) -> None:
            store.add_version(connection, record, metrics, self._stages.clock.wall())
            if settle is not None:
                settle(connection, record.version)

        await self._stages.buffer.transaction(commit)
        self._state.settled(settled)
        self._state.count_step(record.version, metrics)
        await self.retain(record.version)
        return record
