"""The sampler as its users see it: `sample` and `stream` on the event loop, `step` on the device thread.

    sample, stream ─▶ inbox ─▶ step: take the inbox in ─▶ plan (scheduler) ─▶ adapters into slots ─▶ run (runner) ─▶ record, answer
     event loop                device thread, one dispatch per step

A publish happens between two steps, aborts nothing and moves nothing: from the next token on, the run's unpinned requests use the new version, whose
bytes go into a slot of the device when a plan first asks for them (`sampler.slots`).
This module deliberately holds no policy (scheduler) and no arrays (runner).
"""

import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, final

from noria.clock import RealClock
from noria.config import SamplerConfig
from noria.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NoriaError,
    RequestCancelledError,
    RunFailedError,
    StageStoppedError,
)
from noria.model.config import ModelConfig
from noria.model.lora import HostAdapter, misfit, width_of
from noria.model.placement import BaseParams
from noria.protocols import Clock, Spans, Tokenizer
from noria.sampler.pages import PAGE, PageCounts, PagePool
from noria.sampler.requests import check_request
from noria.sampler.runner import Runner, Shapes
from noria.sampler.schedule import Limits, ScheduleCounts, Waiting
from noria.sampler.scheduler import Scheduler
from noria.sampler.sequence import DecodeDispatch, PrefillDispatch, Sampled, Sequence
from noria.sampler.slots import SlotTable, SlotWrite
from noria.sampler.stops import StopSearch, stops_of
from noria.sampler.streams import Reply
from noria.types import Completion, SampleRequest, Tokens

MOVES_PER_LANE = 2
"""Pages that a dispatch moves at most, each way, per lane of the widest program: a small part of its time, whatever the width (SmolLM2-135M, two CPU
cores: 0.4 ms a page)."""


@dataclass(slots=True)
class SamplerCounts:
    """What the sampler has done since it started; only ever grows.

    num_prefilled: positions. num_sampled: tokens. num_mixed: of these, tokens of requests with K/V of more than one version.
    num_decodes, num_prefills: dispatches. num_lanes_used: sum over decode dispatches of the lanes in use. num_slot_writes: adapter versions that were
    brought into a slot.
    """

    num_prefilled: int = 0
    num_sampled: int = 0
    num_mixed: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_lanes_used: int = 0
    num_slot_writes: int = 0


