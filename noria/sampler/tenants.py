"""Whose turn it is: the tenants' accounts, and the order in which each tenant's requests are admitted. Plain Python.

Service is virtual time: tokens charged 1 (prefill) : 2 (decode), divided by the tenant's weight (start-time fair queueing, Goyal et al. 1996). A
tenant that comes, or comes back from idling, starts at the smallest virtual time of the busy ones at least, so that idling earns no credit; where
none is busy, at the largest of all, so that whoever was served while nobody else wanted anything owes nobody for it.

Of one tenant's requests go first those that were preempted, then those whose episode had pages here when they came, then the others; but of these the
one that has waited longest is overtaken by no more than MAX_OVERTAKEN.
"""

from bisect import insort
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import final

from noria.sampler.sequence import Sequence

PREFILL_CHARGE = 1
DECODE_CHARGE = 2

MAX_OVERTAKEN = 8
"""Warm requests that may be admitted in a row before an older cold one, and requests of other tenants, ever, into pages that one waits for: few,
since each of them may hold its lane and its pages for long."""

MAX_IDLE = 64
"""Tenants that may be kept for nothing, beside twice as many as were kept for something."""


@final
@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant's account and queue. Owned by the scheduler's `Tenants`.

    num_active: requests admitted and unfinished. preempted: by the turn that they had; warm, cold: by arrival. is_scored_last: of its prefills a
    scored one last opened a dispatch.
    """

    name: str
    weight: float = 1.0
    service: float = 0.0
    num_active: int = 0
    num_overtaken: int = 0
    is_scored_last: bool = False
    preempted: list[Sequence] = field(default_factory=list)
    warm: deque[Sequence] = field(default_factory=deque)
    cold: deque[Sequence] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return len(self.preempted) + len(self.warm) + len(self.cold)

    @property
    def is_busy(self) -> bool:
        return bool(self.num_active or self.num_waiting)

    def push(self, sequence: Sequence, *, is_warm: bool) -> None:
        """A new request."""
        (self.warm if is_warm else self.cold).append(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """A request that was admitted before comes back, ahead of all that never were."""
        insort(self.preempted, sequence, key=lambda s: s.turn)

    def first(self) -> Sequence:
        """The next to be admitted. There is one."""
        return self.preempted[0] if self.preempted else (self.warm if self._is_warm_first else self.cold)[0]

    def pop(self) -> Sequence:
        """Take out the next to be admitted."""
        if self.preempted:
            return self.preempted.pop(0)
        if self._is_warm_first:
            sequence = self.warm.popleft()
            self.num_overtaken += bool(self.cold) and self.cold[0].arrival < sequence.arrival
            return sequence
        self.num_overtaken = 0
        return self.cold.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits."""
        for queue in (self.preempted, self.warm, self.cold):
            if sequence in queue:
                return queue.remove(sequence)
        raise AssertionError("no such request waits")

    def queue(self) -> Iterator[Sequence]:
        """All that wait, in the order in which they would be admitted if no more came."""
        copy = Tenant(self.name, num_overtaken=self.num_overtaken, warm=self.warm.copy(), cold=self.cold.copy(), preempted=self.preempted.copy())
        while copy.num_waiting:
            yield copy.pop()

    @property
    def _is_warm_first(self) -> bool:
        if not self.warm or not self.cold:
            return bool(self.warm)
        return self.num_overtaken < MAX_OVERTAKEN or self.warm[0].arrival < self.cold[0].arrival


@final
class Tenants:
    """All tenants but those that may be forgotten: idle ones whose account says no more than a newcomer's. Touched by the device thread only."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._level = 0.0  # service that a newcomer starts with
        self._num_kept = 0  # by the last sweep

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) > 2 * self._num_kept + MAX_IDLE:
                self._tenants = {t.name: t for t in self if t.is_busy or t.weight != 1 or t.service > self._level}
                self._num_kept = len(self._tenants)
            tenant = self._tenants[name] = Tenant(name)
        return tenant

    def push(self, sequence: Sequence, *, is_warm: bool) -> None:
        """Queue a new request."""
        tenant = self[sequence.request.tenant]
        if not tenant.is_busy:
            busy = [t.service for t in self if t.is_busy]
            self._level = max(self._level, min(busy) if busy else max(t.service for t in self))
            tenant.service = max(tenant.service, self._level)
        tenant.push(sequence, is_warm=is_warm)

    def charge(self, name: str, tokens: int) -> None:
        """Tokens, weighted by their kind, that were computed for a tenant."""
        tenant = self[name]
        tenant.service += tokens / tenant.weight

    def next_to_admit(self, num_lanes: int, beside: Container[Tenant] = ()) -> Tenant | None:
        """The tenant, not one of `beside`, whose turn it is to have one more request active, None if nobody may.

        With all lanes in use only a tenant below its share of them may. If the one with the fewest per weight may not, then nobody may.
        """
        queued = [tenant for tenant in self if tenant.num_waiting and tenant not in beside]
        if not queued:
            return None
        tenant = min(queued, key=lambda t: (t.num_active / t.weight, t.service))
        if sum(t.num_active for t in self) < num_lanes:
            return tenant
        share = num_lanes * tenant.weight / sum(t.weight for t in self if t.is_busy)
        return tenant if tenant.num_active < max(1.0, share) else None
