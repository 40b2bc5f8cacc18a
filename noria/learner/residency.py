"""Which runs lie in the learner's slots: a few rank classes of stacked slots, and more runs than slots.

    add ──▶ a free slot, or a page ──bring──▶ slot ──least recently used, not needed now──▶ page (host memory, then disk)

A run belongs to the narrowest class that holds its rank; a microbatch holds runs of one class. Paging keeps parameters, moments, step count and the
pending gradient, all bits. It moves one slot at a time, in place: stacks are never copied.
Deliberately not here: who needs a slot next, which the queue decides, and durability (see `paging.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import jax
import numpy as np

from noria.config import LearnerConfig
from noria.errors import AdapterFileCorruptError, ConfigError, SlotsExhaustedError, StateConflictError
from noria.learner.optimizer import SlotState, empty_state, load_slot, read_gradient, read_slot
from noria.learner.paging import Page, PageStore
from noria.model.config import ModelConfig
from noria.model.lora import MODULES, AdapterState, HostAdapter, misfit, resident_tops, trained_tops, with_tops, zero_adapter
from noria.types import FloatArray, LoraSpec

MIB = 2**20


@dataclass(slots=True)
class PagingCounts:
    """What moved between slots and pages since the start: runs and bytes, each way."""

    num_in: int = 0
    num_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True)
class _Run:
    """slot: None while it is paged out. tops: top modules that its state has. last_use: larger is later."""

    rank_class: int
    scale: float
    tops: tuple[str, ...]
    slot: int | None = None
    last_use: int = 0


@dataclass(slots=True)
class _Class:
    state: SlotState
    scale_A: FloatArray
    free: list[int]


@final
class Residency:
    """Owner of every run's trainable state. The device thread only.

    lost: runs whose page turned out damaged, each with its error, until they are loaded anew or removed. spill_dir: a folder of its own for pages
    that exceed settings.host_mib; None: they stay in host memory.
    """

    def __init__(self, config: ModelConfig, settings: LearnerConfig, *, spill_dir: Path | None) -> None:
        self._config, self._settings = config, settings
        self._tops = resident_tops(settings)
        self._classes = {width: self._empty_class(width) for width in settings.rank_classes}
        self._pages = PageStore(settings.host_mib * MIB, spill_dir)
        self._runs: dict[str, _Run] = {}
        self._num_uses = 0
        self.counts = PagingCounts()
        self.lost: dict[str, AdapterFileCorruptError] = {}

    def warm_up(self) -> None:
        """Compile what paging runs, before any run is added."""
        assert not self._runs, "warm up first"
        for width, each in self._classes.items():
            zeros = zero_adapter(self._config, width, self._tops)
            each.state = load_slot(each.state, 0, AdapterState(zeros, zeros, zeros, 0))
            read_slot(each.state, 0)

    # ---- runs -------------------------------------------------------------------------------------------------------------------------

    def add(self, run_id: str, lora: LoraSpec, state: AdapterState) -> None:
        """Take a run in, without a pending gradient. state: of its class's width; kept and not copied where no slot is free.

        Raises StateConflictError: added already, a rank above all classes, a state that is not one of this model, class and spec.
        """
        if run_id in self._runs:
            raise StateConflictError(f"run {run_id} is loaded already")
        try:
            width = self._settings.class_of(lora.rank)
        except ConfigError as error:
            raise StateConflictError(f"run {run_id}: {error}") from error
        run = _Run(width, lora.scale, tuple(module for module in state.params["a"] if module not in MODULES))
        self._check(run_id, run, state, trained_tops(lora))
        self._runs[run_id] = run
        if self._classes[width].free:
            self._place(run, Page(state, None))
            self._use(run)
        else:
            self._pages.put(run_id, Page(state, None))

    def remove(self, run_id: str) -> None:
        """Forget a run and all of its state. Idempotent."""
        run = self._runs.pop(run_id, None)
        if run is not None and run.slot is not None:
            self._vacate(run)
        self._pages.drop(run_id)
        self.lost.pop(run_id, None)

    def class_of(self, run_id: str) -> int:
        """The width of the run's rank class. Raises StateConflictError: unknown run."""
        return self._run(run_id).rank_class

    def read(self, run_id: str) -> AdapterState:
        """The run's parameters, moments and step count, wherever they are; nothing is paged in.

        Raises StateConflictError (unknown run), AdapterFileCorruptError (its page is damaged).
        """
        run = self._run(run_id)
        if run.slot is None:
            return self._page(run_id).state
        return self._own(run, read_slot(self._classes[run.rank_class].state, run.slot))

    def load(self, run_id: str, state: AdapterState) -> None:
        """Replace the run's parameters, moments and step count; its pending gradient is cleared. Raises StateConflictError: as `add`."""
        run = self._run(run_id)
        self._check(run_id, run, state, run.tops)
        if run.slot is None:
            self._pages.put(run_id, Page(state, None))
        else:
            self._write(run, run.slot, Page(state, None))
        self.lost.pop(run_id, None)

    def clear_gradient(self, run_id: str) -> None:
        """The run's pending gradient is zero again. Raises as `read`."""
        self.load(run_id, self.read(run_id))

    # ---- slots ------------------------------------------------------------------------------------------------------------------------

    def bring(self, run_ids: Sequence[str], *, keep: Collection[str] = ()) -> dict[str, int]:
        """The slots of these runs, all of one class; those without one get one, from the least recently used runs but `run_ids` and `keep`.

        Raises StateConflictError (unknown runs, several classes), SlotsExhaustedError (they do not fit together), AdapterFileCorruptError (a page is
        damaged: `lost` says whose). Whatever it raises, every other run is whole, in a slot or paged.
        """
        width = self._common_class(run_ids)
        if not self.fits(run_ids, keep=keep):
            raise SlotsExhaustedError(
                f"{len(set(run_ids))} runs do not fit in the {self._settings.num_slots} learner slots of rank class {width} beside those in use: "
                "raise learner.num_slots"
            )
        for run_id in run_ids:
            run = self._runs[run_id]
            if run.slot is None:
                page = self._page(run_id)
                if not self._classes[width].free:
                    self._evict(width, {*run_ids, *keep})
                self._place(run, page)
                self._pages.drop(run_id)
                self.counts.num_in += 1
                self.counts.bytes_in += self._bytes(width)
            self._use(run)
        return {run_id: self._slot(run_id) for run_id in run_ids}

    def fits(self, run_ids: Collection[str], *, keep: Collection[str] = ()) -> bool:
        """Whether the runs are of one class and can be resident together, beside those of `keep` that are. Raises StateConflictError: unknown run."""
        widths = {self.class_of(run_id) for run_id in run_ids}
        kept = {run_id for run_id in keep if run_id in self._runs and self._runs[run_id].slot is not None and self._runs[run_id].rank_class in widths}
        return len(widths) <= 1 and len(kept.union(run_ids)) <= self._settings.num_slots

    def slots(self, rank_class: int) -> SlotState:
        """The stacked state of a class."""
        return self._classes[rank_class].state

    def replace(self, rank_class: int, state: SlotState) -> None:
        """Set what a program made of `slots(rank_class)`."""
        self._classes[rank_class].state = state

    def scale_A(self, rank_class: int) -> FloatArray:
        """The scales of a class's slots, 0 for free ones."""
        return self._classes[rank_class].scale_A

    @property
    def is_intact(self) -> bool:
        """False once a program failed that had taken a state's arrays: then nothing here can be used any more."""
        return not any(leaf.is_deleted() for each in self._classes.values() for leaf in jax.tree.leaves(each.state))

    @property
    def host_bytes(self) -> int:
        """Of host memory, in pages."""
        return self._pages.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Of files, in pages."""
        return self._pages.disk_bytes

    def _empty_class(self, width: int) -> _Class:
        """On its device explicitly: programs compile anew for arrays that are not, once one of their inputs came back from host memory."""
        num_slots = self._settings.num_slots
        state = jax.device_put(empty_state(self._config, num_slots, width, self._tops), jax.devices()[0])
        return _Class(state, np.zeros(num_slots, np.float32), list(range(num_slots)))

    # ---- inside -----------------------------------------------------------------------------------------------------------------------

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            raise StateConflictError(f"run {run_id} is not loaded")
        return run

    def _slot(self, run_id: str) -> int:
        slot = self._runs[run_id].slot
        assert slot is not None, "it was just brought"
        return slot

    def _use(self, run: _Run) -> None:
        self._num_uses += 1
        run.last_use = self._num_uses

    def _check(self, run_id: str, run: _Run, state: AdapterState, needed: Collection[str]) -> None:
        for part, tree in zip(("adapter", "first moment", "second moment"), state[:3], strict=True):
            problem = misfit(tree, self._config, run.rank_class, self._tops)
            lacks = [module for module in needed if module not in tree["a"]]
            if not problem and (lacks or tree["a"].keys() != {*MODULES, *run.tops}):
                problem = f"it has modules {list(tree['a'])}, expected {[*MODULES, *(run.tops or lacks)]}"
            if problem:
                raise StateConflictError(f"the {part} of run {run_id} does not fit base {self._config.name}: {problem}")

    def _common_class(self, run_ids: Sequence[str]) -> int:
        widths = {self.class_of(run_id) for run_id in run_ids}
        if len(widths) != 1:
            raise StateConflictError(f"runs {', '.join(run_ids)} are of rank classes {sorted(widths)}; slots are given out in one class at a time")
        return widths.pop()

    def _page(self, run_id: str) -> Page:
        try:
            page = self._pages.get(run_id)
        except AdapterFileCorruptError as error:
            self.lost[run_id] = error
            raise
        self.lost.pop(run_id, None)
        return page

    def _evict(self, width: int, needed: Collection[str]) -> None:
        """Page the least recently used run out that is not needed now."""
        idle = {run_id: run for run_id, run in self._runs.items() if run.rank_class == width and run.slot is not None and run_id not in needed}
        run_id = min(idle, key=lambda each: idle[each].last_use)
        run, state, slot = idle[run_id], self._classes[width].state, self._slot(run_id)
        gradient = self._only(run, read_gradient(state, slot))
        is_zero = not any(leaf.view(np.uint32).any() for leaf in jax.tree.leaves(gradient))
        self._pages.put(run_id, Page(self._own(run, read_slot(state, slot)), None if is_zero else gradient))
        self._vacate(run)
        self.counts.num_out += 1
        self.counts.bytes_out += self._bytes(width)

    def _place(self, run: _Run, page: Page) -> None:
        """Write a page into a free slot."""
        each = self._classes[run.rank_class]
        slot = each.free[0]
        self._write(run, slot, page)
        each.free.remove(slot)
        each.scale_A[slot], run.slot = run.scale, slot

    def _write(self, run: _Run, slot: int, page: Page) -> None:
        each, state = self._classes[run.rank_class], page.state
        params, first, second = (self._whole(run, tree) for tree in state[:3])
        gradient = None if page.gradient is None else self._whole(run, page.gradient)
        each.state = load_slot(each.state, slot, AdapterState(params, first, second, state.num_steps), gradient)

    def _vacate(self, run: _Run) -> None:
        """What lies in the slot stays, until another run is written there, whole."""
        assert run.slot is not None
        each = self._classes[run.rank_class]
        each.scale_A[run.slot] = 0.0
        each.free.append(run.slot)
        run.slot = None

    def _whole(self, run: _Run, tree: HostAdapter) -> HostAdapter:
        return with_tops(tree, self._config, run.rank_class, self._tops)

    def _only(self, run: _Run, tree: HostAdapter) -> HostAdapter:
        return with_tops(tree, self._config, run.rank_class, run.tops)

    def _own(self, run: _Run, state: AdapterState) -> AdapterState:
        params, first, second = (self._only(run, tree) for tree in state[:3])
        return AdapterState(params, first, second, state.num_steps)

    def _bytes(self, width: int) -> int:
        return sum(leaf.nbytes for tree in self._classes[width].state[:4] for leaf in jax.tree.leaves(tree)) // self._settings.num_slots
