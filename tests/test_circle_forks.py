"""Episodes that fork: the packed tree's gradient is the sum of those of its paths, each computed alone, and pages survive a fork."""

import dataclasses

import jax
import numpy as np
from learner_builders import ALGORITHM, nonzero_state, random_groups, spec, tiny
from sampler_builders import adapter, engine, merged, reference_logprobs, request, run
from sampler_builders import tiny as sampler_tiny

from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, loss_cotangents, loss_inputs, pull, score, to_device
from noria.rl.losses import loss_table
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.tree import build_tree
from noria.types import Entries, EpisodeGroup, Piece

SLOT, SHAPES = 1, shapes_up_to(256)[-1:]


def forked(groups, seed):
    """The same episodes, with turns that keep a random part of the path before them."""
    rng = np.random.default_rng(seed)

    def fork(episode):
        turns, length = [], 0
        for turn in episode.turns:
            keep = int(rng.integers(1, length)) if length else None
            turns.append(dataclasses.replace(turn, keep=keep))
            length = (keep or 0) + len(turn.observation_ids) + len(turn.completion.sampled_ids)
        return dataclasses.replace(episode, turns=tuple(turns))

    return [dataclasses.replace(group, episodes=tuple(map(fork, group.episodes))) for group in groups]


def gradient(pieces, state, run_spec):
    config, base = tiny()
    slots = load_slot(empty_state(config, 3, 8), SLOT, state)
    scale_A = jax.numpy.zeros(3).at[SLOT].set(run_spec.lora.scale)
    accumulators, done = slots.gradient, 0
    while done < len(pieces):
        plan = plan_microbatch([ReadyRun("run", SLOT, pieces, done)], SHAPES, SHAPES[-1].num_positions)
        done += len(plan.pieces)
        microbatch = pack(plan)
        arrays = to_device(microbatch)
        outputs, residuals = score(Model(base.stacked, slots.params, scale_A), arrays, config)
        cotangent, _ = loss_cotangents(outputs, loss_inputs(microbatch), loss_table({SLOT: run_spec.loss}, 3))
        accumulators = pull(Model(base.stacked, slots.params, scale_A), arrays, residuals, cotangent, accumulators, config=config)
    return jax.tree.leaves(jax.tree.map(lambda leaf: leaf[:, SLOT], accumulators))


def paths_one_by_one(tree):
    """Each sequence of the tree as a piece of its own, which is one causal row and shares nothing: read off with the mask rule alone."""
    for sequence in np.unique(tree.entries.sequence_M):
        chosen = np.flatnonzero(tree.entries.sequence_M == sequence)
        last = tree.entries.predict_from_M[chosen[-1]]
        seen = [j for j in range(last + 1) if last < tree.end_T[j]]
        entries = Entries(**{f.name: getattr(tree.entries, f.name)[chosen] for f in dataclasses.fields(Entries)})
        entries = dataclasses.replace(entries, predict_from_M=np.searchsorted(seen, entries.predict_from_M).astype(np.int32))
        length = len(seen)
        yield Piece(tree.ids_T[seen], np.arange(length, dtype=np.int32), np.full(length, length, np.int32), entries)


def test_the_gradient_of_forked_episodes_is_that_of_their_paths_one_at_a_time():
    groups: list[EpisodeGroup] = forked(random_groups(5, num_groups=2, turns=3), seed=5)
    assert all(len(e.paths) == 3 for g in groups for e in g.episodes)
    run_spec = spec("run")
    state = nonzero_state(5, run_spec)
    tree, _ = build_tree(groups, ALGORITHM)
    alone = tuple(paths_one_by_one(tree))
    assert sum(len(p.ids_T) for p in alone) > 2 * len(tree), "the case must share positions"
    got, want = gradient(cut(tree, SHAPES[-1]), state, run_spec), gradient(alone, state, run_spec)
    for got_leaf, want_leaf in zip(got, want, strict=True):
        assert np.linalg.norm(want_leaf) > 0
        assert np.linalg.norm(got_leaf - want_leaf) <= 1e-5 * np.linalg.norm(want_leaf)


def test_after_a_fork_the_common_prefix_is_not_prefilled_again_and_numbers_are_right():
    sampler, weights = engine(), adapter(1)
    sampler.publish("run", 0, weights, 1.0)
    first = request(tuple(range(10, 60)), run="run", episode="e", max_tokens=12)
    (one,) = run(sampler, first)
    path = first.prompt_ids + one.sampled_ids
    sampler.publish("run", 1, weights, 1.0)  # from here on only the episode itself knows its pages
    for keep in (55, 40, 8):
        before = sampler.counts.num_prefilled
        forked_prompt = (*path[:keep], 200, 201, 202)
        again = request(forked_prompt, run="run", episode="e", max_tokens=12, seed=keep)
        (completion,) = run(sampler, again)
        assert sampler.counts.num_prefilled - before == 2, "the new ids but the last, which is the first decode input"
        want = reference_logprobs(merged(sampler_tiny()[1], weights, 1.0), again.prompt_ids, completion, 1.0)
        np.testing.assert_allclose(completion.behavior_logprobs, want, atol=1e-4)
    assert sampler.num_held_pages == 0
