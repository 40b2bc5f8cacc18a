"""Trees that fit in no microbatch, through a whole learner: within a tenth of the memory that they need naively, and amid runs that page."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax import monitoring
from learner_builders import ALGORITHM, assert_close, drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of, tiny
from naive_learner import Rows, outputs_of, pulled, rows_of

from noria.learner.memory import MIB, packed_bytes, slot_bytes
from noria.rl.losses import TokenOutputs
from noria.rl.packing import microbatch_shape
from noria.rl.tree import build_tree
from noria.types import TILE, Completion, LossSpec, Turn

MEMORY_MIB, NUM_SLOTS = 10, 2


def many_branches(num_branches, *, prompt, answer):
    """A group of one prompt, whose members share nothing below it."""
    (group,) = random_groups(2, num_groups=1, group_size=2)
    first, ids = group.episodes[0], tuple(int(i) for i in np.random.default_rng(2).integers(0, 250, prompt))

    def branch(member):
        sampled = tuple(100 + (member + n) % 50 for n in range(answer))
        return Turn(ids, Completion(sampled, (-5.0,) * answer, (0,) * answer, "stop"), 0.7)

    return [
        dataclasses.replace(
            group,
            episodes=tuple(
                dataclasses.replace(first, episode_id=str(m), member=m, reward=float(m % 2), turns=(branch(m),)) for m in range(num_branches)
            ),
        )
    ]


def live_bytes(before):
    """Of all arrays that did not exist then."""
    known = {id(each) for each in before}
    return sum(each.nbytes for each in jax.live_arrays() if id(each) not in known)


def naive_gradient(rows, weight_M, scale, adapter):
    """The plain policy gradient, one row at a time and summed: all rows at once would not fit."""
    total = jax.tree.map(np.zeros_like, adapter)
    for row, ids_L in enumerate(rows.ids_QL):
        mine = rows.row_M == row
        alone = Rows(ids_L[None], rows.row_M[mine] * 0, *(column[mine] for column in rows[2:]))
        zeros = np.zeros(mine.sum(), np.float32)
        total = jax.tree.map(np.add, total, pulled(adapter, scale, alone, TokenOutputs(weight_M[mine], zeros, zeros)))
    return total


def test_a_tree_whose_naive_form_needs_ten_times_the_memory_trains_within_it_to_the_naive_gradient():
    config, run_spec = tiny()[0], spec("run")
    groups = many_branches(24, prompt=1700, answer=40)
    episodes = groups[0].episodes
    tree, _ = build_tree(groups, ALGORITHM)
    num_naive = -(-sum(len(e.ids) for e in episodes) // TILE) * TILE
    sizes = {"base": 4 * config.num_parameters, "slots": slot_bytes(config, NUM_SLOTS, 8)}
    assert packed_bytes(config, microbatch_shape(num_naive), **sizes) >= 10 * MEMORY_MIB * MIB, "each episode by itself, all at once"
    assert packed_bytes(config, microbatch_shape(-(-len(tree) // TILE) * TILE), **sizes) > MEMORY_MIB * MIB, "nor does the tree fit in one pass"

    before = jax.live_arrays()
    learner = make_learner(2048, NUM_SLOTS, path_positions=2560, memory_mib=MEMORY_MIB)
    learner.load_run(run_spec, nonzero_state(2, run_spec))
    done, peak = learner.forward_backward("run", tree, LossSpec(kind="linear")), 0
    while learner.has_work:
        learner.step()
        peak = max(peak, live_bytes(before))
    pending = learner.pending_gradient("run")
    drain(learner)
    assert done.result(0).metrics["replay_chunks"] > 2
    assert peak + sizes["base"] <= MEMORY_MIB * MIB, "what is alive between visits; what is within one, `memory` is checked for against the compiler"
    state, rows = nonzero_state(2, run_spec), rows_of(episodes)
    weight_M = tree.entries.weight_M * tree.entries.advantage_M
    assert_close(pending.result(0), naive_gradient(rows, weight_M, run_spec.lora.scale, state.params))
    last = np.flatnonzero(rows.row_M == 23)
    alone = Rows(rows.ids_QL[23:], rows.row_M[last] * 0, *(column[last] for column in rows[2:]))
    want = outputs_of(state.params, run_spec.lora.scale, alone).learner_logprobs_M
    np.testing.assert_allclose(done.result(0).outputs.learner_logprobs_M[last], want, rtol=1e-5, atol=1e-5)


# ---- isolation ------------------------------------------------------------------------------------------------------------------------

LONG, _ = build_tree(random_groups(5, num_groups=1, group_size=4, prompt=500, answer=60), ALGORITHM)
RUNS = {
    "a": (spec("a"), LossSpec(sequence_mask_c=2.0)),
    "b": (spec("b", rank=20), LossSpec(kind="cross_entropy")),
    "c": (spec("c", rank=8), LossSpec(kind="ppo")),
    "d": (spec("d", rank=32), LossSpec(kind="dro", kl_coeff=0.1, entropy_coeff=0.1)),
    "walk": (spec("walk"), LossSpec(kind="ppo", kl_coeff=0.1)),
    "wide walk": (spec("wide walk", rank=20), LossSpec(sequence_mask_c=0.0, m2_cap=100.0)),
}
WIDTH = {run_id: 8 if run_spec.lora.rank <= 8 else 32 for run_id, (run_spec, _) in RUNS.items()}
STEPS = 3


def batches_of(run_id):
    if "walk" in run_id:
        return [LONG] * STEPS
    return [pieces_of(random_groups(10 * ord(run_id) + step, num_groups=2, prompt=40), 128) for step in range(STEPS)]


def trained(run_ids, folder, *, host_mib):
    """(state of each, pending gradient of each, walks that were paged out midway): two batches pend to a step; of the last, no step is taken."""
    settings = {"max_positions": 128, "path_positions": 1024, "rank_classes": (8, 32), "max_quantum_s": 1e-9, "host_mib": host_mib}
    learner = make_learner(num_slots=1, spill_dir=folder, **settings)
    for run_id in run_ids:
        learner.load_run(RUNS[run_id][0], nonzero_state(len(run_id) + ord(run_id[0]), RUNS[run_id][0], max_rank=WIDTH[run_id]))
    for step in range(STEPS):
        for run_id in run_ids:
            batches, loss = batches_of(run_id), RUNS[run_id][1]
            for batch in (batches[step], batches[step - 1])[: 1 if "walk" in run_id else 2]:
                learner.forward_backward(run_id, batch, loss)
            if step + 1 < STEPS:
                learner.optim_step(run_id)
    paged_out = set()
    while learner.has_work:
        learner.step()
        paged_out |= {run_id for run_id in run_ids if run_id in learner._passes.walks and learner._passes.residency._runs[run_id].slot is None}
    states = {run_id: state_of(learner, run_id) for run_id in run_ids}
    gradients = {run_id: learner.pending_gradient(run_id) for run_id in run_ids}
    drain(learner)
    return states, {run_id: each.result(0) for run_id, each in gradients.items()}, paged_out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each run comes to by itself."""
    return {run_id: trained((run_id,), tmp_path_factory.mktemp("alone"), host_mib=64) for run_id in RUNS}


