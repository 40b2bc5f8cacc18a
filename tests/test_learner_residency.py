"""More runs than slots: whatever is paged, brought or removed, each run has the bits that it has alone, and nobody touches another's."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from export_builders import a_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from learner_builders import same_bytes

from noria.config import LearnerConfig
from noria.errors import AdapterFileCorruptError, SlotsExhaustedError, StateConflictError
from noria.learner import optimizer
from noria.learner.optimizer import apply_step, empty_state, hyperparameters, read_gradient
from noria.learner.paging import Page, PageStore
from noria.learner.residency import Residency
from noria.model.lora import AdapterState, host_shapes, initial_state, trained_tops
from noria.types import LoraSpec, OptimizerSpec

CONFIG = a_config(num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, vocab_size=40)
SIZES = LearnerConfig(num_slots=2, rank_classes=(2, 4), has_unembed=True, has_values=True)
RUNS = {
    "plain": LoraSpec(2, 4.0),
    "small": LoraSpec(1, 4.0, train_attn=False),
    "head": LoraSpec(2, 8.0, train_unembed=True),
    "critic": LoraSpec(2, 2.0, train_value=True),
    "wide": LoraSpec(4, 4.0),
    "wider": LoraSpec(3, 4.0, use_rslora=True, train_unembed=True, train_value=True),
    "widest": LoraSpec(4, 1.0, train_mlp=False),
}
SPECS = {run_id: OptimizerSpec(1e-2 * (n + 1), weight_decay=0.1 * n, grad_clip_norm=0.5 * (n % 3)) for n, run_id in enumerate(RUNS)}
WIDTHS = {run_id: SIZES.class_of(lora.rank) for run_id, lora in RUNS.items()}


def random_tree(rng, run_id):
    """Values in every place that the run's own leaves have, ranks beyond its own too: what is there must not matter here."""
    shapes = host_shapes(CONFIG, WIDTHS[run_id], trained_tops(RUNS[run_id]))
    return {side: {m: rng.normal(size=shape).astype(np.float32) for m, shape in shapes[side].items()} for side in shapes}


def random_state(seed, run_id):
    rng = np.random.default_rng(seed)
    params, first, second = (random_tree(rng, run_id) for _ in range(3))
    return AdapterState(params, first, jax.tree.map(np.abs, second), int(rng.integers(0, 50)))


def residency(num_slots=2, host_mib=4096, spill_dir=None):
    return Residency(CONFIG, SIZES.model_copy(update={"num_slots": num_slots, "host_mib": host_mib}), spill_dir=spill_dir)


def with_runs(*run_ids, **changes):
    found = residency(**changes)
    for seed, run_id in enumerate(run_ids):
        found.add(run_id, RUNS[run_id], random_state(seed, run_id))
    return found


@jax.jit
def added(gradient, slot, values):
    own = {side: {m: leaf for m, leaf in gradient[side].items() if m in values[side]} for side in gradient}
    total = jax.tree.map(lambda leaf, value: leaf.at[:, slot].add(value), own, values)
    return {side: gradient[side] | total[side] for side in gradient}


def accumulate(where, run_id, seed):
    """What a pull does: the run's slot of the class's gradient grows."""
    slot, width = where.bring([run_id])[run_id], where.class_of(run_id)
    state = where.slots(width)
    where.replace(width, state._replace(gradient=added(state.gradient, slot, random_tree(np.random.default_rng(seed), run_id))))


def take_step(where, run_id):
    slot, width = where.bring([run_id])[run_id], where.class_of(run_id)
    state, norm, _ = apply_step(where.slots(width), jnp.int32(slot), hyperparameters(SPECS[run_id]))
    where.replace(width, state)
    return np.float32(norm)


def gradient_of(where, run_id):
    """The run's pending gradient, in its own leaves."""
    slot = where.bring([run_id])[run_id]
    found, tops = read_gradient(where.slots(where.class_of(run_id)), slot), trained_tops(RUNS[run_id])
    return {side: {m: leaf for m, leaf in leaves.items() if m not in ("head", "value") or m in tops} for side, leaves in found.items()}


