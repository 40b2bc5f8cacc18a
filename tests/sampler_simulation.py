"""A device without arrays that runs the scheduler's dispatches: each position of each page says whose K/V it would hold, so whatever a lane reads
can be checked. No jax: millions of steps are cheap."""

import random
from collections import Counter
from itertools import count

from noria.sampler.pages import PAGE, PagePool
from noria.sampler.schedule import Limits
from noria.sampler.scheduler import Scheduler
from noria.sampler.sequence import BLOCK_PAGES, CHUNK, PrefillDispatch, Sampled, Scored, Sequence
from noria.sampler.slots import SlotTable
from noria.types import SampleRequest, SamplingParams

STEPS = 4
NOBODY = None
_numbers = count()


def make_sequence(prompt, *, run="", tenant="t", episode="", version=None, wants_prompt=False, max_tokens=8, deadline_s=float("inf")):
    params = SamplingParams(max_tokens=max_tokens)
    request = SampleRequest(f"r{next(_numbers)}", tenant, run, episode, tuple(prompt), params, version, wants_prompt=wants_prompt)
    return Sequence(request, stop_ids=(2,), deadline_s=deadline_s)


def build(num_pages=512, *, places=0, max_moves=64, widths=(16,), rows=4, slots=8, runs=(), seed=0, **limits):
    """A device whose scheduler knows version 0 of each run."""
    table = SlotTable(slots)
    for run in runs:
        table.advance(run, 0)
    scheduler = Scheduler(PagePool(num_pages, places, max_moves=max_moves), table, Limits(widths, rows, STEPS, **limits))
    return SimulatedDevice(scheduler, table, places, seed=seed)


