"""The learner itself as the benches drive it: without a device thread, by the methods that a server calls. And its passes without the device.

make_learner, add_runs, then `Learner.train` and `drain`
passes    the same queues, order and planner; every pass is taken for done as soon as it is planned
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from noria.bench.executors import LORA, OPTIMIZER, adapter_of
from noria.clock import RealClock
from noria.config import LearnerConfig
from noria.learner.batches import Costs, PlannedBatch
from noria.learner.learner import Learner
from noria.learner.operations import ForwardBackward, RunSpec, StepResult
from noria.learner.queue import FairOrder, plan_pass
from noria.learner.run_queue import RunQueue
from noria.model.placement import place
from noria.model.weights import LoadedBase
from noria.observe import SpanRecorder
from noria.rl.packing import MicrobatchPlan, MicrobatchShape
from noria.types import LoraSpec, LossSpec

NO_STALL_S = 1e6
"""No sampler waits for these learners: passes are as long as their sizes allow."""

BARRIERS = 2
"""Of `Learner.train`, an optimizer step and a save: each is charged like a tile."""


def make_learner(loaded: LoadedBase, settings: LearnerConfig, *, dtype: npt.DTypeLike = np.float32, spans: SpanRecorder | None = None) -> Learner:
    """A learner of these sizes on this base, nothing compiled. spans: where it records what it does when."""
    clock = RealClock()
    params, spans = place(loaded.params, dtype).stacked, spans or SpanRecorder(clock)
    return Learner(params, loaded.config, settings, spans=spans, clock=clock, wake=lambda: None, max_stall_s=NO_STALL_S)


def add_runs(learner: Learner, loaded: LoadedBase, ranks: Mapping[str, int]) -> None:
    """Load runs of these ranks, each as wide as its class; none's delta is zero, so no part of a gradient is."""
    loads = []
    for seed, (run_id, rank) in enumerate(ranks.items()):
        lora = LoraSpec(rank, LORA.alpha)
        loads.append(learner.load_run(RunSpec(run_id, lora, OPTIMIZER, LossSpec(sequence_mask_c=0.0)), adapter_of(loaded.config, lora, rank, seed)))
    drain(learner)
    for load in loads:
        load.result(0)


def drain(learner: Learner) -> None:
    """Work until nothing is left."""
    while learner.has_work:
        learner.step()


def passes(
    batches: Mapping[str, Iterator[PlannedBatch]], shapes: Sequence[MicrobatchShape], costs: Costs, *, rank_class: int = LORA.rank
) -> Iterator[MicrobatchPlan]:
    """The passes of runs that train batch after batch, the next as soon as one is done, in the learner's own order, until all are trained.

    batches: of each run, none walked. Turns end with their batches: no quantum, which is in seconds of a device.
    """
    fair, queues = FairOrder(), dict[str, RunQueue]()

    def begin(run_id: str) -> None:
        if (batch := next(batches[run_id], None)) is not None:
            queues[run_id] = _queue(run_id, batch)
            fair.activate(run_id, 1.0)

    for run_id in batches:
        begin(run_id)
    while queues:
        found = [queues[run_id].offer(rank_class, most=shapes[-1].num_tiles) for run_id in fair.order(queues)]
        offers = [offer for offer in found if offer is not None]
        owners = {offer.run_id: owned for offer, owned in offers}
        plan = plan_pass([offer for offer, _ in offers], shapes, shapes[-1].num_positions, num_slots=len(batches))
        yield plan
        for planned in plan.pieces:
            fair.charge(planned.run_id, costs.score(planned.piece) + costs.pull(planned.piece))
            owners[planned.run_id][planned.piece_index][0].visited()
        for run_id in dict.fromkeys(planned.run_id for planned in plan.pieces):
            if queues[run_id].settle():
                fair.end_turn(run_id)
                fair.charge(run_id, BARRIERS * costs.tile)
                fair.deactivate(run_id)
                del queues[run_id]
                begin(run_id)


def train_in_turn(learner: Learner, batches: Mapping[str, Iterator[PlannedBatch]], losses: Callable[[str], LossSpec | None]) -> int:
    """Train all batches, each run's next as soon as its last is done; how many there were. Raises what a step failed with."""
    num_trained, training = 0, dict[str, "Future[StepResult]"]()

    def begin(run_id: str) -> None:
        if (batch := next(batches[run_id], None)) is not None:
            training[run_id] = learner.train(run_id, batch, loss=losses(run_id))

    for run_id in batches:
        begin(run_id)
    while training:
        learner.step()
        for run_id in [run_id for run_id, future in training.items() if future.done()]:
            training.pop(run_id).result(0)
            num_trained += 1
            begin(run_id)
    return num_trained


def _queue(run_id: str, batch: PlannedBatch) -> RunQueue:
    queue = RunQueue(RunSpec(run_id, LORA, OPTIMIZER, LossSpec()), 0)
    queue.append([ForwardBackward(batch, LossSpec(sequence_mask_c=0.0))], [Future()], 0)
    return queue
