"""The sampler as its users see it: `sample` on the event loop, `step` on the device thread.

    sample ─▶ inbox ─▶ step: take the inbox in ─▶ plan (scheduler) ─▶ run (runner) ─▶ record what was sampled ─▶ resolve futures
     event loop        device thread, one dispatch per step

A publish happens between two steps, aborts nothing and keeps all K/V: from the next token on, the run's unpinned requests use the new version.
This module deliberately holds no policy (scheduler) and no arrays (runner).
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, final

from noria.config import SamplerConfig
from noria.errors import (
    ConfigError,
    InvalidRequestError,
    NoriaError,
    PromptTooLongError,
    RequestCancelledError,
    RunFailedError,
    StageStoppedError,
    UnknownVersionError,
)
from noria.model.config import ModelConfig
from noria.model.lora import HostAdapter, misfit, width_of
from noria.model.placement import BaseParams
from noria.protocols import Spans
from noria.sampler.pages import PAGE, PagePool
from noria.sampler.runner import Runner, Shapes
from noria.sampler.scheduler import Scheduler, Waiting
from noria.sampler.sequence import MAX_STOP_IDS, DecodeDispatch, PrefillDispatch, Sequence
from noria.sampler.slots import SlotTable
from noria.types import Completion, SampleRequest

MAX_SEED = 2**63
"""Seeds are below this: a key is made of two 32-bit words."""


@dataclass(slots=True)
class SamplerCounts:
    """What the sampler has done since it started; only ever grows.

    num_prefilled: positions. num_sampled: tokens. num_mixed: of these, tokens of requests with K/V of more than one version.
    num_decodes, num_prefills: dispatches. num_lanes_used: sum over decode dispatches of the lanes in use.
    """

    num_prefilled: int = 0
    num_sampled: int = 0
    num_mixed: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_lanes_used: int = 0


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request on its way in, or (is_cancelled) on its way out."""

    sequence: Sequence
    future: "asyncio.Future[Completion]"
    loop: asyncio.AbstractEventLoop
    is_cancelled: bool = False


Outcome: TypeAlias = Completion | NoriaError