class Paged(RuleBasedStateMachine):
    """Runs that share two slots a class, against each run in a residency of its own."""

    @initialize(host_mib=st.sampled_from([0, 1]))
    def begin(self, host_mib):
        self.host_mib, self.folder = host_mib, tempfile.TemporaryDirectory()
        self.files = Path(self.folder.name) / "pages"
        self.shared, self.alone = residency(host_mib=host_mib, spill_dir=self.files), {}
        for run_id in ("plain", "head", "critic", "wide", "wider", "widest"):  # one more than slots, in each class
            self.add(run_id, 0)

    def teardown(self):
        if not hasattr(self, "shared"):
            return
        for run_id, alone in self.alone.items():
            assert same_bytes(gradient_of(self.shared, run_id), gradient_of(alone, run_id))
        for run_id in list(self.alone):
            self.shared.remove(run_id)
        assert (self.shared.host_bytes, self.shared.disk_bytes, self.num_files()) == (0, 0, 0)
        self.folder.cleanup()

    def num_files(self):
        return len(list(self.files.iterdir())) if self.files.exists() else 0

    def draw(self, data):
        return data.draw(st.sampled_from(sorted(self.alone)))

    @rule(run_id=st.sampled_from(sorted(RUNS)), seed=st.integers(0, 9))
    def add_run(self, run_id, seed):
        self.add(run_id, seed)

    def add(self, run_id, seed):
        if run_id in self.alone:
            with pytest.raises(StateConflictError, match="loaded already"):
                self.shared.add(run_id, RUNS[run_id], random_state(seed, run_id))
            return
        self.alone[run_id] = residency()
        for where in (self.shared, self.alone[run_id]):
            where.add(run_id, RUNS[run_id], random_state(seed, run_id))

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def remove(self, data):
        run_id = self.draw(data)
        self.shared.remove(run_id)
        del self.alone[run_id]

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def bring(self, data):
        run_ids = data.draw(st.lists(st.sampled_from(sorted(self.alone)), min_size=1, max_size=3, unique=True))
        keep = data.draw(st.lists(st.sampled_from(sorted(self.alone)), max_size=1))
        if len({WIDTHS[run_id] for run_id in run_ids}) > 1:
            with pytest.raises(StateConflictError, match="rank classes"):
                self.shared.bring(run_ids)
        elif not self.shared.fits(run_ids, keep=keep):
            with pytest.raises(SlotsExhaustedError):
                self.shared.bring(run_ids, keep=keep)
        else:
            slots = self.shared.bring(run_ids, keep=keep)
            assert list(slots) == run_ids
            assert len(set(slots.values())) == len(run_ids)
            scale_A = self.shared.scale_A(WIDTHS[run_ids[0]])
            assert [scale_A[slot] for slot in slots.values()] == [np.float32(RUNS[run_id].scale) for run_id in run_ids]

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), seed=st.integers(0, 9))
    def accumulate(self, data, seed):
        run_id = self.draw(data)
        for where in (self.shared, self.alone[run_id]):
            accumulate(where, run_id, seed)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def step(self, data):
        run_id = self.draw(data)
        assert take_step(self.shared, run_id).tobytes() == take_step(self.alone[run_id], run_id).tobytes()

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), seed=st.integers(0, 9))
    def load(self, data, seed):
        run_id = self.draw(data)
        for where in (self.shared, self.alone[run_id]):
            where.load(run_id, random_state(seed, run_id))

    @precondition(lambda self: self.num_files())
    @rule(data=st.data())
    def damage(self, data):
        path = data.draw(st.sampled_from(sorted(self.files.iterdir())))
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        broken = []
        for run_id in self.alone:
            try:
                self.shared.read(run_id)
            except AdapterFileCorruptError:
                broken.append(run_id)
        assert list(self.shared.lost) == broken
        (run_id,) = broken
        with pytest.raises(AdapterFileCorruptError, match=run_id):
            self.shared.bring([run_id])
        for where in (self.shared, self.alone[run_id]):
            where.load(run_id, random_state(0, run_id))
        assert not self.shared.lost

    @invariant()
    def every_run_has_the_bits_that_it_has_alone(self):
        for run_id, alone in getattr(self, "alone", {}).items():
            assert same_bytes(self.shared.read(run_id), alone.read(run_id))

    @invariant()
    def free_slots_have_no_scale(self):
        for width in SIZES.rank_classes if hasattr(self, "shared") else ():
            scales = sorted(scale for scale in self.shared.scale_A(width).tolist() if scale)
            resident = [run_id for run_id, run in self.shared._runs.items() if run.slot is not None and WIDTHS[run_id] == width]
            assert scales == sorted(float(np.float32(RUNS[run_id].scale)) for run_id in resident)

    @invariant()
    def pages_are_of_runs_without_a_slot(self):
        if hasattr(self, "shared"):
            num_waiting = sum(run.slot is None for run in self.shared._runs.values())
            assert len(self.shared._runs) == len(self.alone)
            assert self.num_files() == (num_waiting if self.host_mib == 0 else 0)
            assert bool(self.shared.host_bytes) == (num_waiting > 0 and self.host_mib > 0)


