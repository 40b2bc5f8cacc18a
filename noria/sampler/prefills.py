"""The prefills under way: which pages are being filled, and which of their rows come next. Plain Python."""

from typing import final

from noria.sampler.pages import PAGE, Match, Namespace, Node, PagePool
from noria.sampler.sequence import CHUNK, PageCopy, Prefill, PrefillRow, Sequence
from noria.sampler.slots import SlotTable
from noria.sampler.tenants import PREFILL_CHARGE, Tenants


@final
class Prefills:
    """Owner of the prefills, each from its start until all its rows are planned, or nobody waits for it any more. Part of the scheduler.

    A prefill stays with the adapter version that it began with, and keeps it.
    """

    def __init__(self, pool: PagePool, slots: SlotTable, tenants: Tenants) -> None:
        self._pool = pool
        self._slots = slots
        self._tenants = tenants
        self._prefills: list[Prefill] = []

    def __bool__(self) -> bool:
        return bool(self._prefills)

    def has_run(self, run_ids: set[str]) -> bool:
        """Any prefill is of one of these runs."""
        return any(prefill.run_id in run_ids for prefill in self._prefills)

    def start(self, sequence: Sequence, namespace: Namespace, version: int, match: Match) -> tuple[Node, ...]:
        """Nodes for what `match` lacks of a sequence's K/V, kept for it and to be filled. The pool has the pages, and `match` is kept."""
        request, ids = sequence.request, sequence.filled_ids
        start = PAGE * len(match.chain)
        parent = match.chain[-1] if match.chain else None
        nodes = self._pool.extend(namespace, parent, ids[start:])
        self._slots.acquire(request.run_id, version)
        prefill = Prefill(
            request.tenant,
            request.run_id,
            version,
            ids,
            list(nodes),
            table=[node.page for node in match.chain + nodes],
            parent=parent,
            source=match.source,
            start=start,
            next_position=match.num_positions,
            last_load=sequence.last_load,
            scored=sequence if sequence.wants_scores else None,
        )
        self._prefills.append(prefill)
        return nodes

    def plan_rows(self, limit: int) -> tuple[list[PageCopy], list[PrefillRow], set[str]]:
        """The next dispatch's copies, rows and runs; none while all prefills wait for pages to be loaded.

        Row by row the tenant with the least service: its oldest prefill first, then whichever is nearest to its end, so that a long prompt neither
        holds up short ones nor is held up by them. Rows with and without targets are of different programs, and so never in one dispatch: of one
        tenant the two kinds take turns. Once its loads are made, the first of all prefills can run: what it builds on was started before it, or
        filled when it started.
        """
        copies: list[PageCopy] = []
        rows: list[PrefillRow] = []
        runs, served = set[str](), set[str]()
        loads_through = self._pool.loads_through
        waiting = {p for p in self._prefills if p.last_load > loads_through}
        while len(rows) < limit and (runnable := [p for p in self._prefills if p not in waiting and _can_join(rows, p)]):
            tenant = min((p.tenant for p in runnable), key=lambda name: self._tenants[name].service)
            own = [p for p in runnable if p.tenant == tenant]
            if not rows:
                own = [p for p in own if p.is_scored != self._tenants[tenant].is_scored_last] or own
            prefill = min(own, key=lambda p: p.num_remaining) if tenant in served else own[0]
            if not self._slots.bring(prefill.run_id, prefill.version):
                waiting.add(prefill)
                continue
            if not rows:
                self._tenants[tenant].is_scored_last = prefill.is_scored
            served.add(tenant)
            runs.add(prefill.run_id)
            if prefill.source is not None:
                copies.append(PageCopy(prefill.source.page, prefill.nodes[0].page))
                self._pool.release((prefill.source,))
                prefill.source = None
            rows.append(self._next_row(prefill))
            if not prefill.num_remaining:
                self._end(prefill)
        return copies, rows, runs

    def trim(self) -> None:
        """Give up what no request waits for any more, from the end: whoever keeps a node keeps all nodes before it."""
        for prefill in reversed(self._prefills.copy()):
            while prefill.nodes and not prefill.nodes[-1].num_users and not prefill.nodes[-1].is_filled:
                self._pool.forget(prefill.nodes.pop())
            if prefill.num_remaining <= 0:
                self._end(prefill)

    def _next_row(self, prefill: Prefill) -> PrefillRow:
        begin = prefill.next_position
        end = min(begin + CHUNK, prefill.stop)
        prefill.next_position = end
        for index in range((begin - prefill.start) // PAGE, -(-(end - prefill.start) // PAGE)):
            node = prefill.nodes[index]
            node.is_filled = prefill.start + PAGE * index + len(node.ids) <= end
        self._tenants.charge(prefill.tenant, PREFILL_CHARGE * (end - begin))
        slot = self._slots.slot(prefill.run_id, prefill.version)
        row = PrefillRow(prefill.ids[begin:end], begin, prefill.table[: -(-end // PAGE)], slot)
        if prefill.scored is None:
            return row
        request = prefill.scored.request
        return row._replace(targets=request.prompt_ids[begin + 1 : end + 1], num_top=request.num_top, scored=prefill.scored)

    def _end(self, prefill: Prefill) -> None:
        self._prefills.remove(prefill)
        if prefill.source is not None:
            self._pool.release((prefill.source,))
        self._slots.release(prefill.run_id, prefill.version)


def _can_join(rows: list[PrefillRow], prefill: Prefill) -> bool:
    return prefill.can_run and (not rows or bool(rows[0].targets) == prefill.is_scored)