@pytest.mark.parametrize("host_mib", [0, 64])
def test_runs_of_mixed_losses_and_ranks_that_page_amid_walks_have_the_bits_they_have_alone(tmp_path, alone, host_mib):
    states, gradients, paged_out = trained(tuple(RUNS), tmp_path, host_mib=host_mib)
    assert "walk" in paged_out, "a walk goes on after its run was out of its slot"
    for run_id in RUNS:
        own_states, own_gradients, never = alone[run_id]
        assert not never
        assert own_states[run_id].num_steps == STEPS - 1
        assert same_bytes(states[run_id], own_states[run_id]), run_id
        assert same_bytes(gradients[run_id], own_gradients[run_id]), run_id
        assert all(leaf.any() for leaf in jax.tree.leaves(gradients[run_id]))


@pytest.mark.slow
@pytest.mark.parametrize("is_path_on_host", [False, True])
def test_a_path_that_waited_in_host_memory_compiles_nothing_when_it_comes_back(is_path_on_host):
    """Nor does anything that reads the gradients that its walk added to: what is moved must be placed as what never was."""
    learner, compiled = make_learner(128, 2, path_positions=1024, max_quantum_s=1e-9, is_path_on_host=is_path_on_host), []
    learner.warm_up()

    def listen(event, _seconds, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(named.get("fun_name", "?"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        for run_id in "abc":
            learner.load_run(spec(run_id), nonzero_state(1, spec(run_id)))
        walks = [learner.train(run_id, LONG, loss=LossSpec(kind="ppo", kl_coeff=0.1)) for run_id in "ab"]
        small, present = learner.train("c", pieces_of(random_groups(1), 128)), []
        while learner.has_work:
            learner.step()
            present.append(learner._passes.walks.present)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert sum(b != a for a, b in itertools.pairwise(present)) > 4, "the walks take turns"
    assert small.result(0).state.num_steps == 1
    assert same_bytes(walks[0].result(0).state, walks[1].result(0).state)
    assert compiled == []


def test_a_visit_that_pulls_is_two_dispatches_and_nothing_of_its_learner_comes_between():
    """So a walk holds decoding up for no longer than a microbatch does, and the run keeps its slot from the score to the pull."""
    tree, _ = build_tree(random_groups(5, num_groups=1, group_size=3, prompt=300, answer=20), ALGORITHM)
    learner = make_learner(128, path_positions=1024)
    for run_id in ("walk", "other"):
        learner.load_run(spec(run_id), nonzero_state(3, spec(run_id)))
    plan = learner.planner.plan(tree)
    done = learner.forward_backward("walk", plan)
    small = [learner.score_ids("other", (1, 2, 3)) for _ in range(40)]
    halves = 0
    while not done.done():
        learner.step()
        if (walk := learner._passes.walks.halfway) is not None:
            halves += 1
            waiting = sum(not future.done() for future in small)
            learner.step()
            assert not walk.is_halfway
            assert sum(not future.done() for future in small) == waiting, "the pull is the very next dispatch"
    assert halves == sum(visit.action == "pull" for visit in plan.walk.visits) > 1
    drain(learner)