TestPaged = Paged.TestCase
TestPaged.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("host_mib", [0, 4096])
def test_a_pending_gradient_survives_paging(tmp_path, host_mib):
    """Case 95: fb(A), then others take the slots, then A again: its gradient is there, bit for bit, and so is its step."""
    where, alone = with_runs("plain", "head", "critic", host_mib=host_mib, spill_dir=tmp_path), with_runs("plain")
    for each in (where, alone):
        accumulate(each, "plain", 1)
        accumulate(each, "plain", 2)
    expected = gradient_of(alone, "plain")
    where.bring(["head", "critic"])
    assert where.counts.num_out >= 1
    assert bool(where.disk_bytes) == (host_mib == 0)
    assert same_bytes(gradient_of(where, "plain"), expected)
    assert take_step(where, "plain") == take_step(alone, "plain")
    assert same_bytes(where.read("plain"), alone.read("plain"))


def test_a_step_of_one_run_touches_nothing_of_another():
    """Case 93: fb(A), fb(B), step(A): B's parameters, moments, pending gradient and step count stay, and the norm that clips B is its own."""
    where = with_runs("plain", "head")
    accumulate(where, "plain", 1)
    accumulate(where, "head", 2)
    before, pending = where.read("head"), gradient_of(where, "head")
    take_step(where, "plain")
    assert same_bytes(where.read("head"), before)
    assert where.read("head").num_steps == before.num_steps
    assert same_bytes(gradient_of(where, "head"), pending)
    alone = residency()
    alone.add("head", RUNS["head"], random_state(1, "head"))
    accumulate(alone, "head", 2)
    assert take_step(where, "head") == take_step(alone, "head")
    assert same_bytes(where.read("head"), alone.read("head"))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient_of(where, "plain"))), "its own gradient is spent"


def test_the_least_recently_used_run_makes_room_and_never_one_that_is_needed():
    where = with_runs("plain", "small", "head", "critic", num_slots=3)

    def resident():
        before = where.counts.num_in
        found = {run_id for run_id in ("plain", "small", "head", "critic") if where._runs[run_id].slot is not None}
        assert where.counts.num_in == before
        return found

    assert resident() == {"plain", "small", "head"}
    where.bring(["plain"])
    where.bring(["critic"])
    assert resident() == {"plain", "head", "critic"}
    where.bring(["small"], keep=["head"])
    assert resident() == {"small", "head", "critic"}
    where.bring(["plain", "head"], keep=["small"])
    assert resident() == {"plain", "head", "small"}
    assert not where.fits(["critic"], keep=["plain", "head", "small"])
    with pytest.raises(SlotsExhaustedError, match="3 learner slots of rank class 2"):
        where.bring(["critic"], keep=["plain", "head", "small"])
    assert resident() == {"plain", "head", "small"}


def test_a_removed_runs_slot_is_clean_for_the_next():
    where = with_runs("head", "plain")
    accumulate(where, "head", 1)
    where.remove("head")
    where.add("small", RUNS["small"], random_state(7, "small"))
    slot = where.bring(["small"])["small"]
    state = where.slots(2)
    for stack in state[:4]:
        assert not any(np.asarray(stack[side][module][:, slot]).any() for side in "ab" for module in ("head", "value"))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient_of(where, "small")))
    with pytest.raises(StateConflictError, match="not loaded"):
        where.read("head")
    where.remove("head")


def test_states_that_do_not_fit_are_refused_and_leave_nothing():
    where = residency()
    state, lora = random_state(0, "head"), RUNS["head"]
    without_head = initial_state(CONFIG, RUNS["plain"], 2, 0)
    narrow = residency()
    narrow._tops = ()
    refused = [
        (where, LoraSpec(5, 1.0), state, "rank 5 exceeds"),
        (where, LoraSpec(3, 1.0, train_unembed=True), state, r"expected float32 \(2, 16, 4\)"),
        (where, lora, without_head, "'head'"),
        (where, lora, state._replace(second_moment=without_head.second_moment), "second moment of run head"),
        (narrow, lora, state, "learner.has_unembed = true"),
        (narrow, RUNS["critic"], random_state(0, "critic"), "learner.has_values = true"),
    ]
    for each, spec, wrong, match in refused:
        with pytest.raises(StateConflictError, match=match):
            each.add("head", spec, wrong)
    where.add("head", lora, state)
    with pytest.raises(StateConflictError, match="adapter of run head"):
        where.load("head", without_head)
    assert same_bytes(where.read("head"), state)
    with pytest.raises(StateConflictError, match="not loaded"):
        where.bring(["head", "nobody"])


