"""The replay executor against one packed pass (which other tests hold against naive gradients), and against naive gradients where the prefix is
constant: each episode alone, dense attention, plain autodiff. What its visits have alive, by the compiler's figures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import ALGORITHM, nonzero_state, random_groups, same_bytes, spec, tiny
from test_learner_gradients import dense_attention, packed_gradient

from noria.learner.batches import Costs, of_walk
from noria.learner.executors import Job, Walk
from noria.learner.memory import packed_bytes, replay_bytes, slot_bytes
from noria.learner.operations import ForwardBackward
from noria.learner.optimizer import empty_state, load_slot
from noria.learner.replay import Replay, gradient_blocks, path_blocks
from noria.learner.step import Model, extend_path, pull, pull_chunk, score, score_chunk, to_device
from noria.model.attention import SPAN, Path, PathGradient, PathLayer, path_backward
from noria.model.config import ModelConfig
from noria.model.lora import RowAdapters, empty_slots
from noria.model.rope import plain_rope
from noria.model.transformer import block, embed, rotary_angles, unembed
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
            job.evaluate((1 << 12,), 3)
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
    assert sum(len(np.unique(chunk.piece.entries.sequence_M)) for chunk in plan.chunks) > len(np.unique(tree.entries.sequence_M))
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
    trees = [long_prompt(900, members) for members in (2, 4, 16)]
    assert len({path_blocks(plan_replay(tree, 128), microbatch_shape(128)) for tree in trees}) == 1


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


def figures(jitted, *arguments, **named):
    """The compiler's figures of a program."""
    return jitted.lower(*arguments, **named).compile().memory_analysis()


def compiled_bytes(found):
    """Arguments, temporaries, and results that reuse nothing."""
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


SMOLLM2 = ModelConfig("smollm2's shape", 30, 576, 1536, 9, 3, 64, 49152, plain_rope(1e5, 64), 1e-5, 2048, True)
BASES = {"tiny": tiny()[0], "smollm2": SMOLLM2, "4 layers of smollm2": dataclasses.replace(SMOLLM2, num_layers=4)}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def some_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class Programs:
    """The programs of a pass over one axis, as shapes: nothing is allocated. path: blocks of the path's axis, 0 for a packed pass; gradient: of its
    gradient's, None for as many."""

    def __init__(self, config, num_positions, path=0, gradient=None):
        self.config, self.shape, self.num_blocks, num_slots, rank = config, microbatch_shape(num_positions), path, 3, 8
        params = {name: floats(*shape) for name, shape in config.top_shapes.items()}
        params["layers"] = {name: floats(config.num_layers, *shape) for name, shape in config.layer_shapes.items()}
        self.slots = jax.eval_shape(lambda: empty_slots(config, num_slots, rank))
        self.sizes = {"base": some_bytes(params), "slots": slot_bytes(config, num_slots, rank)}
        model, arrays = Model(params, self.slots, floats(num_slots)), to_device(pack(MicrobatchPlan(self.shape, ())))
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        half, owed = (floats(config.num_layers, blocks, config.num_kv_heads, TILE, config.head_dim) for blocks in (path, gradient or path))
        self.path = Path(half, half, jax.ShapeDtypeStruct((path, TILE), bool), scalar) if path else None
        self.gradient = PathGradient(owed, owed, scalar, scalar)
        self.score = (score_chunk, model, arrays, self.path, config) if path else (score, model, arrays, config)
        outputs, residuals, *self.keys_values = jax.eval_shape(lambda *a: self.score[0](*a, config), *self.score[1:-1])
        more = {"path": self.path, "path_gradient": self.gradient} if path else {}
        self.pull = (pull_chunk if path else pull, model, arrays, residuals, TokenCotangents(*outputs), self.slots), {**more, "config": config}

    def alive_bytes(self):
        """The most that score or pull has alive, what the compiler does not see of it included."""
        beside_score = some_bytes(self.slots) + (some_bytes(self.gradient) if self.num_blocks else 0)
        return max(compiled_bytes(figures(*self.score)) + beside_score, compiled_bytes(figures(*self.pull[0], **self.pull[1])))

    def estimate(self):
        """What the learner takes it for."""
        if not self.num_blocks:
            return packed_bytes(self.config, self.shape, **self.sizes)
        return replay_bytes(self.config, self.shape, self.num_blocks, **self.sizes)


