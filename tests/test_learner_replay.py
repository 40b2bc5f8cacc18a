"""The replay executor against naive gradients: each episode alone, dense attention, plain autodiff; the prefix exact, and the prefix constant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import ALGORITHM, nonzero_state, random_groups, same_bytes, spec, tiny
from test_learner_gradients import dense_attention, packed_gradient

from noria.learner.batches import Costs, of_walk
from noria.learner.executors import Job, Walk
from noria.learner.memory import packed_bytes, path_bytes, replay_bytes, slot_bytes
from noria.learner.operations import ForwardBackward
from noria.learner.optimizer import empty_state, load_slot
from noria.learner.replay import path_blocks
from noria.learner.step import Model, pull, pull_chunk, score, score_chunk, to_device
from noria.model.attention import Path
from noria.model.lora import RowAdapters, empty_slots
from noria.model.placement import place
from noria.model.transformer import block, embed, rotary_angles, unembed
from noria.model.weights import load_base
from noria.rl.advantages import group_advantages
from noria.rl.chunks import plan_replay
from noria.rl.losses import TokenCotangents
from noria.rl.packing import MicrobatchPlan, microbatch_shape, pack
from noria.rl.tree import build_tree
from noria.types import TILE, Completion, LossSpec

SLOT = 1


def walk(tree, plan, shape, state, *, loss, rank=8, **options):
    """The gradient of a whole walk, and the job."""
    config, base = tiny()
    slots = load_slot(empty_state(config, 3, rank), SLOT, state)
    model = Model(base.stacked, slots.params, jnp.zeros(3).at[SLOT].set(2.0))
    job = Job(ForwardBackward(of_walk(tree, plan), loss), num_steps=0)
    walker = Walk("run", job, shape, config, Costs(config), num_rows=3, **options)
    gradient = slots.gradient
    while job.phase is not None:
        if job.phase == "loss":
            job.evaluate((), 3)
        else:
            gradient = walker.advance(model, SLOT, gradient)
    for other in (0, 2):
        assert all(not np.asarray(leaf[:, other]).any() for leaf in jax.tree.leaves(gradient))
    return jax.tree.map(lambda leaf: leaf[:, SLOT], gradient), job


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
    run_spec, loss = spec("run"), LossSpec(sequence_mask_c=0.0, m2_cap=1000.0 if is_scored_first else 0.0)  # so large that it masks nothing
    state = nonzero_state(7, run_spec)
    want, _, num_pieces = packed_gradient(groups, state, run_spec, 1536)
    assert num_pieces == 1
    tree, _ = build_tree(groups, ALGORITHM)
    plan = plan_replay(tree, 128)
    assert len(plan.chunks) > 2
    assert any(visit.action == "enter" for visit in plan.visits)
    got, _ = walk(tree, plan, microbatch_shape(128), state, loss=loss)
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
    _, chunked = walk(tree, plan, microbatch_shape(128), state, loss=masked)
    _, whole = walk(tree, plan_replay(tree, 2048), microbatch_shape(2048), state, loss=masked)
    got, want = chunked.result().metrics, whole.result().metrics
    assert np.isfinite(behavior).all()
    assert want["masked_sequence_fraction"] > 0
    for name in want.keys() - {"replay_chunks"}:
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
def constant_prefix_loss(adapter, ids_T, prefix, weight_T, behavior_T, *, temperature):
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
            part = jax.grad(constant_prefix_loss)(adapter, ids, lengths[index], weight, behavior, temperature=turn.temperature)
            total = jax.tree.map(jnp.add, total, part)
    return total


def test_with_a_constant_prefix_the_gradient_is_that_of_stopped_keys_and_values():
    groups = random_groups(5, num_groups=2, group_size=3, prompt=180, answer=5)
    run_spec = spec("run")
    state = nonzero_state(5, run_spec)
    tree, _ = build_tree(groups, ALGORITHM)
    plan = plan_replay(tree, 128, "stop")
    assert any(visit.action == "drop" for visit in plan.visits)
    got, _ = walk(tree, plan, microbatch_shape(128), state, loss=LossSpec(sequence_mask_c=0.0))
    assert_close(got, constant_prefix_gradient(groups, state))
    exact, _ = walk(tree, plan_replay(tree, 128), microbatch_shape(128), state, loss=LossSpec(sequence_mask_c=0.0))
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


def test_a_path_that_waits_on_the_host_and_one_in_a_longer_axis_give_the_same_bits():
    groups = random_groups(7, **CASES["long prompts"])
    state, loss = nonzero_state(7, spec("run")), LossSpec(sequence_mask_c=0.0)
    tree, _ = build_tree(groups, ALGORITHM)
    plan, shape, options = plan_replay(tree, 128), microbatch_shape(128), ({}, {"is_on_host": True}, {"num_blocks": 32})
    plain, on_host, longer = (walk(tree, plan, shape, state, loss=loss, **each)[0] for each in options)
    assert same_bytes(plain, on_host)
    assert same_bytes(plain, longer)


def compiled_bytes(jitted, *arguments, **named):
    """The compiler's figure: arguments, temporaries, and results that reuse nothing."""
    figures = jitted.lower(*arguments, **named).compile().memory_analysis()
    return figures.argument_size_in_bytes + figures.temp_size_in_bytes + figures.output_size_in_bytes - figures.alias_size_in_bytes