def test_paging_and_steps_move_one_slot_and_never_the_stack():
    """By the compiler's own figures: nothing temporary that grows with the slots, and what is written is written in place."""

    def temporaries(num_slots):
        state = empty_state(CONFIG, num_slots, 4, ("head", "value"))
        arguments = (state, slot := jnp.int32(0), hyperparameters(OptimizerSpec(1.0)), jnp.bool_(True))
        contents, *_ = optimizer._take_slot(*arguments)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        write = optimizer._write.lower(state, slot, contents).compile().memory_analysis()
        assert write.alias_size_in_bytes == size
        return write.temp_size_in_bytes, optimizer._take_slot.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2) == temporaries(32)


def a_page(seed, with_gradient=True):
    rng = np.random.default_rng(seed)
    return Page(random_state(seed, "head"), random_tree(rng, "head") if with_gradient else None)


SIZE = sum(leaf.nbytes for leaf in jax.tree.leaves(random_tree(np.random.default_rng(0), "head")))


def test_pages_go_to_disk_oldest_first_and_only_beyond_the_budget(tmp_path):
    store = PageStore(9 * SIZE, tmp_path / "pages")
    for number in range(4):
        store.put(f"run{number}", a_page(number, with_gradient=number % 2 == 0))
    assert (store.host_bytes, store.disk_bytes) == (6 * SIZE + SIZE, 4 * SIZE + 3 * SIZE)
    for number in range(4):
        page, expected = store.get(f"run{number}"), a_page(number, with_gradient=number % 2 == 0)
        assert same_bytes(page, expected)
        assert (page.gradient is None) == (number % 2 == 1)
        assert page.state.num_steps == expected.state.num_steps
    for number in range(4):
        store.drop(f"run{number}")
        store.drop(f"run{number}")
    assert (store.host_bytes, store.disk_bytes, list((tmp_path / "pages").iterdir())) == (0, 0, [])


def test_a_thousand_pages_leave_no_file_and_no_byte_behind(tmp_path):
    store, page = PageStore(0, tmp_path), a_page(0)
    for number in range(1000):
        store.put(f"run{number % 3}", page)
        assert len(list(tmp_path.iterdir())) <= 3
    assert (store.host_bytes, store.disk_bytes) == (0, 3 * 4 * SIZE)


def test_what_an_earlier_process_left_is_removed(tmp_path):
    PageStore(0, tmp_path).put("run", a_page(0))
    (tmp_path / "9.page.partial").write_bytes(b"half")
    PageStore(0, tmp_path)
    assert list(tmp_path.iterdir()) == []


DAMAGE = {
    "a byte less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a value less": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "another run's": lambda path: path.write_bytes((path.parent / "2.page").read_bytes()),
    "nothing": lambda path: path.write_bytes(b""),
    "no file": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_page_is_named_and_is_that_runs_alone(tmp_path, damage):
    store = PageStore(0, tmp_path)
    store.put("mine", a_page(1))
    store.put("other", a_page(2))
    DAMAGE[damage](tmp_path / "1.page")
    for _ in range(2):
        with pytest.raises(AdapterFileCorruptError, match="run mine"):
            store.get("mine")
    assert same_bytes(store.get("other"), a_page(2))
    store.put("mine", a_page(3))
    assert same_bytes(store.get("mine"), a_page(3))


def test_a_full_disk_costs_memory_and_no_state(tmp_path):
    (tmp_path / "pages").write_text("a file where the folder should be")
    store = PageStore(0, tmp_path / "pages")
    store.put("run", a_page(1))
    assert same_bytes(store.get("run"), a_page(1))
    assert store.host_bytes == 4 * SIZE


def test_without_a_folder_pages_stay_in_memory():
    store = PageStore(0, None)
    store.put("run", a_page(1))
    assert (store.host_bytes, store.disk_bytes) == (4 * SIZE, 0)
