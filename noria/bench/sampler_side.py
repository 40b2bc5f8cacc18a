"""Our side of the sampler's bench: the engine as a server runs it, with a device thread of its own, a learner beside it if asked, and a stopwatch.

    take(workload): requests on an event loop ──▶ SamplerEngine, stepped by service/device.SharedDevice ──▶ streams, each item timed as it is read

Nothing ends early: end of text is an id that no vocabulary has. Requests draw at temperature 1 with their log-probabilities, as actors ask for them,
unless greedy ones are wanted.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, final

import numpy.typing as npt

from noria.bench.learners import add_runs
from noria.bench.sampler_cases import Workload, adapters_of
from noria.clock import RealClock
from noria.config import LearnerConfig, SamplerConfig, ServerConfig
from noria.learner.batches import PlannedBatch
from noria.learner.learner import Learner
from noria.model.lora import HostAdapter
from noria.model.placement import place
from noria.model.weights import LoadedBase
from noria.observe import SpanRecorder
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.sampler.schedule import ScheduleCounts
from noria.sampler.slots import BASE_RUN
from noria.service.device import SharedDevice, Stage
from noria.types import Completion, Ids, SampleRequest, SamplingParams

NO_ID: Final = -1
"""End of text: an id that is never drawn."""

TENANT: Final = "bench"
TRAINED_RUN: Final = "trained"
NUM_DISTINCT: Final = 4
"""Adapters that differ; further runs have the bytes of one of them, in slots of their own."""

MAX_STALL_S: Final = ServerConfig().max_stall_ms / 1000
STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Decoded:
    """One decode dispatch. num_steps: tokens that its lanes sampled each, where all have as many left. start_s, end_s: of the whole step."""

    start_s: float
    end_s: float
    num_lanes: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What one round of a workload came to. first_s: per sample, from its request to its first token. gaps_s: between items of one stream.

    num_asked, num_found: prompt positions that needed K/V, and of these those that were cached or on their way. completions: in the order of lanes.
    """

    seconds: float
    first_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    completions: tuple[Completion, ...]
    decodes: tuple[Decoded, ...]
    num_asked: int
    num_found: int

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(len(completion.sampled_ids) for completion in self.completions)


