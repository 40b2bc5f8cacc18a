"""Builders for learner tests: random recorded groups on the tiny model, and a learner that runs without a device thread."""

import functools

import jax
import numpy as np

from noria.clock import RealClock
from noria.config import AlgorithmConfig, LearnerConfig
from noria.learner.learner import Learner
from noria.learner.operations import RunSpec
from noria.model import lora
from noria.model.placement import place
from noria.model.weights import load_base
from noria.observe import SpanRecorder
from noria.rl.packing import cut, shapes_up_to
from noria.rl.tree import build_tree
from noria.types import Completion, Episode, EpisodeGroup, LoraSpec, LossSpec, OptimizerSpec, Task, Turn


@functools.cache
def tiny():
    loaded = load_base("tiny")
    return loaded.config, place(loaded.params)


def random_groups(seed, *, num_groups=3, group_size=4, prompt=20, answer=6, vocab=250, turns=1):
    """Groups of episodes over a small alphabet, so that episodes share sampled tokens by chance, with a header shared by all groups."""
    rng = np.random.default_rng(seed)
    header = tuple(int(i) for i in rng.integers(0, vocab, prompt // 2))
    groups = []
    for g in range(num_groups):
        observation = header + tuple(int(i) for i in rng.integers(0, vocab, rng.integers(1, prompt)))
        episodes = []
        for member in range(group_size):
            parts, first = [], observation
            for _ in range(turns):
                ids = tuple(int(i) for i in rng.integers(0, 3, rng.integers(1, answer + 1)))
                logprobs = tuple(float(np.float32(x)) for x in -5 - rng.random(len(ids)))
                parts.append(Turn(first, Completion(ids, logprobs, (0,) * len(ids), "stop"), float(rng.choice([0.7, 1.0]))))
                first = tuple(int(i) for i in rng.integers(0, vocab, 2))
            episodes.append(Episode(f"g{seed}.{g}.{member}", member, tuple(parts), float(rng.integers(0, 2) + (member == 0) * 0.5)))
        groups.append(EpisodeGroup(f"g{seed}.{g}", "run", Task(g, 0), tuple(episodes)))
    return groups


def branching_groups(seed, *, num_groups=3, group_size=4, header=70, own=60, answer=12, turns=3, vocab=250):
    """Groups below one header, whose episodes go on below one another: each but a group's first repeats turns of an earlier one, a part of one too,
    before it goes its own way, or ends there. So several entries stand on one position, and trained tokens in inner nodes."""
    rng = np.random.default_rng(seed)

    def some(count):
        return tuple(int(i) for i in rng.integers(0, vocab, count))

    def turn(observation, sampled):
        logprobs = tuple(float(np.float32(x)) for x in -5 - rng.random(len(sampled)))
        return Turn(observation, Completion(sampled, logprobs, (0,) * len(sampled), "stop"), float(rng.choice([0.7, 1.0])))

    first, groups = some(header), []
    for g in range(num_groups):
        observation, told = first + some(int(rng.integers(own // 2, own))), []
        for member in range(group_size):
            parts = [(observation if n == 0 else some(int(rng.integers(1, 6))), some(int(rng.integers(2, answer)))) for n in range(turns)]
            if member:
                earlier = told[int(rng.integers(0, member))]
                num_repeated = int(rng.integers(0, len(earlier)))
                seen, sampled = earlier[num_repeated]
                of_both, num_turns = sampled[: int(rng.integers(1, len(sampled) + 1))], int(rng.integers(1, turns + 1))
                parts = [*earlier[:num_repeated], (seen, of_both + parts[num_repeated][1]), *parts[num_repeated + 1 :]][:num_turns]
            told.append(parts)
        members = [tuple(turn(*part) for part in parts) for parts in told]
        episodes = (Episode(f"g{seed}.{g}.{m}", m, parts, float(rng.random())) for m, parts in enumerate(members))
        groups.append(EpisodeGroup(f"g{seed}.{g}", "run", Task(g, 0), tuple(episodes)))
    return groups


ALGORITHM = AlgorithmConfig(steps=1, group_size=4, groups_per_batch=3, sequence_mask_c=0.0)


def pieces_of(groups, max_positions=256, algorithm=ALGORITHM):
    tree, _ = build_tree(groups, algorithm)
    return cut(tree, shapes_up_to(max_positions)[-1])


def spec(run_id, rank=4, learning_rate=1e-2, weight_decay=0.1, alpha=8.0):
    return RunSpec(run_id, LoraSpec(rank, alpha), OptimizerSpec(learning_rate, weight_decay=weight_decay), LossSpec(sequence_mask_c=0.0))


def nonzero_state(seed, run_spec, max_rank=8):
    """A run's initial state with b filled too, so that every gradient is non-zero."""
    config, _ = tiny()
    state = lora.initial_state(config, run_spec.lora, max_rank, seed)
    rng = np.random.default_rng(seed)
    for leaf in state.params["b"].values():
        leaf[:, : run_spec.lora.rank] = rng.normal(size=leaf[:, : run_spec.lora.rank].shape) * 0.05
    return state


def make_learner(max_positions=256, num_slots=4, max_rank=8, spill_dir=None, **changes):
    config, base = tiny()
    clock = RealClock()
    settings = LearnerConfig(**{"max_positions": max_positions, "num_slots": num_slots, "rank_classes": (max_rank,), **changes})
    return Learner(base.stacked, config, settings, spans=SpanRecorder(clock), clock=clock, wake=lambda: None, max_stall_s=60.0, spill_dir=spill_dir)


def state_of(learner, run_id):
    """The run's state on the host, after all that it has queued."""
    saved = learner.save(run_id)
    drain(learner)
    return saved.result(0)


def drain(learner):
    while learner.has_work:
        learner.step()


def same_bytes(a, b):
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def assert_close(got, want, tolerance=1e-5):
    """Every leaf, by its norm; none is zero."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