@final
class SamplerEngine:
    """Implements `protocols.Sampler`.

    Any thread: `sample` (on an event loop), `has_work`. Device thread only: everything else; it owns scheduler, runner and slots.
    wake: called, from any thread, when work has arrived, so that the device thread may sleep while `has_work` is false.
    """

    def __init__(
        self,
        base: BaseParams,
        model: ModelConfig,
        config: SamplerConfig,
        *,
        rank_classes: tuple[int, ...],
        eos_id: int,
        spans: Spans,
        wake: Callable[[], None] = lambda: None,
        shapes: Shapes | None = None,
    ) -> None:
        """rank_classes: widths of the slots, ascending; a version takes the smallest that holds it. eos_id: always a stop id.
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
        self._wake = wake
        self._runner = Runner(base, model, config, rank_classes=rank_classes, shapes=shapes)
        self._slots = SlotTable(config.num_slots)
        shapes = self._runner.shapes
        pool = PagePool(config.num_pages)
        self._scheduler = Scheduler(pool, self._slots, num_lanes=shapes.lanes[-1], max_rows=shapes.rows[-1], fixed=shapes.fixed)
        self._tickets: dict[Sequence, _Ticket] = {}
        self._request_ids: set[str] = set()
        self._inbox: deque[_Ticket] = deque()
        self._inbox_lock = threading.Lock()
        self._failure: BaseException | None = None

    # Event loop

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue a prompt. Cancel the awaiting task to cancel the request, which frees its lane and pages at the next step.

        Raises InvalidRequestError, PromptTooLongError, UnknownVersionError, RunFailedError (the adapter's outputs are not finite),
        RequestCancelledError (its run was retired), StageStoppedError.
        """
        self._validate(request)
        loop = asyncio.get_running_loop()
        stop_ids = tuple(sorted({*request.params.stop_ids, self._eos_id}))
        ticket = _Ticket(Sequence(request, stop_ids), loop.create_future(), loop)
        self._post(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            with suppress(StageStoppedError):
                self._post(_Ticket(ticket.sequence, ticket.future, loop, is_cancelled=True))
            raise

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self._failure is None and (bool(self._inbox) or self._scheduler.has_work)

    # Device thread

    def step(self) -> bool:
        """Take in what has arrived and run one dispatch. False: there was nothing to run."""
        if self._failure is not None:
            return False
        self._take_inbox()
        dispatch = self._scheduler.plan()
        if dispatch is None:
            return False
        if isinstance(dispatch, PrefillDispatch):
            self._prefill(dispatch)
        else:
            self._decode(dispatch)
        return True

    def publish(self, run_id: str, version: int, adapter: HostAdapter, scale: float) -> None:
        """Make `version` the run's newest: only adapter bytes move. adapter: of any width that fits in a slot; scale: `LoraSpec.scale`.

        Raises StateConflictError (not after the newest version, or versions of a retired run of this name are still pinned), SlotsExhaustedError,
        InvalidRequestError (wrong shapes, a scale that is not finite).
        """
        width = width_of(adapter)
        problem = misfit(adapter, self._model, width, self._runner.shapes.tops)
        if problem is None and width > self._max_rank:
            problem = f"its width is {width}, the slots have {self._max_rank}"
        if problem is not None or not math.isfinite(scale):
            raise InvalidRequestError(f"cannot publish run {run_id!r} version {version}: {problem or f'its scale is {scale}'}")
        while not self._slots.has_room(run_id) and self._scheduler.is_prefilling(run_id):
            self._prefill(self._scheduler.plan_prefill())  # a prefill stays with its version and may hold the last slot
        slot = self._slots.advance(run_id, version)
        with self._spans.span("sampler", "publish", run_id):
            self._runner.write_slot(slot, adapter, scale)

    def retire(self, run_id: str) -> None:
        """The run has ended: cancel its requests (RequestCancelledError), forget its cached pages and free its slots, pinned ones when unpinned.

        Nothing of it is left for a later run of the same name; until its last pin is gone there can be none (StateConflictError from `publish`).
        """
        self._take_inbox()
        for sequence in [s for s in self._scheduler.sequences() if s.request.run_id == run_id]:
            self._scheduler.cancel(sequence)
            self._resolve(sequence, RequestCancelledError(f"request {sequence.request.request_id!r}: run {run_id!r} was stopped"))
        self._scheduler.pool.purge(run_id)
        self._slots.retire(run_id)

    def pin(self, run_id: str, version: int) -> None:
        """Keep a resident version until it is unpinned, for requests that name it. Raises UnknownVersionError if it is not resident."""
        self._slots.acquire(run_id, version)

    def unpin(self, run_id: str, version: int) -> None:
        """Undo one `pin`."""
        self._slots.release(run_id, version)

    def newest_version(self, run_id: str) -> int:
        """The run's newest published version. Raises UnknownVersionError."""
        return self._slots.newest(run_id)

    def checksum(self, run_id: str, version: int) -> int:
        """The integer checksum (`lora.checksum`) of a resident version's bytes on the device. Raises UnknownVersionError."""
        return self._runner.checksum(self._slots.slot(run_id, version))

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
        """Adapter slots that hold no version anybody needs."""
        return self._slots.num_free

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
            _settle(ticket, self._stopped_error())

    def _prefill(self, dispatch: PrefillDispatch) -> None:
        with self._spans.span("sampler", "prefill"):
            self._runner.prefill(dispatch)
        self.counts.num_prefills += 1
        self.counts.num_prefilled += sum(len(row.ids) for row in dispatch.rows)

    def _decode(self, dispatch: DecodeDispatch) -> None:
        with self._spans.span("sampler", "decode"):
            sampled = self._runner.decode(dispatch)
        finished = self._scheduler.complete(dispatch, sampled)
        self.counts.num_decodes += 1
        self.counts.num_lanes_used += dispatch.num_lanes
        for tile, lanes in zip(dispatch.tiles, sampled, strict=True):
            for sequence, lane in zip(tile.sequences, lanes, strict=True):
                self.counts.num_sampled += len(lane.ids)
                self.counts.num_mixed += len(lane.ids) * (sequence.kv_version is None)
        for sequence in finished:
            self._resolve(sequence, _outcome(sequence))

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
            return _settle(ticket, InvalidRequestError(f"request id {request.request_id!r} is in use by an unfinished request; ids are unique"))
        try:
            self._scheduler.submit(ticket.sequence)
        except UnknownVersionError as error:
            return _settle(ticket, error)
        self._tickets[ticket.sequence] = ticket
        self._request_ids.add(request.request_id)

    def _forget(self, sequence: Sequence) -> _Ticket:
        self._request_ids.discard(sequence.request.request_id)
        return self._tickets.pop(sequence)

    def _resolve(self, sequence: Sequence, outcome: Outcome) -> None:
        _settle(self._forget(sequence), outcome)

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

    def _validate(self, request: SampleRequest) -> None:
        prompt, params = request.prompt_ids, request.params
        vocab = self._model.vocab_size
        num_stop_ids = len({*params.stop_ids, self._eos_id})
        problems = {
            "the prompt is empty; give at least one id": not prompt,
            f"prompt ids must be in [0, {vocab}), got {min(prompt, default=0)} .. {max(prompt, default=0)}": not _are_ids(prompt, vocab),
            f"stop ids must be in [0, {vocab}), got {params.stop_ids}": not _are_ids(params.stop_ids, vocab),
            f"at most {MAX_STOP_IDS} stop ids, end-of-text included, got {num_stop_ids}": num_stop_ids > MAX_STOP_IDS,
            f"max_tokens must be at least 1, got {params.max_tokens}": params.max_tokens < 1,
            f"temperature must be finite and at least 0, got {params.temperature}": not 0 <= params.temperature < math.inf,
            f"seed must be in [0, 2^63), got {params.seed}": not 0 <= params.seed < MAX_SEED,
            f"sample_index must be in [0, 2^31), got {params.sample_index}": not 0 <= params.sample_index < 2**31,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise InvalidRequestError(f"request {request.request_id!r}: {problem}")
        if len(prompt) + params.max_tokens > self._config.max_context:
            raise PromptTooLongError(
                f"request {request.request_id!r}: a prompt of {len(prompt)} ids and max_tokens = {params.max_tokens} exceed max_context = "
                f"{self._config.max_context}; shorten the prompt, lower max_tokens, or raise max_context"
            )


def _are_ids(ids: tuple[int, ...], vocab_size: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def _outcome(sequence: Sequence) -> Outcome:
    """The completion, or an error if the adapter is broken: numbers that are not finite must not reach training as data."""
    if all(math.isfinite(x) for x in sequence.behavior_logprobs):
        return sequence.completion()
    request = sequence.request
    return RunFailedError(
        f"request {request.request_id!r}: run {request.run_id!r} gave log-probabilities that are not finite with versions "
        f"{sorted(set(sequence.versions))}; its adapter is broken"
    )


def _settle(ticket: _Ticket, outcome: Outcome) -> None:
    """Hand the outcome to the event loop. A loop that is closed has nobody waiting."""
    with suppress(RuntimeError):
        ticket.loop.call_soon_threadsafe(_set_outcome, ticket.future, outcome)


def _set_outcome(future: "asyncio.Future[Completion]", outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, NoriaError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
