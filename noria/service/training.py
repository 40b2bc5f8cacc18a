"""A run's optimizer steps, one after another, on whichever of its two sources of batches is next.

    supervised phase         examples of the file              ──▶ tree ──▶ learner ──▶ commit ──▶ publish
    reinforcement learning   groups, as soon as a batch of them
                             can be formed within the bound    ──▶ tree ──▶ learner ──▶ commit ──▶ publish ──▶ places are free
                             (a critic, or a penalty in the reward, has the learner score them first)

After each step the evaluation of its version begins, if it is due, beside what follows.
"""

import asyncio
from collections.abc import Sequence
from typing import final

from sqlalchemy import Connection

from noria.errors import DeadlineExceededError, StageStoppedError
from noria.learner.batches import PlannedBatch
from noria.learner.operations import StepResult
from noria.rl.staleness import beyond_bound, form_batch
from noria.service.admission import Admission
from noria.service.batch import Batch, Scored, ask, draft, prepare, step_metrics, step_optimizer
from noria.service.evaluations import Evaluations
from noria.service.progress import RunState
from noria.service.supervised import SUPERVISED_LOSS, prepare_examples, supervised_metrics
from noria.service.versions import Versions
from noria.types import DropReason, EpisodeGroup, Example, LossSpec, OptimizerSpec


@final
class Training:
    """Makes the run's versions up to its last, in one task. Event loop only."""

    def __init__(self, state: RunState, admission: Admission, versions: Versions, evaluations: Evaluations, examples: Sequence[Example]) -> None:
        """examples: of the supervised phase; none are needed once it has ended."""
        self._state, self._stages, self._config = state, state.stages, state.config
        self._admission, self._versions, self._evaluations, self._examples = admission, versions, evaluations, examples
        self._batches_without_signal = 0

    def recover(self, groups_without_signal: int) -> None:
        """What a restart found: how many groups had none since the newest step; what that step's batch had of them is less than a batch.

        If the run was about to end early, it still is. (Under "resample" that is for `Admission.recover` to say: no batch is ever without signal.)
        """
        algorithm = self._config.algorithm
        self._batches_without_signal = groups_without_signal // algorithm.groups_per_batch
        if self._batches_without_signal >= algorithm.max_batches_without_signal and algorithm.zero_signal != "resample":
            self._state.exhausted = f"stopped early: {self._batches_without_signal} batches in a row had nothing to train"

    async def run(self) -> None:
        """Train until the last version, or until there is nothing to learn from; the version that is then the newest is evaluated in any case.

        Raises what fails the run.
        """
        progress = self._state.progress
        await self._evaluations.begin(progress.version)
        while progress.version < self._config.num_steps:
            goes_on = await (self._supervised_step() if self._state.is_supervised else self._step())
            if not goes_on:
                break
            await self._evaluations.begin(progress.version)
        await self._evaluations.begin(progress.version, is_last=True)
        await self._evaluations.finish()

    # ---- the supervised phase ---------------------------------------------------------------------------------------------------------

    async def _supervised_step(self) -> bool:
        version = self._state.progress.version + 1
        batch = await asyncio.to_thread(prepare_examples, self._examples, self._config, version, self._stages.learner.planner)
        result = await self._compute(batch.planned, SUPERVISED_LOSS, self._config.supervised_optimizer)
        await self._versions.add(result.state, supervised_metrics(batch, result))
        return True

    # ---- reinforcement learning -------------------------------------------------------------------------------------------------------

    async def _step(self) -> bool:
        """Train one batch of groups; whether the run goes on."""
        groups = await self._next_batch()
        if groups is None:
            self._state.progress.message = self._state.exhausted
            return False
        try:
            batch = await self._prepare(groups)
            optimizer = step_optimizer(batch, self._config, self._state.progress.version)
            result = await self._compute(batch.planned, optimizer=optimizer) if batch.pieces else None
        except (StageStoppedError, DeadlineExceededError):
            raise
        except Exception:  # or every restart would take the same batch again, and fail again
            await self._state.tasks.durably(self._settle_dropped(groups, "failed"))
            raise
        if result is None:
            return await self._settle_untrained(batch)
        self._batches_without_signal = 0

        def settle(connection: Connection, version: int) -> None:
            self._stages.buffer.settle_trained(connection, batch.trained, version)
            self._stages.buffer.settle_dropped(connection, batch.untrained, "no_signal")

        metrics = step_metrics(batch, result, self._config.algorithm, self._state.progress.version)
        await self._versions.add(result.state, metrics, settle, settled=(*batch.trained, *batch.untrained))
        return True

    async def _next_batch(self) -> list[EpisodeGroup] | None:
        """The groups to train next, leased; None if the run should end early. Waits for them."""
        state, buffer, algorithm = self._state, self._stages.buffer, self._config.algorithm
        rule = {"version": state.progress.version, "max_staleness": algorithm.max_staleness}
        while not state.exhausted:
            seen = state.generation
            waiting = await buffer.outstanding(state.run_id)
            for group_id in beyond_bound(waiting, **rule):  # never by these rules; it would hold its place for ever
                await self._admission.give_up(group_id, "stale", "its oldest token is beyond max_staleness")
            chosen = form_batch(waiting, **rule, groups_per_batch=algorithm.groups_per_batch)
            if chosen is not None:
                return await buffer.lease(state.run_id, chosen)
            with self._stages.spans.span("learner", "batch", state.run_id, is_wait=True):
                await state.change_since(seen)
        return None

    async def _prepare(self, groups: Sequence[EpisodeGroup]) -> Batch:
        """The batch, once the learner has scored what must be known before its advantages are."""
        state, learner, algorithm = self._state, self._stages.learner, self._config.algorithm
        scored, drafted = None, await asyncio.to_thread(draft, groups, algorithm, learner.planner)
        if drafted is not None:
            what, asked = f"score the batch after version {state.progress.version}", ask(learner, state.run_id, drafted, algorithm)
            scored = Scored(drafted, [await state.wait_for(each, self._config.deadlines.train_s, what) for each in asked])
        return await asyncio.to_thread(prepare, groups, algorithm, learner.planner, scored=scored)

    async def _compute(self, batch: PlannedBatch, loss: LossSpec | None = None, optimizer: OptimizerSpec | None = None) -> StepResult:
        state = self._state
        training = self._stages.learner.train(state.run_id, batch, loss=loss, optimizer=optimizer)
        return await state.wait_for(training, self._config.deadlines.train_s, f"train the step after version {state.progress.version}")

    async def _settle_untrained(self, batch: Batch) -> bool:
        """Settle a batch that has nothing to train; whether the run goes on."""
        await self._state.tasks.durably(self._settle_dropped(batch.groups, "no_signal"))
        self._batches_without_signal += 1
        self._state.change()
        if self._batches_without_signal < self._config.algorithm.max_batches_without_signal:
            return True
        statistics = batch.statistics
        self._state.progress.message = (
            f"stopped early: {self._batches_without_signal} batches in a row had nothing to train; of the last one, "
            f"{statistics.num_groups_without_signal} of {statistics.num_groups} groups had equal rewards and "
            f"{statistics.num_truncated} of {statistics.num_episodes} episodes were cut by max_tokens"
        )
        return False

    async def _settle_dropped(self, groups: Sequence[EpisodeGroup], reason: DropReason) -> None:
        ids = [g.group_id for g in groups]
        await self._stages.buffer.transaction(lambda connection: self._stages.buffer.settle_dropped(connection, ids, reason))
        self._state.settled(ids)
