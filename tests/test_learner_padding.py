"""Cases 11 and 12: an end-of-text id that is the padding id is a token like any other; padding is known by position, never by value."""

import jax
import jax.numpy as jnp
import numpy as np
from learner_builders import ALGORITHM, drain, make_learner, nonzero_state, spec, tiny

from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, loss_cotangents, loss_inputs, pull, score, to_device
from noria.model.lora import MODULES
from noria.rl.losses import loss_table
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.tree import build_tree
from noria.types import Completion, Episode, EpisodeGroup, Task, Turn

PAD = 0
"""What `pack` pads with, and here the end-of-text id too: at ends of turns and in mid-sequence, in prompts and alone."""


def episode(member, reward, *turns):
    parts = tuple(Turn(seen, Completion(said, (-5.0,) * len(said), (0,) * len(said), "stop"), 1.0) for seen, said in turns)
    return Episode(f"e{member}", member, parts, reward)


def group(*completions):
    """No reward is the mean, so that no advantage is 0 and every token trains."""
    episodes = (episode(n, float(n**2), ((5, PAD, 7), said)) for n, said in enumerate(completions))
    return EpisodeGroup("g", "run", Task(0, 0), tuple(episodes))


def microbatch_of(groups):
    pieces = cut(build_tree(groups, ALGORITHM)[0], shapes_up_to(256)[-1])
    return pack(plan_microbatch([ReadyRun("run", 1, pieces)], shapes_up_to(256), 256)), pieces


def gradient_of(microbatch, chosen_M):
    """Cotangents of all entries, and the adapter's gradient by the chosen ones alone."""
    config, base = tiny()
    state = load_slot(empty_state(config, 2, 8), 1, nonzero_state(1, spec("run")))
    arrays, scale_A = to_device(microbatch), np.array([0.0, 2.0], np.float32)
    outputs, residuals = score(Model(base.stacked, state.params, scale_A), arrays, config)
    cotangents, _ = loss_cotangents(outputs, loss_inputs(microbatch), loss_table({1: spec("run").loss}, 2))
    alone = jax.tree.map(lambda d_M: jnp.where(chosen_M, d_M, 0), cotangents)
    gradient = pull(Model(base.stacked, state.params, scale_A), arrays, residuals, alone, state.gradient, config=config)
    return np.asarray(cotangents.d_learner_logprobs_M), [float(np.abs(gradient[side][module][:, 1]).sum()) for side in "ab" for module in MODULES]


MIXED = [group((9, 8, PAD), (PAD, 9, PAD), (PAD,)), group((PAD, PAD, PAD), (4,), (4, PAD))]


def test_every_sampled_end_of_text_keeps_its_weight_and_only_the_tail_is_padding():
    microbatch, _ = microbatch_of(MIXED)
    sampled = [i for g in MIXED for e in g.episodes for turn in e.turns for i in turn.completion.sampled_ids]
    entries, num = microbatch.entries, microbatch.num_entries
    assert sorted(entries.target_M[:num]) == sorted(sampled)
    assert (entries.weight_M[:num] == np.float32(1 / len(sampled))).all()
    assert not entries.weight_M[num:].any()
    cotangent_M, _ = gradient_of(microbatch, entries.target_M == PAD)
    is_end_M = (entries.target_M == PAD) & (np.arange(len(entries)) < num)
    assert is_end_M.sum() == sampled.count(PAD)
    assert (cotangent_M[is_end_M] != 0).all()
    assert not cotangent_M[num:].any()


def test_each_end_of_text_alone_has_a_gradient_in_every_module():
    microbatch, _ = microbatch_of(MIXED)
    entries = microbatch.entries
    ends = np.flatnonzero((entries.target_M == PAD) & (entries.weight_M > 0))
    assert len(ends) > 4
    for index in ends:
        _, sums = gradient_of(microbatch, np.arange(len(entries)) == index)
        assert all(total > 0 for total in sums)


def test_a_batch_of_nothing_but_end_of_text_trains():
    _, pieces = microbatch_of([group((PAD,), (PAD, PAD), (PAD, PAD, PAD))])
    learner = make_learner()
    learner.load_run(spec("run"), nonzero_state(1, spec("run")))
    future = learner.train("run", pieces)
    drain(learner)
    assert future.result(0).num_entries == 6
    assert future.result(0).grad_norm > 0


def test_ends_of_text_between_turns_train_and_what_was_only_observed_does_not():
    turns = (((5, PAD), (9, PAD)), ((PAD, 6), (PAD,)), ((PAD, PAD), (8, PAD)))
    groups = [EpisodeGroup("g", "run", Task(0, 0), (episode(0, 1.0, *turns), episode(1, 0.0, *turns[:1])))]
    microbatch, _ = microbatch_of(groups)
    entries = microbatch.entries
    long = np.flatnonzero((entries.sequence_M == np.bincount(entries.sequence_M[: microbatch.num_entries]).argmax()) & (entries.weight_M > 0))
    assert entries.target_M[long].tolist() == [9, PAD, PAD, 8, PAD]
    assert entries.predict_from_M[long].tolist() == [1, 2, 5, 8, 9]
