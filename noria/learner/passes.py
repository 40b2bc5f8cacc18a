"""What the learner runs on the device, one dispatch a call: passes over microbatches, visits of walks, optimizer steps, probes.

    score ──▶ scored ──▶ pull     a microbatch, in two dispatches, with decoding between them; no run changes its slot meanwhile
    visit                         one visit of a tree's walk (learner/executors.py)

Seconds go to the pace and to jobs, FLOPs to `charge`. Deliberately not here: which run is served, and when (`learner/learner.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.config import LearnerConfig
from noria.learner.batches import BatchPlanner, Costs, sequence
from noria.learner.executors import Job, Owners, Scored, Walk, score_microbatch, warm_up_executors, whole_sizes, with_slots
from noria.learner.memory import affordable_positions, walk_blocks
from noria.learner.optimizer import apply_step, hyperparameters
from noria.learner.pace import Pace
from noria.learner.queue import Mode, plan_pass
from noria.learner.residency import Residency
from noria.learner.run_queue import LEADING_JOBS, Offered
from noria.learner.step import Model, counts_tiles, pull, score, to_device
from noria.learner.walks import Walks
from noria.model.config import ModelConfig
from noria.protocols import Clock, Spans
from noria.rl.packing import MicrobatchPlan, ReadyRun, pack, plan_microbatch, shapes_up_to
from noria.types import FloatArray, Ids, OptimizerSpec, Piece


@final
class Passes:
    """Owner of what training has on the device: base, slots of all classes, the microbatch between score and pull, walks. The device thread only.

    charge: called with a run and the FLOPs that it has had.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        config: ModelConfig,
        settings: LearnerConfig,
        *,
        spans: Spans,
        clock: Clock,
        charge: Callable[[str, float], None],
        max_stall_s: float,
        spill_dir: Path | None,
    ) -> None:
        """See `Learner`. Raises ConfigError: too little memory, before any is taken."""
        self._params, self._config, self._settings = params, config, settings
        self._spans, self._clock, self._charge = spans, clock, charge
        base = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self.shapes = shapes_up_to(affordable_positions(config, settings, base=base), is_counted=counts_tiles())
        self.planner = BatchPlanner(self.shapes[-1], settings.path_positions)
        self.costs = Costs(config)
        self.residency = Residency(config, settings, spill_dir=spill_dir)
        self.pace = Pace(max_stall_s, settings.max_quantum_s)
        self.walks = Walks(config, settings, self.shapes[-1])
        self.scored: Scored | None = None
        self._num_rows = LEADING_JOBS * settings.num_slots
        self.num_microbatches = 0

    def warm_up(self) -> None:
        """Compile every program of the closed set, before any run is loaded."""
        self.residency.warm_up()
        for rank_class in self._settings.rank_classes:
            gradient = self.residency.slots(rank_class).gradient
            model, path_positions = self._model(rank_class), self._settings.path_positions
            gradient = warm_up_executors(model, gradient, self._config, self.shapes, num_rows=self._num_rows, path_positions=path_positions)
            state = self.residency.slots(rank_class)._replace(gradient=gradient)
            self.residency.replace(rank_class, apply_step(state, jnp.int32(0), hyperparameters(OptimizerSpec(0.0)))[0])
        self.pace.seen.update(shape.num_positions for shape in self.shapes)

    @property
    def is_intact(self) -> bool:
        """False once a program failed that had taken its inputs: then nothing here can be used any more."""
        return self.residency.is_intact

    def plan(self, offers: Sequence[Offered]) -> tuple[MicrobatchPlan, Owners]:
        """The next microbatch of these offers, in fair order, and whose part each of its pieces is. Slots are still unknown."""
        max_positions = self.pace.max_positions(self.shapes[-1].num_positions)
        plan = plan_pass([each.offer for each in offers], self.shapes, max_positions, num_slots=self._settings.num_slots)
        owners_of = {each.offer.run_id: each.owners for each in offers}
        return plan, [owners_of[planned.run_id][planned.piece_index] for planned in plan.pieces]

    def score(self, plan: MicrobatchPlan, owners: Owners, mode: Mode, slot_of: dict[str, int]) -> bool:
        """The forward pass of a microbatch; whether that was all that it is for. If not, `pull` is the next dispatch."""
        start, plan = self._clock.now(), with_slots(plan, slot_of)
        model = self._model(self.residency.class_of(plan.pieces[0].run_id))
        with self._spans.span("learner", "score" if mode == "train" else mode, _owner(plan)):
            self.scored = score_microbatch(plan, owners, mode, model, self._config, num_rows=self._num_rows)
        self.num_microbatches += 1
        self._account(plan, owners, self.costs.score, self._clock.now() - start)
        return self.scored is None

    def pull(self) -> Scored:
        """The backward pass of what was scored by the dispatch before."""
        scored, start = self.scored, self._clock.now()
        assert scored is not None
        plan = scored.plan
        rank_class = self.residency.class_of(plan.pieces[0].run_id)
        with self._spans.span("learner", "pull", _owner(plan)):
            state = self.residency.slots(rank_class)
            gradient = pull(self._model(rank_class), scored.arrays, scored.residuals, scored.cotangents, state.gradient, config=self._config)
            self.residency.replace(rank_class, state._replace(gradient=jax.block_until_ready(gradient)))
        self.scored = None
        seconds = self._clock.now() - start
        flops = sum(self.costs.pull(planned.piece) for planned in plan.pieces)
        self.pace.pulled(plan.shape.num_positions, plan.dispatched_positions, seconds, flops)
        self._account(plan, scored.owners, self.costs.pull, seconds)
        return scored

    def evaluate(self, run_id: str, job: Job) -> None:
        """A loss over a whole batch, between its passes."""
        with self._spans.span("learner", "loss", run_id):
            job.evaluate(whole_sizes(self.shapes), self._num_rows)

    def visit(self, run_id: str, job: Job, slot: int) -> None:
        """One visit of the job's walk, or half of one; the walk begins with it if there is none yet, and ends with its phase's last."""
        start, shape = self._clock.now(), self.shapes[-1]
        blocks, is_on_host = walk_blocks(self._settings.path_positions, shape), self._settings.is_path_on_host
        walk = self.walks.resume(run_id, job) or self.walks.begin(
            Walk(run_id, job, shape, self._config, self.costs, num_rows=self._num_rows, num_blocks=blocks, is_on_host=is_on_host)
        )
        rank_class = self.residency.class_of(run_id)
        state = self.residency.slots(rank_class)
        with self._spans.span("learner", "replay", run_id):
            gradient = walk.advance(self._model(rank_class), slot, state.gradient)
            self.residency.replace(rank_class, state._replace(gradient=jax.block_until_ready(gradient)))
        seconds = self._clock.now() - start
        job.device_s += seconds
        walk.visit_s += seconds
        if walk.is_halfway:
            return
        self._charge(run_id, walk.visit_flops)
        self.pace.visited(walk.visit_s, walk.visit_flops)
        walk.visit_s = 0.0
        if job.mode is None:  # a loss, or the end: no path is needed any more
            self.walks.end(run_id)

    def optimize(self, run_id: str, optimizer: OptimizerSpec) -> tuple[float, float]:
        """One optimizer step: the gradient's norm before clipping, and the learning rate. One that is not finite is cleared and changes nothing.

        Raises as `Residency.bring`.
        """
        slot, rank_class = self.residency.bring([run_id])[run_id], self.residency.class_of(run_id)
        with self._spans.span("learner", "optimize", run_id):
            state, norm, rate = apply_step(self.residency.slots(rank_class), jnp.int32(slot), hyperparameters(optimizer))
            self.residency.replace(rank_class, state)
            return float(norm), float(rate)

    def probe(self, run_id: str, ids: Ids) -> FloatArray:
        """learner_logprobs of ids[1:], float32 [len(ids) - 1]. Raises as `Residency.bring`."""
        slot, piece = self.residency.bring([run_id])[run_id], sequence(ids)
        plan = plan_microbatch([ReadyRun(run_id, slot, [piece])], self.shapes, 0)
        outputs, _ = score(self._model(self.residency.class_of(run_id)), to_device(pack(plan)), self._config)
        return np.asarray(outputs.learner_logprobs_M)[: len(piece.entries)]

    def _model(self, rank_class: int) -> Model:
        return Model(self._params, self.residency.slots(rank_class).params, jnp.asarray(self.residency.scale_A(rank_class)))

    def _account(self, plan: MicrobatchPlan, owners: Owners, cost: Callable[[Piece], float], seconds: float) -> None:
        """Charge runs for their pieces, and jobs for their part of the seconds, by tiles."""
        total = sum(planned.piece.num_tiles for planned in plan.pieces)
        for planned, (job, _) in zip(plan.pieces, owners, strict=True):
            self._charge(planned.run_id, cost(planned.piece))
            job.device_s += seconds * planned.piece.num_tiles / total


def _owner(plan: MicrobatchPlan) -> str:
    """The run of a microbatch that holds one run only, "" for a shared one, whose seconds each run's results have their part of."""
    run_ids = {planned.run_id for planned in plan.pieces}
    return run_ids.pop() if len(run_ids) == 1 else ""
