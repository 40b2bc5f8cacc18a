"""A batch's groups are settled as what became of them: trained if and only if one of their tokens is in the tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import AlgorithmConfig
from noria.learner.batches import BatchPlanner
from noria.rl.credit import has_signal
from noria.rl.packing import microbatch_shape
from noria.rl.tree import build_tree
from noria.service.batch import prepare
from noria.types import Completion, Episode, EpisodeGroup, Task, Turn

PLANNER = BatchPlanner(microbatch_shape(256))


def group_of(number, episodes):
    """episodes: (reward, is truncated, temperature) each."""

    def episode(member, reward, truncated, temperature):
        completion = Completion((member + 3, 9), (-1.0, -1.0), (0, 0), "length" if truncated else "stop")
        return Episode(f"g{number}/{member}", member, (Turn((1, 2 + number), completion, temperature),), reward, truncated)

    return EpisodeGroup(f"g{number}", "run", Task(number, 0), tuple(episode(m, *made) for m, made in enumerate(episodes)))


CUT, WHOLE, GREEDY = (1.0, True, 1.0), (1.0, False, 1.0), (1.0, False, 0.0)


@pytest.mark.parametrize(
    ("truncated", "episodes", "is_trained"),
    [
        ("penalize", [WHOLE, CUT], True),
        ("keep", [WHOLE, CUT], False),
        ("mask", [CUT, (0.0, True, 1.0)], False),
        ("mask", [WHOLE, (0.0, True, 1.0)], True),
        ("keep", [GREEDY, (0.0, False, 0.0)], False),
    ],
)
def test_a_group_is_settled_by_its_entries_and_not_by_its_rewards(truncated, episodes, is_trained):
    batch = prepare([group_of(0, episodes)], AlgorithmConfig(steps=1, truncated=truncated), PLANNER)
    assert (batch.trained, batch.untrained) == ((("g0",), ()) if is_trained else ((), ("g0",)))
    assert bool(batch.pieces) == is_trained


EPISODES = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([0.0, 1.0]))
GROUPS = st.lists(st.lists(EPISODES, min_size=2, max_size=4), min_size=1, max_size=4)


@given(GROUPS, st.sampled_from(["mask", "penalize", "keep"]), st.sampled_from(["skip", "train", "resample"]))
def test_trained_are_exactly_the_groups_that_would_train_alone(made, truncated, zero_signal):
    algorithm = AlgorithmConfig(steps=1, truncated=truncated, zero_signal=zero_signal)
    groups = [group_of(number, episodes) for number, episodes in enumerate(made)]
    batch = prepare(groups, algorithm, PLANNER)
    alone = [group.group_id for group in groups if len(build_tree([group], algorithm)[0].entries)]
    assert list(batch.trained) == alone
    assert sorted(batch.trained + batch.untrained) == [group.group_id for group in groups]


@given(GROUPS, st.sampled_from(["mask", "penalize", "keep"]))
def test_a_group_has_signal_exactly_if_it_would_train(made, truncated):
    """Under "resample" it decides before the batch is formed what the tree decides under "skip": every group of such a batch trains."""
    algorithm = AlgorithmConfig(steps=1, truncated=truncated, zero_signal="resample")
    groups = [group_of(number, episodes) for number, episodes in enumerate(made)]
    chosen = [group for group in groups if has_signal(group, algorithm)]
    assert prepare(groups, algorithm, PLANNER).trained == tuple(group.group_id for group in chosen)
    assert prepare(chosen, algorithm, PLANNER).untrained == ()
