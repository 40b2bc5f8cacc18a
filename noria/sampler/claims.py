"""Who gives its pages to others when they run short: of the tenant that holds most for its weight, the request admitted last. Plain Python."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import final

from noria.sampler.sequence import Sequence
from noria.sampler.tenants import Tenant, Tenants


@final
class Claims:
    """The active requests' claims to their pages at one moment."""

    def __init__(self, tenants: Tenants, active: Iterable[Sequence], can_preempt: Callable[[Sequence], bool]) -> None:
        """can_preempt: whether a request may be preempted; if not, its pages count all the same."""
        self._tenants = tenants
        self._num_pages: Counter[str] = Counter()
        self._candidates: dict[str, list[Sequence]] = {}
        for sequence in sorted(active, key=lambda s: s.turn):
            name = sequence.request.tenant
            self._num_pages[name] += len(sequence.table)
            if can_preempt(sequence):
                self._candidates.setdefault(name, []).append(sequence)

    def least(self) -> Sequence:
        """The request with the least claim. There is one that may be preempted."""
        return self._candidates[self._most_over()][-1]

    def yielding_to(self, tenant: Tenant, num_missing: int, num_needed: int) -> list[Sequence]:
        """Whom to preempt so that one more request of a tenant finds the pages that it misses.

        Nobody, if they are not enough, or if with num_needed more pages the tenant would hold more for its weight than one that gave them.
        """
        found: list[Sequence] = []
        while num_missing > 0 and self._candidates:
            name = self._most_over()
            victim = self._candidates[name].pop()
            if not self._candidates[name]:
                del self._candidates[name]
            self._num_pages[name] -= len(victim.table)
            if name == tenant.name or self.share(tenant, num_needed) > self.share(self._tenants[name]):
                return []
            num_missing -= len(victim.own_pages) + sum(node.content.num_holders == 1 for node in victim.chain)
            found.append(victim)
        return found if num_missing <= 0 else []

    def share(self, tenant: Tenant, num_more: int = 0) -> float:
        """Pages that a tenant would hold with so many more, for its weight."""
        return (self._num_pages[tenant.name] + num_more) / tenant.weight

    def _most_over(self) -> str:
        return max(self._candidates, key=lambda name: self.share(self._tenants[name]))