def pull_bytes(base_name, num_positions, num_blocks, num_slots=3, rank=8):
    """(estimate, compiler's figure) of a pull; num_blocks: of the path's axis, 0 for a packed pass."""
    loaded, shape = load_base(base_name), microbatch_shape(num_positions)
    config, params = loaded.config, jax.eval_shape(lambda: place(loaded.params).stacked)
    slots = jax.eval_shape(lambda: empty_slots(config, num_slots, rank))
    model = Model(params, slots, jax.ShapeDtypeStruct((num_slots,), jnp.float32))
    arrays = to_device(pack(MicrobatchPlan(shape, ())))
    base = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    sizes = {"base": base, "slots": slot_bytes(config, num_slots, rank)}
    if not num_blocks:
        outputs, residuals = jax.eval_shape(lambda *a: score(*a, config), model, arrays)
        return packed_bytes(config, shape, **sizes), compiled_bytes(pull, model, arrays, residuals, TokenCotangents(*outputs), slots, config=config)
    half = jax.ShapeDtypeStruct((config.num_layers, num_blocks, config.num_kv_heads, TILE, config.head_dim), jnp.float32)
    path = Path(half, half, jax.ShapeDtypeStruct((num_blocks, TILE), bool), jax.ShapeDtypeStruct((), jnp.int32))
    outputs, residuals, _ = jax.eval_shape(lambda *a: score_chunk(*a, config), model, arrays, path)
    cotangents, more = TokenCotangents(*outputs), {"path": path, "path_gradient": (half, half), "config": config}
    alive = path_bytes(config, shape.num_tiles)  # the chunk's keys and values, which the visit still holds
    return replay_bytes(config, shape, num_blocks, **sizes), compiled_bytes(pull_chunk, model, arrays, residuals, cotangents, slots, **more) + alive


SMOLLM2 = [pytest.param("smollm2-135m", 512, blocks, marks=pytest.mark.slow) for blocks in (0, 72)]


@pytest.mark.parametrize(("base_name", "num_positions", "num_blocks"), [("tiny", 256, 0), ("tiny", 1024, 0), ("tiny", 256, 40), *SMOLLM2])
def test_memory_is_estimated_within_15_percent_of_the_compilers_figure(base_name, num_positions, num_blocks):
    estimate, figure = pull_bytes(base_name, num_positions, num_blocks)
    assert estimate == pytest.approx(figure, rel=0.15)


def test_a_tree_whose_naive_form_needs_ten_times_the_memory_trains_within_it():
    (group,) = random_groups(2, num_groups=1, group_size=2, prompt=1700, answer=3)
    first, config, shape = group.episodes[0], tiny()[0], microbatch_shape(128)
    episodes = tuple(
        dataclasses.replace(first, episode_id=str(m), member=m, reward=float(m % 2), turns=(branch(first.turns[0], m),)) for m in range(24)
    )
    tree, _ = build_tree([dataclasses.replace(group, episodes=episodes)], ALGORITHM)
    plan = plan_replay(tree, 128)
    sizes = {"base": 4 * config.num_parameters, "slots": slot_bytes(config, 3, 8)}
    num_naive = -(-sum(len(e.ids) for e in episodes) // TILE) * TILE
    allowed = packed_bytes(config, microbatch_shape(num_naive), **sizes) / 10
    assert pull_bytes("tiny", 128, path_blocks(plan, shape))[1] < allowed
    gradient, _ = walk(tree, plan, shape, nonzero_state(2, spec("run")), loss=LossSpec(sequence_mask_c=0.0))
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradient))