SLOW = [pytest.param("smollm2", 512, 72, marks=pytest.mark.slow), pytest.param("4 layers of smollm2", 1024, 0, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("base", "num_positions", "path"), [("tiny", 256, 0), ("tiny", 1024, 0), ("tiny", 256, 40), ("smollm2", 512, 0), *SLOW])
def test_memory_is_estimated_within_15_percent_of_the_compilers_figure(base, num_positions, path):
    programs = Programs(BASES[base], num_positions, path)
    assert programs.estimate() == pytest.approx(programs.alive_bytes(), rel=0.15)


def test_entering_a_node_copies_neither_the_path_nor_its_gradient():
    programs = Programs(BASES["tiny"], 128, 40)
    found = figures(extend_path, programs.path, programs.gradient, programs.keys_values[0], jax.ShapeDtypeStruct((128,), bool))
    assert found.alias_size_in_bytes == some_bytes((programs.path, programs.gradient))
    assert found.temp_size_in_bytes < some_bytes(programs.keys_values)


def long_prompt(positions, members):
    """The tree of one group with a long prompt."""
    (group,) = random_groups(2, num_groups=1, group_size=2, prompt=positions, answer=3)
    first = group.episodes[0]
    episodes = tuple(
        dataclasses.replace(first, episode_id=str(m), member=m, reward=float(m % 2), turns=(branch(first.turns[0], m),)) for m in range(members)
    )
    return build_tree([dataclasses.replace(group, episodes=episodes)], ALGORITHM)[0]


def test_a_constant_prefix_has_no_gradient_in_memory():
    tree = long_prompt(3000, 4)
    shape, sizes = microbatch_shape(128), {}
    for mode in ("exact", "stop"):
        plan = plan_replay(tree, 128, mode)
        sizes[mode] = Programs(BASES["tiny"], 128, path_blocks(plan, shape), gradient_blocks(plan, shape))
    assert sizes["stop"].gradient.k_LSKCH.shape[1] <= shape.num_tiles + 2 * SPAN
    saved = sizes["exact"].alive_bytes() - sizes["stop"].alive_bytes()
    assert saved > 0.75 * some_bytes(sizes["exact"].gradient)


def test_a_constant_prefix_is_pulled_through_with_three_products_a_span_instead_of_five():
    config, programs = BASES["tiny"], Programs(BASES["tiny"], 128, 40)
    q = floats(128, config.num_heads, config.head_dim)
    before, lse = PathLayer(programs.path, jax.ShapeDtypeStruct((), jnp.int32)), floats(128, config.num_heads)
    made = jax.make_jaxpr(path_backward)(q, before, (q, lse), q, programs.gradient).jaxpr
    loops = [equation.params["body_jaxpr"].jaxpr for equation in made.eqns if equation.primitive.name == "while"]
    products = [sum(equation.primitive.name == "dot_general" for equation in body.eqns) for body in loops]
    assert products == [3, 5], "over the constant prefix, and over the rest"


def test_a_gradient_from_the_constant_prefix_on_has_the_bits_of_one_of_the_whole_path():
    state, loss = nonzero_state(7, spec("run")), LossSpec(sequence_mask_c=0.0)
    tree, _ = build_tree(random_groups(7, **CASES["long prompts"]), ALGORITHM)
    plan, shape = plan_replay(tree, 128, "stop"), microbatch_shape(128)
    assert gradient_blocks(plan, shape) < path_blocks(plan, shape)
    own, one = (walk(tree, plan, shape, state, loss=loss, **each)[0] for each in ({}, {"num_blocks": 32}))
    assert same_bytes(own, one)


def test_a_walk_whose_chunks_do_not_fit_its_path_is_none():
    tree = long_prompt(600, 2)
    plan, shape = plan_replay(tree, 128), microbatch_shape(128)
    last = max(chunk.first_block for chunk in plan.chunks)
    for num_blocks in (last, last + shape.num_tiles - 1):
        with pytest.raises(AssertionError):
            Replay(plan, shape, tiny()[0], judge=None, num_blocks=num_blocks)
    Replay(plan, shape, tiny()[0], judge=None, num_blocks=last + shape.num_tiles)
    with pytest.raises(AssertionError):
        Replay(plan_replay(tree, 256), shape, tiny()[0], judge=None)
