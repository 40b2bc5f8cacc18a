"""Which requests get pages and lanes, and what the next dispatch is. Plain Python: no arrays, no time, no threads.

    submit ─▶ waiting (per tenant, first come first served)
                 │ admission: the tenant with the fewest active requests per weight; pages for prompt + max_tokens, or nobody overtakes
                 ▼
              active ─▶ prefill rows ─▶ decode lanes ─▶ finished
                        the tenant with the least service per weight goes first

Service is virtual time: tokens charged 1 (prefill) : 2 (decode), divided by the tenant's weight (start-time fair queueing, Goyal et al. 1996). A
tenant that comes back from idling starts at the smallest virtual time of the busy ones, so that idling earns no credit. Lanes are not places on the
device: every dispatch packs whatever is decoding into tiles anew, so nothing fragments and a newcomer runs in the next dispatch.

A tenant below its share of lanes is admitted even when all lanes are in use, so a flood delays others by no more than their fair turn; the dispatch
then takes turns over the tiles.

Deterministic runs (`set_deterministic`) get the same bits whatever else is going on. While any of their requests could run, dispatches are no larger
than the one shape that such requests run in, and whoever else is ready rides along. And only prefilled pages of theirs are ever cached: a decoded
position's K/V differ in bits from the prefilled ones, and which of the two a later request finds would depend on whether its pages were still there.
So what was sampled in one turn is prefilled again, once, when the next turn builds on it.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, final

from noria.sampler.pages import PAGE, Match, Namespace, Node, PagePool
from noria.sampler.sequence import (
    CHUNK,
    LANES_PER_TILE,
    DecodeDispatch,
    LaneTile,
    PageCopy,
    Prefill,
    PrefillDispatch,
    PrefillRow,
    Sampled,
    Sequence,
)
from noria.sampler.slots import SlotTable

PREFILL_CHARGE = 1
DECODE_CHARGE = 2

Reason: TypeAlias = Literal["lanes", "pages", "prefill", "decoding"]


class Waiting(NamedTuple):
    """Why a request is not finished. position: how many requests of its tenant are admitted before it (0 if it is admitted)."""

    request_id: str
    tenant: str
    position: int
    reason: Reason


@dataclass(eq=False, slots=True)
class _Tenant:
    name: str
    weight: float = 1.0
    service: float = 0.0
    num_active: int = 0
    waiting: deque[Sequence] = field(default_factory=deque)

    @property
    def is_busy(self) -> bool:
        return bool(self.num_active or self.waiting)


@final
class Scheduler:
    """Owner of all sequences after submission, of the page pool and of the tenants' accounts. Touched by the device thread only.

    num_lanes: most lanes of a decode dispatch, a multiple of 8. max_rows: most rows of a prefill dispatch. fixed: both, of dispatches with requests
    of deterministic runs; None: as large as any.
    """

    def __init__(self, pool: PagePool, slots: SlotTable, *, num_lanes: int, max_rows: int, fixed: tuple[int, int] | None = None) -> None:
        self.pool = pool
        self._slots = slots
        self._num_lanes = num_lanes
        self._max_rows = max_rows
        self._fixed_lanes, self._fixed_rows = fixed or (num_lanes, max_rows)
        self._deterministic: set[str] = set()
        self._tenants: dict[str, _Tenant] = {}
        self._active: dict[Sequence, None] = {}
        self._prefills: list[Prefill] = []
        self._blocked_on_pages: str | None = None
        self._prefilled_last = False
        self._num_unfinished = 0

    @property
    def has_work(self) -> bool:
        """Any request waits or is active. (Prefills exist only for active requests.) Readable from any thread."""
        return self._num_unfinished > 0

    def is_prefilling(self, run_id: str) -> bool:
        """A prefill of the run, and so of one of its versions, is under way."""
        return any(prefill.run_id == run_id for prefill in self._prefills)

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, active ones first."""
        yield from self._active
        for tenant in self._tenants.values():
            yield from tenant.waiting

    def set_weight(self, tenant: str, weight: float) -> None:
        """Fair-share weight of a tenant, > 0; 1 unless set."""
        assert weight > 0
        self._tenant(tenant).weight = weight

    def set_deterministic(self, run_id: str, *, is_deterministic: bool) -> None:
        """From now on the run's requests have the same bits whatever else is going on, or need not. Before the run's first request."""
        (self._deterministic.add if is_deterministic else self._deterministic.discard)(run_id)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request. Raises UnknownVersionError: its run has no published version, or the pinned one is not resident."""
        request = sequence.request
        if request.version is None:
            self._slots.newest(request.run_id)
        else:
            self._slots.acquire(request.run_id, request.version)
        tenant = self._tenant(request.tenant)
        if not tenant.is_busy:
            tenant.service = max(tenant.service, min((t.service for t in self._tenants.values() if t.is_busy), default=0.0))
        tenant.waiting.append(sequence)
        self._num_unfinished += 1

    def cancel(self, sequence: Sequence) -> None:
        """Forget an unfinished request: its lane and pages are free at once. A prefill that others wait for goes on."""
        if sequence in self._active:
            self._leave(sequence)
        else:
            self._tenant(sequence.request.tenant).waiting.remove(sequence)
            self._end(sequence)

    def waiting(self) -> list[Waiting]:
        """Every unfinished request, with what it waits for."""
        found = [Waiting(s.request.request_id, s.request.tenant, 0, "decoding" if s.is_prefilled else "prefill") for s in self._active]
        for tenant in self._tenants.values():
            reason: Reason = "pages" if self._blocked_on_pages == tenant.name else "lanes"
            found += [Waiting(s.request.request_id, tenant.name, position, reason) for position, s in enumerate(tenant.waiting)]
        return found

    def plan(self) -> PrefillDispatch | DecodeDispatch | None:
        """Admit what fits and choose the next dispatch, which the caller runs at once. None: nothing to do.

        Prefill rows go first, but never twice in a row while lanes could decode: a long prompt stalls no one.
        """
        self._admit()
        ready = [sequence for sequence in self._active if sequence.is_prefilled]
        self._prefilled_last = bool(self._prefills) and not (self._prefilled_last and ready)
        if self._prefilled_last:
            return self.plan_prefill()
        return self._plan_decode(ready) if ready else None

    def complete(self, dispatch: DecodeDispatch, sampled: Many[Many[Sampled]]) -> list[Sequence]:
        """Record what a dispatch sampled, per tile and lane; charge it; return the sequences that finished, whose pages are now only cached."""
        finished = []
        for tile, lanes in zip(dispatch.tiles, sampled, strict=True):
            for sequence, lane in zip(tile.sequences, lanes, strict=True):
                sequence.append(lane.ids, lane.behavior_logprobs, tile.version)
                self._charge(sequence.request.tenant, DECODE_CHARGE * len(lane.ids))
                if sequence.is_finished:
                    finished.append(sequence)
        for sequence in finished:
            self._adopt(sequence)
            self._leave(sequence)
        return finished

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        return tenant

    def _charge(self, tenant: str, tokens: int) -> None:
        account = self._tenants[tenant]
        account.service += tokens / account.weight

    # Admission

    def _admit(self) -> None:
        self._blocked_on_pages = None
        while (tenant := self._next_tenant()) is not None:
            if not self._place(tenant.waiting[0]):
                self._blocked_on_pages = tenant.name
                return
            self._active[tenant.waiting.popleft()] = None
            tenant.num_active += 1

    def _next_tenant(self) -> _Tenant | None:
        """The tenant whose turn it is to get a lane, None if nobody may. If the one with the fewest lanes per weight may not, then nobody may."""
        queued = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not queued:
            return None
        tenant = min(queued, key=lambda t: (t.num_active / t.weight, t.service))
        if len(self._active) < self._num_lanes:
            return tenant
        share = self._num_lanes * tenant.weight / sum(t.weight for t in self._tenants.values() if t.is_busy)
        return tenant if tenant.num_active < max(1.0, share) else None

    def _place(self, sequence: Sequence) -> bool:
        """Reserve all pages that the request may need, sharing what is cached; start a prefill for what is not. False: not enough pages now."""
        request = sequence.request
        prefix = request.prompt_ids[:-1]
        version = self._slots.newest(request.run_id) if request.version is None else request.version
        namespace, match = self._match(sequence, prefix, version)
        is_known = match.num_positions == len(prefix)
        num_own = sequence.num_table_pages - len(prefix) // PAGE
        num_new = 0 if is_known else -(-len(prefix) // PAGE) - len(match.chain)
        kept = match.chain if match.source is None else (*match.chain, match.source)
        self.pool.keep(kept)
        if num_own + num_new > self.pool.num_available:
            self.pool.release(kept)
            return False
        is_mixed = namespace[1] != version and match.num_positions > 0
        sequence.namespace, sequence.kv_version = namespace, None if is_mixed else version
        nodes = kept if is_known else match.chain + self._start_prefill(sequence, version, match)
        num_full = len(prefix) // PAGE
        sequence.chain, sequence.source = nodes[:num_full], nodes[num_full] if len(nodes) > num_full else None
        sequence.own_pages = self.pool.take(num_own)
        sequence.table = [node.page for node in sequence.chain] + sequence.own_pages
        return True

    def _match(self, sequence: Sequence, prefix: tuple[int, ...], version: int) -> tuple[Namespace, Match]:
        """The namespace that knows most of the prefix: the version's, unless the episode itself has more."""
        request = sequence.request
        pure: Namespace = (request.run_id, version)
        match = self.pool.match(pure, prefix)
        if request.version is None and request.episode_id:
            own: Namespace = (request.run_id, request.episode_id)
            own_match = self.pool.match(own, prefix)
            if own_match.num_positions > match.num_positions:
                return own, own_match
        return pure, match

    def _start_prefill(self, sequence: Sequence, version: int, match: Match) -> tuple[Node, ...]:
        request = sequence.request
        prefix = request.prompt_ids[:-1]
        parent = match.chain[-1] if match.chain else None
        start = PAGE * len(match.chain)
        nodes = self.pool.extend(sequence.namespace, parent, prefix[start:])
        self._slots.acquire(request.run_id, version)
        table = [node.page for node in match.chain + nodes]
        prefill = Prefill(request.tenant, request.run_id, version, prefix, list(nodes), table, parent, match.source, start, match.num_positions)
        self._prefills.append(prefill)
        return nodes

    # Planning

    def plan_prefill(self) -> PrefillDispatch:
        """Fill the rows one by one from the prefills of the tenant with the least service; a tenant's own go in order. There is a prefill.

        The first of all prefills can always run: what it builds on was started before it, or filled when it started.
        """
        copies: list[PageCopy] = []
        rows: list[PrefillRow] = []
        is_fixed = False
        limit = self._fixed_rows if any(p.run_id in self._deterministic for p in self._prefills) else self._max_rows
        while len(rows) < limit and (runnable := [p for p in self._prefills if p.can_run]):
            prefill = min(runnable, key=lambda p: self._tenants[p.tenant].service)
            if prefill.source is not None:
                copies.append(PageCopy(prefill.source.page, prefill.nodes[0].page))
                self.pool.release((prefill.source,))
                prefill.source = None
            rows.append(self._next_row(prefill))
            is_fixed |= prefill.run_id in self._deterministic
            if prefill.next_position == prefill.stop:
                self._end_prefill(prefill)
        return PrefillDispatch(copies, rows, is_fixed)

    def _next_row(self, prefill: Prefill) -> PrefillRow:
        begin = prefill.next_position
        end = min(begin + CHUNK, prefill.stop)
        prefill.next_position = end
        node_end = prefill.start
        for node in prefill.nodes:
            node_end += len(node.ids)
            node.is_filled = node_end <= end
        self._charge(prefill.tenant, PREFILL_CHARGE * (end - begin))
        slot = self._slots.slot(prefill.run_id, prefill.version)
        return PrefillRow(prefill.ids[begin:end], begin, prefill.table[: -(-end // PAGE)], slot)

    def _end_prefill(self, prefill: Prefill) -> None:
        self._prefills.remove(prefill)
        if prefill.source is not None:
            self.pool.release((prefill.source,))
        self._slots.release(prefill.run_id, prefill.version)

    def _plan_decode(self, ready: list[Sequence]) -> DecodeDispatch:
        """Pack what is ready into tiles; if there are more than fit, tenants take turns by service, each with its oldest requests first."""
        queues: dict[str, deque[LaneTile]] = {}
        for tile in self._tiles(ready):
            queues.setdefault(tile.sequences[0].request.tenant, deque()).append(tile)
        service = {name: self._tenants[name].service for name in queues}
        tiles: list[LaneTile] = []
        limit = self._fixed_lanes if any(self._is_deterministic(sequence) for sequence in ready) else self._num_lanes
        while queues and len(tiles) < limit // LANES_PER_TILE:
            name = min(queues, key=service.__getitem__)
            tile = queues[name].popleft()
            tiles.append(tile)
            service[name] += DECODE_CHARGE * len(tile.sequences) / self._tenants[name].weight
            if not queues[name]:
                del queues[name]
        copies = [copy for tile in tiles for sequence in tile.sequences for copy in self._own_source(sequence)]
        return DecodeDispatch(copies, tiles, is_fixed=any(self._is_deterministic(tile.sequences[0]) for tile in tiles))

    def _tiles(self, ready: list[Sequence]) -> list[LaneTile]:
        """Ready sequences of one tenant and one adapter slot, eight to a tile, in order of admission."""
        tiles: list[LaneTile] = []
        open_tiles: dict[tuple[str, int], LaneTile] = {}
        for sequence in ready:
            request = sequence.request
            version = self._slots.newest(request.run_id) if request.version is None else request.version
            key = (request.tenant, self._slots.slot(request.run_id, version))
            tile = open_tiles.get(key)
            if tile is None or len(tile.sequences) == LANES_PER_TILE:
                tile = open_tiles[key] = LaneTile(key[1], version, [])
                tiles.append(tile)
            tile.sequences.append(sequence)
        return tiles

    def _own_source(self, sequence: Sequence) -> Iterator[PageCopy]:
        """Before its first decode step a sequence copies the page that it shares in part: it is about to write there."""
        if sequence.source is not None:
            yield PageCopy(sequence.source.page, sequence.own_pages[0])
            self.pool.release((sequence.source,))
            sequence.source = None

    def _is_deterministic(self, sequence: Sequence) -> bool:
        return sequence.request.run_id in self._deterministic

    # Leaving

    def _adopt(self, sequence: Sequence) -> None:
        """Cache a finished sequence's pages: for everyone if all of them are of one version, and for its episode in any case.

        Not those of a deterministic run: what was prefilled is cached, and the rest was decoded.
        """
        if self._is_deterministic(sequence):
            return
        run_id, episode_id = sequence.request.run_id, sequence.request.episode_id
        if sequence.kv_version is not None:
            self.pool.adopt((run_id, sequence.kv_version), sequence.filled_ids, sequence.table)
        if episode_id:
            self.pool.adopt((run_id, episode_id), sequence.filled_ids, sequence.table)

    def _leave(self, sequence: Sequence) -> None:
        del self._active[sequence]
        self._tenants[sequence.request.tenant].num_active -= 1
        if sequence.source is not None:
            self.pool.release((sequence.source,))
        self.pool.release(sequence.chain)
        self.pool.give_back(sequence.own_pages)
        self._trim_prefills()
        self._end(sequence)

    def _trim_prefills(self) -> None:
        """Give up what no request waits for any more, from the end: whoever keeps a node keeps all nodes before it."""
        for prefill in reversed(self._prefills.copy()):
            while prefill.nodes and not prefill.nodes[-1].num_users and not prefill.nodes[-1].is_filled:
                self.pool.forget(prefill.nodes.pop())
            if prefill.next_position >= prefill.stop:
                self._end_prefill(prefill)

    def _end(self, sequence: Sequence) -> None:
        self._num_unfinished -= 1
        if sequence.request.version is not None:
            self._slots.release(sequence.request.run_id, sequence.request.version)
