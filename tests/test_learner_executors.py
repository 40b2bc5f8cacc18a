"""However a batch goes over the device, in one piece or many, packed or walked, in one phase or three, it comes to the same numbers."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import monitoring
from learner_builders import ALGORITHM, assert_close, drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of

from noria.errors import AdapterFileCorruptError, InvalidRequestError, StageStoppedError, TreeTooLargeError
from noria.learner.batches import BatchPlanner
from noria.learner.operations import EntryOutputs
from noria.rl.packing import cut, microbatch_shape
from noria.rl.tree import build_tree
from noria.types import LossSpec

GROUPS = random_groups(4, num_groups=4, group_size=4, prompt=60, answer=8, turns=2)
TREE, _ = build_tree(GROUPS, ALGORITHM.model_copy(update={"zero_signal": "train"}))
NUM = len(TREE.entries)
START = nonzero_state(7, spec("mine"))
LONG, _ = build_tree(random_groups(5, num_groups=1, group_size=4, prompt=500, answer=60), ALGORITHM)


def halved(sequence_M):
    """Two sequences of a tree to each pair."""
    return np.unique(sequence_M, return_inverse=True)[1].astype(np.int32) // 2


PREFERENCES = dataclasses.replace(
    TREE, entries=dataclasses.replace(TREE.entries, advantage_M=np.where(TREE.entries.sequence_M % 2, -1, 1).astype(np.float32))
)
COLUMNS = {"pair_M": halved(TREE.entries.sequence_M)}
LOSSES = {
    "token": (LossSpec(kind="ppo", clip_high=0.01), TREE, {}),
    "sequence": (LossSpec(kind="gspo"), TREE, {}),
    "reference": (LossSpec(kind="ppo", kl_coeff=0.3, kl_estimator="k3", entropy_coeff=0.1), TREE, {}),
    "pairs": (LossSpec(kind="dpo", beta=0.5), PREFERENCES, COLUMNS),
    "batch": (LossSpec(kind="ppo", m2_cap=0.5), TREE, {}),
}
SPLIT = ("pairs", "batch")
"""Losses that see beyond a small piece."""


def outcome(batch, loss, *, settings=None, neighbour=False, operation="forward_backward", **more):
    """(result, pending gradient) of one batch on a fresh learner."""
    learner = make_learner(**(settings or {}))
    learner.load_run(spec("mine"), START)
    if neighbour:
        learner.load_run(spec("other"), nonzero_state(2, spec("other")))
        learner.train("other", pieces_of(random_groups(9, num_groups=2), 128), loss=LossSpec(kind="cross_entropy"))
    future = getattr(learner, operation)("mine", batch, loss, **more)
    drain(learner)
    gradient = learner.pending_gradient("mine")
    drain(learner)
    return future.result(0), gradient.result(0)


def planned(name, cut_for):
    loss, tree, columns = LOSSES[name]
    return loss, BatchPlanner(microbatch_shape(cut_for)).plan(tree, columns=columns)


@pytest.fixture(scope="module")
def whole():
    """Each loss on the whole tree in one piece."""
    found = {}
    for name in LOSSES:
        loss, batch = planned(name, 512)
        assert len(batch.parts) == 1
        found[name] = outcome(batch, loss, settings={"max_positions": 512})
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_in_many_pieces_comes_to_what_it_does_in_one(whole, name):
    loss, batch = planned(name, 128)
    assert len(batch.parts) > 2
    result, gradient = outcome(batch, loss, settings={"max_positions": 128}, neighbour=True)
    want, want_gradient = whole[name]
    assert_close(gradient, want_gradient)
    np.testing.assert_allclose(result.outputs.learner_logprobs_M, want.outputs.learner_logprobs_M, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.cotangents.learner_logprobs_M, want.cotangents.learner_logprobs_M, rtol=1e-3, atol=1e-7)
    assert result.metrics == pytest.approx(want.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_a_batch_takes_three_phases_only_where_its_loss_sees_beyond_a_piece(name):
    loss, batch = planned(name, 128)
    runs = {}
    for kind, each in (("split", loss), ("piece by piece", LossSpec(kind="cross_entropy"))):
        learner = make_learner(128)
        learner.load_run(spec("mine"), START)
        learner.forward_backward("mine", batch, each)
        drain(learner)
        runs[kind] = {total.name for total in learner._passes._spans.snapshot()}
    assert runs == {"split": {"score", "loss", "pull"} | ({"reference"} if name == "pairs" else set()), "piece by piece": {"score", "pull"}}


@pytest.mark.parametrize("name", ["token", "reference", *SPLIT])
def test_a_forward_has_the_losss_metrics_and_leaves_no_gradient(whole, name):
    loss, batch = planned(name, 128)
    result, gradient = outcome(batch, loss, settings={"max_positions": 128}, operation="forward")
    assert result.metrics == pytest.approx(whole[name][0].metrics, rel=1e-4, abs=1e-6)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_cotangents_that_the_caller_brings_come_to_the_losss_own_gradient():
    loss, batch = planned("reference", 128)
    result, gradient = outcome(batch, loss, settings={"max_positions": 128})
    assert result.cotangents.entropy_M.any()
    custom, same = outcome(batch, LossSpec(), settings={"max_positions": 128}, neighbour=True, cotangents=result.cotangents)
    assert same_bytes(same, gradient)
    assert same_bytes(custom.outputs.learner_logprobs_M, result.outputs.learner_logprobs_M)


def test_reference_log_probs_are_the_bases_own():
    """With the policy at the base the divergence is 0, and its gradient too."""
    learner = make_learner(128)
    state = jax.tree.map(np.copy, START)
    for leaf in state.params["b"].values():
        leaf[:] = 0
    learner.load_run(spec("mine"), state)
    _, batch = planned("token", 128)
    future = learner.forward_backward("mine", batch, LossSpec(kind="ppo", kl_coeff=1.0, kl_estimator="k2"))
    drain(learner)
    assert future.result(0).metrics["kl_mean"] == 0.0
    moved, _ = outcome(batch, LossSpec(kind="ppo", kl_coeff=1.0, kl_estimator="k2"), settings={"max_positions": 128})
    assert moved.metrics["kl_mean"] > 1e-4


@pytest.mark.parametrize(("tree", "settings"), [(TREE, {}), (LONG, {"path_positions": 1024, "max_positions": 256})], ids=["packed", "walked"])
def test_a_forward_of_the_base_is_that_of_a_run_whose_adapter_is_new(tree, settings):
    result, gradient = outcome(tree, LossSpec(kind="linear"), settings=settings, operation="forward", of_base=True)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    learner = make_learner(**settings)
    state = jax.tree.map(np.copy, START)
    for leaf in state.params["b"].values():
        leaf[:] = 0
    learner.load_run(spec("new"), state)
    scored = learner.forward("new", tree, LossSpec(kind="linear"))
    drain(learner)
    np.testing.assert_allclose(result.outputs.learner_logprobs_M, scored.result(0).outputs.learner_logprobs_M, atol=1e-5)
    assert not result.outputs.value_M.any()
    assert (result.num_entries, result.metrics.get("loss")) == (len(tree.entries), None)


def test_entries_come_back_in_the_order_of_the_batch():
    tree = TREE
    pieces = cut(tree, microbatch_shape(128))
    from_pieces, _ = outcome(pieces[::-1], LossSpec(kind="cross_entropy"), settings={"max_positions": 128})
    from_tree, _ = outcome(tree, LossSpec(kind="cross_entropy"), settings={"max_positions": 512})
    np.testing.assert_allclose(from_pieces.outputs.learner_logprobs_M, from_tree.outputs.learner_logprobs_M, rtol=1e-5, atol=1e-5)


CRITIC = dict.fromkeys(("returns_M", "behavior_values_M"), np.zeros(NUM, np.float32))
REFUSED = {
    "a loss of pairs without pairs": (LossSpec(kind="dpo"), {}, "pair_M"),
    "a critic without returns": (LossSpec(kind="ppo_critic"), {}, "returns_M"),
    "a critic without room": (LossSpec(kind="ppo_critic"), CRITIC, "has_values"),
    "a column that is none": (LossSpec(), {"rewards_M": np.zeros(NUM)}, "rewards_M"),
    "a column of another length": (LossSpec(), {"returns_M": np.zeros(3, np.float32)}, "one per entry"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_lacks_what_its_loss_reads_is_refused(case):
    loss, columns, said = REFUSED[case]
    learner = make_learner(128)
    learner.load_run(spec("mine"), START)
    with pytest.raises(InvalidRequestError, match=said):  # noqa: PT012 - planning refuses some, the learner others
        future = learner.forward_backward("mine", BatchPlanner(microbatch_shape(128)).plan(TREE, columns=columns), loss)
        drain(learner)
        future.result(0)


def test_cotangents_of_another_length_are_refused():
    learner = make_learner(128)
    learner.load_run(spec("mine"), START)
    future = learner.forward_backward("mine", TREE, cotangents=EntryOutputs(*np.zeros((3, 5), np.float32)))
    drain(learner)
    with pytest.raises(InvalidRequestError, match="one per entry"):
        future.result(0)


# ---- walks ----------------------------------------------------------------------------------------------------------------------------

WALKING = {"max_positions": 128, "path_positions": 1024}


def test_a_tree_that_fits_nowhere_names_the_setting_that_would_let_it_be_walked():
    for settings, said in (({"max_positions": 128}, "learner.path_positions"), (WALKING | {"path_positions": 256}, "raise learner.path_positions")):
        learner = make_learner(**settings)
        learner.load_run(spec("mine"), START)
        future = learner.forward_backward("mine", LONG)
        drain(learner)
        with pytest.raises(TreeTooLargeError, match=said):
            future.result(0)


@pytest.mark.parametrize(
    "loss",
    [
        LossSpec(kind="ppo"),
        LossSpec(kind="ppo", kl_coeff=0.3, entropy_coeff=0.1),
        LossSpec(kind="ppo", m2_cap=0.5),
    ],
    ids=["one walk", "reference first", "three walks"],
)
def test_a_walked_batch_comes_to_what_it_does_packed(loss):
    want, want_gradient = outcome(LONG, loss, settings={"max_positions": 1024})
    got, gradient = outcome(LONG, loss, settings=WALKING, neighbour=True)
    assert got.metrics["replay_chunks"] > 2
    assert_close(gradient, want_gradient)
    np.testing.assert_allclose(got.outputs.learner_logprobs_M, want.outputs.learner_logprobs_M, rtol=1e-5, atol=2e-5)
    for name, value in want.metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_constant_prefix_is_always_walked_and_recorded():
    planner = BatchPlanner(microbatch_shape(256), 1024)
    exact, stop = planner.plan(TREE), planner.plan(TREE, prefix_gradient="stop")
    assert exact.walk is None
    assert stop.walk is not None
    result, _ = outcome(stop, LossSpec(kind="ppo"), settings={"max_positions": 256, "path_positions": 1024})
    assert result.metrics["prefix_gradient_stop"] == 1.0


def test_a_tree_whose_heads_would_be_repeated_too_often_is_walked_although_it_could_be_packed():
    """Case: eight branches that each fit with the prompt, and no two together."""
    groups = random_groups(6, num_groups=1, group_size=2, prompt=10, answer=2)
    first = groups[0].episodes[0]
    prompt = tuple(range(3, 203)) * 2
    episodes = [
        dataclasses.replace(
            first,
            episode_id=str(m),
            member=m,
            reward=float(m % 2),
            turns=(dataclasses.replace(first.turns[0], observation_ids=prompt, completion=_answer(m)),),
        )
        for m in range(8)
    ]
    tree, _ = build_tree([dataclasses.replace(groups[0], episodes=tuple(episodes))], ALGORITHM)
    planner = BatchPlanner(microbatch_shape(512), 1024)
    assert len(BatchPlanner(microbatch_shape(512)).plan(tree).parts) == 8
    assert planner.plan(tree).walk is not None
    assert planner.plan(TREE).walk is None


def _answer(member):
    ids = tuple(20 + (7 * member + n) % 90 for n in range(100))
    return dataclasses.replace(GROUPS[0].episodes[0].turns[0].completion, sampled_ids=ids, behavior_logprobs=(-5.0,) * 100, versions=(0,) * 100)


def test_other_runs_go_between_the_visits_and_walks_take_turns():
    learner = make_learner(**WALKING, num_slots=2, max_quantum_s=1e-9)
    for run_id in ("walk", "other walk", "small"):
        learner.load_run(spec(run_id), START)
    walks = [learner.train(run_id, LONG, loss=LossSpec(kind="ppo")) for run_id in ("walk", "other walk")]
    small = [learner.train("small", pieces_of(random_groups(seed, num_groups=1), 128)) for seed in range(3)]
    order = []
    for name, future in zip(("walk", "other walk", "s0", "s1", "s2"), (*walks, *small), strict=True):
        future.add_done_callback(lambda _, name=name: order.append(name))
    owners = set()
    while learner.has_work:
        learner.step()
        owners.add(learner._passes.walks.present)
    assert order.index("s0") < order.index("walk") or order.index("s0") < order.index("other walk")
    assert same_bytes(walks[0].result(0).state, walks[1].result(0).state), "beside whatever they went, in whichever slot"
    alone = make_learner(**WALKING, num_slots=2)
    alone.load_run(spec("walk"), START)
    want = alone.train("walk", LONG, loss=LossSpec(kind="ppo"))
    drain(alone)
    assert same_bytes(walks[0].result(0).state, want.result(0).state)
    assert owners >= {"walk", "other walk"}


def test_a_run_stopped_on_its_walk_frees_the_path_for_the_next():
    learner = make_learner(**WALKING)
    for run_id in ("gone", "mine"):
        learner.load_run(spec(run_id), START)
    gone = learner.train("gone", LONG)
    mine = learner.train("mine", LONG)
    while learner._passes.walks.present != "gone":
        learner.step()
    learner.unload_run("gone")
    drain(learner)
    with pytest.raises(StageStoppedError):
        gone.result(0)
    assert mine.result(0).state.num_steps == 1
    assert learner._passes.walks.present is None


# ---- more runs than slots ---------------------------------------------------------------------------------------------------------------

MIXED = {"a": LossSpec(), "b": LossSpec(kind="cross_entropy"), "c": LossSpec(kind="ppo"), "d": LossSpec(kind="ppo", kl_coeff=0.1)}


@pytest.mark.parametrize("host_mib", [0, 64])
def test_four_runs_on_two_slots_with_mixed_losses_train_to_the_bits_they_have_alone(tmp_path, host_mib):
    batches = {run_id: [pieces_of(random_groups(10 * n + step, num_groups=2, prompt=40), 128) for step in range(3)] for n, run_id in enumerate(MIXED)}

    def trained(run_ids, num_slots):
        learner = make_learner(256, num_slots, spill_dir=tmp_path / "-".join(run_ids), host_mib=host_mib)
        for run_id in run_ids:
            learner.load_run(spec(run_id), nonzero_state(ord(run_id), spec(run_id)))
        for step in range(3):
            for run_id in run_ids:  # two forward_backwards to a step: the gradient is pending while others page in
                learner.forward_backward(run_id, batches[run_id][step], MIXED[run_id])
                learner.forward_backward(run_id, batches[run_id][step - 1], MIXED[run_id])
                learner.optim_step(run_id)
            for _ in range(step):
                learner.step()
        return {run_id: state_of(learner, run_id) for run_id in run_ids}, learner

    together, learner = trained("abcd", 2)
    assert learner._passes.residency.counts.num_out > 2
    for run_id in MIXED:
        assert same_bytes(together[run_id], trained(run_id, 2)[0][run_id])


def test_a_damaged_page_fails_its_run_by_name_and_nobody_else_until_the_run_is_loaded_anew(tmp_path):
    learner = make_learner(256, 2, spill_dir=tmp_path / "pages", host_mib=0)
    for run_id in "abc":
        learner.load_run(spec(run_id), nonzero_state(ord(run_id), spec(run_id)))
    drain(learner)
    pages = [path for path in (tmp_path / "pages").rglob("*") if path.is_file()]
    assert pages, "c found no slot"
    for page in pages:
        page.write_bytes(page.read_bytes()[:-7] + b"damaged")
    batch = pieces_of(random_groups(1, num_groups=1), 128)
    fine = learner.train("a", batch)
    lost = [learner.train("c", batch), learner.optim_step("c"), learner.save("c")]
    drain(learner)
    for future in lost:
        with pytest.raises(AdapterFileCorruptError):
            future.result(0)
    assert fine.result(0).state.num_steps == 1
    learner.load("c", nonzero_state(3, spec("c")))
    again = learner.train("c", batch)
    drain(learner)
    assert again.result(0).state.num_steps == 1


@pytest.mark.slow
def test_after_warm_up_no_mixture_of_losses_walks_and_pages_compiles_anything():
    learner, compiled = make_learner(128, num_slots=2, path_positions=1024), []
    learner.warm_up()

    def listen(event, _seconds, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(named.get("fun_name", "?"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        for run_id in "abc":
            learner.load_run(spec(run_id), nonzero_state(1, spec(run_id)))
        futures = [learner.score_ids("c", (1, 2, 3, 4))]
        for loss, tree, columns in LOSSES.values():
            batch = learner.planner.plan(tree, columns=columns)
            futures += [learner.train(run_id, batch, loss=loss) for run_id in "abc"]
        futures += [learner.train("a", LONG), learner.forward("b", LONG, LOSSES["reference"][0]), learner.pending_gradient("a")]
        drain(learner)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert all(future.result(0) is not None for future in futures)
    assert learner._passes.residency.counts.num_in > 0
    assert compiled == []
