"""Which requests get pages and lanes, and what the next dispatch is. Plain Python: no arrays, no time, no threads.

    submit ─▶ waiting (per tenant: `tenants`)
                 │ admission: the tenant with the fewest active requests per weight; pages for what is known of it, or few overtake
                 ▼
              active ─▶ prefill rows ─▶ decode lanes ─▶ finished
                 │      the tenant with the least service per weight goes first
                 ▼
              preempted ─▶ waiting, in front

Lanes are not places on the device: every dispatch packs whatever is decoding into tiles anew, so nothing fragments and a newcomer runs in the next
dispatch. A tenant below its share of lanes is admitted even when all lanes are in use, so a flood delays others by no more than their fair turn; the
dispatch then takes turns over the lanes.

A request holds the pages that it has filled and those that the next dispatch may write. When they run short, cached pages go first, then the active
request with the least claim is preempted: of the tenant that holds most pages for its weight, the one admitted last. What it has filled is cached,
what it has sampled stays, and it comes back in front of its tenant's queue, with the claim that it had. Admission leaves room for the active ones to
grow, and preempts only for a tenant that even afterwards holds less for its weight than the other, so never back and forth. Nothing gets stuck: of
those who are short of pages one takes a decode step or gives way to others that hold some, and what has been sampled stays sampled. Nor does one that
needs many pages hold up everybody: newcomers of tenants that hold less overtake it into what is free, but no more than MAX_OVERTAKEN ever do.

Where a publish has K/V computed anew (`recomputes`), whoever comes back keeps the version that it comes back with until it has sampled under it:
however often there are publishes, and however long the prompt, each return makes progress.

Deterministic runs (`set_deterministic`) get the same bits whatever else is going on. While any of their requests could run, dispatches are no larger
than the one shape that such requests run in, and whoever else is ready rides along. Their requests have all their pages from admission on and are
never preempted. And only prefilled pages of theirs are ever cached: a decoded position's K/V differ in bits from the prefilled ones, and which of the
two a later request finds would depend on whether its pages were still there. So what was sampled in one turn is prefilled again, once, when the next
turn builds on it.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Many
from itertools import count
from typing import NamedTuple, final

from noria.errors import QueueFullError
from noria.sampler.claims import Claims
from noria.sampler.pages import NOTHING, PAGE, Match, Namespace, Node, PagePool
from noria.sampler.prefills import Prefills
from noria.sampler.schedule import Limits, Reason, ScheduleCounts, Waiting
from noria.sampler.sequence import (
    BLOCK_PAGES,
    LANES_PER_TILE,
    DecodeDispatch,
    PageCopy,
    PrefillDispatch,
    Sampled,
    Scored,
    Sequence,
)
from noria.sampler.slots import SlotTable
from noria.sampler.tenants import DECODE_CHARGE, MAX_OVERTAKEN, Tenant, Tenants
from noria.sampler.tiles import Lane, lanes_per_tile, pack

ROOM_TO_GROW = 2
"""Pages that admission leaves for each active request, if it may still need so many."""


class _Needs(NamedTuple):
    """What a request would be admitted with. num_new: pages to be prefilled; num_own: pages it alone writes."""

    version: int
    namespace: Namespace
    match: Match
    num_new: int
    num_own: int

    @property
    def kept(self) -> tuple[Node, ...]:
        return self.match.chain if self.match.source is None else (*self.match.chain, self.match.source)

    @property
    def num_pages(self) -> int:
        return len(self.match.chain) + self.num_new + self.num_own


@final
class Scheduler:
    """Owner of all sequences after submission, of the page pool and of the tenants' accounts. Touched by the device thread only."""

    def __init__(self, pool: PagePool, slots: SlotTable, limits: Limits) -> None:
        self.pool = pool
        self.counts = ScheduleCounts()
        self._slots = slots
        self._limits = limits
        self._fixed_lanes, self._fixed_rows = limits.fixed or (limits.widths[-1], limits.num_rows)
        self._deterministic: set[str] = set()
        self._tenants = Tenants()
        self._unfinished: set[Sequence] = set()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._active: dict[Sequence, None] = {}
        self._prefills = Prefills(pool, slots, self._tenants)
        self._short: dict[Tenant, int] = {}  # by this plan, whose next requests wait for pages, and for how many
        self._moved: set[str] = set()  # runs of which requests are to be prefilled again
        self._left_out: dict[Sequence, Reason] = {}
        self._prefilled_last = False
        self._arrivals = count()
        self._turns = count()

    @property
    def has_work(self) -> bool:
        """Any request waits or is active. (Prefills exist only for active requests.) Readable from any thread."""
        return bool(self._unfinished)

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, active ones first."""
        yield from self._active
        for tenant in self._tenants:
            yield from tenant.queue()

    def set_weight(self, tenant: str, weight: float) -> None:
        """Fair-share weight of a tenant, > 0; 1 unless set."""
        assert weight > 0
        self._tenants[tenant].weight = weight

    def set_deterministic(self, run_id: str, *, is_deterministic: bool) -> None:
        """From now on the run's requests have the same bits whatever else is going on, or need not. Before the run's first request."""
        (self._deterministic.add if is_deterministic else self._deterministic.discard)(run_id)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises UnknownVersionError (its run has no published version, or the pinned one is not kept), QueueFullError (its tenant has `max_waiting`).
        """
        request = sequence.request
        num_waiting = self._tenants[request.tenant].num_waiting
        if num_waiting >= self._limits.max_waiting:
            raise QueueFullError(
                f"request {request.request_id!r} would be at position {num_waiting} of tenant {request.tenant!r}, of which max_waiting = "
                f"{self._limits.max_waiting} requests may wait: send it again when some have finished, or raise max_waiting"
            )
        if request.version is None:
            self._slots.newest(request.run_id)
        else:
            self._slots.acquire(request.run_id, request.version)
        sequence.arrival = next(self._arrivals)
        self._tenants.push(sequence, is_warm=self._is_warm(sequence))
        self._unfinished.add(sequence)
        heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.arrival, sequence))
        if len(self._deadlines) > 2 * len(self._unfinished) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._unfinished]
            heapq.heapify(self._deadlines)

    def cancel(self, sequence: Sequence) -> None:
        """Forget an unfinished request: its lane and pages are free at once. A prefill that others wait for goes on."""
        if sequence in self._active:
            self._withdraw(sequence)
        else:
            self._tenants[sequence.request.tenant].remove(sequence)
        self._end(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Unfinished requests whose deadline has passed, each named once; the caller cancels them. now: seconds of the same clock as `deadline_s`."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence in self._unfinished:
                found.append(sequence)
        return found

    def publish_moved(self, run_id: str) -> None:
        """The run has a new version: its unfinished requests are prefilled again under it before their next token. Those that hold another one sample
        under that first.

        Not those that pin a version, nor those of a deterministic run. Their K/V stay cached under the old version.
        """
        self._moved.add(run_id)

    def waiting(self) -> list[Waiting]:
        """Every unfinished request, with what it waits for."""
        found, loads_through = [], self.pool.loads_through
        for s in self._active:
            reason: Reason = self._left_out.get(s, "decoding") if s.is_prefilled else "prefill"
            if s.last_load > loads_through:
                reason = "pages"
            found.append(Waiting(s.request.request_id, s.request.tenant, 0, reason))
        for tenant in self._tenants:
            reason = "lanes" if not self._short else "pages" if tenant in self._short else "fairness"
            found += [Waiting(s.request.request_id, tenant.name, position, reason) for position, s in enumerate(tenant.queue())]
        return found

    def plan(self) -> PrefillDispatch | DecodeDispatch | None:
        """Admit what fits and choose the next dispatch, which the caller runs at once. None: nothing to do.

        Prefill rows go first, but never twice in a row while lanes could decode: a long prompt stalls no one.
        """
        self._restart_moved()
        self._admit()
        loads_through = self.pool.loads_through
        ready = [sequence for sequence in self._active if sequence.is_prefilled and sequence.last_load <= loads_through]
        if self._prefilled_last or not self._prefills:
            ready = self._with_pages(ready)
            if ready:
                self._prefilled_last = False
                return self._plan_decode(ready)
        self._prefilled_last = bool(self._prefills)
        return self._plan_prefill() if self._prefills or self.pool.has_moves else None

    def complete_prefill(self, dispatch: PrefillDispatch, scored: Many[Scored]) -> None:
        """Record the log-probabilities of prompt ids that a dispatch found, for its rows with targets in order."""
        for row, found in zip([row for row in dispatch.rows if row.targets], scored, strict=True):
            assert row.scored is not None
            row.scored.prompt_logprobs.extend(found.logprobs)
            row.scored.prompt_top.extend(found.top)

    def complete(self, dispatch: DecodeDispatch, sampled: Many[Many[Sampled]]) -> list[Sequence]:
        """Record what a dispatch sampled, per tile and lane; charge it; return the sequences that finished, whose pages are now only cached."""
        finished = []
        for tile, lanes in zip(dispatch.tiles, sampled, strict=True):
            for sequence, lane in zip(tile.sequences, lanes, strict=True):
                sequence.append(lane.ids, lane.behavior_logprobs, tile.version, lane.top)
                self._tenants.charge(sequence.request.tenant, DECODE_CHARGE * len(lane.ids))
                self._let_go(sequence)
                if sequence.is_finished:
                    finished.append(sequence)
        for sequence in finished:
            self._cache(sequence)
            self._withdraw(sequence)
            self._end(sequence)
        return finished

    # Admission

    def _admit(self) -> None:
        """Admit those whose turn it is, and past the first that must wait for pages those that may overtake it."""
        self._short = {}
        while (tenant := self._next_to_admit()) is not None:
            sequence, needs = tenant.first(), self._needs(tenant.first())
            if not self._short and self._give_way(tenant, needs):
                needs = self._needs(sequence)
            overtaken = self._overtaken(tenant, needs)
            if overtaken is None:
                self._short[tenant] = needs.num_pages
                continue
            if not self.pool.make_room(needs.num_new + needs.num_own, needs.kept):
                self._short[tenant] = needs.num_pages
                return  # what is free by now is for this one
            self._place(sequence, needs)
            self._active[tenant.pop()] = None
            tenant.num_active += 1
            if sequence.turn < 0:
                sequence.turn = next(self._turns)
            for other in overtaken:
                other.num_overtaken += 1

    def _next_to_admit(self) -> Tenant | None:
        """Whose turn it is; None if nobody may, or the first that waits for pages has been overtaken, or looked past, often enough."""
        head = next(iter(self._short), None)
        if head is not None and max(len(self._short) - 1, head.first().num_overtaken) >= MAX_OVERTAKEN:
            return None
        return self._tenants.next_to_admit(self._limits.widths[-1], self._short)

    def _give_way(self, tenant: Tenant, needs: _Needs) -> bool:
        """Preempt others so that a tenant's next request finds the pages that it misses; whether any were."""
        missing = self._num_missing(tenant.first(), needs)
        victims = self._claims().yielding_to(tenant, missing, needs.num_pages) if missing > 0 else []
        for victim in victims:
            self._preempt(victim)
        return bool(victims)

    def _overtaken(self, tenant: Tenant, needs: _Needs) -> list[Sequence] | None:
        """Whom a tenant's next request overtakes if it is admitted now; None if it must wait for pages.

        That is the first that waits for some, and active ones, if need be, whose room to grow it takes. Only a newcomer overtakes: others have given
        way, and would take back what they gave. And only while its tenant holds less for its weight than the tenant of each that it overtakes.
        """
        sequence = tenant.first()
        is_short = self._num_missing(sequence, needs) > 0
        if not self._short and not is_short:
            return []
        if sequence.turn >= 0 or self._num_missing(sequence, needs, self._active) > 0:
            return None
        claims, heads = self._claims(), list(self._short)[:1]
        share = claims.share(tenant, needs.num_pages)
        if any(share >= claims.share(head, self._short[head]) for head in heads):
            return None
        growing = self._active if is_short else ()
        behind = [s for s in growing if s.num_overtaken < MAX_OVERTAKEN and share < claims.share(self._tenants[s.request.tenant])]
        if self._num_missing(sequence, needs, behind) > 0:
            return None
        return [head.first() for head in heads] + behind

    def _needs(self, sequence: Sequence) -> _Needs:
        prefix, version = sequence.filled_ids, self._version(sequence)
        namespace, match = self._match(sequence, version)
        num_new = 0 if match.num_positions == len(prefix) else -(-len(prefix) // PAGE) - len(match.chain)
        num_pages = sequence.num_table_pages if self._is_deterministic(sequence) else sequence.num_pages_for(self._limits.num_steps)
        return _Needs(version, namespace, match, num_new, num_pages - len(prefix) // PAGE)

    def _match(self, sequence: Sequence, version: int) -> tuple[Namespace, Match]:
        """The namespace that knows most of what a request has so far: the version's, unless its own has more."""
        pure: Namespace = (sequence.request.run_id, version)
        own = self._own_namespace(sequence)
        if sequence.wants_scores:
            return (pure[0], sequence), NOTHING
        match = self.pool.match(pure, sequence.filled_ids)
        if own is not None:
            own_match = self.pool.match(own, sequence.filled_ids)
            if own_match.num_positions > match.num_positions:
                return own, own_match
        return pure, match

    def _own_namespace(self, sequence: Sequence) -> Namespace | None:
        """Where K/V of several versions may be found: that of its episode, else its own. None: all its K/V must be of one version, or prefilled."""
        request = sequence.request
        if request.version is not None or self._limits.recomputes or self._is_deterministic(sequence):
            return None
        return request.run_id, request.episode_id or sequence

    def _is_warm(self, sequence: Sequence) -> bool:
        """Its episode has most of the K/V that it needs, here or in host memory."""
        own = self._own_namespace(sequence)
        if own is None or not self.pool.knows(own):
            return False
        return 2 * self.pool.match(own, sequence.filled_ids).num_positions > len(sequence.filled_ids)

    def _num_missing(self, sequence: Sequence, needs: _Needs, behind: Collection[Sequence] = ()) -> int:
        """Pages that are missing for a request, with room to grow for all active ones but those `behind`; for nobody if none is active."""
        num_needed = needs.num_new + needs.num_own
        if self._active:
            held = [(s, len(s.table)) for s in self._active if s not in behind] + [(sequence, needs.num_pages)]
            num_needed += sum(max(0, min(ROOM_TO_GROW, s.num_table_pages - num)) for s, num in held if not self._is_deterministic(s))
        return self.pool.num_missing(num_needed, needs.kept)

    def _place(self, sequence: Sequence, needs: _Needs) -> None:
        """Give a request its pages, sharing what is cached, and start a prefill for what is not."""
        num_prefix = len(sequence.filled_ids)
        match, num_full = needs.match, num_prefix // PAGE
        sequence.last_load = self.pool.keep(needs.kept)
        is_mixed = needs.namespace[1] != needs.version and match.num_positions > 0
        sequence.namespace, sequence.kv_version = needs.namespace, None if is_mixed else needs.version
        if self._limits.recomputes and sequence.turn >= 0 and sequence.held_version is None and sequence.request.version is None:
            self._slots.acquire(sequence.request.run_id, needs.version)
            sequence.held_version = needs.version
        nodes = needs.kept
        if needs.num_new:
            nodes = match.chain + self._prefills.start(sequence, needs.namespace, needs.version, match)
        sequence.chain, sequence.source = nodes[:num_full], nodes[num_full] if len(nodes) > num_full else None
        sequence.own_pages = self.pool.take(needs.num_own)
        sequence.table = [node.page for node in sequence.chain] + sequence.own_pages
        sequence.block_ends = tuple(sequence.table[BLOCK_PAGES - 1 : num_full : BLOCK_PAGES])
        self.counts.num_asked += num_prefix
        self.counts.num_found += match.num_positions
        self.counts.num_recomputed += max(0, min(sequence.num_filled, num_prefix) - match.num_positions)

    # Preemption

    def _with_pages(self, ready: list[Sequence]) -> list[Sequence]:
        """Give each the pages that the next dispatch may write, the first admitted first; those of them that have them."""
        self._left_out = {}
        for sequence in sorted(ready, key=lambda s: s.turn):
            while sequence in self._active and (missing := sequence.num_pages_for(self._limits.num_steps) - len(sequence.table)) > 0:
                if self.pool.num_missing(missing) > 0:
                    self._preempt(self._claims().least())
                elif not self.pool.make_room(missing):
                    self._left_out[sequence] = "pages"
                    break
                else:
                    pages = self.pool.take(missing)
                    sequence.own_pages += pages
                    sequence.table += pages
        return [sequence for sequence in ready if sequence in self._active and sequence not in self._left_out]

    def _claims(self) -> Claims:
        return Claims(self._tenants, self._active, lambda sequence: not self._is_deterministic(sequence))

    def _restart_moved(self) -> None:
        """Prefill again what was computed under an older version than the newest of its run, if it holds on to none."""
        for sequence in [s for s in self._active if s.request.run_id in self._moved and s.request.version is None and s.held_version is None]:
            if sequence.kv_version != self._slots.newest(sequence.request.run_id) and not self._is_deterministic(sequence):
                self._preempt(sequence)
        self._moved.clear()

    def _let_go(self, sequence: Sequence) -> None:
        """It holds on to no version any more."""
        if sequence.held_version is not None:
            self._slots.release(sequence.request.run_id, sequence.held_version)
            sequence.held_version = None
            self._moved.add(sequence.request.run_id)

    def _preempt(self, sequence: Sequence) -> None:
        """Take its pages, cache what it has filled, and put it back in front of its tenant's queue."""
        self.counts.num_preempted += 1
        if sequence.is_prefilled:
            sequence.num_filled = max(sequence.num_filled, sequence.position)
        self._cache(sequence, is_coming_back=True)
        self._withdraw(sequence)
        if sequence.wants_scores:
            sequence.prompt_logprobs.clear()
            sequence.prompt_top.clear()
            self.pool.drop((sequence.request.run_id, sequence))
        self._tenants[sequence.request.tenant].push_back(sequence)

    # Planning

    def _plan_prefill(self) -> PrefillDispatch:
        limit = self._fixed_rows if self._prefills.has_run(self._deterministic) else self._limits.num_rows
        copies, rows, runs = self._prefills.plan_rows(limit)
        return PrefillDispatch(copies, rows, bool(runs & self._deterministic), *self.pool.take_moves())

    def _plan_decode(self, ready: list[Sequence]) -> DecodeDispatch:
        """Choose lanes and pack them into tiles."""
        limit, num_per_tile = self._fixed_lanes, LANES_PER_TILE
        if not any(self._is_deterministic(sequence) for sequence in ready):
            limit = self._limits.widths[-1]
            num_per_tile = lanes_per_tile(list(Counter(self._adapter(sequence) for sequence in ready).values()), self._limits.widths)
        tiles = pack(self._choose_lanes(ready, num_per_tile, limit // num_per_tile), num_per_tile)
        copies = [copy for tile in tiles for sequence in tile.sequences for copy in self._own_source(sequence)]
        is_fixed = any(self._is_deterministic(tile.sequences[0]) for tile in tiles)
        return DecodeDispatch(copies, tiles, is_fixed, num_per_tile, *self.pool.take_moves())

    def _choose_lanes(self, ready: list[Sequence], num_per_tile: int, max_tiles: int) -> list[Lane]:
        """Tenants take turns by service, each with its first admitted requests first; a lane opens a tile, or joins one of its adapter version."""
        queues: dict[str, deque[Sequence]] = {}
        for sequence in sorted(ready, key=lambda s: s.turn):
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        turns = [(self._tenants[name].service, index, name) for index, name in enumerate(queues)]
        heapq.heapify(turns)
        room: Counter[tuple[str, int]] = Counter()
        lanes: list[Lane] = []
        num_tiles = 0
        while turns:
            service, index, name = heapq.heappop(turns)
            sequence = queues[name].popleft()
            adapter = self._adapter(sequence)
            if not room[adapter] and (num_tiles == max_tiles or not self._slots.bring(*adapter)):
                self._left_out[sequence] = "fairness" if num_tiles == max_tiles else "slot"
            else:
                if not room[adapter]:
                    num_tiles += 1
                    room[adapter] = num_per_tile
                room[adapter] -= 1
                can_share = self._limits.shares_prefixes and not self._is_deterministic(sequence)
                lanes.append(Lane(sequence, self._slots.slot(*adapter), adapter[1], can_share))
                service += DECODE_CHARGE / self._tenants[name].weight
            if queues[name]:
                heapq.heappush(turns, (service, index, name))
        return lanes

    def _adapter(self, sequence: Sequence) -> tuple[str, int]:
        """The run and version of its next token."""
        return sequence.request.run_id, self._version(sequence)

    def _version(self, sequence: Sequence) -> int:
        """Of its next token: the one that it names, or holds, or else its run's newest."""
        request = sequence.request
        named = sequence.held_version if request.version is None else request.version
        return self._slots.newest(request.run_id) if named is None else named

    def _own_source(self, sequence: Sequence) -> Iterator[PageCopy]:
        """Before its first decode step a sequence copies the page that it shares in part: it is about to write there."""
        if sequence.source is not None:
            yield PageCopy(sequence.source.page, sequence.own_pages[0])
            self.pool.release((sequence.source,))
            sequence.source = None

    def _is_deterministic(self, sequence: Sequence) -> bool:
        return sequence.request.run_id in self._deterministic

    # Leaving

    def _cache(self, sequence: Sequence, *, is_coming_back: bool = False) -> None:
        """Cache a sequence's pages: for everyone if all of them are of one version, and for its episode, or its own return, in any case.

        Not those of a deterministic run: what was prefilled is cached, and the rest was decoded. Nor before it has a copy of what it shares in part.
        """
        if self._is_deterministic(sequence) or not sequence.is_prefilled or sequence.source is not None:
            return
        request, ids = sequence.request, sequence.filled_ids
        is_awaited = is_coming_back or bool(request.episode_id)
        if sequence.kv_version is not None:
            self.pool.adopt((request.run_id, sequence.kv_version), ids, sequence.table, is_awaited=is_awaited)
        own = self._own_namespace(sequence)
        if own is not None and is_awaited:
            self.pool.adopt(own, ids, sequence.table, is_awaited=True)

    def _withdraw(self, sequence: Sequence) -> None:
        """It is active no more and holds no pages."""
        del self._active[sequence]
        self._left_out.pop(sequence, None)
        self._tenants[sequence.request.tenant].num_active -= 1
        self.pool.give_back(sequence.own_pages)
        if sequence.source is not None:
            self.pool.release((sequence.source,))
        self.pool.release(sequence.chain)
        sequence.chain, sequence.source, sequence.own_pages, sequence.table, sequence.block_ends = (), None, [], [], ()
        self._prefills.trim()

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        self._unfinished.remove(sequence)
        self.pool.drop((request.run_id, sequence))
        self._let_go(sequence)
        if request.version is not None:
            self._slots.release(request.run_id, request.version)
