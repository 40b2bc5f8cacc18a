"""The replay executor against naive gradients: each episode alone, dense attention, plain autodiff; the prefix exact, and the prefix constant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import ALGORITHM, nonzero_state, random_groups, spec, tiny
from test_learner_gradients import dense_attention, packed_gradient

from noria.learner.optimizer import empty_state, load_slot
from noria.learner.replay import Model, Replay, path_blocks
from noria.model.lora import RowAdapters
from noria.model.transformer import block, embed, rotary_angles, unembed
from noria.rl.advantages import group_advantages
from noria.rl.chunks import plan_replay
from noria.rl.losses import loss_table, run_metrics
from noria.rl.packing import microbatch_shape
from noria.rl.tree import build_tree
from noria.types import Completion, LossSpec

SLOT = 1


def walk(plan, shape, state, *, loss, rank=8):
    """The gradient of a whole walk, and the walker."""
    config, base = tiny()
    slots = load_slot(empty_state(config, 3, rank), SLOT, state)
    model = Model(base.stacked, slots.params, jnp.zeros(3).at[SLOT].set(2.0))
    replay = Replay(plan, shape, config, slot=SLOT, table=loss_table({SLOT: loss}, 3))
    gradient = slots.gradient
    while (added := replay.advance(model, gradient)) is not None:
        gradient = added
    for other in (0, 2):
        assert all(not np.asarray(leaf[:, other]).any() for leaf in jax.tree.leaves(gradient))
    return jax.tree.map(lambda leaf: leaf[:, SLOT], gradient), replay


def assert_close(got, want):
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(want_leaf) > 0
        assert np.linalg.norm(got_leaf - want_leaf) <= 1e-5 * np.linalg.norm(want_leaf)


CASES = {
    "long prompts": {"num_groups": 2, "prompt": 300, "answer": 40},
    "long branches": {"num_groups": 1, "group_size": 4, "prompt": 200, "answer": 200},
    "turns": {"num_groups": 2, "prompt": 60, "answer": 20, "turns": 4},
    "one token answers": {"num_groups": 3, "group_size": 6, "prompt": 250, "answer": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_scored_first", [False, True])
def test_chunked_gradients_equal_those_of_one_packed_pass(case, is_scored_first):
    groups = random_groups(7, **CASES[case])
    run_spec, loss = spec("run"), LossSpec(sequence_mask_c=0.0)
    state = nonzero_state(7, run_spec)
    want, _, num_pieces = packed_gradient(groups, state, run_spec, 1536)
    assert num_pieces == 1
    plan = plan_replay(build_tree(groups, ALGORITHM)[0], 128)
    assert len(plan.chunks) > 2
    assert any(visit.action == "enter" for visit in plan.visits)
    if is_scored_first:
        plan = dataclasses.replace(plan, is_scope_whole=False)
    got, _ = walk(plan, microbatch_shape(128), state, loss=loss)
    assert_close(got, want)


def test_a_loss_over_episodes_sees_them_whole_although_their_turns_are_in_many_chunks():
    groups = random_groups(11, num_groups=1, group_size=4, prompt=200, answer=150, turns=2)
    run_spec = spec("run")
    state, algorithm = nonzero_state(11, run_spec), ALGORITHM
    tree, _ = build_tree(groups, algorithm)
    behavior = tree.entries.behavior_logprobs_M
    masked = LossSpec(sequence_mask_c=1.05)
    plan = plan_replay(tree, 128)
    assert not plan.is_scope_whole
    _, chunked = walk(plan, microbatch_shape(128), state, loss=masked)
    _, whole = walk(plan_replay(tree, 2048), microbatch_shape(2048), state, loss=masked)
    got, want = run_metrics(chunked.sums, SLOT, "grpo"), run_metrics(whole.sums, SLOT, "grpo")
    assert np.isfinite(behavior).all()
    assert want["masked_sequence_fraction"] > 0
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def prefix_lengths(tree, episodes):
    """Per trained episode, how many of its first positions nobody is predicted from or above from."""
    predicts = np.zeros(len(tree), bool)
    predicts[tree.entries.predict_from_M] = True
    index = np.arange(len(tree))
    lengths = {}
    for episode in np.unique(tree.entries.sequence_M):
        last = int(tree.entries.predict_from_M[tree.entries.sequence_M == episode].max())
        path = index[(index <= last) & (last < tree.end_T)]
        lengths[int(episode)] = int(np.argmax(predicts[path]))
    assert set(lengths) <= set(range(episodes))
    return lengths


LENGTH = 256


@jax.jit
def constant_prefix_loss(adapter, ids_T, prefix, weight_T, behavior_T, temperature):
    """One episode's part of the loss, weights at the targets, with a stop-gradient on the keys and values of its first `prefix` positions."""
    config, base = tiny()

    def attention(q, k, v):
        is_constant = (jnp.arange(LENGTH) < prefix)[None, :, None, None]
        return dense_attention(q, *(jnp.where(is_constant, jax.lax.stop_gradient(x), x) for x in (k, v)))

    x = embed(base.stacked, ids_T[None])
    angles = rotary_angles(config, jnp.arange(LENGTH)[None])
    for layer in range(config.num_layers):
        copies = {side: {m: leaf[layer][None] for m, leaf in adapter[side].items()} for side in ("a", "b")}
        x = block(base.layers[layer], RowAdapters(copies["a"], copies["b"], jnp.full(1, 2.0)), x, angles=angles, attention=attention, config=config)
    log_p = jax.nn.log_softmax(unembed(base.stacked, x[0, :-1], config) / temperature, -1)
    learner_T = jnp.take_along_axis(log_p, ids_T[1:, None], 1)[:, 0]
    correction_T = jnp.minimum(jnp.exp(jax.lax.stop_gradient(learner_T) - behavior_T[1:]), 2.0)
    return -(correction_T * weight_T[1:] * learner_T).sum()