@final
@dataclass(slots=True)
class _Watched:
    """The sampler as a stage, with a record of its decode dispatches. between: called on the device thread before each step."""

    sampler: SamplerEngine
    decodes: list[Decoded] = field(default_factory=list)
    between: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return self.sampler.has_work

    def step(self) -> bool:
        self.between()
        counts = self.sampler.counts
        num_decodes, num_lanes, num_sampled, start_s = counts.num_decodes, counts.num_lanes_used, counts.num_sampled, time.perf_counter()
        is_done = self.sampler.step()
        if counts.num_decodes > num_decodes:
            lanes = counts.num_lanes_used - num_lanes
            self.decodes.append(Decoded(start_s, time.perf_counter(), lanes, (counts.num_sampled - num_sampled) // lanes))
        return is_done

    def fail(self, error: BaseException) -> None:
        self.sampler.fail(error)


@final
class Side:
    """One base in one dtype, its sampler, and a learner if asked for. Made by `serving`; one workload at a time.

    learner: trains `TRAINED_RUN` on the same weights and the same device, None without one.
    """

    def __init__(
        self,
        loaded: LoadedBase,
        settings: SamplerConfig,
        *,
        dtype: npt.DTypeLike,
        rank_classes: tuple[int, ...] = (8, 64),
        training: LearnerConfig | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """rank_classes, shapes: of the sampler. training: the learner's sizes, None for no learner."""
        clock, spans = RealClock(), SpanRecorder(RealClock())
        self.config, self.base = loaded.config, place(loaded.params, dtype)
        wakers: list[SharedDevice] = []

        def wake() -> None:
            for device in wakers:
                device.wake()

        self.sampler = SamplerEngine(
            self.base, loaded.config, settings, rank_classes=rank_classes, eos_id=NO_ID, spans=spans, clock=clock, wake=wake, shapes=shapes
        )
        self.learner: Learner | None = None
        self._watched = _Watched(self.sampler)
        stages: dict[str, Stage] = {"sampler": self._watched}
        if training is not None:
            params = self.base.stacked
            self.learner = Learner(params, loaded.config, training, spans=spans, clock=clock, wake=wake, max_stall_s=MAX_STALL_S)
            self.learner.warm_up()
            add_runs(self.learner, loaded, {TRAINED_RUN: training.rank_classes[0]})
            stages["learner"] = self.learner
        share = ServerConfig().sampler_share
        self.device = SharedDevice(stages, {name: share for name in stages}, clock, MAX_STALL_S)
        wakers.append(self.device)
        self._adapters: list[HostAdapter] = []
        self._loaded: dict[int, int] = {}
        self._rounds, self._numbers = count(1), count()

    def start(self) -> None:
        """Compile everything, and start the device thread."""
        self.sampler.warm_up()
        self.device.start(lambda _name, _error: None)  # whoever waits for a stage that failed is told

    def stop(self) -> None:
        """End the device thread."""
        assert self.device.stop(STOP_S), "a step took longer than a minute"

    def load_adapters(self, workload: Workload) -> None:
        """Publish the workload's adapters if they are not, and have them in slots. Those of another rank go: slots are for one rank's at once."""
        rank, number = workload.rank, workload.num_adapters
        if number and rank not in self._loaded:
            for other, num_loaded in self._loaded.items():
                self.device.call(partial(self._retire, other, num_loaded)).result()
            self._loaded = {rank: 0}
            distinct = Workload("distinct", 1, 1, 1, 1, num_adapters=NUM_DISTINCT, rank=rank)
            self._adapters = list(adapters_of(distinct, self.config))
        for index in range(self._loaded.get(rank, 0), number):
            self.device.call(partial(self._publish_first, workload, index)).result()
            self._loaded[rank] = index + 1

    def publish_next(self, workload: Workload) -> None:
        """The workload's first adapter gets another version, of other bytes, and the proof that a server gives of it. Device thread only."""
        run_id = run_of(workload.rank, 0)
        version = self.sampler.newest_version(run_id) + 1
        self.sampler.publish(run_id, version, self._adapters[version % NUM_DISTINCT], workload.spec.scale)
        self.sampler.checksum(run_id, version)

    def take(self, workload: Workload, *, prompts: list[Ids] | None = None, is_greedy: bool = False, publish_every: int | None = None) -> Taken:
        """One round. prompts: None for some that no round had. publish_every: decode steps between two publishes of its first adapter."""
        self.load_adapters(workload)
        prompts = workload.prompts(next(self._rounds), self.config) if prompts is None else prompts
        if publish_every is not None:
            self._watched.between = self._publisher(workload, publish_every)
        try:
            return asyncio.run(self._take(workload, prompts, is_greedy=is_greedy))
        finally:
            self._watched.between = lambda: None

    def take_training(self, workload: Workload, batch: PlannedBatch) -> Taken:
        """One round beside a learner that trains the batch again and again, from the round's first moment to its last."""
        learner = self.learner
        assert learner is not None, "this side was made with a learner"
        self.load_adapters(workload)
        prompts = workload.prompts(next(self._rounds), self.config)

        async def both() -> Taken:
            round_ = asyncio.create_task(self._take(workload, prompts))
            while not round_.done():
                await asyncio.wrap_future(learner.train(TRAINED_RUN, batch))
            return await round_

        return asyncio.run(both())

    @property
    def schedule_counts(self) -> ScheduleCounts:
        """What the sampler has scheduled so far."""
        return self.sampler.schedule_counts

    async def _take(self, workload: Workload, prompts: list[Ids], *, is_greedy: bool = False) -> Taken:
        self._watched.decodes.clear()
        scheduled = self.schedule_counts
        asked, found = scheduled.num_asked, scheduled.num_found
        lanes = [(prompt, index * workload.members + member) for index, prompt in enumerate(prompts) for member in range(workload.members)]
        start_s = time.perf_counter()
        streams = await asyncio.gather(*(self._read(self._request(workload, prompt, lane, is_greedy=is_greedy)) for prompt, lane in lanes))
        seconds = time.perf_counter() - start_s
        first_s, gaps_s, completions = zip(*streams, strict=True)
        gaps = tuple(gap for of_stream in gaps_s for gap in of_stream)
        counted = scheduled.num_asked - asked, scheduled.num_found - found
        return Taken(seconds, first_s, gaps, completions, tuple(self._watched.decodes), *counted)

    def _request(self, workload: Workload, prompt: Ids, lane: int, *, is_greedy: bool) -> SampleRequest:
        run_id = run_of(workload.rank, lane % workload.num_adapters) if workload.num_adapters else BASE_RUN
        temperature = 0.0 if is_greedy else 1.0
        params = SamplingParams(workload.answer, temperature, seed=1, sample_index=lane, top_k=workload.top_k, top_p=workload.top_p)
        return SampleRequest(f"bench/{next(self._numbers)}", TENANT, run_id, "", prompt, params)

    async def _read(self, request: SampleRequest) -> tuple[float, tuple[float, ...], Completion]:
        """Seconds to the first item, seconds between items, and the completion."""
        last_s = time.perf_counter()
        waits: list[float] = []
        completion: Completion | None = None
        async for item in self.sampler.stream(request):
            now_s = time.perf_counter()
            waits.append(now_s - last_s)
            last_s, completion = now_s, item.completion
        assert completion is not None, "the last item has it"
        return waits[0], tuple(waits[1:]), completion

    def _publish_first(self, workload: Workload, index: int) -> None:
        run_id = run_of(workload.rank, index)
        self.sampler.publish(run_id, 1, self._adapters[index % NUM_DISTINCT], workload.spec.scale)
        self.sampler.checksum(run_id, 1)

    def _retire(self, rank: int, number: int) -> None:
        for index in range(number):
            self.sampler.retire(run_of(rank, index))

    def _publisher(self, workload: Workload, every: int) -> Callable[[], None]:
        """Publishes whenever another `every` decode steps of the round are done."""
        num_published = 0

        def between() -> None:
            nonlocal num_published
            if sum(decode.num_steps for decode in self._watched.decodes) // every > num_published:
                num_published += 1
                self.publish_next(workload)

        return between


@contextmanager
def serving(side: Side) -> Iterator[Side]:
    """The side, running; its device thread ends afterwards."""
    side.start()
    try:
        yield side
    finally:
        side.stop()


def run_of(rank: int, index: int) -> str:
    """The run of the adapter number `index` of a rank."""
    return f"rank{rank}/{index}"