class _Published(NamedTuple):
    """A version's bytes as the slot table carries them."""

    adapter: HostAdapter
    scale: float


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request on its way in, or (is_cancelled) on its way out. search: for its stop texts, None if it has none."""

    sequence: Sequence
    reply: Reply
    search: StopSearch | None = None
    is_cancelled: bool = False


@final
class SamplerEngine:
    """Implements `protocols.Sampler` and `protocols.TokenStreams`.

    Any thread: `sample` and `stream` (on an event loop), `has_work`. Device thread only: everything else; it owns scheduler, runner and slots.
    wake: called, from any thread, when work has arrived, so that the device thread may sleep while `has_work` is false.
    """

    def __init__(  # noqa: PLR0913 - the seams of a stage, each by name
        self,
        base: BaseParams,
        model: ModelConfig,
        config: SamplerConfig,
        *,
        rank_classes: tuple[int, ...],
        eos_id: int,
        spans: Spans,
        clock: Clock | None = None,
        tokenizer: Tokenizer | None = None,
        wake: Callable[[], None] = lambda: None,
        shapes: Shapes | None = None,
    ) -> None:
        """rank_classes: widths of the slots, ascending; a version takes the smallest that holds it. eos_id: always a stop id.
        clock: of the requests' deadlines, None for real time. tokenizer: for stop texts; without one they are refused.
        shapes: the closed set of program shapes, None for the default.

        Raises ConfigError: a pool that cannot hold one request of max_context positions, or a context longer than the model's.
        """
        num_needed = config.max_context // PAGE + 3  # the trash page, a page shared in part, and the page it was copied from
        if config.num_pages < num_needed:
            raise ConfigError(
                f"num_pages = {config.num_pages} is too few for a request of max_context = {config.max_context}: set {num_needed} or more"
            )
        if config.max_context > model.max_context:
            raise ConfigError(f"max_context = {config.max_context} exceeds the {model.max_context} positions of {model.name}")
        self.counts = SamplerCounts()
        self._model = model
        self._config = config
        self._max_rank = rank_classes[-1]
        self._eos_id = eos_id
        self._spans = spans
        self._clock = clock or RealClock()
        self._tokenizer = tokenizer
        self._wake = wake
        self._runner = Runner(base, model, config, rank_classes=rank_classes, shapes=shapes)
        self._slots = SlotTable(config.num_slots)
        shapes = self._runner.shapes
        pool = PagePool(config.num_pages, self._runner.num_host_places, max_moves=MOVES_PER_LANE * shapes.lanes[-1])
        limits = Limits(
            shapes.lanes,
            shapes.rows[-1],
            config.steps_per_dispatch,
            fixed=shapes.fixed,
            max_waiting=config.max_waiting,
            recomputes=config.kv_on_publish == "recompute",
            shares_prefixes=self._runner.regroups,
        )
        self._scheduler = Scheduler(pool, self._slots, limits)
        self._tickets: dict[Sequence, _Ticket] = {}
        self._request_ids: set[str] = set()
        self._inbox: deque[_Ticket] = deque()
        self._inbox_lock = threading.Lock()
        self._failure: BaseException | None = None

    # Event loop

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue a prompt. Cancel the awaiting task to cancel the request, which frees its lane and pages at the next step.

        Raises InvalidRequestError, PromptTooLongError, UnknownVersionError, RunFailedError (the adapter's outputs are not finite),
        RequestCancelledError (its run was retired), DeadlineExceededError (after its timeout_s; says what it waited for), StageStoppedError.
        """
        async with self._asked(request, is_stream=False) as reply:
            return await reply.completion()

    async def stream(self, request: SampleRequest) -> AsyncIterator[Tokens]:
        """Continue a prompt, and give out what each dispatch samples of it; the last item has the completion.

        Closing the iterator cancels the request, as cancelling the reading task does. Raises as `sample`, from the first item on.
        """
        async with self._asked(request, is_stream=True) as reply:
            while True:
                tokens = await reply.next()
                yield tokens
                if tokens.completion is not None:
                    return

    @asynccontextmanager
    async def _asked(self, request: SampleRequest, *, is_stream: bool) -> AsyncIterator[Reply]:
        """The reply to a request that has been posted; left before its end, the request is cancelled."""
        check_request(request, vocab_size=self._model.vocab_size, max_context=self._config.max_context)
        stop_ids, texts = stops_of(request.params, self._eos_id, self._tokenizer)
        sequence, reply = Sequence(request, stop_ids), Reply(is_stream=is_stream)
        sequence.deadline_s = self._clock.now() + request.timeout_s
        search = StopSearch(self._tokenizer, texts) if texts and self._tokenizer is not None else None
        self._post(_Ticket(sequence, reply, search))
        try:
            yield reply
        finally:
            if not reply.is_settled:
                with suppress(StageStoppedError):
                    self._post(_Ticket(sequence, reply, is_cancelled=True))

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self._failure is None and (bool(self._inbox) or self._scheduler.has_work)

    # Device thread

    def step(self) -> bool:
        """Take in what has arrived, give up what is past its deadline, and run one dispatch. False: there was nothing to run."""
        if self._failure is not None:
            return False
        self._take_inbox()
        self._expire()
        dispatch = self._scheduler.plan()
        self._write(self._slots.take_writes())
        if dispatch is None:
            return False
        if isinstance(dispatch, PrefillDispatch):
            self._prefill(dispatch)
        else:
            self._decode(dispatch)
        return True

    def publish(self, run_id: str, version: int, adapter: HostAdapter, scale: float) -> None:
        """Make `version` the run's newest; it needs no slot, and whoever samples it next brings it into one. Requests that came before and name the
        version that was the newest then keep it.

        adapter: of any width that fits in a slot; kept as it is, not copied, so nobody may write into it. scale: `LoraSpec.scale`.

        Raises StateConflictError (not after the newest version, or versions of a retired run of this name are still pinned), InvalidRequestError
        (wrong shapes, a scale that is not finite).
        """
        width = width_of(adapter)
        problem = misfit(adapter, self._model, width, self._runner.shapes.tops)
        if problem is None and width > self._max_rank:
            problem = f"its width is {width}, the slots have {self._max_rank}"
        if problem is not None or not math.isfinite(scale):
            raise InvalidRequestError(f"cannot publish run {run_id!r} version {version}: {problem or f'its scale is {scale}'}")
        self._take_inbox()
        self._slots.advance(run_id, version, _Published(adapter, scale))
        if self._config.kv_on_publish == "recompute":
            self._scheduler.publish_moved(run_id)

    def retire(self, run_id: str) -> None:
        """The run has ended: cancel its requests (RequestCancelledError), forget its cached pages and its versions, pinned ones when unpinned.

        Nothing of it is left for a later run of the same name; until its last pin is gone there can be none (StateConflictError from `publish`).
        """
        self._take_inbox()
        for sequence in [s for s in self._scheduler.sequences() if s.request.run_id == run_id]:
            self._give_up(sequence, RequestCancelledError(f"request {sequence.request.request_id!r}: run {run_id!r} was stopped"))
        self._scheduler.pool.purge(run_id)
        self._slots.retire(run_id)

    def pin(self, run_id: str, version: int) -> None:
        """Keep a version in host memory until it is unpinned, for requests that name it. Raises UnknownVersionError if it is not kept any more."""
        self._slots.acquire(run_id, version)

    def unpin(self, run_id: str, version: int) -> None:
        """Undo one `pin`."""
        self._slots.release(run_id, version)

    def newest_version(self, run_id: str) -> int:
        """The run's newest published version. Raises UnknownVersionError."""
        return self._slots.newest(run_id)

    def checksum(self, run_id: str, version: int) -> int:
        """The integer checksum (`lora.checksum`) of a kept version's bytes on the device, where they are brought if they are not there.

        Raises UnknownVersionError.
        """
        is_there = self._slots.bring(run_id, version)
        assert is_there, "between two plans a slot can be had"
        slot = self._slots.slot(run_id, version)
        self._write(self._slots.take_writes())
        return self._runner.checksum(slot)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Fair-share weight of a tenant, > 0; 1 unless set."""
        self._scheduler.set_weight(tenant, weight)

    def set_deterministic(self, run_id: str, *, is_deterministic: bool) -> None:
        """What the run samples is the same bit for bit, alone or beside others, whenever its requests come and whatever is cached; or need not be.

        It holds for requests whose tokens are all of one version, on one machine with one JAX. Set it before the run's first request.
        """
        self._scheduler.set_deterministic(run_id, is_deterministic=is_deterministic)

    def waiting(self) -> list[Waiting]:
        """Every unfinished request, what it waits for, and its position."""
        return self._scheduler.waiting()

    def warm_up(self) -> None:
        """Compile all programs ahead."""
        self._runner.warm_up()

    @property
    def num_programs(self) -> int:
        """Programs compiled so far; flat after `warm_up`."""
        return self._runner.num_programs

    @property
    def num_free_slots(self) -> int:
        """Adapter slots that hold no version anybody can ask for."""
        return self._slots.num_free

    @property
    def num_versions(self) -> int:
        """Adapter versions in host memory: the newest of each run, and those that requests and pins need."""
        return self._slots.num_known

    @property
    def schedule_counts(self) -> ScheduleCounts:
        """What admission has found in the prefix cache, and what was preempted; the engine's own, not to be changed."""
        return self._scheduler.counts

    @property
    def page_counts(self) -> PageCounts:
        """What has been given up, and what has moved to host memory and back; the engine's own, not to be changed."""
        return self._scheduler.pool.counts

    @property
    def num_held_pages(self) -> int:
        """KV pages in use by requests; cached pages that nobody uses do not count."""
        return self._scheduler.pool.num_held

    @property
    def occupancy(self) -> float:
        """Mean lanes in use / lanes over all decode dispatches so far, 0 before the first."""
        return self.counts.num_lanes_used / max(1, self.counts.num_decodes * self._runner.shapes.lanes[-1])

    def fail(self, error: BaseException) -> None:
        """Stop for good: whatever is unfinished, and whatever comes later, fails with StageStoppedError, of which `error` is the cause. Idempotent.

        Also after a step that raised, when device arrays and schedule can no longer be trusted: neither is touched.
        """
        with self._inbox_lock:
            self._failure = self._failure or error
            tickets = [*self._tickets.values(), *(ticket for ticket in self._inbox if not ticket.is_cancelled)]
            self._inbox.clear()
        self._tickets.clear()
        for ticket in tickets:
            ticket.reply.settle(self._stopped_error())

    def _write(self, writes: Iterable[SlotWrite]) -> None:
        for write in writes:
            with self._spans.span("sampler", "adapter", write.run_id):
                self._runner.write_slot(write.slot, *write.contents)
            self.counts.num_slot_writes += 1

    def _prefill(self, dispatch: PrefillDispatch) -> None:
        with self._spans.span("sampler", "prefill"):
            scored = self._runner.prefill(dispatch)
        self._scheduler.complete_prefill(dispatch, scored)
        self.counts.num_prefills += bool(dispatch.rows)
        self.counts.num_prefilled += sum(len(row.ids) for row in dispatch.rows)

    def _decode(self, dispatch: DecodeDispatch) -> None:
        with self._spans.span("sampler", "decode"):
            sampled = self._runner.decode(dispatch)
        kept = [
            [self._cut(sequence, lane) for sequence, lane in zip(t.sequences, ls, strict=True)] for t, ls in zip(dispatch.tiles, sampled, strict=True)
        ]
        sequences = [sequence for tile in dispatch.tiles for sequence in tile.sequences]
        num_mixed = sum(sequence.num_mixed for sequence in sequences)
        finished = set(self._scheduler.complete(dispatch, kept))
        self.counts.num_decodes += 1
        self.counts.num_lanes_used += dispatch.num_lanes
        self.counts.num_sampled += sum(len(lane.ids) for lanes in kept for lane in lanes)
        self.counts.num_mixed += sum(sequence.num_mixed for sequence in sequences) - num_mixed
        for tile, lanes in zip(dispatch.tiles, kept, strict=True):
            for sequence, lane in zip(tile.sequences, lanes, strict=True):
                self._answer(sequence, lane, tile.version, is_finished=sequence in finished)

    def _cut(self, sequence: Sequence, lane: Sampled) -> Sampled:
        """What a lane sampled, up to the token that completed a stop text: the rest was sampled beyond the end."""
        search = self._tickets[sequence].search
        count = None if search is None else search.find(lane.ids)
        if count is None:
            return lane
        sequence.is_stopped = True
        return Sampled(lane.ids[:count], lane.behavior_logprobs[:count], lane.top[:count])

    def _answer(self, sequence: Sequence, lane: Sampled, version: int, *, is_finished: bool) -> None:
        """Settle a request that has finished, or whose adapter is broken: numbers that are not finite must not reach training as data."""
        reply = self._tickets[sequence].reply
        if not all(math.isfinite(x) for x in (*lane.behavior_logprobs, *(sequence.prompt_logprobs if is_finished else ()))):
            self._give_up(sequence, _broken(sequence), is_known=not is_finished)
        elif is_finished or reply.is_stream:
            completion = sequence.completion() if is_finished else None
            tokens = Tokens(tuple(lane.ids), tuple(lane.behavior_logprobs), (version,) * len(lane.ids), tuple(lane.top), completion)
            if is_finished:
                self._resolve(sequence, tokens)
            else:
                reply.send(tokens)

    def _expire(self) -> None:
        expired = self._scheduler.expired(self._clock.now())
        if expired:
            waiting = {one.request_id: one for one in self._scheduler.waiting()}
            for sequence in expired:
                self._give_up(sequence, _missed(sequence, waiting[sequence.request.request_id]))

    def _take_inbox(self) -> None:
        while True:
            with self._inbox_lock:
                if not self._inbox:
                    return
                ticket = self._inbox.popleft()
            if ticket.is_cancelled:
                if ticket.sequence in self._tickets:
                    self._scheduler.cancel(ticket.sequence)
                    self._forget(ticket.sequence)
            else:
                self._admit(ticket)

    def _admit(self, ticket: _Ticket) -> None:
        request = ticket.sequence.request
        if request.request_id in self._request_ids:
            message = f"request id {request.request_id!r} is in use by an unfinished request; ids are unique"
            return ticket.reply.settle(InvalidRequestError(message))
        self._tickets[ticket.sequence] = ticket  # first: whatever goes wrong, `fail` finds it
        self._request_ids.add(request.request_id)
        try:
            self._scheduler.submit(ticket.sequence)
        except NoriaError as error:
            self._resolve(ticket.sequence, error)

    def _forget(self, sequence: Sequence) -> _Ticket:
        self._request_ids.discard(sequence.request.request_id)
        return self._tickets.pop(sequence)

    def _give_up(self, sequence: Sequence, error: NoriaError, *, is_known: bool = True) -> None:
        """is_known: the scheduler has it still."""
        if is_known:
            self._scheduler.cancel(sequence)
        self._resolve(sequence, error)

    def _resolve(self, sequence: Sequence, outcome: Tokens | NoriaError) -> None:
        self._forget(sequence).reply.settle(outcome)

    def _post(self, ticket: _Ticket) -> None:
        with self._inbox_lock:
            if self._failure is not None:
                raise self._stopped_error()
            self._inbox.append(ticket)
        self._wake()

    def _stopped_error(self) -> StageStoppedError:
        stopped = StageStoppedError(f"the sampler has stopped: {self._failure}")
        stopped.__cause__ = self._failure
        return stopped


def _broken(sequence: Sequence) -> RunFailedError:
    request = sequence.request
    return RunFailedError(
        f"request {request.request_id!r}: run {request.run_id!r} gave log-probabilities that are not finite with versions "
        f"{sorted(set(sequence.versions))}; its adapter is broken"
    )


def _missed(sequence: Sequence, waiting: Waiting) -> DeadlineExceededError:
    """What the request was waiting for when its time was up."""
    request, num_sampled = sequence.request, len(sequence.sampled_ids)
    place = f"waiting for {waiting.reason}" if waiting.reason != "decoding" else "decoding"
    queue = f" behind {waiting.position} requests of tenant {waiting.tenant}" if waiting.position else ""
    return DeadlineExceededError(
        f"request {request.request_id!r} was not finished after its timeout_s = {request.timeout_s:g}: {num_sampled} of at most "
        f"{request.params.max_tokens} tokens sampled, {place}{queue}"
    )
