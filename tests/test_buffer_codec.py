"""A stored group comes back equal, bit for bit; the order of tasks is a permutation that needs no memory."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.buffer.codec import decode_group, encode_group
from noria.buffer.cursor import task_at
from noria.errors import StateConflictError
from noria.types import Completion, Episode, EpisodeGroup, Task, Turn

token_ids = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def turns(draw, logprobs):
    size = draw(st.integers(0, 6))
    completion = Completion(
        tuple(draw(st.lists(token_ids, min_size=size, max_size=size))),
        tuple(draw(st.lists(logprobs, min_size=size, max_size=size))),
        tuple(draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size))),
        draw(st.sampled_from(["stop", "length"])),
        is_trainable=draw(st.booleans()),
        num_mixed=draw(st.integers(0, size)),
    )
    return Turn(tuple(draw(st.lists(token_ids, max_size=6))), completion, draw(finite), draw(st.none() | token_ids))


@st.composite
def groups(draw):
    logprobs = draw(st.sampled_from([st.floats(max_value=0, allow_nan=False, width=32), finite]))
    parts = st.lists(st.tuples(st.text(), finite), max_size=2).map(tuple)
    episode = st.builds(Episode, st.text(), st.integers(0, 9), st.lists(turns(logprobs), max_size=3).map(tuple), finite, st.booleans(), parts)
    tasks = st.builds(Task, st.integers(0, 2**62), st.integers(0, 2**63 - 1))
    return EpisodeGroup(draw(st.text()), draw(st.text()), draw(tasks), tuple(draw(st.lists(episode, max_size=3))), draw(st.integers(0, 8)))


@given(groups())
def test_a_group_comes_back_equal(group):
    assert decode_group(encode_group(group)) == group


def test_groups_that_were_stored_before_episodes_could_fork_still_decode():
    group = EpisodeGroup("g", "r", Task(0, 0), (Episode("e", 0, (Turn((1, 2), Completion((3,), (-0.5,), (7,), "stop"), 1.0),), 1.0),))
    header = (
        b'{"group_id":"g","run_id":"r","task":[0,0],"num_failed":0,"is_float32":true,"num_observed":2,"num_sampled":1,'
        b'"episodes":[["e",0,1.0,false,[],[[2,1,"stop",1.0]]]]}'
    )
    arrays = b"".join(np.array(values, dtype).tobytes() for values, dtype in (([1, 2], "<i4"), ([3], "<i4"), ([7], "<i4"), ([-0.5], "<f4")))
    stored = b"NGR1" + len(header).to_bytes(4, "little") + header + arrays
    assert decode_group(stored) == group
    assert encode_group(group) == stored, "an episode that did not fork is stored as before"


@given(st.none() | st.integers(0, 2), st.booleans(), st.integers(0, 1))
def test_a_turns_header_ends_with_what_it_has_that_others_have_not(keep, is_trainable, num_mixed):
    completion = Completion((3,), (-0.5,), (7,), "stop", is_trainable=is_trainable, num_mixed=num_mixed)
    group = EpisodeGroup("g", "r", Task(0, 0), (Episode("e", 0, (Turn((1, 2), completion, 1.0, keep),), 1.0),))
    data = encode_group(group)
    assert decode_group(data) == group
    rare = json.loads(data[8 : 8 + int.from_bytes(data[4:8], "little")])["episodes"][0][-1][0][4:]
    assert rare == [keep, is_trainable, num_mixed][: 3 if num_mixed else 2 if not is_trainable else 1 if keep is not None else 0]


def test_float32_logprobs_take_four_bytes_and_stay_exact():
    values = tuple(float(v) for v in -np.random.default_rng(0).exponential(size=1000).astype(np.float32))
    group = EpisodeGroup("g", "r", Task(0, 0), (Episode("e", 0, (Turn((), Completion((1,) * 1000, values, (0,) * 1000, "stop"), 1.0),), 1.0),))
    data = encode_group(group)
    assert len(data) < 12 * 1000 + 500
    assert decode_group(data).episodes[0].turns[0].completion.behavior_logprobs == values


def test_bytes_of_another_version_are_refused():
    with pytest.raises(StateConflictError, match="another version"):
        decode_group(b"XXXX" + encode_group(EpisodeGroup("g", "r", Task(0, 0), ()))[4:])


@given(st.integers(1, 300), st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_each_epoch_visits_every_task_once(num_tasks, seed, epoch):
    positions = range(epoch * num_tasks, (epoch + 1) * num_tasks)
    assert sorted(task_at(p, num_tasks=num_tasks, seed=seed).index for p in positions) == list(range(num_tasks))


def test_epochs_runs_and_positions_differ():
    def order(seed: int, epoch: int) -> list[int]:
        return [task_at(epoch * 50 + p, num_tasks=50, seed=seed).index for p in range(50)]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert len({task_at(p, num_tasks=5, seed=seed).seed for p in range(100) for seed in range(3)}) == 300


def test_the_first_task_is_spread_evenly():
    counts = Counter(task_at(0, num_tasks=10, seed=seed).index for seed in range(5000))
    chi_squared = sum((counts[i] - 500) ** 2 / 500 for i in range(10))
    assert chi_squared < 27.9, "p < 0.001 with nine degrees of freedom"


def test_the_order_is_the_same_on_every_machine():
    assert [task_at(p, num_tasks=1000, seed=7).index for p in range(5)] == [667, 959, 137, 51, 904]


def test_a_huge_number_of_tasks_costs_nothing():
    size = 2**62
    indices = [task_at(p, num_tasks=size, seed=1).index for p in range(100)]
    assert len(set(indices)) == 100
    assert math.isclose(float(np.mean(indices)) / size, 0.5, abs_tol=0.15)
