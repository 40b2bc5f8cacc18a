"""Fair order of runs that want the learner, and what shares its next microbatch. Plain Python and NumPy, no jax: simulated as it is.

The run that is furthest behind in service (estimated FLOPs over its weight) has the turn: its batch is finished first, since two batches that take
turns are both late. A turn ends with its batch, or after a quantum if others wait; room that its microbatches leave is filled with the next runs'
pieces. A run that was idle starts level with the least served active one, so that idling earns no credit.

The bound: among runs that are ready, no run's service over weight is ahead of another's by more than one quantum plus one microbatch (over the
weight of the one ahead). For a turn begins at the run furthest behind and ends a quantum later, a microbatch at most beyond it; and a run that is
already a quantum ahead fills no room. (Start-time fair queueing: Goyal, Vin and Cheng 1996; here with batches in place of packets.)
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from noria.rl.packing import MicrobatchPlan, MicrobatchShape, ReadyRun, plan_microbatch
from noria.types import Piece

Mode: TypeAlias = Literal["train", "score", "reference"]
"""What a microbatch is for: gradient and outputs, outputs alone, or outputs of the base alone."""

FILL: Final = 0.5
"""How far a pass is filled with other runs' pieces, of what it may hold, where no more than that is computed: whoever's batch ends with it waits for
them, and half an axis already has the speed of a whole one. Where whole axes are computed, all room is filled."""


@final
class FairOrder:
    """Service of runs, and whose turn it is. Owned by the learner; touched by the device thread only.

    quantum: service of a turn after which others that wait go first, FLOPs; may be changed at any time.
    """

    def __init__(self, quantum: float = math.inf) -> None:
        self.quantum = quantum
        self._service: dict[str, float] = {}
        self._weight: dict[str, float] = {}
        self._active: set[str] = set()
        self._floor = 0.0
        self._turn: str | None = None
        self._used = 0.0

    def activate(self, run_id: str, weight: float) -> None:
        """The run has work. weight > 0: its fair share relative to others. Nothing if it has had some already."""
        assert weight > 0, "a fair share is positive"
        self._weight[run_id] = weight
        if run_id not in self._active:
            self._service[run_id] = max(self._service.get(run_id, 0.0), self._least())
            self._active.add(run_id)

    def deactivate(self, run_id: str) -> None:
        """The run has no work for now; what it has had is remembered."""
        self._floor = self._least()
        self._active.discard(run_id)
        self.end_turn(run_id)

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        self.deactivate(run_id)
        self._service.pop(run_id, None)
        self._weight.pop(run_id, None)

    def charge(self, run_id: str, flops: float) -> None:
        """The run has had so much of the learner."""
        self._service[run_id] += flops / self._weight[run_id]
        if run_id == self._turn:
            self._used += flops

    def end_turn(self, run_id: str) -> None:
        """The batch that the run's turn was for is done. Nothing if it is another's turn."""
        if run_id == self._turn:
            self._turn = None

    def service(self, run_id: str) -> float:
        """FLOPs over weight that the run has had, or has been credited with."""
        return self._service[run_id]

    def order(self, ready: Collection[str]) -> list[str]:
        """Whose turn it is of the ready runs, then those that may fill its room, the one furthest behind first; ties by name, to be reproducible.

        Begins a turn, if none goes on. ready: active runs, at least one.
        """
        by_service = sorted(ready, key=lambda run_id: (self._service[run_id], run_id))
        is_over = self._used >= self.quantum and len(by_service) > 1
        if self._turn not in by_service or is_over:
            self._turn, self._used = by_service[0], 0.0
        least = self._service[by_service[0]]
        others = (r for r in by_service if r != self._turn and self._service[r] - least < self.quantum / self._weight[r])
        return [self._turn, *others]

    def _least(self) -> float:
        return min((self._service[run_id] for run_id in self._active), default=self._floor)


@dataclass(frozen=True, slots=True)
class Offer:
    """Pieces that a run has ready for a microbatch of one mode, in its own order. rank_class: of its adapter; a microbatch holds one."""

    run_id: str
    rank_class: int
    mode: Mode
    pieces: Sequence[Piece]


def plan_pass(offers: Sequence[Offer], shapes: Sequence[MicrobatchShape], max_positions: int, *, num_slots: int) -> MicrobatchPlan:
    """The next microbatch: as many of the first offer's pieces as fit, and into the room that is left, those of the others that fit best.

    offers: in fair order, at least one. shapes, max_positions: see `rl.packing.plan_microbatch`. num_slots: most runs in one microbatch. Pieces that
    are only scored also fill the room of a microbatch that trains, which is computed anyway; one that only scores is not made to train. Slots are
    left at 0: the caller knows them.
    """
    first = offers[0]
    welcome = ("train", "score") if first.mode == "train" else (first.mode,)
    others = [offer for offer in offers[1:] if offer.rank_class == first.rank_class and offer.mode in welcome][: num_slots - 1]
    together = plan_microbatch([ReadyRun(first.run_id, 0, first.pieces)], shapes, max_positions)
    own, room = together.pieces, max_positions
    if together.shape.is_counted:
        room = int(FILL * max_positions)
    if not others or together.dispatched_positions >= room:
        return together
    # Its turn: none of what fits is left for later because others would fit better.
    ready = [ReadyRun(first.run_id, 0, [p.piece for p in own]), *(ReadyRun(o.run_id, 0, o.pieces) for o in others)]
    return plan_microbatch(ready, shapes, room, at_least=len(own))