def constant_prefix_gradient(groups, state):
    tree, _ = build_tree(groups, ALGORITHM)
    lengths = prefix_lengths(tree, sum(len(g.episodes) for g in groups))
    adapter = jax.tree.map(jnp.asarray, state.params)
    total = jax.tree.map(jnp.zeros_like, adapter)
    index = -1
    for group in groups:
        advantages = group_advantages([e.reward for e in group.episodes], ALGORITHM.advantage)
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            index += 1
            if not advantage:
                continue
            (turn,) = episode.turns
            ids, weight, behavior = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32), np.zeros(LENGTH, np.float32)
            ids[: len(episode.ids)] = episode.ids
            sampled = slice(len(turn.observation_ids), len(episode.ids))
            weight[sampled], behavior[sampled] = advantage / len(tree.entries), turn.completion.behavior_logprobs
            part = jax.grad(constant_prefix_loss)(adapter, ids, lengths[index], weight, behavior, turn.temperature)
            total = jax.tree.map(jnp.add, total, part)
    return total


def test_with_a_constant_prefix_the_gradient_is_that_of_stopped_keys_and_values():
    groups = random_groups(5, num_groups=2, group_size=3, prompt=180, answer=5)
    run_spec = spec("run")
    state = nonzero_state(5, run_spec)
    plan = plan_replay(build_tree(groups, ALGORITHM)[0], 128, "stop")
    assert any(visit.action == "drop" for visit in plan.visits)
    got, _ = walk(plan, microbatch_shape(128), state, loss=LossSpec(sequence_mask_c=0.0))
    assert_close(got, constant_prefix_gradient(groups, state))
    exact, _ = walk(plan_replay(build_tree(groups, ALGORITHM)[0], 128), microbatch_shape(128), state, loss=LossSpec(sequence_mask_c=0.0))
    a, b = (np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (got, exact))
    assert np.linalg.norm(a - b) / np.linalg.norm(b) > 0.05, "the prefix matters"


def test_the_paths_axis_does_not_grow_with_the_number_of_branches():
    sizes = set()
    for group_size in (2, 4, 16):
        (group,) = random_groups(2, num_groups=1, group_size=2, prompt=900, answer=3)
        first = group.episodes[0]
        episodes = tuple(
            dataclasses.replace(first, episode_id=str(m), member=m, reward=float(m % 2), turns=(branch(first.turns[0], m),))
            for m in range(group_size)
        )
        tree, _ = build_tree([dataclasses.replace(group, episodes=episodes)], ALGORITHM)
        sizes.add(path_blocks(plan_replay(tree, 128), microbatch_shape(128)))
    assert len(sizes) == 1


def branch(turn, member):
    """The turn with another completion for each member."""
    ids = tuple(100 + (member + n) % 50 for n in range(40))
    return dataclasses.replace(turn, completion=Completion(ids, (-5.0,) * 40, (0,) * 40, "stop"))
