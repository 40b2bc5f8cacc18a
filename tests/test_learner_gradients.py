"""The packed tree's gradients against naive ones: every episode alone, dense attention, plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import ALGORITHM, nonzero_state, pieces_of, random_groups, spec, tiny

from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, loss_cotangents, loss_inputs, pull, score, to_device
from noria.model.lora import RowAdapters, gather_rows
from noria.model.transformer import block, embed, rotary_angles, unembed
from noria.rl.advantages import group_advantages
from noria.rl.losses import loss_table
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.supervised import example_tree
from noria.rl.tree import build_tree
from noria.types import Completion, Episode, EpisodeGroup, Example, LossSpec, Task, Turn

SLOT = 1


def dense_attention(q, k, v):
    repeat = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeat, 2), jnp.repeat(v, repeat, 2)
    scores = jnp.einsum("rinh,rjnh->rnij", q, k) * q.shape[-1] ** -0.5
    length = q.shape[1]
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf), -1)
    return jnp.einsum("rnij,rjnh->rinh", weights, v)


LENGTH = 128


def naive_logprobs(adapter, scale, ids_ET, temperature_ET):
    """Log-probability of ids[1:] of every episode, each a padded row of its own that shares nothing."""
    config, base = tiny()
    rows = len(ids_ET)
    x = embed(base.stacked, ids_ET)
    angles = rotary_angles(config, jnp.tile(jnp.arange(LENGTH), (rows, 1)))
    for layer in range(config.num_layers):
        copies = {side: {m: jnp.repeat(leaf[layer][None], rows, 0) for m, leaf in adapter[side].items()} for side in ("a", "b")}
        x = block(
            base.layers[layer],
            RowAdapters(copies["a"], copies["b"], jnp.full(rows, scale)),
            x,
            angles=angles,
            attention=dense_attention,
            config=config,
        )
    logits = unembed(base.stacked, x.reshape(rows * LENGTH, -1), config).reshape(rows, LENGTH, -1)[:, :-1] / temperature_ET[:, 1:, None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits, -1), ids_ET[:, 1:, None], 2)[..., 0]


def sampled_positions(episode):
    """(index in the episode's ids, temperature, behavior log-probability) of every sampled token."""
    start, found = 0, []
    for turn in episode.turns:
        start += len(turn.observation_ids)
        found += [(start + n, turn.temperature, lp) for n, lp in enumerate(turn.completion.behavior_logprobs)]
        start += len(turn.completion.sampled_ids)
    return found


def naive_gradient(groups, adapter, scale):
    """Gradient of the default loss (token TIS, cap 2, token denominator), episode by episode."""
    rows = []
    for group in groups:
        rewards = np.array([e.reward for e in group.episodes], np.float32)
        if np.ptp(rewards) > 0:
            rows += zip(group.episodes, group_advantages(rewards, ALGORITHM.advantage), strict=True)
    ids, temperature, behavior, weight = (np.zeros((len(rows), LENGTH), dtype) for dtype in (np.int32, *[np.float32] * 3))
    temperature[:] = 1
    for r, (episode, advantage) in enumerate(rows):
        ids[r, : len(episode.ids)] = episode.ids
        for where, temp, logprob in sampled_positions(episode):
            temperature[r, where], behavior[r, where], weight[r, where] = temp, logprob, advantage
    num_tokens = sum(episode.num_sampled for episode, _ in rows)

    @jax.jit
    def loss(adapter):
        learner = naive_logprobs(adapter, scale, jnp.asarray(ids), jnp.asarray(temperature))
        correction = jnp.minimum(jnp.exp(jax.lax.stop_gradient(learner) - behavior[:, 1:]), 2.0)
        return -(correction * weight[:, 1:] * learner).sum() / num_tokens

    return jax.grad(loss)(adapter)


def packed_gradient(groups, state, run_spec, max_positions):
    config, base = tiny()
    slots = load_slot(empty_state(config, 3, 8), SLOT, state)
    scale_A = jnp.zeros(3).at[SLOT].set(run_spec.lora.scale)
    pieces = pieces_of(groups, max_positions)
    gradient, shared = slots.gradient, 0
    done = 0
    while done < len(pieces):
        plan = plan_microbatch([ReadyRun("run", SLOT, pieces, done)], shapes_up_to(max_positions), max_positions)
        done += len(plan.pieces)
        microbatch = pack(plan)
        used = microbatch.entries.predict_from_M[: microbatch.num_entries] * 1000 + microbatch.entries.target_M[: microbatch.num_entries]
        shared += len(used) - len(np.unique(used))
        arrays = to_device(microbatch)
        outputs, residuals = score(Model(base.stacked, slots.params, scale_A), arrays, config)
        cotangent, _ = loss_cotangents(outputs, loss_inputs(microbatch), loss_table({SLOT: run_spec.loss}, 3))
        gradient = pull(Model(base.stacked, slots.params, scale_A), arrays, residuals, cotangent, gradient, config=config)
    return jax.tree.map(lambda leaf: leaf[:, SLOT], gradient), shared, len(pieces)


@pytest.mark.parametrize(("seed", "groups", "turns", "max_positions", "cuts"), [(1, 3, 1, 256, False), (2, 2, 3, 256, False), (3, 12, 2, 128, True)])
def test_packed_tree_gradients_equal_naive_per_episode_gradients(seed, groups, turns, max_positions, cuts):
    recorded = random_groups(seed, num_groups=groups, turns=turns, answer=4)
    run_spec = spec("run")
    state = nonzero_state(seed, run_spec)
    got, shared, num_pieces = packed_gradient(recorded, state, run_spec, max_positions)
    want = naive_gradient(recorded, jax.tree.map(jnp.asarray, state.params), run_spec.lora.scale)
    assert shared > 0, "the case must hold several entries on one position"
    assert (num_pieces > 1) == cuts
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(want_leaf) > 0
        assert np.linalg.norm(got_leaf - want_leaf) <= 1e-5 * np.linalg.norm(want_leaf)


def test_gathered_rows_are_the_slots_adapters():
    config, _ = tiny()
    state = load_slot(empty_state(config, 3, 8), SLOT, nonzero_state(0, spec("run")))
    layer = jax.tree.map(lambda leaf: leaf[0], state.params)
    rows = gather_rows(layer, jnp.array([0.0, 2.0, 0.0]), jnp.array([1, 0]))
    assert (np.asarray(rows.a["q"][0]) == np.asarray(layer["a"]["q"][1])).all()
    assert (np.asarray(rows.scale_R) == [2.0, 0.0]).all()


SAYS, TOOL = (5, 6, 7), (40, 41, 42)


def tool_batch():
    """Two episodes of three turns, between which a tool answers."""
    episodes = []
    for member, reward in enumerate((1.0, 0.0)):
        turns = [
            Turn(seen, Completion(tuple(10 * member + i for i in SAYS), (-5.0,) * 3, (0,) * 3, "stop"), 0.8)
            for seen in ((1, 2, 3), TOOL, (50 + member, 51))
        ]
        episodes.append(Episode(f"e{member}", member, tuple(turns), reward))
    return [EpisodeGroup("g", "run", Task(0, 0), tuple(episodes))]


def rows_of_flags(tree, sequences):
    """For (ids, flag of each id) of whole sequences, the positions of the tree whose logits predict ids of either flag."""
    at = {tuple(tree.ids_T[[j for j in range(p + 1) if p < tree.end_T[j]]].tolist()): p for p in range(len(tree))}
    rows = {True: set(), False: set()}
    for ids, flags in sequences:
        for i in range(1, len(ids)):
            if ids[:i] in at:  # a path ends at its last predictor
                rows[bool(flags[i])].add(at[ids[:i]])
    return rows


@pytest.mark.parametrize("kind", ["grpo", "cross_entropy"])
def test_the_gradient_at_what_a_tool_said_is_exactly_zero(kind):
    """Case A7: with respect to the logits that predict ids of the prompt and of the tool; and not zero where the policy spoke."""
    groups = tool_batch()
    flags = [[flag for turn in e.turns for flag in [False] * len(turn.observation_ids) + [True] * 3] for e in groups[0].episodes]
    sequences = [(e.ids, flag) for e, flag in zip(groups[0].episodes, flags, strict=True)]
    if kind == "grpo":
        tree, _ = build_tree(groups, ALGORITHM)
    else:
        tree = example_tree([Example(np.array(ids, np.int32), np.array(flag, np.bool_)) for ids, flag in sequences], "tokens")
    (piece,) = cut(tree, shapes_up_to(128)[-1])
    microbatch = pack(plan_microbatch([ReadyRun("run", SLOT, (piece,), 0)], shapes_up_to(128), 128))
    config, base = tiny()
    arrays, slots = to_device(microbatch), load_slot(empty_state(config, 3, 8), SLOT, nonzero_state(0, spec("run")))
    outputs, _ = score(Model(base.stacked, slots.params, jnp.zeros(3).at[SLOT].set(2.0)), arrays, config)
    (cotangent_M, *_), _ = loss_cotangents(outputs, loss_inputs(microbatch), loss_table({SLOT: LossSpec(kind=kind, sequence_mask_c=0.0)}, 3))

    def loss(logits_TV):
        log_p_MV = jax.nn.log_softmax(logits_TV[arrays.entries.predict_from_M] / arrays.entries.temperature_M[:, None])
        return (cotangent_M * log_p_MV[jnp.arange(len(cotangent_M)), arrays.entries.target_M]).sum()

    gradient_TV = np.asarray(jax.grad(loss)(jnp.asarray(np.random.default_rng(0).normal(size=(128, config.vocab_size)), jnp.float32)))
    rows = rows_of_flags(tree, sequences)
    assert len(rows[False]) >= 2 + 2 * 3 + 2 * 2
    assert not rows[False] & rows[True]
    assert (gradient_TV[sorted(rows[False])] == 0.0).all()
    assert (np.abs(gradient_TV[sorted(rows[True])]).max(axis=1) > 0).all()
