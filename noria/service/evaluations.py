"""One run's held-out evaluations, beside its training.

Due are version 0, the last version of a supervised phase, every multiple of `evaluation.every`, and the last step; of a run that ends early, the
version that it ends with. A due version is evaluated exactly once, whatever happens in between: what is due and has no result in the store is
pending, its files are kept, and a restart publishes and evaluates it before it goes on.

At most one evaluation of a run is under way, since each keeps a version in the sampler's host memory, and its episodes take room among the actors.
The next due version waits for it, and training waits with that version, since a version can only be evaluated if it is pinned before a newer one is
published: evaluations that are slower than the steps between them slow their own run down, and nobody else's. So at most two versions are ever
pending.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, final

from noria.actors.evaluation import held_out_tasks
from noria.actors.rules import EpisodeRules
from noria.config import RunConfig
from noria.service import store
from noria.service.stages import Stages

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@final
class Evaluations:
    """Owner of one run's evaluation under way, its pin, and its results. Touched by the event loop only; `begin` and `finish` by one task at a time.

    accuracy: of each evaluated version, as stored.
    """

    def __init__(self, config: RunConfig, rules: EpisodeRules, stages: Stages, spawn: Callable[[Work], asyncio.Task[None]]) -> None:
        """spawn: starts a task of the run, whose failure fails the run."""
        self.accuracy: dict[int, float] = {}
        self._rows: dict[int, store.EvaluationRow] = {}
        self._config, self._rules, self._stages, self._spawn = config, rules, stages, spawn
        self._held_out = held_out_tasks(rules.environment, config.evaluation.num_tasks)
        self._pinned: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def best(self) -> int | None:
        """The version to keep on disk by `evaluation.keep_best`; None if there is no result yet, or it is not asked for."""
        best = store.best_evaluation(self._rows.values()) if self._config.evaluation.keep_best else None
        return None if best is None else best.version

    def restore(self, rows: Iterable[store.EvaluationRow]) -> None:
        """Take up the results that the store has of this run."""
        for row in rows:
            self._rows[row.version], self.accuracy[row.version] = row, row.accuracy

    def pending(self, newest: int) -> list[int]:
        """Due versions up to `newest` that have no result, oldest first."""
        config, every = self._config, self._config.evaluation.every
        steps = config.num_steps
        due = {0, config.num_supervised_steps, steps, *(range(every, steps, every) if every else ())} if self._held_out else set()
        return sorted(version for version in due if version <= newest and version not in self._rows)

    async def begin(self, version: int, *, is_last: bool = False) -> None:
        """Evaluate the newest published version beside what follows, if it is pending; waits for the evaluation before it.

        is_last: no version will follow, so this one is due whatever its number. Nothing if it is under way already.

        Raises UnknownVersionError, DeadlineExceededError, StageStoppedError.
        """
        is_due = bool(self._held_out) and version not in self._rows if is_last else version in self.pending(version)
        if version == self._pinned or not is_due:
            return
        await self.finish()
        self._pinned = version  # from here on `release` undoes the pin, even if the wait for it is cancelled
        sampler, run_id = self._stages.sampler, self._config.name
        timeout_s = self._config.deadlines.publish_s
        await self._stages.on_device(lambda: sampler.pin(run_id, version), timeout_s, f"run {run_id}: pin version {version}")
        self._task = self._spawn(partial(self._evaluate, version))

    async def finish(self) -> None:
        """Wait for the evaluation that is under way, if there is one. Bounded by its episodes' deadlines."""
        if self._task is not None and not self._task.done():
            with self._stages.spans.span("learner", "evaluation", self._config.name, is_wait=True):
                await asyncio.wait((self._task,))

    def release(self) -> None:
        """Give the pinned version back. Idempotent."""
        if self._pinned is not None:
            version, self._pinned = self._pinned, None
            self._stages.soon_on_device(lambda: self._stages.sampler.unpin(self._config.name, version))

    async def _evaluate(self, version: int) -> None:
        run_id, stages, how = self._config.name, self._stages, self._config.evaluation
        rules = replace(self._rules, top_k=how.top_k, top_p=how.top_p)
        try:
            result = await stages.pool.evaluate(
                rules, self._held_out, version=version, samples=how.samples, temperature=how.temperature, solved_at=how.solved_at
            )
            row = store.EvaluationRow(version, result.accuracy, result.mean_reward, len(self._held_out), result.num_failed, result.pass_at)
            now_s = stages.clock.wall()
            await stages.buffer.transaction(lambda connection: store.add_evaluation(connection, run_id, row, now_s))
            self.restore((row,))
        finally:
            self.release()