class SimulatedDevice:
    """Content of a position: (run, hash of all ids up to it, version, whether prefilled). Sampled ids are random, or those of `script`."""

    def __init__(self, scheduler, slots, num_places=0, *, seed=0, vocab=1000):
        self.scheduler, self.slots, self.vocab = scheduler, slots, vocab
        self.rng = random.Random(seed)
        self.pages = [[NOBODY] * PAGE for _ in range(scheduler.pool.num_pages)]
        self.places = [[NOBODY] * PAGE for _ in range(num_places)]
        self.in_slot = {0: ("", 0)}
        self.hashes = {}
        self.counts = Counter()
        self.num_sampled = Counter()
        self.dispatches = []

    def submit(self, prompt, **options):
        sequence = make_sequence(prompt, **options)
        self.scheduler.submit(sequence)
        return sequence

    def step(self):
        """One dispatch; the sequences that finished, None if there was nothing to do."""
        dispatch = self.scheduler.plan()
        for write in self.slots.take_writes():
            self.in_slot[write.slot] = write.contents or (write.run_id, 0)
        if dispatch is None:
            assert not self.scheduler.has_work, "stuck"
            return None
        self.dispatches.append(dispatch)
        self._move(dispatch)
        return self._prefill(dispatch) if isinstance(dispatch, PrefillDispatch) else self._decode(dispatch)

    def finish(self):
        """Until nothing is left to do: all that finished."""
        done = []
        while (finished := self.step()) is not None:
            done += finished
        return done

    def _move(self, dispatch):
        assert len({move.place for move in dispatch.stores}) == len(dispatch.stores)
        assert len({move.page for move in dispatch.loads}) == len(dispatch.loads)
        assert max(len(dispatch.stores), len(dispatch.loads)) <= self.scheduler.pool.max_moves
        for page, place in dispatch.stores:
            self.places[place] = self.pages[page].copy()
        for page, place in dispatch.loads:
            self.pages[page] = self.places[place].copy()
        for source, target in dispatch.copies:
            self.pages[target] = self.pages[source].copy()
        self.counts.update(stored=len(dispatch.stores), loaded=len(dispatch.loads), dispatches=1)

    def _prefill(self, dispatch):
        assert dispatch.rows or dispatch.stores or dispatch.loads
        assert len({bool(row.targets) for row in dispatch.rows}) <= 1
        written = [(row.table[position // PAGE], position % PAGE) for row in dispatch.rows for position in range(row.start, row.start + len(row.ids))]
        assert len(written) == len(set(written)), "two writers"
        for row in dispatch.rows:  # all K/V of a layer are written before it attends
            run, version = self.in_slot[row.slot]
            assert 0 < len(row.ids) <= CHUNK
            self._read(row.table, row.start, run)
            before = self.pages[row.table[(row.start - 1) // PAGE]][(row.start - 1) % PAGE][1] if row.start else 0
            for position, token in enumerate(row.ids, row.start):
                before = hash((before, token))
                self.pages[row.table[position // PAGE]][position % PAGE] = (run, before, version, True)
            if row.targets:
                assert row.targets == row.scored.request.prompt_ids[row.start + 1 : row.start + 1 + len(row.ids)]
                earlier = sum(len(other.ids) for other in dispatch.rows if other.scored is row.scored and other.start < row.start)
                assert len(row.scored.prompt_logprobs) + earlier == row.start
            self.counts["prefilled"] += len(row.ids)
        scored = [Scored([-float(token) for token in row.targets]) for row in dispatch.rows if row.targets]
        self.scheduler.complete_prefill(dispatch, scored)
        return []

    def _decode(self, dispatch):
        lanes = [(tile, sequence) for tile in dispatch.tiles for sequence in tile.sequences]
        assert lanes
        assert len({sequence for _, sequence in lanes}) == len(lanes)
        written = [page for _, s in lanes for page in {p // PAGE: s.table[p // PAGE] for p in self._fed(s)}.values()]
        assert len(written) == len(set(written)), "two writers"
        self._check_tiles(dispatch)
        sampled = [[self._lane(tile, sequence) for sequence in tile.sequences] for tile in dispatch.tiles]
        self.counts["decodes"] += 1
        finished = self.scheduler.complete(dispatch, sampled)
        for sequence in finished:
            del self.hashes[sequence]
        return finished

    def _check_tiles(self, dispatch):
        for tile in dispatch.tiles:
            assert 0 < len(tile.sequences) <= dispatch.lanes_per_tile
            runs = {s.request.run_id for s in tile.sequences}
            assert {self.in_slot[tile.slot]} == {(run, tile.version) for run in runs}
            assert tile.num_shared % BLOCK_PAGES == 0
            shared = [s.table[: tile.num_shared] for s in tile.sequences]
            assert all(table == shared[0] for table in shared)
            assert all(tile.num_shared * PAGE <= s.position for s in tile.sequences)

    def _fed(self, sequence):
        return range(sequence.position, sequence.position + min(STEPS, sequence.num_remaining))

    def _lane(self, tile, sequence):
        run = sequence.request.run_id
        before = self._read(sequence.table, sequence.position, run, sequence)
        versions = {self.pages[sequence.table[p // PAGE]][p % PAGE][2] for p in range(0, sequence.position, 7)}
        assert sequence.kv_version is None or versions <= {sequence.kv_version}
        assert sequence.request.version is None or versions <= {sequence.request.version}
        fed, ids = sequence.input_id, []
        for position in self._fed(sequence):
            before = hash((before, fed))
            self.pages[sequence.table[position // PAGE]][position % PAGE] = (run, before, tile.version, False)
            fed = self.rng.randrange(3, self.vocab)
            ids.append(fed)
        self.num_sampled[sequence.request.tenant] += len(ids)
        return Sampled(ids, [0.0] * len(ids))

    def _read(self, table, end, run, sequence=None):
        """Whatever attends to positions below `end` finds there what these ids of this run left; the hash at the end."""
        if sequence is None:
            last = self.pages[table[(end - 1) // PAGE]][(end - 1) % PAGE] if end else (run, 0)
            assert last is not NOBODY
            assert last[0] == run
            return last[1]
        hashes = self.hashes.setdefault(sequence, [0])
        for token in (*sequence.request.prompt_ids, *sequence.sampled_ids)[len(hashes) - 1 : end]:
            hashes.append(hash((hashes[-1], token)))
        some = range(end) if end < 300 else range(self.rng.randrange(PAGE), end, PAGE)
        for position in (*some, *([end - 1] if end else ())):
            found = self.pages[table[position // PAGE]][position % PAGE]
            assert found is not NOBODY
            assert found[:2] == (run, hashes[position + 1]), f"position {position} of {sequence.request.request_id} holds {found}"
        return hashes[end]
